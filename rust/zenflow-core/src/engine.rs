//! The engine: owns the host states and one worker thread that updates them behind the accelerator's own work.
//!
//! The caller registers parameters, buckets of their stripes, and the staging memory (gradient slots, weight
//! slots). From then on a step is a row of [`Ticket`]s: small `Copy` messages on two bounded lock-free rings,
//! *urgent* ones that close a bucket and *background* ones that only update moments. The worker
//! ([`crate::worker`]) waits for a ticket's doorbell, runs the kernels on the pinned pool and sends a
//! [`Completion`] back.
//!
//! Nothing is dropped and nothing grows: at most `capacity` tickets are under way, and a submission beyond that is
//! handed back. A panic in the worker poisons the engine: every later call fails with the cause. A forked child has
//! none of the threads and gets an error.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, RwLock};
use std::time::{Duration, Instant};

use crate::bucket::{Action, Bucket, HostState, Progress};
use crate::doorbell::Doorbell;
use crate::dtype::StateDtype;
use crate::error::{Error, Result};
use crate::isa::Isa;
use crate::pool::Pool;
use crate::process::Birth;
use crate::ring::{ring, Consumer, Producer};
use crate::shared::{locked, Entry, Shared, Slot, Upload};
use crate::sync::Signal;
use crate::ticket::{Completion, Ticket};
use crate::worker::Worker;

/// Bytes at the head of a gradient slot that hold its doorbell.
pub const SLOT_HEADER: usize = 64;

/// How an [`Engine`] is built.
#[derive(Clone, Debug)]
pub struct EngineConfig {
    /// Logical CPUs of the worker's pool; empty: every core the process may use but one.
    pub cores: Vec<usize>,
    /// So many threads in place of `cores`, unpinned.
    pub threads: Option<usize>,
    /// Whether the pool's threads are pinned to them.
    pub pin: bool,
    /// Most elements a thread takes at a time; after each, background work makes way for urgent work.
    pub chunk: usize,
    /// Most tickets under way.
    pub capacity: usize,
    /// Sleep after each round of one chunk a thread: a slower host, for tests and simulations.
    pub delay: Duration,
    /// Instruction set of the kernels.
    pub isa: Isa,
}

impl Default for EngineConfig {
    fn default() -> Self {
        Self {
            cores: Vec::new(),
            threads: None,
            pin: true,
            chunk: 256 * 1024,
            capacity: 4096,
            delay: Duration::ZERO,
            isa: Isa::detect(),
        }
    }
}

/// The caller's ends of the rings.
struct Front {
    urgent: Producer<Ticket>,
    background: Producer<Ticket>,
    completions: Consumer<Completion>,
    submitted: u64,
    received: u64,
}

/// What the worker has done so far.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct EngineStats {
    /// Tickets submitted.
    pub submitted: u64,
    /// Tickets finished.
    pub finished: u64,
    /// Seconds the worker was at work.
    pub busy_seconds: f64,
    /// Elements whose moments were updated.
    pub elements: u64,
    /// Threads of the pool.
    pub threads: usize,
}

/// The engine. All methods may be called from any thread.
pub struct Engine {
    shared: Arc<Shared>,
    front: Mutex<Front>,
    worker: Mutex<Option<std::thread::JoinHandle<()>>>,
    closed: AtomicBool,
    birth: Birth,
}

impl Engine {
    /// Starts the pool and the worker.
    pub fn new(config: EngineConfig) -> Result<Self> {
        if config.chunk < 1024 {
            return Err(Error::invalid("chunk", config.chunk, "at least 1024 elements"));
        }
        if config.capacity == 0 {
            return Err(Error::invalid("capacity", config.capacity, "at least 1 ticket"));
        }
        let pool = match config.threads {
            Some(threads) => Pool::with_threads(threads)?,
            None if config.cores.is_empty() => Pool::new(&crate::topology::default_cores(), config.pin)?,
            None => Pool::new(&config.cores, config.pin)?,
        };
        let (urgent, urgent_end) = ring(config.capacity);
        let (background, background_end) = ring(config.capacity);
        let (completions_end, completions) = ring(config.capacity);
        let shared = Arc::new(Shared {
            config,
            pool,
            registry: RwLock::default(),
            wake_worker: Signal::new(),
            wake_caller: Signal::new(),
            stop: AtomicBool::new(false),
            poisoned: AtomicBool::new(false),
            cause: Mutex::default(),
            finished: AtomicU64::new(0),
            busy_nanoseconds: AtomicU64::new(0),
            elements: AtomicU64::new(0),
        });
        let worker = Worker::new(Arc::clone(&shared), urgent_end, background_end, completions_end);
        let handle = std::thread::Builder::new()
            .name("zenflow-worker".to_owned())
            .spawn(move || worker.run())
            .map_err(|cause| Error::Thread {
                wanted: "the worker thread".to_owned(),
                cause: cause.to_string(),
            })?;
        Ok(Self {
            shared,
            front: Mutex::new(Front { urgent, background, completions, submitted: 0, received: 0 }),
            worker: Mutex::new(Some(handle)),
            closed: AtomicBool::new(false),
            birth: Birth::here(),
        })
    }

