//! Clipping by the global norm, for optimizers that are composed of ops.

use crate::error::Result;
use crate::step::Step;
use crate::tensor::{Source, Target, Tensor};
use kernels::clip as kernel;

/// `min(1, max_norm / (sqrt(squared_norm) + 1e-6))`, or 1 if `max_norm` is 0; `squared_norm`,
/// result: `[1]`.
///
/// Gradients with this squared norm, multiplied by the result, have a norm of at most `max_norm`.
/// Queues the work, and needs no scratch memory.
///
/// # Errors
/// [`Error::ArenaFull`](crate::Error::ArenaFull).
#[track_caller]
pub fn clip_factor<'s>(step: &Step<'s>, squared_norm: &impl Source<'s, f32>, max_norm: f32) -> Result<Tensor<'s>> {
    let mut out = step.empty([1])?;
    step.launch(kernel::clip_factor { squared_norm: squared_norm.slice(), max_norm, out: out.out() })?;
    Ok(out)
}
