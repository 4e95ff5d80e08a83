//! The engine from outside: bits against the kernels run in order, bounds, voids, failures, ends.
#![cfg(not(loom))]
// A mapping starts on a page, and its arrays at lines.
#![allow(clippy::cast_ptr_alignment)]

use std::time::Duration;

use zenflow_core::adam::{update_slices, Entry, Grad, Out};
use zenflow_core::bucket::{Action, Progress, SEGMENT_ALIGNMENT};
use zenflow_core::dtype::{Dtype, StateDtype};
use zenflow_core::engine::{Engine, EngineConfig, SLOT_HEADER};
use zenflow_core::hyper::{Hyper, Pending, Scalars};
use zenflow_core::isa::Isa;
use zenflow_core::ticket::{Completion, Ticket};
use zenflow_core::Error;

const LONG: Duration = Duration::from_secs(30);

fn hyper(lr: f64) -> Hyper {
    Hyper { lr, beta1: 0.9, beta2: 0.99, eps: 1e-8, weight_decay: 0.1 }
}

fn config(threads: usize) -> EngineConfig {
    EngineConfig { threads: Some(threads), chunk: 1024, ..EngineConfig::default() }
}

/// 64-byte aligned staging memory that outlives the engine because the test leaks it.
fn staging(bytes: usize) -> *mut u8 {
    let layout = std::alloc::Layout::from_size_align(bytes, 64).unwrap();
    // SAFETY: the size isn't zero.
    unsafe { std::alloc::alloc_zeroed(layout) }
}

/// Where a slot's gradients begin.
#[allow(clippy::cast_ptr_alignment)] // 64-byte aligned by `staging`
fn payload(slot: *mut u8) -> *mut f32 {
    slot.wrapping_add(SLOT_HEADER).cast()
}

/// One bucket over one parameter, with its slots.
struct Lane {
    bucket: u32,
    parameter: u32,
    slot: u32,
    upload: u32,
    gradients: *mut f32,
    weights: *mut f32,
    numel: usize,
    /// First element, in the slots, of the second of its two segments.
    second: usize,
}

impl Lane {
    #[allow(clippy::cast_ptr_alignment)] // 64-byte aligned by `staging`
    fn new(engine: &Engine, numel: usize) -> Self {
        let parameter = engine.add_parameter(numel, StateDtype::F32).unwrap();
        let half = numel / 2;
        let bucket = engine.add_bucket(&[(parameter, 0, half), (parameter, half, numel - half)]).unwrap();
        let second = half.next_multiple_of(SEGMENT_ALIGNMENT);
        let bytes = 4 * (second + numel - half);
        let (down, up) = (staging(SLOT_HEADER + bytes), staging(bytes));
        // SAFETY: leaked memory, used by the slot protocol alone.
        let (slot, upload) = unsafe {
            (engine.add_slot(down, SLOT_HEADER + bytes).unwrap(), engine.add_upload(up, bytes).unwrap())
        };
        let gradients = payload(down);
        Self { bucket, parameter, slot, upload, gradients, weights: up.cast(), numel, second }
    }

    /// Where the slots have element `i`.
    fn place(&self, i: usize) -> usize {
        let half = self.numel / 2;
        if i < half {
            i
        } else {
            self.second + i - half
        }
    }

    fn fill_slot(&self, gradients: *mut f32, step: usize) {
        for (i, value) in gradient(self.numel, step).into_iter().enumerate() {
            // SAFETY: inside the slot, which no ticket uses now.
            unsafe { gradients.add(self.place(i)).write(value) };
        }
    }

    fn fill(&self, step: usize) {
        self.fill_slot(self.gradients, step);
    }

    /// The weights of the last close, landed by nobody.
    fn shown(&self) -> Vec<f32> {
        // SAFETY: inside the slot, which no ticket uses now.
        (0..self.numel).map(|i| unsafe { self.weights.add(self.place(i)).read() }).collect()
    }

