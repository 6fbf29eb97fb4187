//! Cross-entropy of logits against labels.

use super::same_shape;
use crate::error::{Error, Result};
use crate::launch::{Source, Target};
use crate::step::Step;
use crate::tensor::Tensor;
use kernels::loss as kernel;

/// `losses[r] = log(sum over c of exp(logits[r, c])) - logits[r, labels[r]]`; `logits`: `[rows, classes]`, `labels`:
/// `[rows]`. Returns the losses, `[rows]`, and the probabilities, `[rows, classes]`, which backward needs. A label
/// without a class makes its row's loss NaN. Queued, no scratch.
///
/// # Errors
/// [`Error::Misuse`] when the rows differ; [`Error::ArenaFull`].
#[track_caller]
pub fn cross_entropy<'s>(
    step: &Step<'s>,
    logits: &impl Source<'s, f32>,
    labels: &impl Source<'s, u32>,
) -> Result<(Tensor<'s>, Tensor<'s>)> {
    let [rows, classes] = form("cross_entropy", logits, labels)?;
    let (mut losses, mut probabilities) = (step.empty([rows])?, step.empty(logits.shape())?);
    step.launch(kernel::cross_entropy_forward {
        logits: logits.slice(),
        labels: labels.slice(),
        classes,
        probabilities: probabilities.out(),
        losses: losses.out(),
    })?;
    Ok((losses, probabilities))
}

/// `dlogits[r, c] = upstream scale (probabilities[r, c] - [c = labels[r]])`; `upstream`: `[1]`, the gradient of
/// `scale * sum(losses)`. Queued, no scratch.
///
/// # Errors
/// [`Error::Misuse`] when shapes differ; [`Error::ArenaFull`].
#[track_caller]
pub fn cross_entropy_backward<'s>(
    step: &Step<'s>,
    probabilities: &impl Source<'s, f32>,
    labels: &impl Source<'s, u32>,
    upstream: &impl Source<'s, f32>,
    scale: f32,
) -> Result<Tensor<'s>> {
    let [_, classes] = form("cross_entropy_backward", probabilities, labels)?;
    same_shape("cross_entropy_backward", [1].into(), upstream.shape())?;
    let mut dlogits = step.empty(probabilities.shape())?;
    step.launch(kernel::cross_entropy_backward {
        probabilities: probabilities.slice(),
        labels: labels.slice(),
        classes,
        scale,
        upstream: upstream.slice(),
        dlogits: dlogits.out(),
    })?;
    Ok(dlogits)
}

fn form<'s>(op: &'static str, logits: &impl Source<'s, f32>, labels: &impl Source<'s, u32>) -> Result<[usize; 2]> {
    match *logits.shape().extents() {
        [rows, classes] if classes > 0 && labels.shape().extents() == [rows] => Ok([rows, classes]),
        _ => Err(Error::misuse(
            op,
            "logits [rows, classes] and labels [rows]",
            format!("{} and {}", logits.shape(), labels.shape()),
        )),
    }
}
