//! Softmax on a tape.

use super::{Tape, Var};
use crate::error::Result;
use crate::ops;

impl<'s> Tape<'_, 's> {
    /// [`ops::softmax`] over the last extent; `x`, result: `[.., cols]`; backward is [`ops::softmax_backward`].
    ///
    /// # Errors
    /// Those of the op.
    #[track_caller]
    pub fn softmax(&self, x: &Var<'s>) -> Result<Var<'s>> {
        let op = self.op("softmax", [x])?;
        let (y, x) = (ops::softmax(self.step(), x.value())?.save(), *x);
        Ok(op.record(y, move |back, dy| {
            let dx = ops::softmax_backward(back.step(), &y, &dy)?;
            back.add(&x, dx)
        }))
    }
}
