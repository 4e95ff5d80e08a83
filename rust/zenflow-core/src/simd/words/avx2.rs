//! Words in two AVX registers of 8.

use std::arch::x86_64::{
    __m256i, _mm256_add_epi32, _mm256_and_si256, _mm256_andnot_si256, _mm256_castsi256_si128,
    _mm256_cmpeq_epi32, _mm256_cvtepi8_epi32, _mm256_cvtepu16_epi32, _mm256_cvtepu8_epi32,
    _mm256_extracti128_si256, _mm256_max_epu32, _mm256_mullo_epi32, _mm256_or_si256, _mm256_packus_epi32,
    _mm256_permute4x64_epi64, _mm256_set1_epi32, _mm256_setr_epi32, _mm256_setzero_si256, _mm256_slli_epi32,
    _mm256_srli_epi32, _mm256_storeu_si256, _mm256_sub_epi32, _mm256_subs_epu16, _mm256_xor_si256,
    _mm_loadl_epi64, _mm_loadu_si128, _mm_packus_epi16, _mm_storeu_si128,
};

use super::Words;

/// Words 0 to 7 and 8 to 15.
#[derive(Clone, Copy)]
pub(crate) struct PairWords(pub(in crate::simd) __m256i, pub(in crate::simd) __m256i);

impl PairWords {
    /// Sixteen halves from words that are at most `u16::MAX`.
    ///
    /// Packing interleaves the 128-bit halves of its operands (a0 b0 a1 b1); the permutation undoes that.
    #[inline(always)]
    unsafe fn halves(self) -> __m256i {
        // SAFETY: register arithmetic; the caller has the features.
        unsafe { _mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_packus_epi32(self.0, self.1)) }
    }
}

/// Methods of two operands that are one intrinsic each.
macro_rules! binary {
    ($($name:ident $intrinsic:ident),+ $(,)?) => {$(
        #[inline(always)]
        unsafe fn $name(self, b: Self) -> Self {
            // SAFETY: register arithmetic; the caller has the features.
            unsafe { Self($intrinsic(self.0, b.0), $intrinsic(self.1, b.1)) }
        }
    )+};
}

/// Shifts by a constant.
macro_rules! shift {
    ($($name:ident $intrinsic:ident),+ $(,)?) => {$(
        #[inline(always)]
        unsafe fn $name<const N: i32>(self) -> Self {
            // SAFETY: register arithmetic; the caller has the features.
            unsafe { Self($intrinsic::<N>(self.0), $intrinsic::<N>(self.1)) }
        }
    )+};
}

impl Words for PairWords {
    #[inline(always)]
    unsafe fn splat(x: u32) -> Self {
        // SAFETY: the caller has the features.
        unsafe { Self(_mm256_set1_epi32(x as i32), _mm256_set1_epi32(x as i32)) }
    }

    #[inline(always)]
    unsafe fn count() -> Self {
        // SAFETY: the caller has the features.
        unsafe {
            Self(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15))
        }
    }

    #[inline(always)]
    unsafe fn load_u8(from: *const u8) -> Self {
        // SAFETY: the caller gives 16 elements and the features.
        unsafe {
            Self(
                _mm256_cvtepu8_epi32(_mm_loadl_epi64(from.cast())),
                _mm256_cvtepu8_epi32(_mm_loadl_epi64(from.add(8).cast())),
            )
        }
    }

    #[inline(always)]
    unsafe fn load_i8(from: *const i8) -> Self {
        // SAFETY: the caller gives 16 elements and the features.
        unsafe {
            Self(
                _mm256_cvtepi8_epi32(_mm_loadl_epi64(from.cast())),
                _mm256_cvtepi8_epi32(_mm_loadl_epi64(from.add(8).cast())),
            )
        }
    }

    #[inline(always)]
    unsafe fn load_u16(from: *const u16) -> Self {
        // SAFETY: the caller gives 16 elements and the features.
        unsafe {
            Self(
                _mm256_cvtepu16_epi32(_mm_loadu_si128(from.cast())),
                _mm256_cvtepu16_epi32(_mm_loadu_si128(from.add(8).cast())),
            )
        }
    }

    #[inline(always)]
    unsafe fn store_u8(self, to: *mut u8) {
        // SAFETY: the caller gives room for 16 elements and the features.
        unsafe {
            let halves = self.halves();
            let (low, high) = (_mm256_castsi256_si128(halves), _mm256_extracti128_si256::<1>(halves));
            _mm_storeu_si128(to.cast(), _mm_packus_epi16(low, high));
        }
    }

    #[inline(always)]
    unsafe fn store_u16(self, to: *mut u16) {
        // SAFETY: the caller gives room for 16 elements and the features.
        unsafe { _mm256_storeu_si256(to.cast(), self.halves()) }
    }

    binary! {
        add _mm256_add_epi32, sub _mm256_sub_epi32, mul _mm256_mullo_epi32, and _mm256_and_si256,
        or _mm256_or_si256, xor _mm256_xor_si256, max _mm256_max_epu32, sub_to_zero _mm256_subs_epu16,
    }

    #[inline(always)]
    unsafe fn zero_with(self, b: Self) -> Self {
        // SAFETY: register arithmetic; the caller has the features.
        unsafe {
            let zero = _mm256_setzero_si256();
            Self(
                _mm256_andnot_si256(_mm256_cmpeq_epi32(b.0, zero), self.0),
                _mm256_andnot_si256(_mm256_cmpeq_epi32(b.1, zero), self.1),
            )
        }
    }

    shift! { shl _mm256_slli_epi32, shr _mm256_srli_epi32 }
}
