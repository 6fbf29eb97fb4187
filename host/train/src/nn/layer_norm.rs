//! LayerNorm.

use super::Scope;
use stepscope_core::{Initializer, Parameter, Result, Stored, Tape, Var};

/// `y = gain (x - mean(x)) / sqrt(variance(x) + epsilon) + bias` over the last extent (Ba, Kiros
/// and Hinton, 2016); `gain`, `bias`: `[cols]`.
#[derive(Clone, Copy, Debug)]
pub struct LayerNorm {
    /// The gain, PyTorch's `weight`.
    pub gain: Parameter,
    /// The bias.
    pub bias: Parameter,
    /// The term that keeps rows of equal values finite.
    pub epsilon: f32,
}

impl LayerNorm {
    /// The default epsilon, as in PyTorch.
    pub const EPSILON: f32 = 1e-5;

    /// Adds `gain`, initialized to one, and `bias`, initialized to zero. Uses
    /// [`LayerNorm::EPSILON`].
    pub fn new(mut names: Scope<'_>, cols: usize) -> Self {
        let gain = names.add("gain", [cols], Initializer::ONE);
        Self { gain, bias: names.add("bias", [cols], Initializer::ZERO), epsilon: Self::EPSILON }
    }

    /// Computes the norm of x; see [`Tape::layer_norm`].
    #[track_caller]
    pub fn forward<'s, S: Stored>(&self, tape: &Tape<'_, 's>, x: &Var<'s, S>) -> Result<Var<'s, S>> {
        tape.layer_norm(x, self.gain, self.bias, self.epsilon)
    }

    /// Computes `h = x + residual` and the norm of h, and returns both. See
    /// [`Tape::layer_norm_residual`].
    #[track_caller]
    pub fn forward_residual<'s, S: Stored>(
        &self,
        tape: &Tape<'_, 's>,
        x: &Var<'s, S>,
        residual: &Var<'s, S>,
    ) -> Result<[Var<'s, S>; 2]> {
        tape.layer_norm_residual(x, residual, self.gain, self.bias, self.epsilon)
    }
}
