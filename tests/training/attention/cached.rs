//! Attention of one token over cached keys and values matches attention over all tokens, for every
//! config.

use crate::support::{Random, on_each_device, relative_l2, tolerance};
use std::num::NonZeroU32;
use stepscope::nn::{KeyValueCache, MultiHeadAttention};
use stepscope::ops::{AttentionMask, Rotary};
use stepscope::{Arena, Capacity, ParameterSpec, Parameters, Result, Tape, ops};

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

/// Runs the tokens one by one, in scratches of a step, and reads each.
fn one_by_one(
    arena: &mut Arena,
    weights: &Parameters,
    attention: &MultiHeadAttention,
    columns: usize,
    x: &[f32],
) -> Result<Vec<f32>> {
    arena.step(|step| {
        let mut cache = KeyValueCache::new(step, x.len() / WIDTH, columns)?;
        let mut all = Vec::new();
        for token in x.chunks(WIDTH) {
            let token = step.upload(token, [1, 1, WIDTH])?;
            let mut out = step.empty([1, 1, WIDTH])?;
            step.scratch(|scratch| {
                let tape = Tape::new(scratch, weights).evaluating();
                let token = tape.input(ops::copy(scratch, &scratch.lend(&token))?);
                let y = attention.forward_cached(&tape, &token, cache.next(scratch)?)?;
                ops::copy_into(scratch, y.value(), &mut scratch.lend_mut(&mut out))
            })?;
            all.extend(step.read(&out)?);
        }
        assert_eq!(cache.tokens(), x.len() / WIDTH);
        Ok(all)
    })
}

on_each_device! {
    fn cached_attention_matches_full_attention(device: &Device) {
        let mut arena = Arena::builder(device).capacity(Capacity::mib(4)).build().unwrap();
        let x = Random::new(3).normals(TOKENS * WIDTH);
        for (name, heads, attention, layout) in forms() {
            let weights = Parameters::new(device, &layout, 7).unwrap();
            let all = arena
                .step(|step| {
                    let tape = Tape::new(step, &weights).evaluating();
                    let x = tape.input(step.upload(&x, [1, TOKENS, WIDTH])?);
                    step.read(attention.forward(&tape, &x)?.value())
                })
                .unwrap();
            let made = one_by_one(&mut arena, &weights, &attention, heads * HEAD, &x).unwrap();
            let want: Vec<f64> = all.iter().map(|&value| value.into()).collect();
            let error = relative_l2(&made, &want);
            assert!(error > 0.0 && error < tolerance(WIDTH), "{name}: {error:e}");
        }
    }

    /// Settings for which the result would differ from that over all tokens are refused.
    fn unsupported_settings_are_refused(device: &Device) {
        let mut arena = Arena::builder(device).capacity(Capacity::mib(4)).build().unwrap();
        let (_, heads, attention, layout) = forms().swap_remove(0);
        let weights = Parameters::new(device, &layout, 7).unwrap();
        let x = vec![0.5; 3 * WIDTH];
        let all = attention.clone().sees(AttentionMask::Full);
        let mut refused = |attention: &MultiHeadAttention, columns: usize, told: &str| {
            let error = one_by_one(&mut arena, &weights, attention, columns, &x).unwrap_err().to_string();
            assert!(error.contains(told), "{error}");
        };
        refused(&all, heads * HEAD, "heads that attend to all tokens");
        refused(&attention, heads * HEAD + 4, "keys and values [more than 0, 64]");
        let full = arena.step(|step| {
            let mut cache = KeyValueCache::new(step, 1, heads * HEAD)?;
            (0..2).try_for_each(|_| step.scratch(|scratch| cache.next(scratch).map(drop)))
        });
        let error = full.unwrap_err().to_string();
        assert!(error.contains("at most 1 tokens"), "{error}");
    }
}
