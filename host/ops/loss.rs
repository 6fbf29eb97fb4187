//! Cross-entropy of logits against labels.

use super::{fill, scaled_sum};
use crate::autograd::{Tape, Var};
use crate::error::{Error, Result};
use crate::ops;
use crate::step::Step;
use crate::tensor::{Saved, Source, Stored, Target, Tensor};
use kernels::loss as kernel;

/// `loss = weight * sum over r of log(sum over c of exp(logits[r, c])) - logits[r, labels[r]]`, `[1]`, and its gradient
/// `dlogits[r, c] = weight (softmax(logits)[r, c] - [c = labels[r]])`; `logits`, `dlogits`: `[rows, classes]`, `labels`:
/// `[rows]`. Returns both. A label without a class is an error where the host knows it, uploaded in this step or an input of a captured
/// one; any other makes the loss and its row's gradients NaN.
///
/// Queued; one launch where the rows fit a block (256 of up to 16 classes). Scratch: a number for each block.
///
/// # Errors
/// [`Error::Misuse`] when the rows differ; [`Error::Label`] with the sample, here or at the replay; [`Error::ArenaFull`].
#[track_caller]
pub fn cross_entropy<'s, S: Stored>(
    step: &Step<'s>,
    logits: &impl Source<'s, S>,
    labels: &impl Source<'s, u32>,
    weight: f32,
) -> Result<(Tensor<'s>, Tensor<'s, S>)> {
    let (rows, classes) = match *logits.shape().extents() {
        [rows, classes] if classes > 0 && labels.shape().extents() == [rows] => (rows, classes),
        _ => {
            let got = format!("{} and {}", logits.shape(), labels.shape());
            return Err(Error::misuse("cross_entropy", "logits [rows, classes] and labels [rows]", got));
        }
    };
    step.check_labels(labels, classes)?;
    let mut dlogits = step.empty(logits.shape())?;
    if rows == 0 {
        return Ok((fill(step, [1], 0.0)?, dlogits));
    }
    let blocks = rows.div_ceil(kernel::loss_rows(classes));
    let mut losses = step.empty([blocks])?;
    step.launch(kernel::cross_entropy {
        logits: logits.slice(),
        labels: labels.slice(),
        classes,
        weight,
        scale: if blocks == 1 { weight } else { 1.0 },
        losses: losses.out(),
        dlogits: dlogits.out(),
    })?;
    let loss = if blocks == 1 { losses } else { scaled_sum(step, &losses, weight)? };
    Ok((loss, dlogits))
}

impl<'s> Tape<'_, 's> {
    /// `loss = weight * sum over rows of -log softmax(logits)[label]`, `[1]`; `logits`: `[rows, classes]`, `labels`:
    /// `[rows]`. A mean over the batch has `weight = 1 / rows`; with micro-batches, one over all their rows. Its gradient is
    /// computed in the same launch.
    ///
    /// # Errors
    /// Those of [`ops::cross_entropy`].
    #[track_caller]
    pub fn cross_entropy<S: Stored>(
        &self,
        logits: &Var<'s, S>,
        labels: Saved<'s, u32>,
        weight: f32,
    ) -> Result<Var<'s>> {
        let op = self.op("cross_entropy", [logits])?;
        let (loss, dlogits) = ops::cross_entropy(self.step(), logits.value(), &labels, weight)?;
        op.record_scalar(loss.save(), logits, move |_| Ok(dlogits))
    }
}
