//! The Adam kernel against a float64 oracle and against itself: every ISA, every cut, every place in memory.

mod support;

use half::{bf16, f16};
use proptest::prelude::*;
use support::{any_case, bits, check, decode, encode, hyper, scalars, Case, Rng};
use zenflow_core::adam::{run_jobs, update, update_slices, Entry, Grad, Job, Out, Span, WeightFormat};
use zenflow_core::dtype::Dtype;
use zenflow_core::hyper::{power, Hyper, Pending, Scalars};
use zenflow_core::isa::Isa;
use zenflow_core::pool::Pool;

/// Half a unit in the last place, relative: what one rounding may add.
const ROUNDING: f64 = 1.0 / (1u64 << 24) as f64;

/// One element of textbook Adam in float64: new weight and moments. `k` counts from 1.
fn naive(hyper: &Hyper, entry: Entry, k: u64, scale: f64, [w, m, v, g]: [f64; 4]) -> [f64; 3] {
    let Hyper { lr, beta1, beta2, eps, weight_decay } = *hyper;
    let g = scale * g + if entry == Entry::AdamL2 { weight_decay * w } else { 0.0 };
    let m = beta1 * m + (1.0 - beta1) * g;
    let v = beta2 * v + (1.0 - beta2) * g * g;
    let (m_hat, v_hat) = (m / (1.0 - beta1.powi(k as i32)), v / (1.0 - beta2.powi(k as i32)));
    let decayed = if entry == Entry::Move { (1.0 - lr * weight_decay) * w } else { w };
    let moved = if entry == Entry::Moments { w } else { decayed - lr * m_hat / (v_hat.sqrt() + eps) };
    [moved, m, v]
}

