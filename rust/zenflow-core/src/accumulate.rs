//! Adds a gradient to a float32 accumulator, and learns the sum's norm and finiteness in the same pass.
//!
//! `acc <- acc + g`, and of the *new* `acc` the [`Stats`], in the order that [`norm`](crate::norm) fixes: the same
//! bits as adding first and asking afterwards, for the price of the addition alone. The first of a sum is a copy,
//! `acc <- g`: what was there isn't read, and where `acc` is aligned to a cache line it is written past the caches
//! (half the time of writing through them, which would read each line before it overwrites it).

// The essay of `simd` says why.
#![allow(clippy::inline_always)]

use std::marker::PhantomData;

use rayon::ThreadPool;

use crate::dtype::Dtype;
use crate::isa::Isa;
pub use crate::norm::Stats;
use crate::norm::{ask, element, on_pool, padded, pairwise_sum, partials_of, Feed, Shared, BLOCK};
use crate::simd::{Bf16, Format, Lanes, F16, F32, LANES, LINE};

/// Adds `grad` to `acc` (or copies it, if it is the `first`) on the calling thread; the [`Stats`] of the new `acc`.
///
/// # Safety
///
/// `isa` is available; `grad` is readable and `acc` readable and writable for `len` elements, by nobody else
/// meanwhile; they don't overlap. If `first`, `acc` need not be initialised.
pub unsafe fn accumulate(
    isa: Isa,
    acc: *mut f32,
    grad: *const u8,
    grad_dtype: Dtype,
    len: usize,
    first: bool,
) -> Stats {
    let mut partials = vec![0.0; len.div_ceil(BLOCK)];
    // SAFETY: the caller's promises, passed on.
    let non_finite = unsafe { block_partials(isa, acc, grad, grad_dtype, len, first, &mut partials) };
    Stats { sum_of_squares: pairwise_sum(&partials), non_finite }
}

/// [`accumulate`] on a pool; the same bits.
///
/// # Safety
///
/// As for [`accumulate`].
pub unsafe fn accumulate_on(
    pool: &ThreadPool,
    isa: Isa,
    acc: *mut f32,
    grad: *const u8,
    grad_dtype: Dtype,
    len: usize,
    first: bool,
) -> Stats {
    let (acc, grad) = (Shared(acc), Shared(grad));
    // SAFETY: each piece lies within the `len` elements the caller vouches for, and no two overlap.
    on_pool(pool, len, |start, count, out| unsafe {
        let grad = grad.get().add(start * grad_dtype.size());
        block_partials(isa, acc.get().add(start), grad, grad_dtype, count, first, out)
    })
}

/// [`accumulate`], with the sums of squares of each [`BLOCK`] of the new `acc` to `out` (the last may be short); true
/// if some element of it is infinite or NaN. For callers that cut (at multiples of [`BLOCK`]) and combine themselves.
///
/// # Panics
///
/// If `out` hasn't one entry a block; nothing is added then.
///
/// # Safety
///
/// As for [`accumulate`].
pub unsafe fn block_partials(
    isa: Isa,
    acc: *mut f32,
    grad: *const u8,
    grad_dtype: Dtype,
    len: usize,
    first: bool,
    out: &mut [f64],
) -> bool {
    // SAFETY: the caller's promises, passed on.
    unsafe {
        match grad_dtype {
            Dtype::F32 => add::<F32>(isa, acc, grad, len, first, out),
            Dtype::Bf16 => add::<Bf16>(isa, acc, grad, len, first, out),
            Dtype::F16 => add::<F16>(isa, acc, grad, len, first, out),
        }
    }
}

unsafe fn add<G: Format>(
    isa: Isa,
    acc: *mut f32,
    grad: *const u8,
    len: usize,
    first: bool,
    out: &mut [f64],
) -> bool {
    // Whole vectors lie at multiples of 16 elements, which are lines, so the first one's alignment is everyone's.
    let aligned = acc.addr().is_multiple_of(LINE);
    // SAFETY: the caller's promises, passed on; streaming only where it is allowed.
    unsafe {
        match (first, aligned) {
            (false, _) => {
                partials_of(isa, Add::<G, false, false> { acc, grad, format: PhantomData }, len, out)
            }
            (true, false) => {
                partials_of(isa, Add::<G, true, false> { acc, grad, format: PhantomData }, len, out)
            }
            (true, true) => {
                partials_of(isa, Add::<G, true, true> { acc, grad, format: PhantomData }, len, out)
            }
        }
    }
}

/// The new `acc`, element by element, written as it is got.
struct Add<G, const FIRST: bool, const STREAM: bool> {
    acc: *mut f32,
    grad: *const u8,
    format: PhantomData<G>,
}

impl<G, const FIRST: bool, const STREAM: bool> Clone for Add<G, FIRST, STREAM> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<G, const FIRST: bool, const STREAM: bool> Copy for Add<G, FIRST, STREAM> {}

impl<G: Format, const FIRST: bool, const STREAM: bool> Feed for Add<G, FIRST, STREAM> {
    #[inline(always)]
    unsafe fn whole<V: Lanes>(self, at: usize) -> V {
        // SAFETY: the caller vouches for the elements and the ISA; `add` saw to the alignment.
        unsafe {
            let to = self.acc.add(at);
            let mut x = G::load::<V>(self.grad.add(at * G::SIZE));
            if !FIRST {
                x = V::load(to).add(x);
            }
            if STREAM {
                x.stream(to);
            } else {
                x.store(to);
            }
            x
        }
    }

    #[inline(always)]
    unsafe fn part<V: Lanes>(self, at: usize, count: usize) -> V {
        let mut buffer = [0.0f32; LANES];
        // SAFETY: the caller vouches for `count` elements and the ISA; the buffer holds sixteen. Adding zeros to the
        // padding leaves zeros.
        unsafe {
            let to = self.acc.add(at).cast::<u8>();
            let bytes = count * size_of::<f32>();
            let mut x = padded::<V, G>(self.grad, at, count);
            if !FIRST {
                to.copy_to_nonoverlapping(buffer.as_mut_ptr().cast(), bytes);
                x = V::load(buffer.as_ptr()).add(x);
            }
            x.store(buffer.as_mut_ptr());
            buffer.as_ptr().cast::<u8>().copy_to_nonoverlapping(to, bytes);
            x
        }
    }

    #[inline(always)]
    unsafe fn ask<V: Lanes>(self, at: usize) {
        // SAFETY: a prefetch takes any address.
        unsafe {
            ask::<V>(self.grad.wrapping_add(at * G::SIZE), G::SIZE);
            if !FIRST {
                ask::<V>(self.acc.wrapping_add(at).cast(), size_of::<f32>());
            }
        }
    }

    #[inline(always)]
    unsafe fn again(self, at: usize) -> f32 {
        // SAFETY: the caller vouches for the element, which was written before; streamed stores are seen by the
        // thread that made them, in order.
        unsafe { element::<F32>(self.acc.cast(), at) }
    }
}
