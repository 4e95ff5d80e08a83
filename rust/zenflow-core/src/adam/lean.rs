//! The kernels for lean moments, by the formats that go with them ([`Span::check`]).

use super::blocks::BlockUpdate;
use super::kernel::Update;
use super::moment::Narrow;
use super::source::{Int8, Source};
use super::weight::{Master, Split, Still, Weight};
use super::wide::{out, refused};
use super::{Entry, GradDtype, Span, WeightFormat};
use crate::dtype::Dtype;
use crate::hyper::Scalars;
use crate::isa::Isa;
use crate::simd::{dispatch, Bf16, Nothing, F16, F32};

/// A format of lean moments.
pub(super) trait Format {
    /// # Safety
    ///
    /// As for [`super::update`].
    unsafe fn run<G: Source, W: Weight, const L2: bool>(isa: Isa, scalars: &Scalars, span: &Span);
}

/// bfloat16.
pub(super) struct InBf16;

impl Format for InBf16 {
    unsafe fn run<G: Source, W: Weight, const L2: bool>(isa: Isa, scalars: &Scalars, span: &Span) {
        // SAFETY: the caller's promise.
        unsafe { dispatch(isa, Update::<G, W, Narrow, L2>::new(scalars, span)) }
    }
}

/// Blocks of 8 bits.
pub(super) struct InInt8;

impl Format for InInt8 {
    unsafe fn run<G: Source, W: Weight, const L2: bool>(isa: Isa, scalars: &Scalars, span: &Span) {
        // SAFETY: the caller's promise.
        unsafe { dispatch(isa, BlockUpdate::<G, W, L2>::new(scalars, span)) }
    }
}

/// # Safety
///
/// As for [`super::update`], here and below.
pub(super) unsafe fn update<M: Format>(isa: Isa, entry: Entry, scalars: &Scalars, span: &Span) {
    // SAFETY: the caller's promises, passed on.
    unsafe {
        match entry {
            Entry::Moments => moments::<M>(isa, scalars, span),
            Entry::Move => moving::<M>(isa, scalars, span),
            Entry::AdamL2 => pulled::<M>(isa, scalars, span),
        }
    }
}

unsafe fn moments<M: Format>(isa: Isa, scalars: &Scalars, span: &Span) {
    // SAFETY: as above.
    unsafe {
        match span.grad_dtype {
            GradDtype::Float(Dtype::F32) => M::run::<F32, Still, false>(isa, scalars, span),
            GradDtype::Float(Dtype::Bf16) => M::run::<Bf16, Still, false>(isa, scalars, span),
            GradDtype::Float(Dtype::F16) => M::run::<F16, Still, false>(isa, scalars, span),
            GradDtype::Int8 => M::run::<Int8, Still, false>(isa, scalars, span),
        }
    }
}

unsafe fn moving<M: Format>(isa: Isa, scalars: &Scalars, span: &Span) {
    use GradDtype::Float;
    if span.weight == WeightFormat::Split {
        // SAFETY: as above.
        return unsafe { split::<M, false>(isa, Entry::Move, scalars, span) };
    }
    // SAFETY: as above.
    unsafe {
        match (span.grad_dtype, out(span)) {
            (Float(Dtype::F32), None) => M::run::<F32, Master<Nothing>, false>(isa, scalars, span),
            (Float(Dtype::F32), Some(Dtype::F32)) => M::run::<F32, Master<F32>, false>(isa, scalars, span),
            (Float(Dtype::F32), Some(Dtype::Bf16)) => M::run::<F32, Master<Bf16>, false>(isa, scalars, span),
            (Float(Dtype::F32), Some(Dtype::F16)) => M::run::<F32, Master<F16>, false>(isa, scalars, span),
            (Float(Dtype::Bf16), Some(Dtype::Bf16)) => {
                M::run::<Bf16, Master<Bf16>, false>(isa, scalars, span);
            }
            (Float(Dtype::F16), Some(Dtype::F16)) => M::run::<F16, Master<F16>, false>(isa, scalars, span),
            (GradDtype::Int8, Some(Dtype::F32)) => M::run::<Int8, Master<F32>, false>(isa, scalars, span),
            (GradDtype::Int8, Some(Dtype::Bf16)) => M::run::<Int8, Master<Bf16>, false>(isa, scalars, span),
            (GradDtype::Int8, Some(Dtype::F16)) => M::run::<Int8, Master<F16>, false>(isa, scalars, span),
            _ => refused(Entry::Move, span),
        }
    }
}

unsafe fn pulled<M: Format>(isa: Isa, scalars: &Scalars, span: &Span) {
    use GradDtype::Float;
    if span.weight == WeightFormat::Split {
        // SAFETY: as above.
        return unsafe { split::<M, true>(isa, Entry::AdamL2, scalars, span) };
    }
    // SAFETY: as above.
    unsafe {
        match (span.grad_dtype, out(span)) {
            (Float(Dtype::F32), None) => M::run::<F32, Master<Nothing>, true>(isa, scalars, span),
            (Float(Dtype::F32), Some(Dtype::F32)) => M::run::<F32, Master<F32>, true>(isa, scalars, span),
            (Float(Dtype::Bf16), Some(Dtype::Bf16)) => M::run::<Bf16, Master<Bf16>, true>(isa, scalars, span),
            (Float(Dtype::F16), Some(Dtype::F16)) => M::run::<F16, Master<F16>, true>(isa, scalars, span),
            _ => refused(Entry::AdamL2, span),
        }
    }
}

unsafe fn split<M: Format, const L2: bool>(isa: Isa, entry: Entry, scalars: &Scalars, span: &Span) {
    if span.grad_dtype != GradDtype::Float(Dtype::Bf16) {
        refused(entry, span);
    }
    // SAFETY: as above.
    unsafe { M::run::<Bf16, Split, L2>(isa, scalars, span) }
}
