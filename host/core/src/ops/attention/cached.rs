//! Attention of one token over a cache of keys and values, for text that is generated token by
//! token.

use super::config::{AttentionConfig, AttentionMask, Sizes};
use crate::error::{Error, Result};
use crate::ops::cast::narrowed;
use crate::ops::{self, Activation, Gemm};
use crate::precision::Precision;
use crate::step::Step;
use crate::tensor::{Lent, LentMut, Source, Tensor};

/// Computes [`ops::attention`] for only the token at `position`. `qkv`:
/// `[1, 1, (heads + 2 kv_heads) width]`; `keys`, `values`: `[tokens, kv_heads width]`; result:
/// `[1, 1, heads width]`.
///
/// The token's key and value are written to row `position` of `keys` and `values`. Its query
/// attends to the rows up to `position`, limited by the mask of `form`.
///
/// Queued: two copies, two products, a scale and a softmax, and for BF16 the softmax's rounding; no
/// scratch. The result is close to the last token of [`ops::attention`], but not identical, because
/// sums run in another order. In f32 it has the same bits on every device. In BF16, scores and
/// their softmax are f32.
///
/// # Errors
/// [`Error::Misuse`] for other shapes, a mask that includes later tokens, documents or lengths, or
/// a position without a row. [`Error::ArenaFull`].
#[track_caller]
pub fn attention_cached<'s, S: Activation>(
    step: &Step<'s>,
    qkv: &impl Source<'s, S>,
    [keys, values]: [&mut LentMut<'_, 's, S>; 2],
    position: usize,
    form: &AttentionConfig<'s>,
) -> Result<Tensor<'s, S>> {
    const OP: &str = "attention_cached";
    let sizes = form.sizes(OP, qkv.shape())?;
    let Sizes { batch, tokens, heads, kv_heads, width, stacked } = sizes;
    let row = kv_heads * width;
    if stacked || batch * tokens != 1 || form.documents.is_some() || form.lengths.is_some() {
        let expected = format!("q, k and v of one token, [1, 1, {} width], and no masks", heads + 2 * kv_heads);
        return Err(Error::misuse(OP, expected, qkv.shape().to_string()));
    }
    for cache in [&*keys, &*values] {
        match *cache.shape().extents() {
            [rows, cols] if cols == row && position < rows => {}
            _ => {
                let expected = format!("keys and values [more than {position}, {row}]");
                return Err(Error::misuse(OP, expected, cache.shape().to_string()));
            }
        }
    }
    let first = match form.sees {
        AttentionMask::Causal => 0,
        AttentionMask::SlidingWindow(tokens) => (position + 1).saturating_sub(tokens.get() as usize),
        AttentionMask::Full => {
            return Err(Error::misuse(OP, "causal or sliding-window heads", "heads that attend to all tokens"));
        }
    };
    let seen = position + 1 - first;
    let part = |start: usize, len: usize, shape: [usize; 2]| Lent::new(qkv.memory().part(start, len), shape.into());
    for (number, cache) in [&mut *keys, &mut *values].into_iter().enumerate() {
        let new = part(heads * width + number * row, row, [1, row]);
        let mut place = LentMut::new(cache.memory().part(position * row, row), [1, row].into());
        ops::copy_into(step, &new, &mut place)?;
    }
    let kept = |cache: &LentMut<'_, 's, S>| -> Lent<'_, 's, S> {
        Lent::new(cache.memory().part(first * row, seen * row), [seen, row].into())
    };
    // One product for each key head, over all queries that belong to it.
    let group = heads / kv_heads;
    let strides = |a: usize, c: usize| Gemm {
        ldb: row,
        batches: kv_heads,
        stride_a: group * a,
        stride_b: width,
        stride_c: group * c,
        precision: Some(Precision::F32),
        ..Gemm::default()
    };
    let none = None::<&Tensor<'_>>;
    let by_keys =
        Gemm { m: group, n: seen, k: width, transpose_b: true, lda: width, ldc: seen, ..strides(width, seen) };
    let mut scores = step.empty::<f32>([heads, seen])?;
    ops::gemm_into(step, &by_keys, &part(0, heads * width, [heads, width]), &kept(keys), none, &mut scores)?;
    let scaled = ops::scale(step, &scores, form.scale.unwrap_or(sizes.scale()))?;
    let weights = narrowed::<S>(step, ops::softmax(step, &scaled)?)?;
    let by_values = Gemm { m: group, n: width, k: seen, lda: seen, ldc: width, ..strides(seen, width) };
    let mut out = step.empty(sizes.output())?;
    ops::gemm_into(step, &by_values, &weights, &kept(values), none, &mut out)?;
    Ok(out)
}
