//! Attention with the kernels for any number of tokens, which never store a matrix of tokens x
//! tokens.

use super::config::{AttentionConfig, Sizes};
use super::element::AttentionElement;
use crate::error::Result;
use crate::ops::same_shape;
use crate::step::Step;
use crate::tensor::{Saved, Source, Target, Tensor};
use kernels::flash_attention::flash_delta;

/// Computes the output, and the logarithm of each softmax's denominator, `[batch, heads, tokens]`.
#[track_caller]
pub(super) fn forward<'s, S: AttentionElement>(
    step: &Step<'s>,
    qkv: &impl Source<'s, S>,
    form: &AttentionConfig<'s>,
    sizes: Sizes,
) -> Result<(Tensor<'s, S>, Tensor<'s>)> {
    let (mut out, mut lse) = (step.empty(sizes.output())?, step.empty(sizes.statistics())?);
    S::queue(step, qkv, form, sizes, (&mut out, &mut lse))?;
    Ok((out, lse))
}

/// Computes the gradient of `qkv`.
#[track_caller]
pub(super) fn backward<'s, S: AttentionElement>(
    step: &Step<'s>,
    op: &'static str,
    qkv: &impl Source<'s, S>,
    form: &AttentionConfig<'s>,
    (out, lse): (&Saved<'s, S>, &Saved<'s>),
    dout: &impl Source<'s, S>,
    sizes: Sizes,
) -> Result<Tensor<'s, S>> {
    same_shape(op, sizes.output(), out.shape())?;
    same_shape(op, sizes.statistics(), lse.shape())?;
    let (mut delta, mut dqkv) = (step.empty(sizes.statistics())?, step.empty(qkv.shape())?);
    let [tokens, heads, width] = [sizes.tokens, sizes.heads, sizes.width].map(|size| size as u32);
    step.launch(flash_delta { out: out.slice(), dout: dout.slice(), tokens, heads, width, delta: delta.out() })?;
    S::queue_backward(step, qkv, form, sizes, [lse, &delta], dout, &mut dqkv)?;
    step.free(delta);
    Ok(dqkv)
}
