//! `ParameterTable`: what a step knows of each parameter beforehand, so that it has to look at little.
//!
//! A step over thousands of small parameters is soon dominated by the walk over them. So the walk is here: one call
//! reads every parameter's gradient and checks it, and the parameter itself, against its row. What passes is ready for
//! the kernel. What doesn't (a first gradient, a gradient in another order, memory that was replaced, a foreign write,
//! anything that can't be used) is *unusual*: Python looks at it in the long way, refuses it or mends it.
//!
//! Nothing is changed before [`ParameterTable::step`].

use std::collections::HashMap;

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyList;
use zenflow_core::adam;

use crate::adam::{stats_of, Arrays, Gradient, GroupTuple, Groups, Tensors};
use crate::error::{invalid, to_python};
use crate::pool::Pool;
use crate::tensor::{increment_version, HostTensor, Kind, Layout, Reader, View};

/// The last count that a float32 holds exactly, with all before it.
const EXACT: u64 = 1 << 24;

/// Parameters that the walk looks ahead. What it needs of each lies in several places that the last step's kernel has
/// driven out of the caches, each known only from the one before; so it mostly waits for memory.
const AHEAD: usize = 12;

/// Bytes of a cache line.
const LINE: usize = 64;

struct Row {
    /// The parameter's identity. The caller keeps the object, or else drops the table.
    object: usize,
    /// The parameter's memory and its layout (an index of `layouts`) when it was registered.
    address: *mut u8,
    layout: usize,
    /// Its version after our own last write; None where the weight is its own master and foreign writes need no care.
    version: Option<i64>,
    /// True where the weight in `arrays` is a gapless copy, which Python carries there and back.
    gapped: bool,
    arrays: Arrays,
    /// Updates so far, and the scalar that shows them to the user.
    k: u64,
    step: *mut f32,
    /// The last gradient's object, and torch's records of the parameter and of that gradient: only prefetched.
    grad: usize,
    records: [usize; 2],
    _alive: Vec<HostTensor>,
}

// SAFETY: the addresses are those of tensors that the row keeps alive, or are only compared.
unsafe impl Send for Row {}
// SAFETY: as above.
unsafe impl Sync for Row {}

/// A parameter with a gradient, in one step.
struct Item {
    object: usize,
    group: usize,
    row: Option<usize>,
    /// None as long as Python hasn't seen to it.
    grad: Option<Gradient>,
    alive: Py<PyAny>,
}

// SAFETY: the gradient's memory is kept alive by the item, and only read.
unsafe impl Send for Item {}
// SAFETY: as above.
unsafe impl Sync for Item {}

/// All parameters of one step that have a gradient, in the order of the groups.
#[pyclass(module = "zenflow._core")]
pub struct Found {
    items: Vec<Item>,
    /// Position here, group, and index within the group.
    #[pyo3(get)]
    unusual: Vec<(usize, usize, usize)>,
    /// The parameters.
    #[pyo3(get)]
    params: Py<PyList>,
}

#[pymethods]
impl Found {
    /// Takes a gradient for position `position`: dense, in the memory order of the weight unless only `stats` reads it.
    fn put(&mut self, position: usize, grad: Bound<'_, PyAny>) -> PyResult<()> {
        let count = self.items.len();
        let item = self
            .items
            .get_mut(position)
            .ok_or_else(|| invalid("position", position, &format!("less than {count}")))?;
        item.grad = Some(Gradient::of(&HostTensor::new(&grad, "grad")?)?);
        item.alive = grad.unbind();
        Ok(())
    }

    /// Squared l2 norm (float64) of all gradients together and whether any element is inf or NaN.
    fn stats(&self, py: Python<'_>, pool: &Pool) -> PyResult<(f64, bool)> {
        let grads = self.items.iter().map(Item::grad).collect::<PyResult<Vec<_>>>()?;
        // SAFETY: the items keep their gradients alive.
        unsafe { stats_of(py, pool, grads) }
    }
}

impl Item {
    fn grad(&self) -> PyResult<Gradient> {
        self.grad.ok_or_else(|| invalid("grad", "still to be given", "one for each unusual parameter"))
    }
}

/// Rows of parameters, by the objects' identity.
#[pyclass(module = "zenflow._core")]
pub struct ParameterTable {
    rows: Vec<Row>,
    places: HashMap<usize, usize>,
    layouts: Vec<Layout>,
    known_layouts: HashMap<Layout, usize>,
}

#[pymethods]
impl ParameterTable {
    #[new]
    fn new() -> Self {
        Self { rows: Vec::new(), places: HashMap::new(), layouts: Vec::new(), known_layouts: HashMap::new() }
    }

