//! Linear layers on a tape, for f32 and for BF16, which multiplies the BF16 copy of the weights.
//! The gradients of weights and biases are f32.
//!
//! For `y = x w + b`: `dw += x^T dy`, `db +=` the sum of dy's rows, `dx = dy w^T`. If x already has
//! a gradient, the multiply adds to it in place. Nothing is computed for a frozen w or b, or for an
//! x without a gradient.

use super::element::Products;
use super::grouped::{self, Direction, Form};
use crate::error::Result;
use crate::ops::{self, Activation, BiasGradient, Gemm, Gradient, Groups};
use crate::params::{MatrixWeights, Parameter};
use crate::tape::{Backward, Tape, Var};
use crate::tensor::{Saved, Source, Target, Tensor};

impl<'s> Tape<'_, 's> {
    /// `y = x w (+ b)`; `x`: `[.., in]`, `w`: `[in, out]`, `b`: `[out]`, `y`: `[.., out]`. See
    /// [`ops::linear`].
    #[track_caller]
    pub fn linear<S: Activation>(&self, x: &Var<'s, S>, w: Parameter, b: Option<Parameter>) -> Result<Var<'s, S>> {
        let op = self.op("linear", [x])?;
        let bias = b.map(|b| op.weights(b)).transpose()?;
        let weights = op.matrix(w)?;
        let y = ops::linear(self.step(), x.value(), &weights, bias.as_ref())?;
        weights.free(self.step());
        let x = *x;
        Ok(op.record(y.save(), move |back, dy| {
            linear_backward(back, &x, w, b, &dy)?;
            back.step().free(dy);
            Ok(())
        }))
    }

    /// `y = residual + x w (+ b)`; `residual`, `y`: `[.., out]`. See [`ops::linear_residual`].
    #[track_caller]
    pub fn linear_residual<S: Activation>(
        &self,
        x: &Var<'s, S>,
        w: Parameter,
        b: Option<Parameter>,
        residual: &Var<'s, S>,
    ) -> Result<Var<'s, S>> {
        let op = self.op("linear_residual", [x, residual])?;
        let bias = b.map(|b| op.weights(b)).transpose()?;
        let weights = op.matrix(w)?;
        let y = ops::linear_residual(self.step(), x.value(), &weights, bias.as_ref(), residual.value())?;
        weights.free(self.step());
        let (x, residual) = (*x, *residual);
        Ok(op.record(y.save(), move |back, dy| {
            linear_backward(back, &x, w, b, &dy)?;
            back.add(&residual, dy)
        }))
    }

    /// `y = gelu(x w (+ b))` in one launch. See [`ops::linear_gelu`].
    #[track_caller]
    pub fn linear_gelu<S: Activation>(&self, x: &Var<'s, S>, w: Parameter, b: Option<Parameter>) -> Result<Var<'s, S>> {
        let op = self.op("linear_gelu", [x])?;
        let bias = b.map(|b| op.weights(b)).transpose()?;
        let weights = op.matrix(w)?;
        let (y, pre) = ops::linear_gelu(self.step(), x.value(), &weights, bias.as_ref())?;
        weights.free(self.step());
        let (x, pre) = (*x, pre.save());
        Ok(op.record(y.save(), move |back, dy| linear_gelu_backward(back, &x, &pre, w, b, dy)))
    }

    /// `y = gelu(x w1 (+ b1)) w2 (+ b2) (+ residual)` in two launches; `x`: `[.., in]`, `w1`:
    /// `[in, hidden]`, `w2`: `[hidden, out]`, `residual`, `y`: `[.., out]`. `up` and `down` are a
    /// weight and a bias each. See [`ops::linear_gelu`] and [`ops::linear_residual`].
    ///
    /// The result has the bits of [`Tape::linear_gelu`] and [`Tape::linear_residual`]. The
    /// exception is BF16, where the gradient of GELU's input is
    /// [`ops::launch::gelu_linear_backward`], which rounds once, and the gradient of `b1` is the
    /// sum of the rounded values.
    #[track_caller]
    pub fn mlp_gelu<S: Activation>(
        &self,
        x: &Var<'s, S>,
        up: (Parameter, Option<Parameter>),
        down: (Parameter, Option<Parameter>),
        residual: Option<&Var<'s, S>>,
    ) -> Result<Var<'s, S>> {
        let op = self.op("mlp_gelu", [x, residual.unwrap_or(x)])?;
        let (step, (w1, b1), (w2, b2)) = (self.step(), up, down);
        let [bias1, bias2] = [b1, b2].map(|b| b.map(|b| op.weights(b)).transpose());
        let weights = op.matrix(w1)?;
        let (h, pre) = ops::linear_gelu(step, x.value(), &weights, bias1?.as_ref())?;
        weights.free(step);
        let (weights, bias) = (op.matrix(w2)?, bias2?);
        let y = match residual {
            Some(residual) => ops::linear_residual(step, &h, &weights, bias.as_ref(), residual.value())?,
            None => ops::linear(step, &h, &weights, bias.as_ref())?,
        };
        weights.free(step);
        let (x, residual, h, pre) = (*x, residual.copied(), h.save(), pre.save());
        Ok(op.record(y.save(), move |back, dy| {
            let step = back.step();
            let pass_on = |back: &mut Backward<'_, '_, 's>, dy| match residual {
                Some(residual) => back.add(&residual, dy),
                None => {
                    step.free(dy);
                    Ok(())
                }
            };
            let weights = back.matrix::<S>(w2)?;
            if let Some(dpre) = <S as Products<S>>::through_gelu(step, &pre, &weights, &dy)? {
                weights.free(step);
                gradients_of_linear(back, &h, (w2, None), b2, &dy, None)?;
                pass_on(back, dy)?;
                linear_backward(back, &x, w1, b1, &dpre)?;
                step.free(dpre);
                return Ok(());
            }
            let mut dh = step.empty(h.shape())?;
            gradients_of_linear(back, &h, (w2, Some(weights)), b2, &dy, Some((&mut dh, false)))?;
            pass_on(back, dy)?;
            linear_gelu_backward(back, &x, &pre, w1, b1, dh)
        }))
    }

    /// `y = silu(x w (+ b))` in one launch. See [`ops::linear_silu`].
    #[track_caller]
    pub fn linear_silu<S: Activation>(&self, x: &Var<'s, S>, w: Parameter, b: Option<Parameter>) -> Result<Var<'s, S>> {
        let op = self.op("linear_silu", [x])?;
        let bias = b.map(|b| op.weights(b)).transpose()?;
        let weights = op.matrix(w)?;
        let (y, pre) = ops::linear_silu(self.step(), x.value(), &weights, bias.as_ref())?;
        weights.free(self.step());
        let (x, pre) = (*x, pre.save());
        Ok(op.record(y.save(), move |back, dy| {
            let dpre = ops::launch::silu_backward(back.step(), &pre, &dy)?;
            back.step().free(dy);
            linear_backward(back, &x, w, b, &dpre)?;
            back.step().free(dpre);
            Ok(())
        }))
    }

    /// `y = silu(gate) (x w (+ b))` in one launch; `gate`, `y`: `[.., out]`. See
    /// [`ops::linear_swiglu`].
    #[track_caller]
    pub fn linear_swiglu<S: Activation>(
        &self,
        x: &Var<'s, S>,
        w: Parameter,
        b: Option<Parameter>,
        gate: &Var<'s, S>,
    ) -> Result<Var<'s, S>> {
        let op = self.op("linear_swiglu", [x, gate])?;
        let bias = b.map(|b| op.weights(b)).transpose()?;
        let weights = op.matrix(w)?;
        let (y, up) = ops::linear_swiglu(self.step(), x.value(), &weights, bias.as_ref(), gate.value())?;
        weights.free(self.step());
        let (x, gate, up) = (*x, *gate, up.save());
        Ok(op.record(y.save(), move |back, dy| {
            let [dgate, dup] = ops::launch::swiglu_backward(back.step(), gate.value(), &up, &dy)?;
            back.step().free(dy);
            back.add(&gate, dgate)?;
            linear_backward(back, &x, w, b, &dup)?;
            back.step().free(dup);
            Ok(())
        }))
    }

    /// Records [`ops::grouped_linear`] with a parameter `[in, groups * out]`; `x`: `[rows, in]`,
    /// result: `[rows, out]`. Backward: `dx = dy w_g^T` for each row, and `dw_g = x^T dy` over the
    /// rows of each group, ascending. Nothing is computed for a frozen w.
    #[track_caller]
    pub fn grouped_linear<S: Activation>(
        &self,
        x: &Var<'s, S>,
        w: Parameter,
        groups: &Groups<'s>,
    ) -> Result<Var<'s, S>> {
        let op = self.op("grouped_linear", [x])?;
        let weights = op.matrix::<S>(w)?;
        let form = Form::new(x.shape(), weights.shape(), groups)?;
        let y = ops::grouped_linear(self.step(), x.value(), &weights, groups)?;
        weights.free(self.step());
        let (x, groups) = (*x, *groups);
        Ok(op.record(y.save(), move |back, dy| {
            grouped_backward(back, &x, w, form, &groups, &dy)?;
            back.step().free(dy);
            Ok(())
        }))
    }
}