    /// Fails if the engine can't be used: in a forked child, after `close`, after a worker's panic.
    pub fn check(&self) -> Result<()> {
        self.birth.check()?;
        if self.closed.load(Ordering::Acquire) {
            return Err(Error::Closed);
        }
        if self.shared.poisoned.load(Ordering::Acquire) {
            return Err(Error::Poisoned { cause: locked(&self.shared.cause).clone() });
        }
        Ok(())
    }

    /// Zero state for a parameter of `numel` elements. The system commits its pages when they are used, those of a
    /// bucket in [`add_bucket`](Self::add_bucket).
    pub fn add_parameter(&self, numel: usize, dtype: StateDtype) -> Result<u32> {
        self.check()?;
        let state = HostState::new(numel, dtype)?;
        let mut registry = self.shared.registry_mut();
        registry.states.push(Arc::new(state));
        registry.buckets_of.push(Vec::new());
        Ok((registry.states.len() - 1) as u32)
    }

    /// The state of a parameter. Read or write it only while no ticket of it is under way.
    pub fn state(&self, parameter: u32) -> Result<Arc<HostState>> {
        self.check()?;
        self.shared
            .registry()
            .states
            .get(parameter as usize)
            .cloned()
            .ok_or_else(|| unknown("parameter", parameter))
    }

    /// A bucket of `(parameter, start, len)` segments, in elements; its pages are touched by the pool's threads. No
    /// ticket of the parameters may be under way.
    pub fn add_bucket(&self, segments: &[(u32, usize, usize)]) -> Result<u32> {
        self.check()?;
        let parts = segments
            .iter()
            .map(|&(parameter, start, len)| Ok((self.idle_state(parameter)?, start, len)))
            .collect::<Result<Vec<_>>>()?;
        let bucket = Bucket::new(parts)?;
        bucket.first_touch(&self.shared.pool, self.shared.config.chunk);
        let mut registry = self.shared.registry_mut();
        let index = registry.buckets.len() as u32;
        registry.buckets.push(Arc::new(Entry {
            bucket: Mutex::new(bucket),
            submitted: AtomicU64::new(0),
            done: AtomicU64::new(0),
        }));
        for &(parameter, ..) in segments {
            registry.buckets_of[parameter as usize].push(index);
        }
        Ok(index)
    }

    /// The state of a parameter, or an error while a ticket of it is under way.
    pub fn idle_state(&self, parameter: u32) -> Result<Arc<HostState>> {
        let state = self.state(parameter)?;
        let registry = self.shared.registry();
        let idle = |&bucket: &u32| registry.buckets[bucket as usize].is_idle();
        if registry.buckets_of[parameter as usize].iter().all(idle) {
            Ok(state)
        } else {
            Err(Error::invalid("parameter", parameter, "a parameter without tickets under way"))
        }
    }

    /// Registers gradient staging memory: [`SLOT_HEADER`] bytes for the doorbell, then the payload.
    ///
    /// # Safety
    /// `address` must be valid for reads and writes of `bytes` bytes, 64-byte aligned, and stay so as long as the
    /// engine lives; the payload may be written only while no ticket of the slot is under way, the doorbell rung
    /// once for each ticket.
    pub unsafe fn add_slot(&self, address: *mut u8, bytes: usize) -> Result<u32> {
        self.check()?;
        if bytes <= SLOT_HEADER || !(address as usize).is_multiple_of(64) {
            return Err(Error::invalid(
                "slot",
                format!("{bytes} bytes at {address:p}"),
                "over 64 bytes, 64-byte aligned",
            ));
        }
        // SAFETY: the caller's promise covers the first 8 bytes, which are aligned.
        let doorbell = unsafe { Doorbell::from_addr(address as usize)? };
        doorbell.reset();
        let slot = Slot {
            payload: address.wrapping_add(SLOT_HEADER),
            bytes: bytes - SLOT_HEADER,
            doorbell,
            actions: Mutex::default(),
        };
        let mut registry = self.shared.registry_mut();
        registry.slots.push(Arc::new(slot));
        Ok((registry.slots.len() - 1) as u32)
    }

