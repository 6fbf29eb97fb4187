//! GELU, and two linear layers with it between them.

use super::{Linear, Names};
use crate::autograd::{Tape, Var};
use crate::error::Result;
use crate::ops::Factor;

/// GELU in its tanh form (Hendrycks and Gimpel, 2016); see [`Tape::gelu`].
#[derive(Clone, Copy, Debug)]
pub struct Gelu;

impl Gelu {
    /// See [`Tape::gelu`].
    ///
    /// # Errors
    /// Those of the op.
    #[track_caller]
    pub fn forward<'s, S: Factor<S> + Factor<f32>>(&self, tape: &Tape<'_, 's>, x: &Var<'s, S>) -> Result<Var<'s, S>> {
        tape.gelu(x)
    }
}

/// `y = gelu(x W1 + b1) W2 + b2`, two launches; `x`: `[.., in]`, `y`: `[.., out]`.
#[derive(Clone, Copy, Debug)]
pub struct Mlp {
    /// W1 and b1.
    pub up: Linear,
    /// W2 and b2.
    pub down: Linear,
}

impl Mlp {
    /// `up` and `down`, each with `weight` and `bias`; see [`Linear::new`].
    pub fn new(mut names: Names<'_>, inputs: usize, hidden: usize, outputs: usize) -> Self {
        Self { up: Linear::new(names.at("up"), inputs, hidden), down: Linear::new(names.at("down"), hidden, outputs) }
    }

    /// See [`Tape::mlp_gelu`].
    ///
    /// # Errors
    /// Those of the op.
    #[track_caller]
    pub fn forward<'s, S: Factor<S> + Factor<f32>>(&self, tape: &Tape<'_, 's>, x: &Var<'s, S>) -> Result<Var<'s, S>> {
        self.on_tape(tape, x, None)
    }

    /// `residual + forward(x)`, also two launches.
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
        self.on_tape(tape, x, Some(residual))
    }

    #[track_caller]
    fn on_tape<'s, S: Factor<S> + Factor<f32>>(
        &self,
        tape: &Tape<'_, 's>,
        x: &Var<'s, S>,
        residual: Option<&Var<'s, S>>,
    ) -> Result<Var<'s, S>> {
        let [up, down] = [self.up, self.down].map(|layer| (layer.weight, layer.bias));
        tape.mlp_gelu(x, up, down, residual)
    }
}
