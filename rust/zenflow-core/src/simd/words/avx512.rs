//! Words in one AVX-512 register.

use std::arch::x86_64::{
    __m512i, _mm256_loadu_si256, _mm256_storeu_si256, _mm512_add_epi32, _mm512_and_si512,
    _mm512_cvtepi32_epi16, _mm512_cvtepi32_epi8, _mm512_cvtepi8_epi32, _mm512_cvtepu16_epi32,
    _mm512_cvtepu8_epi32, _mm512_maskz_mov_epi32, _mm512_max_epu32, _mm512_mullo_epi32, _mm512_or_si512,
    _mm512_set1_epi32, _mm512_setr_epi32, _mm512_sllv_epi32, _mm512_srlv_epi32, _mm512_sub_epi32,
    _mm512_subs_epu16, _mm512_test_epi32_mask, _mm512_xor_si512, _mm_loadu_si128, _mm_storeu_si128,
};

use super::Words;

/// Sixteen words.
#[derive(Clone, Copy)]
pub(crate) struct SingleWords(pub(in crate::simd) __m512i);

/// Methods of two operands that are one intrinsic each.
macro_rules! binary {
    ($($name:ident $intrinsic:ident),+ $(,)?) => {$(
        #[inline(always)]
        unsafe fn $name(self, b: Self) -> Self {
            // SAFETY: register arithmetic; the caller has the features.
            unsafe { Self($intrinsic(self.0, b.0)) }
        }
    )+};
}

impl Words for SingleWords {
    #[inline(always)]
    unsafe fn splat(x: u32) -> Self {
        // SAFETY: the caller has the features.
        unsafe { Self(_mm512_set1_epi32(x as i32)) }
    }

    #[inline(always)]
    unsafe fn count() -> Self {
        // SAFETY: the caller has the features.
        unsafe { Self(_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)) }
    }

    #[inline(always)]
    unsafe fn load_u8(from: *const u8) -> Self {
        // SAFETY: the caller gives 16 elements and the features.
        unsafe { Self(_mm512_cvtepu8_epi32(_mm_loadu_si128(from.cast()))) }
    }

    #[inline(always)]
    unsafe fn load_i8(from: *const i8) -> Self {
        // SAFETY: the caller gives 16 elements and the features.
        unsafe { Self(_mm512_cvtepi8_epi32(_mm_loadu_si128(from.cast()))) }
    }

    #[inline(always)]
    unsafe fn load_u16(from: *const u16) -> Self {
        // SAFETY: the caller gives 16 elements and the features.
        unsafe { Self(_mm512_cvtepu16_epi32(_mm256_loadu_si256(from.cast()))) }
    }

    #[inline(always)]
    unsafe fn store_u8(self, to: *mut u8) {
        // SAFETY: the caller gives room for 16 elements and the features.
        unsafe { _mm_storeu_si128(to.cast(), _mm512_cvtepi32_epi8(self.0)) }
    }

    #[inline(always)]
    unsafe fn store_u16(self, to: *mut u16) {
        // SAFETY: the caller gives room for 16 elements and the features.
        unsafe { _mm256_storeu_si256(to.cast(), _mm512_cvtepi32_epi16(self.0)) }
    }

    binary! {
        add _mm512_add_epi32, sub _mm512_sub_epi32, mul _mm512_mullo_epi32, and _mm512_and_si512,
        or _mm512_or_si512, xor _mm512_xor_si512, max _mm512_max_epu32, sub_to_zero _mm512_subs_epu16,
    }

    #[inline(always)]
    unsafe fn zero_with(self, b: Self) -> Self {
        // SAFETY: register arithmetic; the caller has the features.
        unsafe { Self(_mm512_maskz_mov_epi32(_mm512_test_epi32_mask(b.0, b.0), self.0)) }
    }

    // The intrinsics of an immediate count take it as another type than other ISAs' do; the compiler makes one of
    // these where the count is known.
    #[inline(always)]
    unsafe fn shl<const N: i32>(self) -> Self {
        // SAFETY: register arithmetic; the caller has the features.
        unsafe { Self(_mm512_sllv_epi32(self.0, _mm512_set1_epi32(N))) }
    }

    #[inline(always)]
    unsafe fn shr<const N: i32>(self) -> Self {
        // SAFETY: as above.
        unsafe { Self(_mm512_srlv_epi32(self.0, _mm512_set1_epi32(N))) }
    }
}
