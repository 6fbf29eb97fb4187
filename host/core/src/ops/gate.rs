//! SwiGLU (Shazeer, "GLU variants improve transformer", 2020), with its derivative.

use super::same_shape;
use crate::error::{Error, Result};
use crate::ops;
use crate::step::Step;
use crate::tape::{Tape, Var};
use crate::tensor::{Shape, Source, Stored, Target, Tensor};
use cuda_std::launch::{PointerMut, Slice};
use kernels::gate as kernel;

/// `y = silu(gate) up`, elementwise; `gate`, `up`, `y`: the same shape. Queues the work, and needs
/// no scratch memory.
///
/// # Errors
/// [`Error::Misuse`] when shapes differ; [`Error::ArenaFull`].
#[track_caller]
pub fn swiglu<'s, S: Stored>(
    step: &Step<'s>,
    gate: &impl Source<'s, S>,
    up: &impl Source<'s, S>,
) -> Result<Tensor<'s, S>> {
    same_shape("swiglu", gate.shape(), up.shape())?;
    let (shape, cols) = (gate.shape(), gate.shape().as_rows()[1]);
    multiplied(step, gate.slice(), up.slice(), cols, shape)
}

/// `y = silu(gate) up`, like [`swiglu`], of the two halves of each row, the gate first; `x`: `[..,
/// 2 cols]`, `y`: `[.., cols]`. Queues the work, and needs no scratch memory.
///
/// # Errors
/// [`Error::Misuse`] for an odd last extent; [`Error::ArenaFull`].
#[track_caller]
pub fn swiglu_packed<'s, S: Stored>(step: &Step<'s>, x: &impl Source<'s, S>) -> Result<Tensor<'s, S>> {
    let shape = half_rows("swiglu_packed", x.shape())?;
    multiplied(step, x.slice(), Slice::empty(), shape.as_rows()[1], shape)
}

#[track_caller]
fn multiplied<'s, S: Stored>(
    step: &Step<'s>,
    gate: Slice<'_, S>,
    up: Slice<'_, S>,
    cols: usize,
    shape: Shape,
) -> Result<Tensor<'s, S>> {
    let mut y = step.empty(shape)?;
    if shape.elements() > 0 {
        step.launch(kernel::swiglu_forward { gate, up, cols, length: shape.elements(), y: y.out() })?;
    }
    Ok(y)
}

/// `dgate = dy up silu'(gate)`, `dup = dy silu(gate)`; all of the same shape. Queued, one launch;
/// no scratch.
///
/// # Errors
/// [`Error::Misuse`] when shapes differ; [`Error::ArenaFull`].
#[track_caller]
pub fn swiglu_backward<'s, S: Stored>(
    step: &Step<'s>,
    gate: &impl Source<'s, S>,
    up: &impl Source<'s, S>,
    dy: &impl Source<'s, S>,
) -> Result<[Tensor<'s, S>; 2]> {
    const OP: &str = "swiglu_backward";
    same_shape(OP, gate.shape(), up.shape())?;
    same_shape(OP, gate.shape(), dy.shape())?;
    let (mut dgate, mut dup) = (step.empty(gate.shape())?, step.empty(gate.shape())?);
    if dy.shape().elements() > 0 {
        let (gate, up, dy, cols) = (gate.slice(), up.slice(), dy.slice(), dy.shape().as_rows()[1]);
        step.launch(kernel::swiglu_backward { gate, up, dy, cols, dgate: dgate.out(), dup: dup.out() })?;
    }
    Ok([dgate, dup])
}

/// The gradient of [`swiglu_packed`]; `x`, `dx`: `[.., 2 cols]`, `dy`: `[.., cols]`. Queued, one
/// launch; no scratch.
///
/// # Errors
/// [`Error::Misuse`] when dy has another shape.
#[track_caller]
pub fn swiglu_packed_backward<'s, S: Stored>(
    step: &Step<'s>,
    x: &impl Source<'s, S>,
    dy: &impl Source<'s, S>,
) -> Result<Tensor<'s, S>> {
    const OP: &str = "swiglu_packed_backward";
    let shape = half_rows(OP, x.shape())?;
    same_shape(OP, shape, dy.shape())?;
    let mut dx = step.empty(x.shape())?;
    if shape.elements() > 0 {
        step.launch(kernel::swiglu_backward {
            gate: x.slice(),
            up: Slice::empty(),
            dy: dy.slice(),
            cols: shape.as_rows()[1],
            dgate: dx.out(),
            dup: PointerMut::empty(),
        })?;
    }
    Ok(dx)
}

/// Returns the shape with half the last extent.
fn half_rows(op: &'static str, shape: Shape) -> Result<Shape> {
    match shape.extents().last() {
        Some(last) if last % 2 == 0 => Ok(shape.with_last(last / 2)),
        _ => Err(Error::misuse(op, "a last extent of two equal halves", shape.to_string())),
    }
}

impl<'s> Tape<'_, 's> {
    /// Records [`ops::swiglu`]; `gate`, `up`, result: the same shape. Backward is
    /// [`ops::launch::swiglu_backward`].
    #[track_caller]
    pub fn swiglu<S: Stored>(&self, gate: &Var<'s, S>, up: &Var<'s, S>) -> Result<Var<'s, S>> {
        let op = self.op("swiglu", [gate, up])?;
        let y = ops::swiglu(self.step(), gate.value(), up.value())?;
        let (gate, up) = (*gate, *up);
        Ok(op.record(y.save(), move |back, dy| {
            let [dgate, dup] = ops::launch::swiglu_backward(back.step(), gate.value(), up.value(), &dy)?;
            back.step().free(dy);
            back.add(&gate, dgate)?;
            back.add(&up, dup)
        }))
    }

    /// Records [`ops::swiglu_packed`]; `x`: `[.., 2 cols]`, result: `[.., cols]`. Backward is
    /// [`ops::launch::swiglu_packed_backward`].
    #[track_caller]
    pub fn swiglu_packed<S: Stored>(&self, x: &Var<'s, S>) -> Result<Var<'s, S>> {
        let op = self.op("swiglu_packed", [x])?;
        let (y, x) = (ops::swiglu_packed(self.step(), x.value())?, *x);
        Ok(op.record(y.save(), move |back, dy| {
            let dx = ops::launch::swiglu_packed_backward(back.step(), x.value(), &dy)?;
            back.step().free(dy);
            back.add(&x, dx)
        }))
    }
}
