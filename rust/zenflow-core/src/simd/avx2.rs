//! Two AVX registers of 8 lanes each. Needs AVX2 (integers), FMA and F16C.

use std::arch::x86_64::{
    __m128i, __m256, __m256i, _mm256_add_epi32, _mm256_add_ps, _mm256_and_si256, _mm256_blendv_epi8,
    _mm256_castps_si256, _mm256_castsi256_ps, _mm256_cmp_ps, _mm256_cvtepi32_ps, _mm256_cvtepu16_epi32,
    _mm256_cvtph_ps, _mm256_cvtps_ph, _mm256_div_ps, _mm256_fmadd_ps, _mm256_fmsub_ps, _mm256_loadu_ps,
    _mm256_mul_ps, _mm256_packus_epi32, _mm256_permute4x64_epi64, _mm256_set1_epi32, _mm256_set1_ps,
    _mm256_set_m128i, _mm256_slli_epi32, _mm256_sqrt_ps, _mm256_srli_epi32, _mm256_storeu_ps,
    _mm256_storeu_si256, _mm256_stream_ps, _mm256_stream_si256, _mm256_sub_ps, _mm_loadu_si128, _mm_prefetch,
    _mm_sfence, _CMP_UNORD_Q, _MM_FROUND_TO_NEAREST_INT, _MM_HINT_T1,
};

use super::words::PairWords;
use super::{Lanes, Task};

/// Lanes 0 to 7 and 8 to 15.
#[derive(Clone, Copy)]
pub(crate) struct Pair(__m256, __m256);

/// The shell.
///
/// # Safety
///
/// The machine has the three features; besides, the task's own conditions.
#[target_feature(enable = "avx2,fma,f16c")]
pub(crate) unsafe fn enter<T: Task>(task: T) -> T::Output {
    // SAFETY: the features are on here; the rest is the caller's.
    unsafe { task.run::<Pair>() }
}

/// Eight bfloat16 as float32: they are its upper halves.
#[inline(always)]
unsafe fn widen_bf16(from: *const u16) -> __m256 {
    // SAFETY: the caller gives 8 elements and the features.
    unsafe {
        _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(_mm_loadu_si128(from.cast()))))
    }
}

/// Eight float16 as float32.
#[inline(always)]
unsafe fn widen_f16(from: *const u16) -> __m256 {
    // SAFETY: the caller gives 8 elements and the features.
    unsafe { _mm256_cvtph_ps(_mm_loadu_si128(from.cast())) }
}

/// Eight float32 rounded to bfloat16, each in the low half of its lane.
///
/// Adding 0x7FFF, and one more where the part kept is odd, carries into the upper half exactly when nearest-even
/// rounds up; a carry into the exponent is right too, up to infinity. NaN would carry as well, so it is put in last.
#[inline(always)]
unsafe fn round_bf16(x: __m256) -> __m256i {
    // SAFETY: register arithmetic; the caller has the features.
    unsafe {
        let bits = _mm256_castps_si256(x);
        let kept = _mm256_srli_epi32::<16>(bits);
        let odd = _mm256_and_si256(kept, _mm256_set1_epi32(1));
        let carried = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7FFF)), odd);
        let is_nan = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_UNORD_Q>(x, x));
        _mm256_blendv_epi8(_mm256_srli_epi32::<16>(carried), _mm256_set1_epi32(0x7FC0), is_nan)
    }
}

impl Lanes for Pair {
    type Half = __m256i;
    type Words = PairWords;

