//! Casts between f32 and BF16.

use crate::error::Result;
use crate::ops;
use crate::step::Step;
use crate::tape::{Tape, Var};
use crate::tensor::{AnyTensor, Element, Source, Stored, Target, Tensor};
use half::bf16;
use kernels::cast as kernel;

/// `x` rounded to the nearest BF16, ties to even; `x`, result: any shape. Queues the work, and
/// needs no scratch memory.
#[track_caller]
pub fn to_bf16<'s>(step: &Step<'s>, x: &impl Source<'s, f32>) -> Result<Tensor<'s, bf16>> {
    let mut out = step.empty(x.shape())?;
    step.launch(kernel::cast_to_bf16 { x: x.slice(), out: out.out() })?;
    Ok(out)
}

/// `x` converted to f32 exactly; `x`, result: any shape. Queues the work, and needs no scratch
/// memory.
#[track_caller]
pub fn to_f32<'s>(step: &Step<'s>, x: &impl Source<'s, bf16>) -> Result<Tensor<'s>> {
    let mut out = step.empty(x.shape())?;
    step.launch(kernel::cast_to_f32 { x: x.slice(), out: out.out() })?;
    Ok(out)
}

/// Returns `x` as S stores it: itself, or rounded to BF16.
#[track_caller]
pub(super) fn narrowed<'s, S: Stored>(step: &Step<'s>, x: Tensor<'s>) -> Result<Tensor<'s, S>> {
    let x = match <S as Element>::NAME == f32::NAME {
        true => AnyTensor::F32(x),
        false => {
            let narrow = to_bf16(step, &x)?;
            step.free(x);
            AnyTensor::Bf16(narrow)
        }
    };
    Ok(S::restore(x).expect("f32 or BF16"))
}

/// A type that a tape converts to and from f32, including f32 itself. Models use it to be generic
/// over the stored type.
pub trait Cast: Conversions {}

impl Cast for f32 {}
impl Cast for bf16 {}

/// The conversions of a stored type.
pub trait Conversions: Stored {
    fn narrow_on<'s>(tape: &Tape<'_, 's>, x: &Var<'s>) -> Result<Var<'s, Self>>;
    fn widen_on<'s>(tape: &Tape<'_, 's>, x: &Var<'s, Self>) -> Result<Var<'s>>;
}

impl Conversions for f32 {
    fn narrow_on<'s>(_: &Tape<'_, 's>, x: &Var<'s>) -> Result<Var<'s>> {
        Ok(*x)
    }

    fn widen_on<'s>(_: &Tape<'_, 's>, x: &Var<'s>) -> Result<Var<'s>> {
        Ok(*x)
    }
}

impl Conversions for bf16 {
    #[track_caller]
    fn narrow_on<'s>(tape: &Tape<'_, 's>, x: &Var<'s>) -> Result<Var<'s, bf16>> {
        let op = tape.op("to_bf16", [x])?;
        let y = ops::to_bf16(tape.step(), x.value())?.save();
        if !x.wants_gradient() {
            return Ok(op.unrecorded(y));
        }
        let x = *x;
        Ok(op.record(y, move |back, dy| {
            let dx = ops::to_f32(back.step(), &dy)?;
            back.step().free(dy);
            back.add(&x, dx)
        }))
    }

    #[track_caller]
    fn widen_on<'s>(tape: &Tape<'_, 's>, x: &Var<'s, bf16>) -> Result<Var<'s>> {
        let op = tape.op("to_f32", [x])?;
        let y = ops::to_f32(tape.step(), x.value())?.save();
        if !x.wants_gradient() {
            return Ok(op.unrecorded(y));
        }
        let x = *x;
        Ok(op.record(y, move |back, dy| {
            let dx = ops::to_bf16(back.step(), &dy)?;
            back.step().free(dy);
            back.add(&x, dx)
        }))
    }
}

impl<'s> Tape<'_, 's> {
    /// Converts `x` to the stored type S: `x` itself for f32, otherwise [`ops::to_bf16`]; `x`,
    /// result: any shape. The gradient is converted to f32 exactly. An input stays an input.
    #[track_caller]
    pub fn stored_as<S: Cast>(&self, x: &Var<'s>) -> Result<Var<'s, S>> {
        S::narrow_on(self, x)
    }

    /// Converts `x` to BF16; see [`Tape::stored_as`].
    #[track_caller]
    pub fn to_bf16(&self, x: &Var<'s>) -> Result<Var<'s, bf16>> {
        self.stored_as(x)
    }

    /// Converts `x` to f32: `x` itself if it is f32, otherwise [`ops::to_f32`]; `x`, result: any
    /// shape. The gradient is rounded to the stored type of x. An input stays an input.
    #[track_caller]
    pub fn to_f32<S: Cast>(&self, x: &Var<'s, S>) -> Result<Var<'s>> {
        S::widen_on(self, x)
    }
}
