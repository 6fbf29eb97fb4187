//! RMSNorm on a tape.

use super::{Tape, Var};
use crate::error::Result;
use crate::launch::Source;
use crate::ops;
use crate::params::Parameter;

impl<'s> Tape<'_, 's> {
    /// [`ops::rms_norm`] over the last extent, with a gain `[cols]`.
    ///
    /// # Errors
    /// Those of the op.
    #[track_caller]
    pub fn rms_norm(&self, x: &Var<'s>, gain: Parameter, epsilon: f32) -> Result<Var<'s>> {
        self.check(x)?;
        let (y, inverse_rms) = ops::rms_norm(self.step, &x.value, &self.weights(gain)?, epsilon)?;
        let (x, inverse_rms) = (*x, inverse_rms.save());
        Ok(self.record(y.save(), move |back, dy| {
            let (step, weights) = (back.step(), back.weights(gain)?);
            ops::rms_norm_gain_backward_into(
                step,
                &x.value,
                &inverse_rms,
                &dy,
                &mut back.gradients().lend_mut(step, gain)?,
            )?;
            let dx = ops::rms_norm_backward(step, &x.value, &weights, &inverse_rms, &dy)?;
            back.add(&x, dx)
        }))
    }

    /// RMSNorm of each head: `x`: `[.., heads cols]`, `gain`: `[cols]`, each group of `cols` on its own.
    ///
    /// # Errors
    /// Those of the op.
    #[track_caller]
    pub fn rms_norm_heads(&self, x: &Var<'s>, gain: Parameter, epsilon: f32) -> Result<Var<'s>> {
        let cols = self.weights(gain)?.shape().elements();
        let shape = x.shape();
        let heads = self.reshape(x, [shape.elements() / cols.max(1), cols])?;
        let y = self.rms_norm(&heads, gain, epsilon)?;
        self.reshape(&y, shape)
    }
}
