//! The key-value cache, which lets the next token be computed without recomputing the previous
//! ones.

use stepscope_core::error::{Error, Result};
use stepscope_core::step::{ScratchStep, Step};
use stepscope_core::tensor::{LentMut, Stored, Tensor};

/// Keys and values of the tokens so far, of one layer, stored as `S`. They are tensors of a step
/// that lasts for the whole text.
///
/// Each token is computed in a scratch scope of that step, to which the cache is lent. See
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
    pub fn next<'b, 'i>(&'b mut self, scratch: &ScratchStep<'i, 's>) -> Result<NextToken<'b, 'i, S>> {
        let positions = self.positions.min(self.keys.shape().extents()[0]);
        if self.tokens == positions {
            return Err(Error::misuse("cache", format!("at most {positions} tokens"), "one more"));
        }
        let position = self.tokens;
        self.tokens += 1;
        let (keys, values) = (scratch.lend_mut(&mut self.keys), scratch.lend_mut(&mut self.values));
        Ok(NextToken { keys, values, position, positions })
    }
}

/// A [`KeyValueCache`] lent to a scratch scope, for the token at this position.
#[derive(Debug)]
pub struct NextToken<'b, 's, S: Stored = f32> {
    pub(super) keys: LentMut<'b, 's, S>,
    pub(super) values: LentMut<'b, 's, S>,
    /// The position, counted from 0.
    pub(super) position: usize,
    /// The most positions of the text.
    pub(super) positions: usize,
}
