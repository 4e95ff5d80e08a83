//! A pool's threads end with it, and a forked child keeps its hands off them. One test, so that nothing else
//! starts threads in this process meanwhile.
#![cfg(target_os = "linux")]

use std::time::{Duration, Instant};

use zenflow_core::pool::Pool;
use zenflow_core::{topology, Error};

fn tasks() -> usize {
    std::fs::read_dir("/proc/self/task").unwrap().count()
}

fn wait_for_tasks(wanted: usize) {
    let begin = Instant::now();
    // A joined thread leaves /proc a moment after the kernel has reported its end.
    while tasks() != wanted {
        assert!(begin.elapsed() < Duration::from_secs(10), "{} tasks instead of {wanted}", tasks());
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Forks, runs `child` in the child, and returns what it returned, or `None` if it hung or died.
fn in_a_child(child: impl FnOnce() -> u8) -> Option<u8> {
    // SAFETY: the closures given here neither allocate nor take a lock, as befits a child of a process with
    // other threads.
    let pid = unsafe { libc::fork() };
    assert!(pid >= 0, "fork failed");
    if pid == 0 {
        let code = child();
        // SAFETY: ends the child at once.
        unsafe { libc::_exit(i32::from(code)) };
    }
    let begin = Instant::now();
    let mut status = 0;
    loop {
        // SAFETY: `status` is live; the child is ours and not yet waited for.
        match unsafe { libc::waitpid(pid, &raw mut status, libc::WNOHANG) } {
            0 if begin.elapsed() < Duration::from_secs(10) => std::thread::sleep(Duration::from_millis(1)),
            // SAFETY: the child is ours and not yet waited for, so its id is still its own.
            0 => unsafe {
                libc::kill(pid, libc::SIGKILL);
                libc::waitpid(pid, &raw mut status, 0);
                return None;
            },
            _ => return libc::WIFEXITED(status).then(|| libc::WEXITSTATUS(status) as u8),
        }
    }
}

#[test]
fn threads_end_with_their_pool() {
    let before = tasks();
    let cores = topology::default_cores();
    for round in 0..50 {
        let pool = if round % 2 == 0 { Pool::with_threads(4) } else { Pool::new(&cores, true) }.unwrap();
        wait_for_tasks(before + pool.threads());
        assert_eq!(pool.install(|| round), Ok(round));
    }
    wait_for_tasks(before);

    // Pinned or not, the thread that made them may still run where it could.
    assert!(topology::default_cores() == cores);

    let pool = Pool::with_threads(2).unwrap();
    let parent = std::process::id();
    let pool = &pool;
    let code = in_a_child(|| {
        let child = std::process::id();
        let refused = pool.checked().err() == Some(Error::Forked { parent, child });
        let not_run = matches!(pool.install(|| ()), Err(Error::Forked { .. }));
        // SAFETY: a second owner of the pool's bits, in a process that ends before the first one is used.
        drop(unsafe { std::ptr::read(pool) });
        u8::from(refused) + 2 * u8::from(not_run)
    });
    assert_eq!(code, Some(3));
    assert_eq!(pool.install(|| 5), Ok(5), "the parent's pool still works");
    wait_for_tasks(before + 2);
}
