//! Lean states: what is kept is one of the two neighbours of what the float32 kernel computes, the right one on
//! average, and the same on every ISA, for every cut, at every place in memory.

// Exactness is what is tested.
#![allow(clippy::float_cmp)]

mod support;

use half::bf16;
use proptest::prelude::*;
use support::{any_dtype, any_entry, bits, check, decode, encode, hyper, scalars, Arena, Case, Rng};
use zenflow_core::adam::{update, Entry, GradDtype, Moments, Span, WeightFormat, BLOCK, GRAD_BLOCK};
use zenflow_core::dtype::{Dtype, StateDtype};
use zenflow_core::hyper::{seed, Scalars};
use zenflow_core::isa::Isa;

const LEAN: [StateDtype; 2] = [StateDtype::Bf16, StateDtype::Int8];

/// Moments in some format, in memory of their own.
#[derive(Clone, Debug, PartialEq)]
struct Kept {
    dtype: StateDtype,
    exp_avg: Vec<u8>,
    exp_avg_sq: Vec<u8>,
    scales: Vec<u32>,
}

impl Kept {
    /// The nearest to these numbers.
    fn new(dtype: StateDtype, exp_avg: &[f32], exp_avg_sq: &[f32]) -> Self {
        let bytes = vec![0; exp_avg.len() * dtype.size()];
        let scales = vec![0; dtype.scales(exp_avg.len())];
        let mut kept = Self { dtype, exp_avg: bytes.clone(), exp_avg_sq: bytes, scales };
        // SAFETY: the arrays have room for as many elements, and the scales for their blocks.
        unsafe { kept.moments().write(exp_avg, exp_avg_sq) };
        kept
    }

    fn moments(&mut self) -> Moments {
        Moments {
            exp_avg: self.exp_avg.as_mut_ptr(),
            exp_avg_sq: self.exp_avg_sq.as_mut_ptr(),
            scales: self.scales.as_mut_ptr().cast(),
            dtype: self.dtype,
        }
    }

    fn numbers(&mut self) -> [Vec<f32>; 2] {
        let len = self.exp_avg.len() / self.dtype.size();
        let [mut first, mut second] = [vec![0.0; len], vec![0.0; len]];
        // SAFETY: as above.
        unsafe { self.moments().read(&mut first, &mut second) };
        [first, second]
    }

    /// What the format has on either side of each number, or the number twice: in 8 bits within the scales as they are.
    fn neighbours(&self, numbers: &[Vec<f32>; 2]) -> [Vec<(f32, f32)>; 2] {
        std::array::from_fn(|moment| {
            let at = |(i, &x): (usize, &f32)| match self.dtype {
                StateDtype::F32 => (x, x),
                StateDtype::Bf16 => {
                    let down = f32::from_bits(x.to_bits() & 0xFFFF_0000);
                    let up = f32::from_bits((down.to_bits()).saturating_add(0x1_0000));
                    (down, if down.to_bits() == x.to_bits() { down } else { up })
                }
                StateDtype::Int8 => {
                    let scale = f32::from_bits(self.scales[i / BLOCK * 2 + moment]);
                    let least: f32 = if moment == 0 { 2f32.powi(-15) * 1.125 } else { 2f32.powi(-31) };
                    let y = f64::from(x.abs()) / f64::from(scale);
                    if y < f64::from(least) {
                        let floor = if moment == 0 { 0.0 } else { least * scale };
                        return (floor.copysign(x), (least * scale).copysign(x));
                    }
                    let down = f32::from_bits((y as f32).to_bits() & 0xFFF0_0000);
                    let up = f32::from_bits(down.to_bits() + 0x10_0000);
                    let up = if f64::from(down) == y { down } else { up };
                    ((down * scale).copysign(x), (up * scale).copysign(x))
                }
            };
            numbers[moment].iter().enumerate().map(at).collect()
        })
    }
}

/// One update of lean moments: `case` says all but their format.
#[derive(Clone, Debug)]
struct Lean {
    case: Case,
    kept: Kept,
    split: bool,
}

/// What it leaves.
#[derive(Clone, Debug, PartialEq)]
struct Left {
    kept: Kept,
    weight: Vec<u32>,
    out: Vec<u8>,
}

