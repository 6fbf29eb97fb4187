//! What a bench's operands are in memory, and the name of its run's file.
//!
//! Invariant: runs of other stored types or precisions have other names.

#[path = "../../examples/shared/stored_as.rs"]
mod stored_as;

use stepscope::ops::Precision;
pub(crate) use stored_as::StoredAs;

/// The group of a bench's run: of BF16 tensors, or of f32 in a precision.
pub(crate) fn group(bench: &str, precision: Precision, stored: StoredAs) -> String {
    match (stored, precision) {
        (StoredAs::Bf16, _) => format!("{bench}-stored-bf16"),
        (StoredAs::F32, Precision::Ieee) => bench.to_owned(),
        (StoredAs::F32, _) => format!("{bench}-{precision}"),
    }
}