    /// Registers weight staging memory.
    ///
    /// # Safety
    /// As for [`Engine::add_slot`]: valid and stable for the engine's life, touched by others only between a
    /// completion that names it and the next ticket that does.
    pub unsafe fn add_upload(&self, address: *mut u8, bytes: usize) -> Result<u32> {
        self.check()?;
        let mut registry = self.shared.registry_mut();
        registry.uploads.push(Upload { address, bytes });
        Ok((registry.uploads.len() - 1) as u32)
    }

    /// Rings a slot's doorbell: its gradients are there, with this scale; or the step is void.
    pub fn ring(&self, slot: u32, scale: f32, void: bool) -> Result<()> {
        self.check()?;
        let slot = self.slot(slot)?;
        slot.doorbell.ring(scale, void);
        self.shared.wake_worker.notify();
        Ok(())
    }

    fn slot(&self, slot: u32) -> Result<Arc<Slot>> {
        self.shared.registry().slots.get(slot as usize).cloned().ok_or_else(|| unknown("slot", slot))
    }

    fn entry(&self, bucket: u32) -> Result<Arc<Entry>> {
        self.shared.registry().buckets.get(bucket as usize).cloned().ok_or_else(|| unknown("bucket", bucket))
    }

    /// Puts a ticket on its ring; `false` hands it back because `capacity` tickets are under way.
    ///
    /// Urgent tickets (those in which something closes) overtake background ones of other buckets.
    pub fn submit(&self, mut ticket: Ticket, actions: &[Action]) -> Result<bool> {
        self.check()?;
        ticket.hyper.validate()?;
        let entry = self.entry(ticket.bucket)?;
        let slot = self.slot(ticket.slot)?;
        let (numel, segments, formats) = {
            let bucket = locked(&entry.bucket);
            let formats = bucket.check(actions, ticket.grad_dtype, ticket.out_dtype);
            (bucket.numel(), bucket.len(), formats)
        };
        formats?;
        if actions.len() != segments {
            return Err(Error::invalid("actions", actions.len(), "one entry a segment of the bucket"));
        }
        if slot.bytes < numel * ticket.grad_dtype.size() {
            return Err(Error::invalid(
                "slot",
                format!("{} bytes", slot.bytes),
                "room for the bucket's gradients",
            ));
        }
        let urgent = actions.contains(&Action::Close);
        match ticket.upload {
            Some(upload) => {
                let room = self.shared.registry().uploads.get(upload as usize).map(|upload| upload.bytes);
                if room.ok_or_else(|| unknown("upload", upload))? < numel * ticket.out_dtype.size() {
                    return Err(Error::invalid(
                        "upload",
                        upload,
                        "a slot with room for the bucket's weights",
                    ));
                }
            }
            None if urgent => {
                return Err(Error::invalid("upload", "None", "a weight slot, since a segment closes"))
            }
            None => {}
        }
        let mut front = locked(&self.front);
        if front.submitted - front.received >= self.shared.config.capacity as u64 {
            return Ok(false);
        }
        actions.clone_into(&mut locked(&slot.actions));
        ticket.sequence = entry.submitted.load(Ordering::Relaxed) + 1;
        let ring = if urgent { &mut front.urgent } else { &mut front.background };
        if ring.push(ticket).is_err() {
            return Ok(false);
        }
        entry.submitted.store(ticket.sequence, Ordering::Release);
        front.submitted += 1;
        drop(front);
        self.shared.wake_worker.notify();
        Ok(true)
    }

    /// Every completion that is there, without waiting.
    pub fn poll(&self) -> Result<Vec<Completion>> {
        self.check()?;
        Ok(Self::take(&mut locked(&self.front)))
    }

    fn take(front: &mut Front) -> Vec<Completion> {
        let taken: Vec<_> = std::iter::from_fn(|| front.completions.pop()).collect();
        front.received += taken.len() as u64;
        taken
    }

    /// Waits until a completion is there, nothing is under way, or `timeout` has passed; returns what is there.
    pub fn wait(&self, timeout: Duration) -> Result<Vec<Completion>> {
        self.check()?;
        let mut front = locked(&self.front);
        if front.submitted > front.received {
            let shared = &self.shared;
            let completions = &front.completions;
            shared.wake_caller.wait_timeout(
                || !completions.is_empty() || shared.poisoned.load(Ordering::Acquire),
                Some(timeout),
            );
        }
        let taken = Self::take(&mut front);
        drop(front);
        if taken.is_empty() {
            self.check()?;
        }
        Ok(taken)
    }