    fn ticket(&self, lr: f64, closes: bool) -> Ticket {
        Ticket {
            bucket: self.bucket,
            slot: self.slot,
            upload: closes.then_some(self.upload),
            grad_dtype: Dtype::F32,
            out_dtype: Dtype::F32,
            hyper: hyper(lr),
            sequence: 0,
        }
    }

    fn submit(&self, engine: &Engine, step: usize, lr: f64, close: bool) {
        self.fill(step);
        engine.ring(self.slot, 0.5, false).unwrap();
        let action = if close { Action::Close } else { Action::Moments };
        assert!(engine.submit(self.ticket(lr, close), &[action, action]).unwrap());
    }

    fn state(&self, engine: &Engine) -> [Vec<f32>; 3] {
        let state = engine.idle_state(self.parameter).unwrap();
        [state.master(), state.moments().exp_avg.cast(), state.moments().exp_avg_sq.cast()].map(|array| {
            // SAFETY: idle, `numel` fp32 elements.
            unsafe { std::slice::from_raw_parts(array, self.numel) }.to_vec()
        })
    }
}

fn gradient(numel: usize, step: usize) -> Vec<f32> {
    (0..numel).map(|i| ((i * 37 + step * 101) % 251) as f32 / 125.0 - 1.0).collect()
}

fn wait_for(engine: &Engine, count: usize) -> Vec<Completion> {
    let mut done = Vec::new();
    while done.len() < count {
        let more = engine.wait(LONG).unwrap();
        assert!(!more.is_empty(), "no completion within {LONG:?}");
        done.extend(more);
    }
    done
}

/// Waits until the worker has begun the lane's ticket number `k`.
fn wait_for_begin(engine: &Engine, lane: &Lane, k: u64) {
    while engine.progress(lane.bucket).unwrap()[0].k < k {
        std::thread::yield_now();
    }
}

/// What a lane must hold after `steps`, by the kernels alone; closes at every fourth.
fn expected(numel: usize, steps: usize) -> [Vec<f32>; 3] {
    let (mut w, mut m, mut v) = (vec![0.0; numel], vec![0.0; numel], vec![0.0; numel]);
    let mut pending = Pending::default();
    for step in 1..=steps {
        let hyper = hyper(0.01 * step as f64);
        pending.advance(hyper.lr, hyper.weight_decay);
        let (entry, scalars) = if step % 4 == 0 {
            (Entry::Move, Scalars::close(&hyper, step as u64, std::mem::take(&mut pending), 0.5))
        } else {
            (Entry::Moments, Scalars::moments(&hyper, step as u64, 0.5))
        };
        let gradient = gradient(numel, step);
        update_slices(
            Isa::Portable,
            entry,
            &scalars,
            &mut w,
            &mut m,
            &mut v,
            Grad::F32(&gradient),
            Out::None,
        )
        .unwrap();
    }
    [w, m, v]
}

#[test]
fn many_buckets_give_the_bits_of_their_own_order() {
    for threads in [1, 2, 7] {
        let engine =
            Engine::new(EngineConfig { delay: Duration::from_micros(50), ..config(threads) }).unwrap();
        let lanes: Vec<_> = [5000, 1, 3, 4097, 9999].iter().map(|&numel| Lane::new(&engine, numel)).collect();
        for step in 1..=12 {
            // Background tickets of some lanes are under way while urgent ones of others arrive.
            for lane in &lanes {
                lane.submit(&engine, step, 0.01 * step as f64, step % 4 == 0);
            }
            wait_for(&engine, lanes.len());
        }
        for lane in &lanes {
            assert_eq!(
                lane.state(&engine),
                expected(lane.numel, 12),
                "{threads} threads, {} elements",
                lane.numel
            );
            assert_eq!(lane.shown(), lane.state(&engine)[0]);
            let progress = engine.progress(lane.bucket).unwrap();
            assert_eq!(progress, vec![Progress { k: 12, pending: Pending::default() }; 2]);
        }
    }
}

