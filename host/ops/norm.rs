//! RMSNorm (Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019).

use super::{same_shape, sum_rows_into};
use crate::error::{Error, Result};
use crate::launch::{Source, Target};
use crate::step::Step;
use crate::tensor::Tensor;
use kernels::norm as kernel;

/// `y = x gain / sqrt(mean(x^2) + epsilon)` by row; `x`, `y`: `[.., cols]`, `gain`: `[cols]`. Returns `y` and
/// `1 / sqrt(mean(x^2) + epsilon)`, `[rows]`, which backward needs. Queued, no scratch.
///
/// # Errors
/// [`Error::Misuse`] when the gain has another length; [`Error::ArenaFull`].
#[track_caller]
pub fn rms_norm<'s>(
    step: &Step<'s>,
    x: &impl Source<'s, f32>,
    gain: &impl Source<'s, f32>,
    epsilon: f32,
) -> Result<(Tensor<'s>, Tensor<'s>)> {
    let [rows, cols] = x.shape().as_rows();
    check_gain("rms_norm", cols, gain)?;
    let (mut y, mut inverse_rms) = (step.empty(x.shape())?, step.empty([rows])?);
    step.launch(kernel::rms_norm_forward {
        x: x.slice(),
        gain: gain.slice(),
        cols,
        epsilon,
        y: y.out(),
        inverse_rms: inverse_rms.out(),
    })?;
    Ok((y, inverse_rms))
}

/// `dx = r (g dy) - x r^3 / cols * sum over c of (g dy x)` by row, with `r` = `inverse_rms`, `g` = `gain`; `x`, `dy`,
/// `dx`: `[.., cols]`. Queued, no scratch.
///
/// # Errors
/// [`Error::Misuse`] when shapes differ; [`Error::ArenaFull`].
#[track_caller]
pub fn rms_norm_backward<'s>(
    step: &Step<'s>,
    x: &impl Source<'s, f32>,
    gain: &impl Source<'s, f32>,
    inverse_rms: &impl Source<'s, f32>,
    dy: &impl Source<'s, f32>,
) -> Result<Tensor<'s>> {
    const OP: &str = "rms_norm_backward";
    let [rows, cols] = x.shape().as_rows();
    same_shape(OP, x.shape(), dy.shape())?;
    same_shape(OP, [rows].into(), inverse_rms.shape())?;
    check_gain(OP, cols, gain)?;
    let mut dx = step.empty(x.shape())?;
    step.launch(kernel::rms_norm_backward {
        x: x.slice(),
        gain: gain.slice(),
        inverse_rms: inverse_rms.slice(),
        dy: dy.slice(),
        cols,
        dx: dx.out(),
    })?;
    Ok(dx)
}

/// `dgain += sum over rows of dy x r`, in place; `dgain`: `[cols]`. Queued; scratch: a 64th of x.
///
/// # Errors
/// As for [`rms_norm_backward`].
#[track_caller]
pub fn rms_norm_gain_backward_into<'s>(
    step: &Step<'s>,
    x: &impl Source<'s, f32>,
    inverse_rms: &impl Source<'s, f32>,
    dy: &impl Source<'s, f32>,
    dgain: &mut impl Target<'s, f32>,
) -> Result<()> {
    const OP: &str = "rms_norm_gain_backward";
    let [rows, cols] = x.shape().as_rows();
    same_shape(OP, x.shape(), dy.shape())?;
    same_shape(OP, [rows].into(), inverse_rms.shape())?;
    check_gain(OP, cols, dgain)?;
    let mut partials = step.empty([rows.div_ceil(kernels::block::ROW_CHUNK), cols])?;
    step.launch(kernel::rms_norm_gain_partials {
        x: x.slice(),
        inverse_rms: inverse_rms.slice(),
        dy: dy.slice(),
        cols,
        partials: partials.out(),
    })?;
    sum_rows_into(step, &partials, dgain, true)
}

fn check_gain<'s>(op: &'static str, cols: usize, gain: &impl Source<'s, f32>) -> Result<()> {
    if gain.shape().extents() == [cols] {
        return Ok(());
    }
    Err(Error::misuse(op, format!("a gain of shape [{cols}]"), gain.shape().to_string()))
}
