//! RMSNorm on a tape, alone and followed by projections.
//!
//! Backward adds to the gradient that x has from elsewhere, such as the residual path's, in the same launch.

use super::{Backward, Tape, Var};
use crate::error::{Error, Result};
use crate::ops::{self, Gemm, Gradient};
use crate::params::{Parameter, Stack};
use crate::tensor::{Saved, Tensor};

impl<'s> Tape<'_, 's> {
    /// [`ops::rms_norm`] over the last extent, with a gain `[cols]`.
    ///
    /// # Errors
    /// Those of the op.
    #[track_caller]
    pub fn rms_norm(&self, x: &Var<'s>, gain: Parameter, epsilon: f32) -> Result<Var<'s>> {
        let op = self.op("rms_norm", [x])?;
        let (y, inverse_rms) = ops::rms_norm(self.step(), x.value(), &op.weights(gain)?, epsilon)?;
        let (x, inverse_rms) = (*x, inverse_rms.save());
        Ok(op.record(y.save(), move |back, dy| rms_norm_backward(back, &x, gain, &inverse_rms, &dy)))
    }

    /// `y[i] = rms_norm(x) w_i`, one norm and one batched multiply for all of a stack; `x`: `[batch, tokens, in]`, `w_i`:
    /// `[in, out]`, `y`: `[members, batch, tokens, out]`.
    ///
    /// # Errors
    /// [`Error::Misuse`] when extents differ; those of [`ops::rms_norm`].
    #[track_caller]
    pub fn norm_project(&self, x: &Var<'s>, gain: Parameter, epsilon: f32, w: &Stack) -> Result<Var<'s>> {
        const OP: &str = "norm_project";
        let op = self.op(OP, [x])?;
        let (w_shape, distance) = op.stack(w)?;
        let (&[batch, tokens, inner], &[k, n]) = (x.shape().extents(), w_shape.extents()) else {
            let got = format!("{} and {w_shape}", x.shape());
            return Err(Error::misuse(OP, "x [batch, tokens, in] and w [in, out]", got));
        };
        if inner != k {
            let expected = format!("an input of shape [.., {k}] for weights {w_shape}");
            return Err(Error::misuse(OP, expected, x.shape().to_string()));
        }
        let (members, rows) = (w.members().len(), batch * tokens);
        let (z, inverse_rms) = ops::rms_norm(self.step(), x.value(), &op.weights(gain)?, epsilon)?;
        let mut y = self.step().empty([members, batch, tokens, n])?;
        let form = Gemm { batches: members, stride_b: distance, stride_c: rows * n, ..Gemm::new(rows, n, k) };
        let weights = op.stack_weights(w)?;
        ops::gemm_into(self.step(), &form, &z, &weights, None::<&Saved<'s>>, &mut y)?;
        let (x, z, inverse_rms, w) = (*x, z.save(), inverse_rms.save(), w.clone());
        Ok(op.record(y.save(), move |back, dy| {
            let (step, weights) = (back.step(), back.stack_weights(&w)?);
            // dw_i += z^T dy_i
            let (mut dw, accumulate) = back.stack_gradient(&w)?;
            let form = Gemm { batches: members, stride_b: rows * n, stride_c: distance, ..Gemm::new(k, n, rows) };
            let form = if accumulate { form.accumulate() } else { form }.transpose_a();
            let dw = Gradient { form, of: &z, into: &mut dw };
            // The norm's gradient is the sum of dy_i w_i^T, which its backward pass adds up.
            let mut dz = step.empty([members, batch, tokens, k])?;
            let form = Gemm {
                batches: members,
                stride_a: rows * n,
                stride_b: distance,
                stride_c: rows * k,
                ..Gemm::new(rows, k, n).transpose_b()
            };
            ops::gradients_into(step, &dy, dw, Some(Gradient { form, of: &weights, into: &mut dz }))?;
            rms_norm_backward(back, &x, gain, &inverse_rms, &dz)
        }))
    }
}

fn rms_norm_backward<'s>(
    back: &mut Backward<'_, '_, 's>,
    x: &Var<'s>,
    gain: Parameter,
    inverse_rms: &Saved<'s>,
    dy: &Tensor<'s>,
) -> Result<()> {
    let (step, weights, so_far) = (back.step(), back.weights(gain)?, back.take(x)?);
    let (mut dgain, accumulate) = back.gradient(gain)?;
    let dx = ops::rms_norm_backward(step, x.value(), &weights, inverse_rms, dy, so_far, &mut dgain, accumulate)?;
    back.add(x, dx)
}
