//! Random bits for stochastic rounding: a function of the step and of an element's position in its parameter.
//!
//! So they don't depend on threads, cuts or ISAs, and a run that goes on from a checkpoint draws what it would have
//! drawn. Each element gets 32 bits, the lower ones for the first moment, the upper ones for the second:
//!
//! ```text
//! x <- golden position ^ seed(k);  x <- (x ^ x >> 16) odd;  x <- x ^ x >> 15
//! ```
//!
//! Golden multiples spread over all words evenly; half of a murmur-like finalizer mixes them. That is as much as
//! rounding needs, and not much work. Of a position only the low 32 bits count: elements 4 Gi apart draw alike.

// The essay of `simd` says why.
#![allow(clippy::inline_always)]

use super::pairs::Pair;
use crate::simd::{Lanes, Words};

/// 2^32 divided by the golden ratio.
const GOLDEN: u32 = 0x9E37_79B9;

/// The generator of one update.
#[derive(Clone, Copy)]
pub(super) struct Noise<V: Lanes> {
    seed: V::Words,
    /// Golden multiples 0 to 15.
    first: V::Words,
    /// Golden multiples 0, 2 to 30.
    even: V::Words,
    odd: V::Words,
}

impl<V: Lanes> Noise<V> {
    /// # Safety
    ///
    /// The machine has the ISA of `V`, here and below.
    #[inline(always)]
    pub(super) unsafe fn new(seed: u32) -> Self {
        // SAFETY: the caller has the ISA.
        unsafe {
            Self {
                seed: V::Words::splat(seed),
                first: V::Words::count().mul(V::Words::splat(GOLDEN)),
                even: V::Words::count().mul(V::Words::splat(GOLDEN.wrapping_mul(2))),
                odd: V::Words::splat(0x7FEB_352D),
            }
        }
    }

    /// 32 bits for each of the 16 elements from `position` on.
    #[inline(always)]
    pub(super) unsafe fn bits(self, position: u64) -> V::Words {
        // SAFETY: the caller has the ISA.
        unsafe { self.mixed(self.first, position) }
    }

    /// 32 bits for each of the 32 elements from `position` on.
    #[inline(always)]
    pub(super) unsafe fn pair(self, position: u64) -> Pair<V::Words> {
        // SAFETY: the caller has the ISA.
        unsafe { [self.mixed(self.even, position), self.mixed(self.even, position.wrapping_add(1))] }
    }

    #[inline(always)]
    unsafe fn mixed(self, multiples: V::Words, position: u64) -> V::Words {
        // SAFETY: the caller has the ISA.
        unsafe {
            let start = (position as u32).wrapping_mul(GOLDEN);
            let x = multiples.add(V::Words::splat(start)).xor(self.seed);
            let x = x.xor(x.shr::<16>()).mul(self.odd);
            x.xor(x.shr::<15>())
        }
    }
}
