//! Where a gradient comes from.

// The essay of `simd` says why.
#![allow(clippy::inline_always)]

use super::pairs::{load_upper, Pair};
use super::{Span, GRAD_BLOCK};
use crate::simd::{Format, Lanes, Words};

/// A gradient's format.
pub(super) trait Source {
    /// Bytes of an element of `grad`.
    const SIZE: usize;
    /// True where vectors may only start at multiples of their length: others would cross the border of a block.
    const BLOCKED: bool = false;
    /// True where it can be loaded by [`pairs`](super::pairs).
    const PAIRS: bool = false;

    /// Sixteen elements from `at` on.
    ///
    /// # Safety
    ///
    /// They exist, and the machine has the ISA of `V`; here and below.
    unsafe fn load<V: Lanes>(span: &Span, at: usize) -> V;

    /// Thirty-two elements from `at` on.
    unsafe fn load_pair<V: Lanes>(_: &Span, _: usize) -> Pair<V> {
        unreachable!("it has no pairs")
    }
}

/// A float format is one.
impl<F: Format> Source for F {
    const SIZE: usize = F::SIZE;
    const PAIRS: bool = F::UPPER;

    #[inline(always)]
    unsafe fn load<V: Lanes>(span: &Span, at: usize) -> V {
        // SAFETY: the caller vouches for the elements and the ISA.
        unsafe { F::load(span.grad.add(at * F::SIZE)) }
    }

    #[inline(always)]
    unsafe fn load_pair<V: Lanes>(span: &Span, at: usize) -> Pair<V> {
        // SAFETY: the caller vouches for the elements and the ISA.
        unsafe { load_upper(span.grad.add(at * F::SIZE)) }
    }
}

/// Signed bytes, times the scale of their block of [`GRAD_BLOCK`].
pub(super) struct Int8;

impl Source for Int8 {
    const SIZE: usize = 1;
    const BLOCKED: bool = true;

    #[inline(always)]
    unsafe fn load<V: Lanes>(span: &Span, at: usize) -> V {
        // SAFETY: the caller vouches for the elements, and so for their block's scale, and for the ISA.
        unsafe {
            let codes = V::Words::load_i8(span.grad.add(at).cast());
            let scale = span.grad_scales.add(at / GRAD_BLOCK).read_unaligned();
            V::from_i32(codes).mul(V::splat(scale))
        }
    }
}
