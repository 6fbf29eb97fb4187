//! Self-attention with projections before and behind it, as GPT-2, Llama and ViT have it.

use super::{Linear, Names, NextToken};
use crate::autograd::{Tape, Var};
use crate::error::Result;
use crate::initializer::Initializer;
use crate::ops::{self, Attend, AttentionForm, Factor, Rotary, Sees};
use crate::params::Stack;

/// `attention(x Wqkv + bqkv) Wo + bo`; `x`, result: `[batch, tokens, width]`. What a query sees, grouped queries, rotary positions and a norm
/// of queries and keys are its settings:
///
/// ```
/// use stepscope::nn::MultiHeadAttention;
/// use stepscope::ops::Rotary;
/// # let mut layout = stepscope::Layout::builder();
/// # let mut names = layout.names();
/// let vit = MultiHeadAttention::new(names.at("vit"), 768, 12);
/// let gpt2 = MultiHeadAttention::new(names.at("gpt2"), 768, 12).causal();
/// let llama = MultiHeadAttention::grouped(names.at("llama"), 4096, [32, 8]).causal().rotary(Rotary::new(500_000.0));
/// ```
///
/// One product gives q, k and v. See [`Tape::linear`], [`Tape::qk_norm`], [`Tape::rotary`] and [`Tape::attention`].
#[derive(Clone, Debug)]
pub struct MultiHeadAttention {
    /// Wqkv: `[width, (heads + 2 kv_heads) head]`, the columns of q, then those of k and of v; and bqkv.
    pub qkv: Linear,
    /// Wo: `[heads head, width]`; and bo.
    pub output: Linear,
    /// The gains of the queries' and the keys' norm, `[head]` each, and what is added to the mean square.
    pub qk_norm: Option<(Stack, f32)>,
    /// How far queries and keys turn at each position.
    pub rotary: Option<Rotary>,
    /// Heads of q, and of k and v.
    pub heads: [usize; 2],
    /// Which tokens a query sees.
    pub sees: Sees,
}

impl MultiHeadAttention {
    /// `qkv_proj` and `o_proj`, each with `weight`, [`Initializer::fan_in`], and `bias`, zero; heads of `width / heads` columns, that see
    /// all tokens.
    pub fn new(mut names: Names<'_>, width: usize, heads: usize) -> Self {
        Self {
            qkv: Linear::new(names.at("qkv_proj"), width, 3 * width),
            output: Linear::new(names.at("o_proj"), width, width),
            qk_norm: None,
            rotary: None,
            heads: [heads; 2],
            sees: Sees::All,
        }
    }

    /// The same with fewer heads of k and v than of q, and without biases.
    pub fn grouped(mut names: Names<'_>, width: usize, heads: [usize; 2]) -> Self {
        // The op refuses heads that do not divide the width.
        let head = width / heads[0].max(1);
        Self {
            qkv: Linear::without_bias(names.at("qkv_proj"), width, (heads[0] + 2 * heads[1]) * head),
            output: Linear::without_bias(names.at("o_proj"), heads[0] * head, width),
            qk_norm: None,
            rotary: None,
            heads,
            sees: Sees::All,
        }
    }

    /// A query sees its own token and those before it.
    #[must_use]
    pub fn causal(self) -> Self {
        self.sees(Sees::Past)
    }

    /// A query sees these.
    #[must_use]
    pub fn sees(self, sees: Sees) -> Self {
        Self { sees, ..self }
    }

    /// Queries and keys turn with their positions.
    #[must_use]
    pub fn rotary(self, rotary: Rotary) -> Self {
        Self { rotary: Some(rotary), ..self }
    }

    /// Queries and keys are normalised first: `q_norm.gain` and `k_norm.gain`, one for each of `head` columns.
    #[must_use]
    pub fn qk_norm(self, mut names: Names<'_>, head: usize, epsilon: f32) -> Self {
        let name = |part: usize| ["q_norm.gain", "k_norm.gain"][part].to_owned();
        Self { qk_norm: Some((names.add_stack(2, name, [head], Initializer::ONE), epsilon)), ..self }
    }

