//! Attention over a few tokens, with a norm before it and a norm of queries and keys.

use super::{Linear, RmsNorm, Scope};
use kernels::attention::HEAD;
use stepscope_core::error::Result;
use stepscope_core::initializer::Initializer;
use stepscope_core::ops::{AttentionConfig, GemmElement};
use stepscope_core::params::StackedParameters;
use stepscope_core::tape::{Tape, Var};

/// `h + softmax(Q K^T / 8) V Wo` with heads of 64 columns, where `z = norm(h)`, `Q` and `K` are
/// RMSNorm of each head of `z Wq` and `z Wk`, and `V = z Wv`; `h`: `[batch, tokens, width]`. See
/// [`Tape::norm_project`] and [`Tape::attention`].
#[derive(Clone, Debug)]
pub struct Attention {
    /// The norm of h.
    pub norm: RmsNorm,
    /// Wq, Wk, Wv: `[width, width]`.
    pub projections: StackedParameters,
    /// The gains of the queries' and the keys' norms: `[64]`.
    pub qk_norm: StackedParameters,
    /// Wo: `[width, width]`, without a bias.
    pub output: Linear,
}

impl Attention {
    /// Adds `norm.gain`, `wq.weight`, `wk.weight`, `wv.weight`, `q_norm.gain`, `k_norm.gain` and
    /// `wo.weight`. `width` is a multiple of 64.
    pub fn new(mut names: Scope<'_>, width: usize) -> Self {
        Self {
            norm: RmsNorm::new(names.at("norm"), width),
            projections: Self::projections(&mut names, width),
            qk_norm: Self::qk_norm(&mut names),
            output: Linear::without_bias(names.at("wo"), width, width),
        }
    }

    /// Adds `wq.weight`, `wk.weight` and `wv.weight`, initialized with [`Initializer::fan_in`].
    pub fn projections(names: &mut Scope<'_>, width: usize) -> StackedParameters {
        let name = |part: usize| ["wq.weight", "wk.weight", "wv.weight"][part].to_owned();
        names.add_stack(3, name, [width, width], Initializer::fan_in(width))
    }

    /// Adds `q_norm.gain` and `k_norm.gain`, initialized to one.
    pub fn qk_norm(names: &mut Scope<'_>) -> StackedParameters {
        names.add_stack(2, |part: usize| ["q_norm.gain", "k_norm.gain"][part].to_owned(), [HEAD], Initializer::ONE)
    }

    /// Computes the sum of h and its attention. The attention itself is computed in f32, with casts
    /// around it if h is BF16.
    #[track_caller]
    pub fn forward<'s, S: GemmElement<S> + GemmElement<f32>>(
        &self,
        tape: &Tape<'_, 's>,
        h: &Var<'s, S>,
    ) -> Result<Var<'s, S>> {
        let RmsNorm { gain, epsilon } = self.norm;
        let qkv = tape.norm_project(h, gain, epsilon, &self.projections)?;
        let heads = AttentionConfig::new(h.shape().as_rows()[1] / HEAD);
        let mixed = tape.attention(&tape.to_f32(&qkv)?, Some((&self.qk_norm, epsilon)), &heads)?;
        self.output.forward_residual(tape, &tape.stored_as(&mixed)?, h)
    }
}
