//! What a bench's operands are in memory, and the name of its run's file.
//!
//! Invariant: runs of other stored types or precisions have other names.

use std::fmt;
use stepscope::ops::Precision;

/// What operands, or activations, are in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum StoredAs {
    F32,
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

/// The group of a bench's run: of BF16 tensors, or of f32 in a precision.
pub(crate) fn group(bench: &str, precision: Precision, stored: StoredAs) -> String {
    match (stored, precision) {
        (StoredAs::Bf16, _) => format!("{bench}-stored-bf16"),
        (StoredAs::F32, Precision::Ieee) => bench.to_owned(),
        (StoredAs::F32, _) => format!("{bench}-{precision}"),
    }
}
