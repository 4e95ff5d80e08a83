//! CPU tensors, checked: address, dtype and length, and the object that keeps them alive.
//!
//! The core works on addresses. Everything that makes an address trustworthy is checked here: the tensor lies in host
//! memory, is strided and dense (its elements fill one run of memory, in whatever order), and has a dtype that the
//! kernels know. The Python object is kept as long as the address is in use.
//!
//! A [`Reader`] reads a tensor by torch's C exchange ([`crate::dlpack`]) where it can, else attribute by attribute.

use pyo3::exceptions::PyTypeError;
use pyo3::ffi::PyTypeObject;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyList;
use zenflow_core::dtype::{Dtype, StateDtype};

use crate::dlpack::{self, DlDataType, Exchange};
use crate::error::invalid;

/// The torch objects that tensors are compared with.
struct Torch {
    tensor: Py<PyAny>,
    parameter: Py<PyAny>,
    increment_version: Py<PyAny>,
    strided: Py<PyAny>,
    float32: Py<PyAny>,
    bfloat16: Py<PyAny>,
    float16: Py<PyAny>,
    uint8: Py<PyAny>,
    int16: Py<PyAny>,
    int64: Py<PyAny>,
}

static TORCH: PyOnceLock<Torch> = PyOnceLock::new();

fn torch(py: Python<'_>) -> PyResult<&'static Torch> {
    TORCH.get_or_try_init(py, || {
        let module = PyModule::import(py, "torch")?;
        let get = |name: &str| module.getattr(name).map(Bound::unbind);
        let graph = module.getattr("autograd")?.getattr("graph")?;
        Ok(Torch {
            tensor: get("Tensor")?,
            parameter: module.getattr("nn")?.getattr("Parameter")?.unbind(),
            increment_version: graph.getattr("increment_version")?.unbind(),
            strided: get("strided")?,
            float32: get("float32")?,
            bfloat16: get("bfloat16")?,
            float16: get("float16")?,
            uint8: get("uint8")?,
            int16: get("int16")?,
            int64: get("int64")?,
        })
    })
}

/// Tells autograd that tensors were written in place.
pub fn increment_version(tensors: &Bound<'_, PyList>) -> PyResult<()> {
    let py = tensors.py();
    torch(py)?.increment_version.call1(py, (tensors,)).map(drop)
}

/// Dtypes that the core is given.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    Float(Dtype),
    Uint8,
    Int16,
    Int64,
}

impl Kind {
    fn from_dlpack(dtype: DlDataType) -> Option<Self> {
        match (dtype.code, dtype.bits, dtype.lanes) {
            (2, 32, 1) => Some(Self::Float(Dtype::F32)),
            (4, 16, 1) => Some(Self::Float(Dtype::Bf16)),
            (2, 16, 1) => Some(Self::Float(Dtype::F16)),
            (1, 8, 1) => Some(Self::Uint8),
            (0, 16, 1) => Some(Self::Int16),
            (0, 64, 1) => Some(Self::Int64),
            _ => None,
        }
    }
}

/// How a tensor lies in memory.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Layout {
    pub kind: Kind,
    pub shape: Vec<i64>,
    /// In elements.
    pub strides: Vec<i64>,
}

impl Layout {
    /// Elements.
    pub fn numel(&self) -> usize {
        self.shape.iter().product::<i64>() as usize
    }

    /// True if the elements lie one after the other in the order of the dimensions.
    pub fn is_contiguous(&self) -> bool {
        let mut expected = 1;
        self.shape.contains(&0)
            || self.shape.iter().zip(&self.strides).rev().all(|(&size, &stride)| {
                let fits = size == 1 || stride == expected;
                expected *= size;
                fits
            })
    }

    /// True if the strides are those of a contiguous tensor with its dimensions in some other order.
    pub fn is_dense(&self) -> bool {
        if self.is_contiguous() {
            return true;
        }
        let sizes = self.strides.iter().zip(&self.shape).filter(|&(_, &size)| size != 1);
        let mut dims: Vec<_> = sizes.collect();
        dims.sort_unstable();
        let mut expected = 1;
        dims.iter().all(|&(&stride, &size)| {
            let fits = stride == expected;
            expected *= size;
            fits
        })
    }
}

/// A strided CPU tensor's memory as it is now. One view is read into again and again.
#[derive(Clone, Debug)]
pub struct View {
    pub address: *mut u8,
    pub layout: Layout,
    /// An address within torch's own record of the tensor, good for a prefetch only; 0 where it isn't known.
    pub record: usize,
}

impl Default for View {
    fn default() -> Self {
        let layout = Layout { kind: Kind::Uint8, shape: Vec::new(), strides: Vec::new() };
        Self { address: std::ptr::null_mut(), layout, record: 0 }
    }
}

