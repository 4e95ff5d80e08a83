//! Where a weight is kept, and what becomes of it.

// The essay of `simd` says why.
#![allow(clippy::inline_always)]
// Vectors are loaded and stored at any alignment.
#![allow(clippy::cast_ptr_alignment)]

use std::marker::PhantomData;

use super::Span;
use crate::simd::{Lanes, Target, Words};

/// A way to keep the weight that moves.
///
/// # Safety
///
/// Both methods ask for 16 elements from `at` on, in the arrays that the constants name, and for the ISA of `V`.
pub(super) trait Weight {
    /// False where it doesn't move: then neither method is called.
    const MOVES: bool = true;
    /// Bytes of an element of `master`.
    const MASTER: usize;
    /// Bytes of an element of `out`.
    const OUT: usize;
    /// True where `out` is read too, and so is in the caches.
    const READS_OUT: bool = false;

    unsafe fn load<V: Lanes>(span: &Span, at: usize) -> V;
    unsafe fn store<V: Lanes, const STREAM: bool>(w: V, span: &Span, at: usize);
}

/// It stays as it is.
pub(super) struct Still;

impl Weight for Still {
    const MOVES: bool = false;
    const MASTER: usize = 0;
    const OUT: usize = 0;

    #[inline(always)]
    unsafe fn load<V: Lanes>(_: &Span, _: usize) -> V {
        unreachable!("a weight that doesn't move is not read")
    }

    #[inline(always)]
    unsafe fn store<V: Lanes, const STREAM: bool>(_: V, _: &Span, _: usize) {}
}

/// A float32 master, and a copy of it, rounded to nearest, in the format `O`.
pub(super) struct Master<O>(PhantomData<O>);

impl<O: Target> Weight for Master<O> {
    const MASTER: usize = 4;
    const OUT: usize = O::SIZE;

    #[inline(always)]
    unsafe fn load<V: Lanes>(span: &Span, at: usize) -> V {
        // SAFETY: the caller vouches for the elements and the ISA.
        unsafe { V::load(span.master.cast::<f32>().add(at)) }
    }

    #[inline(always)]
    unsafe fn store<V: Lanes, const STREAM: bool>(w: V, span: &Span, at: usize) {
        // Without an output its address is null and goes nowhere, hence no `add`.
        let out = span.out.wrapping_add(at * O::SIZE);
        // SAFETY: the caller vouches for the elements, the ISA, and the alignment of `out` if it streams.
        unsafe {
            w.store(span.master.cast::<f32>().add(at));
            if STREAM {
                O::stream(w, out);
            } else {
                O::store(w, out);
            }
        }
    }
}

/// A float32 in two halves: with `y = bits + 0x8000`, the upper half of `y`, in `out`, is the weight as bfloat16
/// (rounded to nearest, ties away from zero), the lower half, in `master`, is what it lacks. Nothing is lost, and
/// nothing is kept twice: 4 bytes an element in place of 6.
///
/// NaN is made the quiet one first: the largest payloads would carry into the sign. Where someone else wrote the
/// upper half, the lower one may join it to a NaN (as below zero); then the upper half alone is the weight.
pub(super) struct Split;

impl Weight for Split {
    const MASTER: usize = 2;
    const OUT: usize = 2;
    const READS_OUT: bool = true;

    #[inline(always)]
    unsafe fn load<V: Lanes>(span: &Span, at: usize) -> V {
        // SAFETY: the caller vouches for the elements and the ISA.
        unsafe {
            let high = V::Words::load_u16(span.out.cast::<u16>().add(at));
            let low = V::Words::load_u16(span.master.cast::<u16>().add(at));
            let shown = high.shl::<16>();
            let bits = shown.or(low).sub(V::Words::splat(0x8000));
            V::from_words(V::from_words(bits).where_nan(shown, bits))
        }
    }

    #[inline(always)]
    unsafe fn store<V: Lanes, const STREAM: bool>(w: V, span: &Span, at: usize) {
        // SAFETY: the caller vouches for the elements and the ISA.
        unsafe {
            let y = w.where_nan(V::Words::splat(0x7FC0_0000), w.to_words()).add(V::Words::splat(0x8000));
            y.shr::<16>().store_u16(span.out.cast::<u16>().add(at));
            y.and(V::Words::splat(0xFFFF)).store_u16(span.master.cast::<u16>().add(at));
        }
    }
}
