//! Linear layers.

use super::Names;
use crate::autograd::{Tape, Var};
use crate::error::Result;
use crate::initializer::Initializer;
use crate::ops::Factor;
use crate::params::{Parameter, Stack};

/// `y = x w + b`; `x`: `[.., in]`, `w`: `[in, out]`, `b`: `[out]`, `y`: `[.., out]`.
#[derive(Clone, Copy, Debug)]
pub struct Linear {
    /// w.
    pub weight: Parameter,
    /// b, if there is one.
    pub bias: Option<Parameter>,
}

impl Linear {
    /// `weight`, [`Initializer::fan_in`], and `bias`, zero.
    pub fn new(mut names: Names<'_>, inputs: usize, outputs: usize) -> Self {
        let weight = names.add("weight", [inputs, outputs], Initializer::fan_in(inputs));
        Self { weight, bias: Some(names.add("bias", [outputs], Initializer::ZERO)) }
    }

    /// `weight` alone, [`Initializer::fan_in`].
    pub fn without_bias(mut names: Names<'_>, inputs: usize, outputs: usize) -> Self {
        Self { weight: names.add("weight", [inputs, outputs], Initializer::fan_in(inputs)), bias: None }
    }

    /// The same with `bias`, zero, placed behind what `names` has so far.
    #[must_use]
    pub fn with_bias(self, mut names: Names<'_>, outputs: usize) -> Self {
        Self { bias: Some(names.add("bias", [outputs], Initializer::ZERO)), ..self }
    }

    /// See [`Tape::linear`].
    ///
    /// # Errors
    /// Those of the op.
    #[track_caller]
    pub fn forward<'s, S: Factor<S> + Factor<f32>>(&self, tape: &Tape<'_, 's>, x: &Var<'s, S>) -> Result<Var<'s, S>> {
        tape.linear(x, self.weight, self.bias)
    }

    /// `residual + forward(x)` in one launch; see [`Tape::linear_residual`].
    ///
    /// # Errors
    /// Those of the op.
    #[track_caller]
    pub fn forward_residual<'s, S: Factor<S> + Factor<f32>>(
        &self,
        tape: &Tape<'_, 's>,
        x: &Var<'s, S>,
        residual: &Var<'s, S>,
    ) -> Result<Var<'s, S>> {
        tape.linear_residual(x, self.weight, self.bias, residual)
    }
}

/// A linear layer for each token, all in one multiply; `x`: `[batch, tokens, in]`, an input of the tape, `y`: `[batch, tokens,
/// out]`.
#[derive(Clone, Debug)]
pub struct TokenLinear {
    /// `[in, out]` for each token.
    pub weights: Stack,
    /// `[out]` for each token.
    pub biases: Stack,
}

impl TokenLinear {
    /// For `name` with each token's number behind it: `weight`, [`Initializer::fan_in`], then for each `bias`, zero.
    pub fn new(names: &mut Names<'_>, name: &str, tokens: usize, inputs: usize, outputs: usize) -> Self {
        let weight = |token| format!("{name}{token}.weight");
        let bias = |token| format!("{name}{token}.bias");
        Self {
            weights: names.add_stack(tokens, weight, [inputs, outputs], Initializer::fan_in(inputs)),
            biases: names.add_stack(tokens, bias, [outputs], Initializer::ZERO),
        }
    }

    /// See [`Tape::linear_per_token`].
    ///
    /// # Errors
    /// Those of the op.
    #[track_caller]
    pub fn forward<'s, S: Factor<S> + Factor<f32>>(&self, tape: &Tape<'_, 's>, x: &Var<'s, S>) -> Result<Var<'s, S>> {
        tape.linear_per_token(x, &self.weights, &self.biases)
    }
}
