//! Attention over a cache of keys and values: of a text's beginning in one pass, and then of one
//! token after another.
//!
//! Existing ops compute one token. The flash kernels read a text from its beginning, so they would
//! compute it again for each token.

use super::config::{AttentionConfig, AttentionMask, Sizes};
use super::flash;
use crate::error::{Error, Result};
use crate::ops::cast::narrowed;
use crate::ops::slice::slice_into;
use crate::ops::{self, Activation, Gemm, fill_into};
use crate::precision::Precision;
use crate::step::Step;
use crate::tensor::{Lent, LentMut, Source, Tensor};

/// Computes [`ops::attention`] for only the tokens from `position` on: one token, or the first
/// tokens of a text, at position 0. `qkv`: `[1, tokens, (heads + 2 kv_heads) width]`; `keys`,
/// `values`: `[rows, kv_heads width]`; result: `[1, tokens, heads width]`.
///
/// The keys and values of the tokens are written to the rows of `keys` and `values` from `position`
/// on. Each query attends to its own row and those before it, limited by the mask of `form`.
///
/// Several tokens queue two copies, and their result is that of [`ops::attention`]. One token
/// queues two copies, two products, a scale and a softmax, and for BF16 the softmax's rounding. Its
/// result is close to the last token of [`ops::attention`], but not identical, because sums run in
/// another order. In BF16, scores and their softmax are f32. No scratch.
///
/// In a [batch-invariant](Step::set_batch_invariant) step one token's result has the bits of the
/// last token of [`ops::attention`]. It costs attention over all tokens, with queries of zero for
/// the earlier ones. Scratch: q, k, v and the result of all tokens.
///
/// # Errors
/// [`Error::Misuse`] for other shapes, a mask that includes later tokens, documents or lengths,
/// several tokens after the first position, or positions without a row. [`Error::ArenaFull`].
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
    let fits = batch == 1 && (tokens == 1 || tokens > 1 && position == 0);
    if stacked || !fits || form.documents.is_some() || form.lengths.is_some() {
        let columns = heads + 2 * kv_heads;
        let expected = format!(
            "q, k and v of one token, [1, 1, {columns} width], or of several tokens at position 0, [1, tokens, {columns} width], \
             and no masks"
        );
        return Err(Error::misuse(OP, expected, format!("{} at position {position}", qkv.shape())));
    }
    for cache in [&*keys, &*values] {
        match *cache.shape().extents() {
            [rows, cols] if cols == row && position.checked_add(tokens).is_some_and(|end| end <= rows) => {}
            _ => {
                let last = position.saturating_add(tokens - 1);
                let expected = format!("keys and values [more than {last}, {row}]");
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
    for (number, cache) in [&mut *keys, &mut *values].into_iter().enumerate() {
        let place = cache.memory().part(position * row, tokens * row);
        let mut place = LentMut::new(place, [1, tokens, row].into());
        slice_into(step, qkv, 2, heads * width + number * row, &mut place)?;
    }
    if tokens > 1 {
        S::check(OP, form, sizes)?;
        let (out, lse) = flash::forward(step, qkv, form, sizes)?;
        step.free(lse);
        return Ok(out);
    }
    if step.batch_invariant() {
        return as_last_token(step, qkv, [&*keys, &*values], position + 1, form);
    }
    let seen = position + 1 - first;
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
    let queries = Lent::new(qkv.memory().part(0, heads * width), [heads, width].into());
    ops::gemm_into(step, &by_keys, &queries, &kept(keys), none, &mut scores)?;
    let scaled = ops::scale(step, &scores, form.scale.unwrap_or(sizes.scale()))?;
    let weights = narrowed::<S>(step, ops::softmax(step, &scaled)?)?;
    let by_values = Gemm { m: group, n: width, k: seen, lda: seen, ldc: width, ..strides(seen, width) };
    let mut out = step.empty(sizes.output())?;
    ops::gemm_into(step, &by_values, &weights, &kept(values), none, &mut out)?;
    Ok(out)
}

/// Computes attention over all `tokens` of the cache, and returns the last token's part.
#[track_caller]
fn as_last_token<'s, S: Activation>(
    step: &Step<'s>,
    qkv: &impl Source<'s, S>,
    [keys, values]: [&LentMut<'_, 's, S>; 2],
    tokens: usize,
    form: &AttentionConfig<'s>,
) -> Result<Tensor<'s, S>> {
    const OP: &str = "attention_cached";
    let Sizes { heads, kv_heads, width, .. } = form.sizes(OP, qkv.shape())?;
    let (columns, row) = (heads * width, kv_heads * width);
    let mut queries = step.empty::<S>([1, tokens, columns])?;
    fill_into(step, &mut queries, 0.0)?;
    slice_into(
        step,
        qkv,
        2,
        0,
        &mut LentMut::new(queries.memory().part((tokens - 1) * columns, columns), [1, 1, columns].into()),
    )?;
    let kept = |cache: &LentMut<'_, 's, S>| -> Lent<'_, 's, S> {
        Lent::new(cache.memory().part(0, tokens * row), [1, tokens, row].into())
    };
    let (queries_of_all, keys, values) = (Lent::new(queries.memory(), queries.shape()), kept(keys), kept(values));
    let all = ops::concat(step, &[&queries_of_all, &keys, &values], 2)?;
    let sizes = form.sizes(OP, all.shape())?;
    S::check(OP, form, sizes)?;
    let (out, lse) = flash::forward(step, &all, form, sizes)?;
    let last = ops::slice(step, &out, 1, tokens - 1..tokens)?;
    for tensor in [out, all, queries] {
        step.free(tensor);
    }
    step.free(lse);
    Ok(last)
}
