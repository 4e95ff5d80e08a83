//! `AdamTensors`: a fixed list of CPU tensors that one Adam kernel call updates together; and the passes over
//! gradients alone.

use pyo3::prelude::*;
use zenflow_core::accumulate::accumulate_on;
use zenflow_core::adam::{self, Entry, Job, Moments, Span, WeightFormat};
use zenflow_core::dtype::Dtype;
use zenflow_core::hyper::{Hyper, Scalars};
use zenflow_core::norm;

use crate::error::{invalid, to_python};
use crate::pool::Pool;
use crate::tensor::{HostTensor, Reader};

/// `(lr, beta1, beta2, eps, weight_decay)` as Python gives it.
pub type HyperTuple = (f64, f64, f64, f64, f64);

/// The same, then the gradient's scale (negative to maximize) and whether weight decay is decoupled (AdamW).
pub type GroupTuple = (HyperTuple, f64, bool);

/// The checked hyper-parameters of a tuple.
pub fn hyper_from((lr, beta1, beta2, eps, weight_decay): HyperTuple) -> PyResult<Hyper> {
    let hyper = Hyper { lr, beta1, beta2, eps, weight_decay };
    hyper.validate().map_err(|error| to_python(&error))?;
    Ok(hyper)
}

/// The groups of one step, and the constants made of them.
pub struct Groups {
    groups: Vec<(Hyper, f64, bool)>,
    /// Most neighbours have the group and the count of the one before.
    last: Option<(usize, u64, Entry, Scalars)>,
}

impl Groups {
    /// Checks all of them.
    pub fn new(groups: Vec<GroupTuple>) -> PyResult<Self> {
        let checked = groups
            .into_iter()
            .map(|(hyper, grad_scale, decoupled)| Ok((hyper_from(hyper)?, grad_scale, decoupled)));
        Ok(Self { groups: checked.collect::<PyResult<_>>()?, last: None })
    }

    /// What update number `k` (from 1) in a group computes, and its constants.
    pub fn constants(&mut self, group: usize, k: u64) -> PyResult<(Entry, Scalars)> {
        if let Some((.., entry, scalars)) = self.last.filter(|last| (last.0, last.1) == (group, k)) {
            return Ok((entry, scalars));
        }
        let &(ref hyper, grad_scale, decoupled) =
            self.groups.get(group).ok_or_else(|| invalid("group_of", group, "an index of groups"))?;
        if k == 0 {
            return Err(invalid("steps", 0, "counts from 1"));
        }
        let (entry, scalars) = if decoupled {
            (Entry::Move, Scalars::adamw(hyper, k, grad_scale))
        } else {
            (Entry::AdamL2, Scalars::adam_l2(hyper, k, grad_scale))
        };
        self.last = Some((group, k, entry, scalars));
        Ok((entry, scalars))
    }
}

/// A gradient's memory, dense.
#[derive(Clone, Copy)]
pub struct Gradient {
    pub address: *const u8,
    pub dtype: Dtype,
    /// Elements.
    pub numel: usize,
}

impl Gradient {
    pub fn of(tensor: &HostTensor) -> PyResult<Self> {
        Ok(Self { address: tensor.address(), dtype: tensor.float("grad")?, numel: tensor.numel })
    }
}

/// The arrays of one tensor: weight, master if it isn't the weight, moments and their scales. All checked, and of one
/// length.
#[derive(Clone, Copy)]
pub struct Arrays {
    span: Span,
    /// First element of the weight.
    weight: *mut u8,
}

/// The tensors of [`Arrays`].
pub struct Tensors<'a, 'py> {
    pub weight: &'a Bound<'py, PyAny>,
    /// float32: the master, of which the weight is a rounded copy. int16: what a bfloat16 weight lacks of a float32.
    /// None: the weight, float32, is the master.
    pub master: Option<&'a Bound<'py, PyAny>>,
    /// float32, bfloat16 or uint8 (blocks of codes).
    pub exp_avg: &'a Bound<'py, PyAny>,
    /// The same.
    pub exp_avg_sq: &'a Bound<'py, PyAny>,
    /// float32, two for each block of 256 elements of codes.
    pub scales: Option<&'a Bound<'py, PyAny>>,
}

