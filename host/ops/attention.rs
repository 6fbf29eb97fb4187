//! Attention over a few tokens with normalised queries and keys, one block for each sample and head.

use super::{same_shape, sum_rows_into};
use crate::autograd::{Tape, Var};
use crate::error::{Error, Result};
use crate::ops;
use crate::params::Stack;
use crate::step::Step;
use crate::tensor::{Saved, Shape, Source, Target, Tensor};
use kernels::attention::{self as kernel, HEAD};

/// What [`attention`] gives.
#[derive(Debug)]
pub struct Attention<'s> {
    /// `[batch, tokens, heads 64]`.
    pub out: Tensor<'s>,
    /// What [`attention_backward`] needs besides the inputs.
    pub kept: AttentionKept<'s>,
}

/// What [`attention_backward`] needs of the forward pass.
#[derive(Clone, Copy, Debug)]
pub struct AttentionKept<'s> {
    /// The softmax, `[batch, heads, tokens, tokens]`.
    pub probabilities: Saved<'s>,
    /// `1 / sqrt(mean(x^2) + epsilon)` of each head of q and of k, `[2, batch, tokens, heads]`.
    pub inverse_rms: Saved<'s>,
}

/// `out = softmax(scale Q K^T) v` for each head (Vaswani et al., 2017), where Q and K are q and k after RMSNorm over each
/// head's 64 columns with gains of their own (Henry et al., 2020); `qkv` (q, k, v): `[3, batch, tokens, heads 64]`, at most
/// 16 tokens; `gains`: 128 elements, those of q first. One launch, queued, no scratch.
///
/// # Errors
/// [`Error::Misuse`] when shapes are not of this form; [`Error::ArenaFull`].
#[track_caller]
pub fn attention<'s>(
    step: &Step<'s>,
    qkv: &impl Source<'s, f32>,
    gains: &impl Source<'s, f32>,
    epsilon: f32,
    scale: f32,
) -> Result<Attention<'s>> {
    let [batch, tokens, heads] = form("attention", qkv.shape(), gains.shape())?;
    let mut out = step.empty([batch, tokens, heads * HEAD])?;
    let mut probabilities = step.empty([batch, heads, tokens, tokens])?;
    let mut inverse_rms = step.empty([2, batch, tokens, heads])?;
    step.launch(kernel::attention_forward {
        qkv: qkv.slice(),
        gains: gains.slice(),
        tokens: tokens as u32,
        heads: heads as u32,
        epsilon,
        scale,
        out: out.out(),
        probabilities: probabilities.out(),
        inverse_rms: inverse_rms.out(),
    })?;
    let kept = AttentionKept { probabilities: probabilities.save(), inverse_rms: inverse_rms.save() };
    Ok(Attention { out, kept })
}

/// The gradients of [`attention`] from that of `out`, with what it kept: that of `qkv`, which is returned, and that of
/// `gains`, to which `dgains` is set, or which is added to it when `accumulate`. One launch and a sum over samples and
/// heads, queued; scratch: 128 elements for each.
///
/// # Errors
/// As for [`attention`].
#[track_caller]
pub fn attention_backward<'s>(
    step: &Step<'s>,
    qkv: &impl Source<'s, f32>,
    gains: &impl Source<'s, f32>,
    kept: &AttentionKept<'s>,
    dout: &impl Source<'s, f32>,
    scale: f32,
    dgains: &mut impl Target<'s, f32>,
    accumulate: bool,
) -> Result<Tensor<'s>> {
    const OP: &str = "attention_backward";
    let [batch, tokens, heads] = form(OP, qkv.shape(), gains.shape())?;
    same_shape(OP, [batch, tokens, heads * HEAD].into(), dout.shape())?;
    same_shape(OP, [batch, heads, tokens, tokens].into(), kept.probabilities.shape())?;
    let (mut dqkv, mut partials) = (step.empty(qkv.shape())?, step.empty([batch * heads, 2 * HEAD])?);
    step.launch(kernel::attention_backward {
        qkv: qkv.slice(),
        gains: gains.slice(),
        inverse_rms: kept.inverse_rms.slice(),
        probabilities: kept.probabilities.slice(),
        dout: dout.slice(),
        tokens: tokens as u32,
        heads: heads as u32,
        scale,
        dqkv: dqkv.out(),
        dgains: partials.out(),
    })?;
    sum_rows_into(step, &partials, dgains, accumulate)?;
    Ok(dqkv)
}

/// Batch, tokens and heads of `[3, batch, tokens, heads 64]`.
fn form(op: &'static str, qkv: Shape, gains: Shape) -> Result<[usize; 3]> {
    if gains.elements() != 2 * HEAD {
        return Err(Error::misuse(op, format!("{} gains", 2 * HEAD), gains.to_string()));
    }
    match *qkv.extents() {
        [3, batch, tokens, width]
            if (1..=kernel::MAX_TOKENS).contains(&tokens)
                && width > 0
                && width % HEAD == 0
                && width / HEAD <= u32::MAX as usize =>
        {
            Ok([batch, tokens, width / HEAD])
        }
        _ => {
            let expected = format!("[3, batch, tokens up to {}, a multiple of {HEAD}]", kernel::MAX_TOKENS);
            Err(Error::misuse(op, expected, qkv.to_string()))
        }
    }
}

impl<'s> Tape<'_, 's> {
    /// [`ops::attention`] with normalised queries and keys; `qkv`: `[3, batch, tokens, heads 64]`, as [`Tape::norm_project`]
    /// gives it, `gains`: those of q and of k, `[64]` each; result: `[batch, tokens, heads 64]`.
    ///
    /// # Errors
    /// Those of the op.
    #[track_caller]
    pub fn attention(&self, qkv: &Var<'s>, gains: &Stack, epsilon: f32, scale: f32) -> Result<Var<'s>> {
        let op = self.op("attention", [qkv])?;
        let weights = op.stack_weights(gains)?;
        let Attention { out, kept } = ops::attention(self.step(), qkv.value(), &weights, epsilon, scale)?;
        let (qkv, gains) = (*qkv, gains.clone());
        Ok(op.record(out.save(), move |back, dout| {
            let (step, weights) = (back.step(), back.stack_weights(&gains)?);
            let (mut dgains, accumulate) = back.stack_gradient(&gains)?;
            let dqkv =
                ops::attention_backward(step, qkv.value(), &weights, &kept, &dout, scale, &mut dgains, accumulate)?;
            back.add(&qkv, dqkv)
        }))
    }
}
