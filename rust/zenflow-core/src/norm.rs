//! Squared norms of fixed shape, and whether all is finite, in one pass that waits only for memory.
//!
//! A float sum depends on its order, so the order is fixed by the element's index and by nothing else:
//!
//! ```text
//! block b  = elements 4096 b .. 4096 (b+1)
//! lane l   = fma over the block's elements l, l+64, l+128, ... : x*x + lane            (float32, 64 lanes)
//! block    = the 64 lanes widened and added as a tree: l with l+32, then with l+16, ...  (float64)
//! total    = the blocks added as a tree over b: `pairwise_sum`                           (float64)
//! ```
//!
//! So the bits are the same on every ISA, for any number of threads, and for any cut at multiples of [`BLOCK`]. 64
//! lanes are four vectors: enough to hide the latency of a multiply-add; 64 additions a lane keep its error small.
//!
//! **Non-finite elements cost nothing.** Infinity and NaN survive a sum of squares, so a block whose sum is finite has
//! none. A block whose sum isn't has one, or its squares were too large for float32 (elements over 1e18 or so):
//! that block alone is gone over again in float64, which decides, and gives the right sum for values up to
//! `f32::MAX`. Squares below 1e-45 vanish, as they do in torch.

// The essay of `simd` says why.
#![allow(clippy::inline_always)]

use std::marker::PhantomData;

use rayon::prelude::*;
use rayon::ThreadPool;

use crate::dtype::Dtype;
use crate::isa::Isa;
use crate::simd::{dispatch, Bf16, Format, Lanes, Task, AHEAD, F16, F32, LANES, LINE};

/// Elements of a block: cut work at multiples of this and the bits stay the same.
pub const BLOCK: usize = 4096;

/// Blocks that a thread takes at a time.
const BLOCKS_A_PIECE: usize = 64;

/// Vectors of lane sums.
const WIDE: usize = 4;

/// What one pass learns of an array.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Stats {
    /// Sum of the elements' squares. Infinite or NaN where some element is.
    pub sum_of_squares: f64,
    /// True if some element is infinite or NaN.
    pub non_finite: bool,
}

/// [`Stats`] of a gradient, on the calling thread.
///
/// # Safety
///
/// `isa` is available; `grad` is readable for `len` elements of `dtype`, and nobody writes them meanwhile.
#[must_use]
pub unsafe fn stats(isa: Isa, grad: *const u8, dtype: Dtype, len: usize) -> Stats {
    let mut partials = vec![0.0; len.div_ceil(BLOCK)];
    // SAFETY: the caller's promises, passed on.
    let non_finite = unsafe { block_partials(isa, grad, dtype, len, &mut partials) };
    Stats { sum_of_squares: pairwise_sum(&partials), non_finite }
}

/// [`stats`] on a pool; the same bits.
///
/// # Safety
///
/// As for [`stats`].
#[must_use]
pub unsafe fn stats_on(pool: &ThreadPool, isa: Isa, grad: *const u8, dtype: Dtype, len: usize) -> Stats {
    let grad = Shared(grad);
    // SAFETY: each piece lies within the `len` elements the caller vouches for.
    on_pool(pool, len, |start, count, out| unsafe {
        block_partials(isa, grad.get().add(start * dtype.size()), dtype, count, out)
    })
}

/// A gradient among many.
#[derive(Clone, Copy, Debug)]
pub struct Array {
    /// First element.
    pub address: *const u8,
    /// Format.
    pub dtype: Dtype,
    /// Elements.
    pub len: usize,
}

// SAFETY: only an address; `stats_of`, which reads what is behind, asks its caller that any thread may.
unsafe impl Send for Array {}
// SAFETY: as above.
unsafe impl Sync for Array {}