#[test]
fn an_urgent_ticket_overtakes_background_work_of_other_buckets() {
    let engine = Engine::new(EngineConfig { delay: Duration::from_millis(20), ..config(1) }).unwrap();
    let slow: Vec<_> = (0..3).map(|_| Lane::new(&engine, 8 * 1024)).collect();
    let quick = Lane::new(&engine, 512);
    for lane in &slow {
        lane.submit(&engine, 1, 0.01, false);
    }
    quick.submit(&engine, 1, 0.01, true);
    let done = wait_for(&engine, 4);
    assert_eq!(done[0].bucket, quick.bucket, "{done:?}");
    assert_eq!(
        done[1..].iter().map(|done| done.bucket).collect::<Vec<_>>(),
        slow.iter().map(|lane| lane.bucket).collect::<Vec<_>>()
    );
}

#[test]
fn an_urgent_ticket_interrupts_background_work_at_a_chunk() {
    let engine = Engine::new(EngineConfig { delay: Duration::from_millis(5), ..config(2) }).unwrap();
    let (slow, quick) = (Lane::new(&engine, 128 << 10), Lane::new(&engine, 512));
    slow.submit(&engine, 1, 0.01, false);
    wait_for_begin(&engine, &slow, 1);
    quick.submit(&engine, 1, 0.01, true);
    let done = wait_for(&engine, 2);
    assert_eq!([done[0].bucket, done[1].bucket], [quick.bucket, slow.bucket]);
    assert_eq!(slow.state(&engine), expected(slow.numel, 1));
    assert_eq!(engine.stats().unwrap().elements, (slow.numel + quick.numel) as u64);
}

/// Without a delay nothing but the urgent ticket itself makes the threads leave the region. It may come too late, when
/// this thread loses its core for long, but not every time.
#[test]
fn the_pools_threads_look_out_for_urgent_work() {
    let engine = Engine::new(config(2)).unwrap();
    let (slow, quick) = (Lane::new(&engine, 300_000), Lane::new(&engine, 512));
    let interrupted = (1..=100).any(|k| {
        slow.submit(&engine, 1, 0.01, false);
        wait_for_begin(&engine, &slow, k);
        quick.submit(&engine, 1, 0.01, true);
        wait_for(&engine, 2)[0].bucket == quick.bucket
    });
    assert!(interrupted);
}

/// Without a delay the threads leave a region only when urgent work is there; whenever it comes, the bits are the same.
#[test]
fn interruptions_at_any_time_leave_the_bits_alone() {
    let engine = Engine::new(config(3)).unwrap();
    let (slow, quick) = (Lane::new(&engine, 200_000), Lane::new(&engine, 1500));
    for step in 1..=8 {
        slow.submit(&engine, step, 0.01 * step as f64, step % 4 == 0);
        if step % 4 == 0 {
            wait_for(&engine, 1);
        } else {
            // Each closes at once, in the middle of the slow one if that takes long enough.
            wait_for_begin(&engine, &slow, step as u64);
            for _ in 0..3 {
                quick.submit(&engine, 1, 0.01, true);
                while !wait_for(&engine, 1).iter().any(|done| done.bucket == quick.bucket) {}
            }
            engine.drain(LONG).unwrap();
            engine.poll().unwrap();
        }
    }
    assert_eq!(slow.state(&engine), expected(slow.numel, 8));
    assert_eq!(engine.progress(quick.bucket).unwrap()[0].k, 18);
}

