//! Attention over cached keys and values matches attention over all tokens, for every config.

use crate::support::{Random, on_each_device, relative_l2, tolerance};
use std::num::NonZeroU32;
use stepscope::nn::{KeyValueCache, MultiHeadAttention};
use stepscope::ops::{Activation, AttentionMask, Rotary};
use stepscope::tensor::Element;
use stepscope::{Arena, Capacity, Device, ParameterSpec, Parameters, Result, Tape, bf16, ops};

const TOKENS: usize = 21;
const WIDTH: usize = 64;
/// The columns of a head.
const HEAD: usize = 16;

/// Returns all causal configs, with a name and the number of key heads of each.
fn forms() -> Vec<(&'static str, usize, MultiHeadAttention, ParameterSpec)> {
    let mut made = Vec::new();
    let mut add =
        |name, heads: usize, form: &dyn Fn(MultiHeadAttention, stepscope::nn::Scope<'_>) -> MultiHeadAttention| {
            let mut spec = ParameterSpec::builder();
            let attention = MultiHeadAttention::grouped(spec.at("attention"), WIDTH, [WIDTH / HEAD, heads]).causal();
            let attention = form(attention, spec.at("norm"));
            made.push((name, heads, attention, spec.build().unwrap()));
        };
    let rotary = Rotary { offset: 5, ..Rotary::default() };
    add("causal", 4, &|attention, _| attention);
    add("grouped", 2, &|attention, _| attention.rotary(rotary));
    add("one head of keys", 1, &|attention, _| attention);
    add("window", 2, &|attention, _| attention.sees(AttentionMask::SlidingWindow(NonZeroU32::new(6).unwrap())));
    add("normalised", 2, &|attention, names| attention.qk_norm(names, HEAD, 1e-6).rotary(rotary));
    made
}

/// Runs the first tokens together and the others one by one, with activations and caches stored as
/// S, in scratches of a step, and reads each.
fn in_parts<S: Activation>(
    arena: &mut Arena,
    weights: &Parameters,
    attention: &MultiHeadAttention,
    (columns, first): (usize, usize),
    x: &[f32],
) -> Result<Vec<f32>> {
    arena.step(|step| {
        let mut cache: KeyValueCache<'_, S> = KeyValueCache::new(step, x.len() / WIDTH, columns)?;
        let (beginning, rest) = x.split_at(first * WIDTH);
        let mut all = Vec::new();
        for tokens in [beginning].into_iter().chain(rest.chunks(WIDTH)) {
            let count = tokens.len() / WIDTH;
            let x = step.upload(tokens, [1, count, WIDTH])?;
            let mut out = step.empty([1, count, WIDTH])?;
            step.scratch(|scratch| {
                let tape = Tape::new(scratch, weights).evaluating();
                let x = tape.input(ops::copy(scratch, &scratch.lend(&x))?);
                let cache = cache.next_tokens(scratch, count)?;
                let y = attention.forward_cached(&tape, &tape.stored_as(&x)?, cache)?;
                ops::copy_into(scratch, tape.to_f32(&y)?.value(), &mut scratch.lend_mut(&mut out))
            })?;
            all.extend(step.read(&out)?);
        }
        assert_eq!(cache.tokens(), x.len() / WIDTH);
        Ok(all)
    })
}

/// Compares cached attention with attention over all tokens in f32. In f32, tokens that are read
/// together have the same bits.
fn matches_full_attention<S: Activation>(device: &Device, limit: f64) {
    let mut arena = Arena::builder(device).capacity(Capacity::mib(4)).build().unwrap();
    let x = Random::new(3).normals(TOKENS * WIDTH);
    for (name, heads, attention, spec) in forms() {
        let weights = Parameters::new(device, &spec, 7).unwrap().with_bf16_copy().unwrap();
        let all = arena
            .step(|step| {
                let tape = Tape::new(step, &weights).evaluating();
                let x = tape.input(step.upload(&x, [1, TOKENS, WIDTH])?);
                step.read(attention.forward(&tape, &x)?.value())
            })
            .unwrap();
        let want: Vec<f64> = all.iter().map(|&value| value.into()).collect();
        for first in [1, 2, 9, TOKENS] {
            let made = in_parts::<S>(&mut arena, &weights, &attention, (heads * HEAD, first), &x).unwrap();
            let error = relative_l2(&made, &want);
            let is_whole = <S as Element>::NAME == <f32 as Element>::NAME && first == TOKENS;
            assert!((error > 0.0) != is_whole && error < limit, "{name}, {first} tokens first: {error:e}");
        }
    }
}

