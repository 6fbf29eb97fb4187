//! What attention keeps of the tokens so far, so that the next one is computed alone.

use crate::error::{Error, Result};
use crate::step::{Scratch, Step};
use crate::tensor::{LentMut, Tensor};

/// Keys and values of the tokens so far, of one layer: tensors of a step, which ends with the text.
///
/// Each token is computed in a scratch of that step, to which the cache is lent; see [`Block::forward_cached`](super::Block::forward_cached).
#[derive(Debug)]
pub struct KeyValueCache<'s> {
    keys: Tensor<'s>,
    values: Tensor<'s>,
    tokens: usize,
}

impl<'s> KeyValueCache<'s> {
    /// Room for so many tokens, of so many columns each: those of all heads of keys.
    ///
    /// # Errors
    /// [`Error::ArenaFull`].
    #[track_caller]
    pub fn new(step: &Step<'s>, capacity: usize, columns: usize) -> Result<Self> {
        Ok(Self { keys: step.empty([capacity, columns])?, values: step.empty([capacity, columns])?, tokens: 0 })
    }

    /// Tokens that are kept.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// The cache for one more token, which is counted at once.
    ///
    /// # Errors
    /// [`Error::Misuse`] when there is no room.
    pub fn next<'b, 'i>(&'b mut self, scratch: &Scratch<'i, 's>) -> Result<NextToken<'b, 'i>> {
        let capacity = self.keys.shape().extents()[0];
        if self.tokens == capacity {
            return Err(Error::misuse("cache", format!("at most {capacity} tokens"), "one more"));
        }
        let position = self.tokens;
        self.tokens += 1;
        Ok(NextToken { keys: scratch.lend_mut(&mut self.keys), values: scratch.lend_mut(&mut self.values), position })
    }
}

/// A [`KeyValueCache`] that is lent to a scratch, for the token at this position.
#[derive(Debug)]
pub struct NextToken<'b, 's> {
    pub(super) keys: LentMut<'b, 's>,
    pub(super) values: LentMut<'b, 's>,
    /// Counted from 0.
    pub(super) position: usize,
}