/// The two halves of weights.
fn split(weights: &[f32]) -> (Vec<u8>, Vec<u8>) {
    let y = |w: &f32| if w.is_nan() { 0x7FC0_8000 } else { w.to_bits().wrapping_add(0x8000) };
    let high = weights.iter().flat_map(|w| ((y(w) >> 16) as u16).to_ne_bytes()).collect();
    (high, weights.iter().flat_map(|w| (y(w) as u16).to_ne_bytes()).collect())
}

fn joined(high: &[u8], low: &[u8]) -> Vec<f32> {
    let half = |bytes: &[u8]| u32::from(u16::from_ne_bytes([bytes[0], bytes[1]]));
    let both = high.chunks_exact(2).zip(low.chunks_exact(2));
    both.map(|(high, low)| f32::from_bits((half(high) << 16 | half(low)).wrapping_sub(0x8000))).collect()
}

impl Lean {
    fn run(&self, isa: Isa, cuts: &[usize]) -> Left {
        let Self { case, kept, split: halves } = self;
        let len = case.grad.len() / case.grad_dtype.size();
        let [a, b, c, d, e] = case.shifts;
        let (high, low) = split(&case.master);
        let out_dtype = case.out_dtype.unwrap_or(Dtype::F32);
        let old_out = vec![0x11u8; case.out_dtype.map_or(0, |dtype| len * dtype.size())];
        let plain = encode(Dtype::F32, &case.master);
        let mut master = Arena::new(if *halves { &low } else { &plain }, a * 4);
        let mut exp_avg = Arena::new(&kept.exp_avg, b);
        let mut exp_avg_sq = Arena::new(&kept.exp_avg_sq, c);
        let scales: Vec<u8> = kept.scales.iter().flat_map(|x| x.to_ne_bytes()).collect();
        let mut scales = Arena::new(&scales, 0);
        let mut grad = Arena::new(&case.grad, d * case.grad_dtype.size());
        let mut out = Arena::new(if *halves { &high } else { &old_out }, e * 2);
        let none = case.out_dtype.is_none() && !halves;
        let span = Span {
            master: master.as_mut_ptr(),
            exp_avg: exp_avg.as_mut_ptr(),
            exp_avg_sq: exp_avg_sq.as_mut_ptr(),
            state_dtype: kept.dtype,
            scales: scales.as_mut_ptr().cast(),
            grad: grad.as_mut_ptr(),
            grad_dtype: case.grad_dtype.into(),
            out: if none { std::ptr::null_mut() } else { out.as_mut_ptr() },
            weight: if *halves { WeightFormat::Split } else { WeightFormat::Master(out_dtype) },
            position: case.seed % 5000 * BLOCK as u64,
            len,
            ..Span::default()
        };
        let grain = if kept.dtype == StateDtype::Int8 { BLOCK } else { 1 };
        let mut cuts: Vec<usize> =
            cuts.iter().map(|cut| cut % (len + 1) / grain * grain).chain([0, len]).collect();
        cuts.sort_unstable();
        for pair in cuts.windows(2) {
            // SAFETY: the arenas hold `len` elements each, are apart and stay here.
            unsafe { update(isa, case.entry, &case.scalars, &span.slice(pair[0], pair[1] - pair[0])) };
        }
        let words = |bytes: &[u8]| {
            bytes.chunks_exact(4).map(|b| u32::from_ne_bytes([b[0], b[1], b[2], b[3]])).collect()
        };
        let weight = if *halves {
            joined(out.content(), master.content())
        } else {
            decode(Dtype::F32, master.content())
        };
        Left {
            kept: Kept {
                dtype: kept.dtype,
                exp_avg: exp_avg.content().to_vec(),
                exp_avg_sq: exp_avg_sq.content().to_vec(),
                scales: words(scales.content()),
            },
            weight: bits(&weight),
            out: out.content().to_vec(),
        }
    }

    /// The same update of float32 moments that start from what is kept.
    fn in_float32(&self) -> support::Outcome {
        let [exp_avg, exp_avg_sq] = self.kept.clone().numbers();
        Case { exp_avg, exp_avg_sq, shifts: [0; 5], ..self.case.clone() }.run(Isa::Portable, &[])
    }
}

