//! SwiGLU between linear layers.

use super::{Linear, Names};
use crate::autograd::{Tape, Var};
use crate::error::Result;
use crate::ops::Factor;

/// `y = (silu(x Wg) * (x Wu)) Wd` (Shazeer, 2020), without biases; `x`: `[.., in]`, `y`: `[.., out]`.
#[derive(Clone, Copy, Debug)]
pub struct SwiGlu {
    /// Wg.
    pub gate: Linear,
    /// Wu.
    pub up: Linear,
    /// Wd.
    pub down: Linear,
}

impl SwiGlu {
    /// `gate_proj.weight`, `up_proj.weight` and `down_proj.weight`, as Llama's; see [`Linear::without_bias`].
    pub fn new(mut names: Names<'_>, inputs: usize, hidden: usize, outputs: usize) -> Self {
        Self {
            gate: Linear::without_bias(names.at("gate_proj"), inputs, hidden),
            up: Linear::without_bias(names.at("up_proj"), inputs, hidden),
            down: Linear::without_bias(names.at("down_proj"), hidden, outputs),
        }
    }

    /// See [`Tape::linear_swiglu`].
    ///
    /// # Errors
    /// Those of the ops.
    #[track_caller]
    pub fn forward<'s, S: Factor<S> + Factor<f32>>(&self, tape: &Tape<'_, 's>, x: &Var<'s, S>) -> Result<Var<'s, S>> {
        self.down.forward(tape, &self.gated(tape, x)?)
    }

    /// `residual + forward(x)`.
    ///
    /// # Errors
    /// Those of the ops.
    #[track_caller]
    pub fn forward_residual<'s, S: Factor<S> + Factor<f32>>(
        &self,
        tape: &Tape<'_, 's>,
        x: &Var<'s, S>,
        residual: &Var<'s, S>,
    ) -> Result<Var<'s, S>> {
        self.down.forward_residual(tape, &self.gated(tape, x)?, residual)
    }

    #[track_caller]
    fn gated<'s, S: Factor<S> + Factor<f32>>(&self, tape: &Tape<'_, 's>, x: &Var<'s, S>) -> Result<Var<'s, S>> {
        tape.linear_swiglu(x, self.up.weight, self.up.bias, &self.gate.forward(tape, x)?)
    }
}
