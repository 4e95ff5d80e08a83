//! Adam, in one pass over memory.
//!
//! The module `formula` holds the formula; `kernel` and `blocks` the two algorithms around it, for moments that are
//! kept element by element and in blocks; `source`, `moment`, `codes` and `weight` the formats they are made of. This
//! file is their border. [`update`] takes addresses, for the engine; [`update_slices`] takes slices, checks them and is
//! safe; [`run_jobs`] cuts many updates into even pieces and runs them on a thread pool. All three give the same bits,
//! on every ISA, thread count and slicing, because nothing crosses from one element (or block) to another.

mod blocks;
mod codes;
mod convert;
mod formula;
mod jobs;
mod kernel;
mod lean;
mod moment;
mod noise;
mod pad;
mod pairs;
mod slices;
mod source;
mod weight;
mod wide;

pub use codes::BLOCK;
pub use convert::Moments;
pub(crate) use jobs::Region;
pub use jobs::{run_jobs, Job, DEFAULT_CHUNK};
pub use slices::{update_slices, Grad, Out};

use std::ptr;

use crate::dtype::{Dtype, StateDtype};
use crate::error::{Error, Result};
use crate::hyper::Scalars;
use crate::isa::Isa;
use lean::{InBf16, InInt8};

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

/// Elements that share a scale in [`GradDtype::Int8`].
pub const GRAD_BLOCK: usize = 128;

/// Format of a gradient.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum GradDtype {
    /// Floats.
    Float(Dtype),
    /// Signed bytes; a float32 scale for every [`GRAD_BLOCK`] of them.
    Int8,
}

impl GradDtype {
    /// Bytes of one element, scales not counted.
    #[must_use]
    pub const fn size(self) -> usize {
        match self {
            Self::Float(dtype) => dtype.size(),
            Self::Int8 => 1,
        }
    }
}

impl From<Dtype> for GradDtype {
    fn from(dtype: Dtype) -> Self {
        Self::Float(dtype)
    }
}

/// How the weight that moves is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum WeightFormat {
    /// A float32 in `master`, and a copy rounded to nearest in `out`, unless that is null.
    Master(Dtype),
    /// A float32 in two halves, its bits plus 0x8000: the upper ones in `out` are the weight as bfloat16, the lower
    /// ones are in `master`.
    Split,
}

impl WeightFormat {
    /// Bytes of an element of `master`.
    #[must_use]
    pub const fn master_size(self) -> usize {
        match self {
            Self::Master(_) => 4,
            Self::Split => 2,
        }
    }

    /// Bytes of an element of `out`.
    #[must_use]
    pub const fn out_size(self) -> usize {
        match self {
            Self::Master(dtype) => dtype.size(),
            Self::Split => 2,
        }
    }
}

/// The memory of one update: parallel arrays of `len` elements each.
///
/// In [`StateDtype::Int8`] and [`GradDtype::Int8`] the first element begins a block.
#[derive(Clone, Copy, Debug)]
pub struct Span {
    /// Master weight, or its lower halves. Not touched, and may be null, in [`Entry::Moments`].
    pub master: *mut u8,
    /// First moment.
    pub exp_avg: *mut u8,
    /// Second moment.
    pub exp_avg_sq: *mut u8,
    /// Format of both.
    pub state_dtype: StateDtype,
    /// Two scales a [`BLOCK`], the first and the second moment's, aligned as `f32`; only in [`StateDtype::Int8`].
    pub scales: *mut f32,
    /// Gradient, only read.
    pub grad: *const u8,
    /// Its format.
    pub grad_dtype: GradDtype,
    /// One scale a [`GRAD_BLOCK`]; only in [`GradDtype::Int8`].
    pub grad_scales: *const f32,
    /// Gets the moved weight; null where none is wanted. Not touched in [`Entry::Moments`].
    pub out: *mut u8,
    /// Format of the weight in `master` and `out`.
    pub weight: WeightFormat,
    /// Number of the first element within its parameter: stochastic rounding depends on it.
    pub position: u64,
    /// Elements of each array.
    pub len: usize,
}

// SAFETY: a span is addresses and says nothing of who may use them; `update` and `run_jobs`, which do use them, ask
// their callers for exclusive use of what is behind, whichever thread it happens on.
unsafe impl Send for Span {}
// SAFETY: as above; a shared span gives away only copies of its addresses.
unsafe impl Sync for Span {}

