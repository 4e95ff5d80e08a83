//! Words in four NEON registers of 4.

use std::arch::aarch64::{
    uint32x4_t, vaddq_u32, vandq_u32, vcombine_u16, vdupq_n_u32, veorq_u32, vget_high_s16, vget_high_u16,
    vget_low_s16, vget_low_u16, vld1_s8, vld1_u16, vld1_u8, vld1q_u32, vmaxq_u32, vmovl_s16, vmovl_s8,
    vmovl_u16, vmovl_u8, vmovn_u16, vmovn_u32, vmulq_u32, vorrq_u32, vqsubq_u32, vreinterpretq_u32_s32,
    vshlq_n_u32, vshrq_n_u32, vst1_u16, vst1_u8, vsubq_u32, vtstq_u32,
};

use super::Words;

/// Words 0 to 3, 4 to 7, 8 to 11 and 12 to 15.
#[derive(Clone, Copy)]
pub(crate) struct QuadWords(pub(in crate::simd) [uint32x4_t; 4]);

/// The first of each pair where the second isn't 0.
#[inline(always)]
unsafe fn where_not_zero(a: uint32x4_t, b: uint32x4_t) -> uint32x4_t {
    // SAFETY: register arithmetic; the caller has NEON.
    unsafe { vandq_u32(a, vtstq_u32(b, b)) }
}

/// Methods of two operands.
macro_rules! binary {
    ($($name:ident $f:ident),+ $(,)?) => {$(
        #[inline(always)]
        unsafe fn $name(self, b: Self) -> Self {
            // SAFETY: register arithmetic; the caller has NEON.
            unsafe {
                Self([$f(self.0[0], b.0[0]), $f(self.0[1], b.0[1]), $f(self.0[2], b.0[2]), $f(self.0[3], b.0[3])])
            }
        }
    )+};
}

impl Words for QuadWords {
    #[inline(always)]
    unsafe fn splat(x: u32) -> Self {
        // SAFETY: the caller has NEON.
        Self([unsafe { vdupq_n_u32(x) }; 4])
    }

    #[inline(always)]
    unsafe fn count() -> Self {
        const COUNT: [u32; 16] = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15];
        let from = COUNT.as_ptr();
        // SAFETY: the array has 16 elements; the caller has NEON.
        unsafe {
            Self([vld1q_u32(from), vld1q_u32(from.add(4)), vld1q_u32(from.add(8)), vld1q_u32(from.add(12))])
        }
    }

    #[inline(always)]
    unsafe fn load_u8(from: *const u8) -> Self {
        // SAFETY: the caller gives 16 elements and NEON.
        unsafe {
            let (low, high) = (vmovl_u8(vld1_u8(from)), vmovl_u8(vld1_u8(from.add(8))));
            Self([
                vmovl_u16(vget_low_u16(low)),
                vmovl_u16(vget_high_u16(low)),
                vmovl_u16(vget_low_u16(high)),
                vmovl_u16(vget_high_u16(high)),
            ])
        }
    }

    #[inline(always)]
    unsafe fn load_i8(from: *const i8) -> Self {
        // SAFETY: the caller gives 16 elements and NEON.
        unsafe {
            let (low, high) = (vmovl_s8(vld1_s8(from)), vmovl_s8(vld1_s8(from.add(8))));
            let wide = [
                vmovl_s16(vget_low_s16(low)),
                vmovl_s16(vget_high_s16(low)),
                vmovl_s16(vget_low_s16(high)),
                vmovl_s16(vget_high_s16(high)),
            ];
            Self(wide.map(|x| vreinterpretq_u32_s32(x)))
        }
    }

    #[inline(always)]
    unsafe fn load_u16(from: *const u16) -> Self {
        // SAFETY: the caller gives 16 elements and NEON.
        unsafe {
            Self([
                vmovl_u16(vld1_u16(from)),
                vmovl_u16(vld1_u16(from.add(4))),
                vmovl_u16(vld1_u16(from.add(8))),
                vmovl_u16(vld1_u16(from.add(12))),
            ])
        }
    }

    #[inline(always)]
    unsafe fn store_u8(self, to: *mut u8) {
        // SAFETY: the caller gives room for 16 elements and NEON.
        unsafe {
            let low = vcombine_u16(vmovn_u32(self.0[0]), vmovn_u32(self.0[1]));
            let high = vcombine_u16(vmovn_u32(self.0[2]), vmovn_u32(self.0[3]));
            vst1_u8(to, vmovn_u16(low));
            vst1_u8(to.add(8), vmovn_u16(high));
        }
    }

    #[inline(always)]
    unsafe fn store_u16(self, to: *mut u16) {
        // SAFETY: the caller gives room for 16 elements and NEON.
        unsafe {
            vst1_u16(to, vmovn_u32(self.0[0]));
            vst1_u16(to.add(4), vmovn_u32(self.0[1]));
            vst1_u16(to.add(8), vmovn_u32(self.0[2]));
            vst1_u16(to.add(12), vmovn_u32(self.0[3]));
        }
    }

    binary! {
        add vaddq_u32, sub vsubq_u32, mul vmulq_u32, and vandq_u32, or vorrq_u32, xor veorq_u32,
        max vmaxq_u32, sub_to_zero vqsubq_u32, zero_with where_not_zero,
    }

    #[inline(always)]
    unsafe fn shl<const N: i32>(self) -> Self {
        // SAFETY: register arithmetic; the caller has NEON.
        Self(self.0.map(|x| unsafe { vshlq_n_u32::<N>(x) }))
    }

    #[inline(always)]
    unsafe fn shr<const N: i32>(self) -> Self {
        // SAFETY: as above.
        Self(self.0.map(|x| unsafe { vshrq_n_u32::<N>(x) }))
    }
}
