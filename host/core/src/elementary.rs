//! The operations that parameters and tapes need themselves: constants, copies, sums in place and
//! scalings.
//!
//! [`ops`](crate::ops) re-exports them. Invariant: nothing here records on a tape.

#![forbid(unsafe_code)]

use crate::error::{Error, Result};
use crate::step::Step;
use crate::tensor::{Shape, Source, Stored, Target, Tensor};
use kernels::{elementwise, fill};

/// Returns an error of `op` unless the two shapes are equal.
///
/// # Errors
/// [`Error::Misuse`] when the shapes differ.
pub fn same_shape(op: &'static str, a: Shape, b: Shape) -> Result<()> {
    if a == b {
        Ok(())
    } else {
        Err(Error::misuse(op, format!("two tensors of shape {a}"), format!("a tensor of shape {b}")))
    }
}

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
    step.launch(fill::fill { out: out.out(), length, value })
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
    step.launch(fill::copy { x: x.slice(), out: out.out() })
}

/// `out += a`, in place; `a`, `out`: the same shape. Queues the work, and needs no scratch memory.
///
/// # Errors
/// [`Error::Misuse`](crate::Error::Misuse) when shapes differ.
#[track_caller]
pub fn add_assign<'s, S: Stored>(step: &Step<'s>, out: &mut impl Target<'s, S>, a: &impl Source<'s, S>) -> Result<()> {
    same_shape("add_assign", out.shape(), a.shape())?;
    step.launch(elementwise::add_assign { a: a.slice(), out: out.out() })
}

/// `out = factor x`; `x`, `out`: the same shape. Queues the work, and needs no scratch memory.
///
/// # Errors
/// [`Error::ArenaFull`](crate::Error::ArenaFull).
#[track_caller]
pub fn scale<'s, S: Stored>(step: &Step<'s>, x: &impl Source<'s, S>, factor: f32) -> Result<Tensor<'s, S>> {
    let mut out = step.empty(x.shape())?;
    step.launch(elementwise::scale { x: x.slice(), factor, out: out.out() })?;
    Ok(out)
}

/// `out = factor x`; `factor`: `[1]`; `x`, `out`: the same shape. Queues the work, and needs no
/// scratch memory.
///
/// # Errors
/// [`Error::Misuse`](crate::Error::Misuse) unless the factor has one element;
/// [`Error::ArenaFull`](crate::Error::ArenaFull).
#[track_caller]
pub fn scale_by<'s, S: Stored>(
    step: &Step<'s>,
    x: &impl Source<'s, S>,
    factor: &impl Source<'s, f32>,
) -> Result<Tensor<'s, S>> {
    let mut out = step.empty(x.shape())?;
    scale_by_into(step, x, factor, &mut out, false)?;
    Ok(out)
}

/// `out = factor x`, or `out += factor x` with one fused multiply-add when `accumulate`; `factor`:
/// `[1]`; `x`, `out`: the same shape. Queues the work, and needs no scratch memory.
///
/// # Errors
/// [`Error::Misuse`](crate::Error::Misuse) unless the factor has one element and `x` and `out` have
/// the same shape.
#[track_caller]
pub fn scale_by_into<'s, S: Stored>(
    step: &Step<'s>,
    x: &impl Source<'s, S>,
    factor: &impl Source<'s, f32>,
    out: &mut impl Target<'s, S>,
    accumulate: bool,
) -> Result<()> {
    same_shape("scale_by", [1].into(), factor.shape())?;
    same_shape("scale_by", x.shape(), out.shape())?;
    let accumulate = u32::from(accumulate);
    step.launch(elementwise::scale_by { x: x.slice(), factor: factor.slice(), accumulate, out: out.out() })
}