impl Default for Span {
    /// Nothing, in float32.
    fn default() -> Self {
        Self {
            master: ptr::null_mut(),
            exp_avg: ptr::null_mut(),
            exp_avg_sq: ptr::null_mut(),
            state_dtype: StateDtype::F32,
            scales: ptr::null_mut(),
            grad: ptr::null(),
            grad_dtype: GradDtype::Float(Dtype::F32),
            grad_scales: ptr::null(),
            out: ptr::null_mut(),
            weight: WeightFormat::Master(Dtype::F32),
            position: 0,
            len: 0,
        }
    }
}

impl Span {
    /// Refuses combinations of formats that no kernel is made for, since nothing comes with them.
    ///
    /// Gradients of any float format go with float32 moments; lean moments, and 8-bit gradients, only with a weight
    /// whose copy is in the gradient's format, or from float32 and 8-bit gradients to any. Split weights have lean
    /// moments and bfloat16 gradients. L2 is for weights that no bus is crossed for: float32 in place, and copies in
    /// the gradient's format.
    #[allow(clippy::match_same_arms)] // in the order of the sentences above
    pub fn check(&self, entry: Entry) -> Result<()> {
        use Dtype::{Bf16, F32};
        let lean = self.state_dtype != StateDtype::F32;
        let alone = matches!(self.weight, WeightFormat::Master(_)) && self.out.is_null();
        let copy = (!alone).then_some(self.weight);
        let fits = match (entry, self.grad_dtype, copy) {
            (Entry::Moments, ..) => true,
            (_, GradDtype::Float(grad), Some(WeightFormat::Split)) => lean && grad == Bf16,
            (_, GradDtype::Float(_), _) if !lean => true,
            (Entry::AdamL2, GradDtype::Float(F32), None) => true,
            (Entry::AdamL2, GradDtype::Float(grad), Some(WeightFormat::Master(out))) => grad == out,
            (Entry::Move, GradDtype::Float(F32), None) => true,
            (Entry::Move, GradDtype::Float(grad), Some(WeightFormat::Master(out))) => {
                grad == F32 || grad == out
            }
            (Entry::Move, GradDtype::Int8, Some(WeightFormat::Master(_))) => true,
            _ => false,
        };
        if fits {
            return Ok(());
        }
        let value = format!(
            "{entry:?} of {:?} gradients and {} moments with the weight as {copy:?}",
            self.grad_dtype,
            self.state_dtype.name()
        );
        Err(Error::invalid("formats", value, "a gradient in the weight's format, or float32 moments"))
    }

    /// The `len` elements from `start` on; in formats of blocks `start` is a multiple of theirs.
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
        // Null stays null.
        let out = if self.out.is_null() { 0 } else { start * self.weight.out_size() };
        let scales = if self.scales.is_null() { 0 } else { self.state_dtype.scales(start) };
        Self {
            master: self.master.wrapping_add(start * self.weight.master_size()),
            exp_avg: self.exp_avg.wrapping_add(start * self.state_dtype.size()),
            exp_avg_sq: self.exp_avg_sq.wrapping_add(start * self.state_dtype.size()),
            scales: self.scales.wrapping_add(scales),
            grad: self.grad.wrapping_add(start * self.grad_dtype.size()),
            grad_scales: self.grad_scales.wrapping_add(start / GRAD_BLOCK),
            out: self.out.wrapping_add(out),
            position: self.position + start as u64,
            len,
            ..*self
        }
    }
}

/// Runs one update on the calling thread.
///
/// # Panics
///
/// Where [`Span::check`] refuses it.
///
/// # Safety
///
/// `isa` is available. `grad` is readable and each array that `entry` writes is readable and writable for `len`
/// elements, by nobody else meanwhile; no two of them overlap. Alignment is free but for scales: it only costs time.
pub unsafe fn update(isa: Isa, entry: Entry, scalars: &Scalars, span: &Span) {
    // SAFETY: the caller's promises, passed on; each arm reads and writes the formats the span names.
    unsafe {
        match span.state_dtype {
            StateDtype::F32 => wide::update(isa, entry, scalars, span),
            StateDtype::Bf16 => lean::update::<InBf16>(isa, entry, scalars, span),
            StateDtype::Int8 => lean::update::<InInt8>(isa, entry, scalars, span),
        }
    }
}
