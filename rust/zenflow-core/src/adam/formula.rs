//! The formula of Adam, sixteen elements at a time, any ISA.
//!
//! With the gradient `g`, the master weight `w`, the moments `m` and `v` and the constants of [`Scalars`]:
//!
//! ```text
//! g <- grad_scale g                              (L2: g <- fma(l2, w, g))
//! m <- fma(g - m, one_minus_beta1, m)
//! v <- fma(fma(g, g, -v), one_minus_beta2, v)
//! d <- fma(sqrt(v), inv_sqrt_bias2, eps)
//! w <- w - fma(m / d, step_size, w decay)        out <- round(w)
//! ```
//!
//! - **Convex form.** `m + (1-b)(g-m)` and not `b m + (1-b) g`: one small factor, rounded once, so the two weights
//!   add up to one exactly. The step and the decay are added together before they meet `w`, which is rounded once.
//! - **Exact division and square root.** The approximate ones (`rsqrt14` and a Newton step) are no faster here: the
//!   pass waits for memory, not for arithmetic, and they would differ between ISAs.

// The essay of `simd` says why.
#![allow(clippy::inline_always)]

use crate::hyper::Scalars;
use crate::simd::Lanes;

/// [`Scalars`], one vector each.
#[derive(Clone, Copy)]
pub(super) struct Formula<V> {
    grad_scale: V,
    one_minus_beta1: V,
    one_minus_beta2: V,
    inv_sqrt_bias2: V,
    eps: V,
    step_size: V,
    decay: V,
    l2: V,
}

/// Every method asks for the ISA of `V`.
impl<V: Lanes> Formula<V> {
    #[inline(always)]
    pub(super) unsafe fn new(s: &Scalars) -> Self {
        // SAFETY: the caller has the ISA.
        unsafe {
            Self {
                grad_scale: V::splat(s.grad_scale),
                one_minus_beta1: V::splat(s.one_minus_beta1),
                one_minus_beta2: V::splat(s.one_minus_beta2),
                inv_sqrt_bias2: V::splat(s.inv_sqrt_bias2),
                eps: V::splat(s.eps),
                step_size: V::splat(s.step_size),
                decay: V::splat(s.decay),
                l2: V::splat(s.l2),
            }
        }
    }

    /// The gradient that counts.
    #[inline(always)]
    pub(super) unsafe fn scaled(&self, g: V) -> V {
        // SAFETY: the caller has the ISA.
        unsafe { g.mul(self.grad_scale) }
    }

    /// The same, with the weight's pull in it.
    #[inline(always)]
    pub(super) unsafe fn pulled(&self, g: V, w: V) -> V {
        // SAFETY: the caller has the ISA.
        unsafe { self.l2.mul_add(w, g) }
    }

    /// The new moments.
    #[inline(always)]
    pub(super) unsafe fn moments(&self, g: V, m: V, v: V) -> (V, V) {
        // SAFETY: the caller has the ISA.
        unsafe {
            (g.sub(m).mul_add(self.one_minus_beta1, m), g.mul_sub(g, v).mul_add(self.one_minus_beta2, v))
        }
    }

    /// The new weight, from the new moments.
    #[inline(always)]
    pub(super) unsafe fn moved(&self, w: V, m: V, v: V) -> V {
        // SAFETY: the caller has the ISA.
        unsafe {
            let d = v.sqrt().mul_add(self.inv_sqrt_bias2, self.eps);
            w.sub(m.div(d).mul_add(self.step_size, w.mul(self.decay)))
        }
    }
}
