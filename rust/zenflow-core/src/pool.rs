//! The threads that run the kernels: a rayon pool, pinned one thread a core.
//!
//! The pool is the engine's own, not rayon's global one: its size comes from `cores=`, never from
//! `OMP_NUM_THREADS` or `RAYON_NUM_THREADS`, which launchers set to 1 for reasons of their own. Rayon makes
//! it spin briefly before it parks, which many small buckets in a row live on.
//!
//! The threads are spawned and joined here, because rayon only tells its threads to end: after a pool has
//! been dropped they are gone, and with them whatever they had pinned.

use std::mem::ManuallyDrop;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::Arc;
use std::thread::{self, JoinHandle};

use crate::deal::Shares;
use crate::error::{Error, Result};
use crate::process::Birth;
use crate::topology::{self, Nodes};

/// A rayon pool that belongs to the process that made it.
#[derive(Debug)]
pub struct Pool {
    /// Dropped by hand: never in a forked child.
    inner: ManuallyDrop<rayon::ThreadPool>,
    threads: Vec<JoinHandle<()>>,
    cores: Vec<usize>,
    shares: Shares,
    birth: Birth,
}

impl Pool {
    /// One thread for each logical CPU in `cores`, thread `i` on `cores[i]` if `pin`, else wherever the
    /// system likes.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`] if `cores` is empty, names a CPU twice or one that this process may not
    /// use; [`Error::Thread`] if a thread can't be started or pinned.
    pub fn new(cores: &[usize], pin: bool) -> Result<Self> {
        check_cores(cores, &topology::allowed_cpus())?;
        Self::start(cores.len(), cores, pin)
    }

    /// `threads` unpinned threads.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`] if `threads` is 0 or beyond what rayon takes; [`Error::Thread`] if a
    /// thread can't be started.
    pub fn with_threads(threads: usize) -> Result<Self> {
        if threads == 0 || threads > rayon::max_num_threads() {
            return Err(Error::invalid("threads", threads, "at least 1, at most 65535"));
        }
        Self::start(threads, &[], false)
    }

