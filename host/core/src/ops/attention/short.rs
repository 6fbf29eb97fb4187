//! Attention with the kernel for up to 16 tokens, which normalizes queries and keys itself.

use super::config::{AttentionConfig, Sizes};
use super::made::{Attention, AttentionKept};
use crate::error::Result;
use crate::ops::{QkNorm, same_shape, sum_rows_into};
use crate::step::Step;
use crate::tensor::{Saved, Source, Stored, Target, Tensor};
use kernels::attention::{self as kernel, HEAD};

/// True if the kernel computes attention for this config, with normalized queries and keys.
pub(super) fn suits(form: &AttentionConfig<'_>, sizes: Sizes) -> bool {
    let Sizes { tokens, heads, kv_heads, width, stacked, .. } = sizes;
    tokens <= kernel::MAX_TOKENS && width == HEAD && heads == kv_heads && stacked && form.sees_all()
}

/// Computes attention with what its backward pass needs.
#[track_caller]
pub(super) fn forward<'s, S: Stored>(
    step: &Step<'s>,
    qkv: &impl Source<'s, S>,
    norm: QkNorm<'_, 's>,
    scale: Option<f32>,
    sizes: Sizes,
) -> Result<Attention<'s, S>> {
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
    let kept = AttentionKept::Short { probabilities: probabilities.save(), inverse_rms: inverse_rms.save() };
    Ok(Attention { out: out.save(), kept })
}

/// Computes the gradient of `qkv`. Writes the gradient of the gains to `dgains`, or adds it.
#[track_caller]
pub(super) fn backward<'s, S: Stored>(
    step: &Step<'s>,
    op: &'static str,
    qkv: &impl Source<'s, S>,
    norm: QkNorm<'_, 's>,
    scale: Option<f32>,
    [probabilities, inverse_rms]: [&Saved<'s>; 2],
    dout: &impl Source<'s, S>,
    sizes: Sizes,
    dgains: Option<(&mut impl Target<'s, f32>, bool)>,
) -> Result<Tensor<'s, S>> {
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
    if let Some((dgains, accumulate)) = dgains {
        sum_rows_into(step, &partials, dgains, accumulate)?;
    }
    step.free(partials);
    Ok(dqkv)
}
