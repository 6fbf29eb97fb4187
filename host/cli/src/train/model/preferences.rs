//! The loss of preferences: direct preference optimization (Rafailov et al., 2023,
//! arXiv:2305.18290), as TRL's `DPOTrainer` computes it with `loss_type="sigmoid"`.
//!
//! ```text
//! reward = beta (log p(answer) - log p_reference(answer))      of each answer, summed over its tokens
//! loss   = -log sigmoid(reward of chosen - reward of rejected)
//! ```
//! Contexts come in twos. The chosen answers of some pairs are in the first, and the rejected ones
//! in the second, with the number of the pair as the document. The batch has two inputs after the
//! documents:
//!
//! | input | shape | contents |
//! |---|---|---|
//! | 3 | `[twos, 2, pairs]` | log-probabilities by the reference |
//! | 4 | `[twos, pairs]` | the weight of each pair in the loss, and 0 for a place without a pair |
//!
//! Invariant: the log-probability of an answer is a sum over its own tokens in ascending order, so
//! it does not depend on the other pairs of the batch.

use serde::{Deserialize, Serialize};
use stepscope::ops::{Activation, LmHeadConfig};
use stepscope::tensor::Saved;
use stepscope::{DeviceBatch, Result, Tape, Var};

use super::Gpt;

/// Direct preference optimization.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Dpo {
    /// The factor on differences from the reference. A larger one keeps the model nearer to it.
    pub(crate) beta: f32,
}

/// The means over pairs that TRL logs, by its names.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Rewards {
    #[serde(rename = "rewards/chosen")]
    pub(crate) chosen: f64,
    #[serde(rename = "rewards/rejected")]
    pub(crate) rejected: f64,
    /// The share of pairs whose chosen answer has the larger reward.
    #[serde(rename = "rewards/accuracies")]
    pub(crate) accuracy: f64,
    /// The difference of the rewards.
    #[serde(rename = "rewards/margins")]
    pub(crate) margin: f64,
}

impl Rewards {
    /// Returns the rewards among the figures of [`Dpo::loss`], or none if there are no figures.
    pub(crate) fn of(figures: &[f64]) -> Option<Self> {
        let &[chosen, rejected, accuracy, margin] = figures else { return None };
        Some(Self { chosen, rejected, accuracy, margin })
    }
}

impl<S: Activation> Gpt<S> {
    /// Returns the log-probability of each answer, `[twos, 2, pairs]`, from the input of the head.
    /// A place without a pair has 0.
    ///
    /// # Errors
    /// Returns an error if an op fails, for example because the arena is full.
    pub(crate) fn log_probabilities<'s>(
        &self,
        tape: &Tape<'_, 's>,
        hidden: &Var<'s, S>,
        batch: &DeviceBatch<'s>,
    ) -> Result<Var<'s>> {
        let (labels, documents) = (batch.indices(1)?, batch.indices(2)?);
        let places = batch.input::<f32>(3)?.shape();
        let pairs = places.extents()[2];
        let form = LmHeadConfig::default().tied();
        let losses = tape.linear_cross_entropy_of_rows(hidden, self.layers.head(), labels, form)?;
        // Tokens that do not count add 0. Padding has the number after the last pair.
        let sums = losses.segment_sum(1, &documents, pairs + 1)?;
        sums.narrow(1, 0..pairs)?.reshape(places)?.mul(-1.0)
    }
}

impl Dpo {
    /// Returns the weighted sum of the pairs' losses, `[1]`, and those of the [`Rewards`].
    pub(crate) fn loss<'s>(
        self,
        tape: &Tape<'_, 's>,
        log_probabilities: &Var<'s>,
        batch: &DeviceBatch<'s>,
    ) -> Result<(Var<'s>, Vec<Saved<'s>>)> {
        let weights = tape.input(batch.input::<f32>(4)?);
        let rewards = log_probabilities.sub(tape.input(batch.input::<f32>(3)?))?.mul(self.beta)?;
        let of = |which: usize| rewards.narrow(1, which..which + 1)?.reshape(weights.shape());
        let (chosen, rejected) = (of(0)?, of(1)?);
        let margins = chosen.sub(rejected)?;
        let sum = |values: Var<'s>| values.mul(weights)?.sum(..)?.reshape([1]);
        let loss = sum(margins.mul(-1.0)?.softplus()?)?;
        let is_right = margins.greater(0.0)?;
        let figures = [chosen, rejected, is_right, margins].into_iter().map(|values| Ok(*sum(values)?.value()));
        Ok((loss, figures.collect::<Result<_>>()?))
    }
}
