//! How a number format is read into lanes and written from them.

use super::Lanes;
use crate::dtype::Dtype;

/// Where a kernel's results go beside its state: a [`Format`], or [`Nothing`].
pub(crate) trait Target {
    /// Bytes of an element; 0 for none.
    const SIZE: usize;

    /// Writes 16 elements.
    ///
    /// # Safety
    ///
    /// As for [`Lanes::store`].
    unsafe fn store<V: Lanes>(x: V, to: *mut u8);

    /// Writes 16 elements past the caches.
    ///
    /// # Safety
    ///
    /// As for [`Lanes::stream`].
    unsafe fn stream<V: Lanes>(x: V, to: *mut u8);
}

/// A format that can also be read.
pub(crate) trait Format: Target {
    /// Its name at run time.
    const DTYPE: Dtype;
    /// True where an element is the upper half of a float32, the rest of it 0.
    const UPPER: bool;

    /// Reads 16 elements, exactly.
    ///
    /// # Safety
    ///
    /// As for [`Lanes::load`].
    unsafe fn load<V: Lanes>(from: *const u8) -> V;
}

/// IEEE binary32.
pub(crate) struct F32;
/// The upper half of a binary32.
pub(crate) struct Bf16;
/// IEEE binary16.
pub(crate) struct F16;
/// No result is wanted.
pub(crate) struct Nothing;

impl Target for Nothing {
    const SIZE: usize = 0;

    #[inline(always)]
    unsafe fn store<V: Lanes>(_: V, _: *mut u8) {}

    #[inline(always)]
    unsafe fn stream<V: Lanes>(_: V, _: *mut u8) {}
}

impl Target for F32 {
    const SIZE: usize = Dtype::F32.size();

    #[inline(always)]
    unsafe fn store<V: Lanes>(x: V, to: *mut u8) {
        // SAFETY: the caller's promise, passed on.
        unsafe { x.store(to.cast()) }
    }

    #[inline(always)]
    unsafe fn stream<V: Lanes>(x: V, to: *mut u8) {
        // SAFETY: the caller's promise, passed on.
        unsafe { x.stream(to.cast()) }
    }
}

impl Format for F32 {
    const DTYPE: Dtype = Dtype::F32;
    const UPPER: bool = false;

    #[inline(always)]
    unsafe fn load<V: Lanes>(from: *const u8) -> V {
        // SAFETY: the caller's promise, passed on.
        unsafe { V::load(from.cast()) }
    }
}

macro_rules! half_format {
    ($name:ident, $round:ident, $load:ident, $upper:literal) => {
        impl Target for $name {
            const SIZE: usize = Dtype::$name.size();

            #[inline(always)]
            unsafe fn store<V: Lanes>(x: V, to: *mut u8) {
                // SAFETY: the caller's promise, passed on.
                unsafe { V::store_half(x.$round(), to.cast()) }
            }

            #[inline(always)]
            unsafe fn stream<V: Lanes>(x: V, to: *mut u8) {
                // SAFETY: the caller's promise, passed on.
                unsafe { V::stream_half(x.$round(), to.cast()) }
            }
        }

        impl Format for $name {
            const DTYPE: Dtype = Dtype::$name;
            const UPPER: bool = $upper;

            #[inline(always)]
            unsafe fn load<V: Lanes>(from: *const u8) -> V {
                // SAFETY: the caller's promise, passed on.
                unsafe { V::$load(from.cast()) }
            }
        }
    };
}

half_format!(Bf16, to_bf16, load_bf16, true);
half_format!(F16, to_f16, load_f16, false);
