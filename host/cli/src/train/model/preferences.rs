//! Losses of preferences, as TRL's trainers compute them.
//!
//! ```text
//! reward = beta (log p(answer) - log p_reference(answer))     an answer's sum over its tokens
//! DPO    -log sigmoid(reward of chosen - reward of rejected)
//! KTO    sigmoid(beta kl - reward) of a good answer, sigmoid(reward - beta kl) of a bad one
//!        kl = the mean of log p - log p_reference over mismatched answers of a step, or 0 if it is less
//! ORPO   -log p(token) - beta log sigmoid(o(chosen) - o(rejected))
//!        o = log(p / (1 - p)), log p = the mean of an answer's tokens; reward = beta log p
//! ```
//! DPO is Rafailov et al., 2023 (arXiv:2305.18290), with `loss_type="sigmoid"`. KTO is Ethayarajh
//! et al., 2024 (arXiv:2402.01306), and ORPO is Hong et al., 2024 (arXiv:2403.07691). As in TRL,
//! the first part of ORPO's loss is a mean over all tokens of the prompts and chosen answers.
//!
//! Contexts come in twos. The chosen answers of some pairs are in the first, and the rejected ones
//! in the second, with the number of the pair as the document. For KTO the first has some answers,
//! and the second other answers to the same prompts. The batch has these inputs after the
//! documents:
//!
//! | input | shape | contents |
//! |---|---|---|
//! | 3 | `[twos, pairs]` | the weight of each pair in the loss, and 0 for a place without a pair |
//! | 4, DPO and KTO | `[twos, 2, pairs]` | log-probabilities by the reference |
//! | 4, ORPO | `[contexts, tokens]` | 1 / the answer's tokens for each of them, and 0 for the others |
//! | 5, KTO | `[twos, pairs]` | the weights in the means over good answers, and minus those over bad ones |
//! | 5, ORPO | `[1]` | the weight of a token of the chosen contexts |
//!
//! Invariant: the log-probability of an answer is a sum over its own tokens in ascending order, so
//! it does not depend on the other pairs of the batch.

use serde::{Deserialize, Serialize};
use stepscope::ops::{Activation, LmHeadConfig};
use stepscope::tensor::Saved;
use stepscope::{DeviceBatch, Result, Tape, Var};

use super::Gpt;

/// The mean loss of a token below which it counts as this. The odds of a probability of 1 are
/// infinite.
const LEAST: f32 = 1e-7;

/// A loss of preferences. `beta` is the factor on rewards.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum PreferenceLoss {
    /// Direct preference optimization. A larger `beta` keeps the model nearer to the reference.
    Dpo { beta: f32 },
    /// Odds ratio preference optimization. A larger `beta` gives the preference more weight.
    Orpo { beta: f32 },
    /// Kahneman-Tversky optimization, with the weights of good and bad answers.
    Kto { beta: f32, desirable: f32, undesirable: f32 },
}

/// The means over pairs that TRL logs, by its names.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Rewards {
    #[serde(rename = "rewards/chosen")]
    pub(crate) chosen: f64,
    #[serde(rename = "rewards/rejected")]
    pub(crate) rejected: f64,
    /// The share of pairs whose chosen answer has the larger reward. For KTO, the share of answers
    /// whose reward is on the right side of `beta kl`.
    #[serde(rename = "rewards/accuracies")]
    pub(crate) accuracy: f64,
    /// The difference of the rewards.
    #[serde(rename = "rewards/margins")]
    pub(crate) margin: f64,
    /// KTO's `kl`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) kl: Option<f64>,
}

impl Rewards {
    /// Returns the rewards among the figures of [`PreferenceLoss::loss`], or none if there are no
    /// figures.
    pub(crate) fn of(figures: &[f64]) -> Option<Self> {
        let &[chosen, rejected, accuracy, margin, ref kl @ ..] = figures else { return None };
        Some(Self { chosen, rejected, accuracy, margin, kl: kl.first().copied() })
    }
}

impl<S: Activation> Gpt<S> {
    /// Returns the loss of each token, `[contexts, tokens]`, from the input of the head.
    pub(super) fn token_losses<'s>(
        &self,
        tape: &Tape<'_, 's>,
        hidden: &Var<'s, S>,
        batch: &DeviceBatch<'s>,
    ) -> Result<Var<'s>> {
        let form = LmHeadConfig::default().tied();
        tape.linear_cross_entropy_of_rows(hidden, self.layers.head(), batch.indices(1)?, form)
    }

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
        of_answers(&self.token_losses(tape, hidden, batch)?, batch)?.neg()
    }
}

/// Returns the sums of the tokens of each answer, `[twos, 2, pairs]`.
fn of_answers<'s>(tokens: &Var<'s>, batch: &DeviceBatch<'s>) -> Result<Var<'s>> {
    let [twos, pairs] = extents(batch)?;
    // Tokens that do not count add 0. Padding has the number after the last pair.
    let sums = tokens.segment_sum(1, &batch.indices(2)?, pairs + 1)?;
    sums.narrow(1, 0..pairs)?.reshape([twos, 2, pairs])
}

