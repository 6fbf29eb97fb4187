//! Constants and copies.

use super::same_shape;
use crate::error::Result;
use crate::step::Step;
use crate::tensor::{Shape, Source, Stored, Target, Tensor};
use kernels::fill as kernel;

/// Makes a tensor with all elements equal to `value`. Queues the work, and needs no scratch memory.
///
/// # Errors
/// [`Error::ArenaFull`](crate::Error::ArenaFull).
#[track_caller]
pub fn fill<'s>(step: &Step<'s>, shape: impl Into<Shape>, value: f32) -> Result<Tensor<'s>> {
    let mut out = step.empty(shape)?;
    fill_into(step, &mut out, value)?;
    Ok(out)
}

/// `out = value`, in place. Queues the work, and needs no scratch memory.
#[track_caller]
pub fn fill_into<'s, S: Stored>(step: &Step<'s>, out: &mut impl Target<'s, S>, value: f32) -> Result<()> {
    let length = out.shape().elements();
    step.launch(kernel::fill { out: out.out(), length, value })
}

/// Makes a copy of a tensor. Queues the work, and needs no scratch memory.
///
/// # Errors
/// [`Error::ArenaFull`](crate::Error::ArenaFull).
#[track_caller]
pub fn copy<'s, S: Stored>(step: &Step<'s>, x: &impl Source<'s, S>) -> Result<Tensor<'s, S>> {
    let mut out = step.empty(x.shape())?;
    copy_into(step, x, &mut out)?;
    Ok(out)
}

/// `out = x`, in place; `x`, `out`: the same shape. Queues the work, and needs no scratch memory.
///
/// # Errors
/// [`Error::Misuse`](crate::Error::Misuse) when shapes differ.
#[track_caller]
pub fn copy_into<'s, S: Stored>(step: &Step<'s>, x: &impl Source<'s, S>, out: &mut impl Target<'s, S>) -> Result<()> {
    same_shape("copy", out.shape(), x.shape())?;
    step.launch(kernel::copy { x: x.slice(), out: out.out() })
}
