//! The memory roofline that benchmarks hold the kernels against.

use pyo3::intern;
use pyo3::prelude::*;
use zenflow_core::roofline::{pass, Array, Streams, WIDTHS};

use crate::error::{invalid, to_python};
use crate::pool::Pool;
use crate::tensor::HostTensor;

/// Alignment of an array that is written past the caches.
const LINE: usize = 64;

/// An array of a pass and the tensor, as bytes, that keeps its memory alive.
struct Bits {
    array: Array,
    numel: usize,
    _tensor: HostTensor,
}

impl Bits {
    /// Takes a tensor of any dtype that is 1, 2 or 4 bytes wide: to a pass all are bits.
    fn new(tensor: &Bound<'_, PyAny>, name: &str) -> PyResult<Self> {
        let py = tensor.py();
        let uint8 = PyModule::import(py, "torch")?.getattr(intern!(py, "uint8"))?;
        let Ok(bytes) = tensor.call_method1(intern!(py, "view"), (uint8,)) else {
            HostTensor::new(tensor, name)?;
            return Err(invalid(name, "a tensor that can't be viewed as bytes", "a contiguous tensor"));
        };
        let bytes = HostTensor::new(&bytes, name)?;
        let (address, count) = bytes.bytes(name)?;
        let width: usize = tensor.call_method0(intern!(py, "element_size"))?.extract()?;
        if !WIDTHS.contains(&width) {
            return Err(invalid(name, format!("a tensor of {width}-byte elements"), "1, 2 or 4 bytes"));
        }
        Ok(Self { array: Array { address, width }, numel: count / width, _tensor: bytes })
    }
}

/// Goes over memory once, as fast as the machine can: `read` is read, each of `updates` is read and written back as it
/// was, `write` is overwritten with bits of `read`, past the caches; no arithmetic. Tensors of one length and of any
/// dtype 1, 2 or 4 bytes wide. A last piece of fewer than 64 elements is left out.
#[pyfunction]
#[pyo3(signature = (pool, read, updates, write=None))]
pub fn roofline(
    py: Python<'_>,
    pool: &Pool,
    read: &Bound<'_, PyAny>,
    updates: Vec<Bound<'_, PyAny>>,
    write: Option<&Bound<'_, PyAny>>,
) -> PyResult<()> {
    let read = Bits::new(read, "read")?;
    let length = |bits: &Bits, name: &str| {
        if bits.numel == read.numel {
            return Ok(());
        }
        let value = format!("a tensor of {} elements", bits.numel);
        Err(invalid(name, value, &format!("{} elements, as read has", read.numel)))
    };
    let updates = updates.iter().map(|update| Bits::new(update, "updates")).collect::<PyResult<Vec<_>>>()?;
    updates.iter().try_for_each(|update| length(update, "updates"))?;
    let write = write.map(|write| Bits::new(write, "write")).transpose()?;
    if let Some(write) = &write {
        length(write, "write")?;
        let address = write.array.address;
        if !address.addr().is_multiple_of(LINE) {
            return Err(invalid("write", format!("a tensor at {address:p}"), "aligned to 64 bytes"));
        }
    }
    let arrays: Vec<Array> = updates.iter().map(|update| update.array).collect();
    let streams = Streams {
        read: read.array,
        updates: &arrays,
        write: write.as_ref().map(|write| write.array),
        len: read.numel,
    };
    pool.inner.checked().map_err(|error| to_python(&error))?;
    // SAFETY: dense tensors of the same length, of the widths given and kept alive by `read`, `updates` and `write`.
    // That they don't overlap is the caller's part.
    py.detach(|| unsafe { pass(&pool.inner, pool.isa, &streams) });
    Ok(())
}
