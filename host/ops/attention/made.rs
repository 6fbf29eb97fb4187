//! What attention gives, and what its backward pass needs of it.

use crate::tensor::{Saved, Stored};

/// What [`attention`](super::attention) gives.
#[derive(Clone, Copy, Debug)]
pub struct Attention<'s, S: Stored = f32> {
    /// `[batch, tokens, heads width]`.
    pub out: Saved<'s, S>,
    /// What [`attention_backward`](super::attention_backward) needs besides the inputs and `out`.
    pub kept: AttentionKept<'s, S>,
}

/// What [`attention_backward`](super::attention_backward) needs of the forward pass: by which kernels it ran.
#[derive(Clone, Copy, Debug)]
pub enum AttentionKept<'s, S: Stored = f32> {
    /// Those for any number of tokens.
    Flash {
        /// The logarithm of each softmax's denominator, `[batch, heads, tokens]`.
        lse: Saved<'s>,
        /// q, k and v after QK-norm, if there was one, and what [`qk_norm`](crate::ops::qk_norm) gave besides.
        normal: Option<(Saved<'s, S>, Saved<'s>)>,
    },
    /// That for up to 16 tokens.
    Short {
        /// The softmax, `[batch, heads, tokens, tokens]`.
        probabilities: Saved<'s>,
        /// `1 / sqrt(mean(x^2) + epsilon)` of each head of q and of k, `[2, batch, tokens, heads]`.
        inverse_rms: Saved<'s>,
    },
}
