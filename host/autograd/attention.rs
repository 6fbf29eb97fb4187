//! Attention over a few tokens on a tape.

use super::{Tape, Var};
use crate::error::Result;
use crate::ops::{self, Attention};
use crate::params::Stack;

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
