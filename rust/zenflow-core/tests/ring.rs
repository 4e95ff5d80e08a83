//! The ring against a plain queue, and under two real threads. `loom_ring.rs` has the model checks.
#![cfg(not(loom))]

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use proptest::prelude::*;
use zenflow_core::ring::ring;
use zenflow_core::sync::Signal;

#[derive(Clone, Copy, Debug)]
enum Op {
    Push,
    Pop,
    Peek,
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    // Runs of pushes and of pops, so that rings of every size get full and empty.
    let run = (prop_oneof![3 => Just(Op::Push), 3 => Just(Op::Pop), 1 => Just(Op::Peek)], 1..12_usize);
    prop::collection::vec(run, 0..60)
        .prop_map(|runs| runs.into_iter().flat_map(|(op, n)| std::iter::repeat_n(op, n)).collect())
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: if cfg!(miri) { 8 } else { 512 },
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn behaves_as_a_bounded_queue(wanted in 0..40_usize, ops in ops()) {
        let (mut producer, mut consumer) = ring(wanted);
        let capacity = wanted.max(1).next_power_of_two();
        prop_assert_eq!((producer.capacity(), consumer.capacity()), (capacity, capacity));
        let watch = consumer.watch();
        let mut model = VecDeque::new();
        for (number, op) in ops.into_iter().enumerate() {
            match op {
                Op::Push if model.len() == capacity => prop_assert_eq!(producer.push(number), Err(number)),
                Op::Push => {
                    prop_assert_eq!(producer.push(number), Ok(()));
                    model.push_back(number);
                }
                Op::Pop => prop_assert_eq!(consumer.pop(), model.pop_front()),
                Op::Peek => prop_assert_eq!(consumer.peek(), model.front().copied()),
            }
            prop_assert_eq!((producer.len(), consumer.len()), (model.len(), model.len()));
            prop_assert_eq!(consumer.is_empty(), model.is_empty());
            prop_assert_eq!(watch.is_empty(), model.is_empty());
            prop_assert_eq!(producer.is_full(), model.len() == capacity);
        }
    }
}

/// An item wider than a word, whose parts agree: a torn or early read shows.
type Item = [u64; 5];

fn item(number: u64) -> Item {
    [number, !number, number << 1, number ^ 0xABCD, number.wrapping_mul(0x9E37_79B9_7F4A_7C15)]
}

/// A small generator of stalls, the same in every run.
struct Stalls(u64);

impl Stalls {
    fn maybe(&mut self) {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        match self.0 >> 54 {
            0..4 => std::thread::sleep(Duration::from_micros(30)),
            4..40 => std::thread::yield_now(),
            40..80 => (0..200).for_each(|_| std::hint::spin_loop()),
            _ => {}
        }
    }
}

fn items() -> u64 {
    if cfg!(miri) {
        200
    } else {
        100_000
    }
}

#[test]
fn two_threads_with_stalls_lose_nothing() {
    for capacity in [1, 2, 16] {
        let (mut producer, mut consumer) = ring::<Item>(capacity);
        let (filled, room, closed) = (Signal::new(), Signal::new(), AtomicBool::new(false));
        std::thread::scope(|s| {
            s.spawn(|| {
                let mut stalls = Stalls(1);
                for number in 0..items() {
                    stalls.maybe();
                    while let Err(back) = producer.push(item(number)) {
                        assert_eq!(back, item(number));
                        room.wait_until(|| !producer.is_full());
                    }
                    filled.notify();
                }
                closed.store(true, Ordering::Release);
                filled.notify();
            });
            let mut stalls = Stalls(2);
            let mut next = 0;
            loop {
                filled.wait_until(|| !consumer.is_empty() || closed.load(Ordering::Acquire));
                // Read before the pops: if it was closed then, what they leave is nothing.
                let last = closed.load(Ordering::Acquire);
                while let Some(got) = consumer.pop() {
                    assert_eq!(got, item(next));
                    next += 1;
                    room.notify();
                    stalls.maybe();
                }
                if last {
                    break;
                }
            }
            assert_eq!(next, items());
        });
    }
}

#[test]
fn urgent_and_background_share_one_signal() {
    let (mut urgent, mut urgent_end) = ring::<u64>(4);
    let (mut background, mut background_end) = ring::<u64>(4);
    let signal = Signal::new();
    let each = items() / 4;
    std::thread::scope(|s| {
        let signal = &signal;
        for (mut stalls, producer) in [(Stalls(3), &mut urgent), (Stalls(4), &mut background)] {
            s.spawn(move || {
                for number in 0..each {
                    stalls.maybe();
                    while producer.push(number).is_err() {
                        std::thread::yield_now();
                    }
                    signal.notify();
                }
            });
        }
        let mut seen = [0; 2];
        while seen != [each; 2] {
            // The timeout is the test: without a lost wake-up it never passes.
            let came = signal.wait_timeout(
                || !urgent_end.is_empty() || !background_end.is_empty(),
                Some(Duration::from_secs(20)),
            );
            assert!(came, "a wake-up was lost at {seen:?}");
            for (seen, end) in seen.iter_mut().zip([&mut urgent_end, &mut background_end]) {
                if let Some(number) = end.pop() {
                    assert_eq!(number, *seen);
                    *seen += 1;
                }
            }
        }
    });
}

#[test]
fn an_idle_waiter_uses_no_cpu() {
    #[cfg(target_os = "linux")]
    {
        fn cpu() -> Duration {
            let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
            // SAFETY: `time` is a live timespec.
            assert_eq!(unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) }, 0);
            Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
        }
        let signal = Signal::new();
        let before = cpu();
        assert!(!signal.wait_timeout(|| false, Some(Duration::from_millis(300))));
        let used = cpu().saturating_sub(before);
        assert!(used < Duration::from_millis(20), "{used:?} of CPU in 300 ms of waiting");
    }
}
