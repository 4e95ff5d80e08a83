//! Number formats: those that cross the border between model and optimizer, and those that states are kept in.

use std::fmt;

/// Format of a gradient or of a model weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Dtype {
    /// IEEE binary32.
    F32,
    /// The upper half of a binary32.
    Bf16,
    /// IEEE binary16.
    F16,
}

impl Dtype {
    /// Every format.
    pub const ALL: [Self; 3] = [Self::F32, Self::Bf16, Self::F16];

    /// Bytes of one element.
    #[must_use]
    pub const fn size(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::Bf16 | Self::F16 => 2,
        }
    }

    /// The name torch gives it, without `torch.`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "float32",
            Self::Bf16 => "bfloat16",
            Self::F16 => "float16",
        }
    }

    /// The format with this [`name`](Self::name).
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|dtype| dtype.name() == name)
    }
}

/// Format of the two moments.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum StateDtype {
    /// IEEE binary32: 8 bytes an element, both moments together.
    #[default]
    F32,
    /// bfloat16, rounded stochastically: 4 bytes.
    Bf16,
    /// Eight bits in blocks of [`BLOCK`](crate::adam::BLOCK) elements with a scale each: 2 bytes and 1/32.
    Int8,
}

impl StateDtype {
    /// Every format.
    pub const ALL: [Self; 3] = [Self::F32, Self::Bf16, Self::Int8];

    /// Bytes of one element of one moment, scales not counted.
    #[must_use]
    pub const fn size(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::Bf16 => 2,
            Self::Int8 => 1,
        }
    }

    /// Scales that `numel` elements have, those of both moments together.
    #[must_use]
    pub const fn scales(self, numel: usize) -> usize {
        match self {
            Self::F32 | Self::Bf16 => 0,
            Self::Int8 => 2 * numel.div_ceil(crate::adam::BLOCK),
        }
    }

    /// Its name in options.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "float32",
            Self::Bf16 => "bfloat16",
            Self::Int8 => "int8",
        }
    }

    /// The format with this [`name`](Self::name).
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|dtype| dtype.name() == name)
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
