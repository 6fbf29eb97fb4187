//! Self-attention with its input and output projections, as in GPT-2, Llama and ViT.

use super::{Linear, NextTokens, RmsNorm, Scope};
use stepscope_core::ops::{self, Activation, AttentionConfig, AttentionElement, AttentionMask, Rotary};
use stepscope_core::{Initializer, Result, StackedParameters, Tape, Var};

/// `attention(x Wqkv + bqkv) Wo + bo`; `x`, result: `[batch, tokens, width]`. The mask, grouped
/// queries, rotary positions and a norm of queries and keys are settings:
///
/// ```
/// use stepscope::nn::MultiHeadAttention;
/// use stepscope::ops::Rotary;
/// # let mut spec = stepscope::ParameterSpec::builder();
/// let vit = MultiHeadAttention::new(spec.at("vit"), 768, 12);
/// let gpt2 = MultiHeadAttention::new(spec.at("gpt2"), 768, 12).causal();
/// let llama = MultiHeadAttention::grouped(spec.at("llama"), 4096, [32, 8]).causal().rotary(Rotary::new(500_000.0));
/// ```
///
/// One product computes q, k and v. See [`Tape::linear`], [`Tape::qk_norm`], [`Tape::rotary`] and
/// [`Tape::attention`].
#[derive(Clone, Debug)]
pub struct MultiHeadAttention {
    /// Wqkv: `[width, (heads + 2 kv_heads) head]`, the columns of q, then those of k and of v; and
    /// bqkv.
    pub qkv: Linear,
    /// Wo: `[heads head, width]`; and bo.
    pub output: Linear,
    /// The norm of queries and keys, if there is one.
    pub qk_norm: Option<QueryKeyNorm>,
    /// The rotary embedding of queries and keys, if there is one.
    pub rotary: Option<Rotary>,
    /// The numbers of heads of q, and of k and v.
    pub heads: [usize; 2],
    /// The mask: the tokens that a query attends to.
    pub sees: AttentionMask,
    /// The factor of the scores. `None` means `1 / sqrt(head)`.
    pub scale: Option<f32>,
}

/// An RMSNorm of queries and keys.
#[derive(Clone, Debug)]
pub enum QueryKeyNorm {
    /// A norm of each head; see [`Tape::qk_norm`].
    Heads {
        /// The gains of the queries and of the keys, `[head]` each.
        gains: StackedParameters,
        /// The term that is added to the mean square.
        epsilon: f32,
    },
    /// A norm of all heads of the queries together, and one of those of the keys, as in OLMo 2.
    Projections {
        /// The norm of the queries.
        queries: RmsNorm,
        /// The norm of the keys.
        keys: RmsNorm,
    },
}

impl MultiHeadAttention {
    /// Adds `qkv_proj` and `o_proj`, each with `weight`, initialized with [`Initializer::fan_in`],
    /// and `bias`, initialized to zero. The heads have `width / heads` columns and attend to all
    /// tokens.
    pub fn new(mut names: Scope<'_>, width: usize, heads: usize) -> Self {
        Self {
            qkv: Linear::new(names.at("qkv_proj"), width, 3 * width),
            output: Linear::new(names.at("o_proj"), width, width),
            qk_norm: None,
            rotary: None,
            heads: [heads; 2],
            sees: AttentionMask::Full,
            scale: None,
        }
    }

    /// Adds `qkv_proj` and `o_proj` without biases, with fewer heads of k and v than of q.
    pub fn grouped(mut names: Scope<'_>, width: usize, heads: [usize; 2]) -> Self {
        // The op rejects a number of heads that does not divide the width.
        let head = width / heads[0].max(1);
        Self {
            qkv: Linear::without_bias(names.at("qkv_proj"), width, (heads[0] + 2 * heads[1]) * head),
            output: Linear::without_bias(names.at("o_proj"), heads[0] * head, width),
            qk_norm: None,
            rotary: None,
            heads,
            sees: AttentionMask::Full,
            scale: None,
        }
    }

    /// Makes each query attend to its own token and those before it.
    #[must_use]
    pub fn causal(self) -> Self {
        self.sees(AttentionMask::Causal)
    }

    /// Sets the mask.
    #[must_use]
    pub fn sees(self, sees: AttentionMask) -> Self {
        Self { sees, ..self }
    }

    /// Sets the rotary embedding of queries and keys.
    #[must_use]
    pub fn rotary(self, rotary: Rotary) -> Self {
        Self { rotary: Some(rotary), ..self }
    }

    /// Adds a norm of queries and keys, with the parameters `q_norm.gain` and `k_norm.gain` of
    /// `head` elements each, initialized to one.
    #[must_use]
    pub fn qk_norm(self, mut names: Scope<'_>, head: usize, epsilon: f32) -> Self {
        let name = |part: usize| ["q_norm.gain", "k_norm.gain"][part].to_owned();
        let gains = names.add_stack(2, name, [head], Initializer::ONE);
        Self { qk_norm: Some(QueryKeyNorm::Heads { gains, epsilon }), ..self }
    }

    /// Adds a norm of all heads of `head` columns together, with the parameters `q_norm.gain` and
    /// `k_norm.gain`, initialized to one.
    #[must_use]
    pub fn qk_norm_of_projections(self, mut names: Scope<'_>, head: usize, epsilon: f32) -> Self {
        let [heads, kv_heads] = self.heads;
        let queries = RmsNorm { epsilon, ..RmsNorm::new(names.at("q_norm"), heads * head) };
        let keys = RmsNorm { epsilon, ..RmsNorm::new(names.at("k_norm"), kv_heads * head) };
        Self { qk_norm: Some(QueryKeyNorm::Projections { queries, keys }), ..self }
    }