/// An urgent ticket that can't go yet, its doorbell silent or its bucket under way, holds up nothing.
#[test]
fn an_urgent_ticket_that_cannot_go_interrupts_nothing() {
    let engine = Engine::new(config(2)).unwrap();
    let (slow, silent) = (Lane::new(&engine, 50_000), Lane::new(&engine, 512));
    assert!(engine.submit(silent.ticket(0.01, true), &[Action::Close; 2]).unwrap());
    slow.submit(&engine, 1, 0.01, false);
    assert_eq!(wait_for(&engine, 1)[0].bucket, slow.bucket);
    silent.fill(1);
    engine.ring(silent.slot, 0.5, false).unwrap();
    assert_eq!(wait_for(&engine, 1)[0].bucket, silent.bucket);
}

/// Segments begin at multiples of 32 elements in the slots, so these have room for the gaps too.
#[test]
fn slots_have_gaps_between_segments() {
    let engine = Engine::new(config(1)).unwrap();
    let parameter = engine.add_parameter(100, StateDtype::F32).unwrap();
    let bucket = engine.add_bucket(&[(parameter, 0, 33), (parameter, 40, 32), (parameter, 90, 2)]).unwrap();
    let (exact, short) = (4 * (64 + 32 + 2), 4 * (64 + 32 + 2) - 4);
    let memory = staging(2 * (SLOT_HEADER + 512));
    // SAFETY: leaked memory, used by the slot protocol alone.
    let [enough, small] = [(0, exact), (SLOT_HEADER + 512, short)]
        .map(|(offset, bytes)| unsafe { engine.add_slot(memory.add(offset), SLOT_HEADER + bytes).unwrap() });
    for (i, at) in [(0, 0), (40, 64), (90, 96)] {
        // SAFETY: inside the slot, which no ticket uses yet.
        unsafe { payload(memory).add(at).write(1.0 + i as f32) };
    }
    let ticket = |slot| Ticket {
        bucket,
        slot,
        upload: None,
        grad_dtype: Dtype::F32,
        out_dtype: Dtype::F32,
        hyper: Hyper { beta1: 0.5, ..hyper(0.01) },
        sequence: 0,
    };
    assert!(engine.submit(ticket(small), &[Action::Moments; 3]).is_err());
    engine.ring(enough, 1.0, false).unwrap();
    assert!(engine.submit(ticket(enough), &[Action::Moments; 3]).unwrap());
    wait_for(&engine, 1);
    let state = engine.idle_state(parameter).unwrap();
    // SAFETY: idle, 100 fp32 elements.
    let moment = unsafe { std::slice::from_raw_parts(state.moments().exp_avg.cast::<f32>(), 100) };
    for (i, &m) in moment.iter().enumerate() {
        let expected = if [0, 40, 90].contains(&i) { 0.5 + i as f32 / 2.0 } else { 0.0 };
        assert!((m - expected).abs() < 1e-6, "element {i}: {m}");
    }
}

/// A bucket's part of each of the three arrays is in memory before the first ticket.
#[cfg(target_os = "linux")]
#[test]
fn a_buckets_pages_are_touched_when_it_is_made() {
    const PAGE: usize = 4096;
    let engine = Engine::new(config(2)).unwrap();
    let numel = 3 << 20;
    let parameter = engine.add_parameter(numel, StateDtype::F32).unwrap();
    let state = engine.state(parameter).unwrap();
    let resident = |array: *mut f32, start: usize, len: usize| {
        let begin = (array.addr() + 4 * start) / PAGE * PAGE;
        let mut seen = vec![0_u8; (array.addr() + 4 * (start + len) - begin).div_ceil(PAGE)];
        let address = array.with_addr(begin).cast();
        // SAFETY: the range is part of one mapping, starting on a page, and `seen` has a byte for each page.
        assert_eq!(unsafe { libc::mincore(address, seen.len() * PAGE, seen.as_mut_ptr()) }, 0);
        (seen.iter().filter(|&&page| page & 1 == 1).count(), seen.len())
    };
    let moments = state.moments();
    let arrays = [state.master(), moments.exp_avg.cast(), moments.exp_avg_sq.cast()];
    assert_eq!(arrays.map(|array| resident(array, 0, numel).0), [0; 3]);
    let (start, len) = (100_001, 1_500_003);
    engine.add_bucket(&[(parameter, start, len)]).unwrap();
    for array in arrays {
        let (there, all) = resident(array, start, len);
        assert_eq!(there, all);
    }
    let (there, all) = resident(arrays[2], 2 << 20, 1 << 20);
    assert!(there < all, "the rest waits for its own bucket");
}

