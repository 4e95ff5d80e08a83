//! Norms and accumulation against float64, and against themselves: every ISA, cut and pool.

mod support;

use proptest::prelude::*;
use rayon::ThreadPoolBuilder;
use support::{any_dtype, bits, check, decode, encode, Arena, Rng};
use zenflow_core::accumulate::{self, accumulate, accumulate_on};
use zenflow_core::dtype::Dtype;
use zenflow_core::isa::Isa;
use zenflow_core::norm::{self, block_partials, pairwise_sum, stats, stats_on, Stats, BLOCK};

fn numbers(seed: u64, len: usize, wild: bool) -> Vec<f32> {
    let mut rng = Rng::new(seed);
    (0..len).map(|_| if wild { rng.wild() } else { rng.wide() }).collect()
}

fn naive(x: &[f32]) -> Stats {
    Stats {
        sum_of_squares: x.iter().map(|&x| f64::from(x) * f64::from(x)).sum(),
        non_finite: x.iter().any(|x| !x.is_finite()),
    }
}

/// Equal bits, or both NaN.
fn same(a: Stats, b: Stats) -> bool {
    let sums = [a, b].map(|x| if x.sum_of_squares.is_nan() { f64::NAN } else { x.sum_of_squares }.to_bits());
    sums[0] == sums[1] && a.non_finite == b.non_finite
}

fn norm_of(isa: Isa, dtype: Dtype, bytes: &[u8], shift: usize) -> Stats {
    let mut arena = Arena::new(bytes, shift * dtype.size());
    // SAFETY: the arena holds these elements.
    unsafe { stats(isa, arena.as_mut_ptr(), dtype, bytes.len() / dtype.size()) }
}

/// Accumulates `grads` one after the other; the sum, and the last call's answer.
fn sum_of(isa: Isa, dtype: Dtype, grads: &[Vec<u8>], shift: usize) -> (Vec<f32>, Stats) {
    let len = grads[0].len() / dtype.size();
    let mut acc = Arena::new(&vec![0xFF; len * 4], shift * 4);
    let mut last = Stats::default();
    for (i, grad) in grads.iter().enumerate() {
        let mut grad = Arena::new(grad, shift * dtype.size());
        // SAFETY: both arenas hold `len` elements.
        last = unsafe { accumulate(isa, acc.as_mut_ptr().cast(), grad.as_mut_ptr(), dtype, len, i == 0) };
    }
    (decode(Dtype::F32, acc.content()), last)
}

fn any_len() -> impl Strategy<Value = usize> {
    prop_oneof![0usize..200, 0usize..3 * BLOCK]
}

