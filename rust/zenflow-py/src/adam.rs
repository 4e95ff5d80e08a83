//! `AdamTensors`: a fixed list of CPU tensors that one Adam kernel call updates together; and the passes over
//! gradients alone.

use pyo3::prelude::*;
use zenflow_core::accumulate::accumulate_on;
use zenflow_core::adam::{self, Entry, Job, Span, WeightFormat};
use zenflow_core::dtype::Dtype;
use zenflow_core::hyper::{Hyper, Scalars};
use zenflow_core::norm;

use crate::error::{invalid, to_python};
use crate::pool::Pool;
use crate::tensor::HostTensor;

/// `(lr, beta1, beta2, eps, weight_decay)` as Python gives it.
pub type HyperTuple = (f64, f64, f64, f64, f64);

/// The same, then the gradient's scale (negative to maximize) and whether weight decay is decoupled (AdamW).
type GroupTuple = (HyperTuple, f64, bool);

/// The checked hyper-parameters of a tuple.
pub fn hyper_from((lr, beta1, beta2, eps, weight_decay): HyperTuple) -> PyResult<Hyper> {
    let hyper = Hyper { lr, beta1, beta2, eps, weight_decay };
    hyper.validate().map_err(|error| to_python(&error))?;
    Ok(hyper)
}

struct Entry4 {
    master: *mut f32,
    exp_avg: *mut f32,
    exp_avg_sq: *mut f32,
    out: *mut u8,
    out_dtype: Dtype,
    numel: usize,
}

// SAFETY: the addresses are those of tensors that `AdamTensors` keeps alive; `step` alone uses them.
unsafe impl Send for Entry4 {}
// SAFETY: as above.
unsafe impl Sync for Entry4 {}

/// Weights, optional masters and moments of a list of parameters, checked once.
#[pyclass(frozen, module = "zenflow._core")]
pub struct AdamTensors {
    entries: Vec<Entry4>,
    _alive: Vec<HostTensor>,
}

#[pymethods]
impl AdamTensors {
    #[new]
    fn new(
        weights: Vec<Bound<'_, PyAny>>,
        masters: Vec<Option<Bound<'_, PyAny>>>,
        exp_avgs: Vec<Bound<'_, PyAny>>,
        exp_avg_sqs: Vec<Bound<'_, PyAny>>,
    ) -> PyResult<Self> {
        let count = weights.len();
        for (name, len) in
            [("masters", masters.len()), ("exp_avgs", exp_avgs.len()), ("exp_avg_sqs", exp_avg_sqs.len())]
        {
            if len != count {
                return Err(invalid(name, format!("{len} tensors"), &format!("{count}, as many as weights")));
            }
        }
        let mut entries = Vec::with_capacity(count);
        let mut alive = Vec::with_capacity(4 * count);
        for (i, weight) in weights.iter().enumerate() {
            let weight = HostTensor::new(weight, "weight")?;
            let numel = weight.numel;
            let exp_avg = HostTensor::new(&exp_avgs[i], "exp_avg")?;
            let exp_avg_sq = HostTensor::new(&exp_avg_sqs[i], "exp_avg_sq")?;
            let (master, out, out_dtype) = match &masters[i] {
                Some(master) => {
                    let dtype = weight.float("weight")?;
                    let master = HostTensor::new(master, "master_weight")?;
                    let address = master.float32("master_weight", numel)?;
                    alive.push(master);
                    (address, weight.address(), dtype)
                }
                None => (
                    weight.float32("a weight without master_weight", numel)?,
                    std::ptr::null_mut(),
                    Dtype::F32,
                ),
            };
            entries.push(Entry4 {
                master,
                exp_avg: exp_avg.float32("exp_avg", numel)?,
                exp_avg_sq: exp_avg_sq.float32("exp_avg_sq", numel)?,
                out,
                out_dtype,
                numel,
            });
            alive.extend([weight, exp_avg, exp_avg_sq]);
        }
        Ok(Self { entries, _alive: alive })
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
        let groups = groups
            .into_iter()
            .map(|(hyper, grad_scale, decoupled)| Ok((hyper_from(hyper)?, grad_scale, decoupled)))
            .collect::<PyResult<Vec<_>>>()?;
        let mut seen = vec![false; self.entries.len()];
        let mut jobs = Vec::with_capacity(count);
        let mut alive = Vec::with_capacity(count);
        for (i, &index) in indices.iter().enumerate() {
            let free = seen.get_mut(index).filter(|seen| !**seen);
            *free.ok_or_else(|| invalid("indices", index, "each registered tensor at most once"))? = true;
            let entry = &self.entries[index];
            let grad = HostTensor::new(&grads[i], "grad")?;
            if grad.numel != entry.numel {
                return Err(invalid(
                    "grad",
                    format!("{} elements", grad.numel),
                    &format!("{} elements", entry.numel),
                ));
            }
            let &(ref hyper, grad_scale, decoupled) = groups
                .get(group_of[i])
                .ok_or_else(|| invalid("group_of", group_of[i], "an index of groups"))?;
            if steps[i] == 0 {
                return Err(invalid("steps", 0, "counts from 1"));
            }
            let (kind, scalars) = if decoupled {
                (Entry::Move, Scalars::adamw(hyper, steps[i], grad_scale))
            } else {
                (Entry::AdamL2, Scalars::adam_l2(hyper, steps[i], grad_scale))
            };
            let span = Span {
                master: entry.master.cast(),
                exp_avg: entry.exp_avg.cast(),
                exp_avg_sq: entry.exp_avg_sq.cast(),
                grad: grad.address().cast_const(),
                grad_dtype: grad.float("grad")?.into(),
                out: entry.out,
                weight: WeightFormat::Master(entry.out_dtype),
                len: entry.numel,
                ..Span::default()
            };
            jobs.push(Job { span, scalars, entry: kind });
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

/// Squared l2 norm (float64) of all gradients together and whether any element is inf or NaN.
#[pyfunction]
pub fn grad_stats(py: Python<'_>, pool: &Pool, grads: Vec<Bound<'_, PyAny>>) -> PyResult<(f64, bool)> {
    let tensors = grads.iter().map(|grad| HostTensor::new(grad, "grad")).collect::<PyResult<Vec<_>>>()?;
    let dtypes = tensors.iter().map(|tensor| tensor.float("grad")).collect::<PyResult<Vec<_>>>()?;
    let threads = pool.inner.checked().map_err(|error| to_python(&error))?;
    py.detach(|| {
        let mut sums = Vec::with_capacity(tensors.len());
        let mut non_finite = false;
        for (tensor, &dtype) in tensors.iter().zip(&dtypes) {
            // SAFETY: a dense tensor of `numel` elements of `dtype`, kept alive by `tensors`.
            let stats = unsafe { norm::stats_on(threads, pool.isa, tensor.address(), dtype, tensor.numel) };
            sums.push(stats.sum_of_squares);
            non_finite |= stats.non_finite;
        }
        Ok((norm::pairwise_sum(&sums), non_finite))
    })
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
