//! Attention of one token over cached keys and values matches attention over all tokens, for every
//! config.

use crate::support::{Random, on_each_device, relative_l2, tolerance};
use std::num::NonZeroU32;
use stepscope::nn::{KeyValueCache, MultiHeadAttention};
use stepscope::ops::{Activation, AttentionMask, Rotary};
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
            let mut layout = ParameterSpec::builder();
            let mut names = layout.names();
            let attention = MultiHeadAttention::grouped(names.at("attention"), WIDTH, [WIDTH / HEAD, heads]).causal();
            let attention = form(attention, names.at("norm"));
            made.push((name, heads, attention, layout.build().unwrap()));
        };
    let rotary = Rotary { offset: 5, ..Rotary::default() };
    add("causal", 4, &|attention, _| attention);
    add("grouped", 2, &|attention, _| attention.rotary(rotary));
    add("one head of keys", 1, &|attention, _| attention);
    add("window", 2, &|attention, _| attention.sees(AttentionMask::SlidingWindow(NonZeroU32::new(6).unwrap())));
    add("normalised", 2, &|attention, names| attention.qk_norm(names, HEAD, 1e-6).rotary(rotary));
    made
}

/// Runs the tokens one by one, with activations and caches stored as S, in scratches of a step, and
/// reads each.
fn one_by_one<S: Activation>(
    arena: &mut Arena,
    weights: &Parameters,
    attention: &MultiHeadAttention,
    columns: usize,
    x: &[f32],
) -> Result<Vec<f32>> {
    arena.step(|step| {
        let mut cache: KeyValueCache<'_, S> = KeyValueCache::new(step, x.len() / WIDTH, columns)?;
        let mut all = Vec::new();
        for token in x.chunks(WIDTH) {
            let token = step.upload(token, [1, 1, WIDTH])?;
            let mut out = step.empty([1, 1, WIDTH])?;
            step.scratch(|scratch| {
                let tape = Tape::new(scratch, weights).evaluating();
                let token = tape.input(ops::copy(scratch, &scratch.lend(&token))?);
                let y = attention.forward_cached(&tape, &tape.stored_as(&token)?, cache.next(scratch)?)?;
                ops::copy_into(scratch, tape.to_f32(&y)?.value(), &mut scratch.lend_mut(&mut out))
            })?;
            all.extend(step.read(&out)?);
        }
        assert_eq!(cache.tokens(), x.len() / WIDTH);
        Ok(all)
    })
}

/// Compares cached attention with attention over all tokens in f32.
fn matches_full_attention<S: Activation>(device: &Device, limit: f64) {
    let mut arena = Arena::builder(device).capacity(Capacity::mib(4)).build().unwrap();
    let x = Random::new(3).normals(TOKENS * WIDTH);
    for (name, heads, attention, layout) in forms() {
        let weights = Parameters::new(device, &layout, 7).unwrap().with_bf16_copy().unwrap();
        let all = arena
            .step(|step| {
                let tape = Tape::new(step, &weights).evaluating();
                let x = tape.input(step.upload(&x, [1, TOKENS, WIDTH])?);
                step.read(attention.forward(&tape, &x)?.value())
            })
            .unwrap();
        let made = one_by_one::<S>(&mut arena, &weights, &attention, heads * HEAD, &x).unwrap();
        let want: Vec<f64> = all.iter().map(|&value| value.into()).collect();
        let error = relative_l2(&made, &want);
        assert!(error > 0.0 && error < limit, "{name}: {error:e}");
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
        let (_, heads, attention, layout) = forms().swap_remove(0);
        let weights = Parameters::new(device, &layout, 7).unwrap();
        let x = vec![0.5; 3 * WIDTH];
        let all = attention.clone().sees(AttentionMask::Full);
        let mut refused = |attention: &MultiHeadAttention, columns: usize, told: &str| {
            let error = one_by_one::<f32>(&mut arena, &weights, attention, columns, &x).unwrap_err().to_string();
            assert!(error.contains(told), "{error}");
        };
        refused(&all, heads * HEAD, "heads that attend to all tokens");
        refused(&attention, heads * HEAD + 4, "keys and values [more than 0, 64]");
        let full = arena.step(|step| {
            let mut cache: KeyValueCache<'_> = KeyValueCache::new(step, 1, heads * HEAD)?;
            (0..2).try_for_each(|_| step.scratch(|scratch| cache.next(scratch).map(drop)))
        });
        let error = full.unwrap_err().to_string();
        assert!(error.contains("at most 1 tokens"), "{error}");
    }
}
