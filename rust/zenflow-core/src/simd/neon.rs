//! Four NEON registers of 4 lanes each.
//!
//! float16 goes through `half`, lane by lane: Rust's float16 vectors aren't stable. There is no streaming store to
//! speak of; an ordinary one does.

use std::arch::aarch64::{
    float32x4_t, uint16x4_t, uint32x4_t, vaddq_f32, vaddq_u32, vandq_u32, vbslq_u32, vceqq_f32,
    vcvtq_f32_s32, vdivq_f32, vdupq_n_f32, vdupq_n_u32, vfmaq_f32, vld1_u16, vld1q_f32, vmovn_u32, vmulq_f32,
    vnegq_f32, vreinterpretq_f32_u32, vreinterpretq_s32_u32, vreinterpretq_u32_f32, vshll_n_u16, vshrq_n_u32,
    vsqrtq_f32, vst1_u16, vst1q_f32, vsubq_f32,
};

use half::f16;

use super::words::QuadWords;
use super::{Lanes, Task, LANES};

/// Lanes 0 to 3, 4 to 7, 8 to 11 and 12 to 15.
#[derive(Clone, Copy)]
pub(crate) struct Quad([float32x4_t; 4]);

/// The shell.
///
/// # Safety
///
/// The machine has NEON; besides, the task's own conditions.
#[target_feature(enable = "neon")]
pub(crate) unsafe fn enter<T: Task>(task: T) -> T::Output {
    // SAFETY: the feature is on here; the rest is the caller's.
    unsafe { task.run::<Quad>() }
}

/// Applies an intrinsic of one, two or three operands to each register.
macro_rules! each {
    ($f:ident, $($x:expr),+) => {
        // SAFETY: register arithmetic; the caller has NEON.
        unsafe { Quad([$f($($x.0[0]),+), $f($($x.0[1]),+), $f($($x.0[2]),+), $f($($x.0[3]),+)]) }
    };
}

/// Four float32 rounded to bfloat16. `avx2::round_bf16` says why it rounds so.
#[inline(always)]
unsafe fn round_bf16(x: float32x4_t) -> uint16x4_t {
    // SAFETY: register arithmetic; the caller has NEON.
    unsafe {
        let bits: uint32x4_t = vreinterpretq_u32_f32(x);
        let odd = vandq_u32(vshrq_n_u32::<16>(bits), vdupq_n_u32(1));
        let carried = vaddq_u32(vaddq_u32(bits, vdupq_n_u32(0x7FFF)), odd);
        let is_number = vceqq_f32(x, x);
        vmovn_u32(vbslq_u32(is_number, vshrq_n_u32::<16>(carried), vdupq_n_u32(0x7FC0)))
    }
}

impl Lanes for Quad {
    type Half = [uint16x4_t; 4];
    type Words = QuadWords;

