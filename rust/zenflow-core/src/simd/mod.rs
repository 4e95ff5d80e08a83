//! Sixteen float32 lanes, whatever the machine.
//!
//! A kernel is written once, over [`Lanes`]: a value that stands for 16 float32 on every ISA (one AVX-512 register,
//! two AVX, four NEON, an array). Its operations are IEEE's own, correctly rounded, and a fused multiply-add is
//! fused everywhere, so a kernel that is elementwise gives the same bits on each. (Where a result is NaN it is NaN
//! on each; which of its many bit patterns is up to the hardware.)
//!
//! A kernel is a [`Task`]; [`dispatch`] is the only place where an [`Isa`] becomes code. Behind each arm stands a
//! shell of one line that carries `#[target_feature]`. All between the shell and the intrinsics is
//! `#[inline(always)]`, so that it is compiled with the shell's features: a call left in between would pass vectors
//! through memory and run at a tenth of the speed.

// The essay above says why.
#![allow(clippy::inline_always)]

mod float_mode;
mod format;
mod portable;
mod words;

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "aarch64")]
mod neon;

pub(crate) use float_mode::FloatMode;
pub(crate) use format::{Bf16, Format, Nothing, Target, F16, F32};
pub(crate) use words::Words;

use crate::isa::Isa;

/// Lanes of a vector, on every ISA.
pub(crate) const LANES: usize = 16;

/// How far ahead of its use memory is asked for, in elements. 512 was best of 64 to 4096, into L2 (T1), on machines
/// with and without AVX-512.
pub(crate) const AHEAD: usize = 512;

/// Alignment, in bytes, that streaming stores take: a cache line, so that a line is written whole.
pub(crate) const LINE: usize = 64;

/// Sixteen float32 and what can be done with them.
///
/// # Safety
///
/// Every method needs the ISA it is implemented for, so it may only be called from within [`Task::run`]. Pointers
/// are to 16 elements, aligned to nothing but for `stream` ([`LINE`] for the first of each line, in order).
pub(crate) trait Lanes: Copy {
    /// Sixteen 16-bit numbers.
    type Half: Copy;
    /// Sixteen words, such as these lanes' bits.
    type Words: Words;

    unsafe fn splat(x: f32) -> Self;
    unsafe fn load(from: *const f32) -> Self;
    unsafe fn load_bf16(from: *const u16) -> Self;
    unsafe fn load_f16(from: *const u16) -> Self;
    unsafe fn store(self, to: *mut f32);
    /// Stores past the caches.
    unsafe fn stream(self, to: *mut f32);

    unsafe fn add(self, b: Self) -> Self;
    unsafe fn sub(self, b: Self) -> Self;
    unsafe fn mul(self, b: Self) -> Self;
    unsafe fn div(self, b: Self) -> Self;
    unsafe fn sqrt(self) -> Self;
    /// `self * b + c`, rounded once.
    unsafe fn mul_add(self, b: Self, c: Self) -> Self;
    /// `self * b - c`, rounded once.
    unsafe fn mul_sub(self, b: Self, c: Self) -> Self;

    /// The bits.
    unsafe fn to_words(self) -> Self::Words;
    unsafe fn from_words(bits: Self::Words) -> Self;
    /// The words as signed integers, converted (exactly below 2^24).
    unsafe fn from_i32(words: Self::Words) -> Self;
    /// `words`, with those of `nan` in their place where the lane is NaN.
    unsafe fn where_nan(self, nan: Self::Words, words: Self::Words) -> Self::Words;

    /// Nearest bfloat16, ties to even; NaN becomes 0x7FC0, as in torch. Subnormals are kept (the machine's own
    /// `vcvtneps2bf16` flushes them, hence integer arithmetic).
    unsafe fn to_bf16(self) -> Self::Half;
    /// Nearest float16, ties to even; NaN stays a quiet NaN.
    unsafe fn to_f16(self) -> Self::Half;
    unsafe fn store_half(half: Self::Half, to: *mut u16);
    /// Stores past the caches.
    unsafe fn stream_half(half: Self::Half, to: *mut u16);

    /// Asks for a cache line. The address may be anything: nothing is read.
    unsafe fn prefetch(from: *const u8);
    /// Orders streamed stores before later stores.
    unsafe fn fence();
}

/// A kernel: work that can be compiled for any [`Lanes`].
pub(crate) trait Task {
    /// What it returns.
    type Output;

    /// Does the work. Implementations are `#[inline(always)]`.
    ///
    /// # Safety
    ///
    /// The machine has the ISA of `V`; besides, what the implementor asks for.
    unsafe fn run<V: Lanes>(self) -> Self::Output;
}

/// Runs `task` on `isa`, in the default floating-point mode ([`FloatMode`]).
///
/// # Safety
///
/// `isa` is available on this machine, and the task's own conditions hold.
pub(crate) unsafe fn dispatch<T: Task>(isa: Isa, task: T) -> T::Output {
    debug_assert!(isa.is_available(), "{isa} isn't available here");
    let _mode = FloatMode::ieee();
    // SAFETY: the caller vouches for the ISA and for the task.
    unsafe {
        match isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => avx512::enter(task),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => avx2::enter(task),
            #[cfg(target_arch = "aarch64")]
            Isa::Neon => neon::enter(task),
            _ => portable::enter(task),
        }
    }
}
