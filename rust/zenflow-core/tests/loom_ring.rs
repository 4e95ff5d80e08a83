//! Model checks of the ring and of `Signal`: loom runs each of these under every interleaving of its threads
//! (up to four preemptions) and every value that its atomics' orderings allow a load to see.
//!
//! ```text
//! RUSTFLAGS="--cfg loom" cargo test -p zenflow-core --release --test loom_ring
//! ```
//!
//! The laws: what was accepted comes out once, whole and in order; what wasn't is handed back; and whoever
//! sleeps is woken. Loom itself fails a test when an item is read and written at once, or when every thread
//! sleeps.
#![cfg(loom)]

use loom::sync::atomic::{AtomicBool, Ordering};
use loom::sync::Arc;
use loom::thread;
use zenflow_core::ring::{ring, Consumer, Producer};
use zenflow_core::sync::Signal;

fn model(test: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    // Every known bug of queues of this kind shows with two preemptions; LOOM_MAX_PREEMPTIONS overrides.
    builder.preemption_bound.get_or_insert(4);
    builder.check(test);
}

/// Pushes `numbers`, without waiting for room; returns those that were accepted.
fn push_all(producer: &mut Producer<u32>, numbers: std::ops::Range<u32>) -> Vec<u32> {
    numbers
        .filter(|&number| match producer.push(number) {
            Ok(()) => true,
            Err(back) => {
                assert_eq!(back, number);
                false
            }
        })
        .collect()
}

fn pop_all(consumer: &mut Consumer<u32>) -> Vec<u32> {
    std::iter::from_fn(|| consumer.pop()).collect()
}

#[test]
fn accepted_items_come_out_once_and_in_order() {
    model(|| {
        let (mut producer, mut consumer) = ring(2);
        let pushing = thread::spawn(move || {
            let accepted = push_all(&mut producer, 0..4);
            assert!(accepted.starts_with(&[0, 1]), "there was room: {accepted:?}");
            accepted
        });
        let mut popped = Vec::new();
        for _ in 0..3 {
            popped.extend(consumer.pop());
        }
        let accepted = pushing.join().unwrap();
        popped.extend(pop_all(&mut consumer));
        assert_eq!(popped, accepted);
        assert!(consumer.is_empty());
    });
}

#[test]
fn a_ring_goes_round_under_both_ends() {
    model(|| {
        let (mut producer, mut consumer) = ring(2);
        // One and a half rounds before the threads part, so that they meet in every slot.
        for number in [10, 11, 12] {
            producer.push(number).unwrap();
            assert_eq!(consumer.pop(), Some(number));
        }
        producer.push(0).unwrap();
        producer.push(1).unwrap();
        let popping = thread::spawn(move || {
            let popped: Vec<u32> = (0..3).filter_map(|_| consumer.pop()).collect();
            (popped, consumer)
        });
        let accepted = push_all(&mut producer, 2..5);
        let (mut popped, mut consumer) = popping.join().unwrap();
        popped.extend(pop_all(&mut consumer));
        assert_eq!(popped, [vec![0, 1], accepted].concat());
    });
}

#[test]
fn peek_and_watch_tell_the_truth_to_the_consumer() {
    model(|| {
        let (mut producer, mut consumer) = ring(1);
        let watch = consumer.watch();
        let pushing = thread::spawn(move || push_all(&mut producer, 7..9));
        let mut popped = Vec::new();
        for _ in 0..2 {
            let (waiting, length) = (!watch.is_empty(), consumer.len());
            let peeked = consumer.peek();
            assert!(peeked.is_some() || (!waiting && length == 0));
            let got = consumer.pop();
            assert!(peeked.is_none() || got == peeked);
            popped.extend(got);
        }
        let accepted = pushing.join().unwrap();
        popped.extend(pop_all(&mut consumer));
        assert_eq!(popped, accepted);
    });
}

#[test]
fn len_is_never_beyond_the_capacity() {
    model(|| {
        let (mut producer, mut consumer) = ring(1);
        producer.push(1).unwrap();
        let popping = thread::spawn(move || {
            assert!(consumer.len() <= consumer.capacity());
            let first = consumer.pop();
            assert!(consumer.len() <= consumer.capacity());
            (first, consumer)
        });
        // Room that the producer has seen stays.
        let pushed = !producer.is_full();
        if pushed {
            producer.push(2).unwrap();
        }
        assert!(producer.len() <= producer.capacity());
        let (first, mut consumer) = popping.join().unwrap();
        assert_eq!(first, Some(1));
        assert_eq!(consumer.pop(), pushed.then_some(2));
    });
}

#[test]
fn a_parked_consumer_is_always_woken() {
    model(|| {
        let (mut producer, mut consumer) = ring(2);
        let signal = Arc::new(Signal::new());
        let notifier = Arc::clone(&signal);
        let pushing = thread::spawn(move || {
            for number in 0..2 {
                producer.push(number).unwrap();
                notifier.notify();
            }
        });
        for number in 0..2 {
            signal.wait_until(|| !consumer.is_empty());
            assert_eq!(consumer.pop(), Some(number));
        }
        pushing.join().unwrap();
    });
}

