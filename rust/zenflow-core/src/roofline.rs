//! What memory itself allows: passes with a kernel's streams and next to no arithmetic.
//!
//! Every kernel here waits for memory, so its speed means little in GB/s and much as a share of the fastest pass that
//! reads and writes the same arrays on the same machine. [`pass`] is that pass. Its streams are one array only read, up
//! to [`MOST_UPDATES`] float32 arrays read and written, and one array only written, past the caches. `AdamW` in float32
//! is one read (the gradient) and three updates (master and both moments); the offload pass has a write besides, and a
//! norm the read alone.
//!
//! For each element `x` of the array read, and each array updated, `y <- fma(x, zero, y)`, where `zero` is nothing that
//! the compiler knows: all is loaded and stored, and nothing finite changes. The array written gets the last `y` (`x`
//! where there is none), rounded. It goes as the kernels go: prefetch 512 elements ahead, 32 elements at a time, pieces
//! of [`DEFAULT_CHUNK`] elements dealt to the pool.

// The essay of `simd` says why.
#![allow(clippy::inline_always)]

use std::hint::black_box;
use std::marker::PhantomData;

use rayon::prelude::*;
use rayon::ThreadPool;

use crate::adam::DEFAULT_CHUNK;
use crate::dtype::Dtype;
use crate::isa::Isa;
use crate::simd::{dispatch, Bf16, Format, Lanes, Nothing, Target, Task, AHEAD, F32, LANES, LINE};

/// Arrays that a pass can update.
pub const MOST_UPDATES: usize = 3;

/// Elements of an iteration. What is left at the end is fewer, and is left out: it costs no measurable time.
const STEP: usize = 2 * LANES;

/// The memory of a pass: parallel arrays of `len` elements each.
#[derive(Clone, Copy, Debug)]
pub struct Streams {
    /// Only read.
    pub read: *const u8,
    /// Its width, rather: float16 is read as bfloat16.
    pub read_dtype: Dtype,
    /// Read and written, the first `update_count` of them.
    pub updates: [*mut f32; MOST_UPDATES],
    /// How many are updated.
    pub update_count: usize,
    /// Only written, past the caches; null for nothing.
    pub write: *mut u8,
    /// Its width, rather: float16 is written as bfloat16.
    pub write_dtype: Dtype,
    /// Elements of each array.
    pub len: usize,
}

// SAFETY: streams are addresses and say nothing of who may use them; `pass`, which does use them, asks its caller for
// exclusive use of what is behind, whichever thread it happens on.
unsafe impl Send for Streams {}
// SAFETY: as above; shared streams give away only copies of their addresses.
unsafe impl Sync for Streams {}

impl Streams {
    /// The `len` elements from `start` on, which the caller has seen to be there.
    fn slice(&self, start: usize, len: usize) -> Self {
        Self {
            read: self.read.wrapping_add(start * self.read_dtype.size()),
            updates: self.updates.map(|update| update.wrapping_add(start)),
            // Null stays null.
            write: if self.write.is_null() {
                self.write
            } else {
                self.write.wrapping_add(start * self.write_dtype.size())
            },
            len,
            ..*self
        }
    }
}

/// Runs one pass on `pool`.
///
/// # Panics
///
/// Where `update_count` is over [`MOST_UPDATES`], or `write` isn't aligned to the 64 bytes of a cache line.
///
/// # Safety
///
/// `isa` is available. `read` is readable and each array updated readable and writable for `len` elements, as is
/// `write` where it isn't null, by nobody else meanwhile; no two of them overlap.
pub unsafe fn pass(pool: &ThreadPool, isa: Isa, streams: &Streams) {
    assert!(streams.update_count <= MOST_UPDATES, "{} arrays to update", streams.update_count);
    assert!(streams.write.addr().is_multiple_of(LINE), "the array written isn't aligned to a cache line");
    // A chunk is a multiple of a line's elements, so every piece of `write` is aligned as the whole is.
    pool.install(|| {
        (0..streams.len.div_ceil(DEFAULT_CHUNK)).into_par_iter().with_max_len(1).for_each(|piece| {
            let start = piece * DEFAULT_CHUNK;
            let part = streams.slice(start, DEFAULT_CHUNK.min(streams.len - start));
            // SAFETY: the caller's promises; the pieces don't overlap.
            unsafe {
                match part.read_dtype.size() {
                    4 => reading::<F32>(isa, &part),
                    _ => reading::<Bf16>(isa, &part),
                }
            }
        });
    });
}

