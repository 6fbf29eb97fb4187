//! RMSNorm over each head of queries and keys (Henry et al., "Query-Key Normalization for
//! Transformers", 2020).

use super::attention::{AttentionConfig, Sizes};
use super::{same_shape, sum_rows_into};
use crate::error::{Error, Result};
use crate::ops;
use crate::params::StackedParameters;
use crate::step::Step;
use crate::tape::{Tape, Var};
use crate::tensor::{Source, Stored, Target, Tensor};
use kernels::qk_norm as kernel;

/// The norm of queries and keys.
#[derive(Clone, Copy)]
pub struct QkNorm<'n, 's> {
    /// The gains of q, `width` of them, followed by those of k.
    pub gains: &'n dyn Source<'s, f32>,
    /// Elements from the start of q's gains to the start of k's. `None` means `width`. A stack may
    /// have padding between its members.
    pub distance: Option<usize>,
    /// The epsilon added to the mean square.
    pub epsilon: f32,
}

impl std::fmt::Debug for QkNorm<'_, '_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("QkNorm").field("gains", &self.gains.shape()).field("epsilon", &self.epsilon).finish()
    }
}

impl<'n, 's> QkNorm<'n, 's> {
    /// Makes a norm with gains `[2, width]`.
    pub fn new(gains: &'n impl Source<'s, f32>, epsilon: f32) -> Self {
        Self { gains, distance: None, epsilon }
    }

    /// Returns the distance between the gains, after checking their number.
    pub(super) fn distance(&self, op: &'static str, width: usize) -> Result<usize> {
        let distance = self.distance.unwrap_or(width);
        if distance >= width && distance < 1 << 31 && self.gains.shape().elements() == distance + width {
            return Ok(distance);
        }
        let expected = format!("{} gains, those of k {distance} elements after those of q", 2 * width);
        Err(Error::misuse(op, expected, self.gains.shape().to_string()))
    }
}

/// `y = x gain / sqrt(mean(x^2) + epsilon)` for each head of q and of k, with separate gains; v is
/// copied. `qkv`: a layout of [`AttentionConfig`]; `y`: the same. Returns `y` and `1 /
/// sqrt(mean(x^2) + epsilon)` of each head, `[batch tokens heads of q, k and v]`, which the
/// backward pass needs. Queues the work, and needs no scratch memory.
///
/// # Errors
/// [`Error::Misuse`] when shapes do not fit `form`; [`Error::ArenaFull`].
#[track_caller]
pub fn qk_norm<'s, S: Stored>(
    step: &Step<'s>,
    qkv: &impl Source<'s, S>,
    norm: QkNorm<'_, 's>,
    form: &AttentionConfig<'s>,
) -> Result<(Tensor<'s, S>, Tensor<'s>)> {
    const OP: &str = "qk_norm";
    let sizes = form.sizes(OP, qkv.shape())?;
    let distance = norm.distance(OP, sizes.width)?;
    let (mut y, mut inverse_rms) = (step.empty(qkv.shape())?, step.empty([rows(sizes)])?);
    step.launch(kernel::qk_norm_forward {
        x: qkv.slice(),
        gains: norm.gains.slice(),
        layout: sizes.layout(),
        distance: distance as u32,
        epsilon: norm.epsilon,
        y: y.out(),
        inverse_rms: inverse_rms.out(),
    })?;
    Ok((y, inverse_rms))
}

/// The gradients of [`qk_norm`], from `dy`, the gradient of y. Returns the gradient of `qkv`, in
/// the memory of `dy`. Adds the gradient of the gains to `dgains` when `accumulate`, otherwise
/// overwrites it. Queued. Scratch: at most an eighth of `qkv`.
#[track_caller]
pub fn qk_norm_backward<'s, S: Stored>(
    step: &Step<'s>,
    qkv: &impl Source<'s, S>,
    norm: QkNorm<'_, 's>,
    form: &AttentionConfig<'s>,
    inverse_rms: &impl Source<'s, f32>,
    dy: Tensor<'s, S>,
    dgains: &mut impl Target<'s, f32>,
    accumulate: bool,
) -> Result<Tensor<'s, S>> {
    gradients(step, qkv, norm, form, inverse_rms, dy, Some((dgains, accumulate)))
}

/// Computes [`qk_norm_backward`], without the gradient of the gains if it is `None`. The kernel's
/// sums for it are then dropped.
#[track_caller]
pub(super) fn gradients<'s, S: Stored>(
    step: &Step<'s>,
    qkv: &impl Source<'s, S>,
    norm: QkNorm<'_, 's>,
    form: &AttentionConfig<'s>,
    inverse_rms: &impl Source<'s, f32>,
    mut dy: Tensor<'s, S>,
    dgains: Option<(&mut impl Target<'s, f32>, bool)>,
) -> Result<Tensor<'s, S>> {
    const OP: &str = "qk_norm_backward";
    let sizes = form.sizes(OP, qkv.shape())?;
    let distance = norm.distance(OP, sizes.width)?;
    let rows = rows(sizes);
    same_shape(OP, [rows].into(), inverse_rms.shape())?;
    same_shape(OP, qkv.shape(), dy.shape())?;
    let chunk = kernels::row_chunk::chunk_of(rows, sizes.width);
    let mut partials = step.empty([rows.div_ceil(chunk), distance + sizes.width])?;
    step.launch(kernel::qk_norm_backward {
        x: qkv.slice(),
        gains: norm.gains.slice(),
        inverse_rms: inverse_rms.slice(),
        layout: sizes.layout(),
        distance: distance as u32,
        chunk,
        dx: dy.out(),
        dgains: partials.out(),
    })?;
    if let Some((dgains, accumulate)) = dgains {
        sum_rows_into(step, &partials, dgains, accumulate)?;
    }
    step.free(partials);
    Ok(dy)
}

/// The number of heads of q, k and v of all tokens.
fn rows(sizes: Sizes) -> usize {
    sizes.batch * sizes.tokens * (sizes.heads + 2 * sizes.kv_heads)
}

impl<'s> Tape<'_, 's> {
    /// Records [`ops::qk_norm`] with gains `[width]` of q and of k. [`Tape::attention`] includes
    /// this norm; use this op if something comes between the norm and attention.
    #[track_caller]
    pub fn qk_norm<S: Stored>(
        &self,
        qkv: &Var<'s, S>,
        gains: &StackedParameters,
        epsilon: f32,
        form: &AttentionConfig<'s>,
    ) -> Result<Var<'s, S>> {
        let op = self.op("qk_norm", [qkv])?;
        let (weights, distance) = (op.stack_weights(gains)?, Some(op.stack(gains)?.1));
        let norm = QkNorm { gains: &weights, distance, epsilon };
        let (y, inverse_rms) = ops::qk_norm(self.step(), qkv.value(), norm, form)?;
        let (qkv, gains, form, inverse_rms) = (*qkv, gains.clone(), *form, inverse_rms.save());
        Ok(op.record(y.save(), move |back, dy| {
            let (step, weights) = (back.step(), back.stack_weights(&gains)?);
            let mut dgains = back.stack_gradient_if_trained(&gains)?;
            let dgains = dgains.as_mut().map(|(dgains, accumulate)| (dgains, *accumulate));
            let norm = QkNorm { gains: &weights, distance, epsilon };
            let dqkv = gradients(step, qkv.value(), norm, &form, &inverse_rms, dy, dgains)?;
            back.add(&qkv, dqkv)
        }))
    }
}
