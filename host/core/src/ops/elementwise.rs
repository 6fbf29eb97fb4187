//! Biases, and the form on a tape of scalings.

use super::shapes::check_row;
use crate::elementary::scale;
use crate::error::Result;
use crate::step::Step;
use crate::tape::{Tape, Var};
use crate::tensor::{Source, Stored, Target, Tensor};
use kernels::elementwise;

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