/// [`pass`] over one piece, the width of what is read known.
unsafe fn reading<G: Format>(isa: Isa, streams: &Streams) {
    // SAFETY: the caller's promises, passed on.
    unsafe {
        match (streams.write.is_null(), streams.write_dtype.size()) {
            (true, _) => writing::<G, Nothing>(isa, streams),
            (false, 4) => writing::<G, F32>(isa, streams),
            (false, _) => writing::<G, Bf16>(isa, streams),
        }
    }
}

/// [`reading`], the width of what is written known too.
unsafe fn writing<G: Format, O: Target>(isa: Isa, streams: &Streams) {
    // SAFETY: the caller's promises, passed on.
    unsafe {
        match streams.update_count {
            0 => dispatch(isa, Pass::<G, O, 0>::new(streams)),
            1 => dispatch(isa, Pass::<G, O, 1>::new(streams)),
            2 => dispatch(isa, Pass::<G, O, 2>::new(streams)),
            _ => dispatch(isa, Pass::<G, O, MOST_UPDATES>::new(streams)),
        }
    }
}

/// One piece on one thread: format read, format written, arrays updated.
struct Pass<'a, G, O, const UPDATES: usize> {
    streams: &'a Streams,
    formats: PhantomData<(G, O)>,
}

impl<'a, G, O, const UPDATES: usize> Pass<'a, G, O, UPDATES> {
    fn new(streams: &'a Streams) -> Self {
        Self { streams, formats: PhantomData }
    }
}

impl<G: Format, O: Target, const UPDATES: usize> Task for Pass<'_, G, O, UPDATES> {
    type Output = ();

    /// Asks for what [`pass`] asks for.
    #[inline(always)]
    unsafe fn run<V: Lanes>(self) {
        let streams = self.streams;
        // SAFETY: `at + STEP <= len`, the caller vouches for `len` elements of each array, and `write` is aligned.
        unsafe {
            let zero = V::splat(black_box(0.0));
            let mut sums = [V::splat(0.0); STEP / LANES];
            let mut at = 0;
            while at + STEP <= streams.len {
                Self::ask_ahead::<V>(streams, at + AHEAD);
                for (part, sum) in sums.iter_mut().enumerate() {
                    *sum = Self::whole(streams, at + part * LANES, zero, *sum);
                }
                at += STEP;
            }
            // Where nothing is written, this is what the reading was for.
            black_box(sums);
            V::fence();
        }
    }
}

