//! The element type of a bench's operands, and the name of its run's file.
//!
//! Invariant: runs with different element types or precisions have different names.

use stepscope::ops::Precision;
pub(crate) use stepscope_cli::program::stored_as::StoredAs;

/// Returns the group of a bench's run, for BF16 tensors or for f32 at a precision.
pub(crate) fn group(bench: &str, precision: Precision, stored: StoredAs) -> String {
    match (stored, precision) {
        (StoredAs::Bf16, _) => format!("{bench}-stored-bf16"),
        (StoredAs::F32, Precision::F32) => bench.to_owned(),
        (StoredAs::F32, _) => format!("{bench}-{precision}"),
    }
}
