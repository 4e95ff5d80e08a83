//! The safe border of the kernel: slices in place of addresses.

use std::ptr;

use half::{bf16, f16};

use super::{update, Entry, Span, WeightFormat};
use crate::dtype::Dtype;
use crate::error::{Error, Result};
use crate::hyper::Scalars;
use crate::isa::Isa;

/// A gradient.
#[derive(Clone, Copy, Debug)]
pub enum Grad<'a> {
    /// In float32.
    F32(&'a [f32]),
    /// In bfloat16.
    Bf16(&'a [bf16]),
    /// In float16.
    F16(&'a [f16]),
}

impl Grad<'_> {
    /// Elements.
    #[must_use]
    pub fn len(&self) -> usize {
        match self {
            Self::F32(x) => x.len(),
            Self::Bf16(x) => x.len(),
            Self::F16(x) => x.len(),
        }
    }

    /// True without elements.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Format.
    #[must_use]
    pub fn dtype(&self) -> Dtype {
        match self {
            Self::F32(_) => Dtype::F32,
            Self::Bf16(_) => Dtype::Bf16,
            Self::F16(_) => Dtype::F16,
        }
    }

    /// Address of the first element.
    #[must_use]
    pub fn as_ptr(&self) -> *const u8 {
        match self {
            Self::F32(x) => x.as_ptr().cast(),
            Self::Bf16(x) => x.as_ptr().cast(),
            Self::F16(x) => x.as_ptr().cast(),
        }
    }
}

/// Where the rounded weight goes.
#[derive(Debug)]
pub enum Out<'a> {
    /// Nowhere.
    None,
    /// A copy of the master.
    F32(&'a mut [f32]),
    /// Rounded to bfloat16.
    Bf16(&'a mut [bf16]),
    /// Rounded to float16.
    F16(&'a mut [f16]),
}

impl Out<'_> {
    /// Address (null for none), format and elements.
    fn parts(self) -> (*mut u8, Dtype, Option<usize>) {
        match self {
            Self::None => (ptr::null_mut(), Dtype::F32, None),
            Self::F32(x) => (x.as_mut_ptr().cast(), Dtype::F32, Some(x.len())),
            Self::Bf16(x) => (x.as_mut_ptr().cast(), Dtype::Bf16, Some(x.len())),
            Self::F16(x) => (x.as_mut_ptr().cast(), Dtype::F16, Some(x.len())),
        }
    }
}

/// Runs one update with float32 moments on the calling thread. In [`Entry::Moments`] `master` may be empty, and `out` isn't touched.
///
/// # Errors
///
/// [`Error::InvalidArgument`] where `isa` isn't available or a slice isn't as long as `grad`; nothing is changed.
#[allow(clippy::too_many_arguments)]
pub fn update_slices(
    isa: Isa,
    entry: Entry,
    scalars: &Scalars,
    master: &mut [f32],
    exp_avg: &mut [f32],
    exp_avg_sq: &mut [f32],
    grad: Grad<'_>,
    out: Out<'_>,
) -> Result<()> {
    if !isa.is_available() {
        return Err(Error::invalid("isa", isa, "an instruction set that this machine has"));
    }
    let len = grad.len();
    let (out, out_dtype, out_len) = out.parts();
    let master_len = if entry == Entry::Moments && master.is_empty() { len } else { master.len() };
    for (name, given) in [
        ("master", master_len),
        ("exp_avg", exp_avg.len()),
        ("exp_avg_sq", exp_avg_sq.len()),
        ("out", out_len.unwrap_or(len)),
    ] {
        if given != len {
            return Err(Error::invalid(
                name,
                format!("{given} elements long"),
                "as many elements as the gradient has",
            ));
        }
    }
    let span = Span {
        master: master.as_mut_ptr().cast(),
        exp_avg: exp_avg.as_mut_ptr().cast(),
        exp_avg_sq: exp_avg_sq.as_mut_ptr().cast(),
        grad: grad.as_ptr(),
        grad_dtype: grad.dtype().into(),
        out,
        weight: WeightFormat::Master(out_dtype),
        len,
        ..Span::default()
    };
    // SAFETY: the ISA and the lengths were checked, and the borrows make the arrays exclusive and distinct.
    unsafe { update(isa, entry, scalars, &span) };
    Ok(())
}
