//! ReLU, sigmoid, SiLU, the exact GELU and SwiGLU (Shazeer, "GLU variants improve transformer",
//! 2020), with their derivatives.

use super::same_shape;
use crate::error::{Error, Result};
use crate::ops;
use crate::step::Step;
use crate::tape::{Tape, Var};
use crate::tensor::{Shape, Source, Stored, Target, Tensor};
use cuda_std::launch::{PointerMut, Slice};
use kernels::gate as kernel;

#[track_caller]
fn forward<'s, S: Stored>(step: &Step<'s>, x: &impl Source<'s, S>, function: u32) -> Result<Tensor<'s, S>> {
    let mut y = step.empty(x.shape())?;
    step.launch(kernel::activation_forward { x: x.slice(), function, y: y.out() })?;
    Ok(y)
}

#[track_caller]
fn backward<'s, S: Stored>(
    op: &'static str,
    step: &Step<'s>,
    kept: &impl Source<'s, S>,
    dy: &impl Source<'s, S>,
    function: u32,
) -> Result<Tensor<'s, S>> {
    same_shape(op, kept.shape(), dy.shape())?;
    let mut dx = step.empty(kept.shape())?;
    step.launch(kernel::activation_backward { kept: kept.slice(), dy: dy.slice(), function, dx: dx.out() })?;
    Ok(dx)
}

/// `y = max(x, 0)`, elementwise, where a NaN stays NaN; `x`, `y`: any shape.
///
/// Queued on the step's stream; no scratch. The result has the same bits on every device.
///
/// # Errors
/// [`Error::ArenaFull`](crate::Error::ArenaFull).
#[track_caller]
pub fn relu<'s, S: Stored>(step: &Step<'s>, x: &impl Source<'s, S>) -> Result<Tensor<'s, S>> {
    forward(step, x, kernel::RELU)
}

/// `dx = dy relu'(x)`, computed from `y = relu(x)`; `y`, `dy`, `dx`: the same shape.
///
/// # Errors
/// [`Error::Misuse`](crate::Error::Misuse) when shapes differ;
/// [`Error::ArenaFull`](crate::Error::ArenaFull).
#[track_caller]
pub fn relu_backward<'s, S: Stored>(
    step: &Step<'s>,
    y: &impl Source<'s, S>,
    dy: &impl Source<'s, S>,
) -> Result<Tensor<'s, S>> {
    backward("relu_backward", step, y, dy, kernel::RELU)
}

/// `y = 1 / (1 + e^-x)`, elementwise; `x`, `y`: any shape.
///
/// Queued on the step's stream; no scratch. The result has the same bits on every device.
///
/// # Errors
/// [`Error::ArenaFull`](crate::Error::ArenaFull).
#[track_caller]
pub fn sigmoid<'s, S: Stored>(step: &Step<'s>, x: &impl Source<'s, S>) -> Result<Tensor<'s, S>> {
    forward(step, x, kernel::SIGMOID)
}

/// `dx = dy sigmoid'(x)`, computed from `y = sigmoid(x)`; `y`, `dy`, `dx`: the same shape.
///
/// # Errors
/// [`Error::Misuse`](crate::Error::Misuse) when shapes differ;
/// [`Error::ArenaFull`](crate::Error::ArenaFull).
#[track_caller]
pub fn sigmoid_backward<'s, S: Stored>(
    step: &Step<'s>,
    y: &impl Source<'s, S>,
    dy: &impl Source<'s, S>,
) -> Result<Tensor<'s, S>> {
    backward("sigmoid_backward", step, y, dy, kernel::SIGMOID)
}

/// `y = x / (1 + e^-x)`, elementwise; `x`, `y`: any shape.
///
/// Queued on the step's stream; no scratch. The result has the same bits on every device.
///
/// # Errors
/// [`Error::ArenaFull`](crate::Error::ArenaFull).
///
/// Source: Elfwing, Uchibe and Doya, 2017.
#[track_caller]
pub fn silu<'s, S: Stored>(step: &Step<'s>, x: &impl Source<'s, S>) -> Result<Tensor<'s, S>> {
    forward(step, x, kernel::SILU)
}

/// `dx = dy silu'(x)`, computed from `x`; `x`, `dy`, `dx`: the same shape.
///
/// # Errors
/// [`Error::Misuse`](crate::Error::Misuse) when shapes differ;
/// [`Error::ArenaFull`](crate::Error::ArenaFull).
#[track_caller]
pub fn silu_backward<'s, S: Stored>(
    step: &Step<'s>,
    x: &impl Source<'s, S>,
    dy: &impl Source<'s, S>,
) -> Result<Tensor<'s, S>> {
    backward("silu_backward", step, x, dy, kernel::SILU)
}

/// `y = x/2 (1 + erf(x / sqrt(2)))`, elementwise: the exact form of [`gelu`](super::gelu); `x`,
/// `y`: any shape.
///
/// Queued on the step's stream; no scratch. The result has the same bits on every device.
///
/// # Errors
/// [`Error::ArenaFull`](crate::Error::ArenaFull).
#[track_caller]
pub fn gelu_exact<'s, S: Stored>(step: &Step<'s>, x: &impl Source<'s, S>) -> Result<Tensor<'s, S>> {
    forward(step, x, kernel::GELU_EXACT)
}

