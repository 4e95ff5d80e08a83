//! One AVX-512 register of 16 lanes. Needs F, BW, VL and DQ (and what they imply).

use std::arch::x86_64::{
    __m256i, __m512, _mm256_loadu_si256, _mm256_storeu_si256, _mm256_stream_si256, _mm512_add_epi32,
    _mm512_add_ps, _mm512_and_si512, _mm512_castps_si512, _mm512_castsi512_ps, _mm512_cmp_ps_mask,
    _mm512_cvtepi32_epi16, _mm512_cvtepi32_ps, _mm512_cvtepu16_epi32, _mm512_cvtph_ps, _mm512_cvtps_ph,
    _mm512_div_ps, _mm512_fmadd_ps, _mm512_fmsub_ps, _mm512_loadu_ps, _mm512_mask_mov_epi32, _mm512_mul_ps,
    _mm512_set1_epi32, _mm512_set1_ps, _mm512_slli_epi32, _mm512_sqrt_ps, _mm512_srli_epi32,
    _mm512_storeu_ps, _mm512_stream_ps, _mm512_sub_ps, _mm_prefetch, _mm_sfence, _CMP_UNORD_Q,
    _MM_FROUND_TO_NEAREST_INT, _MM_HINT_T1,
};

use super::words::SingleWords;
use super::{Lanes, Task};

/// Sixteen lanes.
#[derive(Clone, Copy)]
pub(crate) struct Single(__m512);

/// The shell.
///
/// # Safety
///
/// The machine has the features; besides, the task's own conditions.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
pub(crate) unsafe fn enter<T: Task>(task: T) -> T::Output {
    // SAFETY: the features are on here; the rest is the caller's.
    unsafe { task.run::<Single>() }
}

impl Lanes for Single {
    type Half = __m256i;
    type Words = SingleWords;

    #[inline(always)]
    unsafe fn splat(x: f32) -> Self {
        // SAFETY: the caller has the features.
        unsafe { Self(_mm512_set1_ps(x)) }
    }

    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        // SAFETY: the caller gives 16 elements and the features.
        unsafe { Self(_mm512_loadu_ps(from)) }
    }

    #[inline(always)]
    unsafe fn load_bf16(from: *const u16) -> Self {
        // SAFETY: the caller gives 16 elements and the features. A bfloat16 is the upper half of its float32.
        unsafe {
            let wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(from.cast()));
            Self(_mm512_castsi512_ps(_mm512_slli_epi32::<16>(wide)))
        }
    }

    #[inline(always)]
    unsafe fn load_f16(from: *const u16) -> Self {
        // SAFETY: the caller gives 16 elements and the features.
        unsafe { Self(_mm512_cvtph_ps(_mm256_loadu_si256(from.cast()))) }
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        // SAFETY: the caller gives room for 16 elements and the features.
        unsafe { _mm512_storeu_ps(to, self.0) }
    }

    #[inline(always)]
    unsafe fn stream(self, to: *mut f32) {
        // SAFETY: as for `store`, and the caller aligned `to` to a line.
        unsafe { _mm512_stream_ps(to, self.0) }
    }

    #[inline(always)]
    unsafe fn add(self, b: Self) -> Self {
        // SAFETY: the caller has the features.
        unsafe { Self(_mm512_add_ps(self.0, b.0)) }
    }

    #[inline(always)]
    unsafe fn sub(self, b: Self) -> Self {
        // SAFETY: the caller has the features.
        unsafe { Self(_mm512_sub_ps(self.0, b.0)) }
    }

    #[inline(always)]
    unsafe fn mul(self, b: Self) -> Self {
        // SAFETY: the caller has the features.
        unsafe { Self(_mm512_mul_ps(self.0, b.0)) }
    }

    #[inline(always)]
    unsafe fn div(self, b: Self) -> Self {
        // SAFETY: the caller has the features.
        unsafe { Self(_mm512_div_ps(self.0, b.0)) }
    }

    #[inline(always)]
    unsafe fn sqrt(self) -> Self {
        // SAFETY: the caller has the features.
        unsafe { Self(_mm512_sqrt_ps(self.0)) }
    }

    #[inline(always)]
    unsafe fn mul_add(self, b: Self, c: Self) -> Self {
        // SAFETY: the caller has the features.
        unsafe { Self(_mm512_fmadd_ps(self.0, b.0, c.0)) }
    }

    #[inline(always)]
    unsafe fn mul_sub(self, b: Self, c: Self) -> Self {
        // SAFETY: the caller has the features.
        unsafe { Self(_mm512_fmsub_ps(self.0, b.0, c.0)) }
    }

    #[inline(always)]
    unsafe fn to_words(self) -> SingleWords {
        // SAFETY: the caller has the features.
        unsafe { SingleWords(_mm512_castps_si512(self.0)) }
    }

    #[inline(always)]
    unsafe fn from_words(bits: SingleWords) -> Self {
        // SAFETY: the caller has the features.
        unsafe { Self(_mm512_castsi512_ps(bits.0)) }
    }

    #[inline(always)]
    unsafe fn from_i32(words: SingleWords) -> Self {
        // SAFETY: the caller has the features.
        unsafe { Self(_mm512_cvtepi32_ps(words.0)) }
    }

    #[inline(always)]
    unsafe fn where_nan(self, nan: SingleWords, words: SingleWords) -> SingleWords {
        // SAFETY: the caller has the features.
        unsafe {
            let is_nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(self.0, self.0);
            SingleWords(_mm512_mask_mov_epi32(words.0, is_nan, nan.0))
        }
    }

    #[inline(always)]
    unsafe fn to_bf16(self) -> Self::Half {
        // SAFETY: register arithmetic; the caller has the features. `avx2::round_bf16` says why it rounds so.
        unsafe {
            let bits = _mm512_castps_si512(self.0);
            let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
            let carried = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7FFF)), odd);
            let is_nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(self.0, self.0);
            let kept =
                _mm512_mask_mov_epi32(_mm512_srli_epi32::<16>(carried), is_nan, _mm512_set1_epi32(0x7FC0));
            _mm512_cvtepi32_epi16(kept)
        }
    }

    #[inline(always)]
    unsafe fn to_f16(self) -> Self::Half {
        // SAFETY: the caller has the features.
        unsafe { _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(self.0) }
    }

    #[inline(always)]
    unsafe fn store_half(half: Self::Half, to: *mut u16) {
        // SAFETY: the caller gives room for 16 elements and the features.
        unsafe { _mm256_storeu_si256(to.cast(), half) }
    }

    #[inline(always)]
    unsafe fn stream_half(half: Self::Half, to: *mut u16) {
        // SAFETY: as for `store_half`; each half of an aligned line is aligned to the 32 bytes this takes.
        unsafe { _mm256_stream_si256(to.cast(), half) }
    }

    #[inline(always)]
    unsafe fn prefetch(from: *const u8) {
        // SAFETY: a prefetch never faults.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(from.cast()) }
    }

    #[inline(always)]
    unsafe fn fence() {
        // SAFETY: every x86-64 has it.
        unsafe { _mm_sfence() }
    }
}
