//! Linear layers.

use super::Scope;
use stepscope_core::error::Result;
use stepscope_core::initializer::Initializer;
use stepscope_core::ops::GemmElement;
use stepscope_core::params::{Parameter, StackedParameters};
use stepscope_core::tape::{Tape, Var};

/// `y = x w + b`; `x`: `[.., in]`, `w`: `[in, out]`, `b`: `[out]`, `y`: `[.., out]`.
#[derive(Clone, Copy, Debug)]
pub struct Linear {
    /// The weight w.
    pub weight: Parameter,
    /// The bias b, if there is one.
    pub bias: Option<Parameter>,
}

impl Linear {
    /// Adds `weight`, initialized with [`Initializer::fan_in`], and `bias`, initialized to zero.
    pub fn new(mut names: Scope<'_>, inputs: usize, outputs: usize) -> Self {
        let weight = names.add("weight", [inputs, outputs], Initializer::fan_in(inputs));
        Self { weight, bias: Some(names.add("bias", [outputs], Initializer::ZERO)) }
    }

    /// Adds only `weight`, initialized with [`Initializer::fan_in`].
    pub fn without_bias(mut names: Scope<'_>, inputs: usize, outputs: usize) -> Self {
        Self { weight: names.add("weight", [inputs, outputs], Initializer::fan_in(inputs)), bias: None }
    }

    /// Adds `bias`, initialized to zero, after the parameters that `names` has so far.
    #[must_use]
    pub fn with_bias(self, mut names: Scope<'_>, outputs: usize) -> Self {
        Self { bias: Some(names.add("bias", [outputs], Initializer::ZERO)), ..self }
    }

    /// Computes y; see [`Tape::linear`].
    #[track_caller]
    pub fn forward<'s, S: GemmElement<S> + GemmElement<f32>>(
        &self,
        tape: &Tape<'_, 's>,
        x: &Var<'s, S>,
    ) -> Result<Var<'s, S>> {
        tape.linear(x, self.weight, self.bias)
    }

    /// Computes `residual + forward(x)` in one launch; see [`Tape::linear_residual`].
    #[track_caller]
    pub fn forward_residual<'s, S: GemmElement<S> + GemmElement<f32>>(
        &self,
        tape: &Tape<'_, 's>,
        x: &Var<'s, S>,
        residual: &Var<'s, S>,
    ) -> Result<Var<'s, S>> {
        tape.linear_residual(x, self.weight, self.bias, residual)
    }
}

/// A separate linear layer for each token, all in one multiply; `x`: `[batch, tokens, in]`, an
/// input of the tape; `y`: `[batch, tokens, out]`.
#[derive(Clone, Debug)]
pub struct TokenLinear {
    /// The weights, `[in, out]` for each token.
    pub weights: StackedParameters,
    /// The biases, `[out]` for each token.
    pub biases: StackedParameters,
}

impl TokenLinear {
    /// Adds parameters under `name` followed by the token's number. First come all `weight`s,
    /// initialized with [`Initializer::fan_in`], then all `bias`es, initialized to zero.
    pub fn new(names: &mut Scope<'_>, name: &str, tokens: usize, inputs: usize, outputs: usize) -> Self {
        let weight = |token| format!("{name}{token}.weight");
        let bias = |token| format!("{name}{token}.bias");
        Self {
            weights: names.add_stack(tokens, weight, [inputs, outputs], Initializer::fan_in(inputs)),
            biases: names.add_stack(tokens, bias, [outputs], Initializer::ZERO),
        }
    }

    /// Computes y; see [`Tape::linear_per_token`].
    #[track_caller]
    pub fn forward<'s, S: GemmElement<S> + GemmElement<f32>>(
        &self,
        tape: &Tape<'_, 's>,
        x: &Var<'s, S>,
    ) -> Result<Var<'s, S>> {
        tape.linear_per_token(x, &self.weights, &self.biases)
    }
}
