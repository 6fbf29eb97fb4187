//! RMSNorm (Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019), by itself and after
//! a residual sum.
//!
//! Backward adds to the gradient that x has from elsewhere, such as from the residual path, in the
//! same launch.

use super::shapes::check_row;
use super::{same_shape, sum_rows_into};
use crate::error::{Error, Result};
use crate::ops;
use crate::params::Parameter;
use crate::step::Step;
use crate::tape::{Backward, Tape, Var};
use crate::tensor::{Saved, Source, Stored, Target, Tensor};
use cuda_std::launch::{PointerMut, Slice};
use kernels::norm as kernel;

/// `y = x gain / sqrt(mean(x^2) + epsilon)` by row; `x`, `y`: `[.., cols]`, `gain`: `[cols]`.
/// Returns `y` and `1 / sqrt(mean(x^2) + epsilon)`, `[rows]`, which the backward pass needs. Queues
/// the work, and needs no scratch memory.
///
/// # Errors
/// [`Error::Misuse`] when the gain has another length; [`Error::ArenaFull`].
#[track_caller]
pub fn rms_norm<'s, S: Stored>(
    step: &Step<'s>,
    x: &impl Source<'s, S>,
    gain: &impl Source<'s, f32>,
    epsilon: f32,
) -> Result<(Tensor<'s, S>, Tensor<'s>)> {
    let (y, inverse_rms) = outputs("rms_norm", step, x, gain)?;
    launch(step, [x.slice(), Slice::empty()], gain.slice(), epsilon, PointerMut::empty(), y, inverse_rms)
}

/// `h = x + residual` and [`rms_norm`] of h, in one launch; `residual`, `h`: the shape of x. The
/// norm is computed from h as stored. Returns `h` and the results of [`rms_norm`]. Queues the work,
/// and needs no scratch memory.
///
/// # Errors
/// [`Error::Misuse`] when the residual has another shape.
#[track_caller]
pub fn rms_norm_residual<'s, S: Stored>(
    step: &Step<'s>,
    x: &impl Source<'s, S>,
    residual: &impl Source<'s, S>,
    gain: &impl Source<'s, f32>,
    epsilon: f32,
) -> Result<(Tensor<'s, S>, Tensor<'s, S>, Tensor<'s>)> {
    const OP: &str = "rms_norm_residual";
    same_shape(OP, x.shape(), residual.shape())?;
    let (mut h, (y, inverse_rms)) = (step.empty(x.shape())?, outputs(OP, step, x, gain)?);
    let (y, inverse_rms) = launch(step, [x.slice(), residual.slice()], gain.slice(), epsilon, h.out(), y, inverse_rms)?;
    Ok((h, y, inverse_rms))
}

/// Checks the gain, and allocates the outputs for `x`.
fn outputs<'s, S: Stored>(
    op: &'static str,
    step: &Step<'s>,
    x: &impl Source<'s, S>,
    gain: &impl Source<'s, f32>,
) -> Result<(Tensor<'s, S>, Tensor<'s>)> {
    let [rows, cols] = x.shape().as_rows();
    check_row(op, "gain", cols, gain)?;
    Ok((step.empty(x.shape())?, step.empty([rows])?))
}

#[track_caller]
fn launch<'s, S: Stored>(
    step: &Step<'s>,
    [x, residual]: [Slice<'_, S>; 2],
    gain: Slice<'_, f32>,
    epsilon: f32,
    h: PointerMut<'_, S>,
    mut y: Tensor<'s, S>,
    mut inverse_rms: Tensor<'s>,
) -> Result<(Tensor<'s, S>, Tensor<'s>)> {
    let (cols, y_out, inverse_rms_out) = (gain.len(), y.out(), inverse_rms.out());
    step.launch(kernel::rms_norm_forward {
        x,
        residual,
        gain,
        cols,
        epsilon,
        h,
        y: y_out,
        inverse_rms: inverse_rms_out,
    })?;
    Ok((y, inverse_rms))
}

/// `dx = r (g dy) - x r^3 / cols * sum over c of (g dy x)` by row and
/// `dgain = sum over rows of dy x r`, with `r` = `inverse_rms`, `g` = `gain`; `x`, `dx`:
/// `[.., cols]`, `dgain`: `[cols]`; `dy`: the shape of x, or `[parts, .., cols]`, whose parts are
/// summed.
///
/// If x has a gradient from elsewhere, `grad_in`, dx is added to it in place and it is returned;
/// otherwise the result is a new tensor. Adds to `dgain` when `accumulate`, otherwise overwrites
/// it. Queued. One launch suffices for up to 8 rows of more than 256 columns, 16 rows of more than
/// 128, and so on. Otherwise there are two or three. Scratch: at most an eighth of x.
///
/// # Errors
/// [`Error::Misuse`] when shapes differ; [`Error::ArenaFull`].
#[track_caller]
pub fn rms_norm_backward<'s, S: Stored>(
    step: &Step<'s>,
    x: &impl Source<'s, S>,
    gain: &impl Source<'s, f32>,
    inverse_rms: &impl Source<'s, f32>,
    dy: &impl Source<'s, S>,
    grad_in: Option<Tensor<'s, S>>,
    dgain: &mut impl Target<'s, f32>,
    accumulate: bool,
) -> Result<Tensor<'s, S>> {
    gradients(step, x, gain, inverse_rms, dy, grad_in, Some((dgain, accumulate)))
}

