//! What attention is told besides its numbers: how heads lie, and who sees whom.

use crate::autograd::Kept;
use crate::autograd::kept::{Lender, sealed};
use crate::error::{Error, Result};
use crate::tensor::{Saved, Shape};
use kernels::flash_attention::{CAUSAL, MAX_WIDTH};
use std::num::NonZeroU32;

/// Which tokens a query sees, of those that `documents` and `lengths` leave.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Sees {
    /// All of them.
    #[default]
    All,
    /// Its own and those before it: causal.
    Past,
    /// Its own and those before it, so many in all: a sliding window.
    Window(NonZeroU32),
}

/// How the heads of q, k and v lie, and which keys their queries see; for [`attention`](crate::ops::attention).
///
/// q, k and v are one tensor, in one of two layouts:
///
/// | layout | shape | from |
/// |---|---|---|
/// | packed | `[batch, tokens, (heads + 2 kv_heads) width]`: of each token the heads of q, then k's, then v's | one product |
/// | stacked | `[3, batch, tokens, heads width]`, `kv_heads` = `heads` | a stack of products, [`Tape::norm_project`](crate::Tape::norm_project) |
///
/// ```
/// # use stepscope::ops::AttentionForm;
/// let vit = AttentionForm::new(12);
/// let gpt2 = AttentionForm::new(12).causal();
/// let llama = AttentionForm::new(32).kv_heads(8).causal();
/// ```
#[derive(Clone, Copy, Debug)]
pub struct AttentionForm<'s> {
    /// Heads of q.
    pub heads: usize,
    /// Heads of k and of v, a divisor of `heads`: query head h belongs to number `h / (heads / kv_heads)` (grouped queries).
    pub kv_heads: usize,
    /// What scores are multiplied by; none: `1 / sqrt(width)`.
    pub scale: Option<f32>,
    /// Which tokens a query sees.
    pub sees: Sees,
    /// `[batch, tokens]`: a token sees only tokens with its number.
    pub documents: Option<Saved<'s, u32>>,
    /// `[batch]`: so many tokens of a sample exist, at most all. The others are not seen, give 0, and get the gradient 0.
    pub lengths: Option<Saved<'s, u32>>,
}

impl sealed::Sealed for AttentionForm<'_> {}

impl<'s> Kept<'s> for AttentionForm<'s> {
    type Lent<'i> = AttentionForm<'i>;

    fn lend<'i>(&self, lender: &mut Lender) -> Result<AttentionForm<'i>> {
        let Self { heads, kv_heads, scale, sees, documents, lengths } = *self;
        Ok(AttentionForm {
            heads,
            kv_heads,
            scale,
            sees,
            documents: documents.lend(lender)?,
            lengths: lengths.lend(lender)?,
        })
    }
}

impl<'s> AttentionForm<'s> {
    /// Heads whose queries see everything.
    pub fn new(heads: usize) -> Self {
        Self { heads, kv_heads: heads, scale: None, sees: Sees::All, documents: None, lengths: None }
    }

    /// So many heads of k and v.
    #[must_use]
    pub fn kv_heads(self, kv_heads: usize) -> Self {
        Self { kv_heads, ..self }
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

    /// Scores are multiplied by this.
    #[must_use]
    pub fn scale(self, scale: f32) -> Self {
        Self { scale: Some(scale), ..self }
    }

    /// A token sees only tokens with its number; `documents`: `[batch, tokens]`.
    #[must_use]
    pub fn documents(self, documents: impl Into<Saved<'s, u32>>) -> Self {
        Self { documents: Some(documents.into()), ..self }
    }

    /// So many tokens of each sample exist; `lengths`: `[batch]`.
    #[must_use]
    pub fn lengths(self, lengths: impl Into<Saved<'s, u32>>) -> Self {
        Self { lengths: Some(lengths.into()), ..self }
    }

    /// Whether every query sees every key.
    pub(super) fn sees_all(&self) -> bool {
        self.sees == Sees::All && self.documents.is_none() && self.lengths.is_none()
    }

    /// What a kernel calls [`Sees`].
    pub(super) fn window(&self) -> u32 {
        match self.sees {
            Sees::All => 0,
            Sees::Past => CAUSAL,
            Sees::Window(tokens) => tokens.get(),
        }
    }

    /// The sizes of a tensor of q, k and v of this form.
    ///
    /// # Errors
    /// [`Error::Misuse`] in the name of `op` when there are none.
    pub(in super::super) fn sizes(&self, op: &'static str, qkv: Shape) -> Result<Sizes> {
        let &Self { heads, kv_heads, .. } = self;
        let divides = kv_heads > 0 && heads.is_multiple_of(kv_heads) && heads > 0 && heads <= (u32::MAX / 4) as usize;
        if !divides {
            let expected = "heads, at least one, and a number of key heads that divides theirs";
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

    /// Refuses masks that are not of the sizes.
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
#[doc(hidden)]
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
    /// The shape of what attention gives.
    pub(in super::super) fn output(self) -> Shape {
        [self.batch, self.tokens, self.heads * self.width].into()
    }

    /// The shape of a number for each token of each query head.
    pub(super) fn statistics(self) -> Shape {
        [self.batch, self.heads, self.tokens].into()
    }

    /// The scale of scores where nobody says one.
    pub(super) fn scale(self) -> f32 {
        1.0 / (self.width as f32).sqrt()
    }
}
