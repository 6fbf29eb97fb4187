//! Clipping by the global norm, for optimisers that are made of ops.

use crate::error::Result;
use crate::step::Step;
use crate::tensor::{Source, Target, Tensor};
use kernels::clip as kernel;

/// `min(1, max_norm / (sqrt(squared_norm) + 1e-6))`, `[1]`: times this, gradients with this squared norm have at most the norm
/// `max_norm`; 1 where `max_norm` is 0. `squared_norm`: `[1]`. Queued, no scratch.
///
/// # Errors
/// [`Error::ArenaFull`](crate::Error::ArenaFull).
#[track_caller]
pub fn clip_factor<'s>(step: &Step<'s>, squared_norm: &impl Source<'s, f32>, max_norm: f32) -> Result<Tensor<'s>> {
    let mut out = step.empty([1])?;
    step.launch(kernel::clip_factor { squared_norm: squared_norm.slice(), max_norm, out: out.out() })?;
    Ok(out)
}
