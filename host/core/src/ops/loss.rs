//! Losses: cross-entropy of logits against labels, squared error, and binary cross-entropy.

use super::{fill, same_shape, scaled_sum};
use crate::error::{Error, Result};
use crate::indices::{IndexBound, IndexSource, Indices};
use crate::ops;
use crate::step::Step;
use crate::tape::{Tape, Var};
use crate::tensor::{Saved, Source, Stored, Target, Tensor};
use kernels::loss as kernel;
pub use kernels::loss::IGNORED;

/// `loss = weight * sum over r of log(sum over c of exp(logits[r, c])) - logits[r, labels[r]]`,
/// `[1]`, and its gradient `dlogits[r, c] = weight (softmax(logits)[r, c] - [c = labels[r]])`;
/// `logits`, `dlogits`: `[rows, classes]`, `labels`: `[rows]`. Returns both.
///
/// A label without a class is an error if the host knows the labels, as it does for [`Indices`]
/// that were uploaded or are an input. Any other such label makes the loss and its row's gradients
/// NaN.
///
/// Queued; one launch if the rows fit a block (256 rows of up to 16 classes). Scratch: one value
/// per block.
///
/// # Errors
/// [`Error::Misuse`] when the rows differ. [`Error::Label`] with the sample, here or at the replay.
/// [`Error::ArenaFull`].
#[track_caller]
pub fn cross_entropy<'s, S: Stored>(
    step: &Step<'s>,
    logits: &impl Source<'s, S>,
    labels: &impl IndexSource<'s>,
    weight: f32,
) -> Result<(Tensor<'s>, Tensor<'s, S>)> {
    cross_entropy_by(step, logits, labels, weight, LabelRules::default())
}

/// The label rules of a cross-entropy. The default uses each label as it is.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct LabelRules {
    /// Label smoothing: the part of a label's weight that is spread equally over all classes,
    /// including its own; in `[0, 1)`.
    pub smoothing: f32,
    /// True to skip rows with the label [`IGNORED`]: they add no loss, and their gradients are 0.
    /// For a mean, set `weight` to 1 / the number of other rows.
    pub ignore: bool,
}

/// Computes [`cross_entropy`] with these rules. Under a smoothing s, `-log softmax` of the label
/// has the weight `1 - s`, and its mean over all classes has the weight s. The number of launches
/// is the same. Without smoothing and ignored labels, so are the bits.
///
/// # Errors
/// [`Error::Misuse`] for a smoothing outside `[0, 1)`.
#[track_caller]
pub fn cross_entropy_by<'s, S: Stored>(
    step: &Step<'s>,
    logits: &impl Source<'s, S>,
    labels: &impl IndexSource<'s>,
    weight: f32,
    rules: LabelRules,
) -> Result<(Tensor<'s>, Tensor<'s, S>)> {
    const OP: &str = "cross_entropy";
    let (rows, classes) = match *logits.shape().extents() {
        [rows, classes] if classes > 0 && labels.shape().extents() == [rows] => (rows, classes),
        _ => {
            let got = format!("{} and {}", logits.shape(), labels.shape());
            return Err(Error::misuse(OP, "logits [rows, classes] and labels [rows]", got));
        }
    };
    let labels = rules.check(OP, step, labels, classes)?;
    let mut dlogits = step.empty(logits.shape())?;
    if rows == 0 {
        return Ok((fill(step, [1], 0.0)?, dlogits));
    }
    let blocks = rows.div_ceil(kernel::loss_rows(classes));
    let mut losses = step.empty([blocks])?;
    let scale = if blocks == 1 { weight } else { 1.0 };
    losses_into(step, logits, labels, [weight, scale], rules, &mut losses, &mut dlogits)?;
    Ok((summed(step, losses, weight)?, dlogits))
}

impl LabelRules {
    /// Checks the rules, and the labels that the host knows, for this many classes. Returns the
    /// labels.
    #[track_caller]
    pub(super) fn check<'a, 's, I: IndexSource<'s>>(
        self,
        op: &'static str,
        step: &Step<'s>,
        labels: &'a I,
        classes: usize,
    ) -> Result<&'a I::Values> {
        if !(0.0..1.0).contains(&self.smoothing) {
            return Err(Error::misuse(op, "a smoothing in [0, 1)", self.smoothing.to_string()));
        }
        let bound = IndexBound::below(classes);
        labels.within(step, if self.ignore { bound.or_ignored() } else { bound })
    }
}

/// Computes the weighted gradients of rows of checked logits `[rows, classes]`, and a scaled loss
/// for each block of rows, in one launch.
#[track_caller]
pub(super) fn losses_into<'s, S: Stored>(
    step: &Step<'s>,
    logits: &impl Source<'s, S>,
    labels: &impl Source<'s, u32>,
    [weight, scale]: [f32; 2],
    LabelRules { smoothing, ignore }: LabelRules,
    losses: &mut impl Target<'s, f32>,
    dlogits: &mut impl Target<'s, S>,
) -> Result<()> {
    let [_, classes] = logits.shape().as_rows();
    step.launch(kernel::cross_entropy {
        logits: logits.slice(),
        labels: labels.slice(),
        classes,
        weight,
        scale,
        smoothing,
        ignore: u32::from(ignore),
        losses: losses.out(),
        dlogits: dlogits.out(),
    })
}

