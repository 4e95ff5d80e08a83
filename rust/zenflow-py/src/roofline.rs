//! The memory roofline that benchmarks hold the kernels against.

use pyo3::prelude::*;
use zenflow_core::dtype::Dtype;
use zenflow_core::roofline::{pass, Streams, MOST_UPDATES};

use crate::error::{invalid, to_python};
use crate::pool::Pool;
use crate::tensor::HostTensor;

/// Alignment of an array that is written past the caches.
const LINE: usize = 64;

/// Goes over memory once, as fast as the machine can: `read` is read, `updates` (up to three, float32) are read and
/// written back as they were, `write` is overwritten past the caches; next to no arithmetic. A last piece of fewer
/// than 32 elements is left out.
#[pyfunction]
#[pyo3(signature = (pool, read, updates, write=None))]
pub fn roofline(
    py: Python<'_>,
    pool: &Pool,
    read: &Bound<'_, PyAny>,
    updates: Vec<Bound<'_, PyAny>>,
    write: Option<&Bound<'_, PyAny>>,
) -> PyResult<()> {
    let read = HostTensor::new(read, "read")?;
    let read_dtype = read.float("read")?;
    if updates.len() > MOST_UPDATES {
        return Err(invalid("updates", format!("{} tensors", updates.len()), "up to 3 tensors"));
    }
    let mut addresses = [std::ptr::null_mut(); MOST_UPDATES];
    let mut alive = Vec::with_capacity(MOST_UPDATES + 1);
    for (address, update) in addresses.iter_mut().zip(&updates) {
        let update = HostTensor::new(update, "updates")?;
        *address = update.float32("updates", read.numel)?;
        alive.push(update);
    }
    let (mut to, mut write_dtype) = (std::ptr::null_mut(), Dtype::F32);
    if let Some(write) = write {
        let write = HostTensor::new(write, "write")?;
        (to, write_dtype) = (write.address(), write.float("write")?);
        if write.numel != read.numel || !to.addr().is_multiple_of(LINE) {
            let value = format!("a tensor of {} elements at {to:p}", write.numel);
            let accepted = format!("{} elements, aligned to {LINE} bytes", read.numel);
            return Err(invalid("write", value, &accepted));
        }
        alive.push(write);
    }
    let streams = Streams {
        read: read.address(),
        read_dtype,
        updates: addresses,
        update_count: updates.len(),
        write: to,
        write_dtype,
        len: read.numel,
    };
    let threads = pool.inner.checked().map_err(|error| to_python(&error))?;
    // SAFETY: dense tensors of the same length, of the dtypes given and kept alive by `read` and `alive`. That they
    // don't overlap is the caller's part.
    py.detach(|| unsafe { pass(threads, pool.isa, &streams) });
    drop(alive);
    Ok(())
}
