//! From hyper-parameters to the few numbers a kernel multiplies with.
//!
//! Everything here is float64; each [`Scalars`] field is rounded to float32 exactly once, at the end. That, and the
//! convex form in which the kernel uses them (`m += (1-beta1) (g-m)`), is what keeps a thousand steps within 5e-7
//! of float64: a float32 `beta2` of 0.999 would carry a relative error of 1e-5 into `1-beta2`.

use crate::error::{Error, Result};

/// Hyper-parameters of one step, by torch's names.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Hyper {
    /// Learning rate.
    pub lr: f64,
    /// Decay of the first moment, a step.
    pub beta1: f64,
    /// Decay of the second moment, a step.
    pub beta2: f64,
    /// Added to the denominator.
    pub eps: f64,
    /// Decoupled weight decay ([`Scalars::adamw`]) or the L2 factor ([`Scalars::adam_l2`]).
    pub weight_decay: f64,
}

impl Default for Hyper {
    /// torch's defaults for `AdamW`.
    fn default() -> Self {
        Self { lr: 1e-3, beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 1e-2 }
    }
}

impl Hyper {
    /// Refuses what makes no sense.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`] names the argument, its value and what it takes.
    pub fn validate(&self) -> Result<()> {
        for (name, value) in [("lr", self.lr), ("eps", self.eps), ("weight_decay", self.weight_decay)] {
            if !(value.is_finite() && value >= 0.0) {
                return Err(Error::invalid(name, value, "a finite number, zero or more"));
            }
        }
        for (name, value) in [("beta1", self.beta1), ("beta2", self.beta2)] {
            if !(0.0..1.0).contains(&value) {
                return Err(Error::invalid(name, value, "a number from 0 up to, but not including, 1"));
            }
        }
        Ok(())
    }
}

/// `beta` to the power of `k`, by repeated squaring: only multiplications, so every platform gets the same bits
/// (`powi` and `powf` are allowed to differ).
#[must_use]
pub fn power(beta: f64, mut k: u64) -> f64 {
    let (mut result, mut square) = (1.0, beta);
    while k > 0 {
        if k & 1 == 1 {
            result *= square;
        }
        square *= square;
        k >>= 1;
    }
    result
}

/// The seed of stochastic rounding in update `k`: `SplitMix64` (Steele, Lea and Flood 2014).
#[must_use]
pub fn seed(k: u64) -> u32 {
    let mut x = k.wrapping_add(0x9E37_79B9_7F4A_7C15);
    x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    (x ^ (x >> 31)) as u32
}

/// What a weight still has to move since it last did: `w <- (1 - decay) w - lr_sum u`.
///
/// The default, nothing, is what a close leaves behind.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Pending {
    /// Sum of the learning rates of the steps pending (L in the design).
    pub lr_sum: f64,
    /// One minus the product of their `1 - lr weight_decay` (1 - P in the design). Kept as the complement, so that
    /// one step pending is exactly `lr weight_decay`, and a close after one step is `AdamW` to the bit.
    pub decay: f64,
}

impl Pending {
    /// Adds one step.
    pub fn advance(&mut self, lr: f64, weight_decay: f64) {
        self.lr_sum += lr;
        self.decay += lr * weight_decay * (1.0 - self.decay);
    }
}

/// The kernel's constants, each rounded once from float64. Negating `grad_scale` maximizes.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Scalars {
    /// Factor of the gradient: clip coefficient times inverse loss scale.
    pub grad_scale: f32,
    /// `1 - beta1`.
    pub one_minus_beta1: f32,
    /// `1 - beta2`.
    pub one_minus_beta2: f32,
    /// `1 / sqrt(1 - beta2^k)`.
    pub inv_sqrt_bias2: f32,
    /// `eps`.
    pub eps: f32,
    /// `lr_sum / (1 - beta1^k)`.
    pub step_size: f32,
    /// The share of the weight that decays away.
    pub decay: f32,
    /// Factor of the weight in the gradient; only [`Entry::AdamL2`](crate::adam::Entry::AdamL2) reads it.
    pub l2: f32,
    /// Seed of stochastic rounding; the same for every parameter at its update `k`.
    pub seed: u32,
}

