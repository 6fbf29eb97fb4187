//! Numbers that are not finite: where they may be, and which tensor has the first.
//!
//! Invariant: unless [`Numbers::Any`] is asked for, none goes to a file or comes from one, and a trainer ends with the update that
//! made it.

#![forbid(unsafe_code)]

use crate::error::{Error, Quantity, Result};
use crate::processors::have_threads;
use rayon::prelude::*;

/// Bytes that a thread looks at, one part after another.
const PART_BYTES: usize = 1 << 20;
/// Bytes between two looks at whether there is something to tell: within them nothing branches.
const RUN_BYTES: usize = 4 << 10;

/// Which numbers losses, gradients, weights and moments may hold.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Numbers {
    /// Finite ones: all others are [`Error::NotFinite`].
    #[default]
    Finite,
    /// Infinities and NaN too.
    Any,
}

impl Numbers {
    /// Looks at tensors, each by its name and whether it is finite, up to the first that is not.
    ///
    /// # Errors
    /// [`Error::NotFinite`] with its name.
    pub(crate) fn check(
        self,
        (update, what): (Option<u64>, Quantity),
        tensors: impl IntoIterator<Item = (String, bool)>,
    ) -> Result<()> {
        let first = if self == Self::Any { None } else { tensors.into_iter().find(|(_, finite)| !finite) };
        first.map_or(Ok(()), |(name, _)| Err(Error::NotFinite { update, what, tensor: format!("`{name}`") }))
    }
}

/// Whether all f32, little-endian, are finite. Large ones are looked at by all processors, for one alone is slower than the link to a GPU.
pub(crate) fn all_finite(bytes: &[u8]) -> bool {
    match bytes.len() > PART_BYTES && have_threads() {
        true => bytes.par_chunks(PART_BYTES).all(part_is_finite),
        false => part_is_finite(bytes),
    }
}

fn part_is_finite(part: &[u8]) -> bool {
    part.chunks(RUN_BYTES).all(|run| {
        let (words, _) = run.as_chunks();
        words.iter().fold(true, |finite, &word| finite & is_finite(f32::from_le_bytes(word)))
    })
}

/// Whether a number is finite, by its bits: a comparison could trap, where the thread's
/// floating-point mode says so.
pub(crate) fn is_finite(value: f32) -> bool {
    const EXPONENT: u32 = f32::INFINITY.to_bits();
    value.to_bits() & EXPONENT != EXPONENT
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Alone at any place, in a text of several parts.
    #[test]
    fn one_number_is_found_wherever_it_is() {
        let words = 2 * PART_BYTES / 4 + 13;
        let mut values = vec![f32::MAX; words];
        assert!(all_finite(bytemuck::cast_slice(&values)));
        let run = RUN_BYTES / 4;
        for at in [0, 1, run - 1, run, PART_BYTES / 4 - 1, PART_BYTES / 4, words - 1] {
            for value in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                let finite = std::mem::replace(&mut values[at], value);
                assert!(!all_finite(bytemuck::cast_slice(&values)), "{value} at {at}");
                assert!(all_finite(bytemuck::cast_slice(&values[..at])), "{at}");
                values[at] = finite;
            }
        }
        assert!(all_finite(&[]));
    }
}
