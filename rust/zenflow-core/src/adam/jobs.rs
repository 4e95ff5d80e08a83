//! Many updates, one parallel region.
//!
//! All jobs together are one line of elements; the line is cut into even pieces and these are dealt to the pool's
//! threads. So the cost of starting threads is paid once, however many tensors there are.

use super::{update, Entry, Span};
use crate::deal::Deal;
use crate::hyper::Scalars;
use crate::isa::Isa;
use crate::line::{piece_len, Line};
use crate::pool::Pool;

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

/// Most elements of a piece: a good tenth of a millisecond, long against starting it, short against the whole.
pub const DEFAULT_CHUNK: usize = 256 * 1024;

/// Runs all jobs on `pool`, in pieces of `chunk` elements at most, and returns when all are done.
///
/// # Safety
///
/// Each job is one that [`update`] would take, and no two of them write where another reads or writes.
pub unsafe fn run_jobs(pool: &Pool, isa: Isa, jobs: &[Job], chunk: usize) {
    let elements = jobs.iter().map(|job| job.span.len).sum();
    let region = Region::new(pool, isa, jobs, piece_len(elements, pool.threads(), chunk));
    // SAFETY: the caller's promises, passed on.
    unsafe { region.run(|| false) };
}

/// Jobs under way, which may be left between two pieces and taken up again.
pub(crate) struct Region<'a> {
    pool: &'a Pool,
    isa: Isa,
    jobs: &'a [Job],
    line: Line,
    deal: Deal<'a>,
}

impl<'a> Region<'a> {
    /// Nothing done yet; pieces are of `chunk` elements.
    pub(crate) fn new(pool: &'a Pool, isa: Isa, jobs: &'a [Job], chunk: usize) -> Self {
        let line = Line::new(jobs.iter().map(|job| job.span.len), chunk);
        let deal = Deal::new(pool.shares(), line.pieces());
        Self { pool, isa, jobs, line, deal }
    }

    /// Whether every piece has been done, once no [`run`](Self::run) is under way.
    pub(crate) fn is_done(&self) -> bool {
        self.deal.left() == 0
    }

    /// Goes on until all is done, or until `stop` says so after a piece; see [`Deal::run`].
    ///
    /// # Safety
    ///
    /// As for [`run_jobs`], from the first call until the last has returned.
    pub(crate) unsafe fn run(&self, stop: impl Fn() -> bool + Sync) {
        self.deal.run(self.pool, stop, |piece| {
            self.line.piece(piece, |index, range| {
                let job = &self.jobs[index];
                let span = job.span.slice(range.start, range.len());
                // SAFETY: the caller vouches for the jobs; the pieces don't overlap, and each is claimed once.
                unsafe { update(self.isa, job.entry, &job.scalars, &span) };
            });
        });
    }
}