    /// Adds a parameter's row, or replaces it. The tensors are those of `AdamTensors`.
    ///
    /// `weight` is the parameter's own memory, or a gapless copy where that has gaps. `step` (one fp32 element) shows
    /// the number of updates, of which there were `k`.
    #[pyo3(signature = (param, weight, master, exp_avg, exp_avg_sq, step, k, scales=None))]
    fn register(
        &mut self,
        param: Bound<'_, PyAny>,
        weight: Bound<'_, PyAny>,
        master: Option<Bound<'_, PyAny>>,
        exp_avg: Bound<'_, PyAny>,
        exp_avg_sq: Bound<'_, PyAny>,
        step: Bound<'_, PyAny>,
        k: u64,
        scales: Option<Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let reader = Reader::new(param.py())?;
        let mut view = View::default();
        if !reader.read(&param, &mut view) {
            return Err(invalid("param", "not a tensor in host memory", "a strided CPU tensor"));
        }
        let gapped = !view.layout.is_dense();
        let version = match &master {
            Some(_) => Some(version_of(&param)?),
            None => None,
        };
        let tensors = Tensors {
            weight: &weight,
            master: master.as_ref(),
            exp_avg: &exp_avg,
            exp_avg_sq: &exp_avg_sq,
            scales: scales.as_ref(),
        };
        let (arrays, mut alive) = Arrays::new(reader, &tensors)?;
        if !gapped && arrays.weight() != view.address {
            return Err(invalid("weight", "elsewhere in memory", "the parameter's own memory"));
        }
        let step = reader.host(&step, "step")?;
        let address = step.float32("step", 1)?;
        alive.push(step);
        let object = identity(&param);
        let layout = self.layout(&view.layout);
        let row = Row {
            object,
            address: view.address,
            layout,
            version,
            gapped,
            arrays,
            k,
            step: address,
            grad: 0,
            records: [view.record, 0],
            _alive: alive,
        };
        if let Some(&place) = self.places.get(&object) {
            self.rows[place] = row;
        } else {
            self.places.insert(object, self.rows.len());
            self.rows.push(row);
        }
        Ok(())
    }

    /// Updates of a registered parameter.
    fn count(&self, param: Bound<'_, PyAny>) -> PyResult<u64> {
        Ok(self.row(&param)?.k)
    }

    /// Version and address of a registered parameter after our own last write; -1 where its version doesn't matter.
    fn stamp(&self, param: Bound<'_, PyAny>) -> PyResult<(i64, usize)> {
        let row = self.row(&param)?;
        Ok((row.version.unwrap_or(-1), row.address.addr()))
    }

    /// All parameters of the groups' lists that have a gradient.
    fn find(&mut self, py: Python<'_>, groups: Vec<Bound<'_, PyList>>) -> PyResult<Found> {
        let reader = Reader::new(py)?;
        let params = PyList::empty(py);
        let mut found = Found { items: Vec::new(), unusual: Vec::new(), params: params.clone().unbind() };
        found.items.reserve(self.rows.len());
        let mut views = (View::default(), View::default());
        // Rows come in the order of the walk, but for parameters whose first gradient came late.
        let mut next = 0;
        for (group, list) in groups.iter().enumerate() {
            for (index, param) in list.iter().enumerate() {
                let grad = param.getattr(intern!(py, "grad"))?;
                if grad.is_none() {
                    next += 1;
                    continue;
                }
                let object = identity(&param);
                self.prefetch(next + AHEAD);
                let row = match self.rows.get(next) {
                    Some(row) if row.object == object => Some(next),
                    _ => self.places.get(&object).copied(),
                };
                let usual = match row {
                    Some(row) => self.usual(reader, &self.rows[row], &param, &grad, &mut views)?,
                    None => None,
                };
                if let (Some(row), Some(_)) = (row, usual) {
                    let row = &mut self.rows[row];
                    row.grad = identity(&grad);
                    row.records[1] = views.1.record;
                } else {
                    found.unusual.push((found.items.len(), group, index));
                }
                found.items.push(Item { object, group, row, grad: usual, alive: grad.unbind() });
                params.append(param)?;
                next = row.unwrap_or(next) + 1;
            }
        }
        Ok(found)
    }

