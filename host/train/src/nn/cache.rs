//! The key-value cache, which lets the next token be computed without recomputing the previous
//! ones.

use stepscope_core::error::{Error, Result};
use stepscope_core::step::{ScratchStep, Step};
use stepscope_core::tensor::{LentMut, Source, Tensor};

/// Keys and values of the tokens so far, of one layer. They are tensors of a step that lasts for
/// the whole text.
///
/// Each token is computed in a scratch scope of that step, to which the cache is lent. See
/// [`Block::forward_cached`](super::Block::forward_cached).
#[derive(Debug)]
pub struct KeyValueCache<'s> {
    keys: Tensor<'s>,
    values: Tensor<'s>,
    tokens: usize,
}

impl<'s> KeyValueCache<'s> {
    /// Allocates room for `capacity` tokens of `columns` columns each, which are the columns of all
    /// key heads.
    ///
    /// # Errors
    /// [`Error::ArenaFull`].
    #[track_caller]
    pub fn new(step: &Step<'s>, capacity: usize, columns: usize) -> Result<Self> {
        Ok(Self { keys: step.empty([capacity, columns])?, values: step.empty([capacity, columns])?, tokens: 0 })
    }

    /// The number of tokens in the cache.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// Lends the cache to a scratch scope for one more token, and counts that token immediately.
    ///
    /// # Errors
    /// [`Error::Misuse`] when the cache is full.
    pub fn next<'b, 'i>(&'b mut self, scratch: &ScratchStep<'i, 's>) -> Result<NextToken<'b, 'i>> {
        let capacity = self.keys.shape().extents()[0];
        if self.tokens == capacity {
            return Err(Error::misuse("cache", format!("at most {capacity} tokens"), "one more"));
        }
        let position = self.tokens;
        self.tokens += 1;
        Ok(NextToken { keys: scratch.lend_mut(&mut self.keys), values: scratch.lend_mut(&mut self.values), position })
    }
}

/// A [`KeyValueCache`] lent to a scratch scope, for the token at this position.
#[derive(Debug)]
pub struct NextToken<'b, 's> {
    pub(super) keys: LentMut<'b, 's>,
    pub(super) values: LentMut<'b, 's>,
    /// The position, counted from 0.
    pub(super) position: usize,
}

impl NextToken<'_, '_> {
    /// The number of tokens that the cache has room for.
    pub(super) fn capacity(&self) -> usize {
        self.keys.shape().extents()[0]
    }
}
