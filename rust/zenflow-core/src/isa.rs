//! Which vector instructions a kernel is compiled for, and which of them this machine has.
//!
//! The choice is made at run time and is free: every kernel gives the same bits on every [`Isa`]. It is a value and
//! not a global, so a test can run one kernel on all that is [`available`](Isa::available) and compare.

use std::fmt;
use std::sync::OnceLock;

/// A set of vector instructions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Isa {
    /// x86-64 with AVX-512 F, BW, VL and DQ.
    Avx512,
    /// x86-64 with AVX2, FMA and F16C.
    Avx2,
    /// The vectors every 64-bit ARM has.
    Neon,
    /// What the Rust compiler makes of arrays for the oldest machine of the target: everywhere, and slow.
    Portable,
}

impl Isa {
    /// Every set, best first.
    pub const ALL: [Self; 4] = [Self::Avx512, Self::Avx2, Self::Neon, Self::Portable];

    /// The best set this machine has, looked up once a process.
    #[must_use]
    pub fn detect() -> Self {
        static BEST: OnceLock<Isa> = OnceLock::new();
        *BEST.get_or_init(|| Self::available()[0])
    }

    /// All sets this machine has, best first; [`Isa::Portable`] is always the last.
    #[must_use]
    pub fn available() -> Vec<Self> {
        Self::ALL.into_iter().filter(|isa| isa.is_available()).collect()
    }

    /// True where this machine has the set.
    #[must_use]
    pub fn is_available(self) -> bool {
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => {
                Self::Avx2.is_available()
                    && std::arch::is_x86_feature_detected!("avx512f")
                    && std::arch::is_x86_feature_detected!("avx512bw")
                    && std::arch::is_x86_feature_detected!("avx512vl")
                    && std::arch::is_x86_feature_detected!("avx512dq")
            }
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => {
                std::arch::is_x86_feature_detected!("avx2")
                    && std::arch::is_x86_feature_detected!("fma")
                    && std::arch::is_x86_feature_detected!("f16c")
            }
            #[cfg(target_arch = "aarch64")]
            Self::Neon => std::arch::is_aarch64_feature_detected!("neon"),
            Self::Portable => true,
            #[allow(unreachable_patterns)]
            _ => false,
        }
    }

    /// Short lower-case name.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Avx512 => "avx512",
            Self::Avx2 => "avx2",
            Self::Neon => "neon",
            Self::Portable => "portable",
        }
    }

    /// The set with this [`name`](Self::name), whether this machine has it or not.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|isa| isa.name() == name)
    }
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