/// [`Stats`] of many gradients together, in one parallel region: the sum of each as [`stats`] has it, and these added
/// as a tree.
///
/// # Safety
///
/// As for [`stats`], for each of them.
#[must_use]
pub unsafe fn stats_of(pool: &ThreadPool, isa: Isa, grads: &[Array]) -> Stats {
    // All their blocks in a row: the first of each gradient, and the row's end.
    let mut starts = Vec::with_capacity(grads.len() + 1);
    let mut end = 0;
    starts.push(end);
    for grad in grads {
        end += grad.len.div_ceil(BLOCK);
        starts.push(end);
    }
    let mut partials = vec![0.0; end];
    let piece = |(index, mut out): (usize, &mut [f64])| {
        let mut at = index * BLOCKS_A_PIECE;
        // The last gradient that starts at or before the piece; gradients without elements are passed over.
        let mut i = starts.partition_point(|&start| start <= at) - 1;
        let mut non_finite = false;
        while !out.is_empty() {
            let (mine, rest) = out.split_at_mut(out.len().min(starts[i + 1] - at));
            let Array { address, dtype, len } = grads[i];
            let start = (at - starts[i]) * BLOCK;
            let count = (len - start).min(mine.len() * BLOCK);
            // SAFETY: elements `start..start + count` lie within the gradient, which the caller vouches for.
            non_finite |=
                unsafe { block_partials(isa, address.add(start * dtype.size()), dtype, count, mine) };
            (at, out) = (at + mine.len(), rest);
            i += 1;
        }
        non_finite
    };
    let non_finite = in_pieces(pool, &mut partials, piece);
    let sums: Vec<_> = starts.windows(2).map(|ends| pairwise_sum(&partials[ends[0]..ends[1]])).collect();
    Stats { sum_of_squares: pairwise_sum(&sums), non_finite }
}

/// The sums of squares of each [`BLOCK`] of a gradient (the last may be short), and whether some element is
/// infinite or NaN. For callers that cut and combine themselves: concatenate, then [`pairwise_sum`].
///
/// # Panics
///
/// If `out` hasn't one entry a block.
///
/// # Safety
///
/// As for [`stats`].
#[must_use]
pub unsafe fn block_partials(isa: Isa, grad: *const u8, dtype: Dtype, len: usize, out: &mut [f64]) -> bool {
    // SAFETY: the caller's promises, passed on.
    unsafe {
        match dtype {
            Dtype::F32 => partials_of(isa, Read::<F32>(grad, PhantomData), len, out),
            Dtype::Bf16 => partials_of(isa, Read::<Bf16>(grad, PhantomData), len, out),
            Dtype::F16 => partials_of(isa, Read::<F16>(grad, PhantomData), len, out),
        }
    }
}

/// Adds numbers as a tree: the largest power of two below the count to the left, the rest to the right.
#[must_use]
pub fn pairwise_sum(x: &[f64]) -> f64 {
    match x {
        [] => 0.0,
        [one] => *one,
        _ => {
            let (left, right) = x.split_at(x.len().next_power_of_two() / 2);
            pairwise_sum(left) + pairwise_sum(right)
        }
    }
}

/// An address that threads may share; what they do with it is vouched for where they do it.
#[derive(Clone, Copy)]
pub(crate) struct Shared<T>(pub(crate) T);

// SAFETY: only an address; see above.
unsafe impl<T> Send for Shared<*const T> {}
// SAFETY: as above.
unsafe impl<T> Sync for Shared<*const T> {}
// SAFETY: as above.
unsafe impl<T> Send for Shared<*mut T> {}
// SAFETY: as above.
unsafe impl<T> Sync for Shared<*mut T> {}

impl<T: Copy> Shared<T> {
    /// The address. (A method, so that a closure captures the whole and not the bare pointer.)
    pub(crate) fn get(&self) -> T {
        self.0
    }
}

/// Deals `len` elements to the pool in pieces of whole blocks; `f(start, count, partials)` does one.
pub(crate) fn on_pool(
    pool: &ThreadPool,
    len: usize,
    f: impl Fn(usize, usize, &mut [f64]) -> bool + Sync,
) -> Stats {
    let mut partials = vec![0.0; len.div_ceil(BLOCK)];
    let piece = |(index, out): (usize, &mut [f64])| {
        let start = index * BLOCKS_A_PIECE * BLOCK;
        f(start, (len - start).min(BLOCKS_A_PIECE * BLOCK), out)
    };
    let non_finite = in_pieces(pool, &mut partials, piece);
    Stats { sum_of_squares: pairwise_sum(&partials), non_finite }
}

