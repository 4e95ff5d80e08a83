//! How pieces of work are dealt to a pool's threads.
//!
//! Pieces are numbered in the order of their memory. Each NUMA node has a *share*: a run of pieces in proportion to its
//! threads. A thread claims the pieces of its own node's share one after the other, and when that is used up helps the
//! other nodes with theirs. Memory that was first touched by the same split
//! ([`crate::bucket::Bucket::first_touch`]) therefore is where its threads are. With one node there is one share and one counter.
//!
//! Claiming costs an atomic addition a piece. A thread that starts late, or is slowed by others on its core, simply
//! claims fewer. Nothing of this shows in the bits: a piece is the same whoever runs it.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crossbeam_utils::CachePadded;

use crate::pool::Pool;

/// Pieces a thread up to which the caller looks out for the end of a region before it parks. Being woken takes tens of
/// microseconds, a tenth of the time that a million elements take.
const SMALL: usize = 16;

/// How long it does so. It yields all the while, since the pool may have a thread on its core.
const LOOKOUT: Duration = Duration::from_millis(1);

/// Which share each thread of a pool claims from first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shares {
    /// The share of each thread; shares are numbered from 0 without gaps.
    homes: Vec<usize>,
    /// Threads before each share, and all of them.
    before: Vec<usize>,
}

impl Shares {
    /// One share for all `threads`.
    #[must_use]
    pub fn one(threads: usize) -> Self {
        Self::by_node(&vec![0; threads])
    }

    /// A share a node; `nodes[i]` is the node of thread `i`.
    #[must_use]
    pub fn by_node(nodes: &[usize]) -> Self {
        let mut known = nodes.to_vec();
        known.sort_unstable();
        known.dedup();
        let homes: Vec<usize> =
            nodes.iter().map(|node| known.partition_point(|other| other < node)).collect();
        let before =
            (0..=known.len()).map(|share| homes.iter().filter(|&&home| home < share).count()).collect();
        Self { homes, before }
    }

    /// Number of shares: nodes that have a thread.
    #[must_use]
    pub fn len(&self) -> usize {
        self.before.len() - 1
    }

    /// Whether there is no thread at all.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// First piece of `share` out of `pieces`; that of the share after the last is `pieces`.
    ///
    /// # Panics
    ///
    /// If `share` is above [`len`](Self::len).
    #[must_use]
    pub fn start(&self, share: usize, pieces: usize) -> usize {
        // Exact, and without the product's overflow.
        let (before, all) = (self.before[share], self.homes.len().max(1));
        pieces / all * before + pieces % all * before / all
    }

    fn home(&self, thread: usize) -> usize {
        self.homes.get(thread).copied().unwrap_or(0)
    }
}

/// Pieces `0..pieces`, each to be claimed once. It can be left and taken up again: what was claimed stays claimed.
#[derive(Debug)]
pub struct Deal<'a> {
    shares: &'a Shares,
    pieces: usize,
    /// The next piece of each share; beyond its end where the share is used up.
    next: Vec<CachePadded<AtomicUsize>>,
}

impl<'a> Deal<'a> {
    /// Nothing claimed yet.
    #[must_use]
    pub fn new(shares: &'a Shares, pieces: usize) -> Self {
        let next =
            (0..shares.len()).map(|share| AtomicUsize::new(shares.start(share, pieces)).into()).collect();
        Self { shares, pieces, next }
    }

    /// The next piece for `thread`: of its own share, or else of another's.
    ///
    /// Relaxed, as the counters order nothing but themselves: what the pieces write is published by the end of
    /// [`run`](Self::run).
    fn claim(&self, thread: usize) -> Option<usize> {
        let (home, count) = (self.shares.home(thread), self.shares.len());
        (0..count).find_map(|step| {
            let share = (home + step) % count;
            let end = self.shares.start(share + 1, self.pieces);
            let next = &self.next[share];
            // Looked at first, so that used-up shares aren't written any more.
            if next.load(Ordering::Relaxed) >= end {
                return None;
            }
            let piece = next.fetch_add(1, Ordering::Relaxed);
            (piece < end).then_some(piece)
        })
    }

    /// Pieces that nobody has claimed.
    #[must_use]
    pub fn left(&self) -> usize {
        let left = |(share, next): (usize, &CachePadded<AtomicUsize>)| {
            self.shares.start(share + 1, self.pieces).saturating_sub(next.load(Ordering::Relaxed))
        };
        self.next.iter().enumerate().map(left).sum()
    }

