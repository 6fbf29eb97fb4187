//! Attention by the kernel for up to 16 tokens, which normalises queries and keys itself.

use super::form::{AttentionForm, Sizes};
use crate::error::Result;
use crate::ops::{QkNorm, same_shape, sum_rows_into};
use crate::step::Step;
use crate::tensor::{Saved, Source, Target, Tensor};
use kernels::attention::{self as kernel, HEAD};

/// Whether the kernel computes attention of this form, with normalised queries and keys.
pub(super) fn suits(form: &AttentionForm<'_>, sizes: Sizes) -> bool {
    let Sizes { tokens, heads, kv_heads, width, stacked, .. } = sizes;
    tokens <= kernel::MAX_TOKENS && width == HEAD && heads == kv_heads && stacked && form.sees_all()
}

/// The output; the softmax, `[batch, heads, tokens, tokens]`; and `1 / sqrt(mean(x^2) + epsilon)` of each head of q and of k, `[2,
/// batch, tokens, heads]`.
#[track_caller]
pub(super) fn forward<'s>(
    step: &Step<'s>,
    qkv: &impl Source<'s, f32>,
    norm: QkNorm<'_, 's>,
    scale: Option<f32>,
    sizes: Sizes,
) -> Result<[Saved<'s>; 3]> {
    let Sizes { batch, tokens, heads, .. } = sizes;
    let mut out = step.empty(sizes.output())?;
    let mut probabilities = step.empty([batch, heads, tokens, tokens])?;
    let mut inverse_rms = step.empty([2, batch, tokens, heads])?;
    step.launch(kernel::attention_forward {
        qkv: qkv.slice(),
        gains: norm.gains.slice(),
        tokens: tokens as u32,
        heads: heads as u32,
        epsilon: norm.epsilon,
        scale: scale.unwrap_or(sizes.scale()),
        out: out.out(),
        probabilities: probabilities.out(),
        inverse_rms: inverse_rms.out(),
    })?;
    Ok([out.save(), probabilities.save(), inverse_rms.save()])
}

/// The gradient of `qkv`; that of the gains goes to `dgains`, or is added to it.
#[track_caller]
pub(super) fn backward<'s>(
    step: &Step<'s>,
    op: &'static str,
    qkv: &impl Source<'s, f32>,
    norm: QkNorm<'_, 's>,
    scale: Option<f32>,
    [probabilities, inverse_rms]: [&Saved<'s>; 2],
    dout: &impl Source<'s, f32>,
    sizes: Sizes,
    (dgains, accumulate): (&mut impl Target<'s, f32>, bool),
) -> Result<Tensor<'s>> {
    let Sizes { batch, tokens, heads, .. } = sizes;
    same_shape(op, [batch, heads, tokens, tokens].into(), probabilities.shape())?;
    let (mut dqkv, mut partials) = (step.empty(qkv.shape())?, step.empty([batch * heads, 2 * HEAD])?);
    step.launch(kernel::attention_backward {
        qkv: qkv.slice(),
        gains: norm.gains.slice(),
        inverse_rms: inverse_rms.slice(),
        probabilities: probabilities.slice(),
        dout: dout.slice(),
        tokens: tokens as u32,
        heads: heads as u32,
        scale: scale.unwrap_or(sizes.scale()),
        dqkv: dqkv.out(),
        dgains: partials.out(),
    })?;
    sum_rows_into(step, &partials, dgains, accumulate)?;
    step.give_back(partials);
    Ok(dqkv)
}