/// Computes [`rms_norm_backward`], without the gain's gradient if it is `None`. The kernel's sums
/// for it are then dropped.
#[track_caller]
fn gradients<'s, S: Stored>(
    step: &Step<'s>,
    x: &impl Source<'s, S>,
    gain: &impl Source<'s, f32>,
    inverse_rms: &impl Source<'s, f32>,
    dy: &impl Source<'s, S>,
    grad_in: Option<Tensor<'s, S>>,
    dgain: Option<(&mut impl Target<'s, f32>, bool)>,
) -> Result<Tensor<'s, S>> {
    const OP: &str = "rms_norm_backward";
    let [rows, cols] = x.shape().as_rows();
    let parts = match dy.shape().extents().strip_suffix(x.shape().extents()) {
        Some([]) => 1,
        Some([parts]) if *parts > 0 => *parts,
        _ => return Err(Error::misuse(OP, format!("gradients of shape {}", x.shape()), dy.shape().to_string())),
    };
    same_shape(OP, [rows].into(), inverse_rms.shape())?;
    check_row(OP, "gain", cols, gain)?;
    if let Some((dgain, _)) = &dgain {
        check_row(OP, "gain", cols, *dgain)?;
    }
    let mut add = if grad_in.is_some() { kernel::ADD_DX } else { 0 };
    let mut dx = match grad_in {
        Some(sum) => same_shape(OP, x.shape(), sum.shape()).map(|()| sum)?,
        None => step.empty(x.shape())?,
    };
    let chunk = kernels::row_chunk::chunk_of(rows, cols);
    let mut launch = |dgain: PointerMut<'_, f32>, add| {
        step.launch(kernel::rms_norm_backward {
            x: x.slice(),
            gain: gain.slice(),
            inverse_rms: inverse_rms.slice(),
            dy: dy.slice(),
            parts,
            cols,
            chunk,
            add,
            dx: dx.out(),
            dgain,
        })
    };
    // The first launch finishes the gain's gradient itself, or a further launch sums the partial
    // sums of its blocks.
    match dgain {
        Some((dgain, accumulate)) if (1..=chunk).contains(&rows) => {
            add |= if accumulate { kernel::ADD_DGAIN } else { 0 };
            launch(dgain.out(), add)?;
        }
        dgain => {
            let mut partials = step.empty([rows.div_ceil(chunk), cols])?;
            launch(partials.out(), add)?;
            if let Some((dgain, accumulate)) = dgain {
                sum_rows_into(step, &partials, dgain, accumulate)?;
            }
            step.free(partials);
        }
    }
    Ok(dx)
}

impl<'s> Tape<'_, 's> {
    /// Records [`ops::rms_norm`] over the last extent, with a gain `[cols]`.
    #[track_caller]
    pub fn rms_norm<S: Stored>(&self, x: &Var<'s, S>, gain: Parameter, epsilon: f32) -> Result<Var<'s, S>> {
        let op = self.op("rms_norm", [x])?;
        let (y, inverse_rms) = ops::rms_norm(self.step(), x.value(), &op.weights(gain)?, epsilon)?;
        let (x, inverse_rms) = (*x, inverse_rms.save());
        Ok(op.record(y.save(), move |back, dy| backward(back, &x, gain, &inverse_rms, dy)))
    }

    /// Records [`ops::rms_norm_residual`]: `h = x + residual`, and its norm `y`. Returns both,
    /// because h is the next residual.
    ///
    /// Backward adds the norm's gradient to the gradient that h has from elsewhere, in the norm's
    /// launch.
    #[track_caller]
    pub fn rms_norm_residual<S: Stored>(
        &self,
        x: &Var<'s, S>,
        residual: &Var<'s, S>,
        gain: Parameter,
        epsilon: f32,
    ) -> Result<[Var<'s, S>; 2]> {
        let op = self.op("rms_norm_residual", [x, residual])?;
        let gains = op.weights(gain)?;
        let (h, y, inverse_rms) = ops::rms_norm_residual(self.step(), x.value(), residual.value(), &gains, epsilon)?;
        let (x, residual, h, inverse_rms) = (*x, *residual, h.save(), inverse_rms.save());
        Ok(op.record_all([h, y.save()], move |back, [dh, dy]| {
            let dh = match dy {
                Some(dy) => {
                    let dh = gradient(back, &h, gain, &inverse_rms, &dy, dh)?;
                    back.step().free(dy);
                    Some(dh)
                }
                None => dh,
            };
            dh.map_or(Ok(()), |dh| back.add_to_both(&x, &residual, dh))
        }))
    }
}

fn backward<'s, S: Stored>(
    back: &mut Backward<'_, '_, 's>,
    x: &Var<'s, S>,
    gain: Parameter,
    inverse_rms: &Saved<'s>,
    dy: Tensor<'s, S>,
) -> Result<()> {
    let grad_in = back.take(x)?;
    let dx = gradient(back, x.value(), gain, inverse_rms, &dy, grad_in)?;
    back.step().free(dy);
    back.add(x, dx)
}

/// Computes the gradient of x, including the one that it has so far, and the gradient of the gain.
fn gradient<'s, S: Stored>(
    back: &mut Backward<'_, '_, 's>,
    x: &Saved<'s, S>,
    gain: Parameter,
    inverse_rms: &Saved<'s>,
    dy: &Tensor<'s, S>,
    grad_in: Option<Tensor<'s, S>>,
) -> Result<Tensor<'s, S>> {
    let (step, weights) = (back.step(), back.weights(gain)?);
    let mut dgain = back.gradient_if_trained(gain)?;
    let dgain = dgain.as_mut().map(|(dgain, accumulate)| (dgain, *accumulate));
    gradients(step, x, &weights, inverse_rms, dy, grad_in, dgain)
}
