//! Many updates, one parallel region.
//!
//! All jobs together are one line of elements; the line is cut every `chunk` elements and the pieces are dealt to the
//! pool. So a large tensor becomes many pieces and a thousand small ones become few, each about as much work, and the
//! cost of starting threads is paid once. A cut within a job moves back to a multiple of [`GRAIN`] elements, so that
//! two threads don't share a cache line or a page more than they must.

use rayon::prelude::*;
use rayon::ThreadPool;

use super::{update, Entry, Span};
use crate::hyper::Scalars;
use crate::isa::Isa;

/// One update.
#[derive(Clone, Copy, Debug)]
pub struct Job {
    /// Its memory.
    pub span: Span,
    /// Its constants.
    pub scalars: Scalars,
    /// What to compute.
    pub entry: Entry,
}

/// Elements of a piece: a good tenth of a millisecond, long against starting it, short against the whole.
pub const DEFAULT_CHUNK: usize = 256 * 1024;

/// Cuts lie at multiples of this, counted from the job's first element.
const GRAIN: usize = 1024;

/// Runs all jobs on `pool`, in pieces of about `chunk` elements, and returns when all are done.
///
/// # Safety
///
/// Each job is one that [`update`] would take, and no two of them write where another reads or writes.
pub unsafe fn run_jobs(pool: &ThreadPool, isa: Isa, jobs: &[Job], chunk: usize) {
    let line = Line::new(jobs, chunk);
    let pieces = line.pieces();
    // SAFETY: the caller vouches for the jobs; the pieces don't overlap.
    let run =
        |piece: usize| line.piece(piece, |job, span| unsafe { update(isa, job.entry, &job.scalars, &span) });
    if pieces == 1 {
        run(0);
    } else if pieces > 1 {
        pool.install(|| (0..pieces).into_par_iter().with_max_len(1).for_each(run));
    }
}

/// The jobs laid end to end.
struct Line<'a> {
    jobs: &'a [Job],
    /// First element of each job on the line, and the line's end.
    starts: Vec<usize>,
    chunk: usize,
}

impl<'a> Line<'a> {
    fn new(jobs: &'a [Job], chunk: usize) -> Self {
        let mut starts = Vec::with_capacity(jobs.len() + 1);
        let mut end = 0;
        starts.push(end);
        for job in jobs {
            end += job.span.len;
            starts.push(end);
        }
        Self { jobs, starts, chunk: chunk.max(GRAIN) }
    }

    fn len(&self) -> usize {
        self.starts[self.jobs.len()]
    }

    fn pieces(&self) -> usize {
        self.len().div_ceil(self.chunk)
    }

    /// Job and element within it where piece `index` begins (and the one before ends).
    fn cut(&self, index: usize) -> (usize, usize) {
        let at = index.saturating_mul(self.chunk);
        if at >= self.len() {
            return (self.jobs.len(), 0);
        }
        // The last job that starts at or before the cut; jobs without elements are passed over.
        let job = self.starts.partition_point(|&start| start <= at) - 1;
        (job, (at - self.starts[job]) / GRAIN * GRAIN)
    }

    /// Calls `f` with each job, or part of one, in piece `index`.
    fn piece(&self, index: usize, f: impl Fn(&Job, Span)) {
        let (mut job, mut start) = self.cut(index);
        let (last, stop) = self.cut(index + 1);
        while job < self.jobs.len() && (job, start) < (last, stop) {
            let span = &self.jobs[job].span;
            let end = if job == last { stop } else { span.len };
            if end > start {
                f(&self.jobs[job], span.slice(start, end - start));
            }
            (job, start) = (job + 1, 0);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::ptr;

    use proptest::prelude::*;

    use super::*;

    /// A job over made-up addresses whose `grad` counts its elements on the line; nothing behind them is touched.
    fn job(start: usize, len: usize) -> Job {
        let span = Span { grad: ptr::without_provenance(start * 4), len, ..Span::default() };
        Job { span, scalars: Scalars::default(), entry: Entry::Moments }
    }

    proptest! {
        /// The pieces tile the line, in order, without gap or overlap, and none is much over a chunk.
        #[test]
        fn pieces_tile_the_line(
            lens in prop::collection::vec(prop_oneof![0usize..5, 0usize..5000, 4096usize..4097], 0..40),
            chunk in 0usize..9000,
        ) {
            let mut jobs = Vec::new();
            let mut total = 0;
            for len in lens {
                jobs.push(job(total, len));
                total += len;
            }
            let line = Line::new(&jobs, chunk);
            let at = RefCell::new(0);
            for index in 0..line.pieces() {
                let before = *at.borrow();
                line.piece(index, |_, span| {
                    assert_eq!(span.grad.addr() / 4, *at.borrow());
                    *at.borrow_mut() += span.len;
                });
                prop_assert!(*at.borrow() - before <= line.chunk + GRAIN);
            }
            prop_assert_eq!(*at.borrow(), total);
        }
    }
}
