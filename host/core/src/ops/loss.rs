//! Losses: cross-entropy of logits against labels, squared error, and binary cross-entropy.

use super::{fill, same_shape, scaled_sum};
use crate::error::{Error, Result};
use crate::indices::{IndexSource, Indices};
#[cfg(doc)]
use crate::ops;
use crate::preconditions::IndexBound;
use crate::step::Step;
use crate::tape::{Tape, Var};
use crate::tensor::{Saved, Source, Stored, Target, Tensor};
use cuda_std::float_mode;
use cuda_std::launch::PointerMut;
use kernels::loss as kernel;
pub use kernels::loss::IGNORED;

/// The mean of the rows' losses `log(sum over c of exp(logits[r, c])) - logits[r, labels[r]]`,
/// `[1]`, and its gradient `dlogits[r, c] = (softmax(logits)[r, c] - [c = labels[r]]) / rows`;
/// `logits`, `dlogits`: `[.., classes]`, `labels`: `[..]`, a row for each. Returns both. For
/// another weight than `1 / rows`, see [`cross_entropy_by`].
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
) -> Result<(Tensor<'s>, Tensor<'s, S>)> {
    cross_entropy_by(step, logits, labels, LabelRules::default())
}

/// The rules by which a cross-entropy counts labels. The default is the mean over all rows, with
/// each label as it is.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct LabelRules {
    /// Label smoothing: the part of a label's weight that is spread equally over all classes,
    /// including its own; in `[0, 1)`.
    pub smoothing: f32,
    /// True to skip rows with the label [`IGNORED`]: they add no loss, and their gradients are 0.
    /// The mean is then over the other rows.
    pub ignore: bool,
    /// The factor on the sum of the rows' losses. `None` is 1 / the number of counted rows: the
    /// mean. With `ignore`, the host must know the labels for that, as it does for an upload but
    /// not for an input of a captured step.
    pub weight: Option<f32>,
}

/// Computes [`cross_entropy`] with these rules. Under a smoothing s, `-log softmax` of the label
/// has the weight `1 - s`, and its mean over all classes has the weight s. The number of launches
/// is the same. Without smoothing and ignored labels, so are the bits.
///
/// # Errors
/// [`Error::Misuse`] for a smoothing outside `[0, 1)`, and for a mean over rows that the host
/// cannot count.
#[track_caller]
pub fn cross_entropy_by<'s, S: Stored>(
    step: &Step<'s>,
    logits: &impl Source<'s, S>,
    labels: &impl IndexSource<'s>,
    rules: LabelRules,
) -> Result<(Tensor<'s>, Tensor<'s, S>)> {
    cross_entropy_of_part(step, logits, labels, rules, 1.0)
}

/// Computes [`cross_entropy_by`], with a gradient that is also multiplied by `share`.
#[track_caller]
fn cross_entropy_of_part<'s, S: Stored>(
    step: &Step<'s>,
    logits: &impl Source<'s, S>,
    labels: &impl IndexSource<'s>,
    rules: LabelRules,
    share: f64,
) -> Result<(Tensor<'s>, Tensor<'s, S>)> {
    const OP: &str = "cross_entropy";
    let shape = logits.shape();
    let [rows, classes] = shape.as_rows();
    let of_rows = shape.extents().split_last().map(|(_, rows)| rows);
    if classes == 0 || of_rows.is_none_or(|rows| rows != labels.shape().extents()) {
        let got = format!("{} and {}", logits.shape(), labels.shape());
        return Err(Error::misuse(OP, "logits [.., classes] and labels [..]", got));
    }
    let weight = rules.weight(OP, labels)?;
    let labels = rules.check(OP, step, labels, classes)?;
    let mut dlogits = step.empty(logits.shape())?;
    if rows == 0 {
        return Ok((fill(step, [1], 0.0)?, dlogits));
    }
    let blocks = rows.div_ceil(kernel::loss_rows(classes));
    let mut losses = step.empty([blocks])?;
    let scale = if blocks == 1 { weight.of_loss() } else { 1.0 };
    losses_into(step, logits, labels, [weight.of_gradient(share), scale], rules, &mut losses, Some(&mut dlogits))?;
    Ok((summed(step, losses, weight.of_loss())?, dlogits))
}

/// The factor on a sum of losses.
#[derive(Clone, Copy)]
pub(super) enum Weight {
    /// 1 / this number.
    Mean(usize),
    /// A factor of the caller's.
    Given(f32),
}

