//! What memory itself allows: passes with a kernel's streams and no arithmetic.
//!
//! Every kernel here waits for memory, so its speed means little in GB/s and much as a share of the fastest pass that
//! reads and writes the same arrays on the same machine. [`pass`] is that pass. Its streams are one array only read,
//! arrays read and written, and one array only written, past the caches; an element of each is 1, 2 or 4 bytes wide.
//! `AdamW` in float32 is one read (the gradient) and three updates (master and both moments); the offload pass has a
//! write besides, and a norm the read alone.
//!
//! An array is so many bits here, whatever numbers they stand for, so a pass is exact for all of them, NaN included. For
//! each cache line `y` of an array updated, `y <- y | zero`, where `zero` is nothing that the compiler knows: all is
//! loaded and stored, and nothing changes. The array written gets lines of the array read. It goes as the kernels go:
//! prefetch [`AHEAD`] elements ahead, pieces of [`DEFAULT_CHUNK`] elements dealt to the pool. Sixty-four elements at a
//! time are one, two or four whole lines of every array.

// The essay of `simd` says why.
#![allow(clippy::inline_always)]

use std::hint::black_box;

use crate::adam::DEFAULT_CHUNK;
use crate::deal::Deal;
use crate::isa::Isa;
use crate::line::piece_len;
use crate::pool::Pool;
use crate::simd::{dispatch, Lanes, Task, Words, AHEAD, LINE};

/// Bytes that an element may have.
pub const WIDTHS: [usize; 3] = [1, 2, 4];

/// Elements of an iteration: a line of the narrowest array. What is left at the end is fewer, and is left out: it costs
/// no measurable time.
pub const STEP: usize = LINE;

/// Memory of one array.
#[derive(Clone, Copy, Debug)]
pub struct Array {
    /// First element.
    pub address: *mut u8,
    /// Bytes of an element, one of [`WIDTHS`].
    pub width: usize,
}

impl Array {
    /// The array from element `start` on, which the caller has seen to be there.
    #[inline(always)]
    fn from(self, start: usize) -> *mut u8 {
        self.address.wrapping_add(start * self.width)
    }
}

/// The memory of a pass: parallel arrays of `len` elements each.
#[derive(Clone, Copy, Debug)]
pub struct Streams<'a> {
    /// Only read.
    pub read: Array,
    /// Read and written.
    pub updates: &'a [Array],
    /// Only written, past the caches. Line by line it gets the bits of `read` in the same [`STEP`] elements, over again
    /// where it is the wider one.
    pub write: Option<Array>,
    /// Elements of each array.
    pub len: usize,
}

// SAFETY: streams are addresses and say nothing of who may use them; `pass`, which does use them, asks its caller for
// exclusive use of what is behind, whichever thread it happens on.
unsafe impl Send for Streams<'_> {}
// SAFETY: as above; shared streams give away only copies of their addresses.
unsafe impl Sync for Streams<'_> {}

/// Runs one pass on `pool`.
///
/// # Panics
///
/// Where an array's width isn't one of [`WIDTHS`], or `write` isn't aligned to the 64 bytes of a cache line.
///
/// # Safety
///
/// `isa` is available. `read` is readable and each array updated readable and writable for `len` elements, as is
/// `write` where there is one, by nobody else meanwhile; no two of them overlap.
pub unsafe fn pass(pool: &Pool, isa: Isa, streams: &Streams<'_>) {
    // SAFETY: the caller's promises, passed on.
    unsafe {
        pass_or(pool, isa, streams, black_box(0.0), piece_len(streams.len, pool.threads(), DEFAULT_CHUNK));
    }
}

