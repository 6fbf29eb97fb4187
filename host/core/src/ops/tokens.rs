//! The mean over tokens.

use crate::error::{Error, Result};
use crate::ops;
use crate::step::Step;
use crate::tape::{Tape, Var};
use crate::tensor::{Shape, Source, Stored, Target, Tensor};
use kernels::tokens as kernel;

/// `y[b, c] = 1/tokens * sum over t of x[b, t, c]`; `x`: `[batch, tokens, cols]`, `y`: `[batch,
/// cols]`. Queues the work, and needs no scratch memory.
///
/// # Errors
/// [`Error::Misuse`] for another number of extents or no tokens; [`Error::ArenaFull`].
#[track_caller]
pub fn mean_tokens<'s, S: Stored>(step: &Step<'s>, x: &impl Source<'s, S>) -> Result<Tensor<'s, S>> {
    let [batch, tokens, cols] = form("mean_tokens", x.shape())?;
    let mut y = step.empty([batch, cols])?;
    step.launch(kernel::mean_tokens_forward { x: x.slice(), tokens, cols, length: batch * cols, y: y.out() })?;
    Ok(y)
}

/// `dx[b, t, c] = dy[b, c] / tokens`; `dy`: `[batch, cols]`, `dx`: `shape` = `[batch, tokens,
/// cols]`. Queues the work, and needs no scratch memory.
#[track_caller]
pub fn mean_tokens_backward<'s, S: Stored>(
    step: &Step<'s>,
    dy: &impl Source<'s, S>,
    shape: impl Into<Shape>,
) -> Result<Tensor<'s, S>> {
    let shape = shape.into();
    let [batch, tokens, cols] = form("mean_tokens_backward", shape)?;
    super::same_shape("mean_tokens_backward", [batch, cols].into(), dy.shape())?;
    let mut dx = step.empty(shape)?;
    step.launch(kernel::mean_tokens_backward { dy: dy.slice(), tokens, cols, dx: dx.out() })?;
    Ok(dx)
}

fn form(op: &'static str, shape: Shape) -> Result<[usize; 3]> {
    match *shape.extents() {
        [batch, tokens, cols] if tokens > 0 => Ok([batch, tokens, cols]),
        _ => Err(Error::misuse(op, "[batch, tokens, cols] with at least one token", shape.to_string())),
    }
}

impl<'s> Tape<'_, 's> {
    /// Records [`ops::mean_tokens`]; `x`: `[batch, tokens, cols]`, result: `[batch, cols]`.
    #[track_caller]
    pub fn mean_tokens<S: Stored>(&self, x: &Var<'s, S>) -> Result<Var<'s, S>> {
        let op = self.op("mean_tokens", [x])?;
        let (y, x) = (ops::mean_tokens(self.step(), x.value())?, *x);
        Ok(op.record(y.save(), move |back, dy| {
            let dx = ops::launch::mean_tokens_backward(back.step(), &dy, x.shape())?;
            back.step().free(dy);
            back.add(&x, dx)
        }))
    }
}
