//! The element type in memory, as a command-line option: of an example's activations, or of a
//! bench's operands.

use std::fmt;

use clap::ValueEnum;

/// The element type in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum StoredAs {
    /// f32.
    F32,
    /// BF16.
    Bf16,
}

impl fmt::Display for StoredAs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
        })
    }
}
