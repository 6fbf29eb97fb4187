//! Text generation. Each token is drawn from the model's distribution, given all previous tokens.
//!
//! Invariant: the same weights, beginning, settings and seed give the same tokens on every machine.
//! Logits have the same bits everywhere, and the sampler is deterministic.

use stepscope::data::TokenSampler;
use stepscope::{Arena, Capacity, Device, EagerStep, Parameters, Result, ops};

use crate::train::model::{Activation, Gpt};

/// Returns up to `count` tokens that follow `beginning`, as many as fit the model's context. Stops
/// before any of `ends`.
///
/// # Errors
/// Returns an error if the device fails.
pub(crate) fn write<S: Activation>(
    device: &Device,
    model: &Gpt<S>,
    weights: &Parameters,
    beginning: &[u32],
    (count, ends): (usize, &[u32]),
    sampler: &TokenSampler,
) -> Result<Vec<u32>> {
    let text = |ends| Text { model, weights, beginning: newest(beginning, model), count, ends, sampler };
    let small = Arena::builder(device).capacity(Capacity::mib(1)).build()?;
    let needed = small.measure(|step| text(&[]).write(step).map(drop))?.high_water_bytes();
    let mut arena = Arena::builder(device).capacity(Capacity::Bytes(needed)).build()?;
    arena.step(|step| text(ends).write(step))
}

/// Returns the last tokens of a long beginning: at most half a context, so that there is room for
/// the continuation.
fn newest<'b, S: Activation>(beginning: &'b [u32], model: &Gpt<S>) -> &'b [u32] {
    &beginning[beginning.len().saturating_sub((model.config().context / 2).max(1))..]
}

/// A text to be generated.
struct Text<'t, S> {
    model: &'t Gpt<S>,
    weights: &'t Parameters,
    beginning: &'t [u32],
    count: usize,
    ends: &'t [u32],
    sampler: &'t TokenSampler,
}

impl<S: Activation> Text<'_, S> {
    /// Generates the continuation. Keys and values of all tokens live until the step ends;
    /// everything else of a token is freed with its scratch scope.
    fn write(&self, step: &mut EagerStep<'_>) -> Result<Vec<u32>> {
        let Self { model, weights, beginning, .. } = *self;
        let (mut tokens, mut sampler) = (beginning.to_vec(), self.sampler.clone());
        let (mut caches, mut logits) = (model.layers.caches(step)?, step.empty([1, model.config().vocabulary])?);
        let most = model.config().context.min(beginning.len() + self.count);
        for place in 0..most.saturating_sub(1) {
            let token = step.upload_indices(&tokens[place..=place], [1, 1])?;
            let at = step.upload_indices(&[place as u32], [1, 1])?;
            step.scratch(|scratch| {
                let next = model.layers.next(scratch, weights, [&token, &at], &mut caches)?;
                ops::copy_into(scratch, &next, &mut scratch.lend_mut(&mut logits))
            })?;
            if place + 1 < tokens.len() {
                continue;
            }
            let next = sampler.next(&step.read(&logits)?)?;
            if self.ends.contains(&next) {
                break;
            }
            tokens.push(next);
        }
        Ok(tokens.split_off(beginning.len()))
    }
}
