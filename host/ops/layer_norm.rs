//! LayerNorm (Ba, Kiros and Hinton, "Layer normalization", 2016), alone and behind the sum of a residual.

use super::shapes::check_row;
use super::{same_shape, sum_rows_into};
use crate::autograd::{Backward, Tape, Var};
use crate::error::Result;
use crate::params::Parameter;
use crate::step::Step;
use crate::tensor::{Saved, Source, Stored, Target, Tensor};
use cuda_std::launch::{PointerMut, Slice};
use kernels::layer_norm as kernel;
use kernels::row_chunk::chunk_of;

/// What [`layer_norm`] gives.
#[derive(Debug)]
pub struct Normalized<'s, S: Stored = f32> {
    /// The output, of the input's shape.
    pub y: Tensor<'s, S>,
    /// The mean of each row, `[rows]`, for backward.
    pub mean: Tensor<'s>,
    /// `1 / sqrt(variance + epsilon)` of each row, `[rows]`, for backward.
    pub inverse_std: Tensor<'s>,
}

/// `y = (x - mean(x)) / sqrt(variance(x) + epsilon) gain + bias` by row; `x`, `y`: `[.., cols]`, `gain`, `bias`: `[cols]`. The variance
/// is the mean of squared differences from the mean. Queued, no scratch.
///
/// # Errors
/// [`Error::Misuse`](crate::Error::Misuse) when gain or bias have another length; [`Error::ArenaFull`](crate::Error::ArenaFull).
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

/// `h = x + residual`, and [`layer_norm`] of h, in one launch; `residual`, `h`: as x. Queued, no scratch.
///
/// # Errors
/// [`Error::Misuse`](crate::Error::Misuse) when the residual has another shape; those of [`layer_norm`].
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

/// The outputs for `x`, whose gain and bias are right.
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

/// With `s` = `inverse_std`, `g = dy gain` and `n = (h - mean) s`, by row: `dh = s (g - mean(g) - n mean(g n))`; summed over rows:
/// `dgain = dy n`, `dbias = dy`. `h`, `dy`, `dh`: `[.., cols]`, `gain`, `dgain`, `dbias`: `[cols]`, `mean`, `inverse_std`: `[rows]`.
///
/// `so_far`, a gradient that h has from elsewhere, is added to in place and returned; without it the result is new. `dgain` and `dbias`
/// are added to where `accumulate` says so, else overwritten. Queued; one launch for few rows, else several; scratch: at most a
/// quarter of h.
///
/// # Errors
/// [`Error::Misuse`](crate::Error::Misuse) when shapes differ; [`Error::ArenaFull`](crate::Error::ArenaFull).
#[track_caller]
pub fn layer_norm_backward<'s, S: Stored>(
    step: &Step<'s>,
    h: &impl Source<'s, S>,
    gain: &impl Source<'s, f32>,
    [mean, inverse_std]: [&impl Source<'s, f32>; 2],
    dy: &impl Source<'s, S>,
    so_far: Option<Tensor<'s, S>>,
    [dgain, dbias]: [&mut impl Target<'s, f32>; 2],
    accumulate: [bool; 2],
) -> Result<Tensor<'s, S>> {
    const OP: &str = "layer_norm_backward";
    let [rows, cols] = h.shape().as_rows();
    same_shape(OP, h.shape(), dy.shape())?;
    same_shape(OP, [rows].into(), mean.shape())?;
    same_shape(OP, [rows].into(), inverse_std.shape())?;
    check_row(OP, "gain", cols, gain)?;
    check_row(OP, "gradient of the gain", cols, dgain)?;
    check_row(OP, "gradient of the bias", cols, dbias)?;
    let mut add = if so_far.is_some() { kernel::ADD_DH } else { 0 };
    let mut dh = match so_far {
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
    // The sums over rows are finished by the first launch, or by sums over what each of its blocks gives.
    if (1..=chunk).contains(&rows) {
        for (bit, set) in [kernel::ADD_DGAIN, kernel::ADD_DBIAS].into_iter().zip(accumulate) {
            add |= if set { bit } else { 0 };
        }
        launch(dgain.out(), dbias.out(), add)?;
    } else {
        let chunks = rows.div_ceil(chunk);
        let (mut of_gain, mut of_bias) = (step.empty([chunks, cols])?, step.empty([chunks, cols])?);
        launch(of_gain.out(), of_bias.out(), add)?;
        sum_rows_into(step, &of_gain, dgain, accumulate[0])?;
        sum_rows_into(step, &of_bias, dbias, accumulate[1])?;
        [of_gain, of_bias].into_iter().for_each(|sums| step.give_back(sums));
    }
    Ok(dh)
}

impl<'s> Tape<'_, 's> {
    /// [`layer_norm`] over the last extent, with a gain and a bias `[cols]`.
    ///
    /// # Errors
    /// Those of the op.
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
            let so_far = back.take(&x)?;
            let dx = backward(back, x.value(), [gain, bias], [&mean, &inverse_std], &dy, so_far)?;
            back.step().give_back(dy);
            back.add(&x, dx)
        }))
    }

    /// [`layer_norm_residual`]: `h = x + residual`, and its norm `y`; returns both, since h goes on as the next residual.
    ///
    /// Backward adds the norm's gradient to the one that h has from elsewhere, in the norm's launch.
    ///
    /// # Errors
    /// Those of the op.
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
                    back.step().give_back(dy);
                    Some(dh)
                }
                None => dh,
            };
            dh.map_or(Ok(()), |dh| back.add_to_both(&x, &residual, dh))
        }))
    }
}

/// The gradient of h, with the one that it has so far; those of gain and bias are put where they belong.
fn backward<'s, S: Stored>(
    back: &mut Backward<'_, '_, 's>,
    h: &Saved<'s, S>,
    [gain, bias]: [Parameter; 2],
    kept: [&Saved<'s>; 2],
    dy: &Tensor<'s, S>,
    so_far: Option<Tensor<'s, S>>,
) -> Result<Tensor<'s, S>> {
    let (step, weights) = (back.step(), back.weights(gain)?);
    let ([mut dgain, mut dbias], accumulate) = back.gradients_uninit([gain, bias])?;
    layer_norm_backward(step, h, &weights, kept, dy, so_far, [&mut dgain, &mut dbias], accumulate)
}
