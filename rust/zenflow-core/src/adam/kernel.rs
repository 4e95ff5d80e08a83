//! The kernel: sixteen elements at a time, any ISA.
//!
//! With the gradient `g`, the master weight `w`, the moments `m` and `v` and the constants of [`Scalars`]:
//!
//! ```text
//! g <- grad_scale g                              (L2: g <- fma(l2, w, g))
//! m <- fma(g - m, one_minus_beta1, m)
//! v <- fma(fma(g, g, -v), one_minus_beta2, v)
//! d <- fma(sqrt(v), inv_sqrt_bias2, eps)
//! w <- w - fma(m / d, step_size, w decay)        out <- round(w)
//! ```
//!
//! - **Convex form.** `m + (1-b)(g-m)` and not `b m + (1-b) g`: one small factor, rounded once, so the two weights
//!   add up to one exactly. The step and the decay are added together before they meet `w`, which is rounded once.
//! - **Exact division and square root.** The approximate ones (`rsqrt14` and a Newton step) are no faster here: the
//!   pass waits for memory, not for arithmetic, and they would differ between ISAs.
//! - **One formula for body and tail.** A tail of fewer than 16 elements is copied to a padded buffer and goes
//!   through the very same instructions, so cutting an array anywhere changes no bit.
//! - **Prefetch.** Each stream that is read is asked for 512 elements ahead, into L2: the hardware's own prefetcher
//!   stops at page borders and keeps track of too few streams.
//! - **Streaming stores for `out` only.** It is written, never read, and next read by another device; past the
//!   caches it costs one transfer in place of two (+10 to 18% on the whole pass). A line must be written whole, so a
//!   head of up to a line goes through the tail's path until `out` is aligned, then 32 elements at a time. The
//!   arrays that were just read (`w`, `m`, `v`) are in cache anyway: streaming those loses 20%.

// The essay of `simd` says why.
#![allow(clippy::inline_always)]

use std::marker::PhantomData;

use super::Span;
use crate::hyper::Scalars;
use crate::simd::{Format, Lanes, Target, Task, AHEAD, LANES, LINE};

/// One update: gradient format, output format, whether the weight moves, whether it enters the gradient.
pub(super) struct Update<'a, G, O, const MOVE: bool, const L2: bool> {
    scalars: &'a Scalars,
    span: &'a Span,
    formats: PhantomData<(G, O)>,
}

impl<'a, G, O, const MOVE: bool, const L2: bool> Update<'a, G, O, MOVE, L2> {
    pub(super) fn new(scalars: &'a Scalars, span: &'a Span) -> Self {
        Self { scalars, span, formats: PhantomData }
    }
}

/// [`Scalars`], one vector each.
#[derive(Clone, Copy)]
struct Constants<V> {
    grad_scale: V,
    one_minus_beta1: V,
    one_minus_beta2: V,
    inv_sqrt_bias2: V,
    eps: V,
    step_size: V,
    decay: V,
    l2: V,
}

impl<V: Lanes> Constants<V> {
    #[inline(always)]
    unsafe fn new(s: &Scalars) -> Self {
        // SAFETY: the caller has the ISA of `V`.
        unsafe {
            Self {
                grad_scale: V::splat(s.grad_scale),
                one_minus_beta1: V::splat(s.one_minus_beta1),
                one_minus_beta2: V::splat(s.one_minus_beta2),
                inv_sqrt_bias2: V::splat(s.inv_sqrt_bias2),
                eps: V::splat(s.eps),
                step_size: V::splat(s.step_size),
                decay: V::splat(s.decay),
                l2: V::splat(s.l2),
            }
        }
    }
}

impl<G: Format, O: Target, const MOVE: bool, const L2: bool> Task for Update<'_, G, O, MOVE, L2> {
    type Output = ();

    /// Asks for what [`super::update`] asks for.
    #[inline(always)]
    unsafe fn run<V: Lanes>(self) {
        let span = self.span;
        // SAFETY: `at + count <= len` at every call, and `update`'s caller vouches for `len` elements of each array.
        // Streaming starts where `out` is aligned to a line and goes on by whole lines.
        unsafe {
            let c = Constants::<V>::new(self.scalars);
            let mut at = 0;
            if let Some(head) = streams_from(span, O::SIZE) {
                while at < head {
                    let count = LANES.min(head - at);
                    Self::part(&c, span, at, count);
                    at += count;
                }
                while at + 2 * LANES <= span.len {
                    Self::ask_ahead::<V>(span, at);
                    Self::whole::<V, true>(&c, span, at);
                    Self::whole::<V, true>(&c, span, at + LANES);
                    at += 2 * LANES;
                }
                V::fence();
            }
            while at + 2 * LANES <= span.len {
                Self::ask_ahead::<V>(span, at);
                Self::whole::<V, false>(&c, span, at);
                Self::whole::<V, false>(&c, span, at + LANES);
                at += 2 * LANES;
            }
            while at < span.len {
                let count = LANES.min(span.len - at);
                Self::part(&c, span, at, count);
                at += count;
            }
        }
    }
}

