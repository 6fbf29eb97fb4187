//! Attention, over any number of tokens; and what its form is.
//!
//! | file | what |
//! |---|---|
//! | `form.rs` | how heads lie, and who sees whom |
//! | `attend.rs` | which kernels attend to tensors of a type |
//! | `made.rs` | what attention gives, and keeps for backward |
//! | `flash.rs` | any form: no matrix of tokens x tokens |
//! | `cached.rs` | one token over those before it |
//! | `short.rs` | up to 16 tokens with normalised queries and keys: one launch |

mod attend;
mod cached;
mod flash;
mod form;
mod made;
mod short;

use super::{QkNorm, same_shape};
use crate::autograd::{Tape, Var};
use crate::error::{Error, Result};
use crate::ops;
use crate::params::Stack;
use crate::step::Step;
use crate::tensor::{Source, Target, Tensor};
pub use attend::Attend;
pub use cached::attention_cached;
pub(super) use form::Sizes;
pub use form::{AttentionForm, Sees};
pub use made::{Attention, AttentionKept};

/// `out = softmax(scale q k^T) v` for each head, over the keys that each query sees (Vaswani et al., 2017); `qkv` and all else as
/// `form` says. With a `norm`, q and k are normalised first, see [`ops::qk_norm`].
///
/// Memory grows with the number of tokens, not with its square: kept are `out` and a number for each token of each head (Dao, 2023). With
/// `norm`, up to 16 tokens of f32 in heads of 64 that all see each other, stacked, are one launch that keeps the softmax. Queued, no scratch.
///
/// BF16: heads of a multiple of 8 columns, a scale above 0. Scores are products of BF16 with f32 sums; the softmax is f32, rounded to BF16 where
/// it is multiplied with v; `out` is rounded once.
///
/// f32 in a step below [`Precision::Ieee`](crate::ops::Precision): the same with TF32 in BF16's place and an `out` that is not rounded, for heads
/// of up to 128 columns and a scale above 0; others, and the one launch for up to 16 tokens, multiply f32 as it is.
///
/// A query that sees no key gives 0. A key that is not seen has the weight 0: its value reaches nothing, unless it is infinite or NaN.
///
/// # Errors
/// [`Error::Misuse`] when shapes are not of the form; [`Error::ArenaFull`].
#[track_caller]
pub fn attention<'s, S: Attend>(
    step: &Step<'s>,
    qkv: &impl Source<'s, S>,
    norm: Option<QkNorm<'_, 's>>,
    form: &AttentionForm<'s>,
) -> Result<Attention<'s, S>> {
    const OP: &str = "attention";
    let sizes = form.sizes(OP, qkv.shape())?;
    S::check(OP, form, sizes)?;
    form.check_masks(OP, sizes)?;
    let Some(norm) = norm else {
        let (out, lse) = flash::forward(step, qkv, form, sizes)?;
        return Ok(Attention { out, kept: AttentionKept::Flash { lse, normal: None } });
    };
    if norm.distance(OP, sizes.width)? == sizes.width
        && short::suits(form, sizes)
        && let Some(made) = S::short(step, qkv, norm, form, sizes)?
    {
        return Ok(made);
    }
    let (normed, inverse_rms) = ops::qk_norm(step, qkv, norm, form)?;
    let normal = (normed.save(), inverse_rms.save());
    let (out, lse) = flash::forward(step, &normal.0, form, sizes)?;
    Ok(Attention { out, kept: AttentionKept::Flash { lse, normal: Some(normal) } })
}