on_every_isa! {
    fn norms_follow_float64(isa: Isa) {
        check(64, (any_dtype(), any_len(), any::<u64>(), 0usize..40), |(dtype, len, seed, shift)| {
            let bytes = encode(dtype, &numbers(seed, len, false));
            let want = naive(&decode(dtype, &bytes));
            let got = norm_of(isa, dtype, &bytes, shift);
            prop_assert!(!got.non_finite);
            // 64 additions a lane: at most 65 roundings, and not all one way.
            prop_assert!((got.sum_of_squares - want.sum_of_squares).abs() <= 1e-6 * want.sum_of_squares);
            Ok(())
        });
    }

    fn sums_follow_float64(isa: Isa) {
        let inputs = (any_dtype(), any_len(), any::<u64>(), 0usize..40, 1usize..4);
        check(64, inputs, |(dtype, len, seed, shift, count)| {
            let grads: Vec<_> = (0..count as u64).map(|i| encode(dtype, &numbers(seed ^ i, len, true))).collect();
            let mut want = decode(dtype, &grads[0]);
            for grad in &grads[1..] {
                for (sum, g) in want.iter_mut().zip(decode(dtype, grad)) {
                    *sum += g;
                }
            }
            let (sum, told) = sum_of(isa, dtype, &grads, shift);
            prop_assert_eq!(bits(&sum), bits(&want));
            // What is told of the sum is what asking afterwards would tell, to the bit.
            prop_assert!(same(told, norm_of(isa, Dtype::F32, &encode(Dtype::F32, &sum), 0)));
            Ok(())
        });
    }

    fn same_bits_as_portable(isa: Isa) {
        let inputs = (any_dtype(), any_len(), any::<u64>(), 0usize..40, any::<bool>());
        check(64, inputs, |(dtype, len, seed, shift, wild)| {
            let bytes = encode(dtype, &numbers(seed, len, wild));
            let (a, b) = (norm_of(isa, dtype, &bytes, shift), norm_of(Isa::Portable, dtype, &bytes, 0));
            prop_assert!(same(a, b), "{:?} {:?}", a, b);
            Ok(())
        });
    }

    /// One bad element is seen wherever it is, in the norm and in the sum.
    fn non_finite_at_every_position(isa: Isa) {
        let len = BLOCK + 77;
        let good = vec![1.0f32; len];
        assert!(!norm_of(isa, Dtype::F32, &encode(Dtype::F32, &good), 0).non_finite);
        let positions = (0..200).chain((200..BLOCK - 20).step_by(97)).chain(BLOCK - 20..len);
        for (at, bad) in positions.zip([f32::NAN, f32::INFINITY, f32::NEG_INFINITY].into_iter().cycle()) {
            let dtype = Dtype::ALL[at % 3];
            let mut x = good.clone();
            x[at] = bad;
            let bytes = encode(dtype, &x);
            let got = norm_of(isa, dtype, &bytes, 0);
            assert!(got.non_finite && !got.sum_of_squares.is_finite(), "{bad} at {at}");
            let told = sum_of(isa, dtype, &[encode(dtype, &good), bytes], 0).1;
            assert!(told.non_finite, "{bad} at {at}");
        }
    }

    /// Squares over float32's range aren't mistaken for infinity, and add up.
    fn huge_values_are_finite(isa: Isa) {
        for (value, len) in [(1e30f32, 3 * BLOCK + 5), (f32::MAX, 100), (-2e19, 64), (3e18, 2 * BLOCK)] {
            for at in [None, Some(0), Some(len - 1)] {
                let x: Vec<f32> = (0..len).map(|i| if at.is_none_or(|at| at == i) { value } else { 1.0 }).collect();
                let (want, got) = (naive(&x), norm_of(isa, Dtype::F32, &encode(Dtype::F32, &x), 0));
                assert!(!got.non_finite, "{value:e}");
                assert!((got.sum_of_squares / want.sum_of_squares - 1.0).abs() < 1e-6, "{value:e}: {got:?}");
            }
        }
        // A sum that overflows is infinite, though its parts aren't.
        let x = encode(Dtype::F32, &[f32::MAX; 33]);
        let (sum, told) = sum_of(isa, Dtype::F32, &[x.clone(), x], 0);
        assert!(told.non_finite && sum.iter().all(|x| x.is_infinite()));
    }
}

/// Cut at blocks and combined, and on any pool, the answer has the same bits.
#[test]
fn same_bits_from_every_cut_and_pool() {
    let isa = Isa::detect();
    for len in [0, 1, BLOCK, BLOCK * 64, BLOCK * 64 + 1, BLOCK * 200 + 1234] {
        let mut bytes = encode(Dtype::Bf16, &numbers(len as u64, len, false));
        let whole = norm_of(isa, Dtype::Bf16, &bytes, 0);
        let (sum, told) = sum_of(isa, Dtype::Bf16, &[bytes.clone(), bytes.clone()], 0);
        for step in [BLOCK, 3 * BLOCK, 64 * BLOCK] {
            let (mut partials, mut sums) = (vec![0.0; len.div_ceil(BLOCK)], vec![0.0; len.div_ceil(BLOCK)]);
            let mut acc = decode(Dtype::Bf16, &bytes);
            for start in (0..len).step_by(step) {
                let count = step.min(len - start);
                let blocks = start / BLOCK..(start + count).div_ceil(BLOCK);
                let grad = bytes[2 * start..].as_ptr();
                // SAFETY: `count` elements follow `start` in each array.
                unsafe {
                    assert!(!block_partials(isa, grad, Dtype::Bf16, count, &mut partials[blocks.clone()]));
                    let (acc, out) = (acc[start..].as_mut_ptr(), &mut sums[blocks]);
                    assert!(!accumulate::block_partials(isa, acc, grad, Dtype::Bf16, count, false, out));
                }
            }
            assert_eq!(pairwise_sum(&partials).to_bits(), whole.sum_of_squares.to_bits());
            assert_eq!(pairwise_sum(&sums).to_bits(), told.sum_of_squares.to_bits());
            assert_eq!(bits(&acc), bits(&sum));
        }
        for threads in [1, 2, 7] {
            let pool = ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            let mut acc = decode(Dtype::Bf16, &bytes);
            // SAFETY: both arrays have `len` elements.
            let (asked, added) = unsafe {
                let grad = bytes.as_ptr();
                (
                    stats_on(&pool, isa, grad, Dtype::Bf16, len),
                    accumulate_on(&pool, isa, acc.as_mut_ptr(), grad, Dtype::Bf16, len, false),
                )
            };
            assert!(same(asked, whole) && same(added, told), "{len} elements, {threads} threads");
            assert_eq!(bits(&acc), bits(&sum));
        }
        if len > 1 {
            bytes[2 * len - 2..].copy_from_slice(&half::bf16::NAN.to_ne_bytes());
            let pool = ThreadPoolBuilder::new().num_threads(2).build().unwrap();
            // SAFETY: as above.
            assert!(unsafe { stats_on(&pool, isa, bytes.as_ptr(), Dtype::Bf16, len) }.non_finite);
        }
    }
}

