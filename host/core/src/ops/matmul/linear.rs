//! The ops: matrix multiply, and linear layers with their fused epilogues.

use super::super::same_shape;
use super::element::{GemmElement, Products};
use super::gemm::{BiasGradient, Gemm, Gradient, Product};
use super::grouped::{self, Direction, Form};
use crate::error::{Error, Result};
use crate::ops::{Activation, Groups};
use crate::step::Step;
use crate::tensor::{Shape, Source, Stored, Target, Tensor};
use kernels::matmul::{GELU, SILU, SWIGLU};

/// `out = x w`; `x`: `[.., k]`, `w`: `[k, n]`, `out`: `[.., n]`.
///
/// Queued; does not wait. Scratch: none, or with split-K `m n` floats for each part, up to 8 MiB
/// for each batch.
///
/// Each element is one chain of fused multiply-adds over ascending k. If outputs are few and k is
/// long, k is split into parts, whose sums are added in order. The split depends only on m, n and k
/// ([`kernels::matmul::k_per_split`]). The bits are therefore the same for every tile and device.
///
/// # Errors
/// [`Error::Misuse`] when the inner extents differ; [`Error::ArenaFull`].
#[track_caller]
pub fn matmul<'s, S: GemmElement<S>>(
    step: &Step<'s>,
    x: &impl Source<'s, S>,
    w: &impl Source<'s, S>,
) -> Result<Tensor<'s, S>> {
    linear(step, x, w, None::<&Tensor<'s>>)
}

/// `out = x w + bias`; `x`: `[.., k]`, `w`: `[k, n]`, `bias`: `[n]`, `out`: `[.., n]`. Otherwise
/// like [`matmul`].
#[track_caller]
pub fn linear<'s, S: GemmElement<S>>(
    step: &Step<'s>,
    x: &impl Source<'s, S>,
    w: &impl Source<'s, S>,
    bias: Option<&impl Source<'s, f32>>,
) -> Result<Tensor<'s, S>> {
    let (shape, form) = forward("linear", x, w)?;
    let mut out = step.empty(shape)?;
    gemm_into(step, &form, x, w, bias, &mut out)?;
    Ok(out)
}

/// `out = residual + x w + bias`; `residual`: the shape of `out`. Otherwise like [`linear`].
#[track_caller]
pub fn linear_residual<'s, S: GemmElement<S>>(
    step: &Step<'s>,
    x: &impl Source<'s, S>,
    w: &impl Source<'s, S>,
    bias: Option<&impl Source<'s, f32>>,
    residual: &impl Source<'s, S>,
) -> Result<Tensor<'s, S>> {
    let (shape, form) = forward("linear_residual", x, w)?;
    same_shape("linear_residual", shape, residual.shape())?;
    let mut out = step.empty(shape)?;
    S::queue(step, Product::new(form.accumulate(), x, w, &mut out).bias(bias).c(Some(residual)))?;
    Ok(out)
}

/// `pre = x w + bias`, `out = gelu(pre)`. Returns `(out, pre)`; the backward pass needs `pre`.
/// Otherwise like [`linear`].
#[track_caller]
pub fn linear_gelu<'s, S: GemmElement<S>>(
    step: &Step<'s>,
    x: &impl Source<'s, S>,
    w: &impl Source<'s, S>,
    bias: Option<&impl Source<'s, f32>>,
) -> Result<(Tensor<'s, S>, Tensor<'s, S>)> {
    activated("linear_gelu", step, x, w, bias, None::<&Tensor<'s, S>>, GELU)
}

/// `pre = x w + bias`, `out = silu(pre)`. Returns `(out, pre)`; the backward pass needs `pre`.
/// Otherwise like [`linear`].
#[track_caller]
pub fn linear_silu<'s, S: GemmElement<S>>(
    step: &Step<'s>,
    x: &impl Source<'s, S>,
    w: &impl Source<'s, S>,
    bias: Option<&impl Source<'s, f32>>,
) -> Result<(Tensor<'s, S>, Tensor<'s, S>)> {
    activated("linear_silu", step, x, w, bias, None::<&Tensor<'s, S>>, SILU)
}

/// `up = x w + bias`, `out = silu(gate) up`; `gate`: the shape of `out`. Returns `(out, up)`; the
/// backward pass needs `up` and the gate. This is SwiGLU (Shazeer, 2020), where the gate is another
/// [`linear`] of x. Otherwise like [`linear`].
///
/// # Errors
/// [`Error::Misuse`] when the gate has another shape.
#[track_caller]
pub fn linear_swiglu<'s, S: GemmElement<S>>(
    step: &Step<'s>,
    x: &impl Source<'s, S>,
    w: &impl Source<'s, S>,
    bias: Option<&impl Source<'s, f32>>,
    gate: &impl Source<'s, S>,
) -> Result<(Tensor<'s, S>, Tensor<'s, S>)> {
    activated("linear_swiglu", step, x, w, bias, Some(gate), SWIGLU)
}

