//! tanh and GELU on a tape.

use super::{Tape, Var};
use crate::error::Result;
use crate::ops;

impl<'s> Tape<'_, 's> {
    /// [`ops::tanh`], `x` and result: any shape; backward is [`ops::tanh_backward`].
    ///
    /// # Errors
    /// Those of the op.
    #[track_caller]
    pub fn tanh(&self, x: &Var<'s>) -> Result<Var<'s>> {
        let op = self.op("tanh", [x])?;
        let (y, x) = (ops::tanh(self.step(), x.value())?.save(), *x);
        Ok(op.record(y, move |back, dy| {
            let dx = ops::tanh_backward(back.step(), &y, &dy)?;
            back.add(&x, dx)
        }))
    }

    /// [`ops::gelu`], `x` and result: any shape; backward is [`ops::gelu_backward`].
    ///
    /// # Errors
    /// Those of the op.
    #[track_caller]
    pub fn gelu(&self, x: &Var<'s>) -> Result<Var<'s>> {
        let op = self.op("gelu", [x])?;
        let (y, x) = (ops::gelu(self.step(), x.value())?.save(), *x);
        Ok(op.record(y, move |back, dy| {
            let dx = ops::gelu_backward(back.step(), x.value(), &dy)?;
            back.add(&x, dx)
        }))
    }
}
