//! The kernel for moments in blocks of 8-bit codes. `formula` has the formula, `codes` the format.
//!
//! A block's new scale is known when all of it is computed, so a block goes twice: decode and update, moments to a
//! buffer that stays in the first cache; then encode. It starts at a multiple of [`BLOCK`] of its parameter wherever
//! work is cut, so the bits don't depend on cuts. Prefetch and streaming are as in `kernel`.

// The essay of `simd` says why.
#![allow(clippy::inline_always)]

use std::marker::PhantomData;

use super::codes::{decode_first, decode_second, encode_first, encode_second, scale, BLOCK};
use super::formula::Formula;
use super::kernel::{ask_ahead, streams_from};
use super::noise::Noise;
use super::pad::Pad;
use super::source::Source;
use super::weight::Weight;
use super::Span;
use crate::hyper::Scalars;
use crate::simd::{Lanes, Task, Words, LANES};

/// One update: gradient, weight, and whether the weight enters the gradient.
pub(super) struct BlockUpdate<'a, G, W, const L2: bool> {
    scalars: &'a Scalars,
    span: &'a Span,
    formats: PhantomData<(G, W)>,
}

impl<'a, G, W, const L2: bool> BlockUpdate<'a, G, W, L2> {
    pub(super) fn new(scalars: &'a Scalars, span: &'a Span) -> Self {
        Self { scalars, span, formats: PhantomData }
    }
}

/// The moments of a block between its two passes.
struct Buffer {
    first: [f32; BLOCK],
    second: [f32; BLOCK],
}

/// The scales of a block: those of its codes, or the inverses.
#[derive(Clone, Copy)]
struct Pair<V> {
    first: V,
    second: V,
}

impl<G: Source, W: Weight, const L2: bool> Task for BlockUpdate<'_, G, W, L2> {
    type Output = ();

    /// Asks for what [`super::update`] asks for.
    #[inline(always)]
    unsafe fn run<V: Lanes>(self) {
        let span = self.span;
        let streams = streams_from::<G, W>(span) == Some(0);
        // SAFETY: `update`'s caller vouches for `len` elements of each array and for the scales of their blocks. A
        // block is whole lines of `out`, so all start at a line where the first does.
        unsafe {
            let formula = Formula::<V>::new(self.scalars);
            let noise = Noise::<V>::new(self.scalars.seed);
            let mut buffer = Buffer { first: [0.0; BLOCK], second: [0.0; BLOCK] };
            let mut at = 0;
            while at < span.len {
                let scales = span.scales.add(at / BLOCK * 2);
                let old = Pair { first: V::splat(scales.read()), second: V::splat(scales.add(1).read()) };
                let len = BLOCK.min(span.len - at);
                let largest = if len < BLOCK {
                    Self::short(formula, span, at, len, old, &mut buffer)
                } else if streams {
                    Self::full::<V, true>(formula, span, at, old, &mut buffer)
                } else {
                    Self::full::<V, false>(formula, span, at, old, &mut buffer)
                };
                encode(span, at, len, largest, noise, scales, &buffer);
                at += len;
            }
            V::fence();
        }
    }
}

