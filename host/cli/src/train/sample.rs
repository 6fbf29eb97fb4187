//! Text generation. The beginning is read in one pass. Then each token is drawn from the model's
//! distribution, given all previous tokens.
//!
//! Activations and caches have the type that the model's layers store, f32 or BF16.
//!
//! Invariant: in f32, the same weights, beginning, settings and seed give the same tokens on every
//! machine. Logits have the same bits everywhere, and the sampler is deterministic.

use stepscope::data::{TokenSampler, penalize_repetition};
use stepscope::nn::KeyValueCache;
use stepscope::ops::Activation;
use stepscope::tensor::Indices;
use stepscope::{Arena, Capacity, Device, EagerStep, Parameters, Result, Tensor, ops};

use crate::train::model::Gpt;

/// A text to be written.
#[derive(Clone, Copy)]
pub(crate) struct Text<'t> {
    /// The tokens that it begins with.
    pub(crate) beginning: &'t [u32],
    /// The most new tokens, also limited by the model's context.
    pub(crate) count: usize,
    /// The tokens before which the text ends.
    pub(crate) ends: &'t [u32],
    pub(crate) sampler: &'t TokenSampler,
    /// The divisor of positive logits of tokens that the text contains; 1 changes nothing.
    pub(crate) repetition_penalty: f32,
    /// True if the logits have the bits of one pass over the text.
    pub(crate) batch_invariant: bool,
}

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
    count: usize,
    ends: &[u32],
    sampler: &TokenSampler,
) -> Result<Vec<u32>> {
    let beginning = newest(beginning, model, count);
    let text = Text { beginning, count, ends, sampler, repetition_penalty: 1.0, batch_invariant: false };
    let mut tokens = Vec::new();
    stream(device, model, weights, &text, &mut |token| {
        tokens.push(token);
        true
    })?;
    Ok(tokens)
}

/// Passes each new token of a text to `each`, which returns false to end the text.
///
/// # Errors
/// Returns an error if the device fails.
pub(crate) fn stream<S: Activation>(
    device: &Device,
    model: &Gpt<S>,
    weights: &Parameters,
    text: &Text<'_>,
    each: &mut dyn FnMut(u32) -> bool,
) -> Result<()> {
    let needed = measured(device, |step| measure(step, model, weights, text))?;
    let mut arena = Arena::builder(device).capacity(Capacity::Bytes(needed)).build()?;
    arena.step(|step| write_all(step, model, weights, text, each))
}

/// Returns the bytes of the step that [`stream`] needs, for a model that is built and loaded by
/// `model` on the device of a dry run.
///
/// # Errors
/// Returns an error if the model cannot be built.
pub(crate) fn needed_bytes<S: Activation>(
    device: &Device,
    model: impl Fn(&Device) -> Result<(Gpt<S>, Parameters)>,
    text: &Text<'_>,
) -> Result<usize> {
    measured(device, |step| {
        let (model, weights) = model(step.device())?;
        measure(step, &model, &weights, text)
    })
}

