//! The engine's worker: takes tickets off the rings, waits for their doorbells, runs the kernels.
//!
//! Order is the whole of it. Urgent tickets go first, in the order they came: it is the order in which the next
//! forward will ask for the weights. Background tickets go when no urgent one can, and are left at the next round of
//! chunks when one arrives. Within a bucket tickets never overtake each other: before an urgent ticket runs, the
//! bucket's earlier background tickets are pulled forward. So whatever the interleaving, each bucket sees the same
//! row of updates, and the bits are the same.

use std::collections::VecDeque;
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::sync::atomic::Ordering;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::adam::{self, Job};
use crate::bucket::Transfer;
use crate::doorbell::Ring;
use crate::ring::{Consumer, Producer};
use crate::shared::{locked, Shared, Slot};
use crate::ticket::{Completion, Ticket};

/// Longest sleep between two looks at a silent doorbell.
const NAP: Duration = Duration::from_micros(100);

pub(crate) struct Worker {
    shared: Arc<Shared>,
    urgent: Consumer<Ticket>,
    background: Consumer<Ticket>,
    completions: Producer<Completion>,
    /// Background tickets off their ring, in order. Bounded as the ring is: the engine counts tickets under way.
    held: VecDeque<Ticket>,
}

/// Backs off from a look-out: spins, then yields, then sleeps.
#[derive(Default)]
struct Backoff(u32);

impl Backoff {
    fn wait(&mut self) {
        self.0 += 1;
        match self.0 {
            0..=64 => std::hint::spin_loop(),
            65..=96 => std::thread::yield_now(),
            _ => std::thread::sleep(NAP),
        }
    }
}

impl Worker {
    pub(crate) fn new(
        shared: Arc<Shared>,
        urgent: Consumer<Ticket>,
        background: Consumer<Ticket>,
        completions: Producer<Completion>,
    ) -> Self {
        Self { shared, urgent, background, completions, held: VecDeque::new() }
    }

