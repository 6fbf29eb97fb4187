//! The key-value cache, which lets the next tokens be computed without recomputing the previous
//! ones.

use stepscope_core::{Error, LentMut, Result, ScratchStep, Step, Stored, Tensor};

/// Keys and values of the tokens so far, of one layer, stored as `S`. They are tensors of a step
/// that lasts for the whole text.
///
/// Tokens are computed in a scratch scope of that step, to which the cache is lent: first the
/// beginning of the text in one pass, and then each token. See
/// [`Block::forward_cached`](super::Block::forward_cached).
#[derive(Debug)]
pub struct KeyValueCache<'s, S: Stored = f32> {
    keys: Tensor<'s, S>,
    values: Tensor<'s, S>,
    tokens: usize,
    positions: usize,
}

impl<'s, S: Stored> KeyValueCache<'s, S> {
    /// Allocates room for `capacity` tokens of `columns` columns each, which are the columns of all
    /// key heads.
    ///
    /// # Errors
    /// [`Error::ArenaFull`].
    #[track_caller]
    pub fn new(step: &Step<'s>, capacity: usize, columns: usize) -> Result<Self> {
        let (keys, values) = (step.empty([capacity, columns])?, step.empty([capacity, columns])?);
        Ok(Self { keys, values, tokens: 0, positions: capacity })
    }

    /// Empties the cache for a text of up to this many positions, at most the capacity. They decide
    /// the factors of [`RotaryScaling::Long`](stepscope_core::ops::RotaryScaling::Long). A new cache
    /// has as many positions as its capacity.
    pub fn restart(&mut self, positions: usize) {
        (self.tokens, self.positions) = (0, positions);
    }

    /// The number of tokens in the cache.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// Lends the cache to a scratch scope for one more token, and counts that token immediately.
    ///
    /// # Errors
    /// [`Error::Misuse`] when the cache is full.
    pub fn next<'b, 'i>(&'b mut self, scratch: &ScratchStep<'i, 's>) -> Result<NextTokens<'b, 'i, S>> {
        self.next_tokens(scratch, 1)
    }

    /// Lends the cache to a scratch scope for this many more tokens, and counts them immediately.
    ///
    /// # Errors
    /// [`Error::Misuse`] when the cache has no room for them.
    pub fn next_tokens<'b, 'i>(
        &'b mut self,
        scratch: &ScratchStep<'i, 's>,
        tokens: usize,
    ) -> Result<NextTokens<'b, 'i, S>> {
        let positions = self.positions.min(self.keys.shape().extents()[0]);
        let position = self.tokens;
        match position.checked_add(tokens) {
            Some(end) if end <= positions => self.tokens = end,
            _ => {
                let got = format!("{tokens} more after {position}");
                return Err(Error::misuse("cache", format!("at most {positions} tokens"), got));
            }
        }
        let (keys, values) = (scratch.lend_mut(&mut self.keys), scratch.lend_mut(&mut self.values));
        Ok(NextTokens { keys, values, position, positions })
    }
}

/// A [`KeyValueCache`] lent to a scratch scope, for the tokens from this position on.
#[derive(Debug)]
pub struct NextTokens<'b, 's, S: Stored = f32> {
    pub(super) keys: LentMut<'b, 's, S>,
    pub(super) values: LentMut<'b, 's, S>,
    /// The position of the first token, counted from 0.
    pub(super) position: usize,
    /// The most positions of the text.
    pub(super) positions: usize,
}

impl<'s, S: Stored> NextTokens<'_, 's, S> {
    /// Lends the cache to a scope within its own.
    pub fn lend<'n>(&mut self, scratch: &ScratchStep<'n, 's>) -> NextTokens<'_, 'n, S> {
        let (keys, values) = (scratch.lend_mut(&mut self.keys), scratch.lend_mut(&mut self.values));
        NextTokens { keys, values, position: self.position, positions: self.positions }
    }
}
