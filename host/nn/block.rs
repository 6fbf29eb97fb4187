//! A transformer's block: attention and a feed-forward part, each behind a norm and beside a residual.

use super::{LayerNorm, Mlp, MultiHeadAttention, Names, NextToken, RmsNorm, SwiGlu};
use crate::autograd::{Tape, Var};
use crate::error::Result;
use crate::ops::{Attend, AttentionForm, Factor, Rotary};
use crate::tensor::Stored;

/// A norm over the last extent.
#[derive(Clone, Copy, Debug)]
pub enum Norm {
    /// LayerNorm.
    Layer(LayerNorm),
    /// RMSNorm.
    Rms(RmsNorm),
}

impl Norm {
    /// The norm of x.
    ///
    /// # Errors
    /// Those of the op.
    #[track_caller]
    pub fn forward<'s, S: Stored>(&self, tape: &Tape<'_, 's>, x: &Var<'s, S>) -> Result<Var<'s, S>> {
        match self {
            Self::Layer(norm) => norm.forward(tape, x),
            Self::Rms(norm) => norm.forward(tape, x),
        }
    }

    /// `h = x + residual` and the norm of h, both.
    ///
    /// # Errors
    /// Those of the op.
    #[track_caller]
    pub fn forward_residual<'s, S: Stored>(
        &self,
        tape: &Tape<'_, 's>,
        x: &Var<'s, S>,
        residual: &Var<'s, S>,
    ) -> Result<[Var<'s, S>; 2]> {
        match self {
            Self::Layer(norm) => norm.forward_residual(tape, x, residual),
            Self::Rms(norm) => norm.forward_residual(tape, x, residual),
        }
    }
}

/// What a block does with each token by itself.
#[derive(Clone, Copy, Debug)]
pub enum FeedForward {
    /// Two linear layers with GELU between them.
    Mlp(Mlp),
    /// SwiGLU.
    SwiGlu(SwiGlu),
}

impl FeedForward {
    /// `residual + forward(x)`.
    ///
    /// # Errors
    /// Those of the ops.
    #[track_caller]
    pub fn forward_residual<'s, S: Factor<S> + Factor<f32>>(
        &self,
        tape: &Tape<'_, 's>,
        x: &Var<'s, S>,
        residual: &Var<'s, S>,
    ) -> Result<Var<'s, S>> {
        match self {
            Self::Mlp(mlp) => mlp.forward_residual(tape, x, residual),
            Self::SwiGlu(swiglu) => swiglu.forward_residual(tape, x, residual),
        }
    }
}

/// `h = x + attention(norm1(x))`, `y = h + feed_forward(norm2(h))`; x, y: `[batch, tokens, width]`.
///
/// A clone is a few handles: what [`Tape::checkpoint`] takes, to keep x alone of the block.
#[derive(Clone, Debug)]
pub struct Block {
    /// The norms before attention and before the feed-forward part.
    pub norms: [Norm; 2],
    /// Attention.
    pub attention: MultiHeadAttention,
    /// What follows for each token by itself.
    pub feed_forward: FeedForward,
}

impl Block {
    /// LayerNorm, heads that see all tokens, GELU, and biases, as ViT has them: `norm1`, `attention`, `norm2`, `mlp`.
    pub fn vit(mut names: Names<'_>, width: usize, heads: usize, hidden: usize) -> Self {
        let norm1 = Norm::Layer(LayerNorm::new(names.at("norm1"), width));
        let attention = MultiHeadAttention::new(names.at("attention"), width, heads);
        let norm2 = Norm::Layer(LayerNorm::new(names.at("norm2"), width));
        let feed_forward = FeedForward::Mlp(Mlp::new(names.at("mlp"), width, hidden, width));
        Self { norms: [norm1, norm2], attention, feed_forward }
    }

    /// [`Block::vit`] with causal heads, as GPT-2 has them.
    pub fn gpt2(names: Names<'_>, width: usize, heads: usize, hidden: usize) -> Self {
        let vit = Self::vit(names, width, heads, hidden);
        Self { attention: vit.attention.causal(), ..vit }
    }

    /// RMSNorm, causal heads with rotary positions, as many of q and of k and v as `heads` says, SwiGLU, and no biases, as Llama has them:
    /// `norm1`, `attention`, `norm2`, `mlp`.
    pub fn llama(mut names: Names<'_>, width: usize, heads: [usize; 2], hidden: usize, rotary: Rotary) -> Self {
        let norm1 = Norm::Rms(RmsNorm::new(names.at("norm1"), width));
        let attention = MultiHeadAttention::grouped(names.at("attention"), width, heads).causal().rotary(rotary);
        let norm2 = Norm::Rms(RmsNorm::new(names.at("norm2"), width));
        let feed_forward = FeedForward::SwiGlu(SwiGlu::new(names.at("mlp"), width, hidden, width));
        Self { norms: [norm1, norm2], attention, feed_forward }
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
        self.forward_masked(tape, x, &self.attention.form())
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
        let h = self.attention.forward_residual_masked(tape, &self.norms[0].forward(tape, x)?, x, form)?;
        self.feed_forward.forward_residual(tape, &self.norms[1].forward(tape, &h)?, &h)
    }

    /// Of the next token alone, `[1, 1, width]`, behind those that the cache keeps; see [`MultiHeadAttention::forward_cached`].
    ///
    /// # Errors
    /// Those of the ops.
    #[track_caller]
    pub fn forward_cached<'s>(&self, tape: &Tape<'_, 's>, x: &Var<'s>, cache: NextToken<'_, 's>) -> Result<Var<'s>> {
        let mixed = self.attention.forward_cached(tape, &self.norms[0].forward(tape, x)?, cache)?;
        let [h, normed] = self.norms[1].forward_residual(tape, &mixed, x)?;
        self.feed_forward.forward_residual(tape, &normed, &h)
    }
}