    fn start(count: usize, cores: &[usize], pin: bool) -> Result<Self> {
        let failed = |cause: String| {
            let how = if pin { format!(" pinned to CPUs {cores:?}") } else { String::new() };
            Error::Thread { wanted: format!("{count} threads{how}"), cause }
        };
        let unpinned = Arc::new(AtomicUsize::new(0));
        let mut threads = Vec::with_capacity(count);

        let mut builder =
            rayon::ThreadPoolBuilder::new().num_threads(count).thread_name(|i| format!("zenflow-{i}"));
        if pin {
            let (cores, unpinned) = (cores.to_vec(), Arc::clone(&unpinned));
            builder = builder.start_handler(move |i| {
                if !core_affinity::set_for_current(core_affinity::CoreId { id: cores[i] }) {
                    // Relaxed: read after the broadcast below, whose end orders it.
                    unpinned.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        let built = builder
            .spawn_handler(|thread| {
                let mut start = thread::Builder::new();
                if let Some(name) = thread.name() {
                    start = start.name(name.to_owned());
                }
                threads.push(start.spawn(|| thread.run())?);
                Ok(())
            })
            .build();
        let inner = match built {
            Ok(inner) => inner,
            Err(error) => {
                // Rayon has told those that had started to end.
                for thread in threads {
                    let _ = thread.join();
                }
                return Err(failed(error.to_string()));
            }
        };

        // A thread that may move has no node.
        let shares = if pin {
            let nodes = Nodes::detect();
            Shares::by_node(&cores.iter().map(|&cpu| nodes.of(cpu)).collect::<Vec<_>>())
        } else {
            Shares::one(count)
        };
        let (inner, cores) = (ManuallyDrop::new(inner), cores.to_vec());
        let pool = Self { inner, threads, cores, shares, birth: Birth::here() };
        // Every thread answers once, so all have started, and all have tried to pin themselves.
        pool.inner.broadcast(|_| ());
        match unpinned.load(Ordering::Relaxed) {
            0 => Ok(pool),
            n => Err(failed(format!("the system refused to pin {n} of them"))),
        }
    }

    /// Number of threads.
    #[must_use]
    pub fn threads(&self) -> usize {
        self.threads.len()
    }

    /// The CPUs it was made for, as given to [`new`](Self::new); empty for
    /// [`with_threads`](Self::with_threads).
    #[must_use]
    pub fn cores(&self) -> &[usize] {
        &self.cores
    }

    /// How work is dealt to its threads: by NUMA node where they are pinned.
    #[must_use]
    pub fn shares(&self) -> &Shares {
        &self.shares
    }

    /// Runs `work` inside the pool, where rayon's parallel iterators use its threads, and waits for it.
    ///
    /// # Errors
    ///
    /// [`Error::Forked`] in a forked child; `work` is not run.
    pub fn install<R: Send>(&self, work: impl FnOnce() -> R + Send) -> Result<R> {
        Ok(self.checked()?.install(work))
    }

    /// The pool, after making sure that this process has its threads.
    ///
    /// # Errors
    ///
    /// [`Error::Forked`] in a forked child, where anything given to it would wait for ever.
    pub fn checked(&self) -> Result<&rayon::ThreadPool> {
        self.birth.check()?;
        Ok(&self.inner)
    }

    /// The pool, unchecked: for loops that have called [`checked`](Self::checked) on their way in.
    #[must_use]
    pub fn rayon(&self) -> &rayon::ThreadPool {
        &self.inner
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        if !self.birth.is_here() {
            // A forked child: the threads are the parent's, and rayon's locks may have been copied shut.
            // Even letting go of a handle would have the C library look into a thread that isn't there. So the
            // child leaks a few kilobytes instead.
            std::mem::forget(std::mem::take(&mut self.threads));
            return;
        }
        // SAFETY: taken once, here; nothing uses `inner` after its destructor has run.
        unsafe { ManuallyDrop::drop(&mut self.inner) };
        // The last owner may be a job of the pool's own. No thread ends before that job does, so waiting here
        // would be for ever; the threads end by themselves soon after.
        let me = thread::current().id();
        if self.threads.iter().any(|handle| handle.thread().id() == me) {
            return;
        }
        for handle in self.threads.drain(..) {
            // A thread that panicked has said so already, and a destructor has nobody to tell.
            let _ = handle.join();
        }
    }
}

fn check_cores(cores: &[usize], allowed: &[usize]) -> Result<()> {
    const ACCEPTED: &str = "logical CPUs that this process may use, each once, at least one";
    if cores.is_empty() {
        return Err(Error::invalid("cores", "empty", ACCEPTED));
    }
    for (i, core) in cores.iter().enumerate() {
        if cores[..i].contains(core) {
            return Err(Error::invalid("cores", format!("{cores:?} (CPU {core} twice)"), ACCEPTED));
        }
        if !allowed.contains(core) {
            let value = format!("{cores:?} (CPU {core} is not among {allowed:?})");
            return Err(Error::invalid("cores", value, ACCEPTED));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use rayon::prelude::*;

    #[test]
    fn threads_are_named_and_pinned() {
        let cores = topology::allowed_cpus();
        let pool = Pool::new(&cores, true).unwrap();
        assert_eq!((pool.threads(), pool.cores()), (cores.len(), &cores[..]));
        let nodes = Nodes::detect();
        let nodes: Vec<usize> = cores.iter().map(|&cpu| nodes.of(cpu)).collect();
        assert_eq!(pool.shares(), &Shares::by_node(&nodes));
        let seen = pool.checked().unwrap().broadcast(|context| {
            let name = thread::current().name().map(str::to_owned);
            (context.index(), name, topology::allowed_cpus())
        });
        for (i, name, mask) in seen {
            assert_eq!(name.unwrap(), format!("zenflow-{i}"));
            if cfg!(target_os = "linux") {
                assert_eq!(mask, [cores[i]]);
            }
        }
    }

    #[test]
    fn its_size_is_what_was_asked_for() {
        let pool = Pool::with_threads(3).unwrap();
        assert_eq!((pool.threads(), pool.shares()), (3, &Shares::one(3)));
        assert_eq!(pool.install(rayon::current_num_threads), Ok(3));
        let sum: u64 = pool.install(|| (0..1000_u64).into_par_iter().sum()).unwrap();
        assert_eq!(sum, 499_500);
        assert_eq!(pool.rayon().current_num_threads(), 3);
    }

    #[test]
    fn bad_cores_are_named() {
        let text = |cores: &[usize]| Pool::new(cores, true).unwrap_err().to_string();
        let one = topology::allowed_cpus()[0];
        assert!(text(&[]).starts_with("cores is empty"));
        assert!(text(&[one, one]).contains(&format!("CPU {one} twice")));
        assert!(text(&[one, 4095]).contains("CPU 4095 is not among"));
        assert!(Pool::with_threads(0).unwrap_err().to_string().starts_with("threads is 0"));
        assert!(Pool::with_threads(usize::MAX).is_err());
    }

    #[test]
    fn a_job_may_hold_the_last_handle() {
        let pool = Arc::new(Pool::with_threads(2).unwrap());
        let (send, receive) = std::sync::mpsc::channel();
        let held = Arc::clone(&pool);
        pool.rayon().spawn(move || {
            while Arc::strong_count(&held) > 1 {
                thread::yield_now();
            }
            drop(held);
            send.send(()).unwrap();
        });
        drop(pool);
        receive.recv_timeout(std::time::Duration::from_secs(20)).unwrap();
    }
}