on_every_isa! {
    /// Within a few roundings of float64, each told in roundings of the terms that meet.
    fn follows_the_textbook(isa: Isa) {
        let inputs = (any_case(false), 1u64..2000, 0.1f64..2.0);
        check(48, inputs, |(mut case, k, scale)| {
            let hyper = hyper();
            case.scalars = scalars(&hyper, case.entry, k, scale);
            let grad = decode(case.grad_dtype, &case.grad);
            let got = case.run(isa, &[]);
            for (i, &g) in grad.iter().enumerate() {
                let start = [case.master[i], case.exp_avg[i], case.exp_avg_sq[i], g].map(f64::from);
                let [w, m, v] = naive(&hyper, case.entry, k, scale, start);
                let at = |x: &[u32]| f64::from(f32::from_bits(x[i]));
                let [w0, m0, v0, g] = start;
                let l2 = if case.entry == Entry::AdamL2 { hyper.weight_decay * w0.abs() } else { 0.0 };
                let g = (scale * g).abs() + l2;
                let budget_m = 4.0 * ROUNDING * (m0.abs() + g);
                let budget_v = 4.0 * ROUNDING * (v0 + 2.0 * g * g);
                prop_assert!((at(&got.exp_avg) - m).abs() <= budget_m, "exp_avg[{i}]: {} {m}", at(&got.exp_avg));
                prop_assert!((at(&got.exp_avg_sq) - v).abs() <= budget_v, "exp_avg_sq[{i}]");
                let bias = (1.0 - power(hyper.beta2, k)).sqrt();
                let step = hyper.lr / (1.0 - power(hyper.beta1, k));
                let motion = step * (m0.abs() + g) / (v.sqrt() / bias + hyper.eps) + hyper.lr * w0.abs();
                // Where gradient and decay cancel, what is left of v is uncertain, and the motion with it.
                let budget_w = ROUNDING * w.abs() + motion * (12.0 * ROUNDING + budget_v / v);
                prop_assert!((at(&got.master) - w).abs() <= budget_w, "master[{i}]: {} {w}", at(&got.master));
            }
            Ok(())
        });
    }

    /// The same bits as the portable kernel on the whole, wherever it is cut and wherever its arrays lie.
    fn same_bits_from_every_cut(isa: Isa) {
        let inputs = (any_case(true), prop::collection::vec(any::<usize>(), 0..6), any::<[u8; 5]>());
        check(96, inputs, |(case, cuts, shifts)| {
            let whole = Case { shifts: [0; 5], ..case.clone() }.run(Isa::Portable, &[]);
            prop_assert_eq!(&case.run(isa, &[]), &whole);
            let moved = Case { shifts: shifts.map(|x| usize::from(x % 48)), ..case };
            prop_assert_eq!(&moved.run(isa, &cuts), &whole);
            Ok(())
        });
    }

    /// What `Moments` leaves of the moments is what `Move` leaves, and it touches nothing else.
    fn moments_alone_are_the_same(isa: Isa) {
        check(48, any_case(true), |case| {
            let moving = Case { entry: Entry::Move, scalars: Scalars::adamw(&hyper(), 9, 0.7), ..case.clone() };
            let still = Case { entry: Entry::Moments, scalars: Scalars::moments(&hyper(), 9, 0.7), ..case };
            let (moving, still_out) = (moving.run(isa, &[]), still.run(isa, &[]));
            prop_assert_eq!(&moving.exp_avg, &still_out.exp_avg);
            prop_assert_eq!(&moving.exp_avg_sq, &still_out.exp_avg_sq);
            prop_assert_eq!(&still_out.master, &bits(&still.master));
            prop_assert!(still_out.raw_out.iter().all(|&byte| byte == 0x11));
            Ok(())
        });
    }

    /// Every float32 pattern that can round in its own way rounds as torch rounds it.
    fn rounds_to_nearest_even(isa: Isa) {
        let lows = [0u32, 1, 0x0FFF, 0x1000, 0x1001, 0x2FFF, 0x3000, 0x7FFF, 0x8000, 0x8001, 0xFFFF];
        let patterns = (0..=0xFFFFu32).flat_map(|high| lows.map(|low| high << 16 | low)).chain((0..0xFFFF).map(|i| i * 65_521));
        let weights: Vec<f32> = patterns.map(f32::from_bits).collect();
        // A step of nothing, and a decay of -1: the weight stays, or doubles (up to infinity).
        for decay in [0.0, -1.0] {
            let scalars = Scalars { decay, eps: 1.0, ..Scalars::default() };
            for dtype in Dtype::ALL {
                let zero = vec![0.0; weights.len()];
                let got = Case {
                    seed: 0,
                    entry: Entry::Move, scalars, grad_dtype: Dtype::F32, out_dtype: Some(dtype), master: weights.clone(),
                    exp_avg: zero.clone(), exp_avg_sq: zero.clone(), grad: encode(Dtype::F32, &zero), shifts: [0; 5],
                }.run(isa, &[]);
                for (i, &before) in weights.iter().enumerate() {
                    let w = f32::from_bits(got.master[i]);
                    if !before.is_nan() && (decay != 0.0 || before.is_finite()) {
                        let kept = if decay == 0.0 { before } else { before + before };
                        assert!(w.to_bits() == kept.to_bits(), "{before:e} became {w:e}");
                    }
                    let size = dtype.size();
                    let raw = &got.raw_out[i * size..(i + 1) * size];
                    match dtype {
                        Dtype::F32 => assert!(got.out[i] == got.master[i], "{w:e}"),
                        Dtype::Bf16 if w.is_nan() => assert_eq!(raw, 0x7FC0u16.to_ne_bytes()),
                        Dtype::Bf16 => assert_eq!(raw, bf16::from_f32(w).to_ne_bytes(), "{w:e}"),
                        Dtype::F16 if w.is_nan() => {
                            let half = u16::from_ne_bytes([raw[0], raw[1]]);
                            assert_eq!(half & 0x7E00, 0x7E00, "not a quiet NaN: {half:x}");
                        }
                        Dtype::F16 => assert_eq!(raw, f16::from_f32(w).to_ne_bytes(), "{w:e}"),
                    }
                }
            }
        }
    }

    /// The caller's floating-point mode changes nothing, and is left as it was.
    #[cfg(target_arch = "x86_64")]
    fn flushing_callers_get_the_same_bits(isa: Isa) {
        use std::arch::asm;
        let tiny: Vec<f32> = (0..1000u32).map(|i| f32::from_bits(i * 7919 % 0x0080_0000)).collect();
        let case = |master: &mut [f32], m: &mut [f32], v: &mut [f32], out: &mut [bf16]| {
            let scalars = Scalars::adamw(&hyper(), 3, 0.9);
            update_slices(isa, Entry::Move, &scalars, master, m, v, Grad::F32(&tiny), Out::Bf16(out))
        };
        let start = || (tiny.clone(), tiny.clone(), tiny.clone(), vec![bf16::ZERO; tiny.len()]);
        let (mut plain, mut flushed) = (start(), start());
        case(&mut plain.0, &mut plain.1, &mut plain.2, &mut plain.3).unwrap();
        let (default, flush, mut after) = (0x1F80u32, 0x9FC0u32, 0u32);
        // SAFETY: only the kernel runs between the two, and the default mode is put back.
        unsafe { asm!("ldmxcsr [{}]", in(reg) &raw const flush) };
        let result = case(&mut flushed.0, &mut flushed.1, &mut flushed.2, &mut flushed.3);
        // SAFETY: as above.
        unsafe { asm!("stmxcsr [{}]", "ldmxcsr [{}]", in(reg) &raw mut after, in(reg) &raw const default) };
        result.unwrap();
        assert_eq!(after & 0xFFC0, flush & 0xFFC0);
        assert_eq!(plain, flushed);
        assert!(plain.1.iter().any(|m| m.is_subnormal()));
    }

    /// A thousand steps stay within 1e-6 of float64, of the way the weights went.
    fn a_thousand_steps_stay_true(isa: Isa) {
        let len = if isa == Isa::Portable { 256 } else { 4096 };
        let mut rng = Rng::new(5);
        let hyper = Hyper { lr: 1e-3, weight_decay: 0.01, ..Hyper::default() };
        let start: Vec<f32> = (0..len).map(|_| 0.02 * rng.unit()).collect();
        let drift: Vec<f32> = (0..len).map(|_| 0.01 * rng.unit()).collect();
        let (mut w, mut m, mut v) = (start.clone(), vec![0.0f32; len], vec![0.0f32; len]);
        let mut oracle: Vec<[f64; 3]> = start.iter().map(|&w| [f64::from(w), 0.0, 0.0]).collect();
        for k in 1..=1000 {
            let grad: Vec<bf16> = drift.iter().map(|&d| bf16::from_f32(d + 0.01 * rng.unit())).collect();
            let scalars = Scalars::adamw(&hyper, k, 1.0);
            update_slices(isa, Entry::Move, &scalars, &mut w, &mut m, &mut v, Grad::Bf16(&grad), Out::None).unwrap();
            for (state, g) in oracle.iter_mut().zip(&grad) {
                let [w, m, v] = *state;
                *state = naive(&hyper, Entry::Move, k, 1.0, [w, m, v, g.to_f64()]);
            }
        }
        let norm = |x: &mut dyn Iterator<Item = f64>| x.map(|x| x * x).sum::<f64>().sqrt();
        let error = norm(&mut w.iter().zip(&oracle).map(|(&w, o)| f64::from(w) - o[0]));
        let way = norm(&mut start.iter().zip(&oracle).map(|(&w, o)| f64::from(w) - o[0]));
        println!("{isa}: {:.2e} of the way", error / way);
        assert!(error / way < 1e-6, "{:e}", error / way);
    }
}

