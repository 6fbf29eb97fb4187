//! Casts between f32 and BF16.

use crate::autograd::{Tape, Var};
use crate::error::Result;
use crate::ops;
use crate::step::Step;
use crate::tensor::{Source, Target, Tensor};
use half::bf16;
use kernels::cast as kernel;

/// `x` rounded to the nearest BF16, ties to even; `x`, result: any shape. Queued, no scratch.
///
/// # Errors
/// [`Error::ArenaFull`](crate::Error::ArenaFull).
#[track_caller]
pub fn to_bf16<'s>(step: &Step<'s>, x: &impl Source<'s, f32>) -> Result<Tensor<'s, bf16>> {
    let mut out = step.empty(x.shape())?;
    step.launch(kernel::cast_to_bf16 { x: x.slice(), out: out.out() })?;
    Ok(out)
}

/// `x` as f32, exactly; `x`, result: any shape. Queued, no scratch.
///
/// # Errors
/// [`Error::ArenaFull`](crate::Error::ArenaFull).
#[track_caller]
pub fn to_f32<'s>(step: &Step<'s>, x: &impl Source<'s, bf16>) -> Result<Tensor<'s>> {
    let mut out = step.empty(x.shape())?;
    step.launch(kernel::cast_to_f32 { x: x.slice(), out: out.out() })?;
    Ok(out)
}

impl<'s> Tape<'_, 's> {
    /// [`ops::to_bf16`]; `x`, result: any shape. Its gradient comes as BF16 and becomes f32 exactly.
    ///
    /// # Errors
    /// Those of the op.
    #[track_caller]
    pub fn to_bf16(&self, x: &Var<'s>) -> Result<Var<'s, bf16>> {
        let op = self.op("to_bf16", [x])?;
        let (y, x) = (ops::to_bf16(self.step(), x.value())?, *x);
        Ok(op.record(y.save(), move |back, dy| {
            let dx = ops::to_f32(back.step(), &dy)?;
            back.add(&x, dx)
        }))
    }

    /// [`ops::to_f32`]; `x`, result: any shape. Its gradient is rounded to BF16.
    ///
    /// # Errors
    /// Those of the op.
    #[track_caller]
    pub fn to_f32(&self, x: &Var<'s, bf16>) -> Result<Var<'s>> {
        let op = self.op("to_f32", [x])?;
        let (y, x) = (ops::to_f32(self.step(), x.value())?, *x);
        Ok(op.record(y.save(), move |back, dy| {
            let dx = ops::to_bf16(back.step(), &dy)?;
            back.add(&x, dx)
        }))
    }
}
