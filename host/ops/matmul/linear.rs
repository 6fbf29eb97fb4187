//! The ops: a matrix multiply, linear layers, and what is fused behind them.

use super::super::same_shape;
use super::form::{Epilogue, Gemm, Gradient};
use super::{ieee, tensor};
use crate::error::{Error, Result};
use crate::precision::Precision;
use crate::step::Step;
use crate::tensor::{Source, Target, Tensor};

/// `out = x w`; `x`: `[.., k]`, `w`: `[k, n]`, `out`: `[.., n]`.
///
/// One fused-multiply-add chain over ascending k for each element; where outputs are few and k is long, k is cut into chunks
/// by a rule in m, n and k alone ([`kernels::matmul::chunk`]), and their sums are added in order: the same bits for every
/// tile and device. Scratch: none, or `m n` floats for each chunk, up to 8 MiB for each batch; queued, does not wait.
///
/// # Errors
/// [`Error::Misuse`] when the inner extents differ; [`Error::ArenaFull`].
#[track_caller]
pub fn matmul<'s>(step: &Step<'s>, x: &impl Source<'s, f32>, w: &impl Source<'s, f32>) -> Result<Tensor<'s>> {
    linear(step, x, w, None::<&Tensor<'s>>)
}

/// `out = x w + bias`; `x`: `[.., k]`, `w`: `[k, n]`, `bias`: `[n]`, `out`: `[.., n]`. As [`matmul`].
///
/// # Errors
/// As for [`matmul`].
#[track_caller]
pub fn linear<'s>(
    step: &Step<'s>,
    x: &impl Source<'s, f32>,
    w: &impl Source<'s, f32>,
    bias: Option<&impl Source<'s, f32>>,
) -> Result<Tensor<'s>> {
    let (shape, form) = forward("linear", x, w)?;
    let mut out = step.empty(shape)?;
    gemm_into(step, &form, x, w, bias, &mut out)?;
    Ok(out)
}

/// `out = residual + x w + bias`; `residual`: the shape of `out`. As [`linear`].
///
/// # Errors
/// As for [`linear`].
#[track_caller]
pub fn linear_residual<'s>(
    step: &Step<'s>,
    x: &impl Source<'s, f32>,
    w: &impl Source<'s, f32>,
    bias: Option<&impl Source<'s, f32>>,
    residual: &impl Source<'s, f32>,
) -> Result<Tensor<'s>> {
    let (shape, form) = forward("linear_residual", x, w)?;
    same_shape("linear_residual", shape, residual.shape())?;
    let mut out = step.empty(shape)?;
    queue(step, &form.accumulate(), x, w, bias, Some(residual), &mut out, Epilogue::Store)?;
    Ok(out)
}

/// `pre = x w + bias`, `out = gelu(pre)`; returns `(out, pre)`, backward needs `pre`. As [`linear`].
///
/// # Errors
/// As for [`linear`].
#[track_caller]
pub fn linear_gelu<'s>(
    step: &Step<'s>,
    x: &impl Source<'s, f32>,
    w: &impl Source<'s, f32>,
    bias: Option<&impl Source<'s, f32>>,
) -> Result<(Tensor<'s>, Tensor<'s>)> {
    let (shape, form) = forward("linear_gelu", x, w)?;
    let (mut out, mut pre) = (step.empty(shape)?, step.empty(shape)?);
    queue(step, &form, x, w, bias, None::<&Tensor<'s>>, &mut out, Epilogue::Gelu { pre: &mut pre })?;
    Ok((out, pre))
}

/// `out = A B + bias + beta out`, in place, for any strides; see [`Gemm`].
///
/// # Errors
/// [`Error::Contract`] when a matrix does not lie inside its tensor; [`Error::Misuse`] for extents beyond 2^32.
#[track_caller]
pub fn gemm_into<'s>(
    step: &Step<'s>,
    form: &Gemm,
    a: &impl Source<'s, f32>,
    b: &impl Source<'s, f32>,
    bias: Option<&impl Source<'s, f32>>,
    out: &mut impl Target<'s, f32>,
) -> Result<()> {
    queue(step, form, a, b, bias, None::<&Tensor<'s>>, out, Epilogue::Store)
}

/// The gradients of `y = x w`, for any strides: `dw = x^T dy` and where it is wanted `dx = dy w^T`. Below f32 what both need is
/// rounded once.
///
/// # Errors
/// As for [`gemm_into`].
#[track_caller]
pub fn gradients_into<'s>(
    step: &Step<'s>,
    dy: &impl Source<'s, f32>,
    dw: Gradient<'_, impl Source<'s, f32>, impl Target<'s, f32>>,
    dx: Option<Gradient<'_, impl Source<'s, f32>, impl Target<'s, f32>>>,
) -> Result<()> {
    let none = None::<&Tensor<'s>>;
    let Some(dx) = dx else {
        return gemm_into(step, &dw.form, dw.of, dy, none, dw.into);
    };
    let precision = dw.form.precision_in(step);
    if precision != Precision::Ieee {
        return tensor::queue_gradients(step, precision, dy, dw, dx);
    }
    gemm_into(step, &dw.form, dw.of, dy, none, dw.into)?;
    gemm_into(step, &dx.form, dy, dx.of, none, dx.into)
}

/// The shape of `x w` and its form.
fn forward<'s>(op: &'static str, x: &impl Source<'s, f32>, w: &impl Source<'s, f32>) -> Result<(crate::Shape, Gemm)> {
    let ([rows, inner], w_shape) = (x.shape().as_rows(), w.shape());
    let &[k, n] = w_shape.extents() else {
        return Err(Error::misuse(op, "weights of shape [in, out]", w_shape.to_string()));
    };
    if inner != k {
        return Err(Error::misuse(
            op,
            format!("an input of shape [.., {k}] for weights {w_shape}"),
            x.shape().to_string(),
        ));
    }
    Ok((x.shape().with_last(n), Gemm::new(rows, n, k)))
}

/// Queues one multiply in the precision that it is done in.
#[track_caller]
fn queue<'s>(
    step: &Step<'s>,
    form: &Gemm,
    a: &impl Source<'s, f32>,
    b: &impl Source<'s, f32>,
    bias: Option<&impl Source<'s, f32>>,
    residual: Option<&impl Source<'s, f32>>,
    out: &mut impl Target<'s, f32>,
    epilogue: Epilogue<'_, 's>,
) -> Result<()> {
    match form.precision_in(step) {
        Precision::Ieee => ieee::queue(step, form, a, b, bias, residual, out, epilogue),
        precision => tensor::queue(step, precision, form, a, b, bias, residual, out, epilogue),
    }
}