#[test]
fn an_urgent_ticket_waits_for_its_own_buckets_background_work() {
    let engine = Engine::new(EngineConfig { delay: Duration::from_millis(5), ..config(1) }).unwrap();
    let (other, lane) = (Lane::new(&engine, 8 * 1024), Lane::new(&engine, 4 * 1024));
    let second = staging(SLOT_HEADER + 4 * lane.numel);
    // SAFETY: leaked memory, used by the slot protocol alone; the lane's halves have no gap between them.
    let second_slot = unsafe { engine.add_slot(second, SLOT_HEADER + 4 * lane.numel).unwrap() };
    other.submit(&engine, 1, 0.01, false);
    lane.submit(&engine, 1, 0.01, false);
    lane.fill_slot(payload(second), 2);
    engine.ring(second_slot, 0.5, false).unwrap();
    let ticket = Ticket { slot: second_slot, ..lane.ticket(0.02, true) };
    assert!(engine.submit(ticket, &[Action::Close; 2]).unwrap());
    wait_for(&engine, 3);
    assert_eq!(engine.progress(lane.bucket).unwrap()[0].k, 2);

    let (mut w, mut m, mut v) = (vec![0.0; lane.numel], vec![0.0; lane.numel], vec![0.0; lane.numel]);
    let mut pending = Pending::default();
    pending.advance(0.01, 0.1);
    pending.advance(0.02, 0.1);
    for (step, entry, scalars) in [
        (1, Entry::Moments, Scalars::moments(&hyper(0.01), 1, 0.5)),
        (2, Entry::Move, Scalars::close(&hyper(0.02), 2, pending, 0.5)),
    ] {
        let gradient = gradient(lane.numel, step);
        update_slices(
            Isa::detect(),
            entry,
            &scalars,
            &mut w,
            &mut m,
            &mut v,
            Grad::F32(&gradient),
            Out::None,
        )
        .unwrap();
    }
    assert_eq!(lane.state(&engine), [w, m, v]);
}

#[test]
fn a_void_ticket_changes_nothing_and_an_absent_segment_stays() {
    let engine = Engine::new(config(1)).unwrap();
    let lane = Lane::new(&engine, 2000);
    lane.submit(&engine, 1, 0.01, false);
    wait_for(&engine, 1);
    let (before, progress) = (lane.state(&engine), engine.progress(lane.bucket).unwrap());
    lane.fill(2);
    engine.ring(lane.slot, f32::NAN, true).unwrap();
    assert!(engine.submit(lane.ticket(0.01, true), &[Action::Close; 2]).unwrap());
    assert!(wait_for(&engine, 1)[0].void);
    assert_eq!(lane.state(&engine), before);
    assert_eq!(engine.progress(lane.bucket).unwrap(), progress);

    engine.ring(lane.slot, 1.0, false).unwrap();
    assert!(engine.submit(lane.ticket(0.01, false), &[Action::Absent, Action::Moments]).unwrap());
    wait_for(&engine, 1);
    let (after, now) = (lane.state(&engine), engine.progress(lane.bucket).unwrap());
    assert_eq!(now[0], progress[0]);
    assert_eq!(now[1].k, 2);
    assert_eq!(after[1][..1000], before[1][..1000]);
    assert_ne!(after[1][1000..], before[1][1000..]);
}