/// Any update of up to 5,000 elements with lean moments.
fn any_lean(wild: bool) -> impl Strategy<Value = Lean> {
    let len = prop_oneof![0usize..100, 0usize..5000, Just(BLOCK), Just(4 * BLOCK)];
    let formats =
        (any_dtype(), prop::option::of(any_dtype()), prop::sample::select(&LEAN[..]), any::<bool>());
    let shifts = prop::array::uniform5(prop_oneof![Just(0usize), 0usize..40]);
    (any_entry(), len, formats, shifts, any::<u64>(), 1u64..2000, -1.5f64..1.5).prop_map(
        move |(entry, len, (grad_dtype, out_dtype, dtype, split), shifts, seed, k, grad_scale)| {
            let mut rng = Rng::new(seed);
            let scalars = scalars(&hyper(), entry, k, grad_scale);
            let mut draw = |wild: bool| -> Vec<f32> {
                (0..len).map(|_| if wild { rng.wild() } else { rng.wide() }).collect()
            };
            let (master, exp_avg, grad) = (draw(wild), draw(false), draw(wild));
            let exp_avg_sq: Vec<f32> = draw(false).iter().map(|x| x * x).collect();
            let kept = Kept::new(dtype, &exp_avg, &exp_avg_sq);
            let split = split && entry != Entry::Moments;
            // Only what comes together: see `Span::check`.
            let (grad_dtype, out_dtype) = match (entry, out_dtype) {
                _ if split => (Dtype::Bf16, Some(Dtype::Bf16)),
                (Entry::Moments, _) => (grad_dtype, out_dtype),
                (_, None) => (Dtype::F32, None),
                (Entry::Move, Some(_)) if grad_dtype == Dtype::F32 => (grad_dtype, out_dtype),
                (_, Some(out)) => (out, Some(out)),
            };
            let grad = encode(grad_dtype, &grad);
            let case = Case {
                seed,
                entry,
                scalars,
                grad_dtype,
                out_dtype,
                master,
                exp_avg,
                exp_avg_sq,
                grad,
                shifts,
            };
            Lean { case, kept, split }
        },
    )
}