impl Arrays {
    /// Checks the tensors; those returned keep the memory alive.
    pub fn new(reader: Reader, tensors: &Tensors<'_, '_>) -> PyResult<(Self, Vec<HostTensor>)> {
        let weight = reader.host(tensors.weight, "weight")?;
        let numel = weight.numel;
        let mut span = Span { len: numel, ..Span::default() };
        let mut alive = Vec::with_capacity(5);
        if let Some(master) = tensors.master {
            let dtype = weight.float("weight")?;
            let master = reader.host(master, "master_weight")?;
            span.out = weight.address();
            if master.is_int16() {
                if dtype != Dtype::Bf16 || master.numel != numel {
                    return Err(invalid("master_weight", "int16", "lower halves of a bfloat16 weight"));
                }
                span.master = master.address();
                span.weight = WeightFormat::Split;
            } else {
                span.master = master.float32("master_weight", numel)?.cast();
                span.weight = WeightFormat::Master(dtype);
            }
            alive.push(master);
        } else {
            span.master = weight.float32("a weight without master_weight", numel)?.cast();
        }
        let (exp_avg, exp_avg_sq) =
            (reader.host(tensors.exp_avg, "exp_avg")?, reader.host(tensors.exp_avg_sq, "exp_avg_sq")?);
        let dtype = exp_avg.state_dtype("exp_avg", numel)?;
        if exp_avg_sq.state_dtype("exp_avg_sq", numel)? != dtype {
            return Err(invalid("exp_avg_sq", "of another dtype", "exp_avg's dtype"));
        }
        (span.exp_avg, span.exp_avg_sq, span.state_dtype) = (exp_avg.address(), exp_avg_sq.address(), dtype);
        let needed = dtype.scales(numel);
        if let Some(scales) = tensors.scales {
            let scales = reader.host(scales, "scales")?;
            span.scales = scales.float32("scales", needed)?;
            alive.push(scales);
        } else if needed > 0 {
            return Err(invalid("scales", "None", &format!("{needed} float32 elements")));
        }
        let address = weight.address();
        alive.extend([weight, exp_avg, exp_avg_sq]);
        Ok((Self { span, weight: address }, alive))
    }

    /// First element of the weight.
    pub fn weight(&self) -> *mut u8 {
        self.weight
    }

    /// The update by a gradient, whose length and dtype are checked.
    pub fn job(&self, grad: Gradient, (entry, scalars): (Entry, Scalars)) -> PyResult<Job> {
        if grad.numel != self.span.len {
            let given = format!("{} elements", grad.numel);
            return Err(invalid("grad", given, &format!("{} elements", self.span.len)));
        }
        let span = Span { grad: grad.address, grad_dtype: grad.dtype.into(), ..self.span };
        span.check(entry).map_err(|error| to_python(&error))?;
        Ok(Job { span, scalars, entry })
    }

    /// The moments.
    pub fn moments(&self) -> Moments {
        let Span { exp_avg, exp_avg_sq, scales, state_dtype: dtype, .. } = self.span;
        Moments { exp_avg, exp_avg_sq, scales, dtype }
    }
}

// SAFETY: the addresses are those of tensors that its owner keeps alive; only a step uses them.
unsafe impl Send for Arrays {}
// SAFETY: as above.
unsafe impl Sync for Arrays {}

/// Weights, optional masters and moments of a list of tensors, checked once.
#[pyclass(frozen, module = "zenflow._core")]
pub struct AdamTensors {
    entries: Vec<Arrays>,
    _alive: Vec<HostTensor>,
}