/// Computes `x w + bias`, activated or gated by `c` according to a flag of the kernels. Returns the
/// result and the pre-activation.
#[track_caller]
fn activated<'s, S: GemmElement<S>>(
    op: &'static str,
    step: &Step<'s>,
    x: &impl Source<'s, S>,
    w: &impl Source<'s, S>,
    bias: Option<&impl Source<'s, f32>>,
    c: Option<&impl Source<'s, S>>,
    flag: u32,
) -> Result<(Tensor<'s, S>, Tensor<'s, S>)> {
    let (shape, form) = forward(op, x, w)?;
    c.map_or(Ok(()), |c| same_shape(op, shape, c.shape()))?;
    let (mut out, mut pre) = (step.empty(shape)?, step.empty(shape)?);
    S::queue(step, Product::new(form, x, w, &mut out).bias(bias).c(c).activated(flag, &mut pre))?;
    Ok((out, pre))
}

/// `y[r] = x[r] w_g` for the group g of row r; `x`: `[rows, in]` in the order of the groups, `w`:
/// `[in, groups * out]`, the outputs of one group after another, `y`: `[rows, out]`.
///
/// Queued, one launch; no scratch. Each element is one chain of fused multiply-adds over ascending
/// k in f32, and a sum by the rule of matrix instructions in BF16. k is never split.
///
/// # Errors
/// [`Error::Misuse`] for other extents; [`Error::ArenaFull`].
#[track_caller]
pub fn grouped_linear<'s, S: Activation>(
    step: &Step<'s>,
    x: &impl Source<'s, S>,
    w: &impl Source<'s, S>,
    groups: &Groups<'s>,
) -> Result<Tensor<'s, S>> {
    let form = Form::new(x.shape(), w.shape(), groups)?;
    let mut y = step.empty([form.rows, form.outputs])?;
    grouped::queue(step, form, Direction::Forward, [x.slice(), w.slice()], groups, (y.out(), false))?;
    Ok(y)
}

/// `out = alpha A B + bias + beta out`, in place, for any strides; see [`Gemm`].
///
/// Queued. Scratch: as much as [`matmul`]. In f32, a single packed B that is stored `[n, k]` may
/// also be transposed into scratch. This requires a B of up to 64 MiB, and a product of at least
/// 4,096 rows and 2^33 multiply-adds.
///
/// # Errors
/// [`Error::Contract`] when a matrix extends outside its tensor. [`Error::Misuse`] for extents
/// beyond 2^32.
#[track_caller]
pub fn gemm_into<'s, F: GemmElement<S>, S: Stored>(
    step: &Step<'s>,
    form: &Gemm,
    a: &impl Source<'s, F>,
    b: &impl Source<'s, F>,
    bias: Option<&impl Source<'s, f32>>,
    out: &mut impl Target<'s, S>,
) -> Result<()> {
    F::queue(step, Product::new(*form, a, b, out).bias(bias))
}

/// The gradients of `y = x w + b`, for any strides: `dw = x^T dy` and, if requested, `db`, the sum
/// of dy's rows, and `dx = dy w^T`. In a precision below f32, the operand that both products share
/// is rounded once. For BF16, the product for `dw` also computes `db`, without reading dy again.
///
/// # Errors
/// [`Error::Misuse`] when `db` has a different number of elements than a bias.
#[track_caller]
pub fn gradients_into<'s, F: GemmElement<S>, S: Stored>(
    step: &Step<'s>,
    dy: &impl Source<'s, F>,
    dw: Gradient<'_, impl Source<'s, F>, impl Target<'s, f32>>,
    db: Option<BiasGradient<'_, impl Target<'s, f32>>>,
    dx: Option<Gradient<'_, impl Source<'s, F>, impl Target<'s, S>>>,
) -> Result<()> {
    <F as Products<S>>::queue_gradients(step, dy, dw, db, dx)
}

/// Returns the shape of `x w`, and the multiply.
fn forward<'s, S: Stored>(op: &'static str, x: &impl Source<'s, S>, w: &impl Source<'s, S>) -> Result<(Shape, Gemm)> {
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