on_every_isa! {
    /// The same bits as the portable kernel on the whole, wherever it is cut and wherever its arrays lie.
    fn same_bits_from_every_cut(isa: Isa) {
        let inputs = (any_lean(true), prop::collection::vec(any::<usize>(), 0..6));
        check(128, inputs, |(lean, cuts)| {
            let still = Lean { case: Case { shifts: [0; 5], ..lean.case.clone() }, ..lean.clone() };
            let whole = still.run(Isa::Portable, &[]);
            prop_assert_eq!(&lean.run(isa, &cuts), &whole);
            prop_assert_eq!(&still.run(isa, &[]), &whole);
            Ok(())
        });
    }

    /// The weight is the float32 kernel's to the bit; each moment is one of the two nearest to that kernel's.
    fn keeps_what_the_float32_kernel_computes(isa: Isa) {
        check(96, any_lean(false), |lean| {
            let mut left = lean.run(isa, &[]);
            let wide = lean.in_float32();
            prop_assert_eq!(&left.weight, &wide.master);
            if lean.case.entry != Entry::Moments && !lean.split {
                prop_assert_eq!(&left.out, &wide.raw_out);
            }
            let computed = [wide.exp_avg, wide.exp_avg_sq].map(|x| x.into_iter().map(f32::from_bits).collect());
            let between = left.kept.neighbours(&computed);
            for (kept, (computed, between)) in left.kept.numbers().iter().zip(computed.iter().zip(&between)) {
                for (i, (x, (down, up))) in kept.iter().zip(between).enumerate() {
                    prop_assert!(x == down || x == up, "element {i}: kept {x:e} of {:e}: {down:e} or {up:e}", computed[i]);
                }
            }
            Ok(())
        });
    }

    /// The mean of what is kept is what was computed, for any number, over steps and over positions.
    fn rounds_right_on_average(isa: Isa) {
        const STEPS: u64 = 1500;
        let len = 2 * BLOCK;
        let mut rng = Rng::new(7);
        let exp_avg: Vec<f32> = (0..len).map(|_| rng.wide()).collect();
        let exp_avg_sq: Vec<f32> = (0..len).map(|_| rng.wide().powi(2)).collect();
        for dtype in LEAN {
            let mut sums = vec![[0.0f64; 2]; len];
            let mut last = None;
            for k in 1..=STEPS {
                // A gradient of nothing and slow decay: moments that lie between what can be kept.
                let scalars = Scalars {
                    one_minus_beta1: 0.011, one_minus_beta2: 0.003, seed: seed(k), ..Scalars::default()
                };
                let case = Case {
                    seed: 0, entry: Entry::Moments, scalars, grad_dtype: Dtype::F32, out_dtype: None,
                    master: vec![0.0; len], exp_avg: vec![], exp_avg_sq: vec![],
                    grad: encode(Dtype::F32, &vec![0.0; len]), shifts: [0; 5],
                };
                let lean = Lean { case, kept: Kept::new(dtype, &exp_avg, &exp_avg_sq), split: false };
                let mut left = lean.run(isa, &[]);
                let [first, second] = left.kept.numbers();
                for (sum, (m, v)) in sums.iter_mut().zip(first.iter().zip(second)) {
                    sum[0] += f64::from(*m);
                    sum[1] += f64::from(v);
                }
                last = Some((left, lean));
            }
            let (left, lean) = last.unwrap();
            let [first, second] = lean.kept.clone().numbers();
            let computed = [first.iter().map(|m| m - 0.011 * m).collect(), second.iter().map(|v| v - 0.003 * v).collect()];
            let mut deviations = 0.0;
            for moment in 0..2 {
                let (numbers, pairs): (&Vec<f32>, _) = (&computed[moment], &left.kept.neighbours(&computed)[moment]);
                for (i, (x, (down, up))) in numbers.iter().zip(pairs).enumerate() {
                    let step = f64::from((up - down).abs());
                    if f64::from(down.abs()) < step || (down == up && x != down) {
                        continue; // at the floor, zero or not, the mean isn't kept
                    }
                    let mean = sums[i][moment] / STEPS as f64;
                    // Six deviations of a mean of coins that are worth `step`.
                    let allowed = 6.0 * 0.5 * step / (STEPS as f64).sqrt() + 1e-6 * f64::from(x.abs());
                    assert!((mean - f64::from(*x)).abs() <= allowed, "{dtype:?} {moment} {i}: {mean} of {x}, step {step}");
                    deviations += (mean - f64::from(*x)) / (0.5 * step / (STEPS as f64).sqrt()).max(1e-300);
                }
            }
            // And no lean to one side over all positions.
            assert!(deviations.abs() < 6.0 * (2.0 * len as f64).sqrt(), "{dtype:?}: {deviations}");
        }
    }

    /// Dead elements stay dead, living ones are never divided by zero.
    fn floors(isa: Isa) {
        let len = 2 * BLOCK;
        let grad: Vec<f32> = (0..len).map(|i| if i % 2 == 0 || i >= BLOCK { 0.0 } else { 1e-2 }).collect();
        let zero = vec![0.0; len];
        for dtype in LEAN {
            let mut kept = Kept::new(dtype, &zero, &zero);
            let mut master = zero.clone();
            for k in 1..=300 {
                let hyper = zenflow_core::hyper::Hyper { weight_decay: 0.0, ..hyper() };
                let case = Case {
                    seed: 1, entry: Entry::Move, scalars: Scalars::adamw(&hyper, k, 1.0), grad_dtype: Dtype::F32,
                    out_dtype: None, master, exp_avg: vec![], exp_avg_sq: vec![],
                    grad: encode(Dtype::F32, &grad), shifts: [0; 5],
                };
                let left = Lean { case, kept, split: false }.run(isa, &[]);
                master = left.weight.iter().map(|&w| f32::from_bits(w)).collect();
                kept = left.kept;
            }
            let [first, second] = kept.numbers();
            for i in 0..len {
                let living = grad[i] != 0.0;
                assert_eq!(first[i] != 0.0, living, "{dtype:?} {i}");
                assert!(!living || second[i] > 0.0);
                assert_eq!(master[i] != 0.0, living, "{dtype:?} {i}: {}", master[i]);
                assert!(master[i].abs() <= 300.0 * 3e-3 * 1.2);
            }
        }
    }

    /// 8-bit gradients give the bits of the floats that they stand for.
    fn decodes_gradients(isa: Isa) {
        let inputs = (0usize..2000, any::<u64>(), any_dtype(), prop::sample::select(&StateDtype::ALL[..]), any::<bool>(), 0usize..20);
        check(64, inputs, |(len, seed, out_dtype, state_dtype, moves, shift)| {
            let mut rng = Rng::new(seed);
            let codes: Vec<i8> = (0..len).map(|_| (rng.bits() % 255) as i8).collect();
            let grad_scales: Vec<f32> = (0..len.div_ceil(GRAD_BLOCK)).map(|_| rng.wide().abs()).collect();
            let numbers: Vec<f32> = codes.iter().enumerate().map(|(i, &x)| f32::from(x) * grad_scales[i / GRAD_BLOCK]).collect();
            let [master, exp_avg]: [Vec<f32>; 2] = std::array::from_fn(|_| (0..len).map(|_| rng.wide()).collect());
            let exp_avg_sq: Vec<f32> = (0..len).map(|_| rng.wide().powi(2)).collect();
            let (entry, scalars) = if moves {
                (Entry::Move, Scalars::adamw(&hyper(), 5, 0.5))
            } else {
                (Entry::Moments, Scalars::moments(&hyper(), 5, 0.5))
            };
            let run = |grad: &[u8], grad_dtype: GradDtype| {
                let mut kept = Kept::new(state_dtype, &exp_avg, &exp_avg_sq);
                let moments = kept.moments();
                let mut master = master.clone();
                let size = out_dtype.size();
                let mut out = Arena::new(&vec![0; len * size], shift * size);
                let span = Span {
                    master: master.as_mut_ptr().cast(), exp_avg: moments.exp_avg, exp_avg_sq: moments.exp_avg_sq,
                    state_dtype, scales: moments.scales, grad: grad.as_ptr(), grad_dtype, grad_scales: grad_scales.as_ptr(),
                    out: out.as_mut_ptr(), weight: WeightFormat::Master(out_dtype), len, ..Span::default()
                };
                // SAFETY: all arrays hold `len` elements or their scales, are apart and stay here.
                unsafe { update(isa, entry, &scalars, &span) };
                (kept, bits(&master), out.content().to_vec())
            };
            let bytes: Vec<u8> = codes.iter().map(|&x| x as u8).collect();
            let plain = encode(Dtype::F32, &numbers);
            prop_assert!(run(&bytes, GradDtype::Int8) == run(&plain, Dtype::F32.into()));
            Ok(())
        });
    }

    /// What isn't finite stays so: alone in bfloat16, with its block in 8 bits. A NaN weight is split into a NaN.
    fn keeps_what_is_not_finite(isa: Isa) {
        let len = 3 * BLOCK;
        for (dtype, poison) in LEAN.into_iter().flat_map(|d| [f32::NAN, -f32::NAN, f32::INFINITY, 1e30].map(|x| (d, x))) {
            let mut grad = vec![1e-3; len];
            grad[BLOCK + 3] = poison;
            let zero = vec![0.0; len];
            let case = Case {
                seed: 0, entry: Entry::Move, scalars: Scalars::adamw(&hyper(), 1, 1.0), grad_dtype: Dtype::Bf16,
                out_dtype: Some(Dtype::Bf16), master: vec![1.0; len], exp_avg: vec![], exp_avg_sq: vec![],
                grad: encode(Dtype::Bf16, &grad), shifts: [0; 5],
            };
            let mut left = Lean { case, kept: Kept::new(dtype, &zero, &zero), split: true }.run(isa, &[]);
            let [first, second] = left.kept.numbers();
            for i in 0..len {
                let hit = if dtype == StateDtype::Int8 { i / BLOCK == 1 } else { i == BLOCK + 3 };
                assert_eq!(!(first[i].is_finite() && second[i].is_finite()), hit, "{dtype:?} {poison} {i}");
            }
            let shown = decode(Dtype::Bf16, &left.out);
            let weight = f32::from_bits(left.weight[BLOCK + 3]);
            assert_eq!(shown[BLOCK + 3].is_nan(), weight.is_nan());
        }
    }
}

