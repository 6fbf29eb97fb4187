//! Attention over a few tokens, with a norm before it and one on queries and keys.

use super::{Linear, Names, RmsNorm};
use crate::autograd::{Tape, Var};
use crate::error::Result;
use crate::initializer::Initializer;
use crate::ops::{AttentionForm, Factor};
use crate::params::Stack;
use kernels::attention::HEAD;

/// `h + softmax(Q K^T / 8) V Wo` with heads of 64 columns, where `z = norm(h)`, `Q` and `K` are RMSNorm of each head of `z Wq` and
/// `z Wk`, and `V = z Wv`; `h`: `[batch, tokens, width]`. See [`Tape::norm_project`] and [`Tape::attention`].
#[derive(Clone, Debug)]
pub struct Attention {
    /// The norm of h.
    pub norm: RmsNorm,
    /// Wq, Wk, Wv: `[width, width]`.
    pub projections: Stack,
    /// The gains of the queries' and the keys' norm: `[64]`.
    pub qk_norm: Stack,
    /// Wo: `[width, width]`, without a bias.
    pub output: Linear,
}

impl Attention {
    /// `norm.gain`, `wq.weight`, `wk.weight`, `wv.weight`, `q_norm.gain`, `k_norm.gain` and `wo.weight`; `width` is a multiple of 64.
    pub fn new(mut names: Names<'_>, width: usize) -> Self {
        Self {
            norm: RmsNorm::new(names.at("norm"), width),
            projections: Self::projections(&mut names, width),
            qk_norm: Self::qk_norm(&mut names),
            output: Linear::without_bias(names.at("wo"), width, width),
        }
    }

    /// `wq.weight`, `wk.weight` and `wv.weight`, [`Initializer::fan_in`].
    pub fn projections(names: &mut Names<'_>, width: usize) -> Stack {
        let name = |part: usize| ["wq.weight", "wk.weight", "wv.weight"][part].to_owned();
        names.add_stack(3, name, [width, width], Initializer::fan_in(width))
    }

    /// `q_norm.gain` and `k_norm.gain`, one.
    pub fn qk_norm(names: &mut Names<'_>) -> Stack {
        names.add_stack(2, |part: usize| ["q_norm.gain", "k_norm.gain"][part].to_owned(), [HEAD], Initializer::ONE)
    }

    /// The sum of h and what attention makes of it. Attention itself is of f32, between casts where h is BF16.
    ///
    /// # Errors
    /// Those of the ops.
    #[track_caller]
    pub fn forward<'s, S: Factor<S> + Factor<f32>>(&self, tape: &Tape<'_, 's>, h: &Var<'s, S>) -> Result<Var<'s, S>> {
        let RmsNorm { gain, epsilon } = self.norm;
        let qkv = tape.norm_project(h, gain, epsilon, &self.projections)?;
        let heads = AttentionForm::new(h.shape().as_rows()[1] / HEAD);
        let mixed = tape.attention(&tape.to_f32(&qkv)?, Some((&self.qk_norm, epsilon)), &heads)?;
        self.output.forward_residual(tape, &tape.stored_as(&mixed)?, h)
    }
}
