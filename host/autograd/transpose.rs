//! The same elements in another shape or order on a tape.

use super::{Tape, Var};
use crate::error::Result;
use crate::ops;
use crate::tensor::Shape;

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
