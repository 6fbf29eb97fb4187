//! Biases.

use super::shapes::check_row;
use crate::error::Result;
use crate::step::Step;
use crate::tensor::{Source, Stored, Target, Tensor};
use kernels::elementwise;

/// `out = x + bias` for every row; `x`, `out`: `[.., cols]`, `bias`: `[cols]`. Queues the work, and
/// needs no scratch memory.
///
/// # Errors
/// [`Error::Misuse`](crate::Error::Misuse) when the last extents differ;
/// [`Error::ArenaFull`](crate::Error::ArenaFull).
#[track_caller]
pub fn add_bias<'s, S: Stored>(
    step: &Step<'s>,
    x: &impl Source<'s, S>,
    bias: &impl Source<'s, f32>,
) -> Result<Tensor<'s, S>> {
    let [_, cols] = x.shape().as_rows();
    check_row("add_bias", "bias", cols, bias)?;
    let mut out = step.empty(x.shape())?;
    step.launch(elementwise::add_bias { x: x.slice(), bias: bias.slice(), cols, out: out.out() })?;
    Ok(out)
}
