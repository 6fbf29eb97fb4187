//! Scalings, biases and sums in place, elementwise.

use super::same_shape;
use super::shapes::check_row;
use crate::error::Result;
use crate::step::Step;
use crate::tape::{Tape, Var};
use crate::tensor::{Source, Stored, Target, Tensor};
use kernels::elementwise;

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

impl<'s> Tape<'_, 's> {
    /// Records [`ops::scale`](crate::ops::scale).
    #[track_caller]
    pub fn scale<S: Stored>(&self, x: &Var<'s, S>, factor: f32) -> Result<Var<'s, S>> {
        let op = self.op("scale", [x])?;
        let (y, x) = (scale(self.step(), x.value(), factor)?, *x);
        Ok(op.record(y.save(), move |back, dy| {
            let dx = scale(back.step(), &dy, factor)?;
            back.step().free(dy);
            back.add(&x, dx)
        }))
    }
}
