//! The loss on a tape.

use super::{Tape, Var};
use crate::error::Result;
use crate::ops;
use crate::tensor::Saved;

impl<'s> Tape<'_, 's> {
    /// `loss = weight * sum over rows of -log softmax(logits)[label]`, `[1]`; `logits`: `[rows, classes]`, `labels`:
    /// `[rows]`. A mean over the batch has `weight = 1 / rows`; with micro-batches, one over all their rows. Its gradient is
    /// computed in the same launch.
    ///
    /// # Errors
    /// Those of [`ops::cross_entropy`].
    #[track_caller]
    pub fn cross_entropy(&self, logits: &Var<'s>, labels: Saved<'s, u32>, weight: f32) -> Result<Var<'s>> {
        let op = self.op("cross_entropy", [logits])?;
        let (loss, dlogits) = ops::cross_entropy(self.step(), logits.value(), &labels, weight)?;
        op.record_scalar(loss.save(), logits, move |_| Ok(dlogits))
    }
}