/// Many gradients in one region: the tree over each one's own sum, wherever the pieces are cut.
#[test]
fn many_gradients_are_the_tree_over_each() {
    let isa = Isa::detect();
    let lens = [0, 1, BLOCK, 0, 63 * BLOCK + 5, 3, 200 * BLOCK + 1234, BLOCK - 1, 0];
    let few = |i: usize| (0..i).map(|i| 1 + 37 * i).collect::<Vec<_>>();
    for lens in [lens.to_vec(), few(300), few(1), vec![0, 0], vec![]] {
        let typed = |(i, &len): (usize, &usize)| {
            let dtype = Dtype::ALL[i % 3];
            (dtype, encode(dtype, &numbers(i as u64, len, false)))
        };
        let mut grads: Vec<_> = lens.iter().enumerate().map(typed).collect();
        let each: Vec<_> = grads.iter().map(|(dtype, bytes)| norm_of(isa, *dtype, bytes, 0)).collect();
        let sums: Vec<_> = each.iter().map(|stats| stats.sum_of_squares).collect();
        let arrays = |grads: &[(Dtype, Vec<u8>)]| {
            let array = |(dtype, bytes): &(Dtype, Vec<u8>)| norm::Array {
                address: bytes.as_ptr(),
                dtype: *dtype,
                len: bytes.len() / dtype.size(),
            };
            grads.iter().map(array).collect::<Vec<_>>()
        };
        for threads in [1, 2, 7] {
            let pool = ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            // SAFETY: the arrays are those of `grads`.
            let all = unsafe { norm::stats_of(&pool, isa, &arrays(&grads)) };
            assert_eq!(
                all.sum_of_squares.to_bits(),
                pairwise_sum(&sums).to_bits(),
                "{lens:?}, {threads} threads"
            );
            assert!(!all.non_finite);
        }
        if let Some((dtype, bytes)) = grads.iter_mut().rfind(|(_, bytes)| !bytes.is_empty()) {
            let at = bytes.len() - dtype.size();
            bytes[at..].copy_from_slice(&encode(*dtype, &[f32::NAN]));
            let pool = ThreadPoolBuilder::new().num_threads(2).build().unwrap();
            // SAFETY: as above.
            assert!(unsafe { norm::stats_of(&pool, isa, &arrays(&grads)) }.non_finite);
        }
    }
}

#[test]
fn pairwise_sum_splits_at_powers_of_two() {
    // 1 swallows half an epsilon, but not two that were added together first: two to the left, one to the right.
    let half = f64::EPSILON / 2.0;
    assert_eq!(pairwise_sum(&[half, half, 1.0]).to_bits(), (1.0 + f64::EPSILON).to_bits());
    assert_eq!(pairwise_sum(&[1.0, half, half]).to_bits(), 1.0f64.to_bits());
    // Four to the left, of which two and two.
    assert_eq!(pairwise_sum(&[1.0, 0.0, half, half, 0.0]).to_bits(), (1.0 + f64::EPSILON).to_bits());
    assert_eq!(pairwise_sum(&[]).to_bits(), 0.0f64.to_bits());
    assert_eq!(norm::pairwise_sum(&[5.0]).to_bits(), 5.0f64.to_bits());
}