#[test]
fn both_ends_may_park() {
    model(|| {
        let (mut producer, mut consumer) = ring(1);
        let filled = Arc::new(Signal::new());
        let room = Arc::new(Signal::new());
        let (filled_too, room_too) = (Arc::clone(&filled), Arc::clone(&room));
        let pushing = thread::spawn(move || {
            for number in 0..2 {
                room_too.wait_until(|| !producer.is_full());
                producer.push(number).unwrap();
                filled_too.notify();
            }
        });
        for number in 0..2 {
            filled.wait_until(|| !consumer.is_empty());
            assert_eq!(consumer.pop(), Some(number));
            room.notify();
        }
        pushing.join().unwrap();
    });
}

#[test]
fn one_sleeper_hears_both_rings_of_one_producer() {
    model(|| {
        let (mut urgent, mut urgent_end) = ring(1);
        let (mut background, mut background_end) = ring(1);
        let signal = Arc::new(Signal::new());
        let notifier = Arc::clone(&signal);
        let pushing = thread::spawn(move || {
            background.push(1).unwrap();
            notifier.notify();
            urgent.push(2).unwrap();
            notifier.notify();
        });
        let mut got = Vec::new();
        while got.len() < 2 {
            signal.wait_until(|| !urgent_end.is_empty() || !background_end.is_empty());
            let next = urgent_end.pop().or_else(|| background_end.pop());
            got.push(next.expect("the signal promised an item"));
        }
        assert!(got == [1, 2] || got == [2, 1], "{got:?}");
        pushing.join().unwrap();
    });
}

#[test]
fn an_urgent_item_shows_the_background_items_before_it() {
    // The engine pulls a bucket's earlier background tickets forward when it sees its urgent one.
    model(|| {
        let (mut urgent, mut urgent_end) = ring(1);
        let (mut background, mut background_end) = ring(1);
        let pushing = thread::spawn(move || {
            background.push(1).unwrap();
            urgent.push(2).unwrap();
        });
        if urgent_end.peek().is_some() {
            assert_eq!(background_end.pop(), Some(1));
        }
        pushing.join().unwrap();
    });
}

#[test]
fn a_length_shows_what_the_other_end_did_before() {
    model(|| {
        let (mut producer, mut consumer) = ring(1);
        let (before_push, before_pop) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
        let (pushed_too, popped_too) = (Arc::clone(&before_push), Arc::clone(&before_pop));
        let other = thread::spawn(move || {
            if !consumer.is_empty() {
                assert!(pushed_too.load(Ordering::Relaxed));
                popped_too.store(true, Ordering::Relaxed);
                consumer.pop().unwrap();
            }
        });
        before_push.store(true, Ordering::Relaxed);
        producer.push(1).unwrap();
        if producer.is_empty() {
            assert!(before_pop.load(Ordering::Relaxed));
        }
        other.join().unwrap();
    });
}

#[test]
fn one_sleeper_hears_two_producers() {
    model(|| {
        let (mut urgent, mut urgent_end) = ring(1);
        let (mut background, mut background_end) = ring(1);
        let signal = Arc::new(Signal::new());
        let (first, second) = (Arc::clone(&signal), Arc::clone(&signal));
        let one = thread::spawn(move || {
            urgent.push(1).unwrap();
            first.notify();
        });
        let two = thread::spawn(move || {
            background.push(2).unwrap();
            second.notify();
        });
        let mut sum = 0;
        while sum < 3 {
            signal.wait_until(|| !urgent_end.is_empty() || !background_end.is_empty());
            sum += urgent_end.pop().or_else(|| background_end.pop()).expect("an item");
        }
        one.join().unwrap();
        two.join().unwrap();
    });
}

#[test]
fn two_sleepers_are_both_woken() {
    model(|| {
        let go = Arc::new(AtomicBool::new(false));
        let signal = Arc::new(Signal::new());
        let (go_too, signal_too) = (Arc::clone(&go), Arc::clone(&signal));
        let sleeping = thread::spawn(move || signal_too.wait_until(|| go_too.load(Ordering::Acquire)));
        let (go_three, signal_three) = (Arc::clone(&go), Arc::clone(&signal));
        let notifying = thread::spawn(move || {
            go_three.store(true, Ordering::Release);
            signal_three.notify();
        });
        signal.wait_until(|| go.load(Ordering::Acquire));
        sleeping.join().unwrap();
        notifying.join().unwrap();
    });
}

#[test]
fn closing_wakes_the_sleeper_and_loses_no_item() {
    model(|| {
        let (mut producer, mut consumer) = ring(2);
        let signal = Arc::new(Signal::new());
        let closed = Arc::new(AtomicBool::new(false));
        let (signal_too, closed_too) = (Arc::clone(&signal), Arc::clone(&closed));
        let closing = thread::spawn(move || {
            producer.push(0).unwrap();
            signal_too.notify();
            producer.push(1).unwrap();
            closed_too.store(true, Ordering::Release);
            signal_too.notify();
        });
        let mut popped = Vec::new();
        loop {
            signal.wait_until(|| !consumer.is_empty() || closed.load(Ordering::Acquire));
            let last = closed.load(Ordering::Acquire);
            popped.extend(pop_all(&mut consumer));
            if last {
                break;
            }
        }
        assert_eq!(popped, [0, 1]);
        closing.join().unwrap();
    });
}