/// Returns the bytes that a step takes, from a dry run.
fn measured(device: &Device, run: impl Fn(&mut EagerStep<'_>) -> Result<()>) -> Result<usize> {
    let small = Arena::builder(device).capacity(Capacity::mib(1)).build()?;
    Ok(small.measure(run)?.high_water_bytes())
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

/// Writes a text. Its beginning is read in one pass. Keys and values of all tokens live until the
/// step ends; everything else of a token is freed with its scratch scope.
///
/// A text that outgrows LongRoPE's short factors is read again with the long ones, as in
/// transformers.
fn write_all<S: Activation>(
    step: &mut EagerStep<'_>,
    model: &Gpt<S>,
    weights: &Parameters,
    text: &Text<'_>,
    each: &mut dyn FnMut(u32) -> bool,
) -> Result<()> {
    let mut writer = Writer::new(step, model, weights, text)?;
    let (mut tokens, mut sampler) = (text.beginning.to_vec(), text.sampler.clone());
    while tokens.len() < writer.most {
        writer.read(step, &tokens)?;
        let mut logits = step.read(&writer.logits)?;
        penalize_repetition(&mut logits, &tokens, text.repetition_penalty);
        let next = sampler.next(&logits)?;
        if text.ends.contains(&next) || !each(next) {
            break;
        }
        tokens.push(next);
    }
    Ok(())
}

/// Takes the memory of [`write_all`], for a text without an end, and skips the launches of all
/// tokens but the beginning's, the ones that are read again, and the last one's, which need the
/// most.
fn measure<S: Activation>(
    step: &mut EagerStep<'_>,
    model: &Gpt<S>,
    weights: &Parameters,
    text: &Text<'_>,
) -> Result<()> {
    let mut writer = Writer::new(step, model, weights, text)?;
    let mut tokens = text.beginning.to_vec();
    while tokens.len() < writer.most {
        let is_first = writer.read == 0 || writer.outgrows(&tokens);
        match is_first || tokens.len() + 1 == writer.most {
            true => writer.read(step, &tokens)?,
            false => writer.skip(step, &tokens)?,
        }
        tokens.push(0);
    }
    Ok(())
}

/// The tokens of a text that are read, as keys and values of each block, and the next one's logits.
struct Writer<'t, 's, S: Activation> {
    model: &'t Gpt<S>,
    weights: &'t Parameters,
    caches: Vec<KeyValueCache<'s, S>>,
    logits: Tensor<'s>,
    /// The number of tokens that are read.
    read: usize,
    /// The most tokens of the text.
    most: usize,
    /// The tokens after which LongRoPE's short factors are outgrown, if they ever are.
    short: Option<usize>,
}

impl<'t, 's, S: Activation> Writer<'t, 's, S> {
    fn new(step: &EagerStep<'s>, model: &'t Gpt<S>, weights: &'t Parameters, text: &Text<'_>) -> Result<Self> {
        step.set_batch_invariant(text.batch_invariant);
        let first = text.beginning.len();
        let most = model.config().context.min(first.saturating_add(text.count));
        let mut caches = model.layers.caches(step, most)?;
        let short = model.layers.short_context().filter(|&short| first <= short && short < most);
        if let Some(short) = short {
            caches.iter_mut().for_each(|cache: &mut KeyValueCache<'_, S>| cache.restart(short));
        }
        let logits = step.empty([1, model.config().vocabulary])?;
        Ok(Self { model, weights, caches, logits, read: 0, most, short })
    }

    /// Returns true if these tokens are the first that LongRoPE's short factors do not reach.
    fn outgrows(&self, tokens: &[u32]) -> bool {
        self.short.is_some_and(|short| tokens.len() > short)
    }

    /// Reads the tokens that are not read yet, and computes the logits of the next one.
    fn read(&mut self, step: &mut EagerStep<'s>, tokens: &[u32]) -> Result<()> {
        if self.outgrows(tokens) {
            self.caches.iter_mut().for_each(|cache| cache.restart(self.most));
            (self.short, self.read) = (None, 0);
        }
        let [ids, places] = self.upload(step, tokens)?;
        self.read = tokens.len();
        step.scratch(|scratch| {
            let next = self.model.layers.next(scratch, self.weights, [&ids, &places], &mut self.caches)?;
            ops::copy_into(scratch, &next, &mut scratch.lend_mut(&mut self.logits))
        })
    }

    /// Takes the memory of [`Writer::read`] that is not freed with its scratch scope.
    fn skip(&mut self, step: &mut EagerStep<'s>, tokens: &[u32]) -> Result<()> {
        self.upload(step, tokens)?;
        let count = tokens.len() - self.read;
        self.read = tokens.len();
        step.scratch(|scratch| self.caches.iter_mut().try_for_each(|cache| cache.next_tokens(scratch, count).map(drop)))
    }

    /// Uploads the tokens that are not read yet, and their places.
    fn upload(&self, step: &EagerStep<'s>, tokens: &[u32]) -> Result<[Indices<'s>; 2]> {
        let places: Vec<u32> = (self.read as u32..tokens.len() as u32).collect();
        let shape = [1, places.len()];
        Ok([step.upload_indices(&tokens[self.read..], shape)?, step.upload_indices(&places, shape)?])
    }
}
