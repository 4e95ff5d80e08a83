//! A CPU tensor, checked once: address, dtype and length, and the object that keeps them alive.
//!
//! The core works on addresses. Everything that makes an address trustworthy is checked here: the tensor lies in host
//! memory, is strided and dense (its elements fill one run of memory, in whatever order), and has a dtype that the
//! kernels know. The Python object is kept as long as the address is in use.

use pyo3::exceptions::PyTypeError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use zenflow_core::dtype::Dtype;

use crate::error::invalid;

/// The torch objects that tensors are compared with.
struct Torch {
    tensor: Py<PyAny>,
    strided: Py<PyAny>,
    float32: Py<PyAny>,
    bfloat16: Py<PyAny>,
    float16: Py<PyAny>,
    uint8: Py<PyAny>,
    int64: Py<PyAny>,
}

static TORCH: PyOnceLock<Torch> = PyOnceLock::new();

fn torch(py: Python<'_>) -> PyResult<&'static Torch> {
    TORCH.get_or_try_init(py, || {
        let module = PyModule::import(py, "torch")?;
        let get = |name: &str| module.getattr(name).map(Bound::unbind);
        Ok(Torch {
            tensor: get("Tensor")?,
            strided: get("strided")?,
            float32: get("float32")?,
            bfloat16: get("bfloat16")?,
            float16: get("float16")?,
            uint8: get("uint8")?,
            int64: get("int64")?,
        })
    })
}

/// Host memory of a dense CPU tensor.
pub struct HostTensor {
    address: *mut u8,
    /// Elements.
    pub numel: usize,
    dtype: Kind,
    _owner: Py<PyAny>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Float(Dtype),
    Uint8,
    Int64,
}

// SAFETY: the address is only used while `_owner` keeps it valid; who may write when is the engine's protocol.
unsafe impl Send for HostTensor {}
// SAFETY: as above.
unsafe impl Sync for HostTensor {}

impl HostTensor {
    /// Checks `object`; `name` is what an error calls it.
    pub fn new(object: &Bound<'_, PyAny>, name: &str) -> PyResult<Self> {
        let py = object.py();
        let torch = torch(py)?;
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
        } else if dtype.is(&torch.int64) {
            Kind::Int64
        } else {
            return Err(invalid(name, dtype.str()?, "float32, bfloat16 or float16"));
        };
        if !object.call_method0(intern!(py, "is_contiguous"))?.extract::<bool>()? && !is_dense(object)? {
            return Err(invalid(
                name,
                "a tensor with gaps or overlaps",
                "a tensor whose elements fill its memory",
            ));
        }
        let address: usize = object.call_method0(intern!(py, "data_ptr"))?.extract()?;
        let numel: usize = object.call_method0(intern!(py, "numel"))?.extract()?;
        Ok(Self { address: address as *mut u8, numel, dtype: kind, _owner: object.clone().unbind() })
    }

    /// First element.
    pub fn address(&self) -> *mut u8 {
        self.address
    }

    /// The dtype of a floating-point tensor.
    pub fn float(&self, name: &str) -> PyResult<Dtype> {
        match self.dtype {
            Kind::Float(dtype) => Ok(dtype),
            _ => Err(invalid(name, "an integer tensor", "float32, bfloat16 or float16")),
        }
    }

    /// Checks for `numel` fp32 elements and returns their address.
    pub fn float32(&self, name: &str, numel: usize) -> PyResult<*mut f32> {
        if self.dtype != Kind::Float(Dtype::F32) || self.numel != numel {
            return Err(invalid(
                name,
                format!("a tensor of {} elements", self.numel),
                &format!("{numel} float32 elements"),
            ));
        }
        Ok(self.address.cast())
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
        if self.dtype != Kind::Uint8 {
            return Err(invalid(name, "not uint8", "a uint8 tensor"));
        }
        Ok((self.address, self.numel))
    }

    /// Checks for int64 elements, aligned as torch aligns them, contiguous by construction of their callers, and copies them out.
    #[allow(clippy::cast_ptr_alignment)] // a tensor's data are aligned to its dtype
    pub fn indices(&self, name: &str) -> PyResult<Vec<u32>> {
        if self.dtype != Kind::Int64 {
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

/// True if the strides are those of a contiguous tensor with its dimensions in some other order.
fn is_dense(object: &Bound<'_, PyAny>) -> PyResult<bool> {
    let py = object.py();
    let shape: Vec<usize> = object.getattr(intern!(py, "shape"))?.extract()?;
    let strides: Vec<usize> = object.call_method0(intern!(py, "stride"))?.extract()?;
    let mut dims: Vec<_> = strides.into_iter().zip(shape).filter(|&(_, size)| size != 1).collect();
    dims.sort_unstable();
    let mut expected = 1;
    Ok(dims.iter().all(|&(stride, size)| {
        let fits = stride == expected;
        expected *= size;
        fits
    }))
}