    #[inline(always)]
    unsafe fn splat(x: f32) -> Self {
        // SAFETY: the caller has NEON.
        Self([unsafe { vdupq_n_f32(x) }; 4])
    }

    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        // SAFETY: the caller gives 16 elements and NEON.
        unsafe {
            Self([vld1q_f32(from), vld1q_f32(from.add(4)), vld1q_f32(from.add(8)), vld1q_f32(from.add(12))])
        }
    }

    #[inline(always)]
    unsafe fn load_bf16(from: *const u16) -> Self {
        // SAFETY: the caller gives 16 elements and NEON. A bfloat16 is the upper half of its float32.
        unsafe {
            Self([
                vreinterpretq_f32_u32(vshll_n_u16::<16>(vld1_u16(from))),
                vreinterpretq_f32_u32(vshll_n_u16::<16>(vld1_u16(from.add(4)))),
                vreinterpretq_f32_u32(vshll_n_u16::<16>(vld1_u16(from.add(8)))),
                vreinterpretq_f32_u32(vshll_n_u16::<16>(vld1_u16(from.add(12)))),
            ])
        }
    }

    #[inline(always)]
    unsafe fn load_f16(from: *const u16) -> Self {
        let mut wide = [0.0f32; LANES];
        for (i, x) in wide.iter_mut().enumerate() {
            // SAFETY: the caller gives 16 elements, whatever their alignment.
            *x = f16::from_bits(unsafe { from.add(i).read_unaligned() }).to_f32();
        }
        // SAFETY: `wide` has 16 elements.
        unsafe { Self::load(wide.as_ptr()) }
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        // SAFETY: the caller gives room for 16 elements and NEON.
        unsafe {
            vst1q_f32(to, self.0[0]);
            vst1q_f32(to.add(4), self.0[1]);
            vst1q_f32(to.add(8), self.0[2]);
            vst1q_f32(to.add(12), self.0[3]);
        }
    }

    #[inline(always)]
    unsafe fn stream(self, to: *mut f32) {
        // SAFETY: an ordinary store asks for less.
        unsafe { self.store(to) }
    }

    #[inline(always)]
    unsafe fn add(self, b: Self) -> Self {
        each!(vaddq_f32, self, b)
    }

    #[inline(always)]
    unsafe fn sub(self, b: Self) -> Self {
        each!(vsubq_f32, self, b)
    }

    #[inline(always)]
    unsafe fn mul(self, b: Self) -> Self {
        each!(vmulq_f32, self, b)
    }

    #[inline(always)]
    unsafe fn div(self, b: Self) -> Self {
        each!(vdivq_f32, self, b)
    }

    #[inline(always)]
    unsafe fn sqrt(self) -> Self {
        each!(vsqrtq_f32, self)
    }

    #[inline(always)]
    unsafe fn mul_add(self, b: Self, c: Self) -> Self {
        each!(vfmaq_f32, c, self, b)
    }

    #[inline(always)]
    unsafe fn mul_sub(self, b: Self, c: Self) -> Self {
        let minus_c = each!(vnegq_f32, c);
        each!(vfmaq_f32, minus_c, self, b)
    }

    #[inline(always)]
    unsafe fn to_words(self) -> QuadWords {
        // SAFETY: the caller has NEON.
        QuadWords(self.0.map(|x| unsafe { vreinterpretq_u32_f32(x) }))
    }

    #[inline(always)]
    unsafe fn from_words(bits: QuadWords) -> Self {
        // SAFETY: the caller has NEON.
        Self(bits.0.map(|x| unsafe { vreinterpretq_f32_u32(x) }))
    }

    #[inline(always)]
    unsafe fn from_i32(words: QuadWords) -> Self {
        // SAFETY: the caller has NEON.
        Self(words.0.map(|x| unsafe { vcvtq_f32_s32(vreinterpretq_s32_u32(x)) }))
    }

    #[inline(always)]
    unsafe fn where_nan(self, nan: QuadWords, words: QuadWords) -> QuadWords {
        // SAFETY: the caller has NEON.
        QuadWords(std::array::from_fn(|i| unsafe {
            vbslq_u32(vceqq_f32(self.0[i], self.0[i]), words.0[i], nan.0[i])
        }))
    }

    #[inline(always)]
    unsafe fn to_bf16(self) -> Self::Half {
        // SAFETY: the caller has NEON.
        unsafe {
            [round_bf16(self.0[0]), round_bf16(self.0[1]), round_bf16(self.0[2]), round_bf16(self.0[3])]
        }
    }

    #[inline(always)]
    unsafe fn to_f16(self) -> Self::Half {
        let mut wide = [0.0f32; LANES];
        // SAFETY: `wide` has room for 16 elements.
        unsafe { self.store(wide.as_mut_ptr()) };
        let half = wide.map(|x| f16::from_f32(x).to_bits());
        let from = half.as_ptr();
        // SAFETY: `half` has 16 elements; the caller has NEON.
        unsafe { [vld1_u16(from), vld1_u16(from.add(4)), vld1_u16(from.add(8)), vld1_u16(from.add(12))] }
    }

    #[inline(always)]
    unsafe fn store_half(half: Self::Half, to: *mut u16) {
        // SAFETY: the caller gives room for 16 elements and NEON.
        unsafe {
            vst1_u16(to, half[0]);
            vst1_u16(to.add(4), half[1]);
            vst1_u16(to.add(8), half[2]);
            vst1_u16(to.add(12), half[3]);
        }
    }

    #[inline(always)]
    unsafe fn stream_half(half: Self::Half, to: *mut u16) {
        // SAFETY: an ordinary store asks for less.
        unsafe { Self::store_half(half, to) }
    }

    #[inline(always)]
    unsafe fn prefetch(from: *const u8) {
        // SAFETY: a prefetch never faults and changes nothing.
        unsafe {
            std::arch::asm!("prfm pldl2keep, [{}]", in(reg) from, options(nostack, preserves_flags, readonly));
        }
    }

    #[inline(always)]
    unsafe fn fence() {}
}
