//! `Engine`: the core's engine with Python's face. The GIL is released wherever it works or waits.

use std::sync::Arc;
use std::sync::Mutex;
use std::time::Duration;

use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};
use zenflow_core::bucket::{Action, HostState, Progress};
use zenflow_core::dtype::{Dtype, StateDtype};
use zenflow_core::engine::{Engine as Core, EngineConfig};
use zenflow_core::hyper::Pending;
use zenflow_core::migrate;
use zenflow_core::ticket::{Completion, Ticket};

use crate::adam::{hyper_from, with_floats, HyperTuple};
use crate::error::{invalid, to_python};
use crate::pool::isa_from;
use crate::tensor::HostTensor;

type Row = (u32, u32, Option<u32>, bool);

fn rows(completions: &[Completion]) -> Vec<Row> {
    completions.iter().map(|done| (done.bucket, done.slot, done.upload, done.void)).collect()
}

fn seconds(name: &str, value: f64) -> PyResult<Duration> {
    Duration::try_from_secs_f64(value)
        .map_err(|_| invalid(name, value, "a finite number of seconds, 0 or more"))
}

fn dtype_from(name: &str) -> PyResult<Dtype> {
    Dtype::from_name(name).ok_or_else(|| invalid("dtype", name, "float32, bfloat16 or float16"))
}

/// One fp32 array of the host state, shared with NumPy without a copy.
///
/// Read or write it only while the engine has no ticket of its parameter under way.
#[pyclass(frozen, module = "zenflow._core")]
pub struct HostArray {
    address: usize,
    numel: usize,
    /// Keeps the memory alive.
    _state: Arc<HostState>,
}

#[pymethods]
impl HostArray {
    /// NumPy's array interface, version 3.
    #[getter]
    fn __array_interface__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let dict = PyDict::new(py);
        dict.set_item("version", 3)?;
        dict.set_item("shape", (self.numel,))?;
        dict.set_item("typestr", "<f4")?;
        dict.set_item("data", (self.address, false))?;
        Ok(dict)
    }
}

/// Owns host states and the worker that updates them behind the caller's back.
#[pyclass(frozen, module = "zenflow._core")]
pub struct Engine {
    core: Core,
    /// Staging tensors whose addresses the engine has. Dropped after `core`, which joins the worker.
    staging: Mutex<Vec<HostTensor>>,
}

impl Engine {
    fn keep(&self, tensor: HostTensor) {
        self.staging.lock().unwrap_or_else(std::sync::PoisonError::into_inner).push(tensor);
    }

    /// The state of a parameter as a matrix of `columns` columns, while nothing of it is under way.
    fn matrix(&self, parameter: u32, columns: usize) -> PyResult<(Arc<HostState>, usize)> {
        let state = self.core.idle_state(parameter).map_err(|error| to_python(&error))?;
        if columns == 0 || state.numel() % columns != 0 {
            return Err(invalid(
                "cols",
                columns,
                &format!("a divisor of the parameter's {} elements", state.numel()),
            ));
        }
        let rows = state.numel() / columns;
        Ok((state, rows))
    }
}

#[pymethods]
impl Engine {
    #[new]
    #[pyo3(signature = (cores=None, *, threads=None, pin=true, chunk=262_144, capacity=4096, delay=0.0, isa=None))]
    fn new(
        py: Python<'_>,
        cores: Option<Vec<usize>>,
        threads: Option<usize>,
        pin: bool,
        chunk: usize,
        capacity: usize,
        delay: f64,
        isa: Option<&str>,
    ) -> PyResult<Self> {
        let config = EngineConfig {
            cores: cores.unwrap_or_default(),
            threads,
            pin,
            chunk,
            capacity,
            delay: seconds("delay", delay)?,
            isa: isa_from(isa)?,
        };
        let core = py.detach(|| Core::new(config)).map_err(|error| to_python(&error))?;
        Ok(Self { core, staging: Mutex::default() })
    }

    /// Zero state for `numel` elements: 12 bytes each with moments in float32, 8 in bfloat16, 6 and 1/32 in int8.
    #[pyo3(signature = (numel, state_dtype="float32"))]
    fn add_parameter(&self, py: Python<'_>, numel: usize, state_dtype: &str) -> PyResult<u32> {
        let dtype = StateDtype::from_name(state_dtype)
            .ok_or_else(|| invalid("state_dtype", state_dtype, "float32, bfloat16 or int8"))?;
        py.detach(|| self.core.add_parameter(numel, dtype)).map_err(|error| to_python(&error))
    }

