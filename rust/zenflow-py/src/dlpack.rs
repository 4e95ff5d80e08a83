//! `DLPack`'s C exchange: what a tensor's memory is, from the framework's own function, without a Python call.
//!
//! A tensor type that takes part has a capsule in its attribute `__dlpack_c_exchange_api__`: a table of C functions,
//! of which one fills a [`DlTensor`] that borrows from the tensor (some tens of nanoseconds, where reading the same
//! from attributes takes microseconds). Nothing is linked, and where the capsule is missing (torch before 2.10) or of
//! another major version, there is no [`Exchange`] and callers read attributes.
//!
//! The structures are those of `DLPack` 1.3, `dlpack.h`.

use std::ffi::{c_int, c_void};

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyCapsuleMethods};

/// The major version whose structures these are.
const MAJOR: u32 = 1;

/// `kDLCPU`.
pub const CPU: i32 = 1;

/// A device.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct DlDevice {
    pub device_type: i32,
    pub device_id: i32,
}

/// An element's type: its kind, its bits, and elements a vector.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct DlDataType {
    pub code: u8,
    pub bits: u8,
    pub lanes: u16,
}

/// A tensor's memory; all pointers belong to the tensor.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct DlTensor {
    pub data: *mut c_void,
    pub device: DlDevice,
    pub ndim: i32,
    pub dtype: DlDataType,
    pub shape: *const i64,
    /// In elements; null for a contiguous tensor before `DLPack` 1.2.
    pub strides: *const i64,
    pub byte_offset: u64,
}

#[repr(C)]
struct Version {
    major: u32,
    minor: u32,
}

#[repr(C)]
struct Api {
    version: Version,
    _previous: *const Api,
    _managed_tensor_allocator: *const c_void,
    _managed_tensor_from_py_object: *const c_void,
    _managed_tensor_to_py_object: *const c_void,
    /// May be null.
    fill: Option<unsafe extern "C" fn(*mut c_void, *mut DlTensor) -> c_int>,
    _current_work_stream: *const c_void,
}

/// A framework's function that fills a [`DlTensor`].
#[derive(Clone, Copy)]
pub struct Exchange {
    fill: unsafe extern "C" fn(*mut c_void, *mut DlTensor) -> c_int,
}

impl Exchange {
    /// That of a tensor type, if it takes part.
    pub fn of(class: &Bound<'_, PyAny>) -> Option<Self> {
        let capsule = class.getattr_opt(intern!(class.py(), "__dlpack_c_exchange_api__")).ok()??;
        let capsule = capsule.cast::<PyCapsule>().ok()?;
        let api = capsule.pointer_checked(Some(c"dlpack_exchange_api")).ok()?.cast::<Api>();
        // SAFETY: a capsule of this name holds such a table, whose first field says how to read the rest, and the
        // framework keeps it for the life of the process.
        let api = unsafe { api.as_ref() };
        if api.version.major != MAJOR {
            return None;
        }
        Some(Self { fill: api.fill? })
    }

    /// The memory of `tensor`; None where the framework can't say.
    ///
    /// What the answer points to is valid while the tensor lives and nobody resizes it; so no longer than this thread
    /// holds the GIL.
    ///
    /// # Safety
    ///
    /// `tensor` is an instance of the type that [`of`](Self::of) was given.
    pub unsafe fn tensor(self, tensor: &Bound<'_, PyAny>) -> Option<DlTensor> {
        let mut out = std::mem::MaybeUninit::<DlTensor>::uninit();
        // SAFETY: the object is a tensor of that framework, by the caller's promise, and `out` has room.
        if unsafe { (self.fill)(tensor.as_ptr().cast(), out.as_mut_ptr()) } != 0 {
            // The reason is told by whoever reads the attributes.
            drop(PyErr::take(tensor.py()));
            return None;
        }
        // SAFETY: zero says that it was filled.
        Some(unsafe { out.assume_init() })
    }
}