impl Scalars {
    /// For the `k`-th update of the moments (from 1) and no move.
    #[must_use]
    pub fn moments(hyper: &Hyper, k: u64, grad_scale: f64) -> Self {
        Self {
            seed: seed(k),
            grad_scale: grad_scale as f32,
            one_minus_beta1: (1.0 - hyper.beta1) as f32,
            one_minus_beta2: (1.0 - hyper.beta2) as f32,
            ..Self::default()
        }
    }

    /// For the `k`-th update of the moments (from 1) and a move by all that is `pending`, this step included.
    #[must_use]
    pub fn close(hyper: &Hyper, k: u64, pending: Pending, grad_scale: f64) -> Self {
        debug_assert!(k > 0, "the first update of the moments is number 1");
        Self {
            inv_sqrt_bias2: (1.0 / (1.0 - power(hyper.beta2, k)).sqrt()) as f32,
            eps: hyper.eps as f32,
            step_size: (pending.lr_sum / (1.0 - power(hyper.beta1, k))) as f32,
            decay: pending.decay as f32,
            ..Self::moments(hyper, k, grad_scale)
        }
    }

    /// For step `k` (from 1) of `AdamW`: a close with this one step pending.
    #[must_use]
    pub fn adamw(hyper: &Hyper, k: u64, grad_scale: f64) -> Self {
        let mut pending = Pending::default();
        pending.advance(hyper.lr, hyper.weight_decay);
        Self::close(hyper, k, pending, grad_scale)
    }

    /// For step `k` (from 1) of Adam with L2 regularisation: nothing decays, `weight_decay` times the weight joins
    /// the gradient (after the scale, whose sign `maximize` flips, as in torch).
    #[must_use]
    pub fn adam_l2(hyper: &Hyper, k: u64, grad_scale: f64) -> Self {
        let plain = Hyper { weight_decay: 0.0, ..*hyper };
        Self { l2: hyper.weight_decay as f32, ..Self::adamw(&plain, k, grad_scale) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn power_is_the_product() {
        assert_eq!(power(0.999, 0).to_bits(), 1.0f64.to_bits());
        assert_eq!(power(0.999, 1).to_bits(), 0.999f64.to_bits());
        let mut product = 1.0;
        for k in 1..=3000 {
            product *= 0.999;
            assert!((power(0.999, k) / product - 1.0).abs() < 1e-12, "k = {k}");
        }
        assert_eq!(power(0.0, 5).to_bits(), 0.0f64.to_bits());
        assert_eq!(power(0.9, u64::MAX).to_bits(), 0.0f64.to_bits());
    }

    #[test]
    fn one_step_pending_is_adamw() {
        let hyper = Hyper { lr: 3.7e-4, weight_decay: 0.13, ..Hyper::default() };
        let mut pending = Pending::default();
        pending.advance(hyper.lr, hyper.weight_decay);
        assert_eq!(pending.decay.to_bits(), (hyper.lr * hyper.weight_decay).to_bits());
        assert_eq!(Scalars::close(&hyper, 7, pending, 0.5), Scalars::adamw(&hyper, 7, 0.5));
        assert_eq!(Scalars::adamw(&hyper, 7, 0.5).decay.to_bits(), ((3.7e-4 * 0.13) as f32).to_bits());
    }

    #[test]
    fn pending_steps_compound() {
        let mut pending = Pending::default();
        for lr in [0.1, 0.2, 0.4] {
            pending.advance(lr, 0.5);
        }
        assert!((pending.lr_sum - 0.7).abs() < 1e-15);
        assert!((pending.decay - (1.0 - 0.95 * 0.9 * 0.8)).abs() < 1e-15);
    }

    #[test]
    fn refusals_name_the_argument() {
        let good = Hyper::default();
        assert!(good.validate().is_ok());
        assert!(Hyper { lr: 0.0, beta1: 0.0, beta2: 0.0, eps: 0.0, weight_decay: 0.0 }.validate().is_ok());
        let bad = [
            ("lr", Hyper { lr: -1.0, ..good }),
            ("lr", Hyper { lr: f64::INFINITY, ..good }),
            ("beta1", Hyper { beta1: 1.0, ..good }),
            ("beta2", Hyper { beta2: f64::NAN, ..good }),
            ("eps", Hyper { eps: -1e-8, ..good }),
            ("weight_decay", Hyper { weight_decay: f64::NAN, ..good }),
        ];
        for (name, hyper) in bad {
            let message = hyper.validate().expect_err(name).to_string();
            assert!(message.starts_with(&format!("{name} is ")), "{message}");
        }
    }
}
