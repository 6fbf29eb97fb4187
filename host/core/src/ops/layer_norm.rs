//! LayerNorm (Ba, Kiros and Hinton, "Layer normalization", 2016), by itself and after a residual
//! sum.

use super::shapes::check_row;
use super::{same_shape, sum_rows_into};
use crate::error::Result;
use crate::params::Parameter;
use crate::step::Step;
use crate::tape::{Backward, Tape, Var};
use crate::tensor::{Saved, Source, Stored, Target, Tensor};
use cuda_std::launch::{PointerMut, Slice};
use kernels::layer_norm as kernel;
use kernels::row_chunk::chunk_of;

/// The result of [`layer_norm`].
#[derive(Debug)]
pub struct Normalized<'s, S: Stored = f32> {
    /// The output, of the input's shape.
    pub y: Tensor<'s, S>,
    /// The mean of each row, `[rows]`, for backward.
    pub mean: Tensor<'s>,
    /// `1 / sqrt(variance + epsilon)` of each row, `[rows]`, for backward.
    pub inverse_std: Tensor<'s>,
}

/// `y = (x - mean(x)) / sqrt(variance(x) + epsilon) gain + bias` by row; `x`, `y`: `[.., cols]`,
/// `gain`, `bias`: `[cols]`. The variance is the mean of squared differences from the mean. Queues
/// the work, and needs no scratch memory.
///
/// # Errors
/// [`Error::Misuse`](crate::Error::Misuse) when gain or bias has another length;
/// [`Error::ArenaFull`](crate::Error::ArenaFull).
#[track_caller]
pub fn layer_norm<'s, S: Stored>(
    step: &Step<'s>,
    x: &impl Source<'s, S>,
    gain: &impl Source<'s, f32>,
    bias: &impl Source<'s, f32>,
    epsilon: f32,
) -> Result<Normalized<'s, S>> {
    let out = outputs("layer_norm", step, x, gain, bias)?;
    launch(step, [x.slice(), Slice::empty()], [gain.slice(), bias.slice()], epsilon, PointerMut::empty(), out)
}

/// `h = x + residual` and [`layer_norm`] of h, in one launch; `residual`, `h`: the shape of x.
/// Queues the work, and needs no scratch memory.
///
/// # Errors
/// [`Error::Misuse`](crate::Error::Misuse) when the residual has another shape.
#[track_caller]
pub fn layer_norm_residual<'s, S: Stored>(
    step: &Step<'s>,
    x: &impl Source<'s, S>,
    residual: &impl Source<'s, S>,
    gain: &impl Source<'s, f32>,
    bias: &impl Source<'s, f32>,
    epsilon: f32,
) -> Result<(Tensor<'s, S>, Normalized<'s, S>)> {
    const OP: &str = "layer_norm_residual";
    same_shape(OP, x.shape(), residual.shape())?;
    let (mut h, out) = (step.empty(x.shape())?, outputs(OP, step, x, gain, bias)?);
    let out = launch(step, [x.slice(), residual.slice()], [gain.slice(), bias.slice()], epsilon, h.out(), out)?;
    Ok((h, out))
}

/// Checks gain and bias, and allocates the outputs for `x`.
fn outputs<'s, S: Stored>(
    op: &'static str,
    step: &Step<'s>,
    x: &impl Source<'s, S>,
    gain: &impl Source<'s, f32>,
    bias: &impl Source<'s, f32>,
) -> Result<Normalized<'s, S>> {
    let [rows, cols] = x.shape().as_rows();
    check_row(op, "gain", cols, gain)?;
    check_row(op, "bias", cols, bias)?;
    Ok(Normalized { y: step.empty(x.shape())?, mean: step.empty([rows])?, inverse_std: step.empty([rows])? })
}

#[track_caller]
fn launch<'s, S: Stored>(
    step: &Step<'s>,
    [x, residual]: [Slice<'_, S>; 2],
    [gain, bias]: [Slice<'_, f32>; 2],
    epsilon: f32,
    h: PointerMut<'_, S>,
    mut out: Normalized<'s, S>,
) -> Result<Normalized<'s, S>> {
    step.launch(kernel::layer_norm_forward {
        x,
        residual,
        gain,
        bias,
        cols: gain.len(),
        epsilon,
        h,
        y: out.y.out(),
        mean: out.mean.out(),
        inverse_std: out.inverse_std.out(),
    })?;
    Ok(out)
}

