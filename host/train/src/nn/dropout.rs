//! Dropout.

use stepscope_core::{Result, Stored, Tape, Var};

/// A dropout layer: zeroes elements with probability `p`, except on an evaluation tape. See
/// [`Tape::dropout`].
#[derive(Clone, Copy, Debug)]
pub struct Dropout {
    /// The probability, in `[0, 1)`.
    pub p: f32,
}

impl Dropout {
    /// Applies dropout to x; see [`Tape::dropout`].
    #[track_caller]
    pub fn forward<'s, S: Stored>(&self, tape: &Tape<'_, 's>, x: &Var<'s, S>) -> Result<Var<'s, S>> {
        tape.dropout(x, self.p)
    }
}