/// Calls `f` with the number and the partial sums of each piece, on the pool where there are several; true if any was.
fn in_pieces(
    pool: &ThreadPool,
    partials: &mut [f64],
    f: impl Fn((usize, &mut [f64])) -> bool + Sync + Send,
) -> bool {
    if partials.len() <= BLOCKS_A_PIECE {
        return !partials.is_empty() && f((0, partials));
    }
    let pieces = partials.par_chunks_mut(BLOCKS_A_PIECE).enumerate().with_max_len(1);
    pool.install(|| pieces.map(f).reduce(|| false, |a, b| a | b))
}

/// Where a reduction gets its elements; getting one may have an effect, and happens once.
pub(crate) trait Feed: Copy {
    /// Sixteen elements from `at` on.
    ///
    /// # Safety
    ///
    /// They exist, and the machine has the ISA of `V`.
    unsafe fn whole<V: Lanes>(self, at: usize) -> V;

    /// `count` elements, up to 16, from `at` on, and zeros.
    ///
    /// # Safety
    ///
    /// As for `whole`.
    unsafe fn part<V: Lanes>(self, at: usize, count: usize) -> V;

    /// Asks for the 64 elements from `at` on; they may lie beyond the end.
    ///
    /// # Safety
    ///
    /// The machine has the ISA of `V`.
    unsafe fn ask<V: Lanes>(self, at: usize);

    /// The element at `at`, once more, without effect.
    ///
    /// # Safety
    ///
    /// It exists and was got before.
    unsafe fn again(self, at: usize) -> f32;
}

/// Runs the reduction over `len` elements of a feed: one sum a block to `out`; true if some element isn't finite.
///
/// # Safety
///
/// `isa` is available, and the feed has `len` elements.
pub(crate) unsafe fn partials_of<F: Feed>(isa: Isa, feed: F, len: usize, out: &mut [f64]) -> bool {
    assert_eq!(out.len(), len.div_ceil(BLOCK), "one partial sum for each block of {len} elements");
    // SAFETY: the caller's promises, passed on.
    unsafe { dispatch(isa, Reduce { feed, len, out }) }
}

struct Reduce<'a, F> {
    feed: F,
    len: usize,
    out: &'a mut [f64],
}

impl<F: Feed> Task for Reduce<'_, F> {
    type Output = bool;

    #[inline(always)]
    unsafe fn run<V: Lanes>(self) -> bool {
        let mut non_finite = false;
        for (block, out) in self.out.iter_mut().enumerate() {
            let start = block * BLOCK;
            let stop = self.len.min(start + BLOCK);
            // SAFETY: `start..stop` lies within the feed.
            *out = tree(unsafe { lanes::<V, F>(self.feed, start, stop) }.map(f64::from));
            if !out.is_finite() {
                // SAFETY: as above, and the elements were got just now.
                let (sum, all_finite) = unsafe { again(self.feed, start, stop) };
                *out = sum;
                non_finite |= !all_finite;
            }
        }
        // SAFETY: the caller has the ISA.
        unsafe { V::fence() };
        non_finite
    }
}

/// The 64 lane sums of one block.
#[inline(always)]
unsafe fn lanes<V: Lanes, F: Feed>(feed: F, start: usize, stop: usize) -> [f32; WIDE * LANES] {
    let mut sums = [0.0; WIDE * LANES];
    // SAFETY: the caller vouches for `start..stop` and for the ISA; `sums` has room for four vectors.
    unsafe {
        let mut lanes = [V::splat(0.0); WIDE];
        let mut at = start;
        while at + WIDE * LANES <= stop {
            feed.ask::<V>(at + AHEAD);
            for (k, lane) in lanes.iter_mut().enumerate() {
                let x = feed.whole::<V>(at + k * LANES);
                *lane = x.mul_add(x, *lane);
            }
            at += WIDE * LANES;
        }
        for lane in &mut lanes {
            if at < stop {
                let count = LANES.min(stop - at);
                let x = feed.part::<V>(at, count);
                *lane = x.mul_add(x, *lane);
                at += count;
            }
        }
        for (k, lane) in lanes.into_iter().enumerate() {
            lane.store(sums.as_mut_ptr().add(k * LANES));
        }
    }
    sums
}

