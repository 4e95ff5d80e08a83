//! Sixteen 32-bit words: the bits of sixteen lanes, for what a number format does to them.
//!
//! Integer arithmetic wraps and is exact, so it is the same on every ISA by itself.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "aarch64")]
mod neon;
mod portable;

#[cfg(target_arch = "x86_64")]
pub(super) use avx2::PairWords;
#[cfg(target_arch = "x86_64")]
pub(super) use avx512::SingleWords;
#[cfg(target_arch = "aarch64")]
pub(super) use neon::QuadWords;
pub(super) use portable::ArrayWords;

/// Sixteen `u32`.
///
/// # Safety
///
/// As for [`Lanes`](super::Lanes).
pub(crate) trait Words: Copy {
    unsafe fn splat(x: u32) -> Self;
    /// 0, 1, ... 15.
    unsafe fn count() -> Self;

    /// Sixteen bytes, extended by zeros.
    unsafe fn load_u8(from: *const u8) -> Self;
    /// Sixteen bytes, extended by their signs.
    unsafe fn load_i8(from: *const i8) -> Self;
    /// Sixteen halves, extended by zeros.
    unsafe fn load_u16(from: *const u16) -> Self;
    /// Stores words that are at most `u8::MAX`.
    unsafe fn store_u8(self, to: *mut u8);
    /// Stores words that are at most `u16::MAX`.
    unsafe fn store_u16(self, to: *mut u16);

    unsafe fn add(self, b: Self) -> Self;
    unsafe fn sub(self, b: Self) -> Self;
    /// The low word of each product.
    unsafe fn mul(self, b: Self) -> Self;
    unsafe fn and(self, b: Self) -> Self;
    unsafe fn or(self, b: Self) -> Self;
    unsafe fn xor(self, b: Self) -> Self;
    unsafe fn max(self, b: Self) -> Self;
    /// The difference of words that are at most `u16::MAX`; 0 where it is negative.
    unsafe fn sub_to_zero(self, b: Self) -> Self;
    /// `self`, with 0 where `b` is 0.
    unsafe fn zero_with(self, b: Self) -> Self;

    unsafe fn shl<const N: i32>(self) -> Self;
    /// Shifts zeros in.
    unsafe fn shr<const N: i32>(self) -> Self;
}
