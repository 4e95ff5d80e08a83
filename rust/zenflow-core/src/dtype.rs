//! The three number formats that cross the border between model and optimizer.

use std::fmt;

/// Format of a gradient or of a model weight. Masters and moments are always [`Dtype::F32`].
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

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
