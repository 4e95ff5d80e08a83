//! The kernels for float32 moments, by the formats that go with them ([`Span::check`]).

use super::kernel::Update;
use super::moment::Wide;
use super::source::{Int8, Source};
use super::weight::{Master, Still, Weight};
use super::{Entry, GradDtype, Span, WeightFormat};
use crate::dtype::Dtype;
use crate::hyper::Scalars;
use crate::isa::Isa;
use crate::simd::{dispatch, Bf16, Nothing, F16, F32};

/// # Safety
///
/// As for [`super::update`], here and below.
pub(super) unsafe fn update(isa: Isa, entry: Entry, scalars: &Scalars, span: &Span) {
    if entry != Entry::Moments && span.weight == WeightFormat::Split {
        refused(entry, span);
    }
    // SAFETY: the caller's promises, passed on.
    unsafe {
        match span.grad_dtype {
            GradDtype::Float(Dtype::F32) => from::<F32>(isa, entry, scalars, span),
            GradDtype::Float(Dtype::Bf16) => from::<Bf16>(isa, entry, scalars, span),
            GradDtype::Float(Dtype::F16) => from::<F16>(isa, entry, scalars, span),
            GradDtype::Int8 => from_codes(isa, entry, scalars, span),
        }
    }
}

/// From gradients of the format `G`.
unsafe fn from<G: Source>(isa: Isa, entry: Entry, scalars: &Scalars, span: &Span) {
    // SAFETY: as above.
    unsafe {
        match (entry, out(span)) {
            (Entry::Moments, _) => run::<G, Still, false>(isa, scalars, span),
            (Entry::Move, None) => run::<G, Master<Nothing>, false>(isa, scalars, span),
            (Entry::Move, Some(Dtype::F32)) => run::<G, Master<F32>, false>(isa, scalars, span),
            (Entry::Move, Some(Dtype::Bf16)) => run::<G, Master<Bf16>, false>(isa, scalars, span),
            (Entry::Move, Some(Dtype::F16)) => run::<G, Master<F16>, false>(isa, scalars, span),
            (Entry::AdamL2, None) => run::<G, Master<Nothing>, true>(isa, scalars, span),
            (Entry::AdamL2, Some(Dtype::F32)) => run::<G, Master<F32>, true>(isa, scalars, span),
            (Entry::AdamL2, Some(Dtype::Bf16)) => run::<G, Master<Bf16>, true>(isa, scalars, span),
            (Entry::AdamL2, Some(Dtype::F16)) => run::<G, Master<F16>, true>(isa, scalars, span),
        }
    }
}

/// From 8-bit gradients.
unsafe fn from_codes(isa: Isa, entry: Entry, scalars: &Scalars, span: &Span) {
    // SAFETY: as above.
    unsafe {
        match (entry, out(span)) {
            (Entry::Moments, _) => run::<Int8, Still, false>(isa, scalars, span),
            (Entry::Move, Some(Dtype::F32)) => run::<Int8, Master<F32>, false>(isa, scalars, span),
            (Entry::Move, Some(Dtype::Bf16)) => run::<Int8, Master<Bf16>, false>(isa, scalars, span),
            (Entry::Move, Some(Dtype::F16)) => run::<Int8, Master<F16>, false>(isa, scalars, span),
            _ => refused(entry, span),
        }
    }
}

unsafe fn run<G: Source, W: Weight, const L2: bool>(isa: Isa, scalars: &Scalars, span: &Span) {
    // SAFETY: as above.
    unsafe { dispatch(isa, Update::<G, W, Wide, L2>::new(scalars, span)) }
}

/// Format of the copy of a float32 master, if there is one.
pub(super) fn out(span: &Span) -> Option<Dtype> {
    match span.weight {
        _ if span.out.is_null() => None,
        WeightFormat::Master(dtype) => Some(dtype),
        WeightFormat::Split => None,
    }
}

/// What [`Span::check`] refuses.
pub(super) fn refused(entry: Entry, span: &Span) -> ! {
    panic!("{:?}", span.check(entry))
}
