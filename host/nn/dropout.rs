//! Dropout.

use crate::autograd::{Tape, Var};
use crate::error::Result;
use crate::ops::Draws;
use crate::tensor::Stored;

/// Zeros with probability `p`, while a step has random numbers to draw; see [`Tape::dropout`].
#[derive(Clone, Copy, Debug)]
pub struct Dropout {
    /// The probability, in `[0, 1)`.
    pub p: f32,
}

impl Dropout {
    /// Without `draws`, as in an evaluation, x itself.
    ///
    /// # Errors
    /// Those of the op.
    #[track_caller]
    pub fn forward<'s, S: Stored>(
        &self,
        tape: &Tape<'_, 's>,
        x: &Var<'s, S>,
        draws: Option<&Draws<'s>>,
    ) -> Result<Var<'s, S>> {
        draws.map_or(Ok(*x), |draws| tape.dropout(x, self.p, draws))
    }
}
