//! RMSNorm.

use super::Scope;
use stepscope_core::{Initializer, Parameter, Result, Stored, Tape, Var};

/// `y = gain x / sqrt(mean(x^2) + epsilon)` over the last extent (Zhang and Sennrich, 2019);
/// `gain`: `[cols]`.
#[derive(Clone, Copy, Debug)]
pub struct RmsNorm {
    /// The gain.
    pub gain: Parameter,
    /// The term that keeps rows of zeros finite.
    pub epsilon: f32,
}

impl RmsNorm {
    /// The default epsilon.
    pub const EPSILON: f32 = 1e-6;

    /// Adds `gain`, initialized to one. Uses [`RmsNorm::EPSILON`].
    pub fn new(mut names: Scope<'_>, cols: usize) -> Self {
        Self { gain: names.add("gain", [cols], Initializer::ONE), epsilon: Self::EPSILON }
    }

    /// Computes the norm of x; see [`Tape::rms_norm`].
    #[track_caller]
    pub fn forward<'s, S: Stored>(&self, tape: &Tape<'_, 's>, x: &Var<'s, S>) -> Result<Var<'s, S>> {
        tape.rms_norm(x, self.gain, self.epsilon)
    }

    /// Computes `h = x + residual` and the norm of h, and returns both. See
    /// [`Tape::rms_norm_residual`].
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
