//! The sum and the mean of all elements on a tape.

use super::{Tape, Var};
use crate::error::Result;
use crate::ops;

impl<'s> Tape<'_, 's> {
    /// The sum of all elements; `x`: any shape, result: `[1]`. See [`ops::sum`].
    ///
    /// # Errors
    /// Those of the op.
    #[track_caller]
    pub fn sum(&self, x: &Var<'s>) -> Result<Var<'s>> {
        let op = self.op("sum", [x])?;
        let (y, shape) = (ops::sum(self.step(), x.value())?, x.shape());
        op.record_scalar(y.save(), x, move |step| ops::fill(step, shape, 1.0))
    }

    /// The mean of all elements; `x`: any shape with elements, result: `[1]`. See [`ops::mean`].
    ///
    /// # Errors
    /// Those of the op.
    #[track_caller]
    pub fn mean(&self, x: &Var<'s>) -> Result<Var<'s>> {
        let op = self.op("mean", [x])?;
        let (y, shape) = (ops::mean(self.step(), x.value())?, x.shape());
        op.record_scalar(y.save(), x, move |step| ops::fill(step, shape, 1.0 / shape.elements() as f32))
    }
}
