//! The word by which a device tells the worker that a gradient has arrived.
//!
//! A slot of pinned memory has an 8-byte doorbell. Behind the copies that fill the slot, on the same
//! stream, the device copies one word into it; no driver call and no Python thread is involved. The word
//! also carries what only the device knows at that time, the step's gradient scale and whether the step is
//! void:
//!
//! ```text
//!     bits  0..32   the scale c_t, as the bits of an f32
//!     bits 32..64   the state: 0 silent, 1 rung, 2 the step is void
//! ```
//!
//! On a little-endian host (all that CUDA, `ROCm` and XPU have) these are two 4-byte values one after the
//! other, `f32` then `i32`, so a device writes the word as one copy of 8 bytes from such a pair.
//!
//! What this asks of the device: that the copy lands after those before it on its stream are visible to the
//! host, as every stream promises, and that 8 aligned bytes land in one piece. Copy engines write such a
//! word in a single bus transaction. Should one ever cut it in two, ascending addresses put the scale
//! before the state.

use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU64, Ordering};

use crate::error::{Error, Result};

/// The state "rung": OR it with the scale's 32 bits and you have the word of an ordinary step.
pub const WORD_RUNG: u64 = 1 << 32;

/// The state "void": no byte of any state may change in this step. The scale means nothing.
pub const WORD_VOID: u64 = 2 << 32;

/// What a rung doorbell says.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Ring {
    /// The step's gradient scale `c_t`: clip coefficient times inverse loss scale.
    pub scale: f32,
    /// The step is void: gradients were not finite, nothing is to be updated.
    pub void: bool,
}

/// A doorbell somewhere in memory that others own. A copy is the same doorbell.
#[derive(Clone, Copy, Debug)]
pub struct Doorbell(NonNull<AtomicU64>);

// SAFETY: the only access is through the atomic, from any thread; that it stays alive is the promise of
// `from_addr`'s caller.
unsafe impl Send for Doorbell {}
// SAFETY: as above.
unsafe impl Sync for Doorbell {}

impl Doorbell {
    /// The doorbell at address `addr`, left as it is.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`] if the address is zero or no multiple of 8.
    ///
    /// # Safety
    ///
    /// At `addr` lie 8 bytes of initialised, writable memory that stay valid as long as this doorbell or a
    /// copy of it is used, and that nobody but doorbells and the device touches meanwhile.
    pub unsafe fn from_addr(addr: usize) -> Result<Self> {
        if !addr.is_multiple_of(align_of::<AtomicU64>()) {
            return Err(Error::invalid(
                "doorbell",
                format!("{addr:#x}"),
                "an address that is a multiple of 8",
            ));
        }
        NonNull::new(ptr::with_exposed_provenance_mut(addr))
            .map(Self)
            .ok_or_else(|| Error::invalid("doorbell", "0", "the address of 8 bytes of memory"))
    }

    fn word(&self) -> &AtomicU64 {
        // SAFETY: aligned and not null by the check in `from_addr`, valid and shared only through atomics
        // (or the device's whole-word copies) by its contract.
        unsafe { self.0.as_ref() }
    }

    /// Rings, as the device would; for hosts without one, and for void or late scales. Release: who reads
    /// the ring also reads everything that was written into the slot before.
    pub fn ring(&self, scale: f32, void: bool) {
        let state = if void { WORD_VOID } else { WORD_RUNG };
        self.word().store(state | u64::from(scale.to_bits()), Ordering::Release);
    }

    /// What the doorbell says, or `None` while it is silent. Acquire: the slot's gradients are there once
    /// it answers. For a device's writes that means that no read of the slot is done before this one, and
    /// the bus delivers the device's copies in order. A state that this version doesn't know reads as void,
    /// which changes nothing.
    #[inline]
    #[must_use]
    pub fn read(&self) -> Option<Ring> {
        let word = self.word().load(Ordering::Acquire);
        let state = word & !u64::from(u32::MAX);
        (state != 0).then(|| Ring { scale: f32::from_bits(word as u32), void: state != WORD_RUNG })
    }

    /// Silences the doorbell, before its slot is given out again. Relaxed: the slot's next filling is
    /// ordered behind it by whatever hands the slot over (a ring's Release, a stream's submission).
    pub fn reset(&self) {
        self.word().store(0, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn doorbell(word: &AtomicU64) -> Doorbell {
        let addr = ptr::from_ref(word).expose_provenance();
        // SAFETY: the tests keep the word alive and touch it through atomics only.
        unsafe { Doorbell::from_addr(addr) }.unwrap()
    }

    #[test]
    fn says_what_was_rung() {
        let word = AtomicU64::new(0);
        let bell = doorbell(&word);
        assert_eq!(bell.read(), None);
        for scale in [0.0, -0.0, 1.0, 2.5e-39, f32::MAX, f32::INFINITY] {
            bell.ring(scale, false);
            let ring = bell.read().unwrap();
            assert_eq!((ring.scale.to_bits(), ring.void), (scale.to_bits(), false));
        }
        bell.ring(f32::NAN, true);
        assert!(bell.read().unwrap().void && bell.read().unwrap().scale.is_nan());
        bell.reset();
        assert_eq!((bell.read(), word.load(Ordering::Relaxed)), (None, 0));
    }

    #[test]
    fn the_word_is_a_float_then_an_int() {
        let word = AtomicU64::new(0);
        let bell = doorbell(&word);
        let mut bytes = [0; 8];
        bytes[..4].copy_from_slice(&0.125_f32.to_le_bytes());
        bytes[4..].copy_from_slice(&1_i32.to_le_bytes());
        word.store(u64::from_le_bytes(bytes), Ordering::Relaxed);
        assert_eq!(bell.read(), Some(Ring { scale: 0.125, void: false }));
        bell.ring(0.125, false);
        assert_eq!(word.load(Ordering::Relaxed), WORD_RUNG | u64::from(0.125_f32.to_bits()));
        for state in [2, 3, -1_i32] {
            bytes[4..].copy_from_slice(&state.to_le_bytes());
            word.store(u64::from_le_bytes(bytes), Ordering::Relaxed);
            assert!(bell.read().unwrap().void, "state {state}");
        }
    }

    #[test]
    fn bad_addresses_are_named() {
        for addr in [0, 1, 4, 0x1004] {
            // SAFETY: refused before it is used.
            let error = unsafe { Doorbell::from_addr(addr) }.unwrap_err();
            assert!(error.to_string().starts_with("doorbell is 0"), "{error}");
        }
    }

    /// On x86 the hardware never reorders these, so there only the compiler could; Miri and ARM do.
    #[test]
    fn what_was_written_before_the_ring_is_seen_after_it() {
        use std::sync::atomic::AtomicU32;
        let word = AtomicU64::new(0);
        let bell = doorbell(&word);
        let slot: Vec<AtomicU32> = (0..64).map(|_| AtomicU32::new(0)).collect();
        for round in 1..=if cfg!(miri) { 3 } else { 200 } {
            std::thread::scope(|s| {
                s.spawn(|| {
                    for x in &slot {
                        x.store(round, Ordering::Relaxed);
                    }
                    bell.ring(1.0, false);
                });
                while bell.read().is_none() {
                    std::thread::yield_now();
                }
                assert!(slot.iter().all(|x| x.load(Ordering::Relaxed) == round));
            });
            bell.reset();
        }
    }
}