/// Computes the gradient of the weights of a layer of groups, and adds that of x.
pub(super) fn grouped_backward<'s, S: Activation>(
    back: &mut Backward<'_, '_, 's>,
    x: &Var<'s, S>,
    w: Parameter,
    form: Form,
    groups: &Groups<'s>,
    dy: &Tensor<'s, S>,
) -> Result<()> {
    let step = back.step();
    if let Some((mut dw, accumulate)) = back.gradient_if_trained(w)? {
        let (operands, into) = ([x.value().slice(), dy.slice()], (dw.out(), accumulate));
        grouped::queue(step, form, Direction::ToWeights, operands, groups, into)?;
    }
    if x.wants_gradient() {
        let (mut dx, accumulate) = match back.take(x)? {
            Some(sum) => (sum, true),
            None => (step.empty(x.shape())?, false),
        };
        let weights = back.matrix::<S>(w)?;
        let (operands, into) = ([dy.slice(), weights.slice()], (dx.out(), accumulate));
        grouped::queue(step, form, Direction::ToInputs, operands, groups, into)?;
        weights.free(step);
        back.add(x, dx)?;
    }
    Ok(())
}

/// Computes the gradients of a linear layer followed by GELU from the gradient of GELU's output.
/// The launch that makes the gradient of `pre` also sums b's.
fn linear_gelu_backward<'s, S: Activation>(
    back: &mut Backward<'_, '_, 's>,
    x: &Var<'s, S>,
    pre: &Saved<'s, S>,
    w: Parameter,
    b: Option<Parameter>,
    dy: Tensor<'s, S>,
) -> Result<()> {
    let step = back.step();
    let db = b.map(|b| back.gradient_if_trained(b)).transpose()?.flatten();
    let dpre = match db {
        Some((mut db, accumulate)) => ops::launch::gelu_bias_backward(step, pre, &dy, &mut db, accumulate)?,
        None => ops::launch::gelu_backward(step, pre, &dy)?,
    };
    step.free(dy);
    linear_backward(back, x, w, None, &dpre)?;
    step.free(dpre);
    Ok(())
}