impl View {
    /// True unless there are elements and no memory for them, as in a storage that was resized to nothing.
    pub fn has_memory(&self) -> bool {
        !self.address.is_null() || self.layout.numel() == 0
    }
}

/// Reads tensors, by torch's C exchange where it has one.
#[derive(Clone, Copy)]
pub struct Reader {
    torch: &'static Torch,
    exchange: Option<Exchange>,
}

impl Reader {
    /// Looks for torch's exchange.
    pub fn new(py: Python<'_>) -> PyResult<Self> {
        let torch = torch(py)?;
        Ok(Self { torch, exchange: Exchange::of(torch.tensor.bind(py)) })
    }

    /// Reads `object` into `view`; False where it isn't a CPU tensor, strided and of a dtype that the core is given.
    pub fn read(&self, object: &Bound<'_, PyAny>, view: &mut View) -> bool {
        self.exchanged(object, view) || self.attributes(object, "tensor", view).is_ok()
    }

    /// Checks that `object` is a dense CPU tensor; `name` is what an error calls it.
    pub fn host(&self, object: &Bound<'_, PyAny>, name: &str) -> PyResult<HostTensor> {
        let mut view = View::default();
        if !self.exchanged(object, &mut view) {
            self.attributes(object, name, &mut view)?;
        }
        if !view.layout.is_dense() {
            let found = "a tensor with gaps or overlaps";
            return Err(invalid(name, found, "a tensor whose elements fill its memory"));
        }
        if !view.has_memory() {
            return Err(invalid(name, "a tensor without memory", "a tensor whose elements fill its memory"));
        }
        Ok(HostTensor {
            address: view.address,
            numel: view.layout.numel(),
            kind: view.layout.kind,
            _owner: object.clone().unbind(),
        })
    }

    /// Reads by the exchange; False where it isn't there or has no answer.
    fn exchanged(&self, object: &Bound<'_, PyAny>, view: &mut View) -> bool {
        let Some(exchange) = self.exchange else { return false };
        // Other subclasses may be wrappers, whose own memory isn't what their attributes tell of.
        let class: *const PyTypeObject = object.get_type_ptr();
        if class != self.torch.tensor.as_ptr().cast() && class != self.torch.parameter.as_ptr().cast() {
            return false;
        }
        // SAFETY: a `torch.Tensor`, whose exchange this is.
        let Some(tensor) = (unsafe { exchange.tensor(object) }) else { return false };
        let (Some(kind), true) = (Kind::from_dlpack(tensor.dtype), tensor.device.device_type == dlpack::CPU)
        else {
            return false;
        };
        let ndim = tensor.ndim as usize;
        let layout = &mut view.layout;
        layout.kind = kind;
        layout.shape.clear();
        layout.strides.clear();
        if ndim > 0 {
            if tensor.strides.is_null() {
                // Contiguous, by an older version of the format: left to the attributes.
                return false;
            }
            // SAFETY: both have `ndim` entries and live as long as the tensor, which nobody changes: the GIL is held.
            let (shape, strides) = unsafe {
                (
                    std::slice::from_raw_parts(tensor.shape, ndim),
                    std::slice::from_raw_parts(tensor.strides, ndim),
                )
            };
            layout.shape.extend_from_slice(shape);
            layout.strides.extend_from_slice(strides);
        }
        view.record = tensor.shape.addr();
        view.address = tensor.data.cast::<u8>().wrapping_add(tensor.byte_offset as usize);
        true
    }

    /// Reads attribute by attribute.
    fn attributes(&self, object: &Bound<'_, PyAny>, name: &str, view: &mut View) -> PyResult<()> {
        let (py, torch) = (object.py(), self.torch);
        if !object.is_instance(torch.tensor.bind(py))? {
            return Err(PyTypeError::new_err(format!(
                "{name} is a {}; accepted: a torch.Tensor",
                object.get_type().name()?
            )));
        }
        let device: String =
            object.getattr(intern!(py, "device"))?.getattr(intern!(py, "type"))?.extract()?;
        if device != "cpu" {
            return Err(invalid(name, format!("on device {device}"), "a tensor in host memory (device cpu)"));
        }
        let layout = object.getattr(intern!(py, "layout"))?;
        if !layout.is(&torch.strided) {
            return Err(invalid(name, layout.str()?, "a dense tensor (layout torch.strided)"));
        }
        let dtype = object.getattr(intern!(py, "dtype"))?;
        let kind = if dtype.is(&torch.float32) {
            Kind::Float(Dtype::F32)
        } else if dtype.is(&torch.bfloat16) {
            Kind::Float(Dtype::Bf16)
        } else if dtype.is(&torch.float16) {
            Kind::Float(Dtype::F16)
        } else if dtype.is(&torch.uint8) {
            Kind::Uint8
        } else if dtype.is(&torch.int16) {
            Kind::Int16
        } else if dtype.is(&torch.int64) {
            Kind::Int64
        } else {
            return Err(invalid(name, dtype.str()?, "float32, bfloat16 or float16"));
        };
        view.layout = Layout {
            kind,
            shape: object.getattr(intern!(py, "shape"))?.extract()?,
            strides: object.call_method0(intern!(py, "stride"))?.extract()?,
        };
        let address: usize = object.call_method0(intern!(py, "data_ptr"))?.extract()?;
        view.address = address as *mut u8;
        view.record = 0;
        Ok(())
    }
}

