//! What the engine's two sides share: states, buckets, staging memory, and the flags between caller and worker.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use crate::bucket::{Action, Bucket, HostState};
use crate::doorbell::Doorbell;
use crate::engine::EngineConfig;
use crate::pool::Pool;
use crate::sync::Signal;

/// A gradient slot: staging memory with a doorbell in front.
pub(crate) struct Slot {
    pub(crate) payload: *const u8,
    pub(crate) bytes: usize,
    pub(crate) doorbell: Doorbell,
    /// What the ticket under way asks of each segment.
    pub(crate) actions: Mutex<Vec<Action>>,
}

// SAFETY: the payload is written by the transfer before its doorbell rings and read by the worker after it, and
// reused only after the completion; the registrar keeps the memory alive as long as the engine.
unsafe impl Send for Slot {}
// SAFETY: as above: the doorbell and the rings order every access.
unsafe impl Sync for Slot {}

/// A weight slot.
#[derive(Clone, Copy)]
pub(crate) struct Upload {
    pub(crate) address: *mut u8,
    pub(crate) bytes: usize,
}

// SAFETY: written by the worker before the completion, read by the landing after it, never at the same time.
unsafe impl Send for Upload {}
// SAFETY: as above.
unsafe impl Sync for Upload {}

/// A bucket with the count of its tickets.
pub(crate) struct Entry {
    pub(crate) bucket: Mutex<Bucket>,
    pub(crate) submitted: AtomicU64,
    pub(crate) done: AtomicU64,
}

impl Entry {
    pub(crate) fn is_idle(&self) -> bool {
        self.submitted.load(Ordering::Acquire) == self.done.load(Ordering::Acquire)
    }
}

#[derive(Default)]
pub(crate) struct Registry {
    pub(crate) states: Vec<Arc<HostState>>,
    /// The buckets that work on each state.
    pub(crate) buckets_of: Vec<Vec<u32>>,
    pub(crate) buckets: Vec<Arc<Entry>>,
    pub(crate) slots: Vec<Arc<Slot>>,
    pub(crate) uploads: Vec<Upload>,
}

/// What the engine's two sides share.
pub(crate) struct Shared {
    pub(crate) config: EngineConfig,
    pub(crate) pool: Pool,
    pub(crate) registry: RwLock<Registry>,
    pub(crate) wake_worker: Signal,
    pub(crate) wake_caller: Signal,
    pub(crate) stop: AtomicBool,
    pub(crate) poisoned: AtomicBool,
    pub(crate) cause: Mutex<String>,
    pub(crate) finished: AtomicU64,
    pub(crate) busy_nanoseconds: AtomicU64,
    pub(crate) elements: AtomicU64,
}

/// A lock that a panic elsewhere doesn't take away: the engine has its own poisoning.
pub(crate) fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Shared {
    pub(crate) fn poison(&self, cause: &str) {
        {
            let mut text = locked(&self.cause);
            if text.is_empty() {
                cause.clone_into(&mut text);
            }
        }
        self.poisoned.store(true, Ordering::Release);
        self.wake_caller.notify();
        self.wake_worker.notify();
    }

    pub(crate) fn registry(&self) -> RwLockReadGuard<'_, Registry> {
        self.registry.read().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn registry_mut(&self) -> RwLockWriteGuard<'_, Registry> {
        self.registry.write().unwrap_or_else(PoisonError::into_inner)
    }
}
