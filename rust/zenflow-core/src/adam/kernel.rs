//! The kernel for moments that are kept element by element. `formula` has the formula.
//!
//! - **One formula for body and tail.** A tail of fewer than 16 elements is copied to a padded buffer and goes
//!   through the very same instructions, so cutting an array anywhere changes no bit.
//! - **Prefetch.** Each stream that is read is asked for 512 elements ahead (1,024 with narrow moments), into L2: the
//!   hardware's own prefetcher stops at page borders and keeps track of too few streams.
//! - **Pairs.** Where every array is of 16-bit elements they are taken two by two ([`pairs`](super::pairs)).
//! - **Streaming stores for `out` only.** It is written, never read, and next read by another device; past the
//!   caches it costs one transfer in place of two (+10 to 18% on the whole pass). A line must be written whole, so a
//!   head of up to a line goes through the tail's path until `out` is aligned, then 32 elements at a time. The
//!   arrays that were just read (`w`, `m`, `v`) are in cache anyway: streaming those loses 20%.

// The essay of `simd` says why.
#![allow(clippy::inline_always)]

use std::marker::PhantomData;

use super::formula::Formula;
use super::moment::Moment;
use super::noise::Noise;
use super::pad::Pad;
use super::source::Source;
use super::weight::Weight;
use super::Span;
use crate::hyper::Scalars;
use crate::simd::{Lanes, Task, Words, AHEAD, LANES, LINE};

/// One update: gradient, weight, moments, and whether the weight enters the gradient.
pub(super) struct Update<'a, G, W, M, const L2: bool> {
    scalars: &'a Scalars,
    span: &'a Span,
    formats: PhantomData<(G, W, M)>,
}

impl<'a, G, W, M, const L2: bool> Update<'a, G, W, M, L2> {
    pub(super) fn new(scalars: &'a Scalars, span: &'a Span) -> Self {
        Self { scalars, span, formats: PhantomData }
    }
}

/// What stays the same over an update.
#[derive(Clone, Copy)]
struct Fixed<V: Lanes> {
    formula: Formula<V>,
    noise: Noise<V>,
}

impl<G: Source, W: Weight, M: Moment, const L2: bool> Task for Update<'_, G, W, M, L2> {
    type Output = ();

    /// Asks for what [`super::update`] asks for.
    #[inline(always)]
    unsafe fn run<V: Lanes>(self) {
        let span = self.span;
        // SAFETY: `at + count <= len` at every call, and `update`'s caller vouches for `len` elements of each array.
        // Streaming starts where `out` is aligned to a line and goes on by whole lines.
        unsafe {
            let fixed =
                Fixed::<V> { formula: Formula::new(self.scalars), noise: Noise::new(self.scalars.seed) };
            let mut at = 0;
            if let Some(head) = streams_from::<G, W>(span) {
                while at < head {
                    let count = LANES.min(head - at);
                    Self::part(fixed, span, at, count);
                    at += count;
                }
                while at + 2 * LANES <= span.len {
                    ask_ahead::<V, G, W>(span, at, M::SIZE);
                    Self::two::<V, true>(fixed, span, at);
                    at += 2 * LANES;
                }
                V::fence();
            }
            while at + 2 * LANES <= span.len {
                ask_ahead::<V, G, W>(span, at, M::SIZE);
                Self::two::<V, false>(fixed, span, at);
                at += 2 * LANES;
            }
            while at < span.len {
                let count = LANES.min(span.len - at);
                Self::part(fixed, span, at, count);
                at += count;
            }
        }
    }
}

/// The first element from which `out` can be streamed; none where it can't or is too short.
#[inline(always)]
pub(super) fn streams_from<G: Source, W: Weight>(span: &Span) -> Option<usize> {
    if W::OUT == 0 || W::READS_OUT || !span.out.addr().is_multiple_of(W::OUT) {
        return None;
    }
    let head = (span.out.addr().next_multiple_of(LINE) - span.out.addr()) / W::OUT;
    (head + 2 * LANES <= span.len && (!G::BLOCKED || head == 0)).then_some(head)
}

/// Prefetches what the 32 elements ahead of `at` will read: [`AHEAD`] of it, twice that where moments are narrow. Those
/// elements take half the time.
#[inline(always)]
pub(super) unsafe fn ask_ahead<V: Lanes, G: Source, W: Weight>(span: &Span, at: usize, moment: usize) {
    let next = at + if moment < 4 { 2 * AHEAD } else { AHEAD };
    // SAFETY: a prefetch takes any address; the caller has the ISA.
    unsafe {
        ask::<V>(span.master, next, W::MASTER);
        ask::<V>(span.exp_avg, next, moment);
        ask::<V>(span.exp_avg_sq, next, moment);
        ask::<V>(span.grad, next, G::SIZE);
        if W::READS_OUT {
            ask::<V>(span.out, next, W::OUT);
        }
    }
}

