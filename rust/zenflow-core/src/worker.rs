//! The engine's worker: takes tickets off the rings, waits for their doorbells, runs the kernels.
//!
//! Order is the whole of it. Urgent tickets go first, in the order they came: it is the order in which the next
//! forward will ask for the weights. Background tickets go when no urgent one can, and are left at the next chunk when
//! one becomes able to. Within a bucket tickets never overtake each other: before an urgent ticket runs, the bucket's
//! earlier background tickets are pulled forward. So whatever the interleaving, each bucket sees the same row of
//! updates, and the bits are the same.
//!
//! A ticket is one parallel region: joining the threads between chunks would cost a sixth of the memory's speed. The
//! worker's own thread sleeps meanwhile, so it is the pool's threads that look out for urgent work, after each chunk.
//! As long as the urgent ring is empty that is two loads. When it isn't, one of them asks the [`Queues`] whether the
//! first ticket can go, and only then do they leave the region: a ticket without its gradients yet, or one whose own
//! bucket is under way, interrupts nothing.

use std::collections::VecDeque;
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::adam::{Job, Region};
use crate::bucket::Transfer;
use crate::doorbell::Ring;
use crate::line::piece_len;
use crate::ring::{Consumer, Producer, Watch};
use crate::shared::{locked, Shared};
use crate::ticket::{Completion, Ticket};

/// Longest sleep between two looks at a silent doorbell.
const NAP: Duration = Duration::from_micros(100);

pub(crate) struct Worker {
    shared: Arc<Shared>,
    /// The worker's thread works with them; those of the pool only look, while it waits for them.
    queues: Mutex<Queues>,
    urgent: Watch<Ticket>,
    completions: Producer<Completion>,
}

/// Tickets not begun, and which of them is next.
struct Queues {
    shared: Arc<Shared>,
    urgent: Consumer<Ticket>,
    background: Consumer<Ticket>,
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

impl Queues {
    /// What the first urgent ticket needs next, if that can go now: itself, or where in `held` the first of its
    /// bucket's earlier tickets is.
    ///
    /// `busy` is the bucket of a background ticket under way: its own urgent ticket has to wait for it.
    fn find_urgent(&mut self, busy: Option<u32>) -> Option<(Option<usize>, Ring)> {
        let ticket = self.urgent.peek().filter(|ticket| busy != Some(ticket.bucket))?;
        // The bucket's earlier tickets were pushed before this one was, so they are all visible by now.
        self.take_background();
        let earlier = self.held.iter().position(|held| held.bucket == ticket.bucket);
        let next = earlier.map_or(&ticket, |earlier| &self.held[earlier]);
        Some((earlier, self.rung(next)?))
    }

    /// Takes what [`find_urgent`](Self::find_urgent) finds.
    fn next_urgent(&mut self, busy: Option<u32>) -> Option<(Ticket, Ring)> {
        let (earlier, ring) = self.find_urgent(busy)?;
        let ticket = match earlier {
            Some(earlier) => self.held.remove(earlier),
            None => self.urgent.pop(),
        };
        Some((ticket?, ring))
    }

    /// Takes the oldest background ticket, if its gradients are there.
    fn next_background(&mut self) -> Option<(Ticket, Ring)> {
        self.take_background();
        let ring = self.rung(self.held.front()?)?;
        Some((self.held.pop_front()?, ring))
    }

    fn take_background(&mut self) {
        while let Some(ticket) = self.background.pop() {
            self.held.push_back(ticket);
        }
    }

    fn rung(&self, ticket: &Ticket) -> Option<Ring> {
        self.shared.registry().slots[ticket.slot as usize].doorbell.read()
    }

