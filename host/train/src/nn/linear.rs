//! Linear layers.

use super::Scope;
use stepscope_core::error::Result;
use stepscope_core::initializer::Initializer;
use stepscope_core::ops::GemmElement;
use stepscope_core::params::Parameter;
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
