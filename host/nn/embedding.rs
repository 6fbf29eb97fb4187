//! Embeddings of tokens and of positions.

use super::Names;
use crate::autograd::{Tape, Var};
use crate::error::Result;
use crate::initializer::Initializer;
use crate::params::Parameter;
use crate::tensor::{Saved, Stored};

/// Rows of a table by number; `weight`: `[rows, cols]`, as `torch.nn.Embedding` has it.
#[derive(Clone, Copy, Debug)]
pub struct Embedding {
    /// The table.
    pub weight: Parameter,
}

impl Embedding {
    /// `weight`, of normal numbers with this deviation: PyTorch's is 1, GPT-2's 0.02.
    pub fn new(mut names: Names<'_>, rows: usize, cols: usize, deviation: f32) -> Self {
        Self { weight: names.add_table("weight", [rows, cols], Initializer::Normal { deviation }) }
    }

    /// The rows of these ids; see [`Tape::embedding`].
    ///
    /// # Errors
    /// Those of the op.
    #[track_caller]
    pub fn forward<'s, S: Stored>(&self, tape: &Tape<'_, 's>, ids: Saved<'s, u32>) -> Result<Var<'s, S>> {
        tape.embedding(self.weight, ids)
    }

    /// `x` and the row of each token's place; `x`: `[batch, tokens, cols]`, rows at least `tokens`. See [`Tape::add_positions`].
    ///
    /// # Errors
    /// Those of the op.
    #[track_caller]
    pub fn add_positions<'s, S: Stored>(&self, tape: &Tape<'_, 's>, x: &Var<'s, S>) -> Result<Var<'s, S>> {
        tape.add_positions(x, self.weight)
    }
}