    /// The worker thread's body: a panic inside poisons the engine and ends the thread.
    pub(crate) fn run(mut self) {
        let shared = Arc::clone(&self.shared);
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| self.serve())) {
            let cause = panic
                .downcast_ref::<String>()
                .map(String::as_str)
                .or_else(|| panic.downcast_ref::<&str>().copied())
                .unwrap_or("a panic without a message");
            shared.poison(cause);
        }
    }

    fn serve(&mut self) {
        let mut backoff = Backoff::default();
        loop {
            if self.shared.poisoned.load(Ordering::Acquire) {
                return;
            }
            if self.next_urgent(None) || self.next_background() {
                backoff = Backoff::default();
                continue;
            }
            let stopping = self.shared.stop.load(Ordering::Acquire);
            if self.held.is_empty() && self.urgent.is_empty() && self.background.is_empty() {
                if stopping {
                    return;
                }
                let (urgent, background, shared) = (&self.urgent, &self.background, &self.shared);
                shared.wake_worker.wait_until(|| {
                    !urgent.is_empty()
                        || !background.is_empty()
                        || shared.stop.load(Ordering::Acquire)
                        || shared.poisoned.load(Ordering::Acquire)
                });
            } else if stopping {
                // What is left waits for gradients that nobody will send any more.
                return;
            } else {
                backoff.wait();
            }
        }
    }

    /// Runs what the first urgent ticket needs next; false if it can't go on now.
    ///
    /// `busy` is the bucket of a background ticket under way: its own urgent ticket has to wait for it.
    fn next_urgent(&mut self, busy: Option<u32>) -> bool {
        let Some(ticket) = self.urgent.peek() else { return false };
        if busy == Some(ticket.bucket) {
            return false;
        }
        // The bucket's earlier tickets were pushed before this one was, so they are all visible by now.
        self.take_background();
        if let Some(earlier) = self.held.iter().position(|held| held.bucket == ticket.bucket) {
            let Some(ring) = self.rung(&self.held[earlier]) else { return false };
            let Some(earlier) = self.held.remove(earlier) else { return false };
            self.process(earlier, ring, false);
            return true;
        }
        let Some(ring) = self.rung(&ticket) else { return false };
        self.urgent.pop();
        self.process(ticket, ring, false);
        true
    }

    fn next_background(&mut self) -> bool {
        self.take_background();
        let Some(ring) = self.held.front().and_then(|ticket| self.rung(ticket)) else { return false };
        let Some(ticket) = self.held.pop_front() else { return false };
        self.process(ticket, ring, true);
        true
    }

    fn take_background(&mut self) {
        while let Some(ticket) = self.background.pop() {
            self.held.push_back(ticket);
        }
    }

    fn slot(&self, ticket: &Ticket) -> Arc<Slot> {
        Arc::clone(&self.shared.registry().slots[ticket.slot as usize])
    }

    fn rung(&self, ticket: &Ticket) -> Option<Ring> {
        self.slot(ticket).doorbell.read()
    }

    fn process(&mut self, ticket: Ticket, ring: Ring, preemptible: bool) {
        let (entry, upload) = {
            let registry = self.shared.registry();
            let upload = ticket.upload.map(|upload| registry.uploads[upload as usize]);
            (Arc::clone(&registry.buckets[ticket.bucket as usize]), upload)
        };
        let slot = self.slot(&ticket);
        let done = entry.done.load(Ordering::Relaxed);
        assert_eq!(ticket.sequence, done + 1, "tickets of bucket {} are out of order", ticket.bucket);
        if !ring.void {
            let transfer = Transfer {
                grad: slot.payload,
                grad_dtype: ticket.grad_dtype,
                out: upload.map_or(std::ptr::null_mut(), |upload| upload.address),
                out_dtype: ticket.out_dtype,
            };
            let actions = locked(&slot.actions).clone();
            let jobs =
                locked(&entry.bucket).advance(&actions, &ticket.hyper, f64::from(ring.scale), &transfer);
            self.compute(&jobs, preemptible.then_some(ticket.bucket));
        }
        slot.doorbell.reset();
        entry.done.store(ticket.sequence, Ordering::Release);
        self.shared.finished.fetch_add(1, Ordering::Release);
        let Ticket { bucket, slot, upload, .. } = ticket;
        let completion = Completion { bucket, slot, upload, void: ring.void };
        assert!(self.completions.push(completion).is_ok(), "the completion ring is full");
        self.shared.wake_caller.notify();
    }

    /// Runs the jobs in rounds of chunks; between rounds of a background ticket, urgent work goes first.
    fn compute(&mut self, jobs: &[Job], background_of: Option<u32>) {
        let shared = Arc::clone(&self.shared);
        let chunk = shared.config.chunk;
        let round = chunk * shared.pool.threads();
        let mut rest = rounds(jobs, round).into_iter().peekable();
        while let Some(jobs) = rest.next() {
            let start = Instant::now();
            // SAFETY: spans of one bucket don't overlap, its states, slot and upload live as long as the engine's
            // registry, and until this ticket completes nobody else touches them.
            unsafe { adam::run_jobs(shared.pool.rayon(), shared.config.isa, &jobs, chunk) };
            shared.busy_nanoseconds.fetch_add(start.elapsed().as_nanos() as u64, Ordering::Relaxed);
            let elements: usize = jobs.iter().map(|job| job.span.len).sum();
            shared.elements.fetch_add(elements as u64, Ordering::Relaxed);
            if !shared.config.delay.is_zero() {
                std::thread::sleep(shared.config.delay);
            }
            if rest.peek().is_some() && background_of.is_some() {
                while self.next_urgent(background_of) {}
            }
        }
    }
}

/// Cuts jobs into rounds of about `round` elements.
fn rounds(jobs: &[Job], round: usize) -> Vec<Vec<Job>> {
    let mut rounds = vec![Vec::new()];
    let mut filled = 0;
    for job in jobs {
        let mut start = 0;
        while start < job.span.len {
            if filled == round {
                rounds.push(Vec::new());
                filled = 0;
            }
            let len = (round - filled).min(job.span.len - start);
            let span = job.span.slice(start, len);
            if let Some(last) = rounds.last_mut() {
                last.push(Job { span, ..*job });
            }
            filled += len;
            start += len;
        }
    }
    rounds
}