    /// Updates all that was found, once, in one parallel region; autograd sees that the parameters were written.
    ///
    /// `groups` are the hyper-parameters of the groups. True if all counts are still exact in float32.
    fn step(
        &mut self,
        py: Python<'_>,
        pool: &Pool,
        found: &Found,
        groups: Vec<GroupTuple>,
    ) -> PyResult<bool> {
        let mut groups = Groups::new(groups)?;
        let mut seen = vec![false; self.rows.len()];
        let mut jobs = Vec::with_capacity(found.items.len());
        let mut places = Vec::with_capacity(found.items.len());
        for item in &found.items {
            let place = item.row.or_else(|| self.places.get(&item.object).copied());
            let free = place.and_then(|place| seen.get_mut(place)).filter(|seen| !**seen);
            let (Some(place), Some(free)) = (place, free) else {
                return Err(invalid(
                    "found",
                    "a list with an unknown or repeated parameter",
                    "each registered parameter at most once",
                ));
            };
            *free = true;
            let row = &self.rows[place];
            let constants = groups.constants(item.group, row.k + 1)?;
            jobs.push(row.arrays.job(item.grad()?, constants)?);
            places.push(place);
        }
        pool.inner.checked().map_err(|error| to_python(&error))?;
        // Before the kernel: what autograd needs is still in the caches. A backward that still needs the old values
        // has to fail.
        increment_version(found.params.bind(py))?;
        py.detach(|| {
            // SAFETY: every tensor was checked for length and dtype and is kept alive, by its row or item; rows are
            // distinct, so spans don't overlap.
            unsafe { adam::run_jobs(&pool.inner, pool.isa, &jobs, adam::DEFAULT_CHUNK) };
        });
        let mut exact = true;
        for place in places {
            let row = &mut self.rows[place];
            row.k += 1;
            row.version = row.version.map(|version| version + 1);
            exact &= row.k <= EXACT;
            // SAFETY: one fp32 element, kept alive by the row; the GIL is held.
            unsafe { row.step.write(row.k as f32) };
        }
        Ok(exact)
    }
}

impl ParameterTable {
    /// Asks for torch's records of a parameter that the walk will come to, as far as their addresses are known.
    fn prefetch(&self, place: usize) {
        let Some(row) = self.rows.get(place) else { return };
        let [param, grad] = row.records;
        for address in [row.object, param, param.wrapping_sub(LINE), row.grad, grad, grad.wrapping_sub(LINE)]
        {
            prefetch(address);
        }
    }

    fn row(&self, param: &Bound<'_, PyAny>) -> PyResult<&Row> {
        let place = self.places.get(&identity(param));
        let place = place.ok_or_else(|| invalid("param", "not registered", "a registered parameter"))?;
        Ok(&self.rows[*place])
    }

    /// The index of a layout, of which even many parameters have few.
    fn layout(&mut self, layout: &Layout) -> usize {
        if let Some(&known) = self.known_layouts.get(layout) {
            return known;
        }
        self.layouts.push(layout.clone());
        self.known_layouts.insert(layout.clone(), self.layouts.len() - 1);
        self.layouts.len() - 1
    }

    /// The gradient, if it and the parameter are as the kernel takes them.
    fn usual(
        &self,
        reader: Reader,
        row: &Row,
        param: &Bound<'_, PyAny>,
        grad: &Bound<'_, PyAny>,
        (weight, view): &mut (View, View),
    ) -> PyResult<Option<Gradient>> {
        if row.gapped
            || !reader.read(param, weight)
            || weight.address != row.address
            || weight.layout != self.layouts[row.layout]
            || !reader.read(grad, view)
        {
            return Ok(None);
        }
        let (mine, its) = (&weight.layout, &view.layout);
        let Kind::Float(dtype) = its.kind else { return Ok(None) };
        let same_order = its.strides == mine.strides || (its.is_contiguous() && mine.is_contiguous());
        if its.shape != mine.shape || !same_order || !view.has_memory() {
            return Ok(None);
        }
        if let Some(version) = row.version {
            if version_of(param)? != version {
                return Ok(None);
            }
        }
        let numel = its.numel();
        // The imaginary part of a conjugate is negated lazily. It has gaps, unless it has one element.
        if numel == 1 && grad.call_method0(intern!(grad.py(), "is_neg"))?.is_truthy()? {
            return Ok(None);
        }
        Ok(Some(Gradient { address: view.address, dtype, numel }))
    }
}

/// Asks for a cache line, whatever the address.
fn prefetch(address: usize) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_mm_prefetch, _MM_HINT_T0};
        // SAFETY: a prefetch never faults, and every x86-64 has it.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(std::ptr::without_provenance(address)) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = address;
}

fn identity(object: &Bound<'_, PyAny>) -> usize {
    object.as_ptr().addr()
}

fn version_of(param: &Bound<'_, PyAny>) -> PyResult<i64> {
    param.getattr(intern!(param.py(), "_version"))?.extract()
}
