//! GELU, and an MLP of two linear layers with GELU between them.

use super::{Linear, Scope};
use stepscope_core::ops::Activation;
use stepscope_core::{Result, Tape, Var};

/// `y = gelu(x W1 + b1) W2 + b2` in two launches, without adapters; `x`: `[.., in]`, `y`:
/// `[.., out]`.
#[derive(Clone, Copy, Debug)]
pub struct Mlp {
    /// W1 and b1.
    pub up: Linear,
    /// W2 and b2.
    pub down: Linear,
}

impl Mlp {
    /// Adds `up` and `down`, each with `weight` and `bias`; see [`Linear::new`].
    pub fn new(mut names: Scope<'_>, inputs: usize, hidden: usize, outputs: usize) -> Self {
        Self { up: Linear::new(names.at("up"), inputs, hidden), down: Linear::new(names.at("down"), hidden, outputs) }
    }

    /// Computes y; see [`Tape::mlp_gelu`].
    #[track_caller]
    pub fn forward<'s, S: Activation>(&self, tape: &Tape<'_, 's>, x: &Var<'s, S>) -> Result<Var<'s, S>> {
        self.on_tape(tape, x, None)
    }

    /// Computes `residual + forward(x)`, also in two launches.
    #[track_caller]
    pub fn forward_residual<'s, S: Activation>(
        &self,
        tape: &Tape<'_, 's>,
        x: &Var<'s, S>,
        residual: &Var<'s, S>,
    ) -> Result<Var<'s, S>> {
        self.on_tape(tape, x, Some(residual))
    }

    #[track_caller]
    fn on_tape<'s, S: Activation>(
        &self,
        tape: &Tape<'_, 's>,
        x: &Var<'s, S>,
        residual: Option<&Var<'s, S>>,
    ) -> Result<Var<'s, S>> {
        if self.up.adapter.is_none() && self.down.adapter.is_none() {
            let [up, down] = [self.up, self.down].map(|layer| (layer.weight, layer.bias));
            return tape.mlp_gelu(x, up, down, residual);
        }
        let h = match self.up.adapter {
            None => tape.linear_gelu(x, self.up.weight, self.up.bias)?,
            Some(_) => self.up.forward(tape, x)?.gelu()?,
        };
        match residual {
            Some(residual) => self.down.forward_residual(tape, &h, residual),
            None => self.down.forward(tape, &h),
        }
    }
}