impl<G: Format, O: Target, const UPDATES: usize> Pass<'_, G, O, UPDATES> {
    /// Prefetches what the iteration at `next` reads.
    #[inline(always)]
    unsafe fn ask_ahead<V: Lanes>(streams: &Streams, next: usize) {
        let read = streams.read.wrapping_add(next * G::SIZE);
        // SAFETY: a prefetch takes any address; the caller has the ISA.
        unsafe {
            for update in &streams.updates[..UPDATES] {
                V::prefetch(update.wrapping_add(next).cast());
                V::prefetch(update.wrapping_add(next + LANES).cast());
            }
            V::prefetch(read);
            if STEP * G::SIZE > LINE {
                V::prefetch(read.wrapping_add(LINE));
            }
        }
    }

    /// Sixteen elements, from `at` on; returns `sum`, with those read added where nothing else would need them.
    #[inline(always)]
    unsafe fn whole<V: Lanes>(streams: &Streams, at: usize, zero: V, sum: V) -> V {
        // SAFETY: the caller vouches for 16 elements from `at` on, for the ISA, and for the alignment of `write`.
        unsafe {
            let x = G::load::<V>(streams.read.add(at * G::SIZE));
            let mut last = x;
            for update in &streams.updates[..UPDATES] {
                let y = update.add(at);
                last = x.mul_add(zero, V::load(y));
                last.store(y);
            }
            // Without an array to write its address is null and goes nowhere, hence no `add`.
            O::stream(last, streams.write.wrapping_add(at * O::SIZE));
            if UPDATES == 0 && O::SIZE == 0 {
                sum.add(x)
            } else {
                sum
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEN: usize = DEFAULT_CHUNK + 5 * STEP + 3;

    /// Starts at a cache line, as `write` has to.
    #[repr(align(64))]
    #[derive(Clone, Copy)]
    struct Line([u16; LINE / 2]);

    /// On every ISA and for every set of streams: what is updated stays, what is written is the last of them.
    #[test]
    fn a_pass_goes_everywhere_and_changes_nothing() {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(2).build().unwrap();
        // Exact in bfloat16, and told apart by stream and element.
        let value = |stream: usize, i: usize| ((stream * 64 + i % 61) as f32) * 0.5;
        let read_wide: Vec<f32> = (0..LEN).map(|i| value(0, i)).collect();
        let read_half: Vec<half::bf16> = read_wide.iter().map(|&x| half::bf16::from_f32(x)).collect();
        for isa in Isa::available() {
            for update_count in 0..=MOST_UPDATES {
                let updated = |k: usize| (0..LEN).map(move |i| value(k + 1, i)).collect::<Vec<f32>>();
                let mut arrays: Vec<Vec<f32>> = (0..MOST_UPDATES).map(updated).collect();
                let mut updates = [std::ptr::null_mut(); MOST_UPDATES];
                for (address, array) in updates.iter_mut().zip(&mut arrays) {
                    *address = array.as_mut_ptr();
                }
                let last = if update_count == 0 { &read_wide } else { &arrays[update_count - 1] }.clone();
                for (read_dtype, read) in
                    [(Dtype::F32, read_wide.as_ptr().cast()), (Dtype::Bf16, read_half.as_ptr().cast())]
                {
                    for write_dtype in [None, Some(Dtype::F32), Some(Dtype::Bf16)] {
                        let mut out = vec![Line([0; LINE / 2]); LEN.div_ceil(LINE / 4)];
                        let streams = Streams {
                            read,
                            read_dtype,
                            updates,
                            update_count,
                            write: if write_dtype.is_some() {
                                out.as_mut_ptr().cast()
                            } else {
                                std::ptr::null_mut()
                            },
                            write_dtype: write_dtype.unwrap_or(Dtype::F32),
                            len: LEN,
                        };
                        // SAFETY: available; every array has `LEN` elements, its own, and `out` is lines.
                        unsafe { pass(&pool, isa, &streams) };
                        let whole = LEN / STEP * STEP;
                        let written = |i: usize| {
                            let wide = [out[i / 16].0[i % 16 * 2], out[i / 16].0[i % 16 * 2 + 1]];
                            match write_dtype {
                                Some(Dtype::F32) => {
                                    f32::from_bits(u32::from(wide[1]) << 16 | u32::from(wide[0]))
                                }
                                _ => half::bf16::from_bits(out[i / 32].0[i % 32]).to_f32(),
                            }
                        };
                        for (i, &value) in last.iter().enumerate().take(whole) {
                            let expected = if write_dtype.is_some() { value } else { 0.0 };
                            assert_eq!(written(i).to_bits(), expected.to_bits(), "{isa} {streams:?} {i}");
                        }
                    }
                }
                for (k, array) in arrays.iter().enumerate() {
                    assert!(array.iter().enumerate().all(|(i, &y)| y.to_bits() == value(k + 1, i).to_bits()));
                }
            }
        }
    }
}
