//! Nanoseconds an element, and GB/s, of each kernel on this machine: `cargo run --release --example kernel_speed`.
//!
//! Arguments: million elements (64), threads (2), an ISA by name (the best).

use std::time::Instant;

use memmap2::{Advice, MmapMut};
use zenflow_core::accumulate::accumulate_on;
use zenflow_core::adam::{run_jobs, Entry, Job, Span, WeightFormat, DEFAULT_CHUNK};
use zenflow_core::dtype::{Dtype, StateDtype};
use zenflow_core::hyper::{Hyper, Scalars};
use zenflow_core::isa::Isa;
use zenflow_core::norm::stats_on;
use zenflow_core::pool::Pool;

/// Zeroed memory in huge pages, touched by its first write here.
fn memory(bytes: usize) -> MmapMut {
    let mut map = MmapMut::map_anon(bytes.max(1)).expect("memory");
    map.advise(Advice::HugePage).ok();
    map.fill(0);
    map
}

/// The best and the median of nine runs, after one to warm up.
fn time(name: &str, elements: usize, bytes: usize, mut run: impl FnMut()) {
    run();
    let mut seconds: Vec<f64> = (0..9)
        .map(|_| {
            let start = Instant::now();
            run();
            start.elapsed().as_secs_f64()
        })
        .collect();
    seconds.sort_by(f64::total_cmp);
    let (best, median) = (seconds[0], seconds[4]);
    println!(
        "{name:<42} {:.3} ns/element (median {:.3}), {bytes} B an element: {:.1} GB/s",
        best / elements as f64 * 1e9,
        median / elements as f64 * 1e9,
        elements as f64 * bytes as f64 / best * 1e-9
    );
}

fn main() {
    let mut arguments = std::env::args().skip(1);
    let mut number =
        |default| arguments.next().map_or(default, |x| x.parse::<usize>().expect("a whole number"));
    let (len, threads) = (number(64) << 20, number(2));
    let isa = std::env::args()
        .nth(3)
        .map_or_else(Isa::detect, |name| Isa::from_name(&name).expect("an ISA's name"));
    assert!(isa.is_available(), "this machine has no {isa}");
    let pool = Pool::with_threads(threads).expect("threads");
    println!("{len} elements, {threads} threads, {isa}");
    let [mut w, mut m, mut v, mut g] = [(); 4].map(|()| memory(len * 4));
    let mut out = memory(len * 4);
    let mut scales = memory(4 * StateDtype::Int8.scales(len));
    for (i, word) in g.chunks_exact_mut(2).enumerate() {
        word.copy_from_slice(&half::bf16::from_f32(((i * 37 % 101) as f32 - 50.0) * 1e-3).to_ne_bytes());
    }
    let bf16 = WeightFormat::Master(Dtype::Bf16);
    let span = Span {
        master: w.as_mut_ptr(),
        exp_avg: m.as_mut_ptr(),
        exp_avg_sq: v.as_mut_ptr(),
        scales: scales.as_mut_ptr().cast(),
        grad: g.as_mut_ptr(),
        grad_dtype: Dtype::Bf16.into(),
        out: out.as_mut_ptr(),
        weight: bf16,
        len,
        ..Span::default()
    };
    let hyper = Hyper::default();
    let job = |entry, span| Job { span, scalars: Scalars::adamw(&hyper, 10, 1.0), entry };
    // SAFETY: the maps outlive the calls and hold `len` elements of four bytes each.
    let adam = |jobs: &[Job]| unsafe { run_jobs(&pool, isa, jobs, DEFAULT_CHUNK) };
    time("offload pass: bf16 -> master, bf16", len, 28, || adam(&[job(Entry::Move, span)]));
    let many: Vec<Job> = (0..len / 4096).map(|i| job(Entry::Move, span.slice(i * 4096, 4096))).collect();
    time("the same in tensors of 4,096", len, 28, || adam(&many));
    time("moments only, bf16", len, 18, || adam(&[job(Entry::Moments, span)]));
    for (name, state_dtype, moments) in [("bf16", StateDtype::Bf16, 8), ("8-bit", StateDtype::Int8, 4)] {
        let lean = Span { state_dtype, ..span };
        time(&format!("moments only, {name}"), len, 2 + moments, || adam(&[job(Entry::Moments, lean)]));
        time(&format!("offload pass, {name}"), len, 12 + moments, || adam(&[job(Entry::Move, lean)]));
        let split = Span { weight: WeightFormat::Split, ..lean };
        time(&format!("split weight, {name}"), len, 10 + moments, || adam(&[job(Entry::Move, split)]));
    }
    let half = Span { grad_dtype: Dtype::F16.into(), weight: WeightFormat::Master(Dtype::F16), ..span };
    time("offload pass, fp16", len, 28, || adam(&[job(Entry::Move, half)]));
    let plain = Span { grad_dtype: Dtype::F32.into(), out: std::ptr::null_mut(), ..span };
    time("AdamW in place, fp32", len, 28, || adam(&[job(Entry::Move, plain)]));
    // SAFETY: as above.
    unsafe {
        time("norm of bf16", len, 2, || {
            assert!(!stats_on(pool.rayon(), isa, span.grad, Dtype::Bf16, len).non_finite);
        });
        let mut add = |first| {
            accumulate_on(pool.rayon(), isa, out.as_mut_ptr().cast(), span.grad, Dtype::Bf16, len, first);
        };
        time("accumulate bf16, first", len, 6, || add(true));
        time("accumulate bf16, more", len, 10, || add(false));
    }
}
