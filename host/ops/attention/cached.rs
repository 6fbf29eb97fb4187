//! Attention of one token over those before it, whose keys and values were kept: for text that is written token by token.

use super::form::{AttentionForm, Sees, Sizes};
use crate::error::{Error, Result};
use crate::ops::{self, Gemm};
use crate::precision::Precision;
use crate::step::Step;
use crate::tensor::{Lent, LentMut, Source, Tensor};

/// [`ops::attention`] of the token at `position` alone: its key and value are written to the row `position` of `keys` and `values`, and its
/// query sees the rows up to there, as many as `form` says. `qkv`: `[1, 1, (heads + 2 kv_heads) width]`; `keys`, `values`: `[tokens, kv_heads width]`;
/// result: `[1, 1, heads width]`.
///
/// What it gives is close to the last token's part of [`ops::attention`]: sums are made in another order. The bits are the same on every device.
/// Queued: two copies, two products, a scale and a softmax; no scratch.
///
/// # Errors
/// [`Error::Misuse`] for other shapes, heads that see tokens to come, masks, or a position without a row; [`Error::ArenaFull`].
#[track_caller]
pub fn attention_cached<'s>(
    step: &Step<'s>,
    qkv: &impl Source<'s, f32>,
    [keys, values]: [&mut LentMut<'_, 's>; 2],
    position: usize,
    form: &AttentionForm<'s>,
) -> Result<Tensor<'s>> {
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
        Sees::Past => 0,
        Sees::Window(tokens) => (position + 1).saturating_sub(tokens.get() as usize),
        Sees::All => return Err(Error::misuse(OP, "heads that see the past alone", "heads that see all tokens")),
    };
    let seen = position + 1 - first;
    let part = |start: usize, len: usize, shape: [usize; 2]| Lent::new(qkv.memory().part(start, len), shape.into());
    for (number, cache) in [&mut *keys, &mut *values].into_iter().enumerate() {
        let new = part(heads * width + number * row, row, [1, row]);
        let mut place = LentMut::new(cache.memory().part(position * row, row), [1, row].into());
        ops::copy_into(step, &new, &mut place)?;
    }
    let kept = |cache: &LentMut<'_, 's>| -> Lent<'_, 's> {
        Lent::new(cache.memory().part(first * row, seen * row), [seen, row].into())
    };
    // A product for each head of keys, of all queries that belong to it.
    let group = heads / kv_heads;
    let strides = |a: usize, c: usize| Gemm {
        ldb: row,
        batches: kv_heads,
        stride_a: group * a,
        stride_b: width,
        stride_c: group * c,
        precision: Some(Precision::Ieee),
        ..Gemm::default()
    };
    let none = None::<&Tensor<'_>>;
    let by_keys =
        Gemm { m: group, n: seen, k: width, transpose_b: true, lda: width, ldc: seen, ..strides(width, seen) };
    let mut scores = step.empty([heads, seen])?;
    ops::gemm_into(step, &by_keys, &part(0, heads * width, [heads, width]), &kept(keys), none, &mut scores)?;
    let scaled = ops::scale(step, &scores, form.scale.unwrap_or(sizes.scale()))?;
    let weights = ops::softmax(step, &scaled)?;
    let by_values = Gemm { m: group, n: width, k: seen, lda: seen, ldc: width, ..strides(seen, width) };
    let mut out = step.empty(sizes.output())?;
    ops::gemm_into(step, &by_values, &weights, &kept(values), none, &mut out)?;
    Ok(out)
}