    /// How its heads lie, and what they see; masks may be added for [`MultiHeadAttention::forward_masked`].
    pub fn form<'s>(&self) -> AttentionForm<'s> {
        AttentionForm::new(self.heads[0]).kv_heads(self.heads[1]).sees(self.sees)
    }

    /// Of samples whose tokens all exist, each one document.
    ///
    /// # Errors
    /// Those of the ops.
    #[track_caller]
    pub fn forward<'s, S>(&self, tape: &Tape<'_, 's>, x: &Var<'s, S>) -> Result<Var<'s, S>>
    where
        S: Attend + Factor<S> + Factor<f32>,
    {
        self.forward_masked(tape, x, &self.form())
    }

    /// By a form of [`MultiHeadAttention::form`] with documents or lengths.
    ///
    /// # Errors
    /// Those of the ops.
    #[track_caller]
    pub fn forward_masked<'s, S>(
        &self,
        tape: &Tape<'_, 's>,
        x: &Var<'s, S>,
        form: &AttentionForm<'s>,
    ) -> Result<Var<'s, S>>
    where
        S: Attend + Factor<S> + Factor<f32>,
    {
        self.output.forward(tape, &self.mixed(tape, x, form)?)
    }

    /// `residual + forward_masked(x)`, in as many launches.
    ///
    /// # Errors
    /// Those of the ops.
    #[track_caller]
    pub fn forward_residual_masked<'s, S>(
        &self,
        tape: &Tape<'_, 's>,
        x: &Var<'s, S>,
        residual: &Var<'s, S>,
        form: &AttentionForm<'s>,
    ) -> Result<Var<'s, S>>
    where
        S: Attend + Factor<S> + Factor<f32>,
    {
        self.output.forward_residual(tape, &self.mixed(tape, x, form)?, residual)
    }

    /// What the heads give, before the output layer.
    #[track_caller]
    fn mixed<'s, S>(&self, tape: &Tape<'_, 's>, x: &Var<'s, S>, form: &AttentionForm<'s>) -> Result<Var<'s, S>>
    where
        S: Attend + Factor<S> + Factor<f32>,
    {
        let qkv = self.qkv.forward(tape, x)?;
        let norm = self.qk_norm.as_ref().map(|(gains, epsilon)| (gains, *epsilon));
        match (self.rotary, norm) {
            (None, norm) => tape.attention(&qkv, norm, form),
            (Some(rotary), _) => {
                tape.attention(&tape.rotary(&self.normed(tape, qkv, form)?, rotary, form)?, None, form)
            }
        }
    }

    /// Of the next token alone, `x`, result: `[1, 1, width]`, behind those whose keys and values the cache keeps. What attention gives then needs no
    /// gradient: it is for text that is written. See [`ops::attention_cached`].
    ///
    /// # Errors
    /// Those of the ops.
    #[track_caller]
    pub fn forward_cached<'s>(
        &self,
        tape: &Tape<'_, 's>,
        x: &Var<'s>,
        mut cache: NextToken<'_, 's>,
    ) -> Result<Var<'s>> {
        let (form, position) = (self.form(), cache.position);
        let mut qkv = self.normed(tape, self.qkv.forward(tape, x)?, &form)?;
        if let Some(rotary) = self.rotary {
            qkv = tape.rotary(&qkv, Rotary { offset: rotary.offset + position as u32, ..rotary }, &form)?;
        }
        let kept = [&mut cache.keys, &mut cache.values];
        let mixed = ops::attention_cached(tape.step(), qkv.value(), kept, position, &form)?;
        self.output.forward(tape, &tape.input(mixed))
    }

    /// Queries and keys normalised, if they are to be.
    #[track_caller]
    fn normed<'s, S: Attend>(
        &self,
        tape: &Tape<'_, 's>,
        qkv: Var<'s, S>,
        form: &AttentionForm<'s>,
    ) -> Result<Var<'s, S>> {
        match &self.qk_norm {
            Some((gains, epsilon)) => tape.qk_norm(&qkv, gains, *epsilon, form),
            None => Ok(qkv),
        }
    }
}