    /// The config of the heads and the mask. Documents or lengths may be added for
    /// [`MultiHeadAttention::forward_masked`].
    pub fn config<'s>(&self) -> AttentionConfig<'s> {
        let config = AttentionConfig::new(self.heads[0]).kv_heads(self.heads[1]).sees(self.sees);
        self.scale.map_or(config, |scale| config.scale(scale))
    }

    /// Computes the result for samples without padding, each of them one document.
    #[track_caller]
    pub fn forward<'s, S: Activation>(&self, tape: &Tape<'_, 's>, x: &Var<'s, S>) -> Result<Var<'s, S>> {
        self.forward_masked(tape, x, &self.config())
    }

    /// Computes the result with a config from [`MultiHeadAttention::config`] to which documents or
    /// lengths were added.
    #[track_caller]
    pub fn forward_masked<'s, S: Activation>(
        &self,
        tape: &Tape<'_, 's>,
        x: &Var<'s, S>,
        config: &AttentionConfig<'s>,
    ) -> Result<Var<'s, S>> {
        self.output.forward(tape, &self.mixed(tape, x, config)?)
    }

    /// Computes `residual + forward_masked(x)`, in as many launches.
    #[track_caller]
    pub fn forward_residual_masked<'s, S: Activation>(
        &self,
        tape: &Tape<'_, 's>,
        x: &Var<'s, S>,
        residual: &Var<'s, S>,
        config: &AttentionConfig<'s>,
    ) -> Result<Var<'s, S>> {
        self.output.forward_residual(tape, &self.mixed(tape, x, config)?, residual)
    }

    /// Computes the heads' output, before the output layer.
    #[track_caller]
    fn mixed<'s, S: Activation>(
        &self,
        tape: &Tape<'_, 's>,
        x: &Var<'s, S>,
        config: &AttentionConfig<'s>,
    ) -> Result<Var<'s, S>> {
        let qkv = self.qkv.forward(tape, x)?;
        match (self.rotary, &self.qk_norm) {
            (None, Some(QueryKeyNorm::Heads { gains, epsilon })) => {
                tape.attention(&qkv, Some((gains, *epsilon)), config)
            }
            (None, _) => tape.attention(&self.normed(tape, qkv, config)?, None, config),
            (Some(rotary), _) => {
                tape.attention(&tape.rotary(&self.normed(tape, qkv, config)?, rotary, config)?, None, config)
            }
        }
    }

    /// Computes the result for only the next tokens, after those whose keys and values are in the
    /// cache: one token, or the first tokens of a text; `x`, result: `[1, tokens, width]`. No
    /// gradient flows through the attention: this is for text generation. See
    /// [`ops::attention_cached`].
    #[track_caller]
    pub fn forward_cached<'s, S: Activation>(
        &self,
        tape: &Tape<'_, 's>,
        x: &Var<'s, S>,
        cache: NextTokens<'_, 's, S>,
    ) -> Result<Var<'s, S>> {
        self.output.forward(tape, &self.mixed_cached(tape, x, cache)?)
    }

    /// Computes `residual + forward_cached(x)`, in as many launches.
    #[track_caller]
    pub fn forward_residual_cached<'s, S: Activation>(
        &self,
        tape: &Tape<'_, 's>,
        x: &Var<'s, S>,
        residual: &Var<'s, S>,
        cache: NextTokens<'_, 's, S>,
    ) -> Result<Var<'s, S>> {
        self.output.forward_residual(tape, &self.mixed_cached(tape, x, cache)?, residual)
    }

    /// Computes the heads' output for the next tokens, before the output layer.
    #[track_caller]
    fn mixed_cached<'s, S: Activation>(
        &self,
        tape: &Tape<'_, 's>,
        x: &Var<'s, S>,
        mut cache: NextTokens<'_, 's, S>,
    ) -> Result<Var<'s, S>> {
        let (config, position) = (self.config(), cache.position);
        let mut qkv = self.normed(tape, self.qkv.forward(tape, x)?, &config)?;
        if let Some(rotary) = self.rotary {
            let rotary = rotary.for_positions(rotary.offset as usize + cache.positions);
            qkv = tape.rotary(&qkv, Rotary { offset: rotary.offset + position as u32, ..rotary }, &config)?;
        }
        let kept = [&mut cache.keys, &mut cache.values];
        Ok(tape.input(ops::attention_cached(tape.step(), qkv.value(), kept, position, &config)?))
    }

    /// Normalizes queries and keys, if there is a norm.
    #[track_caller]
    fn normed<'s, S: AttentionElement>(
        &self,
        tape: &Tape<'_, 's>,
        qkv: Var<'s, S>,
        config: &AttentionConfig<'s>,
    ) -> Result<Var<'s, S>> {
        match &self.qk_norm {
            Some(QueryKeyNorm::Heads { gains, epsilon }) => tape.qk_norm(&qkv, gains, *epsilon, config),
            Some(QueryKeyNorm::Projections { queries, keys }) => {
                let columns = qkv.shape().as_rows()[1];
                let [heads, kv_heads] = self.heads;
                let head = columns / (heads + 2 * kv_heads);
                let (end_of_q, end_of_k) = (heads * head, (heads + kv_heads) * head);
                let q = queries.forward(tape, &qkv.narrow(-1, 0..end_of_q)?)?;
                let k = keys.forward(tape, &qkv.narrow(-1, end_of_q..end_of_k)?)?;
                Var::cat(&[q, k, qkv.narrow(-1, end_of_k..columns)?], -1)
            }
            None => Ok(qkv),
        }
    }
}