/// Every weight is split into its bfloat16 and what that lacks, and comes back.
#[test]
fn halves_join_to_the_same_weight() {
    let lows = [0u32, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF];
    let weights: Vec<f32> =
        (0..=0xFFFFu32).flat_map(|high| lows.map(|low| f32::from_bits(high << 16 | low))).collect();
    for isa in Isa::available() {
        let len = weights.len();
        let zero = vec![0.0; len];
        let scalars = Scalars { eps: 1.0, ..Scalars::default() };
        let case = Case {
            seed: 0,
            entry: Entry::Move,
            scalars,
            grad_dtype: Dtype::Bf16,
            out_dtype: Some(Dtype::Bf16),
            master: weights.clone(),
            exp_avg: vec![],
            exp_avg_sq: vec![],
            grad: encode(Dtype::Bf16, &zero),
            shifts: [0; 5],
        };
        let left = Lean { case, kept: Kept::new(StateDtype::Bf16, &zero, &zero), split: true }.run(isa, &[]);
        for ((&before, &after), shown) in weights.iter().zip(&left.weight).zip(left.out.chunks_exact(2)) {
            let shown = bf16::from_ne_bytes([shown[0], shown[1]]);
            if !before.is_finite() {
                // Infinity decays to infinity times nothing.
                assert!(f32::from_bits(after).is_nan() && shown.is_nan());
                continue;
            }
            // Adding nothing makes a negative zero positive.
            assert!(f32::from_bits(after) == before, "{before:e} {:e}", f32::from_bits(after));
            // Nearest, and away from zero where it is in the middle.
            let nearest = bf16::from_f32(before);
            let away = bf16::from_bits((before.to_bits().wrapping_add(0x8000) >> 16) as u16);
            let tie = before.to_bits() & 0xFFFF == 0x8000;
            let expected = if tie { away } else { nearest };
            assert!(shown == expected, "{isa} {before:e}: {shown} and not {expected}");
        }
    }
}

