//! Every kernel computes in IEEE's default mode: nearest, ties to even, subnormals kept.
//!
//! That mode is a register of the thread, and others set it: a library linked with `-ffast-math` turns subnormals
//! off for the thread that loads it, `torch.set_flush_denormal(True)` for the one that asks, and a new thread inherits
//! its creator's. The same step on another thread would then give other bits. So a kernel sets the mode it is
//! specified for and puts back what it found; both take a few cycles, once a chunk.

/// The caller's mode, put back when dropped.
pub(crate) struct FloatMode {
    #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
    found: Control,
}

#[cfg(target_arch = "x86_64")]
type Control = u32;
#[cfg(target_arch = "aarch64")]
type Control = u64;

/// All exceptions masked, no flag raised, nearest even, no flush to zero, subnormals not zero: as a process starts.
#[cfg(target_arch = "x86_64")]
const IEEE: Control = 0x1F80;
/// Nearest even, no flush to zero, no default NaN: as a process starts.
#[cfg(target_arch = "aarch64")]
const IEEE: Control = 0;

impl FloatMode {
    /// Enters the default mode.
    pub(crate) fn ieee() -> Self {
        #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
        {
            let found = get();
            set(IEEE);
            Self { found }
        }
        #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
        Self {}
    }
}

impl Drop for FloatMode {
    fn drop(&mut self) {
        #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
        set(self.found);
    }
}

#[cfg(target_arch = "x86_64")]
fn get() -> Control {
    let mut mode: Control = 0;
    // SAFETY: writes the four bytes it is given, nothing else.
    unsafe { std::arch::asm!("stmxcsr [{}]", in(reg) &raw mut mode, options(nostack, preserves_flags)) };
    mode
}

#[cfg(target_arch = "x86_64")]
fn set(mode: Control) {
    // SAFETY: `mode` is the default mode, which the language assumes, or what `get` found. The asm reads memory and
    // counts as touching all of it, so no load, store or arithmetic on what was loaded moves across.
    unsafe { std::arch::asm!("ldmxcsr [{}]", in(reg) &raw const mode, options(nostack, preserves_flags)) };
}

#[cfg(target_arch = "aarch64")]
fn get() -> Control {
    let mode: Control;
    // SAFETY: reads a register of this thread.
    unsafe { std::arch::asm!("mrs {}, fpcr", out(reg) mode, options(nostack, preserves_flags)) };
    mode
}

#[cfg(target_arch = "aarch64")]
fn set(mode: Control) {
    // SAFETY: as on x86.
    unsafe { std::arch::asm!("msr fpcr, {}", in(reg) mode, options(nostack, preserves_flags)) };
}