on_each_device! {
    fn cached_attention_matches_full_attention(device: &Device) {
        matches_full_attention::<f32>(device, tolerance(WIDTH));
    }

    /// BF16 rounds x, the weights, q, k, v, the softmax and both results: seven roundings of 2^-9.
    fn cached_attention_in_bf16(device: &Device) {
        matches_full_attention::<bf16>(device, 7.0 * 2f64.powi(-9));
    }

    /// A restarted cache begins at its first position, and holds fewer tokens.
    fn restarted_cache_is_empty(device: &Device) {
        let mut arena = Arena::builder(device).capacity(Capacity::mib(1)).build().unwrap();
        let error = arena.step(|step| {
            let mut cache: KeyValueCache<'_> = KeyValueCache::new(step, 3, 8)?;
            step.scratch(|scratch| cache.next(scratch).map(drop))?;
            cache.restart(2);
            assert_eq!(cache.tokens(), 0);
            (0..3).try_for_each(|_| step.scratch(|scratch| cache.next(scratch).map(drop)))
        });
        let error = error.unwrap_err().to_string();
        assert!(error.contains("at most 2 tokens"), "{error}");
    }

    /// Settings for which the result would differ from that over all tokens are refused.
    fn unsupported_settings_are_refused(device: &Device) {
        let mut arena = Arena::builder(device).capacity(Capacity::mib(4)).build().unwrap();
        let (_, heads, attention, spec) = forms().swap_remove(0);
        let weights = Parameters::new(device, &spec, 7).unwrap();
        let x = vec![0.5; 3 * WIDTH];
        let all = attention.clone().sees(AttentionMask::Full);
        for (attention, columns, first, expected) in [
            (&all, heads * HEAD, 1, "heads that attend to all tokens"),
            (&all, heads * HEAD, 2, "heads that attend to all tokens"),
            (&attention, heads * HEAD + 4, 1, "keys and values [more than 0, 64]"),
            (&attention, heads * HEAD + 4, 3, "keys and values [more than 2, 64]"),
        ] {
            let error = in_parts::<f32>(&mut arena, &weights, attention, (columns, first), &x).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
        // Several tokens come first.
        let later = arena.step(|step| {
            let mut cache: KeyValueCache<'_> = KeyValueCache::new(step, 3, heads * HEAD)?;
            step.scratch(|scratch| cache.next(scratch).map(drop))?;
            let x = step.upload(&x[..2 * WIDTH], [1, 2, WIDTH])?;
            step.scratch(|scratch| {
                let tape = Tape::new(scratch, &weights).evaluating();
                let x = tape.input(ops::copy(scratch, &scratch.lend(&x))?);
                attention.forward_cached(&tape, &x, cache.next_tokens(scratch, 2)?).map(drop)
            })
        });
        let error = later.unwrap_err().to_string();
        assert!(error.contains("several tokens at position 0") && error.contains("at position 1"), "{error}");
        let full = arena.step(|step| {
            let mut cache: KeyValueCache<'_> = KeyValueCache::new(step, 1, heads * HEAD)?;
            (0..2).try_for_each(|_| step.scratch(|scratch| cache.next(scratch).map(drop)))
        });
        let error = full.unwrap_err().to_string();
        assert!(error.contains("at most 1 tokens"), "{error}");
    }
}
