//! Adam, in one pass over memory.
//!
//! The module `kernel` holds the formula and the one algorithm; this file its border. [`update`] takes addresses,
//! for the engine; [`update_slices`] takes slices, checks them and is safe; [`run_jobs`] cuts many updates into even
//! pieces and runs them on a thread pool. All three give the same bits, on every ISA, thread count and slicing,
//! because nothing in the formula crosses from one element to another.

mod jobs;
mod kernel;
mod slices;

pub use jobs::{run_jobs, Job, DEFAULT_CHUNK};
pub use slices::{update_slices, Grad, Out};

use crate::dtype::Dtype;
use crate::hyper::Scalars;
use crate::isa::Isa;
use crate::simd::{dispatch, Bf16, Format, Nothing, Target, F16, F32};
use kernel::Update;

/// What is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Entry {
    /// The gradient enters the moments; the master isn't touched.
    Moments,
    /// The moments, then the weight moves: a close, and `AdamW`.
    Move,
    /// As [`Entry::Move`], with `l2` times the weight in the gradient first.
    AdamL2,
}

/// The memory of one update: parallel arrays of `len` elements each.
#[derive(Clone, Copy, Debug)]
pub struct Span {
    /// Master weight. Not touched, and may be null, in [`Entry::Moments`].
    pub master: *mut f32,
    /// First moment.
    pub exp_avg: *mut f32,
    /// Second moment.
    pub exp_avg_sq: *mut f32,
    /// Gradient, only read.
    pub grad: *const u8,
    /// Its format.
    pub grad_dtype: Dtype,
    /// Gets the moved weight, rounded to nearest; null where none is wanted. Not touched in [`Entry::Moments`].
    pub out: *mut u8,
    /// Its format.
    pub out_dtype: Dtype,
    /// Elements of each array.
    pub len: usize,
}

// SAFETY: a span is addresses and says nothing of who may use them; `update` and `run_jobs`, which do use them, ask
// their callers for exclusive use of what is behind, whichever thread it happens on.
unsafe impl Send for Span {}
// SAFETY: as above; a shared span gives away only copies of its addresses.
unsafe impl Sync for Span {}

impl Span {
    /// The `len` elements from `start` on.
    ///
    /// # Panics
    ///
    /// Where they aren't all within the span.
    #[must_use]
    pub fn slice(&self, start: usize, len: usize) -> Self {
        assert!(
            start <= self.len && len <= self.len - start,
            "elements {start}..{start}+{len} of a span of {}",
            self.len
        );
        let out =
            if self.out.is_null() { self.out } else { self.out.wrapping_add(start * self.out_dtype.size()) };
        Self {
            master: self.master.wrapping_add(start),
            exp_avg: self.exp_avg.wrapping_add(start),
            exp_avg_sq: self.exp_avg_sq.wrapping_add(start),
            grad: self.grad.wrapping_add(start * self.grad_dtype.size()),
            out,
            len,
            ..*self
        }
    }
}

/// Runs one update on the calling thread.
///
/// # Safety
///
/// `isa` is available. `grad` is readable and each array that `entry` writes is readable and writable for `len`
/// elements, by nobody else meanwhile; no two of them overlap. Alignment is free: it only costs time.
pub unsafe fn update(isa: Isa, entry: Entry, scalars: &Scalars, span: &Span) {
    // SAFETY: the caller's promises, passed on; each arm reads and writes the formats the span names.
    unsafe {
        match span.grad_dtype {
            Dtype::F32 => from::<F32>(isa, entry, scalars, span),
            Dtype::Bf16 => from::<Bf16>(isa, entry, scalars, span),
            Dtype::F16 => from::<F16>(isa, entry, scalars, span),
        }
    }
}

/// [`update`], the gradient's format known.
unsafe fn from<G: Format>(isa: Isa, entry: Entry, scalars: &Scalars, span: &Span) {
    // SAFETY: as above.
    unsafe {
        match (entry, span.out.is_null(), span.out_dtype) {
            (Entry::Moments, ..) => run::<G, Nothing, false, false>(isa, scalars, span),
            (Entry::Move, true, _) => run::<G, Nothing, true, false>(isa, scalars, span),
            (Entry::Move, false, Dtype::F32) => run::<G, F32, true, false>(isa, scalars, span),
            (Entry::Move, false, Dtype::Bf16) => run::<G, Bf16, true, false>(isa, scalars, span),
            (Entry::Move, false, Dtype::F16) => run::<G, F16, true, false>(isa, scalars, span),
            (Entry::AdamL2, true, _) => run::<G, Nothing, true, true>(isa, scalars, span),
            (Entry::AdamL2, false, Dtype::F32) => run::<G, F32, true, true>(isa, scalars, span),
            (Entry::AdamL2, false, Dtype::Bf16) => run::<G, Bf16, true, true>(isa, scalars, span),
            (Entry::AdamL2, false, Dtype::F16) => run::<G, F16, true, true>(isa, scalars, span),
        }
    }
}

unsafe fn run<G: Format, O: Target, const MOVE: bool, const L2: bool>(
    isa: Isa,
    scalars: &Scalars,
    span: &Span,
) {
    // SAFETY: the caller's promises, passed on.
    unsafe { dispatch(isa, Update::<G, O, MOVE, L2>::new(scalars, span)) }
}
