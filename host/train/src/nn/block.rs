//! A transformer block: attention and a feed-forward part, each with a norm before it and a
//! residual connection.

use super::{LayerNorm, Mlp, MultiHeadAttention, NextTokens, RmsNorm, Scope, SwiGlu};
use stepscope_core::ops::{Activation, AttentionConfig, Rotary};
use stepscope_core::{Result, Stored, Tape, Var};

/// A norm over the last extent.
#[derive(Clone, Copy, Debug)]
pub enum Norm {
    /// LayerNorm.
    Layer(LayerNorm),
    /// RMSNorm.
    Rms(RmsNorm),
}

impl Norm {
    /// Computes the norm of x.
    #[track_caller]
    pub fn forward<'s, S: Stored>(&self, tape: &Tape<'_, 's>, x: &Var<'s, S>) -> Result<Var<'s, S>> {
        match self {
            Self::Layer(norm) => norm.forward(tape, x),
            Self::Rms(norm) => norm.forward(tape, x),
        }
    }

    /// Computes `h = x + residual` and the norm of h, and returns both.
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

/// The part of a block that processes each token separately.
#[derive(Clone, Copy, Debug)]
pub enum FeedForward {
    /// Two linear layers with GELU between them.
    Mlp(Mlp),
    /// SwiGLU.
    SwiGlu(SwiGlu),
}

impl FeedForward {
    /// Computes `residual + forward(x)`.
    #[track_caller]
    pub fn forward_residual<'s, S: Activation>(
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
/// A clone is a few handles, so it can be moved into [`Tape::recompute`], which then keeps only x
/// of the block.
#[derive(Clone, Debug)]
pub struct Block {
    /// The norms before attention and before the feed-forward part.
    pub norms: [Norm; 2],
    /// The attention part.
    pub attention: MultiHeadAttention,
    /// The feed-forward part.
    pub feed_forward: FeedForward,
}

impl Block {
    /// Adds a block as in ViT: LayerNorm, heads that attend to all tokens, GELU, and biases. Its
    /// scopes are `norm1`, `attention`, `norm2` and `mlp`.
    pub fn vit(mut names: Scope<'_>, width: usize, heads: usize, hidden: usize) -> Self {
        let norm1 = Norm::Layer(LayerNorm::new(names.at("norm1"), width));
        let attention = MultiHeadAttention::new(names.at("attention"), width, heads);
        let norm2 = Norm::Layer(LayerNorm::new(names.at("norm2"), width));
        let feed_forward = FeedForward::Mlp(Mlp::new(names.at("mlp"), width, hidden, width));
        Self { norms: [norm1, norm2], attention, feed_forward }
    }

    /// Adds a block as in GPT-2: [`Block::vit`] with causal heads.
    pub fn gpt2(names: Scope<'_>, width: usize, heads: usize, hidden: usize) -> Self {
        let vit = Self::vit(names, width, heads, hidden);
        Self { attention: vit.attention.causal(), ..vit }
    }

    /// Adds a block as in Llama: RMSNorm, causal heads with rotary positions, SwiGLU, and no
    /// biases. `heads` are the numbers of heads of q, and of k and v. Its scopes are `norm1`,
    /// `attention`, `norm2` and `mlp`.
    pub fn llama(mut names: Scope<'_>, width: usize, heads: [usize; 2], hidden: usize, rotary: Rotary) -> Self {
        let norm1 = Norm::Rms(RmsNorm::new(names.at("norm1"), width));
        let attention = MultiHeadAttention::grouped(names.at("attention"), width, heads).causal().rotary(rotary);
        let norm2 = Norm::Rms(RmsNorm::new(names.at("norm2"), width));
        let feed_forward = FeedForward::SwiGlu(SwiGlu::new(names.at("mlp"), width, hidden, width));
        Self { norms: [norm1, norm2], attention, feed_forward }
    }

    /// Computes y for samples without padding, each of them one document.
    #[track_caller]
    pub fn forward<'s, S: Activation>(&self, tape: &Tape<'_, 's>, x: &Var<'s, S>) -> Result<Var<'s, S>> {
        self.forward_masked(tape, x, &self.attention.config())
    }

    /// Computes y with a config from [`MultiHeadAttention::config`] to which documents or lengths
    /// were added.
    #[track_caller]
    pub fn forward_masked<'s, S: Activation>(
        &self,
        tape: &Tape<'_, 's>,
        x: &Var<'s, S>,
        config: &AttentionConfig<'s>,
    ) -> Result<Var<'s, S>> {
        let h = self.attention.forward_residual_masked(tape, &self.norms[0].forward(tape, x)?, x, config)?;
        self.feed_forward.forward_residual(tape, &self.norms[1].forward(tape, &h)?, &h)
    }

    /// Computes y for only the next tokens, `[1, tokens, width]`, after those in the cache. See
    /// [`MultiHeadAttention::forward_cached`].
    #[track_caller]
    pub fn forward_cached<'s, S: Activation>(
        &self,
        tape: &Tape<'_, 's>,
        x: &Var<'s, S>,
        cache: NextTokens<'_, 's, S>,
    ) -> Result<Var<'s, S>> {
        let h = self.attention.forward_residual_cached(tape, &self.norms[0].forward(tape, x)?, x, cache)?;
        self.feed_forward.forward_residual(tape, &self.norms[1].forward(tape, &h)?, &h)
    }
}
