//! tanh and GELU, with their derivatives.

use super::{same_shape, sum_rows_into};
use crate::error::Result;
use crate::ops;
use crate::step::Step;
use crate::tape::{Tape, Var};
use crate::tensor::{Source, Stored, Target, Tensor};
use cuda_std::launch::PointerMut;
use kernels::activation;

/// `y = tanh(x)`, elementwise; `x`, `y`: any shape.
///
/// Queued on the step's stream; no scratch. The result is within 2 ulp and has the same bits on
/// every device.
///
/// # Errors
/// [`Error::ArenaFull`](crate::Error::ArenaFull).
#[track_caller]
pub fn tanh<'s, S: Stored>(step: &Step<'s>, x: &impl Source<'s, S>) -> Result<Tensor<'s, S>> {
    let mut y = step.empty(x.shape())?;
    step.launch(activation::tanh_forward { x: x.slice(), y: y.out() })?;
    Ok(y)
}

/// `dx = dy (1 - y^2)` for `y = tanh(x)`; `y`, `dy`, `dx`: the same shape.
///
/// # Errors
/// [`Error::Misuse`](crate::Error::Misuse) when shapes differ;
/// [`Error::ArenaFull`](crate::Error::ArenaFull).
#[track_caller]
pub fn tanh_backward<'s, S: Stored>(
    step: &Step<'s>,
    y: &impl Source<'s, S>,
    dy: &impl Source<'s, S>,
) -> Result<Tensor<'s, S>> {
    same_shape("tanh_backward", y.shape(), dy.shape())?;
    let mut dx = step.empty(y.shape())?;
    step.launch(activation::tanh_backward { y: y.slice(), dy: dy.slice(), dx: dx.out() })?;
    Ok(dx)
}

/// `y = gelu(x) = x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))`, elementwise; `x`, `y`: any shape.
///
/// Queued on the step's stream; no scratch. The result has the same bits on every device.
///
/// # Errors
/// [`Error::ArenaFull`](crate::Error::ArenaFull).
///
/// Source: Hendrycks and Gimpel, "Gaussian Error Linear Units", 2016, the tanh form.
#[track_caller]
pub fn gelu<'s, S: Stored>(step: &Step<'s>, x: &impl Source<'s, S>) -> Result<Tensor<'s, S>> {
    let mut y = step.empty(x.shape())?;
    step.launch(activation::gelu_forward { x: x.slice(), y: y.out() })?;
    Ok(y)
}

/// `dx = dy gelu'(x)`; `x`, `dy`, `dx`: the same shape.
///
/// # Errors
/// [`Error::Misuse`](crate::Error::Misuse) when shapes differ;
/// [`Error::ArenaFull`](crate::Error::ArenaFull).
#[track_caller]
pub fn gelu_backward<'s, S: Stored>(
    step: &Step<'s>,
    x: &impl Source<'s, S>,
    dy: &impl Source<'s, S>,
) -> Result<Tensor<'s, S>> {
    same_shape("gelu_backward", x.shape(), dy.shape())?;
    let mut dx = step.empty(x.shape())?;
    step.launch(activation::gelu_backward { x: x.slice(), dy: dy.slice(), dx: dx.out() })?;
    Ok(dx)
}

/// `dx = dy gelu'(x)` and `db = sum over rows of dx`, for an x whose last op added a bias; `x`,
/// `dy`, `dx`: `[.., cols]`, `db`: `[cols]`.
///
/// Adds to `db` when `accumulate`, otherwise overwrites it. Queued; one launch for up to 128 rows.
/// Scratch above 128 rows: f32 of a 128th of x's elements.
///
/// # Errors
/// [`Error::Misuse`](crate::Error::Misuse) when shapes differ;
/// [`Error::ArenaFull`](crate::Error::ArenaFull).
#[track_caller]
pub fn gelu_bias_backward<'s, S: Stored>(
    step: &Step<'s>,
    x: &impl Source<'s, S>,
    dy: &impl Source<'s, S>,
    db: &mut impl Target<'s, f32>,
    accumulate: bool,
) -> Result<Tensor<'s, S>> {
    const OP: &str = "gelu_bias_backward";
    same_shape(OP, x.shape(), dy.shape())?;
    let [rows, cols] = x.shape().as_rows();
    same_shape(OP, [cols].into(), db.shape())?;
    let mut dx = step.empty(x.shape())?;
    let mut launch = |db: PointerMut<'_, f32>, accumulate| {
        let (x, dy, dx) = (x.slice(), dy.slice(), dx.out());
        step.launch(activation::gelu_bias_backward { x, dy, cols, accumulate, dx, db })
    };
    if (1..=activation::BIAS_ROWS).contains(&rows) {
        launch(db.out(), u32::from(accumulate))?;
    } else {
        let mut partials = step.empty([rows.div_ceil(activation::BIAS_ROWS), cols])?;
        launch(partials.out(), 0)?;
        sum_rows_into(step, &partials, db, accumulate)?;
        step.free(partials);
    }
    Ok(dx)
}

impl<'s> Tape<'_, 's> {
    /// Records [`ops::tanh`]; `x`, result: any shape. Backward is [`ops::tanh_backward`].
    #[track_caller]
    pub fn tanh<S: Stored>(&self, x: &Var<'s, S>) -> Result<Var<'s, S>> {
        let op = self.op("tanh", [x])?;
        let (y, x) = (ops::tanh(self.step(), x.value())?.save(), *x);
        Ok(op.record(y, move |back, dy| {
            let dx = ops::tanh_backward(back.step(), &y, &dy)?;
            back.step().free(dy);
            back.add(&x, dx)
        }))
    }

    /// Records [`ops::gelu`]; `x`, result: any shape. Backward is [`ops::gelu_backward`].
    #[track_caller]
    pub fn gelu<S: Stored>(&self, x: &Var<'s, S>) -> Result<Var<'s, S>> {
        let op = self.op("gelu", [x])?;
        let (y, x) = (ops::gelu(self.step(), x.value())?.save(), *x);
        Ok(op.record(y, move |back, dy| {
            let dx = ops::gelu_backward(back.step(), x.value(), &dy)?;
            back.step().free(dy);
            back.add(&x, dx)
        }))
    }
}
