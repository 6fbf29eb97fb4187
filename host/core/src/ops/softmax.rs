//! Softmax over rows, and its logarithm.

use super::same_shape;
use crate::error::Result;
use crate::ops;
use crate::step::Step;
use crate::tape::{Tape, Var};
use crate::tensor::{Source, Stored, Target, Tensor};
use kernels::softmax as kernel;

/// `y[r, c] = exp(x[r, c] - max_r) / sum over j of exp(x[r, j] - max_r)`; `x`, `y`: `[.., cols]`.
/// Queued; no scratch.
///
/// # Errors
/// [`Error::ArenaFull`](crate::Error::ArenaFull).
#[track_caller]
pub fn softmax<'s, S: Stored>(step: &Step<'s>, x: &impl Source<'s, S>) -> Result<Tensor<'s, S>> {
    let [_, cols] = x.shape().as_rows();
    let mut y = step.empty(x.shape())?;
    step.launch(kernel::softmax_forward { x: x.slice(), cols, y: y.out() })?;
    Ok(y)
}

/// `dx = y (dy - sum over j of y_j dy_j)` by row, for `y = softmax(x)`; all `[.., cols]`. Queued;
/// no scratch.
///
/// # Errors
/// [`Error::Misuse`](crate::Error::Misuse) when shapes differ;
/// [`Error::ArenaFull`](crate::Error::ArenaFull).
#[track_caller]
pub fn softmax_backward<'s, S: Stored>(
    step: &Step<'s>,
    y: &impl Source<'s, S>,
    dy: &impl Source<'s, S>,
) -> Result<Tensor<'s, S>> {
    same_shape("softmax_backward", y.shape(), dy.shape())?;
    let [_, cols] = y.shape().as_rows();
    let mut dx = step.empty(y.shape())?;
    step.launch(kernel::softmax_backward { y: y.slice(), dy: dy.slice(), cols, dx: dx.out() })?;
    Ok(dx)
}

/// `y[r, c] = x[r, c] - max_r - log(sum over j of exp(x[r, j] - max_r))`, the logarithm of
/// [`softmax`]; `x`, `y`: `[.., cols]`. Queued; no scratch.
///
/// # Errors
/// [`Error::ArenaFull`](crate::Error::ArenaFull).
#[track_caller]
pub fn log_softmax<'s, S: Stored>(step: &Step<'s>, x: &impl Source<'s, S>) -> Result<Tensor<'s, S>> {
    let [_, cols] = x.shape().as_rows();
    let mut y = step.empty(x.shape())?;
    step.launch(kernel::log_softmax_forward { x: x.slice(), cols, y: y.out() })?;
    Ok(y)
}

/// `dx = dy - exp(y) sum over j of dy_j` by row, for `y = log_softmax(x)`; all `[.., cols]`.
/// Queued; no scratch.
///
/// # Errors
/// [`Error::Misuse`](crate::Error::Misuse) when shapes differ;
/// [`Error::ArenaFull`](crate::Error::ArenaFull).
#[track_caller]
pub fn log_softmax_backward<'s, S: Stored>(
    step: &Step<'s>,
    y: &impl Source<'s, S>,
    dy: &impl Source<'s, S>,
) -> Result<Tensor<'s, S>> {
    same_shape("log_softmax_backward", y.shape(), dy.shape())?;
    let [_, cols] = y.shape().as_rows();
    let mut dx = step.empty(y.shape())?;
    step.launch(kernel::log_softmax_backward { y: y.slice(), dy: dy.slice(), cols, dx: dx.out() })?;
    Ok(dx)
}

impl<'s> Tape<'_, 's> {
    /// Records [`ops::softmax`] over the last extent; `x`, result: `[.., cols]`. Backward is
    /// [`ops::softmax_backward`].
    #[track_caller]
    pub fn softmax<S: Stored>(&self, x: &Var<'s, S>) -> Result<Var<'s, S>> {
        let op = self.op("softmax", [x])?;
        let (y, x) = (ops::softmax(self.step(), x.value())?.save(), *x);
        Ok(op.record(y, move |back, dy| {
            let dx = ops::softmax_backward(back.step(), &y, &dy)?;
            back.step().free(dy);
            back.add(&x, dx)
        }))
    }

    /// Records [`ops::log_softmax`] over the last extent; `x`, result: `[.., cols]`. Backward is
    /// [`ops::log_softmax_backward`].
    #[track_caller]
    pub fn log_softmax<S: Stored>(&self, x: &Var<'s, S>) -> Result<Var<'s, S>> {
        let op = self.op("log_softmax", [x])?;
        let (y, x) = (ops::log_softmax(self.step(), x.value())?.save(), *x);
        Ok(op.record(y, move |back, dy| {
            let dx = ops::log_softmax_backward(back.step(), &y, &dy)?;
            back.step().free(dy);
            back.add(&x, dx)
        }))
    }
}