    /// `(master_weight, exp_avg, exp_avg_sq)` of a parameter, without a copy; None for moments not in float32.
    fn arrays(&self, parameter: u32) -> PyResult<(HostArray, Option<HostArray>, Option<HostArray>)> {
        let state = self.core.state(parameter).map_err(|error| to_python(&error))?;
        let array = |address: *mut f32| HostArray {
            address: address as usize,
            numel: state.numel(),
            _state: Arc::clone(&state),
        };
        let moments = state.moments();
        let wide = |address: *mut u8| (state.dtype() == StateDtype::F32).then(|| array(address.cast()));
        Ok((array(state.master()), wide(moments.exp_avg), wide(moments.exp_avg_sq)))
    }

    /// Writes a parameter's moments, whatever their format, into float32 tensors.
    fn read_moments(
        &self,
        py: Python<'_>,
        parameter: u32,
        exp_avg: &Bound<'_, PyAny>,
        exp_avg_sq: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let state = self.core.idle_state(parameter).map_err(|error| to_python(&error))?;
        // SAFETY: the state is idle and has as many elements.
        with_floats(py, state.numel(), exp_avg, exp_avg_sq, |first, second| unsafe {
            state.moments().read(first, second);
        })
    }

    /// Takes a parameter's moments from float32 tensors: rounded to nearest where they are kept in another format.
    fn write_moments(
        &self,
        py: Python<'_>,
        parameter: u32,
        exp_avg: &Bound<'_, PyAny>,
        exp_avg_sq: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let state = self.core.idle_state(parameter).map_err(|error| to_python(&error))?;
        // SAFETY: as in `read_moments`.
        with_floats(py, state.numel(), exp_avg, exp_avg_sq, |first, second| unsafe {
            state.moments().write(first, second);
        })
    }

    /// A bucket of `(parameter, start, length)` segments, in elements; the system commits its memory here.
    fn add_bucket(&self, py: Python<'_>, segments: Vec<(u32, usize, usize)>) -> PyResult<u32> {
        py.detach(|| self.core.add_bucket(&segments)).map_err(|error| to_python(&error))
    }

    /// Registers a gradient slot: 64 bytes for its doorbell, then room for a bucket's gradients.
    fn add_slot(&self, memory: &Bound<'_, PyAny>) -> PyResult<u32> {
        let tensor = HostTensor::new(memory, "slot")?;
        let (address, bytes) = tensor.bytes("slot")?;
        // SAFETY: the tensor is kept alive until after the engine; its writers follow the slot protocol.
        let slot = unsafe { self.core.add_slot(address, bytes) }.map_err(|error| to_python(&error))?;
        self.keep(tensor);
        Ok(slot)
    }

    /// Registers a weight slot.
    fn add_upload(&self, memory: &Bound<'_, PyAny>) -> PyResult<u32> {
        let tensor = HostTensor::new(memory, "upload")?;
        let (address, bytes) = tensor.bytes("upload")?;
        // SAFETY: as in `add_slot`.
        let upload = unsafe { self.core.add_upload(address, bytes) }.map_err(|error| to_python(&error))?;
        self.keep(tensor);
        Ok(upload)
    }

    /// Rings a slot's doorbell: its gradients are there, to be scaled by `scale`; or the step is void.
    #[pyo3(signature = (slot, scale=1.0, *, void=false))]
    fn ring(&self, slot: u32, scale: f32, void: bool) -> PyResult<()> {
        self.core.ring(slot, scale, void).map_err(|error| to_python(&error))
    }

    /// Puts a bucket's work for one step on the ring; False if too many tickets are under way.
    ///
    /// `actions` has a byte a segment: 0 no gradient, 1 moments only, 2 close.
    fn submit(
        &self,
        py: Python<'_>,
        bucket: u32,
        slot: u32,
        upload: Option<u32>,
        actions: &Bound<'_, PyBytes>,
        grad_dtype: &str,
        out_dtype: &str,
        hyper: HyperTuple,
    ) -> PyResult<bool> {
        let (grad_dtype, out_dtype) = (dtype_from(grad_dtype)?, dtype_from(out_dtype)?);
        let actions = actions
            .as_bytes()
            .iter()
            .map(|&action| Action::from_u8(action).ok_or_else(|| invalid("actions", action, "0, 1 or 2")))
            .collect::<PyResult<Vec<_>>>()?;
        let ticket =
            Ticket { bucket, slot, upload, grad_dtype, out_dtype, hyper: hyper_from(hyper)?, sequence: 0 };
        py.detach(|| self.core.submit(ticket, &actions)).map_err(|error| to_python(&error))
    }

    /// Finished tickets as `(bucket, slot, upload, void)`, without waiting.
    fn poll(&self, py: Python<'_>) -> PyResult<Vec<Row>> {
        py.detach(|| self.core.poll()).map(|done| rows(&done)).map_err(|error| to_python(&error))
    }

    /// Waits for a finished ticket, at most `timeout` seconds.
    fn wait(&self, py: Python<'_>, timeout: f64) -> PyResult<Vec<Row>> {
        let timeout = seconds("timeout", timeout)?;
        py.detach(|| self.core.wait(timeout)).map(|done| rows(&done)).map_err(|error| to_python(&error))
    }

