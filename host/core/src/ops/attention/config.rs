//! The configuration of attention: the layout of the heads, and the mask.

use crate::error::{Error, Result};
use crate::tape::RecomputeInput;
use crate::tape::recompute_input::{Lender, sealed};
use crate::tensor::{Saved, Shape};
use kernels::flash_attention::{CAUSAL, MAX_WIDTH};
use kernels::qkv_layout::QkvLayout;
use std::num::NonZeroU32;

/// The tokens that a query attends to, among those that `documents` and `lengths` allow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AttentionMask {
    /// All tokens.
    #[default]
    Full,
    /// Its own token and those before it.
    Causal,
    /// This many tokens: its own and those just before it.
    SlidingWindow(NonZeroU32),
}

/// The layout of the heads of q, k and v, and the keys that their queries attend to, for
/// [`attention`](crate::ops::attention).
///
/// q, k and v are one tensor, in one of two layouts:
///
/// | layout | shape | from |
/// |---|---|---|
/// | packed | `[batch, tokens, (heads + 2 kv_heads) width]`: for each token the heads of q, then k's, then v's | one product |
/// | stacked | `[3, batch, tokens, heads width]`, `kv_heads` = `heads` | a stack of products, as in `examples/crossasset/layers.rs` |
///
/// ```
/// # use stepscope::ops::AttentionConfig;
/// let vit = AttentionConfig::new(12);
/// let gpt2 = AttentionConfig::new(12).causal();
/// let llama = AttentionConfig::new(32).kv_heads(8).causal();
/// ```
#[derive(Clone, Copy, Debug)]
pub struct AttentionConfig<'s> {
    /// The number of heads of q.
    pub heads: usize,
    /// The number of heads of k and of v, a divisor of `heads`. Query head h uses key head
    /// `h / (heads / kv_heads)` (grouped queries).
    pub kv_heads: usize,
    /// The factor of the scores. `None` means `1 / sqrt(width)`.
    pub scale: Option<f32>,
    /// The mask: the tokens that a query attends to.
    pub sees: AttentionMask,
    /// The document of each token, `[batch, tokens]`. A token attends only to tokens of its own
    /// document.
    pub documents: Option<Saved<'s, u32>>,
    /// The number of real tokens in each sample, `[batch]`. The others are padding: nothing attends
    /// to them, their output is 0, and so is their gradient.
    pub lengths: Option<Saved<'s, u32>>,
}

impl sealed::Sealed for AttentionConfig<'_> {}

impl<'s> RecomputeInput<'s> for AttentionConfig<'s> {
    type Lent<'i> = AttentionConfig<'i>;

    fn lend<'i>(&self, lender: &mut Lender<'i>) -> Result<AttentionConfig<'i>> {
        let Self { heads, kv_heads, scale, sees, documents, lengths } = *self;
        Ok(AttentionConfig {
            heads,
            kv_heads,
            scale,
            sees,
            documents: documents.lend(lender)?,
            lengths: lengths.lend(lender)?,
        })
    }
}

impl<'s> AttentionConfig<'s> {
    /// Makes a config of heads whose queries attend to all tokens.
    pub fn new(heads: usize) -> Self {
        Self { heads, kv_heads: heads, scale: None, sees: AttentionMask::Full, documents: None, lengths: None }
    }