#[test]
fn a_full_engine_hands_the_ticket_back_until_a_completion_is_taken() {
    let engine = Engine::new(EngineConfig { capacity: 2, ..config(1) }).unwrap();
    let lanes: Vec<_> = (0..3).map(|_| Lane::new(&engine, 100)).collect();
    lanes[0].submit(&engine, 1, 0.01, false);
    lanes[1].submit(&engine, 1, 0.01, true);
    lanes[2].fill(1);
    engine.ring(lanes[2].slot, 0.5, false).unwrap();
    assert!(!engine.submit(lanes[2].ticket(0.01, true), &[Action::Close; 2]).unwrap());
    wait_for(&engine, 2);
    assert!(engine.submit(lanes[2].ticket(0.01, true), &[Action::Close; 2]).unwrap());
    wait_for(&engine, 1);
}

#[test]
fn bad_tickets_are_refused_before_anything_happens() {
    let engine = Engine::new(config(1)).unwrap();
    let lane = Lane::new(&engine, 100);
    let big = Lane::new(&engine, 5000);
    let good = lane.ticket(0.01, true);
    let close = [Action::Close; 2];
    for (ticket, actions, name) in [
        (Ticket { bucket: 99, ..good }, &close[..], "bucket"),
        (Ticket { slot: 99, ..good }, &close, "slot"),
        (Ticket { upload: Some(99), ..good }, &close, "upload"),
        (Ticket { upload: None, ..good }, &close, "upload"),
        (Ticket { hyper: hyper(f64::NAN), ..good }, &close, "lr"),
        (good, &close[..1], "actions"),
        (Ticket { slot: lane.slot, ..big.ticket(0.01, true) }, &close, "slot"),
        (Ticket { upload: Some(lane.upload), ..big.ticket(0.01, true) }, &close, "upload"),
    ] {
        match engine.submit(ticket, actions) {
            Err(Error::InvalidArgument { name: got, .. }) => assert_eq!(got, name),
            other => panic!("{name}: {other:?}"),
        }
    }
    assert_eq!(engine.stats().unwrap().submitted, 0);
    assert!(engine.add_bucket(&[(lane.parameter, 60, 60)]).is_err());
    assert!(engine.set_progress(lane.bucket, &[Progress::default()]).is_err());
}

#[test]
fn a_poisoned_engine_fails_every_later_call() {
    let engine = Engine::new(config(1)).unwrap();
    let lane = Lane::new(&engine, 100);
    engine.poison("the disk is on fire");
    for result in [
        engine.check(),
        engine.poll().map(|_| ()),
        engine.drain(LONG).map(|_| ()),
        engine.wait(LONG).map(|_| ()),
    ] {
        match result {
            Err(Error::Poisoned { cause }) => assert!(cause.contains("fire")),
            other => panic!("{other:?}"),
        }
    }
    assert!(engine.submit(lane.ticket(0.01, true), &[Action::Close; 2]).is_err());
    engine.close().unwrap();
}

#[test]
fn close_finishes_what_was_rung_and_drops_what_was_not() {
    let engine = Engine::new(EngineConfig { delay: Duration::from_millis(2), ..config(1) }).unwrap();
    let (lane, silent) = (Lane::new(&engine, 4096), Lane::new(&engine, 10));
    lane.submit(&engine, 1, 0.01, false);
    assert!(engine.submit(silent.ticket(0.01, false), &[Action::Moments; 2]).unwrap());
    let state = engine.state(lane.parameter).unwrap();
    engine.close().unwrap();
    engine.close().unwrap();
    // SAFETY: the worker has ended.
    let moment = unsafe { std::slice::from_raw_parts(state.moments().exp_avg.cast::<f32>(), 4096) };
    assert!(moment.iter().any(|&m| m != 0.0));
    assert!(matches!(engine.poll(), Err(Error::Closed)));
    assert!(engine.stats().is_ok());
}

#[test]
fn dropping_an_engine_in_mid_work_ends_its_threads() {
    for _ in 0..20 {
        let engine = Engine::new(config(2)).unwrap();
        let lane = Lane::new(&engine, 50_000);
        lane.submit(&engine, 1, 0.01, false);
    }
}