impl Weight {
    /// The weight of a sum over `count` losses: that of the caller, or the mean.
    fn new(given: Option<f32>, count: usize) -> Self {
        given.map_or(Self::Mean(count), Self::Given)
    }

    /// The factor on the sum of the losses.
    pub(super) fn of_loss(self) -> f32 {
        match self {
            // Nothing is counted, and the sum is 0.
            Self::Mean(0) => 0.0,
            Self::Mean(count) => float_mode::in_default(|| 1.0 / count as f32),
            Self::Given(weight) => weight,
        }
    }

    /// The factor on the gradients of the losses, which include the tape's `share` of a batch. It
    /// is rounded once.
    fn of_gradient(self, share: f64) -> f32 {
        match self {
            Self::Mean(count) if share != 1.0 && count > 0 => float_mode::in_default(|| (share / count as f64) as f32),
            Self::Given(weight) if share != 1.0 => float_mode::in_default(|| (f64::from(weight) * share) as f32),
            _ => self.of_loss(),
        }
    }
}

impl LabelRules {
    /// Sets the factor on the sum of the rows' losses. 1 gives the sum.
    #[must_use]
    pub fn weighted(self, weight: f32) -> Self {
        Self { weight: Some(weight), ..self }
    }

    /// Returns the factor on the sum of the rows' losses.
    ///
    /// # Errors
    /// [`Error::Misuse`] if it is 1 / a number of rows that the host does not know.
    pub(super) fn weight<'s>(self, op: &'static str, labels: &impl IndexSource<'s>) -> Result<Weight> {
        let count = match self.ignore && self.weight.is_none() {
            false => labels.shape().elements(),
            true => labels.counted().ok_or_else(|| {
                let expected = "`LabelRules::weight` for labels that may be ignored and are known only to the device \
                                or in a replay, such as 1 and a division by their number";
                Error::misuse(op, expected, "the default, a mean over the counted rows")
            })?,
        };
        Ok(Weight::new(self.weight, count))
    }

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

/// Computes a scaled loss for each block of rows of checked logits `[rows, classes]` and, if there
/// is an output for them, the weighted gradients of the logits, in one launch.
#[track_caller]
pub(super) fn losses_into<'s, S: Stored>(
    step: &Step<'s>,
    logits: &impl Source<'s, S>,
    labels: &impl Source<'s, u32>,
    [weight, scale]: [f32; 2],
    LabelRules { smoothing, ignore, .. }: LabelRules,
    losses: &mut impl Target<'s, f32>,
    dlogits: Option<&mut impl Target<'s, S>>,
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
        gradients: u32::from(dlogits.is_some()),
        losses: losses.out(),
        dlogits: dlogits.map_or_else(PointerMut::empty, Target::out),
    })
}

/// Returns `weight` times the sum of the blocks' losses. A single block's loss already includes the
/// weight.
fn summed<'s>(step: &Step<'s>, losses: Tensor<'s>, weight: f32) -> Result<Tensor<'s>> {
    if losses.shape().elements() == 1 { Ok(losses) } else { scaled_sum(step, &losses, weight) }
}

/// `loss = weight * sum of (x - target)^2`, `[1]`, and its gradient `dx = 2 weight (x - target)`;
/// `x`, `target`, `dx`: the same shape. Returns both. Without a weight, it is 1 / the number of
/// elements, and the loss is the mean.
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
    weight: Option<f32>,
) -> Result<(Tensor<'s>, Tensor<'s, S>)> {
    by_element("squared_error", step, x, target, (weight, 1.0), kernel::SQUARED_ERROR)
}

/// `loss = weight * sum of -target log p - (1 - target) log(1 - p)`, `[1]`, for
/// `p = 1 / (1 + e^-x)`, and its gradient `dx = weight (p - target)`; `x`, `target`, `dx`: the same
/// shape. Returns both. The loss is computed as `max(x, 0) - x target + log(1 + e^-|x|)`, which
/// neither overflows nor cancels. Without a weight, it is 1 / the number of elements, and the loss
/// is the mean.
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
    weight: Option<f32>,
) -> Result<(Tensor<'s>, Tensor<'s, S>)> {
    by_element("binary_cross_entropy", step, x, target, (weight, 1.0), kernel::BINARY_CROSS_ENTROPY)
}