    /// Sets the number of heads of k and v.
    #[must_use]
    pub fn kv_heads(self, kv_heads: usize) -> Self {
        Self { kv_heads, ..self }
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

    /// Sets the factor of the scores.
    #[must_use]
    pub fn scale(self, scale: f32) -> Self {
        Self { scale: Some(scale), ..self }
    }

    /// Makes tokens attend only to tokens with the same document number; `documents`:
    /// `[batch, tokens]`.
    #[must_use]
    pub fn documents(self, documents: impl Into<Saved<'s, u32>>) -> Self {
        Self { documents: Some(documents.into()), ..self }
    }

    /// Sets the number of real tokens in each sample; `lengths`: `[batch]`.
    #[must_use]
    pub fn lengths(self, lengths: impl Into<Saved<'s, u32>>) -> Self {
        Self { lengths: Some(lengths.into()), ..self }
    }

    /// True if every query attends to every key.
    pub(super) fn sees_all(&self) -> bool {
        self.sees == AttentionMask::Full && self.documents.is_none() && self.lengths.is_none()
    }

    /// The kernels' encoding of [`AttentionMask`].
    pub(super) fn window(&self) -> u32 {
        match self.sees {
            AttentionMask::Full => 0,
            AttentionMask::Causal => CAUSAL,
            AttentionMask::SlidingWindow(tokens) => tokens.get(),
        }
    }

    /// Derives the sizes from the shape of a tensor of q, k and v.
    ///
    /// # Errors
    /// [`Error::Misuse`] of `op` when the shape does not fit this config.
    pub(in super::super) fn sizes(&self, op: &'static str, qkv: Shape) -> Result<Sizes> {
        let &Self { heads, kv_heads, .. } = self;
        let divides = kv_heads > 0 && heads.is_multiple_of(kv_heads) && heads > 0 && heads <= (u32::MAX / 4) as usize;
        if !divides {
            let expected = "at least one head, and a number of key heads that divides the number of heads";
            return Err(Error::misuse(op, expected, format!("heads {heads}, kv_heads {kv_heads}")));
        }
        let found = match *qkv.extents() {
            [3, batch, tokens, row] if heads == kv_heads => Some((true, batch, tokens, row, heads)),
            [batch, tokens, row] => Some((false, batch, tokens, row, heads + 2 * kv_heads)),
            _ => None,
        };
        match found {
            Some((stacked, batch, tokens, row, all))
                if row > 0 && row.is_multiple_of(all) && (1..1 << 31).contains(&tokens) =>
            {
                let sizes = Sizes { batch, tokens, heads, kv_heads, width: row / all, stacked };
                if sizes.width <= MAX_WIDTH && sizes.width.is_multiple_of(4) {
                    return Ok(sizes);
                }
                let expected = format!("heads of a multiple of 4 columns, up to {MAX_WIDTH}");
                Err(Error::misuse(op, expected, format!("{} columns, in {qkv}", sizes.width)))
            }
            _ => {
                let stacked =
                    if heads == kv_heads { format!(", or [3, batch, tokens, {heads} width]") } else { String::new() };
                let expected = format!("[batch, tokens, {} width]{stacked}, tokens at least 1", heads + 2 * kv_heads);
                Err(Error::misuse(op, expected, qkv.to_string()))
            }
        }
    }

    /// Rejects masks of other sizes.
    pub(super) fn check_masks(&self, op: &'static str, sizes: Sizes) -> Result<()> {
        let agree = |what: &str, mask: Option<Saved<'s, u32>>, expected: Shape| match mask {
            Some(mask) if mask.shape() != expected => {
                Err(Error::misuse(op, format!("{what} of shape {expected}"), mask.shape().to_string()))
            }
            _ => Ok(()),
        };
        agree("documents", self.documents, [sizes.batch, sizes.tokens].into())?;
        agree("lengths", self.lengths, [sizes.batch].into())
    }
}

/// The sizes of q, k and v.
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    pub(in super::super) batch: usize,
    pub(in super::super) tokens: usize,
    pub(in super::super) heads: usize,
    pub(in super::super) kv_heads: usize,
    pub(in super::super) width: usize,
    pub(in super::super) stacked: bool,
}

impl Sizes {
    /// The layout as a launch passes it.
    pub(in super::super) fn layout(self) -> QkvLayout {
        let [tokens, heads, kv_heads, width] =
            [self.tokens, self.heads, self.kv_heads, self.width].map(|size| size as u32);
        QkvLayout { tokens, heads, kv_heads, width, stacked: u32::from(self.stacked) }
    }

    /// The shape of attention's output.
    pub(in super::super) fn output(self) -> Shape {
        [self.batch, self.tokens, self.heads * self.width].into()
    }

    /// The shape of a statistic, one value for each token of each query head.
    pub(super) fn statistics(self) -> Shape {
        [self.batch, self.heads, self.tokens].into()
    }

    /// The default factor of the scores.
    pub(super) fn scale(self) -> f32 {
        1.0 / (self.width as f32).sqrt()
    }
}
