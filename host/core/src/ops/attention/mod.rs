//! Attention over any number of tokens, and its configuration.
//!
//! | file | contents |
//! |---|---|
//! | `config.rs` | the layout of the heads, and the mask |
//! | `element.rs` | the choice of kernels for each element type |
//! | `made.rs` | the result, with what the backward pass needs |
//! | `flash.rs` | any config, without a matrix of tokens x tokens |
//! | `cached.rs` | tokens over a cache of those before them |
//! | `separate.rs` | queries, keys and values that are separate variables |
//! | `short.rs` | up to 16 tokens with normalized queries and keys, in one launch |

mod cached;
mod config;
mod element;
mod flash;
mod made;
mod separate;
mod short;

use super::{QkNorm, qk_norm, same_shape};
use crate::error::{Error, Result};
use crate::ops;
use crate::params::StackedParameters;
use crate::step::Step;
use crate::tape::{Tape, Var};
use crate::tensor::{Source, Target, Tensor};
pub use cached::attention_cached;
pub(super) use config::Sizes;
pub use config::{AttentionConfig, AttentionMask};
pub use element::AttentionElement;
pub use made::{Attention, AttentionKept};

/// `out = softmax(scale q k^T) v` for each head, over the keys that each query attends to. `form`
/// gives the layout of `qkv` and the mask. If there is a `norm`, q and k are normalized first; see
/// [`ops::qk_norm`].
///
/// A query that attends to no key gives 0. A masked key has weight 0: its value has no effect
/// unless it is infinite or NaN.
///
/// **BF16.** Heads must have a multiple of 8 columns, and the scale must be above 0. Scores are
/// products of BF16 with f32 sums. The softmax is f32, and is rounded to BF16 where it is
/// multiplied with v. `out` is rounded once.
///
/// **f32 in a step of [`Precision::Tf32`](crate::ops::Precision).** Operands are rounded to TF32
/// where the BF16 kernels round to BF16, and `out` is not rounded. This applies to heads of up to
/// 128 columns with a scale above 0. Other heads multiply in f32.
///
/// **The single launch for up to 16 tokens** multiplies in f32 for both types and in every
/// precision. BF16 is widened when it is read, and rounded once, when it is written.
///
/// **Memory** grows linearly with the number of tokens: `out` and one value for each token of each
/// head are kept (Dao, 2023). One case is a single launch that keeps the softmax instead: a `norm`,
/// up to 16 tokens, stacked heads of 64 columns, and no mask. Queues the work, and needs no
/// scratch memory.
///
/// # Errors
/// [`Error::Misuse`] when shapes do not fit `form`; [`Error::ArenaFull`].
///
/// Source: Vaswani et al., 2017.
#[track_caller]
pub fn attention<'s, S: AttentionElement>(
    step: &Step<'s>,
    qkv: &impl Source<'s, S>,
    norm: Option<QkNorm<'_, 's>>,
    form: &AttentionConfig<'s>,
) -> Result<Attention<'s, S>> {
    const OP: &str = "attention";
    let sizes = form.sizes(OP, qkv.shape())?;
    S::check(OP, form, sizes)?;
    form.check_masks(OP, sizes)?;
    let Some(norm) = norm else {
        let (out, lse) = flash::forward(step, qkv, form, sizes)?;
        return Ok(Attention { out: out.save(), kept: AttentionKept::Flash { lse: lse.save(), normal: None } });
    };
    if norm.distance(OP, sizes.width)? == sizes.width && short::suits(form, sizes) {
        return short::forward(step, qkv, norm, form.scale, sizes);
    }
    let (normed, inverse_rms) = ops::qk_norm(step, qkv, norm, form)?;
    let normal = (normed.save(), inverse_rms.save());
    let (out, lse) = flash::forward(step, &normal.0, form, sizes)?;
    Ok(Attention { out: out.save(), kept: AttentionKept::Flash { lse: lse.save(), normal: Some(normal) } })
}