    /// Waits until every ticket is finished; False after `timeout` seconds.
    fn drain(&self, py: Python<'_>, timeout: f64) -> PyResult<bool> {
        let timeout = seconds("timeout", timeout)?;
        py.detach(|| self.core.drain(timeout)).map_err(|error| to_python(&error))
    }

    /// `(k, lr_sum, decay)` of a bucket's segments.
    fn progress(&self, py: Python<'_>, bucket: u32) -> PyResult<Vec<(u64, f64, f64)>> {
        let progress = py.detach(|| self.core.progress(bucket)).map_err(|error| to_python(&error))?;
        Ok(progress.iter().map(|p| (p.k, p.pending.lr_sum, p.pending.decay)).collect())
    }

    /// Sets `(k, lr_sum, decay)` of a bucket's segments.
    fn set_progress(&self, bucket: u32, progress: Vec<(u64, f64, f64)>) -> PyResult<()> {
        let progress: Vec<_> = progress
            .into_iter()
            .map(|(k, lr_sum, decay)| Progress { k, pending: Pending { lr_sum, decay } })
            .collect();
        self.core.set_progress(bucket, &progress).map_err(|error| to_python(&error))
    }

    /// Copies columns of a parameter's `[rows, cols]` state into compact `[rows, len(columns)]` tensors.
    fn gather_columns(
        &self,
        py: Python<'_>,
        parameter: u32,
        cols: usize,
        columns: &Bound<'_, PyAny>,
        master: &Bound<'_, PyAny>,
        exp_avg: &Bound<'_, PyAny>,
        exp_avg_sq: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let (state, height) = self.matrix(parameter, cols)?;
        let columns = checked_columns(columns, cols)?;
        let numel = height * columns.len();
        let [master, exp_avg, exp_avg_sq] =
            [("master_weight", master), ("exp_avg", exp_avg), ("exp_avg_sq", exp_avg_sq)].map(
                |(name, tensor)| {
                    let tensor = HostTensor::new(tensor, name)?;
                    tensor.float32(name, numel)?;
                    Ok::<_, PyErr>(tensor)
                },
            );
        let (master, exp_avg, exp_avg_sq) = (master?, exp_avg?, exp_avg_sq?);
        py.detach(|| {
            let (first, second) = (exp_avg.address().cast(), exp_avg_sq.address().cast());
            // SAFETY: the state is idle and of height x cols, columns are below cols, and the tensors have height x
            // columns fp32 elements and are kept alive.
            unsafe {
                migrate::gather(state.master(), height, cols, &columns, master.address().cast());
                migrate::gather_moments(&state.moments(), height, cols, &columns, first, second);
            }
        });
        Ok(())
    }

    /// Copies a compact `[rows, len(columns)]` tensor into columns of a parameter's master weight.
    fn scatter_columns(
        &self,
        py: Python<'_>,
        parameter: u32,
        cols: usize,
        columns: &Bound<'_, PyAny>,
        master: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let (state, height) = self.matrix(parameter, cols)?;
        let columns = checked_columns(columns, cols)?;
        let tensor = HostTensor::new(master, "master_weight")?;
        tensor.float32("master_weight", height * columns.len())?;
        py.detach(|| {
            // SAFETY: as in `gather_columns`, the other way.
            unsafe {
                migrate::scatter(tensor.address().cast(), height, cols, &columns, state.master());
            }
        });
        Ok(())
    }

    /// Counters: tickets submitted and finished, the worker's busy seconds, elements updated, threads.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let stats = py.detach(|| self.core.stats()).map_err(|error| to_python(&error))?;
        let dict = PyDict::new(py);
        dict.set_item("submitted", stats.submitted)?;
        dict.set_item("finished", stats.finished)?;
        dict.set_item("busy_seconds", stats.busy_seconds)?;
        dict.set_item("elements", stats.elements)?;
        dict.set_item("threads", stats.threads)?;
        Ok(dict)
    }

    /// Raises if the engine is closed, failed, or belongs to a parent process.
    fn check(&self) -> PyResult<()> {
        self.core.check().map_err(|error| to_python(&error))
    }

    /// Marks the states as not to be trusted.
    fn poison(&self, cause: &str) {
        self.core.poison(cause);
    }

    /// Finishes what is under way and ends the worker; idempotent.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        py.detach(|| self.core.close()).map_err(|error| to_python(&error))
    }
}

fn checked_columns(columns: &Bound<'_, PyAny>, cols: usize) -> PyResult<Vec<u32>> {
    let columns = HostTensor::new(columns, "columns")?.indices("columns")?;
    match columns.iter().find(|&&column| column as usize >= cols) {
        Some(column) => Err(invalid("columns", column, &format!("indices below {cols}"))),
        None => Ok(columns),
    }
}
