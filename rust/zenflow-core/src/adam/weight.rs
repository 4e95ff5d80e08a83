//! Where a weight is kept, and what becomes of it.

// The essay of `simd` says why.
#![allow(clippy::inline_always)]
// Vectors are loaded and stored at any alignment.
#![allow(clippy::cast_ptr_alignment)]

use std::marker::PhantomData;

use super::pairs::{load_lower, load_upper, store_lower, store_upper, Pair};
use super::Span;
use crate::simd::{Lanes, Target, Words};

/// A way to keep the weight that moves.
///
/// # Safety
///
/// The first two methods ask for 16 elements from `at` on, those of pairs for 32, in the arrays that the constants name;
/// all for the ISA of `V`.
pub(super) trait Weight {
    /// False where it doesn't move: then no method is called.
    const MOVES: bool = true;
    /// Bytes of an element of `master`.
    const MASTER: usize;
    /// Bytes of an element of `out`.
    const OUT: usize;
    /// True where `out` is read too, and so is in the caches.
    const READS_OUT: bool = false;
    /// True where it can be loaded and stored by [`pairs`](super::pairs).
    const PAIRS: bool = false;

    unsafe fn load<V: Lanes>(span: &Span, at: usize) -> V;
    unsafe fn store<V: Lanes, const STREAM: bool>(w: V, span: &Span, at: usize);

    unsafe fn load_pair<V: Lanes>(_: &Span, _: usize) -> Pair<V> {
        unreachable!("it has no pairs")
    }

    unsafe fn store_pair<V: Lanes>(_: Pair<V>, _: &Span, _: usize) {
        unreachable!("it has no pairs")
    }
}

/// It stays as it is.
pub(super) struct Still;

impl Weight for Still {
    const MOVES: bool = false;
    const MASTER: usize = 0;
    const OUT: usize = 0;
    const PAIRS: bool = true;

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

impl Split {
    /// The weight, from its upper half in the upper half of a word and its lower half in the lower one.
    #[inline(always)]
    unsafe fn join<V: Lanes>(shown: V::Words, low: V::Words) -> V {
        // SAFETY: the caller has the ISA.
        unsafe {
            let bits = shown.or(low).sub(V::Words::splat(0x8000));
            V::from_words(V::from_words(bits).where_nan(shown, bits))
        }
    }

    /// `y`, both halves.
    #[inline(always)]
    unsafe fn cut<V: Lanes>(w: V) -> V::Words {
        // SAFETY: the caller has the ISA.
        unsafe { w.where_nan(V::Words::splat(0x7FC0_0000), w.to_words()).add(V::Words::splat(0x8000)) }
    }
}

impl Weight for Split {
    const MASTER: usize = 2;
    const OUT: usize = 2;
    const READS_OUT: bool = true;
    const PAIRS: bool = true;

    #[inline(always)]
    unsafe fn load<V: Lanes>(span: &Span, at: usize) -> V {
        // SAFETY: the caller vouches for the elements and the ISA.
        unsafe {
            let high = V::Words::load_u16(span.out.cast::<u16>().add(at));
            let low = V::Words::load_u16(span.master.cast::<u16>().add(at));
            Self::join(high.shl::<16>(), low)
        }
    }

    #[inline(always)]
    unsafe fn store<V: Lanes, const STREAM: bool>(w: V, span: &Span, at: usize) {
        // SAFETY: the caller vouches for the elements and the ISA.
        unsafe {
            let y = Self::cut(w);
            y.shr::<16>().store_u16(span.out.cast::<u16>().add(at));
            y.and(V::Words::splat(0xFFFF)).store_u16(span.master.cast::<u16>().add(at));
        }
    }

    #[inline(always)]
    unsafe fn load_pair<V: Lanes>(span: &Span, at: usize) -> Pair<V> {
        // SAFETY: the caller vouches for the elements and the ISA.
        unsafe {
            let [shown0, shown1] = load_upper::<V>(span.out.add(2 * at));
            let [low0, low1] = load_lower::<V>(span.master.add(2 * at));
            [Self::join(shown0.to_words(), low0), Self::join(shown1.to_words(), low1)]
        }
    }

    #[inline(always)]
    unsafe fn store_pair<V: Lanes>(w: Pair<V>, span: &Span, at: usize) {
        // SAFETY: the caller vouches for the elements and the ISA.
        unsafe {
            let y = [Self::cut(w[0]), Self::cut(w[1])];
            store_upper::<V>(y, span.out.add(2 * at));
            store_lower::<V>(y, span.master.add(2 * at));
        }
    }
}
