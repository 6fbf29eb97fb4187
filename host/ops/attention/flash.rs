//! Attention by the kernels for any number of tokens, which keep no matrix of tokens x tokens.

use super::form::{AttentionForm, Sizes};
use crate::error::Result;
use crate::ops::same_shape;
use crate::step::Step;
use crate::tensor::{Saved, Source, Target, Tensor};
use cuda_std::launch::Slice;
use kernels::flash_attention::{self as kernel, Shape};

/// A mask as a kernel takes it.
fn mask<'m>(mask: &'m Option<Saved<'_, u32>>) -> Slice<'m, u32> {
    mask.as_ref().map_or_else(Slice::empty, Source::slice)
}

/// The output, and the logarithm of each softmax's denominator, `[batch, heads, tokens]`.
#[track_caller]
pub(super) fn forward<'s>(
    step: &Step<'s>,
    qkv: &impl Source<'s, f32>,
    form: &AttentionForm<'s>,
    sizes: Sizes,
) -> Result<[Saved<'s>; 2]> {
    let (mut out, mut lse) = (step.empty(sizes.output())?, step.empty(sizes.statistics())?);
    step.launch(kernel::flash_forward {
        shape: Shape::suiting(sizes.width, &kernel::FORWARD),
        qkv: qkv.slice(),
        documents: mask(&form.documents),
        lengths: mask(&form.lengths),
        tokens: sizes.tokens as u32,
        heads: sizes.heads as u32,
        kv_heads: sizes.kv_heads as u32,
        width: sizes.width as u32,
        stacked: u32::from(sizes.stacked),
        window: form.window(),
        scale: form.scale.unwrap_or(sizes.scale()),
        out: out.out(),
        lse: lse.out(),
    })?;
    Ok([out.save(), lse.save()])
}

/// The gradient of `qkv`.
#[track_caller]
pub(super) fn backward<'s>(
    step: &Step<'s>,
    op: &'static str,
    qkv: &impl Source<'s, f32>,
    form: &AttentionForm<'s>,
    [out, lse]: [&Saved<'s>; 2],
    dout: &impl Source<'s, f32>,
    sizes: Sizes,
) -> Result<Tensor<'s>> {
    same_shape(op, sizes.output(), out.shape())?;
    same_shape(op, sizes.statistics(), lse.shape())?;
    let (mut delta, mut dqkv) = (step.empty(sizes.statistics())?, step.empty(qkv.shape())?);
    let [tokens, heads, kv_heads, width] =
        [sizes.tokens, sizes.heads, sizes.kv_heads, sizes.width].map(|size| size as u32);
    step.launch(kernel::flash_delta {
        out: out.slice(),
        dout: dout.slice(),
        tokens,
        heads,
        width,
        delta: delta.out(),
    })?;
    // Each writes its own part of the gradient.
    macro_rules! launch {
        ($kernel:ident) => {
            step.launch(kernel::$kernel {
                shape: Shape::suiting(sizes.width, &kernel::BACKWARD),
                qkv: qkv.slice(),
                documents: mask(&form.documents),
                lengths: mask(&form.lengths),
                lse: lse.slice(),
                delta: delta.slice(),
                dout: dout.slice(),
                tokens,
                heads,
                kv_heads,
                width,
                stacked: u32::from(sizes.stacked),
                window: form.window(),
                scale: form.scale.unwrap_or(sizes.scale()),
                dqkv: dqkv.out(),
            })
        };
    }
    launch!(flash_queries)?;
    launch!(flash_keys)?;
    Ok(dqkv)
}
