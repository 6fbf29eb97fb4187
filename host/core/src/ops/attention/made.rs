//! The result of attention, with what its backward pass needs.

use crate::tensor::{Saved, Stored};

/// The result of [`attention`](super::attention).
#[derive(Clone, Copy, Debug)]
pub struct Attention<'s, S: Stored = f32> {
    /// The output, `[batch, tokens, heads width]`.
    pub out: Saved<'s, S>,
    /// Intermediates that [`attention_backward`](super::attention_backward) needs in addition to
    /// the inputs and `out`.
    pub kept: AttentionKept<'s, S>,
}

/// Intermediates that [`attention_backward`](super::attention_backward) needs, by the kernels that
/// computed the forward pass.
#[derive(Clone, Copy, Debug)]
pub enum AttentionKept<'s, S: Stored = f32> {
    /// Intermediates of the kernels for any number of tokens.
    Flash {
        /// The logarithm of each softmax's denominator, `[batch, heads, tokens]`.
        lse: Saved<'s>,
        /// q, k and v after QK-norm, and the second result of [`qk_norm`](crate::ops::qk_norm), if
        /// there was a norm.
        normal: Option<(Saved<'s, S>, Saved<'s>)>,
    },
    /// Intermediates of the kernel for up to 16 tokens.
    Short {
        /// The softmax, `[batch, heads, tokens, tokens]`.
        probabilities: Saved<'s>,
        /// `1 / sqrt(mean(x^2) + epsilon)` of each head of q and of k, `[2, batch, tokens, heads]`.
        inverse_rms: Saved<'s>,
    },
}
