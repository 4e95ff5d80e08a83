//! The one seam between this crate and the primitives it synchronises with, and the parking place
//! [`Signal`].
//!
//! Everything concurrent in the crate that loom is to check takes its atomics, locks, cells and threads
//! from here and never from `std` directly. Built as usual they *are* `std`'s; built with
//! `RUSTFLAGS="--cfg loom"` they are loom's, which runs a test under every interleaving, and under every
//! value a relaxed load may see, up to a bound. What talks to the outside world (`pool`, `memory`,
//! `doorbell`, `topology`, `process`) stays on `std`: loom can model neither a device nor a kernel.

#[cfg(not(loom))]
pub use std::{
    sync::{atomic, Arc, Condvar, Mutex, MutexGuard},
    thread,
};

#[cfg(loom)]
pub use loom::{
    cell::UnsafeCell,
    sync::{atomic, Arc, Condvar, Mutex, MutexGuard},
    thread,
};

/// Hints to the processor: `std`'s or loom's.
pub mod hint {
    #[cfg(loom)]
    pub use loom::hint::spin_loop;
    #[cfg(not(loom))]
    pub use std::hint::spin_loop;
}

use atomic::{fence, AtomicUsize, Ordering};
use std::sync::PoisonError;
use std::time::{Duration, Instant};

/// `std`'s cell behind loom's interface: the pointer is lent to a closure, so that loom's own cell can see
/// where each access begins and ends, and fail the test when two of them overlap.
#[cfg(not(loom))]
#[derive(Debug)]
#[repr(transparent)]
pub struct UnsafeCell<T>(std::cell::UnsafeCell<T>);

#[cfg(not(loom))]
impl<T> UnsafeCell<T> {
    /// A cell holding `value`.
    pub const fn new(value: T) -> Self {
        Self(std::cell::UnsafeCell::new(value))
    }

    /// Lends the cell for reading. The caller sees to it that nobody writes meanwhile.
    #[inline]
    pub fn with<R>(&self, read: impl FnOnce(*const T) -> R) -> R {
        read(self.0.get())
    }

    /// Lends the cell for writing. The caller sees to it that nobody reads or writes meanwhile.
    #[inline]
    pub fn with_mut<R>(&self, write: impl FnOnce(*mut T) -> R) -> R {
        write(self.0.get())
    }
}

/// How often a waiter looks again before it sleeps: a few microseconds, the price of one futex round trip.
/// Loom explores interleavings itself, and a spin would only multiply them.
const SPINS: u32 = if cfg!(loom) { 0 } else { 200 };

/// The parking place of a thread that waits for something in atomics: an item in a ring, a flag.
///
/// The producer of the event stores it (with `Release`, as its reader needs) and then calls
/// [`notify`](Self::notify), which costs a fence and one load as long as nobody sleeps. The waiter gives
/// the test of the event as a closure. It is meant for one sleeper; more are allowed, and each is woken.
///
/// # Why no wake-up is lost
///
/// ```text
///     notifier                        sleeper (holding the lock from s1 to its sleep)
///  n1 store the event              s1 sleepers += 1
///  n2 fence(SeqCst)                s2 fence(SeqCst)
///  n3 load sleepers                s3 is the event there?
///  n4 if not 0: lock, wake all     s4 if not: unlock and sleep, in one step
/// ```
///
/// The two fences stand in one total order that all threads agree on. If n2 comes first, s3 sees what n1
/// stored, and there is no sleep. If s2 comes first, n3 sees what s1 stored, and the notifier takes the
/// lock. It gets it either before s1, when s3 sees the event because the lock's own order puts n1 before
/// it; or after s4, when the sleeper sleeps already and is woken. Between s1 and s4 it can't have it.
/// Without the fences both loads could see the old values, even on x86, where a store may still sit in the
/// store buffer when the load behind it is done: both sides would miss each other.
///
/// The counter itself needs no ordering of its own (`Relaxed`): the fences order it against the event, and
/// what it guards, the sleep, is guarded by the lock. A stale non-zero value costs a needless lock.
#[derive(Debug)]
pub struct Signal {
    sleepers: AtomicUsize,
    lock: Mutex<()>,
    wake: Condvar,
}

impl Default for Signal {
    fn default() -> Self {
        Self::new()
    }
}

impl Signal {
    /// A signal on which nobody sleeps.
    #[must_use]
    pub fn new() -> Self {
        Self { sleepers: AtomicUsize::new(0), lock: Mutex::new(()), wake: Condvar::new() }
    }

