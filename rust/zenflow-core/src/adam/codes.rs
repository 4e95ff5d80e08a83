//! Moments in 8 bits: the codes, and the scales of their blocks.
//!
//! A block of [`BLOCK`] elements has a scale for each moment: the power of two at or above the largest magnitude in
//! it. What is kept of an element is its quotient by the scale, as a small float:
//!
//! ```text
//! exp_avg      sign, 4 bits of exponent, 3 of mantissa: 0, and 2^-15 (1 + 1/8) .. 1, eight steps an octave
//! exp_avg_sq   5 bits of exponent, 3 of mantissa:       2^-31 .. 1, eight steps an octave, never 0
//! ```
//!
//! - Both are the top bits of the float32 itself, moved down: encoding is an addition, a shift and a subtraction.
//! - Rounding is stochastic, as for bfloat16: with `beta2` of 0.999 an `exp_avg_sq` rounded to the nearest of eight
//!   steps an octave would never move again.
//! - A second moment never encodes to zero (code 0 is 2^-31): the step of its element would be as large as `eps` lets it.
//! - Powers of two make encoding what was decoded exact: a block survives the way through float32 bit for bit.
//! - The range of a second moment is twice that of a first one in octaves, since steps divide by its root.
//!
//! A block in which a moment isn't finite (or over 2^126) decodes to NaN as a whole.

// The essay of `simd` says why.
#![allow(clippy::inline_always)]

use crate::simd::{Lanes, Words};

/// Elements of a block.
pub const BLOCK: usize = 256;

/// Bits of a float32 that are cut off: all but 3 of its mantissa.
const CUT: i32 = 20;
/// Half of what is cut off: rounding to nearest.
const HALF: u32 = 1 << (CUT - 1);
/// What the top bits of the smallest exponent lose: code 0 of `exp_avg` stands for less than 2^-15.
const FIRST_BIAS: u32 = 112 << 3;
/// The same of `exp_avg_sq`, 2^-31.
const SECOND_BIAS: u32 = 96 << 3;

/// The largest magnitude that is kept: beyond it no scale has an inverse. A larger one counts as infinite.
const LARGEST: u32 = 253 << 23;

/// A scale, and what its elements are multiplied with.
///
/// `largest`: the bits of the largest magnitude of the block. NaN where it can't be kept.
pub(super) fn scale(largest: u32) -> (f32, f32) {
    if largest > LARGEST {
        return (f32::NAN, 0.0);
    }
    if largest == 0 {
        return (0.0, 0.0);
    }
    // The exponent, rounded up; at least that of the smallest normal number.
    let exponent = ((largest + 0x007F_FFFF) >> 23).max(1);
    (f32::from_bits(exponent << 23), f32::from_bits((254 - exponent) << 23))
}

/// Sixteen codes of `exp_avg`, decoded.
///
/// # Safety
///
/// 16 codes can be read, and the machine has the ISA of `V`; here and below.
#[inline(always)]
pub(super) unsafe fn decode_first<V: Lanes>(from: *const u8, scale: V) -> V {
    // SAFETY: the caller's promise.
    unsafe {
        let code = V::Words::load_i8(from.cast());
        let magnitude = code.and(V::Words::splat(0x7F));
        let bits = magnitude.shl::<CUT>().add(V::Words::splat(FIRST_BIAS << CUT)).zero_with(magnitude);
        V::from_words(bits.or(code.and(V::Words::splat(0x8000_0000)))).mul(scale)
    }
}

/// Sixteen codes of `exp_avg_sq`, decoded.
#[inline(always)]
pub(super) unsafe fn decode_second<V: Lanes>(from: *const u8, scale: V) -> V {
    // SAFETY: the caller's promise.
    unsafe {
        let bits = V::Words::load_u8(from).shl::<CUT>().add(V::Words::splat(SECOND_BIAS << CUT));
        V::from_words(bits).mul(scale)
    }
}

/// Encodes sixteen elements of `exp_avg`, finite ones, with the low 20 bits of `noise`.
#[inline(always)]
pub(super) unsafe fn encode_first<V: Lanes>(x: V, inverse: V, noise: V::Words, to: *mut u8) {
    // SAFETY: the caller's promise. A scale is at least as large as its elements: codes stay below 0x79.
    unsafe {
        let bits = x.mul(inverse).to_words();
        let magnitude =
            bits.and(V::Words::splat(0x7FFF_FFFF)).add(noise.and(V::Words::splat((1 << CUT) - 1)));
        let code = magnitude.shr::<CUT>().sub_to_zero(V::Words::splat(FIRST_BIAS));
        code.or(bits.shr::<24>().and(V::Words::splat(0x80))).store_u8(to);
    }
}

/// Encodes sixteen elements of `exp_avg_sq`, finite ones, with the high 20 bits of `noise`.
///
/// The eight bits that both moments draw decide what each does in a 4096th of cases at most.
#[inline(always)]
pub(super) unsafe fn encode_second<V: Lanes>(x: V, inverse: V, noise: V::Words, to: *mut u8) {
    // SAFETY: the caller's promise. A second moment isn't negative.
    unsafe {
        let bits = x.mul(inverse).to_words().add(noise.shr::<{ 32 - CUT }>());
        bits.shr::<CUT>().sub_to_zero(V::Words::splat(SECOND_BIAS)).store_u8(to);
    }
}

/// One code of `exp_avg`, decoded.
pub(super) fn first_of(code: u8, scale: f32) -> f32 {
    let magnitude = u32::from(code & 0x7F);
    let bits = if magnitude == 0 { 0 } else { (magnitude + FIRST_BIAS) << CUT };
    f32::from_bits(bits | u32::from(code & 0x80) << 24) * scale
}

/// One code of `exp_avg_sq`, decoded.
pub(super) fn second_of(code: u8, scale: f32) -> f32 {
    f32::from_bits((u32::from(code) + SECOND_BIAS) << CUT) * scale
}

/// The code nearest to an element of `exp_avg`.
pub(super) fn nearest_first(x: f32, inverse: f32) -> u8 {
    let bits = (x * inverse).to_bits();
    let code = ((bits & 0x7FFF_FFFF) + HALF) >> CUT;
    code.saturating_sub(FIRST_BIAS) as u8 | (bits >> 24) as u8 & 0x80
}

/// The code nearest to an element of `exp_avg_sq`.
pub(super) fn nearest_second(x: f32, inverse: f32) -> u8 {
    (((x * inverse).abs().to_bits() + HALF) >> CUT).saturating_sub(SECOND_BIAS) as u8
}