/// The formula as `adam/kernel.rs` states it, one float at a time, to the bit: what is fused and what isn't is part of
/// the promise, since a checkpoint made by one version must go on the same under the next.
#[test]
fn the_formula_is_pinned() {
    check(48, any_case(false), |case| {
        let (s, got) = (case.scalars, case.run(Isa::detect(), &[]));
        for (i, g) in decode(case.grad_dtype, &case.grad).into_iter().enumerate() {
            let (w, m, v) = (case.master[i], case.exp_avg[i], case.exp_avg_sq[i]);
            let mut g = s.grad_scale * g;
            if case.entry == Entry::AdamL2 {
                g = s.l2.mul_add(w, g);
            }
            let m = (g - m).mul_add(s.one_minus_beta1, m);
            let v = g.mul_add(g, -v).mul_add(s.one_minus_beta2, v);
            let d = v.sqrt().mul_add(s.inv_sqrt_bias2, s.eps);
            let moved = w - (m / d).mul_add(s.step_size, w * s.decay);
            let w = if case.entry == Entry::Moments { w } else { moved };
            let want = [w, m, v].map(f32::to_bits);
            prop_assert_eq!([got.master[i], got.exp_avg[i], got.exp_avg_sq[i]], want, "element {}", i);
        }
        Ok(())
    });
}

