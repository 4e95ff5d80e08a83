//! Arrays of many lengths as one line of elements, cut into even pieces.
//!
//! A large array becomes many pieces and a thousand small ones become few, each about as much work. A cut within an
//! array moves back to a multiple of [`GRAIN`] elements, so that two threads don't share a cache line or a page more
//! than they must.

use std::ops::Range;

/// Cuts lie at multiples of this, counted from the array's first element.
pub(crate) const GRAIN: usize = 1024;

/// Pieces that each thread finds if there are elements enough: the last ones to finish leave at most an eighth idle.
const PIECES_A_THREAD: usize = 8;

/// Elements below which a piece isn't worth dealing: a few microseconds.
const LEAST: usize = 16 * 1024;

/// Elements of a piece when `total` are shared by `threads`: as many as `most` in large work, fewer in small, where each
/// thread is to have its part.
pub(crate) fn piece_len(total: usize, threads: usize, most: usize) -> usize {
    let even = total.div_ceil(threads.saturating_mul(PIECES_A_THREAD).max(1));
    even.next_multiple_of(GRAIN).max(LEAST).min(most)
}

/// Arrays laid end to end.
#[derive(Debug)]
pub(crate) struct Line {
    /// First element of each array on the line, and the line's end.
    starts: Vec<usize>,
    chunk: usize,
}

impl Line {
    /// A line of arrays of `lens` elements, cut every `chunk` elements.
    pub(crate) fn new(lens: impl ExactSizeIterator<Item = usize>, chunk: usize) -> Self {
        let mut starts = Vec::with_capacity(lens.len() + 1);
        let mut end = 0;
        starts.push(end);
        for len in lens {
            end += len;
            starts.push(end);
        }
        Self { starts, chunk: chunk.max(GRAIN) }
    }

    /// Elements of all arrays.
    pub(crate) fn len(&self) -> usize {
        self.starts[self.arrays()]
    }

    fn arrays(&self) -> usize {
        self.starts.len() - 1
    }

    pub(crate) fn pieces(&self) -> usize {
        self.len().div_ceil(self.chunk)
    }

    /// Array and element within it where piece `index` begins (and the one before ends).
    fn cut(&self, index: usize) -> (usize, usize) {
        let at = index.saturating_mul(self.chunk);
        if at >= self.len() {
            return (self.arrays(), 0);
        }
        // The last array that starts at or before the cut; arrays without elements are passed over.
        let array = self.starts.partition_point(|&start| start <= at) - 1;
        (array, (at - self.starts[array]) / GRAIN * GRAIN)
    }

    /// Calls `f` with each array that has elements in piece `index`, and which of its elements.
    pub(crate) fn piece(&self, index: usize, mut f: impl FnMut(usize, Range<usize>)) {
        let (mut array, mut start) = self.cut(index);
        let (last, stop) = self.cut(index + 1);
        while array < self.arrays() && (array, start) < (last, stop) {
            let end = if array == last { stop } else { self.starts[array + 1] - self.starts[array] };
            if end > start {
                f(array, start..end);
            }
            (array, start) = (array + 1, 0);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn small_work_is_split_evenly_and_large_work_by_the_chunk() {
        const MOST: usize = 256 * 1024;
        assert_eq!(piece_len(64 << 20, 2, MOST), MOST);
        assert_eq!(piece_len(1 << 20, 2, MOST), 64 * 1024);
        assert_eq!(piece_len(1 << 20, 64, MOST), LEAST);
        assert_eq!(piece_len(3_000_001, 3, MOST), 123 * GRAIN);
        assert_eq!((piece_len(10, 4, MOST), piece_len(0, 0, MOST)), (LEAST, LEAST));
        assert_eq!(piece_len(1 << 20, 2, 1024), 1024, "what the caller allows is never exceeded");
    }

    proptest! {
        /// The pieces tile the line, in order, without gap or overlap, and none is much over a chunk.
        #[test]
        fn pieces_tile_the_line(
            lens in prop::collection::vec(prop_oneof![0usize..5, 0usize..5000, 4096usize..4097], 0..40),
            chunk in 0usize..9000,
        ) {
            let line = Line::new(lens.iter().copied(), chunk);
            let mut expected = lens.iter().enumerate().flat_map(|(array, &len)| (0..len).map(move |i| (array, i)));
            for index in 0..line.pieces() {
                let mut elements = 0;
                line.piece(index, |array, range| {
                    assert!(!range.is_empty());
                    elements += range.len();
                    for i in range {
                        assert_eq!(expected.next(), Some((array, i)));
                    }
                });
                prop_assert!(elements <= line.chunk + GRAIN);
            }
            prop_assert_eq!(expected.next(), None);
        }
    }
}
