//! How a moment is kept, element by element.

// The essay of `simd` says why.
#![allow(clippy::inline_always)]

use super::pairs::{load_upper, store_upper, Pair};
use crate::simd::{Lanes, Words};

/// A format of one element after the other.
///
/// # Safety
///
/// The first two methods ask for 16 elements, those of pairs for 32; all for the ISA of `V`.
pub(super) trait Moment {
    /// Bytes of an element.
    const SIZE: usize;
    /// True where storing takes random bits.
    const NOISY: bool;
    /// True where it can be loaded and stored by [`pairs`](super::pairs).
    const PAIRS: bool = false;

    unsafe fn load<V: Lanes>(from: *const u8) -> V;
    /// `noise`: 16 random bits in each word.
    unsafe fn store<V: Lanes>(x: V, noise: V::Words, to: *mut u8);

    unsafe fn load_pair<V: Lanes>(_: *const u8) -> Pair<V> {
        unreachable!("it has no pairs")
    }

    unsafe fn store_pair<V: Lanes>(_: Pair<V>, _: Pair<V::Words>, _: *mut u8) {
        unreachable!("it has no pairs")
    }
}

/// float32, as computed.
pub(super) struct Wide;

impl Moment for Wide {
    const SIZE: usize = 4;
    const NOISY: bool = false;

    #[inline(always)]
    unsafe fn load<V: Lanes>(from: *const u8) -> V {
        // SAFETY: the caller's promise, passed on.
        unsafe { V::load(from.cast()) }
    }

    #[inline(always)]
    unsafe fn store<V: Lanes>(x: V, _: V::Words, to: *mut u8) {
        // SAFETY: the caller's promise, passed on.
        unsafe { x.store(to.cast()) }
    }
}

/// bfloat16, rounded up or down with the probabilities that make the mean exact: the noise is added below what is
/// kept, and the rest cut off. Rounding to nearest would stop an `exp_avg_sq` whose steps are a thousandth of it.
pub(super) struct Narrow;

impl Narrow {
    /// The element in the upper half; the lower half is to be cut off.
    ///
    /// The noise can't reach the sign but from a NaN, which is put in last; it does carry the largest numbers to
    /// infinity, as rounding to nearest does.
    #[inline(always)]
    unsafe fn round<V: Lanes>(x: V, noise: V::Words) -> V::Words {
        // SAFETY: the caller has the ISA.
        unsafe { x.where_nan(V::Words::splat(0x7FC0_0000), x.to_words().add(noise)) }
    }
}

impl Moment for Narrow {
    const SIZE: usize = 2;
    const NOISY: bool = true;
    const PAIRS: bool = true;

    #[inline(always)]
    unsafe fn load<V: Lanes>(from: *const u8) -> V {
        // SAFETY: the caller's promise, passed on.
        unsafe { V::load_bf16(from.cast()) }
    }

    #[inline(always)]
    unsafe fn store<V: Lanes>(x: V, noise: V::Words, to: *mut u8) {
        // SAFETY: the caller's promise, passed on.
        unsafe { Self::round(x, noise).shr::<16>().store_u16(to.cast()) }
    }

    #[inline(always)]
    unsafe fn load_pair<V: Lanes>(from: *const u8) -> Pair<V> {
        // SAFETY: the caller's promise, passed on.
        unsafe { load_upper(from) }
    }

    #[inline(always)]
    unsafe fn store_pair<V: Lanes>(x: Pair<V>, noise: Pair<V::Words>, to: *mut u8) {
        // SAFETY: the caller's promise, passed on.
        unsafe { store_upper::<V>([Self::round(x[0], noise[0]), Self::round(x[1], noise[1])], to) }
    }
}