    fn are_empty(&self) -> bool {
        self.held.is_empty() && self.urgent.is_empty() && self.background.is_empty()
    }
}

impl Worker {
    pub(crate) fn new(
        shared: Arc<Shared>,
        urgent: Consumer<Ticket>,
        background: Consumer<Ticket>,
        completions: Producer<Completion>,
    ) -> Self {
        let watch = urgent.watch();
        let queues = Queues { shared: Arc::clone(&shared), urgent, background, held: VecDeque::new() };
        Self { shared, queues: Mutex::new(queues), urgent: watch, completions }
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
            if self.urgent_step(None) || self.background_step() {
                backoff = Backoff::default();
                continue;
            }
            let stopping = self.shared.stop.load(Ordering::Acquire);
            let queues = locked(&self.queues);
            if queues.are_empty() {
                if stopping {
                    return;
                }
                let shared = &self.shared;
                shared.wake_worker.wait_until(|| {
                    !queues.are_empty()
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
    fn urgent_step(&mut self, busy: Option<u32>) -> bool {
        let next = locked(&self.queues).next_urgent(busy);
        next.is_some_and(|(ticket, ring)| {
            self.process(ticket, ring, false);
            true
        })
    }

    /// Runs the oldest background ticket; false if it can't go on now.
    fn background_step(&mut self) -> bool {
        let next = locked(&self.queues).next_background();
        next.is_some_and(|(ticket, ring)| {
            self.process(ticket, ring, true);
            true
        })
    }

    fn process(&mut self, ticket: Ticket, ring: Ring, preemptible: bool) {
        let (entry, slot, upload) = {
            let registry = self.shared.registry();
            (
                Arc::clone(&registry.buckets[ticket.bucket as usize]),
                Arc::clone(&registry.slots[ticket.slot as usize]),
                ticket.upload.map(|upload| registry.uploads[upload as usize]),
            )
        };
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

    /// Runs the jobs; a background ticket's are left for urgent work, and gone on with after it.
    fn compute(&mut self, jobs: &[Job], background_of: Option<u32>) {
        let shared = Arc::clone(&self.shared);
        let elements = jobs.iter().map(|job| job.span.len).sum();
        let delay = shared.config.delay;
        // A slowed host sleeps after each round, whose length is the caller's to say.
        let chunk = shared.config.chunk;
        let chunk = if delay.is_zero() { piece_len(elements, shared.pool.threads(), chunk) } else { chunk };
        let region = Region::new(&shared.pool, shared.config.isa, jobs, chunk);
        while !region.is_done() {
            let start = Instant::now();
            let stop = || !delay.is_zero() || background_of.is_some_and(|bucket| self.urgent_waits(bucket));
            // SAFETY: spans of one bucket don't overlap, its states, slot and upload live as long as the engine's
            // registry, and until this ticket completes nobody else touches them.
            unsafe { region.run(stop) };
            shared.busy_nanoseconds.fetch_add(start.elapsed().as_nanos() as u64, Ordering::Relaxed);
            if !delay.is_zero() {
                std::thread::sleep(delay);
            }
            if background_of.is_some() && !region.is_done() {
                while self.urgent_step(background_of) {}
            }
        }
        shared.elements.fetch_add(elements as u64, Ordering::Relaxed);
    }

    /// Whether an urgent ticket could go now, `busy` being the bucket under way. Called by the pool's threads.
    fn urgent_waits(&self, busy: u32) -> bool {
        // Where another thread has the lock, it is asking the same.
        !self.urgent.is_empty()
            && self.queues.try_lock().is_ok_and(|mut queues| queues.find_urgent(Some(busy)).is_some())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, AtomicU64};
    use std::sync::RwLock;

    use super::*;
    use crate::doorbell::Doorbell;
    use crate::dtype::Dtype;
    use crate::engine::EngineConfig;
    use crate::hyper::Hyper;
    use crate::pool::Pool;
    use crate::ring::ring;
    use crate::shared::{Registry, Slot};
    use crate::sync::Signal;

    /// Queues over three slots, whose doorbells are `bells`; and their rings' other ends.
    fn queues(bells: &[AtomicU64; 3]) -> (Queues, Producer<Ticket>, Producer<Ticket>) {
        let slot = |bell: &AtomicU64| {
            // SAFETY: the test keeps the word alive and touches it through doorbells alone.
            let doorbell =
                unsafe { Doorbell::from_addr(std::ptr::from_ref(bell).expose_provenance()) }.unwrap();
            Arc::new(Slot { payload: std::ptr::null(), bytes: 0, doorbell, actions: Mutex::default() })
        };
        let registry = Registry { slots: bells.iter().map(slot).collect(), ..Registry::default() };
        let shared = Arc::new(Shared {
            config: EngineConfig::default(),
            pool: Pool::with_threads(1).unwrap(),
            registry: RwLock::new(registry),
            wake_worker: Signal::new(),
            wake_caller: Signal::new(),
            stop: AtomicBool::new(false),
            poisoned: AtomicBool::new(false),
            cause: Mutex::default(),
            finished: AtomicU64::new(0),
            busy_nanoseconds: AtomicU64::new(0),
            elements: AtomicU64::new(0),
        });
        let ((urgent_end, urgent), (background_end, background)) = (ring(4), ring(4));
        (Queues { shared, urgent, background, held: VecDeque::new() }, urgent_end, background_end)
    }

    fn ticket(bucket: u32, slot: u32) -> Ticket {
        let (grad_dtype, out_dtype, hyper) = (Dtype::F32, Dtype::F32, Hyper::default());
        Ticket { bucket, slot, upload: None, grad_dtype, out_dtype, hyper, sequence: 0 }
    }

    #[test]
    fn urgent_work_is_found_only_when_it_can_go() {
        let bells = [0; 3].map(AtomicU64::new);
        let (mut queues, mut urgent, mut background) = queues(&bells);
        let ring =
            |queues: &Queues, slot: usize| queues.shared.registry().slots[slot].doorbell.ring(1.0, false);
        let slot_of = |next: Option<(Ticket, Ring)>| next.map(|(ticket, _)| ticket.slot);
        assert!(queues.find_urgent(None).is_none(), "nothing is there");

        background.push(ticket(8, 0)).unwrap();
        background.push(ticket(7, 1)).unwrap();
        urgent.push(ticket(7, 2)).unwrap();
        ring(&queues, 2);
        assert!(queues.find_urgent(None).is_none(), "its bucket's earlier ticket has no gradients yet");
        ring(&queues, 1);
        assert!(queues.find_urgent(Some(7)).is_none(), "its bucket is under way");
        assert!(queues.find_urgent(Some(8)).is_some());
        assert_eq!(slot_of(queues.next_urgent(Some(8))), Some(1), "the earlier ticket first");
        assert_eq!(slot_of(queues.next_urgent(Some(8))), Some(2));
        assert!(queues.find_urgent(None).is_none());

        assert!(queues.next_background().is_none(), "its doorbell is silent");
        ring(&queues, 0);
        assert_eq!(slot_of(queues.next_background()), Some(0));
        assert!(queues.are_empty());
    }
}
