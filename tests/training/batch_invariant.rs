//! In a batch-invariant step, a text's log-probabilities have the same bits without other texts, in
//! a batch, in a pack and token by token.

use crate::support::{Random, bits, narrow, on_each_device};
use stepscope::nn::{KeyValueCache, Linear, Mlp, MultiHeadAttention};
use stepscope::ops::Activation;
use stepscope::{Arena, Capacity, Device, EagerStep, ParameterSpec, Parameters, Result, Tape, Var, ops};

/// More tokens than a block of keys, after which attention's maximum may move.
const TOKENS: usize = 70;
const WIDTH: usize = 32;
/// Long enough for k to be split in a product of few rows.
const HIDDEN: usize = 1024;
const CLASSES: usize = 40;
/// A pack in which the text begins at a multiple of 64 tokens.
const PACK: [usize; 2] = [64 + TOKENS + 6, 64];

/// A transformer of one block, without positions.
struct Model {
    attention: MultiHeadAttention,
    mlp: Mlp,
    head: Linear,
}

impl Model {
    fn new() -> (Self, ParameterSpec) {
        let mut spec = ParameterSpec::builder();
        let attention = MultiHeadAttention::grouped(spec.at("attention"), WIDTH, [2, 1]).causal();
        let mlp = Mlp::new(spec.at("mlp"), WIDTH, HIDDEN, WIDTH);
        let head = Linear::new(spec.at("head"), WIDTH, CLASSES);
        (Self { attention, mlp, head }, spec.build().unwrap())
    }

    /// Returns the log-probabilities after attention.
    fn rest<'s, S: Activation>(&self, tape: &Tape<'_, 's>, x: &Var<'s, S>) -> Result<Var<'s>> {
        let logits = self.head.forward(tape, &self.mlp.forward_residual(tape, x, x)?)?;
        tape.to_f32(&logits)?.log_softmax()
    }
}

/// Returns the bits of the log-probabilities of texts `x`: `[samples, tokens, WIDTH]`, whose tokens
/// have these documents.
fn of_batch<S: Activation>(
    step: &EagerStep<'_>,
    (model, weights): (&Model, &Parameters),
    x: &[f32],
    shape: [usize; 2],
    documents: &[u32],
) -> Result<Vec<u32>> {
    let [samples, tokens] = shape;
    let tape = Tape::new(step, weights).evaluating();
    let x = tape.input(step.upload(&narrow::<S>(x), [samples, tokens, WIDTH])?);
    let mut config = model.attention.config();
    if !documents.is_empty() {
        config = config.documents(step.upload(documents, shape)?);
    }
    let x = model.attention.forward_residual_masked(&tape, &x, &x, &config)?;
    Ok(bits(&step.read(model.rest(&tape, &x)?.value())?))
}

/// Returns the bits of the log-probabilities of one text: `first` tokens together, and then one by
/// one from a cache.
fn from_cache<S: Activation>(
    step: &mut EagerStep<'_>,
    (model, weights): (&Model, &Parameters),
    x: &[f32],
    first: usize,
) -> Result<Vec<u32>> {
    let mut cache: KeyValueCache<'_, S> = KeyValueCache::new(step, TOKENS, WIDTH / 2)?;
    let (beginning, others) = x.split_at(first * WIDTH);
    let mut all = Vec::new();
    for tokens in [beginning].into_iter().chain(others.chunks(WIDTH)) {
        let count = tokens.len() / WIDTH;
        let x = step.upload(&narrow::<S>(tokens), [1, count, WIDTH])?;
        let mut out = step.empty([1, count, CLASSES])?;
        step.scratch(|scratch| {
            let tape = Tape::new(scratch, weights).evaluating();
            let x = tape.input(ops::copy(scratch, &scratch.lend(&x))?);
            let x = model.attention.forward_residual_cached(&tape, &x, &x, cache.next_tokens(scratch, count)?)?;
            ops::copy_into(scratch, model.rest(&tape, &x)?.value(), &mut scratch.lend_mut(&mut out))
        })?;
        all.extend(bits(&step.read(&out)?));
    }
    Ok(all)
}

/// Compares the text in batches, in a pack and from a cache with the text without others. Without
/// the setting, some differ.
fn same_bits<S: Activation>(device: &Device) {
    let (model, spec) = Model::new();
    let weights = Parameters::new(device, &spec, 7).unwrap().with_bf16_copy().unwrap();
    let mut arena = Arena::builder(device).capacity(Capacity::mib(512)).build().unwrap();
    let mut random = Random::new(5);
    let batch = random.normals(300 * TOKENS * WIDTH);
    let text = &batch[..TOKENS * WIDTH];
    for batch_invariant in [true, false] {
        let mut of = |x: &[f32], shape: [usize; 2], documents: &[u32]| {
            let run = |step: &mut EagerStep<'_>| {
                step.set_batch_invariant(batch_invariant);
                of_batch::<S>(step, (&model, &weights), x, shape, documents)
            };
            arena.step(run).unwrap()
        };
        let alone = of(text, [1, TOKENS], &[]);
        let mut different = 0;
        let mut compare = |how: &str, got: &[u32]| {
            different += usize::from(got != alone);
            assert!(!batch_invariant || got == alone, "{how}");
        };
        for samples in [7, 64, 300] {
            let got = of(&batch[..samples * TOKENS * WIDTH], [samples, TOKENS], &[]);
            compare(&format!("{samples} texts"), &got[..alone.len()]);
        }
        let [tokens, first] = PACK;
        let mut packed = random.normals(tokens * WIDTH);
        packed[first * WIDTH..][..text.len()].copy_from_slice(text);
        let documents: Vec<u32> = (0..tokens).map(|at| ((at + TOKENS - first) / TOKENS) as u32).collect();
        let got = of(&packed, [1, tokens], &documents);
        compare("packed", &got[first * CLASSES..][..alone.len()]);
        for first in [1, 50] {
            let run = |step: &mut EagerStep<'_>| {
                step.set_batch_invariant(batch_invariant);
                from_cache::<S>(step, (&model, &weights), text, first)
            };
            compare(&format!("{first} tokens, then one by one"), &arena.step(run).unwrap());
        }
        assert!(batch_invariant || different > 0);
    }
}

on_each_device! {
    fn texts_in_f32(device: &Device) {
        same_bits::<f32>(device);
    }

    fn texts_in_bf16(device: &Device) {
        same_bits::<stepscope::bf16>(device);
    }
}