/// The gradients of [`attention`] from that of `out`, with what it gave: that of `qkv`, which is returned, and with a `norm` that of its
/// gains, to which the target is set, or which is added to it when the flag beside it is true. Queued; scratch: a number for each token of
/// each head; for the gains, up to an eighth of `qkv`.
///
/// # Errors
/// As for [`attention`]; [`Error::Misuse`] when `made` is not of this form, or a norm comes without a target.
#[track_caller]
pub fn attention_backward<'s, S: Attend, T: Target<'s, f32>>(
    step: &Step<'s>,
    qkv: &impl Source<'s, S>,
    norm: Option<(QkNorm<'_, 's>, &mut T, bool)>,
    form: &AttentionForm<'s>,
    made: &Attention<'s, S>,
    dout: &impl Source<'s, S>,
) -> Result<Tensor<'s, S>> {
    const OP: &str = "attention_backward";
    let sizes = form.sizes(OP, qkv.shape())?;
    S::check(OP, form, sizes)?;
    form.check_masks(OP, sizes)?;
    same_shape(OP, sizes.output(), dout.shape())?;
    match (&made.kept, norm) {
        (AttentionKept::Flash { lse, normal: None }, None) => {
            flash::backward(step, OP, qkv, form, (&made.out, lse), dout, sizes)
        }
        (AttentionKept::Flash { lse, normal: Some((normed, inverse_rms)) }, Some((norm, dgains, accumulate))) => {
            same_shape(OP, qkv.shape(), normed.shape())?;
            let dqkv = flash::backward(step, OP, normed, form, (&made.out, lse), dout, sizes)?;
            ops::qk_norm_backward(step, qkv, norm, form, inverse_rms, dqkv, dgains, accumulate)
        }
        (AttentionKept::Short { probabilities, inverse_rms }, Some((norm, dgains, accumulate)))
            if short::suits(form, sizes) =>
        {
            norm.distance(OP, sizes.width)?;
            let (kept, gains) = ([probabilities, inverse_rms], (dgains, accumulate));
            S::short_backward(step, OP, qkv, norm, form, kept, dout, sizes, gains)
        }
        (kept, norm) => {
            let which = if norm.is_some() { "with a norm" } else { "without a norm" };
            Err(Error::misuse(OP, format!("what attention {which} gave for this form"), format!("{kept:?}")))
        }
    }
}

impl<'s> Tape<'_, 's> {
    /// [`ops::attention`]; `qkv` in a layout of [`AttentionForm`], result: `[batch, tokens, heads width]`. With a `norm`, the gains of q
    /// and of k, `[width]` each, and its epsilon, q and k are normalised first.
    ///
    /// # Errors
    /// Those of the op.
    #[track_caller]
    pub fn attention<S: Attend>(
        &self,
        qkv: &Var<'s, S>,
        norm: Option<(&Stack, f32)>,
        form: &AttentionForm<'s>,
    ) -> Result<Var<'s, S>> {
        let op = self.op("attention", [qkv])?;
        let weights =
            norm.map(|(gains, _)| -> Result<_> { Ok((op.stack_weights(gains)?, op.stack(gains)?.1)) }).transpose();
        let weights = weights?;
        let weights = weights.as_ref().zip(norm).map(|((gains, distance), (_, epsilon))| QkNorm {
            gains,
            distance: Some(*distance),
            epsilon,
        });
        let made = ops::attention(self.step(), qkv.value(), weights, form)?;
        let distance = weights.and_then(|norm| norm.distance);
        let (qkv, form, norm) = (*qkv, *form, norm.map(|(gains, epsilon)| (gains.clone(), distance, epsilon)));
        Ok(op.record(made.out, move |back, dout| {
            let step = back.step();
            let dqkv = match norm {
                None => {
                    let none = None::<(QkNorm<'_, 's>, &mut Tensor<'s>, bool)>;
                    ops::attention_backward(step, qkv.value(), none, &form, &made, &dout)?
                }
                Some((gains, distance, epsilon)) => {
                    let weights = back.stack_weights(&gains)?;
                    let (mut dgains, accumulate) = back.stack_gradient_uninit(&gains)?;
                    let norm = Some((QkNorm { gains: &weights, distance, epsilon }, &mut dgains, accumulate));
                    ops::attention_backward(step, qkv.value(), norm, &form, &made, &dout)?
                }
            };
            step.give_back(dout);
            back.add(&qkv, dqkv)
        }))
    }
}