#[track_caller]
fn by_element<'s, S: Stored>(
    op: &'static str,
    step: &Step<'s>,
    x: &impl Source<'s, S>,
    target: &impl Source<'s, f32>,
    (weight, share): (Option<f32>, f64),
    function: u32,
) -> Result<(Tensor<'s>, Tensor<'s, S>)> {
    same_shape(op, x.shape(), target.shape())?;
    let mut dx = step.empty(x.shape())?;
    let blocks = x.shape().elements().div_ceil(kernels::block::CHUNK);
    if blocks == 0 {
        return Ok((fill(step, [1], 0.0)?, dx));
    }
    let weight = Weight::new(weight, x.shape().elements());
    let mut losses = step.empty([blocks])?;
    step.launch(kernel::element_loss {
        x: x.slice(),
        target: target.slice(),
        function,
        weight: weight.of_gradient(share),
        scale: if blocks == 1 { weight.of_loss() } else { 1.0 },
        losses: losses.out(),
        dx: dx.out(),
    })?;
    Ok((summed(step, losses, weight.of_loss())?, dx))
}

impl<'s> Tape<'_, 's> {
    /// Records the mean over rows of `-log softmax(logits)[label]`, `[1]`; `logits`:
    /// `[.., classes]`, `labels`: `[..]`. The gradient is computed in the same launch. See
    /// [`ops::cross_entropy`]. For a part of a batch, see [`Tape::of_part`].
    #[track_caller]
    pub fn cross_entropy<S: Stored>(&self, logits: &Var<'s, S>, labels: Indices<'s>) -> Result<Var<'s>> {
        self.cross_entropy_by(logits, labels, LabelRules::default())
    }

    /// Records [`Tape::cross_entropy`] with label rules, such as another weight than that of the
    /// mean; see [`ops::cross_entropy_by`].
    #[track_caller]
    pub fn cross_entropy_by<S: Stored>(
        &self,
        logits: &Var<'s, S>,
        labels: Indices<'s>,
        rules: LabelRules,
    ) -> Result<Var<'s>> {
        let (op, share) = (self.op("cross_entropy", [logits])?, self.share());
        let (loss, dlogits) = cross_entropy_of_part(self.step(), logits.value(), &labels, rules, share)?;
        op.record_loss(loss.save(), logits, share, move |_| Ok(dlogits))
    }

    /// Records the mean of `(x - target)^2`, `[1]`; `x`, `target`: the same shape. See
    /// [`ops::squared_error`].
    #[track_caller]
    pub fn squared_error<S: Stored>(&self, x: &Var<'s, S>, target: &Saved<'s>) -> Result<Var<'s>> {
        self.loss_by_element("squared_error", x, target, None, kernel::SQUARED_ERROR)
    }

    /// Records `weight` times the sum of `(x - target)^2`, `[1]`; `x`, `target`: the same shape.
    /// See [`ops::squared_error`].
    #[track_caller]
    pub fn squared_error_by<S: Stored>(&self, x: &Var<'s, S>, target: &Saved<'s>, weight: f32) -> Result<Var<'s>> {
        self.loss_by_element("squared_error", x, target, Some(weight), kernel::SQUARED_ERROR)
    }

    /// Records the mean of the binary cross-entropies, `[1]`; `x`, `target`: the same shape. See
    /// [`ops::binary_cross_entropy`].
    #[track_caller]
    pub fn binary_cross_entropy<S: Stored>(&self, x: &Var<'s, S>, target: &Saved<'s>) -> Result<Var<'s>> {
        self.loss_by_element("binary_cross_entropy", x, target, None, kernel::BINARY_CROSS_ENTROPY)
    }

    /// Records `weight` times the sum of the binary cross-entropies, `[1]`; `x`, `target`: the same
    /// shape. See [`ops::binary_cross_entropy`].
    #[track_caller]
    pub fn binary_cross_entropy_by<S: Stored>(
        &self,
        x: &Var<'s, S>,
        target: &Saved<'s>,
        weight: f32,
    ) -> Result<Var<'s>> {
        self.loss_by_element("binary_cross_entropy", x, target, Some(weight), kernel::BINARY_CROSS_ENTROPY)
    }

    #[track_caller]
    fn loss_by_element<S: Stored>(
        &self,
        name: &'static str,
        x: &Var<'s, S>,
        target: &Saved<'s>,
        weight: Option<f32>,
        function: u32,
    ) -> Result<Var<'s>> {
        let (op, share) = (self.op(name, [x])?, self.share());
        let (loss, dx) = by_element(name, self.step(), x.value(), target, (weight, share), function)?;
        op.record_loss(loss.save(), x, share, move |_| Ok(dx))
    }
}