/// Host memory of a dense CPU tensor.
pub struct HostTensor {
    address: *mut u8,
    /// Elements.
    pub numel: usize,
    kind: Kind,
    _owner: Py<PyAny>,
}

// SAFETY: the address is only used while `_owner` keeps it valid; who may write when is the engine's protocol.
unsafe impl Send for HostTensor {}
// SAFETY: as above.
unsafe impl Sync for HostTensor {}

impl HostTensor {
    /// Checks one tensor; see [`Reader::host`].
    pub fn new(object: &Bound<'_, PyAny>, name: &str) -> PyResult<Self> {
        Reader::new(object.py())?.host(object, name)
    }

    /// First element.
    pub fn address(&self) -> *mut u8 {
        self.address
    }

    /// The dtype of a floating-point tensor.
    pub fn float(&self, name: &str) -> PyResult<Dtype> {
        match self.kind {
            Kind::Float(dtype) => Ok(dtype),
            _ => Err(invalid(name, "an integer tensor", "float32, bfloat16 or float16")),
        }
    }

    /// Checks for `numel` fp32 elements and returns their address.
    pub fn float32(&self, name: &str, numel: usize) -> PyResult<*mut f32> {
        if self.kind != Kind::Float(Dtype::F32) || self.numel != numel {
            return Err(invalid(
                name,
                format!("a tensor of {} elements", self.numel),
                &format!("{numel} float32 elements"),
            ));
        }
        Ok(self.address.cast())
    }

    /// True for int16.
    pub fn is_int16(&self) -> bool {
        self.kind == Kind::Int16
    }

    /// The format of `numel` elements of a moment.
    pub fn state_dtype(&self, name: &str, numel: usize) -> PyResult<StateDtype> {
        let dtype = match self.kind {
            Kind::Float(Dtype::F32) => StateDtype::F32,
            Kind::Float(Dtype::Bf16) => StateDtype::Bf16,
            Kind::Uint8 => StateDtype::Int8,
            _ => return Err(invalid(name, "of another dtype", "float32, bfloat16 or uint8 (8-bit codes)")),
        };
        if self.numel != numel {
            return Err(invalid(name, format!("{} elements", self.numel), &format!("{numel} elements")));
        }
        Ok(dtype)
    }

    /// The elements of a tensor that [`float32`](Self::float32) has checked.
    ///
    /// # Safety
    ///
    /// It was, and nobody else uses them meanwhile.
    #[allow(clippy::mut_from_ref)] // the elements are the tensor's, not this view's
    pub unsafe fn floats_mut(&self) -> &mut [f32] {
        if self.numel == 0 {
            return &mut [];
        }
        // SAFETY: a dense float32 tensor of `numel` elements, kept alive by `_owner`; the rest is the caller's.
        unsafe { std::slice::from_raw_parts_mut(self.address.cast(), self.numel) }
    }

    /// Checks for bytes and returns their address and number.
    pub fn bytes(&self, name: &str) -> PyResult<(*mut u8, usize)> {
        if self.kind != Kind::Uint8 {
            return Err(invalid(name, "not uint8", "a uint8 tensor"));
        }
        Ok((self.address, self.numel))
    }

    /// Checks for int64 elements, aligned as torch aligns them, contiguous by construction of their callers, and copies them out.
    #[allow(clippy::cast_ptr_alignment)] // a tensor's data are aligned to its dtype
    pub fn indices(&self, name: &str) -> PyResult<Vec<u32>> {
        if self.kind != Kind::Int64 {
            return Err(invalid(name, "not int64", "an int64 tensor"));
        }
        if self.numel == 0 {
            return Ok(Vec::new());
        }
        // SAFETY: a dense int64 tensor of `numel` elements, kept alive by `_owner`; the GIL is held, nobody writes.
        let values = unsafe { std::slice::from_raw_parts(self.address.cast::<i64>(), self.numel) };
        values
            .iter()
            .map(|&value| u32::try_from(value).map_err(|_| invalid(name, value, "indices of 0 and more")))
            .collect()
    }
}
