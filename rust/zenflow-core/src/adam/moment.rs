//! How a moment is kept, element by element.

// The essay of `simd` says why.
#![allow(clippy::inline_always)]

use crate::simd::{Lanes, Words};

/// A format of one element after the other.
///
/// # Safety
///
/// Both methods ask for 16 elements and for the ISA of `V`.
pub(super) trait Moment {
    /// Bytes of an element.
    const SIZE: usize;
    /// True where storing takes random bits.
    const NOISY: bool;

    unsafe fn load<V: Lanes>(from: *const u8) -> V;
    /// `noise`: 16 random bits in each word.
    unsafe fn store<V: Lanes>(x: V, noise: V::Words, to: *mut u8);
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

impl Moment for Narrow {
    const SIZE: usize = 2;
    const NOISY: bool = true;

    #[inline(always)]
    unsafe fn load<V: Lanes>(from: *const u8) -> V {
        // SAFETY: the caller's promise, passed on.
        unsafe { V::load_bf16(from.cast()) }
    }

    #[inline(always)]
    unsafe fn store<V: Lanes>(x: V, noise: V::Words, to: *mut u8) {
        // SAFETY: the caller's promise, passed on. The noise can't reach the sign but from a NaN, which is put in
        // last; it does carry the largest numbers to infinity, as rounding to nearest does.
        unsafe {
            x.where_nan(V::Words::splat(0x7FC0_0000), x.to_words().add(noise))
                .shr::<16>()
                .store_u16(to.cast());
        }
    }
}
