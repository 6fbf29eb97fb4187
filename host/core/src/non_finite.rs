//! Checks for values that are not finite, and for the first tensor that holds one.
//!
//! Invariant: unless [`NonFinite::Allow`] is set, no such value is written to or read from a file,
//! and a trainer stops at the update that produced it.

#![forbid(unsafe_code)]

use crate::error::{Error, Quantity, Result};
use crate::processors::have_threads;
use crate::tensor::{Stored, is_finite};
use rayon::prelude::*;

/// Bytes in each part that a thread checks.
const PART_BYTES: usize = 1 << 20;
/// Bytes between two branches on the result: the loop within them is free of branches.
const RUN_BYTES: usize = 4 << 10;

/// The values that losses, gradients, weights and moments may hold.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum NonFinite {
    /// Only finite values. Infinities and NaN are [`Error::NotFinite`].
    #[default]
    Reject,
    /// All values, also infinities and NaN.
    Allow,
}

impl NonFinite {
    /// Checks tensors, each given by its name and a flag that is true if it is finite, up to the
    /// first that is not finite.
    ///
    /// # Errors
    /// [`Error::NotFinite`], which names that tensor.
    pub fn check(
        self,
        (update, what): (Option<u64>, Quantity),
        tensors: impl IntoIterator<Item = (String, bool)>,
    ) -> Result<()> {
        let first = if self == Self::Allow { None } else { tensors.into_iter().find(|(_, finite)| !finite) };
        first.map_or(Ok(()), |(name, _)| Err(Error::NotFinite { update, what, tensor: format!("`{name}`") }))
    }
}

/// True if all f32, little-endian, are finite.
pub fn all_finite(bytes: &[u8]) -> bool {
    every_run(bytes, |run| {
        let (words, _) = run.as_chunks();
        words.iter().fold(true, |finite, &word| finite & is_finite(f32::from_le_bytes(word)))
    })
}

/// True if all values are finite.
pub fn are_finite<S: Stored>(values: &[S]) -> bool {
    every_run(values, |run| run.iter().fold(true, |finite, value| finite & is_finite(value.widen())))
}

/// True if all runs of the values are finite. All processors check a large slice, because one
/// processor is slower than the link to a GPU.
fn every_run<T: Sync>(values: &[T], run_is_finite: impl Fn(&[T]) -> bool + Sync) -> bool {
    let [run, part] = [RUN_BYTES, PART_BYTES].map(|bytes| bytes / size_of::<T>());
    let part_is_finite = |part: &[T]| part.chunks(run).all(&run_is_finite);
    match values.len() > part && have_threads() {
        true => values.par_chunks(part).all(part_is_finite),
        false => part_is_finite(values),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Puts one value at each position of a slice of several parts.
    #[test]
    fn single_non_finite_value_is_found() {
        let words = 2 * PART_BYTES / 4 + 13;
        let mut values = vec![f32::MAX; words];
        assert!(all_finite(bytemuck::cast_slice(&values)));
        let run = RUN_BYTES / 4;
        for at in [0, 1, run - 1, run, PART_BYTES / 4 - 1, PART_BYTES / 4, words - 1] {
            for value in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                let finite = std::mem::replace(&mut values[at], value);
                assert!(!all_finite(bytemuck::cast_slice(&values)), "{value} at {at}");
                assert!(!are_finite(&values) && are_finite(&values[..at]), "{value} at {at}");
                assert!(all_finite(bytemuck::cast_slice(&values[..at])), "{at}");
                values[at] = finite;
            }
        }
        assert!(all_finite(&[]));
    }
}
