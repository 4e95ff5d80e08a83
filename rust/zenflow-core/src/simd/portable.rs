//! Arrays, for machines without a shell of their own and as the yardstick of the other shells.
//!
//! `f32::mul_add` is fused by definition; where the compile target has no such instruction it is a library call.

use half::{bf16, f16};

use super::words::ArrayWords;
use super::{Lanes, Task, LANES};

/// Sixteen lanes as the compiler likes them.
#[derive(Clone, Copy)]
pub(crate) struct Array([f32; LANES]);

/// The shell.
///
/// # Safety
///
/// The task's own conditions.
pub(crate) unsafe fn enter<T: Task>(task: T) -> T::Output {
    // SAFETY: no ISA is needed; the rest is the caller's.
    unsafe { task.run::<Array>() }
}

impl Array {
    #[inline(always)]
    fn map(self, f: impl Fn(usize, f32) -> f32) -> Self {
        Self(std::array::from_fn(|i| f(i, self.0[i])))
    }
}

impl Lanes for Array {
    type Half = [u16; LANES];
    type Words = ArrayWords;

    #[inline(always)]
    unsafe fn splat(x: f32) -> Self {
        Self([x; LANES])
    }

    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        // SAFETY: the caller gives 16 elements, whatever their alignment.
        Self(unsafe { from.cast::<[f32; LANES]>().read_unaligned() })
    }

    #[inline(always)]
    unsafe fn load_bf16(from: *const u16) -> Self {
        // SAFETY: as above.
        let half = unsafe { from.cast::<[u16; LANES]>().read_unaligned() };
        Self(half.map(|bits| f32::from_bits(u32::from(bits) << 16)))
    }

    #[inline(always)]
    unsafe fn load_f16(from: *const u16) -> Self {
        // SAFETY: as above.
        let half = unsafe { from.cast::<[u16; LANES]>().read_unaligned() };
        Self(half.map(|bits| f16::from_bits(bits).to_f32()))
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        // SAFETY: the caller gives room for 16 elements, whatever their alignment.
        unsafe { to.cast::<[f32; LANES]>().write_unaligned(self.0) }
    }

    #[inline(always)]
    unsafe fn stream(self, to: *mut f32) {
        // SAFETY: an ordinary store asks for less.
        unsafe { self.store(to) }
    }

    #[inline(always)]
    unsafe fn add(self, b: Self) -> Self {
        self.map(|i, a| a + b.0[i])
    }

    #[inline(always)]
    unsafe fn sub(self, b: Self) -> Self {
        self.map(|i, a| a - b.0[i])
    }

    #[inline(always)]
    unsafe fn mul(self, b: Self) -> Self {
        self.map(|i, a| a * b.0[i])
    }

    #[inline(always)]
    unsafe fn div(self, b: Self) -> Self {
        self.map(|i, a| a / b.0[i])
    }

    #[inline(always)]
    unsafe fn sqrt(self) -> Self {
        self.map(|_, a| a.sqrt())
    }

    #[inline(always)]
    unsafe fn mul_add(self, b: Self, c: Self) -> Self {
        self.map(|i, a| a.mul_add(b.0[i], c.0[i]))
    }

    #[inline(always)]
    unsafe fn mul_sub(self, b: Self, c: Self) -> Self {
        self.map(|i, a| a.mul_add(b.0[i], -c.0[i]))
    }

    #[inline(always)]
    unsafe fn to_words(self) -> ArrayWords {
        ArrayWords(self.0.map(f32::to_bits))
    }

    #[inline(always)]
    unsafe fn from_words(bits: ArrayWords) -> Self {
        Self(bits.0.map(f32::from_bits))
    }

    #[inline(always)]
    unsafe fn from_i32(words: ArrayWords) -> Self {
        Self(words.0.map(|x| x as i32 as f32))
    }

    #[inline(always)]
    unsafe fn where_nan(self, nan: ArrayWords, words: ArrayWords) -> ArrayWords {
        ArrayWords(std::array::from_fn(|i| if self.0[i].is_nan() { nan.0[i] } else { words.0[i] }))
    }

    #[inline(always)]
    unsafe fn to_bf16(self) -> Self::Half {
        self.0.map(|x| if x.is_nan() { 0x7FC0 } else { bf16::from_f32(x).to_bits() })
    }

    #[inline(always)]
    unsafe fn to_f16(self) -> Self::Half {
        self.0.map(|x| f16::from_f32(x).to_bits())
    }

    #[inline(always)]
    unsafe fn store_half(half: Self::Half, to: *mut u16) {
        // SAFETY: the caller gives room for 16 elements, whatever their alignment.
        unsafe { to.cast::<[u16; LANES]>().write_unaligned(half) }
    }

    #[inline(always)]
    unsafe fn stream_half(half: Self::Half, to: *mut u16) {
        // SAFETY: an ordinary store asks for less.
        unsafe { Self::store_half(half, to) }
    }

    #[inline(always)]
    unsafe fn prefetch(_: *const u8) {}

    #[inline(always)]
    unsafe fn fence() {}
}