/// Prefetches 32 elements of `size` bytes.
#[inline(always)]
unsafe fn ask<V: Lanes>(array: *const u8, at: usize, size: usize) {
    let first = array.wrapping_add(at * size);
    for line in 0..(2 * LANES * size).div_ceil(LINE) {
        // SAFETY: a prefetch takes any address; the caller has the ISA.
        unsafe { V::prefetch(first.wrapping_add(line * LINE)) };
    }
}

impl<G: Source, W: Weight, M: Moment, const L2: bool> Update<'_, G, W, M, L2> {
    /// Thirty-two elements, from `at` on.
    #[inline(always)]
    unsafe fn two<V: Lanes, const STREAM: bool>(fixed: Fixed<V>, span: &Span, at: usize) {
        // SAFETY: the caller's promise.
        unsafe {
            if G::PAIRS && W::PAIRS && M::PAIRS {
                Self::pair(fixed, span, at);
            } else {
                Self::whole::<V, STREAM>(fixed, span, at);
                Self::whole::<V, STREAM>(fixed, span, at + LANES);
            }
        }
    }

    /// The same by [`pairs`](super::pairs).
    #[inline(always)]
    unsafe fn pair<V: Lanes>(fixed: Fixed<V>, span: &Span, at: usize) {
        // SAFETY: the caller vouches for 32 elements from `at` on and for the ISA.
        unsafe {
            let formula = &fixed.formula;
            let (exp_avg, exp_avg_sq) = (span.exp_avg.add(at * M::SIZE), span.exp_avg_sq.add(at * M::SIZE));
            let [mut g0, mut g1] = G::load_pair::<V>(span, at);
            (g0, g1) = (formula.scaled(g0), formula.scaled(g1));
            if L2 {
                let [w0, w1] = W::load_pair(span, at);
                (g0, g1) = (formula.pulled(g0, w0), formula.pulled(g1, w1));
            }
            let ([m0, m1], [v0, v1]) = (M::load_pair(exp_avg), M::load_pair(exp_avg_sq));
            let ((m0, v0), (m1, v1)) = (formula.moments(g0, m0, v0), formula.moments(g1, m1, v1));
            let [noise0, noise1] = fixed.noise.pair(span.position + at as u64);
            let lower = V::Words::splat(0xFFFF);
            M::store_pair([m0, m1], [noise0.and(lower), noise1.and(lower)], exp_avg);
            M::store_pair([v0, v1], [noise0.shr::<16>(), noise1.shr::<16>()], exp_avg_sq);
            if W::MOVES {
                let [w0, w1] = W::load_pair(span, at);
                W::store_pair([formula.moved(w0, m0, v0), formula.moved(w1, m1, v1)], span, at);
            }
        }
    }

    /// Sixteen elements, from `at` on.
    #[inline(always)]
    unsafe fn whole<V: Lanes, const STREAM: bool>(fixed: Fixed<V>, span: &Span, at: usize) {
        // SAFETY: the caller vouches for 16 elements from `at` on, for the ISA, and for `out` if it streams.
        unsafe {
            let formula = &fixed.formula;
            let mut g = formula.scaled(G::load::<V>(span, at));
            if L2 {
                g = formula.pulled(g, W::load(span, at));
            }
            let (exp_avg, exp_avg_sq) = (span.exp_avg.add(at * M::SIZE), span.exp_avg_sq.add(at * M::SIZE));
            let (m, v) = formula.moments(g, M::load(exp_avg), M::load(exp_avg_sq));
            let noise =
                if M::NOISY { fixed.noise.bits(span.position + at as u64) } else { V::Words::splat(0) };
            M::store(m, noise.and(V::Words::splat(0xFFFF)), exp_avg);
            M::store(v, noise.shr::<16>(), exp_avg_sq);
            if W::MOVES {
                W::store::<V, STREAM>(formula.moved(W::load(span, at), m, v), span, at);
            }
        }
    }

    /// `count` elements, up to 16, from `at` on.
    #[inline(always)]
    unsafe fn part<V: Lanes>(fixed: Fixed<V>, span: &Span, at: usize, count: usize) {
        // SAFETY: the caller vouches for `count` elements from `at` on; the pad holds 16.
        unsafe {
            Pad::run::<G, W>(span, at, count, M::SIZE, |pad| Self::whole::<V, false>(fixed, pad, 0));
        }
    }
}