/// Returns the twos of contexts, and the most pairs of two.
fn extents(batch: &DeviceBatch<'_>) -> Result<[usize; 2]> {
    let shape = batch.input::<f32>(3)?.shape();
    Ok([shape.extents()[0], shape.extents()[1]])
}

/// Returns the logarithms of the odds of answers, up to a constant, from the mean losses of their
/// tokens.
fn log_odds<'s>(losses: &Var<'s>) -> Result<Var<'s>> {
    let losses = losses.maximum(LEAST)?;
    // 1 - e^-x is 2 t / (1 + t) with t = tanh(x / 2), which has no cancellation near 0.
    let t = losses.mul(0.5)?.tanh()?;
    t.div(t.add(1.0)?)?.log()?.add(losses)?.neg()
}

impl PreferenceLoss {
    /// Returns the inputs of its batches, without the one that marks padding.
    pub(super) fn inputs(self) -> usize {
        if matches!(self, Self::Dpo { .. }) { 5 } else { 6 }
    }

    /// Returns true if answers are compared with those of a reference.
    pub(crate) fn has_reference(self) -> bool {
        !matches!(self, Self::Orpo { .. })
    }

    /// Returns the weighted sum of the pairs' losses, `[1]`, and those of the [`Rewards`].
    pub(super) fn loss<'s>(
        self,
        tape: &Tape<'_, 's>,
        tokens: &Var<'s>,
        batch: &DeviceBatch<'s>,
    ) -> Result<(Var<'s>, Vec<Saved<'s>>)> {
        let input = |number: usize| -> Result<Var<'s>> { Ok(tape.input(batch.input::<f32>(number)?)) };
        let [twos, pairs] = extents(batch)?;
        let (weights, of_loss) = (input(3)?, input(4)?);
        let half = |of: &Var<'s>, which: usize| of.narrow(1, which..which + 1)?.reshape([twos, pairs]);
        let total = |values: Var<'s>| values.sum(..)?.reshape([1]);
        let sum = |values: Var<'s>| total(values.mul(weights)?);
        let (loss, figures) = match self {
            Self::Dpo { beta } => {
                let rewards = of_answers(tokens, batch)?.add(of_loss)?.mul(-beta)?;
                let (chosen, rejected) = (half(&rewards, 0)?, half(&rewards, 1)?);
                (sum(chosen.sub(rejected)?.neg()?.softplus()?)?, of_pairs(chosen, rejected, sum)?)
            }
            Self::Orpo { beta } => {
                let means = of_answers(&tokens.mul(of_loss)?, batch)?;
                let (odds, rewards) = (log_odds(&means)?, means.mul(-beta)?);
                let ratios = half(&odds, 0)?.sub(half(&odds, 1)?)?;
                let chosen = tokens.reshape([twos, 2, tokens.shape().extents()[1]])?.narrow(1, 0..1)?;
                let of_texts = total(chosen)?.mul(input(5)?)?;
                let loss = sum(ratios.neg()?.softplus()?.mul(beta)?)?.add(of_texts)?;
                (loss, of_pairs(half(&rewards, 0)?, half(&rewards, 1)?, sum)?)
            }
            Self::Kto { beta, desirable, undesirable } => {
                let ratios = of_answers(tokens, batch)?.add(of_loss)?.neg()?;
                let (own, mismatched, sides) = (half(&ratios, 0)?, half(&ratios, 1)?, input(5)?);
                let count = total(sides.not_equal(0.0)?)?.maximum(1.0)?;
                // An input has no gradient.
                let kl = tape.input(*total(mismatched)?.div(count)?.maximum(0.0)?.value());
                let is_good = sides.greater(0.0)?;
                let distances = own.sub(kl)?.mul(is_good.mul(2.0)?.sub(1.0)?)?.mul(beta)?;
                let of_sides = is_good.mul(desirable - undesirable)?.add(undesirable)?;
                let loss = sum(distances.neg()?.sigmoid()?.mul(of_sides)?)?;
                let rewards = own.mul(beta)?;
                let chosen = total(rewards.mul(sides.maximum(0.0)?)?)?;
                let rejected = total(rewards.mul(sides.minimum(0.0)?)?)?.neg()?;
                let is_right = sum(distances.greater(0.0)?)?;
                (loss, vec![chosen, rejected, is_right, chosen.sub(rejected)?, sum(kl)?])
            }
        };
        Ok((loss, figures.into_iter().map(|figure| *figure.value()).collect()))
    }
}

/// Returns the figures of pairs, of which `sum` computes the weighted sums.
fn of_pairs<'s>(chosen: Var<'s>, rejected: Var<'s>, sum: impl Fn(Var<'s>) -> Result<Var<'s>>) -> Result<Vec<Var<'s>>> {
    let margins = chosen.sub(rejected)?;
    [chosen, rejected, margins.greater(0.0)?, margins].into_iter().map(sum).collect()
}