    /// Waits until the worker has finished every ticket; `false` if `timeout` passed first.
    ///
    /// Completions stay in their ring for [`Engine::poll`].
    pub fn drain(&self, timeout: Duration) -> Result<bool> {
        self.check()?;
        let front = locked(&self.front);
        let submitted = front.submitted;
        let deadline = Instant::now() + timeout;
        loop {
            if self.shared.finished.load(Ordering::Acquire) >= submitted {
                return Ok(true);
            }
            self.check()?;
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(false);
            }
            let shared = &self.shared;
            shared.wake_caller.wait_timeout(
                || {
                    shared.finished.load(Ordering::Acquire) >= submitted
                        || shared.poisoned.load(Ordering::Acquire)
                },
                Some(left.min(Duration::from_millis(100))),
            );
        }
    }

    /// The counters of a bucket's segments; wait for its tickets first.
    pub fn progress(&self, bucket: u32) -> Result<Vec<Progress>> {
        self.check()?;
        let entry = self.entry(bucket)?;
        let progress = locked(&entry.bucket).progress();
        Ok(progress)
    }

    /// Sets the counters of a bucket's segments; refused while a ticket of it is under way.
    pub fn set_progress(&self, bucket: u32, progress: &[Progress]) -> Result<()> {
        self.check()?;
        let entry = self.entry(bucket)?;
        if !entry.is_idle() {
            return Err(Error::invalid("bucket", bucket, "a bucket without tickets under way"));
        }
        let result = locked(&entry.bucket).set_progress(progress);
        result
    }

    /// What the worker has done so far.
    pub fn stats(&self) -> Result<EngineStats> {
        self.birth.check()?;
        Ok(EngineStats {
            submitted: locked(&self.front).submitted,
            finished: self.shared.finished.load(Ordering::Acquire),
            busy_seconds: self.shared.busy_nanoseconds.load(Ordering::Relaxed) as f64 * 1e-9,
            elements: self.shared.elements.load(Ordering::Relaxed),
            threads: self.shared.pool.threads(),
        })
    }

    /// The pool, for work of the caller's own while it waits.
    #[must_use]
    pub fn pool(&self) -> &Pool {
        &self.shared.pool
    }

    /// Marks the states as not to be trusted; every later call fails with `cause`.
    pub fn poison(&self, cause: &str) {
        self.shared.poison(cause);
    }

    /// Lets the worker finish every ticket whose gradients are there, then joins it. Later calls fail, this one not.
    pub fn close(&self) -> Result<()> {
        self.birth.check()?;
        self.closed.store(true, Ordering::Release);
        self.shared.stop.store(true, Ordering::Release);
        self.shared.wake_worker.notify();
        let handle = locked(&self.worker).take();
        if let Some(handle) = handle {
            // A panic was caught and kept as the poison's cause; the join itself can only fail with the same.
            let _ = handle.join();
        }
        Ok(())
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        // In a forked child the worker doesn't exist: there is nothing to join.
        let _ = self.close();
    }
}

fn unknown(what: &'static str, index: u32) -> Error {
    Error::invalid(what, index, "an index that the engine has given out")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::Dtype;

    #[test]
    fn a_panic_in_the_worker_poisons_the_engine_and_wakes_the_waiter() {
        let engine = Engine::new(EngineConfig { threads: Some(1), ..EngineConfig::default() }).unwrap();
        let parameter = engine.add_parameter(10, StateDtype::F32).unwrap();
        let bucket = engine.add_bucket(&[(parameter, 0, 10)]).unwrap();
        let mut memory = vec![0_u64; 64];
        let offset = memory.as_ptr().align_offset(64);
        // SAFETY: 64-byte aligned and large enough; the vector outlives the engine's use of it, which ends below.
        let slot = unsafe { engine.add_slot(memory.as_mut_ptr().add(offset).cast(), 256) }.unwrap();
        let ticket = Ticket {
            bucket,
            slot,
            upload: None,
            grad_dtype: Dtype::F32,
            out_dtype: Dtype::F32,
            hyper: crate::hyper::Hyper { lr: 0.1, beta1: 0.9, beta2: 0.9, eps: 1e-8, weight_decay: 0.0 },
            sequence: 0,
        };
        // The doorbell stays silent, so the worker keeps looking at a slot; without it, it has to panic.
        assert!(engine.submit(ticket, &[Action::Moments]).unwrap());
        engine.shared.registry_mut().slots.clear();
        match engine.wait(Duration::from_secs(30)) {
            Err(Error::Poisoned { cause }) => assert!(cause.contains("index out of bounds"), "{cause}"),
            other => panic!("{other:?}"),
        }
        assert!(matches!(engine.check(), Err(Error::Poisoned { .. })));
        engine.close().unwrap();
    }
}
