//! The auxiliary loss of the routers of a model, as transformers computes it from the scores of all
//! mixtures together (`load_balancing_loss_func`).
//!
//! Invariant: the values of one mixture at a time are in memory, however many mixtures there are.

use stepscope_core::ops::{self, Activation};
use stepscope_core::{Result, Saved, Tape, Var};

/// Computes `experts * sum of f p` over the experts, for the choices f of an expert per token, and
/// its mean probability p. Both are means over the tokens of all mixtures. `scores`: `[tokens,
/// experts]` for each mixture, `real`: 1 for a token and 0 for padding, of any shape with as many
/// elements as there are tokens.
#[track_caller]
pub(super) fn loss<'s, S: Activation>(
    tape: &Tape<'_, 's>,
    scores: &[Var<'s, S>],
    chosen: usize,
    real: Option<Saved<'s>>,
) -> Result<Option<Var<'s>>> {
    let mut sums: Option<[Var<'s>; 2]> = None;
    for &of_mixture in scores {
        let own = tape.recompute_all((of_mixture, real), move |tape, (scores, real)| {
            let probabilities = tape.to_f32(&scores)?.softmax()?;
            let (_, ids) = probabilities.top_k(chosen)?;
            let [_, experts] = scores.shape().as_rows();
            let choices = tape.input(ops::one_hot(tape.step(), &ids, experts)?).sum(1)?;
            Ok([sum(tape, choices, real)?, sum(tape, probabilities, real)?])
        })?;
        sums = Some(match sums {
            Some([choices, probabilities]) => [choices.add(own[0])?, probabilities.add(own[1])?],
            None => own,
        });
    }
    let (Some([choices, probabilities]), Some(first)) = (sums, scores.first()) else { return Ok(None) };
    let [tokens, experts] = first.shape().as_rows().map(|extent| extent as f32);
    let product = (choices * probabilities)?.sum(..)?.mul(experts)?;
    let mixtures = scores.len() as f32;
    match real {
        Some(real) => {
            // A batch of nothing but padding has a loss of 0.
            let count = tape.input(real).sum(..)?.maximum(1.0)?.mul(mixtures)?;
            product.div(count)?.div(count).map(Some)
        }
        None => product.div(tokens * mixtures)?.div(tokens * mixtures).map(Some),
    }
}

/// Sums over tokens, without padding; `values`: `[tokens, experts]`.
#[track_caller]
fn sum<'s>(tape: &Tape<'_, 's>, values: Var<'s>, real: Option<Saved<'s>>) -> Result<Var<'s>> {
    match real {
        Some(real) => (values * tape.input(real).reshape([values.shape().as_rows()[0], 1])?)?.sum(0),
        None => values.sum(0),
    }
}