/// `dx = dy gelu_exact'(x)`, computed from `x`; `x`, `dy`, `dx`: the same shape.
///
/// # Errors
/// [`Error::Misuse`](crate::Error::Misuse) when shapes differ;
/// [`Error::ArenaFull`](crate::Error::ArenaFull).
#[track_caller]
pub fn gelu_exact_backward<'s, S: Stored>(
    step: &Step<'s>,
    x: &impl Source<'s, S>,
    dy: &impl Source<'s, S>,
) -> Result<Tensor<'s, S>> {
    backward("gelu_exact_backward", step, x, dy, kernel::GELU_EXACT)
}

/// `y = silu(gate) up`, elementwise; `gate`, `up`, `y`: the same shape. Queued; no scratch.
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

/// `y = silu(gate) up`, like [`swiglu`], of the two halves of each row, the gate first; `x`:
/// `[.., 2 cols]`, `y`: `[.., cols]`. Queued; no scratch.
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
/// Those of [`swiglu_packed`], and [`Error::Misuse`] when dy has another shape.
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
    /// Records [`ops::relu`]; `x`, result: any shape. Backward is [`ops::relu_backward`].
    #[track_caller]
    pub fn relu<S: Stored>(&self, x: &Var<'s, S>) -> Result<Var<'s, S>> {
        let op = self.op("relu", [x])?;
        let (y, x) = (ops::relu(self.step(), x.value())?.save(), *x);
        Ok(op.record(y, move |back, dy| {
            let dx = ops::relu_backward(back.step(), &y, &dy)?;
            back.step().free(dy);
            back.add(&x, dx)
        }))
    }

    /// Records [`ops::sigmoid`]; `x`, result: any shape. Backward is [`ops::sigmoid_backward`].
    #[track_caller]
    pub fn sigmoid<S: Stored>(&self, x: &Var<'s, S>) -> Result<Var<'s, S>> {
        let op = self.op("sigmoid", [x])?;
        let (y, x) = (ops::sigmoid(self.step(), x.value())?.save(), *x);
        Ok(op.record(y, move |back, dy| {
            let dx = ops::sigmoid_backward(back.step(), &y, &dy)?;
            back.step().free(dy);
            back.add(&x, dx)
        }))
    }

    /// Records [`ops::silu`]; `x`, result: any shape. Backward is [`ops::silu_backward`].
    #[track_caller]
    pub fn silu<S: Stored>(&self, x: &Var<'s, S>) -> Result<Var<'s, S>> {
        let op = self.op("silu", [x])?;
        let (y, x) = (ops::silu(self.step(), x.value())?, *x);
        Ok(op.record(y.save(), move |back, dy| {
            let dx = ops::silu_backward(back.step(), x.value(), &dy)?;
            back.step().free(dy);
            back.add(&x, dx)
        }))
    }

    /// Records [`ops::gelu_exact`]; `x`, result: any shape. Backward is
    /// [`ops::gelu_exact_backward`].
    #[track_caller]
    pub fn gelu_exact<S: Stored>(&self, x: &Var<'s, S>) -> Result<Var<'s, S>> {
        let op = self.op("gelu_exact", [x])?;
        let (y, x) = (ops::gelu_exact(self.step(), x.value())?, *x);
        Ok(op.record(y.save(), move |back, dy| {
            let dx = ops::gelu_exact_backward(back.step(), x.value(), &dy)?;
            back.step().free(dy);
            back.add(&x, dx)
        }))
    }

    /// Records [`ops::swiglu`]; `gate`, `up`, result: the same shape. Backward is
    /// [`ops::swiglu_backward`].
    #[track_caller]
    pub fn swiglu<S: Stored>(&self, gate: &Var<'s, S>, up: &Var<'s, S>) -> Result<Var<'s, S>> {
        let op = self.op("swiglu", [gate, up])?;
        let y = ops::swiglu(self.step(), gate.value(), up.value())?;
        let (gate, up) = (*gate, *up);
        Ok(op.record(y.save(), move |back, dy| {
            let [dgate, dup] = ops::swiglu_backward(back.step(), gate.value(), up.value(), &dy)?;
            back.step().free(dy);
            back.add(&gate, dgate)?;
            back.add(&up, dup)
        }))
    }

    /// Records [`ops::swiglu_packed`]; `x`: `[.., 2 cols]`, result: `[.., cols]`. Backward is
    /// [`ops::swiglu_packed_backward`].
    #[track_caller]
    pub fn swiglu_packed<S: Stored>(&self, x: &Var<'s, S>) -> Result<Var<'s, S>> {
        let op = self.op("swiglu_packed", [x])?;
        let (y, x) = (ops::swiglu_packed(self.step(), x.value())?, *x);
        Ok(op.record(y.save(), move |back, dy| {
            let dx = ops::swiglu_packed_backward(back.step(), x.value(), &dy)?;
            back.step().free(dy);
            back.add(&x, dx)
        }))
    }
}