#[pymethods]
impl AdamTensors {
    #[new]
    #[pyo3(signature = (weights, masters, exp_avgs, exp_avg_sqs, scales=None))]
    fn new(
        py: Python<'_>,
        weights: Vec<Bound<'_, PyAny>>,
        masters: Vec<Option<Bound<'_, PyAny>>>,
        exp_avgs: Vec<Bound<'_, PyAny>>,
        exp_avg_sqs: Vec<Bound<'_, PyAny>>,
        scales: Option<Vec<Option<Bound<'_, PyAny>>>>,
    ) -> PyResult<Self> {
        let count = weights.len();
        let scales = scales.unwrap_or_else(|| vec![None; count]);
        for (name, len) in [
            ("masters", masters.len()),
            ("exp_avgs", exp_avgs.len()),
            ("exp_avg_sqs", exp_avg_sqs.len()),
            ("scales", scales.len()),
        ] {
            if len != count {
                return Err(invalid(name, format!("{len} tensors"), &format!("{count}, as many as weights")));
            }
        }
        let reader = Reader::new(py)?;
        let mut entries = Vec::with_capacity(count);
        let mut alive = Vec::with_capacity(5 * count);
        for (i, weight) in weights.iter().enumerate() {
            let tensors = Tensors {
                weight,
                master: masters[i].as_ref(),
                exp_avg: &exp_avgs[i],
                exp_avg_sq: &exp_avg_sqs[i],
                scales: scales[i].as_ref(),
            };
            let (arrays, tensors) = Arrays::new(reader, &tensors)?;
            entries.push(arrays);
            alive.extend(tensors);
        }
        Ok(Self { entries, _alive: alive })
    }

    /// Writes the moments of tensor `index`, whatever their format, into float32 tensors.
    fn read_moments(
        &self,
        py: Python<'_>,
        index: usize,
        exp_avg: &Bound<'_, PyAny>,
        exp_avg_sq: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let arrays = self.entry(index)?;
        // SAFETY: all arrays have as many elements and are kept alive.
        with_floats(py, arrays.span.len, exp_avg, exp_avg_sq, |first, second| unsafe {
            arrays.moments().read(first, second);
        })
    }

    /// Takes the moments of tensor `index` from float32 tensors, rounded to nearest in leaner formats.
    fn write_moments(
        &self,
        py: Python<'_>,
        index: usize,
        exp_avg: &Bound<'_, PyAny>,
        exp_avg_sq: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let arrays = self.entry(index)?;
        // SAFETY: as above.
        with_floats(py, arrays.span.len, exp_avg, exp_avg_sq, |first, second| unsafe {
            arrays.moments().write(first, second);
        })
    }

    /// One step of the tensors `indices` with their gradients, in one parallel region.
    ///
    /// `steps[i]` counts this update of tensor `indices[i]`, from 1; `groups[group_of[i]]` has its hyper-parameters.
    fn step(
        &self,
        py: Python<'_>,
        pool: &Pool,
        indices: Vec<usize>,
        grads: Vec<Bound<'_, PyAny>>,
        steps: Vec<u64>,
        groups: Vec<GroupTuple>,
        group_of: Vec<usize>,
    ) -> PyResult<()> {
        let count = indices.len();
        if grads.len() != count || steps.len() != count || group_of.len() != count {
            return Err(invalid("grads, steps, group_of", "of other lengths", "one entry an index"));
        }
        let mut groups = Groups::new(groups)?;
        let reader = Reader::new(py)?;
        let mut seen = vec![false; self.entries.len()];
        let mut jobs = Vec::with_capacity(count);
        let mut alive = Vec::with_capacity(count);
        for (i, &index) in indices.iter().enumerate() {
            let free = seen.get_mut(index).filter(|seen| !**seen);
            *free.ok_or_else(|| invalid("indices", index, "each registered tensor at most once"))? = true;
            let grad = reader.host(&grads[i], "grad")?;
            let constants = groups.constants(group_of[i], steps[i])?;
            jobs.push(self.entries[index].job(Gradient::of(&grad)?, constants)?);
            alive.push(grad);
        }
        pool.inner.checked().map_err(|error| to_python(&error))?;
        py.detach(|| {
            // SAFETY: every tensor was checked for length and dtype and is kept alive, by `self` or `alive`; indices
            // are distinct, so spans don't overlap.
            unsafe { adam::run_jobs(&pool.inner, pool.isa, &jobs, adam::DEFAULT_CHUNK) };
        });
        drop(alive);
        Ok(())
    }
}

