//! Thirty-two 16-bit elements as two vectors: those at even places and those at odd ones.
//!
//! Read as words, two neighbours share one: the even one is its lower half, the odd one its upper (every machine that
//! this runs on is little-endian). So a shift and a mask take them apart and an "or" puts them together, where
//! widening and narrowing one vector after the other would shuffle lanes, which machines do one vector a cycle at
//! most. Which element lies in which lane is nobody's business, as long as all arrays agree.

// The essay of `simd` says why.
#![allow(clippy::inline_always)]

use crate::simd::{Lanes, Words};

/// The upper half of a word.
pub(super) const UPPER: u32 = 0xFFFF_0000;

/// The even elements and the odd ones.
pub(super) type Pair<X> = [X; 2];

/// Elements, each as the float32 whose upper half it is: bfloat16, exactly.
///
/// # Safety
///
/// 32 elements can be read, and the machine has the ISA of `V`; here and below.
#[inline(always)]
pub(super) unsafe fn load_upper<V: Lanes>(from: *const u8) -> Pair<V> {
    // SAFETY: the caller's promise.
    unsafe {
        let words = V::load(from.cast()).to_words();
        [V::from_words(words.shl::<16>()), V::from_words(words.and(V::Words::splat(UPPER)))]
    }
}

/// Elements, each in the lower half of its word, the upper half 0.
#[inline(always)]
pub(super) unsafe fn load_lower<V: Lanes>(from: *const u8) -> Pair<V::Words> {
    // SAFETY: the caller's promise.
    unsafe {
        let words = V::load(from.cast()).to_words();
        [words.and(V::Words::splat(!UPPER)), words.shr::<16>()]
    }
}

/// Stores the upper halves.
#[inline(always)]
pub(super) unsafe fn store_upper<V: Lanes>([even, odd]: Pair<V::Words>, to: *mut u8) {
    // SAFETY: the caller's promise.
    unsafe { V::from_words(even.shr::<16>().or(odd.and(V::Words::splat(UPPER)))).store(to.cast()) }
}

/// Stores the lower halves.
#[inline(always)]
pub(super) unsafe fn store_lower<V: Lanes>([even, odd]: Pair<V::Words>, to: *mut u8) {
    // SAFETY: the caller's promise.
    unsafe { V::from_words(even.and(V::Words::splat(!UPPER)).or(odd.shl::<16>())).store(to.cast()) }
}