    /// One parallel region on `pool`: its threads claim pieces and `work` on them, until none is left or `stop` says
    /// so. Returns when every piece claimed is done.
    ///
    /// `stop` is asked after each piece, by the thread that did it; once true, threads finish with the piece they are
    /// at, or with their first. So a region is a round at least, one piece a thread as far as there are so many. A
    /// single piece is done by the calling thread: waking another takes longer than handing it over gains.
    pub fn run(&self, pool: &Pool, stop: impl Fn() -> bool + Sync, work: impl Fn(usize) + Sync) {
        let left = self.left();
        if left <= 1 {
            // Nobody else claims from it now.
            if let Some(piece) = self.claim(0) {
                work(piece);
            }
            return;
        }
        let stopped = AtomicBool::new(false);
        let turn = || {
            let thread = rayon::current_thread_index().unwrap_or(0);
            while let Some(piece) = self.claim(thread) {
                work(piece);
                // Relaxed: a hint; who misses it does one piece more.
                if stopped.load(Ordering::Relaxed) {
                    break;
                }
                if stop() {
                    stopped.store(true, Ordering::Relaxed);
                    break;
                }
            }
        };
        // Each thread is woken by the caller itself: rayon's parallel iterators would wake one, that one the next two,
        // and the time it takes a thread to wake adds up. A turn left over finds nothing to claim.
        let turns = left.min(pool.threads());
        let ended = AtomicUsize::new(0);
        let run_turn = || {
            turn();
            ended.fetch_add(1, Ordering::Release);
        };
        let run_turn = &run_turn;
        pool.rayon().in_place_scope(|scope| {
            for _ in 0..turns {
                scope.spawn(move |_| run_turn());
            }
            // A thread of the pool's own works along while it waits.
            if left <= turns * SMALL && rayon::current_thread_index().is_none() {
                let begin = Instant::now();
                while ended.load(Ordering::Acquire) < turns && begin.elapsed() < LOOKOUT {
                    std::thread::yield_now();
                }
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn nodes_get_shares_by_their_threads() {
        // Node 3 has two threads, node 7 one; nodes without threads have no share.
        let shares = Shares::by_node(&[7, 3, 3]);
        assert_eq!(shares.len(), 2);
        let starts = |pieces| (0..=2).map(|share| shares.start(share, pieces)).collect::<Vec<_>>();
        assert_eq!(starts(9), [0, 6, 9]);
        assert_eq!(starts(1), [0, 0, 1]);
        assert_eq!(starts(usize::MAX)[2], usize::MAX);

        let deal = Deal::new(&shares, 9);
        assert_eq!([deal.claim(0), deal.claim(1), deal.claim(2), deal.claim(0)], [6, 0, 1, 7].map(Some));
        assert_eq!((deal.claim(0), deal.left()), (Some(8), 4));
        assert_eq!(deal.claim(0), Some(2), "its own share is used up: it helps");
        assert_eq!([deal.claim(2), deal.claim(1), deal.claim(0)], [3, 4, 5].map(Some));
        assert_eq!((deal.claim(0), deal.claim(1), deal.left()), (None, None, 0));
    }

    #[test]
    fn one_node_is_one_run() {
        let shares = Shares::one(3);
        assert_eq!((shares.len(), shares.start(0, 5), shares.start(1, 5)), (1, 0, 5));
        let deal = Deal::new(&shares, 3);
        assert_eq!([2, 0, 1, 1].map(|thread| deal.claim(thread)), [Some(0), Some(1), Some(2), None]);
    }

    #[test]
    fn a_region_that_is_always_stopped_is_a_round() {
        let pool = Pool::with_threads(3).unwrap();
        for shares in [Shares::one(3), Shares::by_node(&[1, 0, 1])] {
            let deal = Deal::new(&shares, 10);
            let mut lefts = vec![deal.left()];
            let done = Mutex::new(Vec::new());
            while deal.left() > 0 {
                deal.run(&pool, || true, |piece| done.lock().unwrap().push(piece));
                lefts.push(deal.left());
            }
            assert_eq!(lefts, [10, 7, 4, 1, 0]);
            let mut done = done.into_inner().unwrap();
            done.sort_unstable();
            assert_eq!(done, (0..10).collect::<Vec<_>>());
        }
    }

    /// From within the pool too, where the calling thread works along.
    #[test]
    fn a_region_does_every_piece_once() {
        let pool = Pool::with_threads(3).unwrap();
        let run = |pieces: usize| {
            let done: Vec<AtomicUsize> = (0..pieces).map(|_| AtomicUsize::new(0)).collect();
            let deal = Deal::new(pool.shares(), pieces);
            deal.run(
                &pool,
                || false,
                |piece| {
                    done[piece].fetch_add(1, Ordering::Relaxed);
                },
            );
            assert!(done.iter().all(|count| count.load(Ordering::Relaxed) == 1), "{pieces} pieces");
        };
        for pieces in [0, 1, 2, 3, 47, 1000] {
            run(pieces);
            pool.rayon().install(|| run(pieces));
        }
    }

    #[test]
    #[should_panic(expected = "piece 5")]
    fn a_panic_reaches_the_caller() {
        let pool = Pool::with_threads(2).unwrap();
        Deal::new(pool.shares(), 9).run(&pool, || false, |piece| assert_ne!(piece, 5, "piece 5"));
    }

    proptest! {
        /// Shares tile the pieces, each within a piece of its threads' part, and any order of claims by any threads
        /// hands out every piece once, each thread its own node's first.
        #[test]
        fn claims_partition_the_pieces(
            nodes in prop::collection::vec(0usize..4, 1..9),
            pieces in 0usize..60,
            callers in prop::collection::vec(0usize..9, 200),
        ) {
            let shares = Shares::by_node(&nodes);
            let starts: Vec<usize> = (0..=shares.len()).map(|share| shares.start(share, pieces)).collect();
            prop_assert_eq!((starts[0], starts[shares.len()]), (0, pieces));
            for share in 0..shares.len() {
                let threads = shares.homes.iter().filter(|&&home| home == share).count();
                let fair = pieces as f64 * threads as f64 / nodes.len() as f64;
                prop_assert!(((starts[share + 1] - starts[share]) as f64 - fair).abs() < 1.0);
            }
            let deal = Deal::new(&shares, pieces);
            let mut seen = vec![false; pieces];
            for caller in callers.into_iter().map(|caller| caller % nodes.len()).chain(std::iter::repeat_n(0, 60)) {
                let home = shares.homes[caller];
                let own_left = (starts[home]..starts[home + 1]).any(|piece| !seen[piece]);
                match deal.claim(caller) {
                    Some(piece) => {
                        prop_assert!(!std::mem::replace(&mut seen[piece], true), "{} twice", piece);
                        prop_assert_eq!(own_left, (starts[home]..starts[home + 1]).contains(&piece));
                    }
                    None => prop_assert!(seen.iter().all(|&seen| seen)),
                }
                prop_assert_eq!(deal.left(), seen.iter().filter(|&&seen| !seen).count());
            }
        }
    }
}
