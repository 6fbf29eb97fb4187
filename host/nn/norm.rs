//! RMSNorm.

use super::Names;
use crate::autograd::{Tape, Var};
use crate::error::Result;
use crate::initializer::Initializer;
use crate::params::Parameter;
use crate::tensor::Stored;

/// `y = gain x / sqrt(mean(x^2) + epsilon)` over the last extent (Zhang and Sennrich, 2019); `gain`: `[cols]`.
#[derive(Clone, Copy, Debug)]
pub struct RmsNorm {
    /// The gain.
    pub gain: Parameter,
    /// What keeps rows of zeros finite.
    pub epsilon: f32,
}

impl RmsNorm {
    /// The default epsilon.
    pub const EPSILON: f32 = 1e-6;

    /// `gain`, one; with [`RmsNorm::EPSILON`].
    pub fn new(mut names: Names<'_>, cols: usize) -> Self {
        Self { gain: names.add("gain", [cols], Initializer::ONE), epsilon: Self::EPSILON }
    }

    /// See [`Tape::rms_norm`].
    ///
    /// # Errors
    /// Those of the op.
    #[track_caller]
    pub fn forward<'s, S: Stored>(&self, tape: &Tape<'_, 's>, x: &Var<'s, S>) -> Result<Var<'s, S>> {
        tape.rms_norm(x, self.gain, self.epsilon)
    }

    /// `h = x + residual` and the norm of h, both; see [`Tape::rms_norm_residual`].
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
        tape.rms_norm_residual(x, residual, self.gain, self.epsilon)
    }
}
