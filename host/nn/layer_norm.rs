//! LayerNorm.

use super::Names;
use crate::autograd::{Tape, Var};
use crate::error::Result;
use crate::initializer::Initializer;
use crate::params::Parameter;
use crate::tensor::Stored;

/// `y = gain (x - mean(x)) / sqrt(variance(x) + epsilon) + bias` over the last extent (Ba, Kiros and Hinton, 2016); `gain`, `bias`:
/// `[cols]`.
#[derive(Clone, Copy, Debug)]
pub struct LayerNorm {
    /// The gain; PyTorch's `weight`.
    pub gain: Parameter,
    /// The bias.
    pub bias: Parameter,
    /// What keeps rows of equal numbers finite.
    pub epsilon: f32,
}

impl LayerNorm {
    /// The default epsilon, PyTorch's.
    pub const EPSILON: f32 = 1e-5;

    /// `gain`, one, and `bias`, zero; with [`LayerNorm::EPSILON`].
    pub fn new(mut names: Names<'_>, cols: usize) -> Self {
        let gain = names.add("gain", [cols], Initializer::ONE);
        Self { gain, bias: names.add("bias", [cols], Initializer::ZERO), epsilon: Self::EPSILON }
    }

    /// See [`Tape::layer_norm`].
    ///
    /// # Errors
    /// Those of the op.
    #[track_caller]
    pub fn forward<'s, S: Stored>(&self, tape: &Tape<'_, 's>, x: &Var<'s, S>) -> Result<Var<'s, S>> {
        tape.layer_norm(x, self.gain, self.bias, self.epsilon)
    }

    /// `h = x + residual` and the norm of h, both; see [`Tape::layer_norm_residual`].
    ///
    /// # Errors
    /// Those of the op.
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