/// Computes the gradients of a linear layer from that of its output, and adds that of x.
pub(super) fn linear_backward<'s, S: Activation>(
    back: &mut Backward<'_, '_, 's>,
    x: &Var<'s, S>,
    w: Parameter,
    b: Option<Parameter>,
    dy: &Tensor<'s, S>,
) -> Result<()> {
    let mut dx = match back.take(x)? {
        Some(sum) => Some((sum, true)),
        None if x.wants_gradient() => Some((back.step().empty(x.shape())?, false)),
        None => None,
    };
    gradients_of_linear(back, x.value(), (w, None), b, dy, dx.as_mut().map(|(dx, accumulate)| (dx, *accumulate)))?;
    match dx {
        Some((dx, _)) => back.add(x, dx),
        None => Ok(()),
    }
}

/// Computes the gradients of w and b and, if there is an output for it, of x, which is overwritten
/// or added to. The weights are lent, and converted if necessary, unless the caller has done so.
fn gradients_of_linear<'s, S: Activation>(
    back: &mut Backward<'_, '_, 's>,
    x: &Saved<'s, S>,
    (w, weights): (Parameter, Option<MatrixWeights<'_, 's, S>>),
    b: Option<Parameter>,
    dy: &Tensor<'s, S>,
    dx: Option<(&mut Tensor<'s, S>, bool)>,
) -> Result<()> {
    let step = back.step();
    let ([rows, k], [_, n]) = (x.shape().as_rows(), dy.shape().as_rows());
    let adding = |form: Gemm, adds| if adds { form.accumulate() } else { form };
    let to_x = Gemm::new(rows, k, n).transpose_b();
    let b = match b {
        Some(b) if back.trains(b)? => Some(b),
        _ => None,
    };
    if !back.trains(w)? {
        if let Some((mut db, accumulate)) = b.map(|b| back.gradient_uninit(b)).transpose()? {
            let db = BiasGradient { into: &mut db, accumulate };
            <S as Products<S>>::queue_bias_gradient(step, dy, x, db)?;
        }
        let Some((into, adds)) = dx else { return Ok(()) };
        let weights = weights.map_or_else(|| back.matrix::<S>(w), Ok)?;
        ops::gemm_into(step, &adding(to_x, adds), dy, &weights, None::<&Tensor<'s>>, into)?;
        weights.free(step);
        return Ok(());
    }
    let weights = weights.map_or_else(|| back.matrix::<S>(w), Ok)?;
    let (mut dw, accumulate, mut db) = match b {
        Some(b) => {
            let ([dw, db], [accumulate, to_db]) = back.gradients_uninit([w, b])?;
            (dw, accumulate, Some((db, to_db)))
        }
        None => {
            let (dw, accumulate) = back.gradient_uninit(w)?;
            (dw, accumulate, None)
        }
    };
    let for_dw = Gradient { form: adding(Gemm::new(k, n, rows).transpose_a(), accumulate), of: x, into: &mut dw };
    let for_db = db.as_mut().map(|(db, accumulate)| BiasGradient { into: db, accumulate: *accumulate });
    let for_dx = dx.map(|(into, adds)| Gradient { form: adding(to_x, adds), of: &weights, into });
    ops::launch::gradients_into(step, dy, for_dw, for_db, for_dx)
}
