//! Transposes of matrices, and swaps of any two extents.

use crate::error::{Error, Result};
use crate::ops;
use crate::step::Step;
use crate::tape::{Tape, Var};
use crate::tensor::{Shape, Source, Stored, Target, Tensor};
use kernels::transpose as kernel;

/// `y[.., j, i] = x[.., i, j]`; `x`: `[.., rows, cols]`, `y`: `[.., cols, rows]`. Queues the work,
/// and needs no scratch memory. A product can transpose its operands without this op; see
/// [`Gemm`](super::Gemm).
///
/// # Errors
/// [`Error::Misuse`] for fewer than two extents; [`Error::ArenaFull`].
#[track_caller]
pub fn transpose<'s, S: Stored>(step: &Step<'s>, x: &impl Source<'s, S>) -> Result<Tensor<'s, S>> {
    let (rows, cols, shape): (_, _, Shape) = match *x.shape().extents() {
        [rows, cols] => (rows, cols, [cols, rows].into()),
        [a, rows, cols] => (rows, cols, [a, cols, rows].into()),
        [a, b, rows, cols] => (rows, cols, [a, b, cols, rows].into()),
        _ => return Err(Error::misuse("transpose", "at least two extents", x.shape().to_string())),
    };
    let mut y = step.empty(shape)?;
    if shape.elements() > 0 {
        step.launch(kernel::transpose { x: x.slice(), rows, cols, y: y.out() })?;
    }
    Ok(y)
}

/// Swaps the extents number `a` and `b`, such as heads and tokens; `x`: any shape, `y`: the shape
/// with these extents swapped. Queued, one launch; no scratch. If the last extent stays, whole rows
/// are copied. If the last two are swapped, this is [`transpose`]. The gradient is the same swap of
/// dy.
///
/// # Errors
/// [`Error::Misuse`] when there is no such extent; [`Error::ArenaFull`].
#[track_caller]
pub fn swap_extents<'s, S: Stored>(
    step: &Step<'s>,
    x: &impl Source<'s, S>,
    a: usize,
    b: usize,
) -> Result<Tensor<'s, S>> {
    let (shape, a, b) = (x.shape(), a.min(b), a.max(b));
    let extents = shape.extents();
    if b >= extents.len() {
        return Err(Error::misuse("swap_extents", format!("a tensor with an extent number {b}"), shape.to_string()));
    }
    if a == b {
        return ops::copy(step, x);
    }
    if a + 2 == extents.len() {
        return transpose(step, x);
    }
    let mut y = step.empty(shape.with(a, extents[b]).with(b, extents[a]))?;
    if shape.elements() > 0 {
        step.launch(kernel::swap_extents {
            x: x.slice(),
            first: extents[a],
            between: extents[a + 1..b].iter().product(),
            second: extents[b],
            cols: extents[b + 1..].iter().product(),
            y: y.out(),
        })?;
    }
    Ok(y)
}

impl<'s> Tape<'_, 's> {
    /// Returns the same elements in the same order with other extents; `x`: any shape, result:
    /// `shape`, of as many elements. Nothing is copied.
    ///
    /// # Errors
    /// [`Error::Misuse`](crate::Error::Misuse) when the number of elements differs.
    #[track_caller]
    pub fn reshape<S: Stored>(&self, x: &Var<'s, S>, shape: impl Into<Shape>) -> Result<Var<'s, S>> {
        let op = self.op("reshape", [x])?;
        let (y, x) = (x.value().reshape(shape)?, *x);
        Ok(op.record(y, move |back, dy| {
            let dx = dy.reshape(x.shape())?;
            back.add(&x, dx)
        }))
    }

    /// `y[.., j, i] = x[.., i, j]`; `x`: `[.., rows, cols]`, `y`: `[.., cols, rows]`. See
    /// [`ops::transpose`].
    #[track_caller]
    pub fn transpose<S: Stored>(&self, x: &Var<'s, S>) -> Result<Var<'s, S>> {
        let op = self.op("transpose", [x])?;
        let (y, x) = (ops::transpose(self.step(), x.value())?, *x);
        Ok(op.record(y.save(), move |back, dy| {
            let dx = ops::transpose(back.step(), &dy)?;
            back.step().free(dy);
            back.add(&x, dx)
        }))
    }

    /// Records [`ops::swap_extents`] of `x`. Backward swaps the extents again.
    #[track_caller]
    pub fn swap_extents<S: Stored>(&self, x: &Var<'s, S>, a: usize, b: usize) -> Result<Var<'s, S>> {
        let op = self.op("swap_extents", [x])?;
        let (y, x) = (ops::swap_extents(self.step(), x.value(), a, b)?, *x);
        Ok(op.record(y.save(), move |back, dy| {
            let dx = ops::swap_extents(back.step(), &dy, a, b)?;
            back.step().free(dy);
            back.add(&x, dx)
        }))
    }
}
