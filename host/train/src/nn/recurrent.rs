//! Recurrent layers: LSTM and GRU.
//!
//! One product computes the inputs' part of all tokens. Each token then takes one product of the
//! state before it. A part of a sequence can be recomputed in the backward pass with
//! [`Tape::recompute_all`].

use super::{Linear, Scope};
use stepscope_core::ops::{self, Activation};
use stepscope_core::{Error, Result, Tape, Var};

/// A long short-term memory (Hochreiter and Schmidhuber, 1997), as in `torch.nn.LSTM` with one
/// layer and `batch_first`. The sum of PyTorch's two biases is one bias.
///
/// ```text
/// i, f, g, o = x W + h U + b              c' = sigmoid(f) c + sigmoid(i) tanh(g)
///                                         h' = sigmoid(o) tanh(c')
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Lstm {
    /// W, `[inputs, 4 width]`, and b, `[4 width]`.
    pub input: Linear,
    /// U, `[width, 4 width]`.
    pub state: Linear,
}

impl Lstm {
    /// Adds `input.weight`, `input.bias` and `state.weight`.
    pub fn new(mut names: Scope<'_>, inputs: usize, width: usize) -> Self {
        let input = Linear::new(names.at("input"), inputs, 4 * width);
        Self { input, state: Linear::without_bias(names.at("state"), width, 4 * width) }
    }

    /// Computes h of every token; `x`: `[batch, tokens, inputs]`, result: `[batch, tokens, width]`.
    /// The first state is zero.
    #[track_caller]
    pub fn forward<'s, S: Activation>(&self, tape: &Tape<'_, 's>, x: &Var<'s, S>) -> Result<Var<'s, S>> {
        self.forward_from(tape, x, None).map(|(y, _)| y)
    }

    /// Computes h of every token from a state, and returns also the last state; a state is h and c,
    /// `[batch, width]` each.
    ///
    /// # Errors
    /// [`Error::Misuse`] for other shapes, or without tokens; [`Error::ArenaFull`].
    #[track_caller]
    pub fn forward_from<'s, S: Activation>(
        &self,
        tape: &Tape<'_, 's>,
        x: &Var<'s, S>,
        state: Option<[Var<'s, S>; 2]>,
    ) -> Result<(Var<'s, S>, [Var<'s, S>; 2])> {
        let gates = self.input.forward(tape, x)?;
        let [y, h, c] = tape.lstm(&gates, self.state.weight, state.as_ref().map(|[h, c]| [h, c]))?;
        Ok((y, [h, c]))
    }
}

/// A gated recurrent unit (Cho et al., 2014), as in `torch.nn.GRU` with one layer and
/// `batch_first`.
///
/// ```text
/// r, z = sigmoid(x W + h U + ..)          n  = tanh(x W + b + r (h U + b'))
///                                         h' = (1 - z) n + z h
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Gru {
    /// W of r, z and n, `[inputs, 3 width]`, and its bias, `[3 width]`.
    pub input: Linear,
    /// U of r, z and n, `[width, 3 width]`, and its bias, `[3 width]`.
    pub state: Linear,
    /// The number of elements of a state.
    pub width: usize,
}

impl Gru {
    /// Adds `input.weight`, `input.bias`, `state.weight` and `state.bias`.
    pub fn new(mut names: Scope<'_>, inputs: usize, width: usize) -> Self {
        let input = Linear::new(names.at("input"), inputs, 3 * width);
        Self { input, state: Linear::new(names.at("state"), width, 3 * width), width }
    }

    /// Computes h of every token; `x`: `[batch, tokens, inputs]`, result: `[batch, tokens, width]`.
    /// The first state is zero.
    #[track_caller]
    pub fn forward<'s, S: Activation>(&self, tape: &Tape<'_, 's>, x: &Var<'s, S>) -> Result<Var<'s, S>> {
        let batch = x.shape().extents().first().copied().unwrap_or(0);
        let mut zero = tape.step().empty([batch, self.width])?;
        ops::fill_into(tape.step(), &mut zero, 0.0)?;
        self.forward_from(tape, x, tape.input(zero)).map(|(y, _)| y)
    }

    /// Computes h of every token from a state h, `[batch, width]`, and returns also the last one.
    ///
    /// # Errors
    /// [`Error::Misuse`] for other shapes, or without tokens; [`Error::ArenaFull`].
    #[track_caller]
    pub fn forward_from<'s, S: Activation>(
        &self,
        tape: &Tape<'_, 's>,
        x: &Var<'s, S>,
        mut h: Var<'s, S>,
    ) -> Result<(Var<'s, S>, Var<'s, S>)> {
        const EXPECTED: &str = "an input [batch, at least one token, inputs]";
        let [_, (1..), _] = *x.shape().extents() else {
            return Err(Error::misuse("Gru", EXPECTED, x.shape().to_string()));
        };
        let mut outputs = Vec::new();
        for x in self.input.forward(tape, x)?.unbind(1)? {
            let [of_r, of_z, of_n] = x.chunks::<3>(-1)?;
            let [r, z, n] = self.state.forward(tape, &h)?.chunks::<3>(-1)?;
            let (r, z) = ((of_r + r)?.sigmoid()?, (of_z + z)?.sigmoid()?);
            let n = (of_n + (r * n)?)?.tanh()?;
            // (1 - z) n + z h
            h = (n + (z * (h - n)?)?)?;
            outputs.push(h);
        }
        Ok((Var::stack(&outputs, 1)?, h))
    }
}
