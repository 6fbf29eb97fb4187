//! Text generation. Each token is drawn from the model's distribution, given all previous tokens.
//!
//! Activations and caches have the type that the model's layers store, f32 or BF16.
//!
//! Invariant: in f32, the same weights, beginning, settings and seed give the same tokens on every
//! machine. Logits have the same bits everywhere, and the sampler is deterministic.

use stepscope::data::TokenSampler;
use stepscope::nn::KeyValueCache;
use stepscope::ops::Activation;
use stepscope::{Arena, Capacity, Device, EagerStep, Parameters, Result, ops};

use crate::train::model::Gpt;

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
    let text = |ends| Text { model, weights, beginning: newest(beginning, model, count), count, ends, sampler };
    let needed = measured(device, |step| text(&[]).write(step))?;
    let mut arena = Arena::builder(device).capacity(Capacity::Bytes(needed)).build()?;
    arena.step(|step| text(ends).write(step))
}

/// Returns the bytes of the step that [`write`] needs, for a model that is built and loaded by
/// `model` on the device of a dry run.
///
/// # Errors
/// Returns an error if the model cannot be built.
pub(crate) fn needed_bytes<S: Activation>(
    device: &Device,
    model: impl Fn(&Device) -> Result<(Gpt<S>, Parameters)>,
    beginning: &[u32],
    count: usize,
    sampler: &TokenSampler,
) -> Result<usize> {
    measured(device, |step| {
        let (model, weights) = model(step.device())?;
        let beginning = newest(beginning, &model, count);
        Text { model: &model, weights: &weights, beginning, count, ends: &[], sampler }.write(step)
    })
}

/// Returns the bytes that writing takes, from a dry run.
fn measured(device: &Device, write: impl Fn(&mut EagerStep<'_>) -> Result<Vec<u32>>) -> Result<usize> {
    let small = Arena::builder(device).capacity(Capacity::mib(1)).build()?;
    Ok(small.measure(|step| write(step).map(drop))?.high_water_bytes())
}

/// Returns the beginning, or if the text would not fit a context, its last tokens: at most half a
/// context, so that there is room for the continuation.
fn newest<'b, S: Activation>(beginning: &'b [u32], model: &Gpt<S>, count: usize) -> &'b [u32] {
    let context = model.config().context;
    match beginning.len() + count <= context {
        true => beginning,
        false => &beginning[beginning.len().saturating_sub((context / 2).max(1))..],
    }
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
    ///
    /// A text that outgrows LongRoPE's short factors begins again with the long ones, as in
    /// transformers. Its earlier tokens remain.
    fn write(&self, step: &mut EagerStep<'_>) -> Result<Vec<u32>> {
        let Self { model, weights, beginning, .. } = *self;
        let (mut tokens, mut sampler) = (beginning.to_vec(), self.sampler.clone());
        let most = model.config().context.min(beginning.len() + self.count);
        let mut caches: Vec<KeyValueCache<'_, S>> = model.layers.caches(step, most)?;
        let mut logits = step.empty([1, model.config().vocabulary])?;
        let is_outgrown = |short: &usize| beginning.len() <= *short && *short < most;
        let mut short = model.layers.short_context().filter(is_outgrown);
        if let Some(short) = short {
            caches.iter_mut().for_each(|cache| cache.restart(short));
        }
        let mut next_place = 0;
        while next_place + 1 < most {
            if short.take_if(|short| *short == next_place).is_some() {
                caches.iter_mut().for_each(|cache| cache.restart(most));
                next_place = 0;
            }
            let place = next_place;
            next_place += 1;
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
