//! Attention over a few tokens, one block for each sample and head.

use super::same_shape;
use crate::error::{Error, Result};
use crate::launch::{Source, Target};
use crate::step::Step;
use crate::tensor::{Shape, Tensor};
use kernels::attention::{self as kernel, HEAD};

/// `out = softmax(scale q k^T) v` for each head (Vaswani et al., 2017); `q`, `k`, `v`, `out`:
/// `[batch, tokens, heads 64]`, at most 16 tokens. Returns `out` and the probabilities,
/// `[batch, heads, tokens, tokens]`, which backward needs. Queued, no scratch.
///
/// # Errors
/// [`Error::Misuse`] when shapes differ or are not of this form; [`Error::ArenaFull`].
#[track_caller]
pub fn attention<'s>(
    step: &Step<'s>,
    q: &impl Source<'s, f32>,
    k: &impl Source<'s, f32>,
    v: &impl Source<'s, f32>,
    scale: f32,
) -> Result<(Tensor<'s>, Tensor<'s>)> {
    let [batch, tokens, heads] = form("attention", q.shape())?;
    same_shape("attention", q.shape(), k.shape())?;
    same_shape("attention", q.shape(), v.shape())?;
    let mut out = step.empty(q.shape())?;
    let mut probabilities = step.empty([batch, heads, tokens, tokens])?;
    step.launch(kernel::attention_forward {
        q: q.slice(),
        k: k.slice(),
        v: v.slice(),
        tokens: tokens as u32,
        heads: heads as u32,
        scale,
        out: out.out(),
        probabilities: probabilities.out(),
    })?;
    Ok((out, probabilities))
}

/// The gradients of `q`, `k` and `v` from that of `out`, with the probabilities of [`attention`]; all of one shape.
/// Queued, no scratch.
///
/// # Errors
/// As for [`attention`].
#[track_caller]
pub fn attention_backward<'s>(
    step: &Step<'s>,
    q: &impl Source<'s, f32>,
    k: &impl Source<'s, f32>,
    v: &impl Source<'s, f32>,
    probabilities: &impl Source<'s, f32>,
    dout: &impl Source<'s, f32>,
    scale: f32,
) -> Result<[Tensor<'s>; 3]> {
    const OP: &str = "attention_backward";
    let [batch, tokens, heads] = form(OP, q.shape())?;
    for shape in [k.shape(), v.shape(), dout.shape()] {
        same_shape(OP, q.shape(), shape)?;
    }
    same_shape(OP, [batch, heads, tokens, tokens].into(), probabilities.shape())?;
    let [mut dq, mut dk, mut dv] = [step.empty(q.shape())?, step.empty(q.shape())?, step.empty(q.shape())?];
    step.launch(kernel::attention_backward {
        q: q.slice(),
        k: k.slice(),
        v: v.slice(),
        probabilities: probabilities.slice(),
        dout: dout.slice(),
        tokens: tokens as u32,
        heads: heads as u32,
        scale,
        dq: dq.out(),
        dk: dk.out(),
        dv: dv.out(),
    })?;
    Ok([dq, dk, dv])
}

/// Batch, tokens and heads of `[batch, tokens, heads 64]`.
fn form(op: &'static str, shape: Shape) -> Result<[usize; 3]> {
    match *shape.extents() {
        [batch, tokens, width] if (1..=kernel::MAX_TOKENS).contains(&tokens) && width > 0 && width % HEAD == 0 => {
            Ok([batch, tokens, width / HEAD])
        }
        _ => {
            let expected = format!("[batch, tokens up to {}, a multiple of {HEAD}]", kernel::MAX_TOKENS);
            Err(Error::misuse(op, expected, shape.to_string()))
        }
    }
}
