//! Words as an array.

use super::Words;
use crate::simd::LANES;

/// Sixteen words as the compiler likes them.
#[derive(Clone, Copy)]
pub(crate) struct ArrayWords(pub(in crate::simd) [u32; LANES]);

impl ArrayWords {
    #[inline(always)]
    fn zip(self, b: Self, f: impl Fn(u32, u32) -> u32) -> Self {
        Self(std::array::from_fn(|i| f(self.0[i], b.0[i])))
    }
}

impl Words for ArrayWords {
    #[inline(always)]
    unsafe fn splat(x: u32) -> Self {
        Self([x; LANES])
    }

    #[inline(always)]
    unsafe fn count() -> Self {
        Self(std::array::from_fn(|i| i as u32))
    }

    #[inline(always)]
    unsafe fn load_u8(from: *const u8) -> Self {
        // SAFETY: the caller gives 16 elements.
        Self(unsafe { from.cast::<[u8; LANES]>().read_unaligned() }.map(u32::from))
    }

    #[inline(always)]
    unsafe fn load_i8(from: *const i8) -> Self {
        // SAFETY: the caller gives 16 elements.
        Self(unsafe { from.cast::<[i8; LANES]>().read_unaligned() }.map(|x| i32::from(x) as u32))
    }

    #[inline(always)]
    unsafe fn load_u16(from: *const u16) -> Self {
        // SAFETY: the caller gives 16 elements, whatever their alignment.
        Self(unsafe { from.cast::<[u16; LANES]>().read_unaligned() }.map(u32::from))
    }

    #[inline(always)]
    unsafe fn store_u8(self, to: *mut u8) {
        // SAFETY: the caller gives room for 16 elements.
        unsafe { to.cast::<[u8; LANES]>().write_unaligned(self.0.map(|x| x as u8)) }
    }

    #[inline(always)]
    unsafe fn store_u16(self, to: *mut u16) {
        // SAFETY: the caller gives room for 16 elements, whatever their alignment.
        unsafe { to.cast::<[u16; LANES]>().write_unaligned(self.0.map(|x| x as u16)) }
    }

    #[inline(always)]
    unsafe fn add(self, b: Self) -> Self {
        self.zip(b, u32::wrapping_add)
    }

    #[inline(always)]
    unsafe fn sub(self, b: Self) -> Self {
        self.zip(b, u32::wrapping_sub)
    }

    #[inline(always)]
    unsafe fn mul(self, b: Self) -> Self {
        self.zip(b, u32::wrapping_mul)
    }

    #[inline(always)]
    unsafe fn and(self, b: Self) -> Self {
        self.zip(b, |x, y| x & y)
    }

    #[inline(always)]
    unsafe fn or(self, b: Self) -> Self {
        self.zip(b, |x, y| x | y)
    }

    #[inline(always)]
    unsafe fn xor(self, b: Self) -> Self {
        self.zip(b, |x, y| x ^ y)
    }

    #[inline(always)]
    unsafe fn max(self, b: Self) -> Self {
        self.zip(b, u32::max)
    }

    #[inline(always)]
    unsafe fn sub_to_zero(self, b: Self) -> Self {
        self.zip(b, u32::saturating_sub)
    }

    #[inline(always)]
    unsafe fn zero_with(self, b: Self) -> Self {
        self.zip(b, |x, y| if y == 0 { 0 } else { x })
    }

    #[inline(always)]
    unsafe fn shl<const N: i32>(self) -> Self {
        Self(self.0.map(|x| x << N))
    }

    #[inline(always)]
    unsafe fn shr<const N: i32>(self) -> Self {
        Self(self.0.map(|x| x >> N))
    }
}
