//! Casts between f32 and BF16.

use crate::autograd::{Tape, Var};
use crate::error::Result;
use crate::ops;
use crate::step::Step;
use crate::tensor::{Source, Stored, Target, Tensor};
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

/// What a tape casts from and to f32, which is itself: for models that are generic over what is stored.
pub trait Cast: Stored {
    #[doc(hidden)]
    fn narrow_on<'s>(tape: &Tape<'_, 's>, x: &Var<'s>) -> Result<Var<'s, Self>>;
    #[doc(hidden)]
    fn widen_on<'s>(tape: &Tape<'_, 's>, x: &Var<'s, Self>) -> Result<Var<'s>>;
}

impl Cast for f32 {
    fn narrow_on<'s>(_: &Tape<'_, 's>, x: &Var<'s>) -> Result<Var<'s>> {
        Ok(*x)
    }

    fn widen_on<'s>(_: &Tape<'_, 's>, x: &Var<'s>) -> Result<Var<'s>> {
        Ok(*x)
    }
}

impl Cast for bf16 {
    #[track_caller]
    fn narrow_on<'s>(tape: &Tape<'_, 's>, x: &Var<'s>) -> Result<Var<'s, bf16>> {
        let op = tape.op("to_bf16", [x])?;
        let y = ops::to_bf16(tape.step(), x.value())?.save();
        if !x.wants_gradient() {
            return Ok(tape.input(y));
        }
        let x = *x;
        Ok(op.record(y, move |back, dy| {
            let dx = ops::to_f32(back.step(), &dy)?;
            back.step().give_back(dy);
            back.add(&x, dx)
        }))
    }

    #[track_caller]
    fn widen_on<'s>(tape: &Tape<'_, 's>, x: &Var<'s, bf16>) -> Result<Var<'s>> {
        let op = tape.op("to_f32", [x])?;
        let y = ops::to_f32(tape.step(), x.value())?.save();
        if !x.wants_gradient() {
            return Ok(tape.input(y));
        }
        let x = *x;
        Ok(op.record(y, move |back, dy| {
            let dx = ops::to_bf16(back.step(), &dy)?;
            back.step().give_back(dy);
            back.add(&x, dx)
        }))
    }
}

impl<'s> Tape<'_, 's> {
    /// `x` as S stores it: itself, or by [`ops::to_bf16`]; `x`, result: any shape. Its gradient becomes f32 exactly. An input stays one.
    ///
    /// # Errors
    /// Those of the op.
    #[track_caller]
    pub fn stored_as<S: Cast>(&self, x: &Var<'s>) -> Result<Var<'s, S>> {
        S::narrow_on(self, x)
    }

    /// [`Tape::stored_as`] BF16.
    ///
    /// # Errors
    /// Those of the op.
    #[track_caller]
    pub fn to_bf16(&self, x: &Var<'s>) -> Result<Var<'s, bf16>> {
        self.stored_as(x)
    }

    /// `x` as f32: itself, or by [`ops::to_f32`]; `x`, result: any shape. Its gradient is rounded to what x is stored as. An input stays one.
    ///
    /// # Errors
    /// Those of the op.
    #[track_caller]
    pub fn to_f32<S: Cast>(&self, x: &Var<'s, S>) -> Result<Var<'s>> {
        S::widen_on(self, x)
    }
}