/// Every combination that is checked has a kernel, and every other is refused.
#[test]
fn formats_that_do_not_go_together_are_refused() {
    let weights: Vec<_> =
        Dtype::ALL.into_iter().map(WeightFormat::Master).chain([WeightFormat::Split]).collect();
    let grads = Dtype::ALL.into_iter().map(GradDtype::Float).chain([GradDtype::Int8]);
    let mut accepted = 0;
    for grad_dtype in grads {
        for (state_dtype, entry) in StateDtype::ALL
            .into_iter()
            .flat_map(|dtype| [Entry::Moments, Entry::Move, Entry::AdamL2].map(|entry| (dtype, entry)))
        {
            for weight in weights.iter().copied().map(Some).chain([None]) {
                let mut byte = 0u8;
                let span = Span {
                    state_dtype,
                    grad_dtype,
                    weight: weight.unwrap_or(WeightFormat::Master(Dtype::F32)),
                    out: if weight.is_some() { &raw mut byte } else { std::ptr::null_mut() },
                    ..Span::default()
                };
                let checked = span.check(entry);
                // SAFETY: a span of no elements: nothing is touched.
                let run = || unsafe { update(Isa::Portable, entry, &Scalars::default(), &span) };
                let ran = std::panic::catch_unwind(std::panic::AssertUnwindSafe(run));
                assert_eq!(checked.is_ok(), ran.is_ok(), "{entry:?} {span:?}");
                accepted += usize::from(checked.is_ok());
                if let Err(error) = checked {
                    assert!(error.to_string().starts_with("formats is "), "{error}");
                }
            }
        }
    }
    assert!(accepted > 60);
}

/// float32 gives back what came from there, in every format, wherever the scale lies.
#[test]
fn checkpoints_are_exact() {
    check(200, (0usize..1500, any::<u64>(), -40i32..40), |(len, seed, exponent)| {
        let mut rng = Rng::new(seed);
        let exp_avg: Vec<f32> = (0..len).map(|_| rng.wide() * 2f32.powi(exponent)).collect();
        let exp_avg_sq: Vec<f32> = exp_avg.iter().map(|x| x * x * rng.unit().abs()).collect();
        for dtype in StateDtype::ALL {
            let mut once = Kept::new(dtype, &exp_avg, &exp_avg_sq);
            let [first, second] = once.numbers();
            let mut twice = Kept::new(dtype, &first, &second);
            prop_assert_eq!(twice.numbers().map(|x| bits(&x)), [bits(&first), bits(&second)]);
            if dtype == StateDtype::F32 {
                prop_assert_eq!(&first, &exp_avg);
            }
        }
        Ok(())
    });
}