/// [`pass`] that ors the bits of `zero` into the arrays updated, in pieces of `chunk` elements, a multiple of [`STEP`].
unsafe fn pass_or(pool: &Pool, isa: Isa, streams: &Streams<'_>, zero: f32, chunk: usize) {
    for array in streams.updates.iter().chain([&streams.read]).chain(&streams.write) {
        assert!(WIDTHS.contains(&array.width), "elements of {} bytes", array.width);
    }
    if let Some(write) = streams.write {
        assert!(write.address.addr().is_multiple_of(LINE), "the array written isn't aligned to a cache line");
    }
    Deal::new(pool.shares(), streams.len.div_ceil(chunk)).run(
        pool,
        || false,
        |piece| {
            let start = piece * chunk;
            let end = streams.len.min(start + chunk);
            // SAFETY: the caller's promises; the pieces don't overlap.
            unsafe { dispatch(isa, Piece { streams, start, end, zero }) };
        },
    );
}

/// One piece on one thread.
struct Piece<'a> {
    streams: &'a Streams<'a>,
    start: usize,
    end: usize,
    zero: f32,
}

impl Task for Piece<'_> {
    type Output = ();

    /// Asks for what [`pass`] asks for.
    #[inline(always)]
    unsafe fn run<V: Lanes>(self) {
        let Streams { read, updates, write, .. } = *self.streams;
        // SAFETY: `at + STEP <= end <= len`, the caller vouches for `len` elements of each array, and `write` is aligned:
        // a piece starts at a multiple of a line's elements, so it is aligned as the whole is.
        unsafe {
            let zero = V::splat(self.zero);
            let mut seen = zero;
            let mut at = self.start;
            while at + STEP <= self.end {
                let from = read.from(at);
                seen = match read.width {
                    1 => Self::look::<V, 1>(from, seen),
                    2 => Self::look::<V, 2>(from, seen),
                    _ => Self::look::<V, 4>(from, seen),
                };
                for update in updates {
                    match update.width {
                        1 => Self::touch::<V, 1>(update.from(at), zero),
                        2 => Self::touch::<V, 2>(update.from(at), zero),
                        _ => Self::touch::<V, 4>(update.from(at), zero),
                    }
                }
                if let Some(write) = write {
                    for line in 0..write.width {
                        // The line is in the first-level cache.
                        let x = V::load(from.add(line % read.width * LINE).cast());
                        x.stream(write.from(at).add(line * LINE).cast());
                    }
                }
                at += STEP;
            }
            // What the reading was for.
            black_box(seen);
            V::fence();
        }
    }
}

impl Piece<'_> {
    /// Reads 64 elements of `WIDTH` bytes, which are as many lines; returns `seen` with their bits.
    ///
    /// # Safety
    ///
    /// They are there, and the machine has the ISA of `V`.
    #[inline(always)]
    unsafe fn look<V: Lanes, const WIDTH: usize>(from: *const u8, mut seen: V) -> V {
        for line in 0..WIDTH {
            // SAFETY: the caller's promises; a prefetch takes any address.
            unsafe {
                V::prefetch(from.wrapping_add(AHEAD * WIDTH + line * LINE));
                seen = or(seen, V::load(from.add(line * LINE).cast()));
            }
        }
        seen
    }

    /// Reads and writes 64 elements of `WIDTH` bytes.
    ///
    /// # Safety
    ///
    /// They are the caller's alone, and the machine has the ISA of `V`.
    #[inline(always)]
    unsafe fn touch<V: Lanes, const WIDTH: usize>(at: *mut u8, zero: V) {
        for line in 0..WIDTH {
            // SAFETY: the caller's promises; a prefetch takes any address.
            unsafe {
                V::prefetch(at.wrapping_add(AHEAD * WIDTH + line * LINE));
                let y = at.add(line * LINE).cast();
                or(V::load(y), zero).store(y);
            }
        }
    }
}

