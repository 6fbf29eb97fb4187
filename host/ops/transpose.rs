//! Matrices transposed.

use crate::autograd::{Tape, Var};
use crate::error::{Error, Result};
use crate::ops;
use crate::step::Step;
use crate::tensor::{Shape, Source, Target, Tensor};
use kernels::transpose as kernel;

/// `y[.., j, i] = x[.., i, j]`; `x`: `[.., rows, cols]`, `y`: `[.., cols, rows]`. Queued, no scratch. A product transposes its factors
/// by itself: see [`Gemm`](super::Gemm).
///
/// # Errors
/// [`Error::Misuse`] for fewer than two extents; [`Error::ArenaFull`].
#[track_caller]
pub fn transpose<'s>(step: &Step<'s>, x: &impl Source<'s, f32>) -> Result<Tensor<'s>> {
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

impl<'s> Tape<'_, 's> {
    /// The same elements in the same order with other extents; `x`: any shape, result: `shape`, of as many elements. Copies nothing.
    ///
    /// # Errors
    /// [`Error::Misuse`](crate::Error::Misuse) when the number of elements differs.
    #[track_caller]
    pub fn reshape(&self, x: &Var<'s>, shape: impl Into<Shape>) -> Result<Var<'s>> {
        let op = self.op("reshape", [x])?;
        let (y, x) = (x.value().reshape(shape)?, *x);
        Ok(op.record(y, move |back, dy| {
            let dx = dy.reshape(x.shape())?;
            back.add(&x, dx)
        }))
    }

    /// `y[.., j, i] = x[.., i, j]`; `x`: `[.., rows, cols]`, `y`: `[.., cols, rows]`. See [`ops::transpose`].
    ///
    /// # Errors
    /// Those of the op.
    #[track_caller]
    pub fn transpose(&self, x: &Var<'s>) -> Result<Var<'s>> {
        let op = self.op("transpose", [x])?;
        let (y, x) = (ops::transpose(self.step(), x.value())?, *x);
        Ok(op.record(y.save(), move |back, dy| {
            let dx = ops::transpose(back.step(), &dy)?;
            back.add(&x, dx)
        }))
    }
}
