//! Numbers that are not finite: where they may be, and which tensor has the first.
//!
//! Invariant: unless [`Numbers::Any`] is asked for, none goes to a file or comes from one, and a trainer ends with the update that
//! made it.

#![forbid(unsafe_code)]

use crate::error::{Error, Quantity, Result};

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