    /// Wakes whoever sleeps here, to test again. To be called after the event has been stored.
    #[inline]
    pub fn notify(&self) {
        fence(Ordering::SeqCst);
        if self.sleepers.load(Ordering::Relaxed) != 0 {
            self.wake_all();
        }
    }

    #[cold]
    fn wake_all(&self) {
        // Empty on purpose: having had the lock proves that no sleeper stands between its last test and its
        // sleep. It is let go before the wake-up, so that the woken thread finds it free.
        drop(self.lock.lock().unwrap_or_else(PoisonError::into_inner));
        self.wake.notify_all();
    }

    /// Returns once `ready` says true; sleeps in between. `ready` is called again after every wake-up, and
    /// under this signal's lock, so it must not call [`notify`](Self::notify) on the same signal.
    pub fn wait_until(&self, ready: impl FnMut() -> bool) {
        let came = self.wait_timeout(ready, None);
        debug_assert!(came, "a wait without timeout ended without its event");
    }

    /// Like [`wait_until`](Self::wait_until), but gives up after `timeout` (`None`: never). Says whether
    /// `ready` did. A timeout of zero tests, spins briefly, and never sleeps. Loom has no clock: under loom
    /// the timeout is ignored.
    pub fn wait_timeout(&self, mut ready: impl FnMut() -> bool, timeout: Option<Duration>) -> bool {
        if ready() {
            return true;
        }
        // A deadline beyond the clock's range is none.
        let deadline = timeout.and_then(|t| Instant::now().checked_add(t));
        let mut spins = SPINS;
        while spins > 0 {
            spins -= 1;
            hint::spin_loop();
            if ready() {
                return true;
            }
        }

        let mut guard = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
        let _counted = Counted::new(&self.sleepers);
        fence(Ordering::SeqCst);
        loop {
            // After a wake-up no new fence is due: the counter has stood since the one above, so every
            // notifier whose event this test misses sees it and waits for the lock that is held here.
            if ready() {
                return true;
            }
            guard = match Self::left(deadline) {
                None => self.wake.wait(guard).unwrap_or_else(PoisonError::into_inner),
                Some(Duration::ZERO) => return false,
                Some(left) => self.wake.wait_timeout(guard, left).unwrap_or_else(PoisonError::into_inner).0,
            };
        }
    }

    /// Time left until `deadline`; `None` means for ever.
    fn left(deadline: Option<Instant>) -> Option<Duration> {
        if cfg!(loom) {
            return None;
        }
        deadline.map(|d| d.saturating_duration_since(Instant::now()))
    }
}

/// One sleeper in the count, taken out again however the wait ends, a panic in `ready` included.
struct Counted<'a>(&'a AtomicUsize);

impl<'a> Counted<'a> {
    fn new(sleepers: &'a AtomicUsize) -> Self {
        sleepers.fetch_add(1, Ordering::Relaxed);
        Self(sleepers)
    }
}

impl Drop for Counted<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicBool;

    #[test]
    fn a_timeout_ends_the_wait() {
        let signal = Signal::new();
        let begin = Instant::now();
        assert!(!signal.wait_timeout(|| false, Some(Duration::from_millis(20))));
        assert!(begin.elapsed() >= Duration::from_millis(20));
        assert!(!signal.wait_timeout(|| false, Some(Duration::ZERO)));
        assert!(signal.wait_timeout(|| true, Some(Duration::ZERO)));
        assert_eq!(signal.sleepers.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn every_sleeper_is_woken() {
        let signal = Signal::new();
        let go = AtomicBool::new(false);
        std::thread::scope(|s| {
            for _ in 0..3 {
                s.spawn(|| signal.wait_until(|| go.load(Ordering::Acquire)));
            }
            while signal.sleepers.load(Ordering::Relaxed) < 3 {
                std::thread::yield_now();
            }
            signal.notify(); // without the event: they sleep on
            go.store(true, Ordering::Release);
            signal.notify();
        });
        assert_eq!(signal.sleepers.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn a_panicking_test_leaves_the_signal_usable() {
        let signal = Signal::new();
        let mut calls = 0;
        let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            signal.wait_until(|| {
                calls += 1;
                assert!(calls <= SPINS + 1, "under the lock now");
                false
            });
        }));
        assert!(caught.is_err());
        assert_eq!(signal.sleepers.load(Ordering::Relaxed), 0);
        signal.notify();
        assert!(!signal.wait_timeout(|| false, Some(Duration::from_millis(1))));
    }
}