/// The first element from which `out` can be streamed; none where it can't or is too short.
#[inline(always)]
fn streams_from(span: &Span, size: usize) -> Option<usize> {
    if size == 0 || !span.out.addr().is_multiple_of(size) {
        return None;
    }
    let head = (span.out.addr().next_multiple_of(LINE) - span.out.addr()) / size;
    (head + 2 * LANES <= span.len).then_some(head)
}

impl<G: Format, O: Target, const MOVE: bool, const L2: bool> Update<'_, G, O, MOVE, L2> {
    /// Prefetches what the iteration over 32 elements that is [`AHEAD`] of `at` will read.
    #[inline(always)]
    unsafe fn ask_ahead<V: Lanes>(span: &Span, at: usize) {
        let next = at + AHEAD;
        let grad = span.grad.wrapping_add(next * G::SIZE);
        // SAFETY: a prefetch takes any address; the caller has the ISA.
        unsafe {
            for line in [next, next + LANES] {
                if MOVE {
                    V::prefetch(span.master.wrapping_add(line).cast());
                }
                V::prefetch(span.exp_avg.wrapping_add(line).cast());
                V::prefetch(span.exp_avg_sq.wrapping_add(line).cast());
            }
            V::prefetch(grad);
            if 2 * LANES * G::SIZE > LINE {
                V::prefetch(grad.wrapping_add(LINE));
            }
        }
    }

    /// Sixteen elements, from `at` on: the formula.
    #[inline(always)]
    unsafe fn whole<V: Lanes, const STREAM: bool>(c: &Constants<V>, span: &Span, at: usize) {
        // SAFETY: the caller vouches for 16 elements from `at` on, for the ISA, and for `out` if it streams.
        unsafe {
            let (exp_avg, exp_avg_sq) = (span.exp_avg.add(at), span.exp_avg_sq.add(at));
            let mut g = G::load::<V>(span.grad.add(at * G::SIZE)).mul(c.grad_scale);
            if L2 {
                g = c.l2.mul_add(V::load(span.master.add(at)), g);
            }
            let (m, v) = (V::load(exp_avg), V::load(exp_avg_sq));
            let m = g.sub(m).mul_add(c.one_minus_beta1, m);
            let v = g.mul_sub(g, v).mul_add(c.one_minus_beta2, v);
            m.store(exp_avg);
            v.store(exp_avg_sq);
            if MOVE {
                let master = span.master.add(at);
                let w = V::load(master);
                let d = v.sqrt().mul_add(c.inv_sqrt_bias2, c.eps);
                let w = w.sub(m.div(d).mul_add(c.step_size, w.mul(c.decay)));
                w.store(master);
                // Without an output its address is null and goes nowhere, hence no `add`.
                let out = span.out.wrapping_add(at * O::SIZE);
                if STREAM {
                    O::stream(w, out);
                } else {
                    O::store(w, out);
                }
            }
        }
    }

    /// `count` elements, up to 16, from `at` on: through buffers padded with zeros.
    #[inline(always)]
    unsafe fn part<V: Lanes>(c: &Constants<V>, span: &Span, at: usize, count: usize) {
        let (mut w, mut m, mut v) = ([0.0f32; LANES], [0.0f32; LANES], [0.0f32; LANES]);
        // Room for sixteen elements of the widest format.
        let (mut grad, mut out) = ([0u8; LINE], [0u8; LINE]);
        // SAFETY: the caller vouches for `count` elements from `at` on, and the buffers hold 16.
        unsafe {
            span.grad.add(at * G::SIZE).copy_to_nonoverlapping(grad.as_mut_ptr(), count * G::SIZE);
            copy(span.exp_avg.add(at), m.as_mut_ptr(), count);
            copy(span.exp_avg_sq.add(at), v.as_mut_ptr(), count);
            if MOVE {
                copy(span.master.add(at), w.as_mut_ptr(), count);
            }
            let padded = Span {
                master: w.as_mut_ptr(),
                exp_avg: m.as_mut_ptr(),
                exp_avg_sq: v.as_mut_ptr(),
                grad: grad.as_ptr(),
                out: out.as_mut_ptr(),
                len: LANES,
                ..*span
            };
            Self::whole::<V, false>(c, &padded, 0);
            copy(m.as_ptr(), span.exp_avg.add(at), count);
            copy(v.as_ptr(), span.exp_avg_sq.add(at), count);
            if MOVE {
                copy(w.as_ptr(), span.master.add(at), count);
                if O::SIZE > 0 {
                    let to = span.out.add(at * O::SIZE);
                    out.as_ptr().copy_to_nonoverlapping(to, count * O::SIZE);
                }
            }
        }
    }
}

/// Copies floats byte by byte, so that neither side need be aligned.
#[inline(always)]
unsafe fn copy(from: *const f32, to: *mut f32, count: usize) {
    // SAFETY: the caller vouches for `count` elements on both sides, which don't overlap.
    unsafe { from.cast::<u8>().copy_to_nonoverlapping(to.cast(), count * size_of::<f32>()) }
}
