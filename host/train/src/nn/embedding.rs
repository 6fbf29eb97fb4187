//! Embeddings of tokens and of positions.

use super::Scope;
use stepscope_core::{Indices, Initializer, Parameter, Result, Stored, Tape, Var};

/// A table whose rows are looked up by number; `weight`: `[rows, cols]`, as in
/// `torch.nn.Embedding`.
#[derive(Clone, Copy, Debug)]
pub struct Embedding {
    /// The table.
    pub weight: Parameter,
}

impl Embedding {
    /// Adds `weight`, initialized with normal numbers of this deviation. PyTorch uses 1, GPT-2 uses
    /// 0.02.
    pub fn new(mut names: Scope<'_>, rows: usize, cols: usize, deviation: f32) -> Self {
        Self { weight: names.add_table("weight", [rows, cols], Initializer::Normal { deviation }) }
    }

    /// Looks up the rows of these ids; see [`Tape::embedding`].
    #[track_caller]
    pub fn forward<'s, S: Stored>(&self, tape: &Tape<'_, 's>, ids: Indices<'s>) -> Result<Var<'s, S>> {
        tape.embedding(self.weight, ids)
    }

    /// Adds the row of its position to each token; `x`: `[batch, tokens, cols]`, with at least
    /// `tokens` rows in the table. See [`Tape::add_positions`].
    #[track_caller]
    pub fn add_positions<'s, S: Stored>(&self, tape: &Tape<'_, 's>, x: &Var<'s, S>) -> Result<Var<'s, S>> {
        tape.add_positions(x, self.weight)
    }
}