/// `dh = s (g - mean(g) - n mean(g n))` by row, where `s` = `inverse_std`, `g = dy gain` and
/// `n = (h - mean) s`. Summed over rows, `dgain = dy n` and `dbias = dy`. `h`, `dy`, `dh`:
/// `[.., cols]`, `gain`, `dgain`, `dbias`: `[cols]`, `mean`, `inverse_std`: `[rows]`.
///
/// If h has a gradient from elsewhere, `grad_in`, dh is added to it in place and it is returned;
/// otherwise the result is a new tensor. Each of `dgain` and `dbias` is added to when its flag in
/// `accumulate` is true, otherwise overwritten. Queued; one launch for few rows, otherwise several.
/// Scratch: at most a quarter of h.
///
/// # Errors
/// [`Error::Misuse`](crate::Error::Misuse) when shapes differ;
/// [`Error::ArenaFull`](crate::Error::ArenaFull).
#[track_caller]
pub fn layer_norm_backward<'s, S: Stored>(
    step: &Step<'s>,
    h: &impl Source<'s, S>,
    gain: &impl Source<'s, f32>,
    [mean, inverse_std]: [&impl Source<'s, f32>; 2],
    dy: &impl Source<'s, S>,
    grad_in: Option<Tensor<'s, S>>,
    [dgain, dbias]: [&mut impl Target<'s, f32>; 2],
    accumulate: [bool; 2],
) -> Result<Tensor<'s, S>> {
    let into = [Some((dgain, accumulate[0])), Some((dbias, accumulate[1]))];
    gradients(step, h, gain, [mean, inverse_std], dy, grad_in, into)
}