/// Their bits, or'ed: exact for every pattern.
#[inline(always)]
unsafe fn or<V: Lanes>(a: V, b: V) -> V {
    // SAFETY: the caller has the ISA.
    unsafe { V::from_words(a.to_words().or(b.to_words())) }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CHUNK: usize = 4 * STEP;
    const LEN: usize = 2 * CHUNK + 3 * STEP + 3;
    const WHOLE: usize = LEN / STEP * STEP;

    /// Starts at a cache line, as `write` has to.
    #[repr(align(64))]
    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    struct Line([u8; LINE]);

    /// Bits of all kinds, as an array of `width` bytes an element: infinities, NaN quiet and signalling, subnormals.
    fn bits(seed: u32, width: usize) -> Vec<Line> {
        let mut state = seed;
        let mut byte = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let random = (state >> 24) as u8;
            // A third of all bytes, for exponents full of ones and of zeros.
            [random, 0xFF, 0x00, random, 0x7F, random][(state >> 16) as usize % 6]
        };
        (0..(LEN * width).div_ceil(LINE)).map(|_| Line(std::array::from_fn(|_| byte()))).collect()
    }

    fn array(lines: &mut [Line], width: usize) -> Array {
        Array { address: lines.as_mut_ptr().cast(), width }
    }

    /// The first `WHOLE` elements, and the rest.
    fn halves(lines: &[Line], width: usize) -> (&[Line], &[Line]) {
        lines.split_at(WHOLE * width / LINE)
    }

    /// Every width as what is read, updated and written, alone and in company.
    fn combinations() -> Vec<(usize, Vec<usize>, Option<usize>)> {
        let updates = [vec![], vec![4], vec![4, 4, 4], vec![2, 2, 2, 2], vec![1, 1], vec![2, 4, 1, 2, 1, 4]];
        let writes = [None, Some(1), Some(2), Some(4)];
        let mut all = Vec::new();
        for read in WIDTHS {
            for update in &updates {
                all.extend(writes.map(|write| (read, update.clone(), write)));
            }
        }
        all
    }

    /// Runs a pass on every ISA and for every set of streams, and hands over before and after.
    fn each(zero: f32, check: impl Fn(&str, usize, &[Line], &[Line])) {
        let pool = Pool::with_threads(2).unwrap();
        for isa in Isa::available() {
            for (read_width, widths, write_width) in combinations() {
                let name = format!("{isa}: {read_width} {widths:?} {write_width:?}");
                let read = bits(1, read_width);
                let before: Vec<_> = widths.iter().zip(2..).map(|(&width, seed)| bits(seed, width)).collect();
                let (mut read_after, mut after) = (read.clone(), before.clone());
                let updates: Vec<_> =
                    after.iter_mut().zip(&widths).map(|(lines, &width)| array(lines, width)).collect();
                let mut out = vec![Line([0xA5; LINE]); (LEN * 4).div_ceil(LINE)];
                let streams = Streams {
                    read: array(&mut read_after, read_width),
                    updates: &updates,
                    write: write_width.map(|width| array(&mut out, width)),
                    len: LEN,
                };
                // SAFETY: available; every array has `LEN` elements, its own, and `out` is lines.
                unsafe { pass_or(&pool, isa, &streams, black_box(zero), CHUNK) };
                assert_eq!(read_after, read, "{name}");
                for ((&width, before), after) in widths.iter().zip(&before).zip(&after) {
                    check(&name, width, before, after);
                }
                let (written, rest) = halves(&out, write_width.unwrap_or(0));
                for (i, line) in written.iter().enumerate() {
                    let width = write_width.unwrap();
                    let from = i / width * read_width + i % width % read_width;
                    assert_eq!(*line, read[from], "{name}: line {i}");
                }
                assert!(rest.iter().all(|line| line.0 == [0xA5; LINE]), "{name}");
            }
        }
    }

    /// Not a bit of any kind of number, so that arrays of any dtype keep their values.
    #[test]
    fn a_pass_changes_nothing() {
        each(0.0, |name, _, before, after| assert!(before == after, "{name}"));
    }

    /// With ones in place of the zero, each whole step of each array updated gets them, and no byte more.
    #[test]
    fn a_pass_goes_everywhere() {
        const ONES: u8 = 0x11;
        each(f32::from_bits(u32::from_ne_bytes([ONES; 4])), |name, width, before, after| {
            let (whole_before, rest_before) = halves(before, width);
            let (whole, rest) = halves(after, width);
            for (line, start) in whole.iter().zip(whole_before) {
                assert_eq!(line.0, start.0.map(|byte| byte | ONES), "{name}");
            }
            assert!(rest == rest_before, "{name}");
        });
    }
}
