//! Attention over a few tokens on a tape.

use super::{Tape, Var};
use crate::error::Result;
use crate::ops;

impl<'s> Tape<'_, 's> {
    /// [`ops::attention`]; `q`, `k`, `v`: `[batch, tokens, heads 64]`.
    ///
    /// # Errors
    /// Those of the op.
    #[track_caller]
    pub fn attention(&self, q: &Var<'s>, k: &Var<'s>, v: &Var<'s>, scale: f32) -> Result<Var<'s>> {
        for x in [q, k, v] {
            self.check(x)?;
        }
        let (out, probabilities) = ops::attention(self.step, &q.value, &k.value, &v.value, scale)?;
        let (q, k, v, probabilities) = (*q, *k, *v, probabilities.save());
        Ok(self.record(out.save(), move |back, dout| {
            let [dq, dk, dv] =
                ops::attention_backward(back.step(), &q.value, &k.value, &v.value, &probabilities, &dout, scale)?;
            back.add(&q, dq)?;
            back.add(&k, dk)?;
            back.add(&v, dv)
        }))
    }
}