    #[inline(always)]
    unsafe fn splat(x: f32) -> Self {
        // SAFETY: the caller has the features.
        unsafe { Self(_mm256_set1_ps(x), _mm256_set1_ps(x)) }
    }

    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        // SAFETY: the caller gives 16 elements and the features.
        unsafe { Self(_mm256_loadu_ps(from), _mm256_loadu_ps(from.add(8))) }
    }

    #[inline(always)]
    unsafe fn load_bf16(from: *const u16) -> Self {
        // SAFETY: the caller gives 16 elements and the features.
        unsafe { Self(widen_bf16(from), widen_bf16(from.add(8))) }
    }

    #[inline(always)]
    unsafe fn load_f16(from: *const u16) -> Self {
        // SAFETY: the caller gives 16 elements and the features.
        unsafe { Self(widen_f16(from), widen_f16(from.add(8))) }
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        // SAFETY: the caller gives room for 16 elements and the features.
        unsafe {
            _mm256_storeu_ps(to, self.0);
            _mm256_storeu_ps(to.add(8), self.1);
        }
    }

    #[inline(always)]
    unsafe fn stream(self, to: *mut f32) {
        // SAFETY: as for `store`, and the caller aligned `to` to a line.
        unsafe {
            _mm256_stream_ps(to, self.0);
            _mm256_stream_ps(to.add(8), self.1);
        }
    }

    #[inline(always)]
    unsafe fn add(self, b: Self) -> Self {
        // SAFETY: the caller has the features.
        unsafe { Self(_mm256_add_ps(self.0, b.0), _mm256_add_ps(self.1, b.1)) }
    }

    #[inline(always)]
    unsafe fn sub(self, b: Self) -> Self {
        // SAFETY: the caller has the features.
        unsafe { Self(_mm256_sub_ps(self.0, b.0), _mm256_sub_ps(self.1, b.1)) }
    }

    #[inline(always)]
    unsafe fn mul(self, b: Self) -> Self {
        // SAFETY: the caller has the features.
        unsafe { Self(_mm256_mul_ps(self.0, b.0), _mm256_mul_ps(self.1, b.1)) }
    }

    #[inline(always)]
    unsafe fn div(self, b: Self) -> Self {
        // SAFETY: the caller has the features.
        unsafe { Self(_mm256_div_ps(self.0, b.0), _mm256_div_ps(self.1, b.1)) }
    }

    #[inline(always)]
    unsafe fn sqrt(self) -> Self {
        // SAFETY: the caller has the features.
        unsafe { Self(_mm256_sqrt_ps(self.0), _mm256_sqrt_ps(self.1)) }
    }

    #[inline(always)]
    unsafe fn mul_add(self, b: Self, c: Self) -> Self {
        // SAFETY: the caller has the features.
        unsafe { Self(_mm256_fmadd_ps(self.0, b.0, c.0), _mm256_fmadd_ps(self.1, b.1, c.1)) }
    }

    #[inline(always)]
    unsafe fn mul_sub(self, b: Self, c: Self) -> Self {
        // SAFETY: the caller has the features.
        unsafe { Self(_mm256_fmsub_ps(self.0, b.0, c.0), _mm256_fmsub_ps(self.1, b.1, c.1)) }
    }

    #[inline(always)]
    unsafe fn to_words(self) -> PairWords {
        // SAFETY: the caller has the features.
        unsafe { PairWords(_mm256_castps_si256(self.0), _mm256_castps_si256(self.1)) }
    }

    #[inline(always)]
    unsafe fn from_words(bits: PairWords) -> Self {
        // SAFETY: the caller has the features.
        unsafe { Self(_mm256_castsi256_ps(bits.0), _mm256_castsi256_ps(bits.1)) }
    }

    #[inline(always)]
    unsafe fn from_i32(words: PairWords) -> Self {
        // SAFETY: the caller has the features.
        unsafe { Self(_mm256_cvtepi32_ps(words.0), _mm256_cvtepi32_ps(words.1)) }
    }

    #[inline(always)]
    unsafe fn where_nan(self, nan: PairWords, words: PairWords) -> PairWords {
        // SAFETY: the caller has the features.
        unsafe {
            let is_nan = |x| _mm256_castps_si256(_mm256_cmp_ps::<_CMP_UNORD_Q>(x, x));
            PairWords(
                _mm256_blendv_epi8(words.0, nan.0, is_nan(self.0)),
                _mm256_blendv_epi8(words.1, nan.1, is_nan(self.1)),
            )
        }
    }

    #[inline(always)]
    unsafe fn to_bf16(self) -> Self::Half {
        // SAFETY: the caller has the features. Packing interleaves the 128-bit halves of its operands (a0 b0 a1 b1);
        // the permutation undoes that.
        unsafe {
            let packed = _mm256_packus_epi32(round_bf16(self.0), round_bf16(self.1));
            _mm256_permute4x64_epi64::<0b11_01_10_00>(packed)
        }
    }

    #[inline(always)]
    unsafe fn to_f16(self) -> Self::Half {
        // SAFETY: the caller has the features.
        unsafe {
            let low: __m128i = _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(self.0);
            let high: __m128i = _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(self.1);
            _mm256_set_m128i(high, low)
        }
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