impl<G: Source, W: Weight, const L2: bool> BlockUpdate<'_, G, W, L2> {
    /// Updates a whole block; returns the bits of the largest magnitudes of its moments.
    #[inline(always)]
    unsafe fn full<V: Lanes, const STREAM: bool>(
        formula: Formula<V>,
        span: &Span,
        at: usize,
        old: Pair<V>,
        buffer: &mut Buffer,
    ) -> [u32; 2] {
        // SAFETY: the caller vouches for a block from `at` on, and for the ISA.
        unsafe {
            let mut largest = [V::Words::splat(0); 2];
            for i in (0..BLOCK).step_by(LANES) {
                if i % (2 * LANES) == 0 {
                    ask_ahead::<V, G, W>(span, at + i, 1);
                }
                let (m, v) = Self::whole::<V, STREAM>(formula, span, at + i, old);
                m.store(buffer.first.as_mut_ptr().add(i));
                v.store(buffer.second.as_mut_ptr().add(i));
                largest[0] = largest[0].max(m.to_words().and(V::Words::splat(0x7FFF_FFFF)));
                // Never negative, but as NaN, which then is the largest of all.
                largest[1] = largest[1].max(v.to_words());
            }
            largest.map(|words| {
                let mut lanes = [0.0; LANES];
                V::from_words(words).store(lanes.as_mut_ptr());
                lanes.iter().fold(0, |largest, x| largest.max(x.to_bits()))
            })
        }
    }

    /// The same of the last block, which has `len` elements.
    #[inline(always)]
    unsafe fn short<V: Lanes>(
        formula: Formula<V>,
        span: &Span,
        at: usize,
        len: usize,
        old: Pair<V>,
        buffer: &mut Buffer,
    ) -> [u32; 2] {
        for i in (0..len).step_by(LANES) {
            let count = LANES.min(len - i);
            // SAFETY: the caller vouches for `len` elements from `at` on and for the ISA; the pad holds 16.
            unsafe {
                Pad::run::<G, W>(span, at + i, count, 1, |pad| {
                    let (m, v) = Self::whole::<V, false>(formula, pad, 0, old);
                    m.store(buffer.first.as_mut_ptr().add(i));
                    v.store(buffer.second.as_mut_ptr().add(i));
                });
            }
        }
        // What the padding gave doesn't count.
        [&buffer.first, &buffer.second]
            .map(|moment| moment[..len].iter().fold(0, |largest, x| largest.max(x.abs().to_bits())))
    }

    /// Sixteen elements, from `at` on: the new moments. The codes stay as they are.
    #[inline(always)]
    unsafe fn whole<V: Lanes, const STREAM: bool>(
        formula: Formula<V>,
        span: &Span,
        at: usize,
        old: Pair<V>,
    ) -> (V, V) {
        // SAFETY: the caller vouches for 16 elements from `at` on, for the ISA, and for `out` if it streams.
        unsafe {
            let mut g = formula.scaled(G::load::<V>(span, at));
            if L2 {
                g = formula.pulled(g, W::load(span, at));
            }
            let m = decode_first(span.exp_avg.add(at), old.first);
            let v = decode_second(span.exp_avg_sq.add(at), old.second);
            let (m, v) = formula.moments(g, m, v);
            if W::MOVES {
                W::store::<V, STREAM>(formula.moved(W::load(span, at), m, v), span, at);
            }
            (m, v)
        }
    }
}

/// Writes the codes and scales of a block of `len` elements from `at` on.
#[inline(always)]
unsafe fn encode<V: Lanes>(
    span: &Span,
    at: usize,
    len: usize,
    largest: [u32; 2],
    noise: Noise<V>,
    scales: *mut f32,
    buffer: &Buffer,
) {
    let [(first, inverse_first), (second, inverse_second)] = largest.map(scale);
    // SAFETY: the caller vouches for `len` elements from `at` on, their scales, and the ISA; the buffers and the two
    // arrays of codes hold 16.
    unsafe {
        scales.write(first);
        scales.add(1).write(second);
        if first.is_nan() || second.is_nan() {
            // What was computed can't be kept, and its codes would be any.
            scales.write(f32::NAN);
            scales.add(1).write(f32::NAN);
            span.exp_avg.add(at).write_bytes(1, len);
            span.exp_avg_sq.add(at).write_bytes(1, len);
            return;
        }
        let inverse = Pair { first: V::splat(inverse_first), second: V::splat(inverse_second) };
        for i in (0..len).step_by(LANES) {
            let m = V::load(buffer.first.as_ptr().add(i));
            let v = V::load(buffer.second.as_ptr().add(i));
            let bits = noise.bits(span.position + (at + i) as u64);
            let (to_first, to_second) = (span.exp_avg.add(at + i), span.exp_avg_sq.add(at + i));
            let count = LANES.min(len - i);
            if count == LANES {
                encode_first(m, inverse.first, bits, to_first);
                encode_second(v, inverse.second, bits, to_second);
            } else {
                let (mut firsts, mut seconds) = ([0; LANES], [0; LANES]);
                encode_first(m, inverse.first, bits, firsts.as_mut_ptr());
                encode_second(v, inverse.second, bits, seconds.as_mut_ptr());
                to_first.copy_from_nonoverlapping(firsts.as_ptr(), count);
                to_second.copy_from_nonoverlapping(seconds.as_ptr(), count);
            }
        }
    }
}