/// Returns `weight` times the sum of the blocks' losses. A single block's loss already includes the
/// weight.
fn summed<'s>(step: &Step<'s>, losses: Tensor<'s>, weight: f32) -> Result<Tensor<'s>> {
    if losses.shape().elements() == 1 { Ok(losses) } else { scaled_sum(step, &losses, weight) }
}

/// `loss = weight * sum of (x - target)^2`, `[1]`, and its gradient `dx = 2 weight (x - target)`;
/// `x`, `target`, `dx`: the same shape. Returns both. For a mean, set `weight = 1 / elements`.
///
/// Queued; one launch for up to 4096 elements. Scratch: one value per 4096 elements.
///
/// # Errors
/// [`Error::Misuse`] when shapes differ; [`Error::ArenaFull`].
#[track_caller]
pub fn squared_error<'s, S: Stored>(
    step: &Step<'s>,
    x: &impl Source<'s, S>,
    target: &impl Source<'s, f32>,
    weight: f32,
) -> Result<(Tensor<'s>, Tensor<'s, S>)> {
    by_element("squared_error", step, x, target, weight, kernel::SQUARED_ERROR)
}

/// `loss = weight * sum of -target log p - (1 - target) log(1 - p)`, `[1]`, for
/// `p = 1 / (1 + e^-x)`, and its gradient `dx = weight (p - target)`; `x`, `target`, `dx`: the same
/// shape. Returns both. The loss is computed as `max(x, 0) - x target + log(1 + e^-|x|)`, which
/// neither overflows nor cancels. For a mean, set `weight = 1 / elements`.
///
/// Queued; one launch for up to 4096 elements. Scratch: one value per 4096 elements.
///
/// # Errors
/// [`Error::Misuse`] when shapes differ; [`Error::ArenaFull`].
#[track_caller]
pub fn binary_cross_entropy<'s, S: Stored>(
    step: &Step<'s>,
    x: &impl Source<'s, S>,
    target: &impl Source<'s, f32>,
    weight: f32,
) -> Result<(Tensor<'s>, Tensor<'s, S>)> {
    by_element("binary_cross_entropy", step, x, target, weight, kernel::BINARY_CROSS_ENTROPY)
}

#[track_caller]
fn by_element<'s, S: Stored>(
    op: &'static str,
    step: &Step<'s>,
    x: &impl Source<'s, S>,
    target: &impl Source<'s, f32>,
    weight: f32,
    function: u32,
) -> Result<(Tensor<'s>, Tensor<'s, S>)> {
    same_shape(op, x.shape(), target.shape())?;
    let mut dx = step.empty(x.shape())?;
    let blocks = x.shape().elements().div_ceil(kernels::block::CHUNK);
    if blocks == 0 {
        return Ok((fill(step, [1], 0.0)?, dx));
    }
    let mut losses = step.empty([blocks])?;
    step.launch(kernel::element_loss {
        x: x.slice(),
        target: target.slice(),
        function,
        weight,
        scale: if blocks == 1 { weight } else { 1.0 },
        losses: losses.out(),
        dx: dx.out(),
    })?;
    Ok((summed(step, losses, weight)?, dx))
}

impl<'s> Tape<'_, 's> {
    /// `loss = weight * sum over rows of -log softmax(logits)[label]`, `[1]`; `logits`:
    /// `[rows, classes]`, `labels`: `[rows]`. For a mean over the batch, set `weight = 1 / rows`;
    /// with micro-batches, 1 / the rows of all of them. The gradient is computed in the same
    /// launch. See [`ops::cross_entropy`].
    #[track_caller]
    pub fn cross_entropy<S: Stored>(&self, logits: &Var<'s, S>, labels: Indices<'s>, weight: f32) -> Result<Var<'s>> {
        let op = self.op("cross_entropy", [logits])?;
        let (loss, dlogits) = ops::cross_entropy(self.step(), logits.value(), &labels, weight)?;
        op.record_scalar(loss.save(), logits, move |_| Ok(dlogits))
    }

    /// Records [`Tape::cross_entropy`] with label rules; see [`ops::cross_entropy_by`].
    #[track_caller]
    pub fn cross_entropy_by<S: Stored>(
        &self,
        logits: &Var<'s, S>,
        labels: Indices<'s>,
        weight: f32,
        rules: LabelRules,
    ) -> Result<Var<'s>> {
        let op = self.op("cross_entropy", [logits])?;
        let (loss, dlogits) = ops::cross_entropy_by(self.step(), logits.value(), &labels, weight, rules)?;
        op.record_scalar(loss.save(), logits, move |_| Ok(dlogits))
    }

    /// Records [`ops::squared_error`], `[1]`; `x`, `target`: the same shape.
    #[track_caller]
    pub fn squared_error<S: Stored>(&self, x: &Var<'s, S>, target: &Saved<'s>, weight: f32) -> Result<Var<'s>> {
        let op = self.op("squared_error", [x])?;
        let (loss, dx) = ops::squared_error(self.step(), x.value(), target, weight)?;
        op.record_scalar(loss.save(), x, move |_| Ok(dx))
    }

    /// Records [`ops::binary_cross_entropy`], `[1]`; `x`, `target`: the same shape.
    #[track_caller]
    pub fn binary_cross_entropy<S: Stored>(&self, x: &Var<'s, S>, target: &Saved<'s>, weight: f32) -> Result<Var<'s>> {
        let op = self.op("binary_cross_entropy", [x])?;
        let (loss, dx) = ops::binary_cross_entropy(self.step(), x.value(), target, weight)?;
        op.record_scalar(loss.save(), x, move |_| Ok(dx))
    }
}