/// One step pending is `AdamW`, to the bit; several are one move by their sum.
#[test]
fn a_close_after_one_step_is_adamw() {
    check(64, (any_case(false), 1u64..500, 1e-6f64..0.1, 0.0f64..0.5), |(mut case, k, lr, weight_decay)| {
        case.entry = Entry::Move;
        let hyper = Hyper { lr, weight_decay, ..hyper() };
        let mut pending = Pending::default();
        pending.advance(lr, weight_decay);
        case.scalars = Scalars::close(&hyper, k, pending, 0.3);
        let close = case.run(Isa::detect(), &[]);
        case.scalars = Scalars::adamw(&hyper, k, 0.3);
        prop_assert_eq!(close, case.run(Isa::detect(), &[]));
        Ok(())
    });
}

/// A window: the moments of each step, then w <- P w - L m/(sqrt v + eps), against float64.
#[test]
fn a_close_moves_by_all_that_is_pending() {
    let (rates, mut rng) = ([1e-3, 2e-3, 5e-4, 4e-3], Rng::new(11));
    let len = 1000;
    let start: Vec<f32> = (0..len).map(|_| rng.wide()).collect();
    let (mut w, mut m, mut v) = (start.clone(), vec![0.0f32; len], vec![0.0f32; len]);
    let mut oracle = vec![[0.0f64; 2]; len];
    let (mut pending, mut l, mut p) = (Pending::default(), 0.0, 1.0);
    for (k, &lr) in (1..).zip(&rates) {
        let hyper = Hyper { lr, ..hyper() };
        let grad: Vec<f32> = (0..len).map(|_| rng.wide()).collect();
        pending.advance(lr, hyper.weight_decay);
        (l, p) = (l + lr, p * (1.0 - lr * hyper.weight_decay));
        let last = k == rates.len() as u64;
        let (entry, scalars) = if last {
            (Entry::Move, Scalars::close(&hyper, k, pending, 1.0))
        } else {
            (Entry::Moments, Scalars::moments(&hyper, k, 1.0))
        };
        let master: &mut [f32] = if last { &mut w } else { &mut [] };
        update_slices(Isa::detect(), entry, &scalars, master, &mut m, &mut v, Grad::F32(&grad), Out::None)
            .unwrap();
        for (state, &g) in oracle.iter_mut().zip(&grad) {
            let [_, m, v] = naive(&hyper, Entry::Moments, k, 1.0, [0.0, state[0], state[1], f64::from(g)]);
            *state = [m, v];
        }
    }
    let (hyper, k) = (hyper(), rates.len() as i32);
    for (i, [m, v]) in oracle.into_iter().enumerate() {
        let (m, v) = (m / (1.0 - hyper.beta1.powi(k)), v / (1.0 - hyper.beta2.powi(k)));
        let want = p * f64::from(start[i]) - l * m / (v.sqrt() + hyper.eps);
        assert!((f64::from(w[i]) - want).abs() <= 2.0 * ROUNDING * want.abs() + 1e-8, "{i}: {} {want}", w[i]);
    }
}

/// `maximize` is a negative scale.
#[test]
fn maximizing_is_minimizing_the_opposite() {
    check(32, any_case(false), |case| {
        let opposite: Vec<f32> = decode(case.grad_dtype, &case.grad).into_iter().map(|g| -g).collect();
        let scalars = Scalars { grad_scale: -case.scalars.grad_scale, ..case.scalars };
        let flipped = Case { grad: encode(case.grad_dtype, &opposite), scalars, ..case.clone() };
        prop_assert_eq!(case.run(Isa::detect(), &[]), flipped.run(Isa::detect(), &[]));
        Ok(())
    });
}