/// The gradients of [`attention`], from the gradient of `out` and the forward result `made`.
/// Returns the gradient of `qkv`.
///
/// If there is a `norm`, the gradient of its gains is written to the target, or added to it when
/// the target's flag is true. Queued. Scratch: one value for each token of each head and, for the
/// gains, up to an eighth of `qkv`. BF16 heads of more than 64 columns also have up to 1 GiB, or 2
/// GiB for few key heads, if the device has memory of its own: the weights' gradients, two bytes
/// for each pair of tokens, half of that under a mask of earlier tokens. Heads of more than 128
/// columns have the weights as well, on every device. If the heads of one key head need more, they
/// are computed again instead.
///
/// # Errors
/// [`Error::Misuse`] when `made` does not match `form` and `norm`.
#[track_caller]
pub fn attention_backward<'s, S: AttentionElement, T: Target<'s, f32>>(
    step: &Step<'s>,
    qkv: &impl Source<'s, S>,
    norm: Option<(QkNorm<'_, 's>, &mut T, bool)>,
    form: &AttentionConfig<'s>,
    made: &Attention<'s, S>,
    dout: &impl Source<'s, S>,
) -> Result<Tensor<'s, S>> {
    let norm = norm.map(|(norm, dgains, accumulate)| (norm, Some((dgains, accumulate))));
    gradients(step, qkv, norm, form, made, dout)
}

/// Computes [`attention_backward`], without the gradient of the gains if it is `None`.
#[track_caller]
fn gradients<'s, S: AttentionElement, T: Target<'s, f32>>(
    step: &Step<'s>,
    qkv: &impl Source<'s, S>,
    norm: Option<(QkNorm<'_, 's>, Option<(&mut T, bool)>)>,
    form: &AttentionConfig<'s>,
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
        (AttentionKept::Flash { lse, normal: Some((normed, inverse_rms)) }, Some((norm, dgains))) => {
            same_shape(OP, qkv.shape(), normed.shape())?;
            let dqkv = flash::backward(step, OP, normed, form, (&made.out, lse), dout, sizes)?;
            qk_norm::gradients(step, qkv, norm, form, inverse_rms, dqkv, dgains)
        }
        (AttentionKept::Short { probabilities, inverse_rms }, Some((norm, dgains))) if short::suits(form, sizes) => {
            norm.distance(OP, sizes.width)?;
            short::backward(step, OP, qkv, norm, form.scale, [probabilities, inverse_rms], dout, sizes, dgains)
        }
        (kept, norm) => {
            let which = if norm.is_some() { "with a norm" } else { "without a norm" };
            Err(Error::misuse(OP, format!("a result of attention {which} for this config"), format!("{kept:?}")))
        }
    }
}

impl<'s> Tape<'_, 's> {
    /// Records [`ops::attention`]; `qkv`: a layout of [`AttentionConfig`]; result:
    /// `[batch, tokens, heads width]`. A `norm` is the gains of q and of k, `[width]` each, and an
    /// epsilon. If there is one, q and k are normalized first.
    #[track_caller]
    pub fn attention<S: AttentionElement>(
        &self,
        qkv: &Var<'s, S>,
        norm: Option<(&StackedParameters, f32)>,
        form: &AttentionConfig<'s>,
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
                    ops::launch::attention_backward(step, qkv.value(), none, &form, &made, &dout)?
                }
                Some((gains, distance, epsilon)) => {
                    let weights = back.stack_weights(&gains)?;
                    let mut dgains = back.stack_gradient_if_trained(&gains)?;
                    let dgains = dgains.as_mut().map(|(dgains, accumulate)| (dgains, *accumulate));
                    let norm = Some((QkNorm { gains: &weights, distance, epsilon }, dgains));
                    gradients(step, qkv.value(), norm, &form, &made, &dout)?
                }
            };
            step.free(dout);
            back.add(&qkv, dqkv)
        }))
    }
}
