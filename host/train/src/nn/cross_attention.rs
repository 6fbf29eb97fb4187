//! Attention whose queries and keys come from different sequences.

use super::{Linear, Scope};
use stepscope_core::ops::Activation;
use stepscope_core::{Error, Result, Tape, Var};

/// `softmax(q k^T / sqrt(head) + bias) v Wo + bo` with `q = x Wq + bq`, `k = context Wk + bk` and
/// `v = context Wv + bv` (Vaswani et al., 2017), composed of products and a softmax.
///
/// The scores `[batch, heads, queries, keys]` exist as a whole only with a bias. Self-attention is
/// faster in [`MultiHeadAttention`](super::MultiHeadAttention).
#[derive(Clone, Copy, Debug)]
pub struct CrossAttention {
    /// Wq, `[width, width]`, and bq.
    pub query: Linear,
    /// Wk, `[context width, width]`, and bk.
    pub key: Linear,
    /// Wv, `[context width, width]`, and bv.
    pub value: Linear,
    /// Wo, `[width, width]`, and bo.
    pub output: Linear,
    /// The number of heads.
    pub heads: usize,
}

impl CrossAttention {
    /// Adds `q_proj`, `k_proj`, `v_proj` and `o_proj`, each with `weight` and `bias`. `heads`
    /// divides `width`.
    pub fn new(mut names: Scope<'_>, width: usize, context: usize, heads: usize) -> Self {
        Self {
            query: Linear::new(names.at("q_proj"), width, width),
            key: Linear::new(names.at("k_proj"), context, width),
            value: Linear::new(names.at("v_proj"), context, width),
            output: Linear::new(names.at("o_proj"), width, width),
            heads,
        }
    }

    /// Computes the result; `x`, result: `[batch, queries, width]`, `context`:
    /// `[batch, keys, context width]`. `bias` is added to the scores and broadcasts to
    /// `[batch, heads, queries, keys]`: the distances of ALiBi or T5, or a mask of 0 and a large
    /// negative number.
    ///
    /// # Errors
    /// [`Error::Misuse`] for other shapes; [`Error::ArenaFull`].
    #[track_caller]
    pub fn forward<'s, S: Activation>(
        &self,
        tape: &Tape<'_, 's>,
        x: &Var<'s, S>,
        context: &Var<'s, S>,
        bias: Option<&Var<'s, S>>,
    ) -> Result<Var<'s, S>> {
        let q = self.split(&self.query.forward(tape, x)?)?;
        let [k, v] = [self.key, self.value].map(|linear| self.split(&linear.forward(tape, context)?));
        let (k, v) = (k?, v?);
        let head = q.shape().extents()[3] as f32;
        let q = (q * (1.0 / head.sqrt()))?;
        let mixed = match bias {
            None => q.attend(&k, &v)?,
            Some(bias) => (q.matmul_with(&k, [false, true])? + bias)?.softmax()?.matmul(&v)?,
        };
        let mixed = mixed.permute([0, 2, 1, 3])?;
        self.output.forward(tape, &mixed.reshape(x.shape())?)
    }

    /// Returns `[batch, heads, tokens, head]` of `[batch, tokens, width]`.
    fn split<'s, S: Activation>(&self, x: &Var<'s, S>) -> Result<Var<'s, S>> {
        match *x.shape().extents() {
            [batch, tokens, width] if self.heads > 0 && width.is_multiple_of(self.heads) => {
                x.reshape([batch, tokens, self.heads, width / self.heads])?.permute([0, 2, 1, 3])
            }
            _ => {
                let expected = format!("[batch, tokens, width], and a width that {} heads divide", self.heads);
                Err(Error::misuse("CrossAttention", expected, x.shape().to_string()))
            }
        }
    }
}