impl AdamTensors {
    fn entry(&self, index: usize) -> PyResult<&Arrays> {
        self.entries.get(index).ok_or_else(|| invalid("index", index, "an index of the tensors"))
    }
}

/// Runs `f`, without the GIL, on the elements of two float32 tensors of `numel` elements: both moments of a state.
pub fn with_floats(
    py: Python<'_>,
    numel: usize,
    exp_avg: &Bound<'_, PyAny>,
    exp_avg_sq: &Bound<'_, PyAny>,
    f: impl FnOnce(&mut [f32], &mut [f32]) + Send,
) -> PyResult<()> {
    let (first, second) = (HostTensor::new(exp_avg, "exp_avg")?, HostTensor::new(exp_avg_sq, "exp_avg_sq")?);
    first.float32("exp_avg", numel)?;
    second.float32("exp_avg_sq", numel)?;
    // SAFETY: both were checked and are kept alive; the caller of Python's method has nobody else use them meanwhile.
    py.detach(|| unsafe { f(first.floats_mut(), second.floats_mut()) });
    Ok(())
}

/// Squared l2 norm (float64) of all gradients together and whether any element is inf or NaN.
#[pyfunction]
pub fn grad_stats(py: Python<'_>, pool: &Pool, grads: Vec<Bound<'_, PyAny>>) -> PyResult<(f64, bool)> {
    let reader = Reader::new(py)?;
    let tensors = grads.iter().map(|grad| reader.host(grad, "grad")).collect::<PyResult<Vec<_>>>()?;
    let memory = tensors.iter().map(Gradient::of).collect::<PyResult<Vec<_>>>()?;
    // SAFETY: `tensors` keeps them alive.
    unsafe { stats_of(py, pool, memory) }
}

/// [`grad_stats`] of memory.
///
/// # Safety
///
/// It stays alive meanwhile.
pub unsafe fn stats_of(
    py: Python<'_>,
    pool: &Pool,
    grads: impl IntoIterator<Item = Gradient>,
) -> PyResult<(f64, bool)> {
    let arrays: Vec<_> = grads
        .into_iter()
        .map(|grad| norm::Array { address: grad.address, dtype: grad.dtype, len: grad.numel })
        .collect();
    let threads = pool.inner.checked().map_err(|error| to_python(&error))?;
    // SAFETY: dense tensors of these lengths and dtypes, as a `Gradient` is; the caller keeps them alive.
    let stats = py.detach(|| unsafe { norm::stats_of(threads, pool.isa, &arrays) });
    Ok((stats.sum_of_squares, stats.non_finite))
}

/// `total += grad` (or `total = grad` where `first`), with the squared l2 norm and the non-finite flag of the new
/// `total` from the same pass.
#[pyfunction]
#[pyo3(signature = (pool, total, grad, *, first=false))]
pub fn accumulate(
    py: Python<'_>,
    pool: &Pool,
    total: &Bound<'_, PyAny>,
    grad: &Bound<'_, PyAny>,
    first: bool,
) -> PyResult<(f64, bool)> {
    let grad = HostTensor::new(grad, "grad")?;
    let dtype = grad.float("grad")?;
    let total = HostTensor::new(total, "total")?;
    total.float32("total", grad.numel)?;
    let threads = pool.inner.checked().map_err(|error| to_python(&error))?;
    let stats = py.detach(|| {
        // SAFETY: both are dense, of the same length and of the dtypes given, and kept alive by the two views.
        unsafe {
            accumulate_on(threads, pool.isa, total.address().cast(), grad.address(), dtype, grad.numel, first)
        }
    });
    Ok((stats.sum_of_squares, stats.non_finite))
}
