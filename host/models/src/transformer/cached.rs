//! Texts that are generated from caches of keys and values: the beginning in one pass, and then
//! token by token.
//!
//! Invariant: the logits after the beginning have the bits of [`Transformer::forward`]. Later
//! logits are those for all tokens so far, except for the order of sums.

use super::{Block, Transformer};
use stepscope_core::ops::{self, Activation, Gemm, RotaryScaling};
use stepscope_core::{Indices, Parameter, Parameters, Result, ScratchStep, Source, Step, Tape, Tensor, Var};
use stepscope_train::nn::{KeyValueCache, NextTokens};

impl Transformer {
    /// Allocates the key-value caches of the blocks, for one sample of up to `tokens` tokens that
    /// is being generated.
    ///
    /// # Errors
    /// Returns an error if the arena is full.
    pub fn caches<'s, S: Activation>(&self, step: &Step<'s>, tokens: usize) -> Result<Vec<KeyValueCache<'s, S>>> {
        let columns = self.config.kv_heads * self.config.head_width;
        self.blocks.iter().map(|_| KeyValueCache::new(step, tokens, columns)).collect()
    }

    /// Returns the most positions of a text for which LongRoPE uses its short factors, if the model
    /// has any. For a longer text, keys in a cache must be computed again with the long factors;
    /// see [`KeyValueCache::restart`].
    pub fn short_context(&self) -> Option<usize> {
        let scalings = self.blocks.iter().filter_map(|block| Some(block.attention.rotary?.scaling));
        let mut contexts = scalings.filter_map(|scaling| match scaling {
            RotaryScaling::Long { context, .. } => Some(context),
            _ => None,
        });
        contexts.next()
    }

    /// Computes the logits of the token that follows `tokens`, from the cached keys and values of
    /// all earlier tokens. `tokens` are one token, or the first tokens of the text; `places` are
    /// their positions. `tokens`, `places`: `[1, tokens]`; result: `[1, vocabulary]`.
    ///
    /// # Errors
    /// Returns an error if an op fails.
    #[track_caller]
    pub fn next<'i, 's, S: Activation>(
        &self,
        scratch: &mut ScratchStep<'i, 's>,
        weights: &Parameters,
        [tokens, places]: [&Indices<'s>; 2],
        caches: &mut [KeyValueCache<'s, S>],
    ) -> Result<Tensor<'i>> {
        let row = |table: Parameter, id: &Indices<'s>| -> Result<Tensor<'i, S>> {
            let id = scratch.lend_indices(id);
            match weights.spec().is_bf16(table)? {
                true => ops::embedding_bf16(scratch, &weights.lend_as(scratch, table)?, &id),
                false => ops::embedding(scratch, &weights.lend(scratch, table)?, &id),
            }
        };
        let count = tokens.shape().elements();
        let mut x = row(self.tokens.weight, tokens)?;
        if let Some(scale) = self.config.embedding_scale {
            x = ops::scale(scratch, &x, scale)?;
        }
        if let Some(positions) = self.positions {
            x = ops::add(scratch, &x, &row(positions.weight, places)?)?;
        }
        for (block, cache) in self.blocks.iter().zip(caches) {
            let mut cache = cache.next_tokens(scratch, count)?;
            // The memory of a block is freed before the next block.
            scratch.scratch(|inner| {
                let tape = Tape::new(inner, weights).evaluating();
                let input = tape.input(ops::copy(inner, &inner.lend(&x))?);
                let y = block.forward_cached(&tape, &input, cache.lend(inner))?;
                ops::copy_into(inner, y.value(), &mut inner.lend_mut(&mut x))
            })?;
        }
        let tape = Tape::new(scratch, weights).evaluating();
        let last = tape.input(ops::slice(scratch, &x, 1, count - 1..count)?);
        self.logits(scratch, weights, self.norm.forward(&tape, &last)?.value())
    }

    /// Computes the logits `[rows, vocabulary]` of rows `[rows, width]` of the result of
    /// [`Transformer::forward`].
    ///
    /// # Errors
    /// Returns an error if an op fails.
    #[track_caller]
    pub fn logits<'s, S: Activation>(
        &self,
        step: &Step<'s>,
        weights: &Parameters,
        rows: &impl Source<'s, S>,
    ) -> Result<Tensor<'s>> {
        let (vocabulary, width) = (self.config.vocabulary, self.config.width);
        let count = rows.shape().elements() / width;
        let mut logits = step.empty([count, vocabulary])?;
        let product = Gemm::new(count, vocabulary, width).transpose_b();
        ops::gemm_into(
            step,
            &product,
            rows,
            &weights.lend_as::<S>(step, self.head)?,
            None::<&Tensor<'_>>,
            &mut logits,
        )?;
        Ok(logits)
    }
}

impl Block {
    #[track_caller]
    fn forward_cached<'s, S: Activation>(
        &self,
        tape: &Tape<'_, 's>,
        x: &Var<'s, S>,
        cache: NextTokens<'_, 's, S>,
    ) -> Result<Var<'s, S>> {
        let attend = |x: &Var<'s, S>, residual: Option<&Var<'s, S>>| match residual {
            Some(residual) => self.attention.forward_residual_cached(tape, x, residual, cache),
            None => self.attention.forward_cached(tape, x, cache),
        };
        self.forward_by(tape, x, attend, &mut None)
    }
}
