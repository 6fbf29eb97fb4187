//! The mean over tokens on a tape.

use super::{Tape, Var};
use crate::error::Result;
use crate::ops;

impl<'s> Tape<'_, 's> {
    /// [`ops::mean_tokens`]; `x`: `[batch, tokens, cols]`, result: `[batch, cols]`.
    ///
    /// # Errors
    /// Those of the op.
    #[track_caller]
    pub fn mean_tokens(&self, x: &Var<'s>) -> Result<Var<'s>> {
        let op = self.op("mean_tokens", [x])?;
        let (y, x) = (ops::mean_tokens(self.step(), x.value())?, *x);
        Ok(op.record(y.save(), move |back, dy| {
            let dx = ops::mean_tokens_backward(back.step(), &dy, x.shape())?;
            back.add(&x, dx)
        }))
    }
}