/// Jobs of all sizes on pools of 1, 2 and 7 threads, in pieces of all sizes, leave what one thread leaves.
#[test]
fn jobs_give_the_same_bits_on_any_pool() {
    let lens = [0, 1, 17, 4096, 100_003, 0, 5, 1024, 4096, 33_000, 3];
    let total: usize = lens.iter().sum();
    let mut rng = Rng::new(3);
    let start: Vec<f32> = (0..total).map(|_| rng.wide()).collect();
    let squares: Vec<f32> = start.iter().map(|x| x * x).collect();
    let grad: Vec<bf16> = (0..total).map(|_| bf16::from_f32(rng.wide())).collect();
    let run = |go: &dyn Fn(&[Job])| {
        let (mut w, mut m, mut v) = (start.clone(), start.clone(), squares.clone());
        let mut out = vec![bf16::ZERO; total];
        let span = Span {
            master: w.as_mut_ptr().cast(),
            exp_avg: m.as_mut_ptr().cast(),
            exp_avg_sq: v.as_mut_ptr().cast(),
            grad: grad.as_ptr().cast(),
            grad_dtype: Dtype::Bf16.into(),
            out: out.as_mut_ptr().cast(),
            weight: WeightFormat::Master(Dtype::Bf16),
            len: total,
            ..Span::default()
        };
        let mut at = 0;
        let jobs: Vec<Job> = (1..)
            .zip(lens)
            .map(|(k, len)| {
                at += len;
                let entry = if k % 3 == 0 { Entry::Moments } else { Entry::Move };
                Job { span: span.slice(at - len, len), scalars: Scalars::adamw(&hyper(), k, 1.0), entry }
            })
            .collect();
        go(&jobs);
        (w, m, v, out)
    };
    let alone = run(&|jobs| {
        for job in jobs {
            // SAFETY: the arrays in `run` outlive the call and are apart.
            unsafe { update(Isa::detect(), job.entry, &job.scalars, &job.span) };
        }
    });
    assert_ne!(alone.0, start);
    for threads in [1, 2, 7] {
        let pool = Pool::with_threads(threads).unwrap();
        for chunk in [0, 5000, 1 << 18] {
            // SAFETY: as above, and the jobs are apart.
            let got = run(&|jobs| unsafe { run_jobs(&pool, Isa::detect(), jobs, chunk) });
            assert!(got == alone, "{threads} threads, pieces of {chunk}");
        }
    }
}

#[test]
fn slices_of_other_lengths_are_refused() {
    let scalars = Scalars::adamw(&hyper(), 1, 1.0);
    let call = |w: usize, m: usize, v: usize, out: usize| {
        let (mut w, mut m, mut v) = (vec![0.0; w], vec![0.0; m], vec![0.0; v]);
        let (grad, mut out) = ([0.0; 4], vec![f16::ZERO; out]);
        let out = Out::F16(&mut out);
        update_slices(Isa::detect(), Entry::Move, &scalars, &mut w, &mut m, &mut v, Grad::F32(&grad), out)
            .map_err(|error| error.to_string())
    };
    assert_eq!(call(4, 4, 4, 4), Ok(()));
    for (name, result) in [
        ("master", call(0, 4, 4, 4)),
        ("exp_avg", call(4, 5, 4, 4)),
        ("exp_avg_sq", call(4, 4, 3, 4)),
        ("out", call(4, 4, 4, 9)),
    ] {
        let message = result.unwrap_err();
        assert!(message.starts_with(&format!("{name} is ")), "{message}");
    }
    if let Some(missing) = Isa::ALL.into_iter().find(|isa| !isa.is_available()) {
        let refused = update_slices(
            missing,
            Entry::Move,
            &scalars,
            &mut [],
            &mut [],
            &mut [],
            Grad::F32(&[]),
            Out::None,
        );
        assert!(refused.unwrap_err().to_string().starts_with("isa is "));
    }
}