/// Adds 64 numbers as a tree.
fn tree(mut x: [f64; WIDE * LANES]) -> f64 {
    let mut width = x.len() / 2;
    while width > 0 {
        for i in 0..width {
            x[i] += x[i + width];
        }
        width /= 2;
    }
    x[0]
}

/// One block in float64: its sum of squares, and whether all elements are finite.
#[cold]
#[inline(never)]
unsafe fn again<F: Feed>(feed: F, start: usize, stop: usize) -> (f64, bool) {
    let mut sums = [0.0; WIDE * LANES];
    let mut all_finite = true;
    for at in start..stop {
        // SAFETY: the caller vouches for `start..stop`.
        let x = unsafe { feed.again(at) };
        all_finite &= x.is_finite();
        sums[(at - start) % (WIDE * LANES)] += f64::from(x) * f64::from(x);
    }
    (tree(sums), all_finite)
}

/// One element of a format.
///
/// # Safety
///
/// `grad` is readable at element `at`.
pub(crate) unsafe fn element<G: Format>(grad: *const u8, at: usize) -> f32 {
    // SAFETY: the caller vouches for the element, whatever its alignment.
    unsafe {
        let from = grad.add(at * G::SIZE);
        match G::DTYPE {
            Dtype::F32 => from.cast::<f32>().read_unaligned(),
            Dtype::Bf16 => half::bf16::from_bits(from.cast::<u16>().read_unaligned()).to_f32(),
            Dtype::F16 => half::f16::from_bits(from.cast::<u16>().read_unaligned()).to_f32(),
        }
    }
}

/// `count` elements of a format, up to 16, and zeros.
///
/// # Safety
///
/// `grad` is readable for `count` elements from `at` on, and the machine has the ISA of `V`.
#[inline(always)]
pub(crate) unsafe fn padded<V: Lanes, G: Format>(grad: *const u8, at: usize, count: usize) -> V {
    let mut buffer = [0u8; LINE];
    // SAFETY: the caller vouches for the elements; the buffer holds sixteen of the widest format.
    unsafe {
        grad.add(at * G::SIZE).copy_to_nonoverlapping(buffer.as_mut_ptr(), count * G::SIZE);
        G::load(buffer.as_ptr())
    }
}

/// A gradient, only read.
struct Read<G>(*const u8, PhantomData<G>);

impl<G> Clone for Read<G> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<G> Copy for Read<G> {}

impl<G: Format> Feed for Read<G> {
    #[inline(always)]
    unsafe fn whole<V: Lanes>(self, at: usize) -> V {
        // SAFETY: the caller vouches for the elements and the ISA.
        unsafe { G::load(self.0.add(at * G::SIZE)) }
    }

    #[inline(always)]
    unsafe fn part<V: Lanes>(self, at: usize, count: usize) -> V {
        // SAFETY: the caller vouches for the elements and the ISA.
        unsafe { padded::<V, G>(self.0, at, count) }
    }

    #[inline(always)]
    unsafe fn ask<V: Lanes>(self, at: usize) {
        // SAFETY: a prefetch takes any address.
        unsafe { ask::<V>(self.0.wrapping_add(at * G::SIZE), G::SIZE) }
    }

    #[inline(always)]
    unsafe fn again(self, at: usize) -> f32 {
        // SAFETY: the caller vouches for the element.
        unsafe { element::<G>(self.0, at) }
    }
}

/// Prefetches the lines of 64 elements of `size` bytes.
///
/// # Safety
///
/// The machine has the ISA of `V`.
#[inline(always)]
pub(crate) unsafe fn ask<V: Lanes>(from: *const u8, size: usize) {
    for line in 0..size {
        // SAFETY: a prefetch takes any address. (64 elements of `size` bytes are `size` lines.)
        unsafe { V::prefetch(from.wrapping_add(line * LINE)) };
    }
}
