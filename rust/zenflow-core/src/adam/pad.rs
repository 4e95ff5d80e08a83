//! A tail of fewer than 16 elements, padded to 16, so that it goes through the very same instructions as the rest.

// The essay of `simd` says why.
#![allow(clippy::inline_always)]

use super::source::Source;
use super::weight::Weight;
use super::{Span, GRAD_BLOCK};
use crate::simd::{LANES, LINE};

/// Room for sixteen elements of each array of a [`Span`], in the widest format.
#[derive(Default)]
pub(super) struct Pad {
    master: Line,
    exp_avg: Line,
    exp_avg_sq: Line,
    grad: Line,
    out: Line,
}

#[derive(Clone, Copy)]
struct Line([u8; LINE]);

impl Default for Line {
    fn default() -> Self {
        Self([0; LINE])
    }
}

impl Line {
    /// Copies the elements `at..at + count` in. Byte by byte, so that nothing need be aligned.
    #[inline(always)]
    unsafe fn fill(&mut self, from: *const u8, at: usize, count: usize, size: usize) {
        // SAFETY: the caller vouches for the elements; a line has room for sixteen of up to four bytes.
        unsafe { from.wrapping_add(at * size).copy_to_nonoverlapping(self.0.as_mut_ptr(), count * size) }
    }

    /// Copies them back.
    #[inline(always)]
    unsafe fn empty(&self, to: *mut u8, at: usize, count: usize, size: usize) {
        // SAFETY: as above.
        unsafe { self.0.as_ptr().copy_to_nonoverlapping(to.wrapping_add(at * size), count * size) }
    }
}

impl Pad {
    /// Runs `f` on a span of 16 elements, of which the first `count` are the span's from `at` on.
    ///
    /// # Safety
    ///
    /// The span has them, in the formats of `G`, `W` and of `moment` bytes, and they lie in one block of a blocked
    /// format.
    #[inline(always)]
    pub(super) unsafe fn run<G: Source, W: Weight>(
        span: &Span,
        at: usize,
        count: usize,
        moment: usize,
        f: impl FnOnce(&Span),
    ) {
        let mut pad = Self::default();
        // SAFETY: the caller vouches for `count` elements from `at` on, which are at most 16.
        unsafe {
            pad.grad.fill(span.grad, at, count, G::SIZE);
            pad.exp_avg.fill(span.exp_avg, at, count, moment);
            pad.exp_avg_sq.fill(span.exp_avg_sq, at, count, moment);
            pad.master.fill(span.master, at, count, W::MASTER);
            if W::READS_OUT {
                pad.out.fill(span.out, at, count, W::OUT);
            }
            f(&Span {
                master: pad.master.0.as_mut_ptr(),
                exp_avg: pad.exp_avg.0.as_mut_ptr(),
                exp_avg_sq: pad.exp_avg_sq.0.as_mut_ptr(),
                grad: pad.grad.0.as_ptr(),
                grad_scales: span.grad_scales.wrapping_add(at / GRAD_BLOCK),
                out: pad.out.0.as_mut_ptr(),
                position: span.position + at as u64,
                len: LANES,
                ..*span
            });
            pad.exp_avg.empty(span.exp_avg, at, count, moment);
            pad.exp_avg_sq.empty(span.exp_avg_sq, at, count, moment);
            pad.master.empty(span.master, at, count, W::MASTER);
            pad.out.empty(span.out, at, count, W::OUT);
        }
    }
}
