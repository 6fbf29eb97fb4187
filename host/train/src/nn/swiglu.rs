//! A SwiGLU feed-forward layer.

use super::{Linear, Scope};
use stepscope_core::ops::Activation;
use stepscope_core::{Result, Tape, Var};

/// `y = (silu(x Wg) * (x Wu)) Wd` (Shazeer, 2020), without biases; `x`: `[.., in]`, `y`:
/// `[.., out]`.
#[derive(Clone, Copy, Debug)]
pub struct SwiGlu {
    /// The layer of Wg.
    pub gate: Linear,
    /// The layer of Wu.
    pub up: Linear,
    /// The layer of Wd.
    pub down: Linear,
}

impl SwiGlu {
    /// Adds `gate_proj.weight`, `up_proj.weight` and `down_proj.weight`, as in Llama; see
    /// [`Linear::without_bias`].
    pub fn new(mut names: Scope<'_>, inputs: usize, hidden: usize, outputs: usize) -> Self {
        Self {
            gate: Linear::without_bias(names.at("gate_proj"), inputs, hidden),
            up: Linear::without_bias(names.at("up_proj"), inputs, hidden),
            down: Linear::without_bias(names.at("down_proj"), hidden, outputs),
        }
    }

    /// Computes y; see [`Tape::linear_swiglu`].
    #[track_caller]
    pub fn forward<'s, S: Activation>(&self, tape: &Tape<'_, 's>, x: &Var<'s, S>) -> Result<Var<'s, S>> {
        self.down.forward(tape, &self.gated(tape, x)?)
    }

    /// Computes `residual + forward(x)`.
    #[track_caller]
    pub fn forward_residual<'s, S: Activation>(
        &self,
        tape: &Tape<'_, 's>,
        x: &Var<'s, S>,
        residual: &Var<'s, S>,
    ) -> Result<Var<'s, S>> {
        self.down.forward_residual(tape, &self.gated(tape, x)?, residual)
    }

    #[track_caller]
    fn gated<'s, S: Activation>(&self, tape: &Tape<'_, 's>, x: &Var<'s, S>) -> Result<Var<'s, S>> {
        if self.up.adapter.is_none() {
            return tape.linear_swiglu(x, self.up.weight, self.up.bias, &self.gate.forward(tape, x)?);
        }
        let [gate, up] = self.gate.forward_both(&self.up, tape, x)?;
        tape.swiglu(&gate, &up)
    }
}
