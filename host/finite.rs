//! Numbers that are not finite: where they may be, and which tensor has the first.
//!
//! Invariant: unless [`Numbers::Any`] is asked for, none goes to a file or comes from one, and a trainer ends with the update that
//! made it.

#![forbid(unsafe_code)]

use crate::error::{Error, Result};
use crate::params::Layout;
use std::fmt;

/// Which numbers losses, gradients, weights and moments may hold.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Numbers {
    /// Finite ones: all others are [`Error::NotFinite`].
    #[default]
    Finite,
    /// Infinities and NaN too.
    Any,
}

/// What [`Error::NotFinite`] is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Quantity {
    /// The loss of a batch.
    Loss,
    /// The L2 norm of all gradients together.
    GradientNorm,
    /// A weight.
    Weight,
    /// What the optimiser keeps for a weight, such as a moment.
    OptimizerState,
}

impl fmt::Display for Quantity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Loss => "the loss",
            Self::GradientNorm => "the gradients' norm",
            Self::Weight => "a weight",
            Self::OptimizerState => "the optimiser's state",
        })
    }
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

impl Layout {
    /// The parameters of a flat region: what stands before the name and the name, and whether each is finite.
    pub(crate) fn finite(&self, prefix: &str, region: &[f32]) -> impl Iterator<Item = (String, bool)> {
        let all = |values: &[f32]| values.iter().all(|value| value.is_finite());
        self.entries().iter().map(move |entry| (format!("{prefix}{}", entry.name()), all(&region[entry.range()])))
    }

    /// The same of each parameter's bytes, little-endian.
    pub(crate) fn finite_bytes(&self, prefix: &str, region: &[&[u8]]) -> impl Iterator<Item = (String, bool)> {
        let all = |bytes: &[u8]| bytes.as_chunks().0.iter().all(|&word| f32::from_le_bytes(word).is_finite());
        self.entries().iter().zip(region).map(move |(entry, bytes)| (format!("{prefix}{}", entry.name()), all(bytes)))
    }
}