/// Computes [`layer_norm_backward`], without the gradients of gain and bias that are `None`. The
/// kernel's sums for them are then dropped.
#[track_caller]
fn gradients<'s, S: Stored>(
    step: &Step<'s>,
    h: &impl Source<'s, S>,
    gain: &impl Source<'s, f32>,
    [mean, inverse_std]: [&impl Source<'s, f32>; 2],
    dy: &impl Source<'s, S>,
    grad_in: Option<Tensor<'s, S>>,
    [dgain, dbias]: [Option<(&mut impl Target<'s, f32>, bool)>; 2],
) -> Result<Tensor<'s, S>> {
    const OP: &str = "layer_norm_backward";
    let [rows, cols] = h.shape().as_rows();
    same_shape(OP, h.shape(), dy.shape())?;
    same_shape(OP, [rows].into(), mean.shape())?;
    same_shape(OP, [rows].into(), inverse_std.shape())?;
    check_row(OP, "gain", cols, gain)?;
    if let Some((dgain, _)) = &dgain {
        check_row(OP, "gradient of the gain", cols, *dgain)?;
    }
    if let Some((dbias, _)) = &dbias {
        check_row(OP, "gradient of the bias", cols, *dbias)?;
    }
    let mut add = if grad_in.is_some() { kernel::ADD_DH } else { 0 };
    let mut dh = match grad_in {
        Some(sum) => same_shape(OP, h.shape(), sum.shape()).map(|()| sum)?,
        None => step.empty(h.shape())?,
    };
    let chunk = chunk_of(rows, cols);
    let mut launch = |dgain: PointerMut<'_, f32>, dbias: PointerMut<'_, f32>, add| {
        step.launch(kernel::layer_norm_backward {
            h: h.slice(),
            gain: gain.slice(),
            mean: mean.slice(),
            inverse_std: inverse_std.slice(),
            dy: dy.slice(),
            cols,
            chunk,
            add,
            dh: dh.out(),
            dgain,
            dbias,
        })
    };
    // The first launch finishes the sums over rows itself, or further launches sum the partial sums
    // of its blocks.
    match [dgain, dbias] {
        [Some((dgain, to_gain)), Some((dbias, to_bias))] if (1..=chunk).contains(&rows) => {
            for (bit, set) in [(kernel::ADD_DGAIN, to_gain), (kernel::ADD_DBIAS, to_bias)] {
                add |= if set { bit } else { 0 };
            }
            launch(dgain.out(), dbias.out(), add)?;
        }
        into => {
            let chunks = rows.div_ceil(chunk);
            let mut sums = [step.empty([chunks, cols])?, step.empty([chunks, cols])?];
            let [of_gain, of_bias] = &mut sums;
            launch(of_gain.out(), of_bias.out(), add)?;
            for (sums, into) in sums.iter().zip(into) {
                if let Some((into, accumulate)) = into {
                    sum_rows_into(step, sums, into, accumulate)?;
                }
            }
            sums.into_iter().for_each(|sums| step.free(sums));
        }
    }
    Ok(dh)
}

impl<'s> Tape<'_, 's> {
    /// Records [`layer_norm`] over the last extent, with a gain and a bias `[cols]`.
    #[track_caller]
    pub fn layer_norm<S: Stored>(
        &self,
        x: &Var<'s, S>,
        gain: Parameter,
        bias: Parameter,
        epsilon: f32,
    ) -> Result<Var<'s, S>> {
        let op = self.op("layer_norm", [x])?;
        let out = layer_norm(self.step(), x.value(), &op.weights(gain)?, &op.weights(bias)?, epsilon)?;
        let (x, mean, inverse_std) = (*x, out.mean.save(), out.inverse_std.save());
        Ok(op.record(out.y.save(), move |back, dy| {
            let grad_in = back.take(&x)?;
            let dx = backward(back, x.value(), [gain, bias], [&mean, &inverse_std], &dy, grad_in)?;
            back.step().free(dy);
            back.add(&x, dx)
        }))
    }

    /// Records [`layer_norm_residual`]: `h = x + residual`, and its norm `y`. Returns both, because
    /// h is the next residual.
    ///
    /// Backward adds the norm's gradient to the gradient that h has from elsewhere, in the norm's
    /// launch.
    #[track_caller]
    pub fn layer_norm_residual<S: Stored>(
        &self,
        x: &Var<'s, S>,
        residual: &Var<'s, S>,
        gain: Parameter,
        bias: Parameter,
        epsilon: f32,
    ) -> Result<[Var<'s, S>; 2]> {
        let op = self.op("layer_norm_residual", [x, residual])?;
        let (gains, biases) = (op.weights(gain)?, op.weights(bias)?);
        let (h, out) = layer_norm_residual(self.step(), x.value(), residual.value(), &gains, &biases, epsilon)?;
        let (x, residual, h) = (*x, *residual, h.save());
        let (mean, inverse_std) = (out.mean.save(), out.inverse_std.save());
        Ok(op.record_all([h, out.y.save()], move |back, [dh, dy]| {
            let dh = match dy {
                Some(dy) => {
                    let dh = backward(back, &h, [gain, bias], [&mean, &inverse_std], &dy, dh)?;
                    back.step().free(dy);
                    Some(dh)
                }
                None => dh,
            };
            dh.map_or(Ok(()), |dh| back.add_to_both(&x, &residual, dh))
        }))
    }
}

/// Computes the gradient of h, including the one that it has so far, and the gradients of gain and
/// bias.
fn backward<'s, S: Stored>(
    back: &mut Backward<'_, '_, 's>,
    h: &Saved<'s, S>,
    [gain, bias]: [Parameter; 2],
    kept: [&Saved<'s>; 2],
    dy: &Tensor<'s, S>,
    grad_in: Option<Tensor<'s, S>>,
) -> Result<Tensor<'s, S>> {
    let (step, weights) = (back.step(), back.weights(gain)?);
    let trained = [back.trains(gain)?, back.trains(bias)?];
    if trained == [true; 2] {
        let ([mut dgain, mut dbias], accumulate) = back.gradients_uninit([gain, bias])?;
        return layer_norm_backward(step, h, &weights, kept, dy, grad_in, [&mut dgain, &mut dbias], accumulate);
    }
    let mut only = match trained {
        [true, _] => back.gradient_if_trained(gain)?,
        [_, _] => back.gradient_if_trained(bias)?,
    };
    let only = only.as_mut().map(|(gradient, accumulate)| (gradient, *accumulate));
    let into = if trained[0] { [only, None] } else { [None, only] };
    gradients(step, h, &weights, kept, dy, grad_in, into)
}
