//! Dropout.

use crate::autograd::{Tape, Var};
use crate::error::Result;
use crate::tensor::Stored;

/// Zeros with probability `p`, but not on a tape that evaluates; see [`Tape::dropout`].
#[derive(Clone, Copy, Debug)]
pub struct Dropout {
    /// The probability, in `[0, 1)`.
    pub p: f32,
}

impl Dropout {
    /// See [`Tape::dropout`].
    ///
    /// # Errors
    /// Those of the op.
    #[track_caller]
    pub fn forward<'s, S: Stored>(&self, tape: &Tape<'_, 's>, x: &Var<'s, S>) -> Result<Var<'s, S>> {
        tape.dropout(x, self.p)
    }
}
