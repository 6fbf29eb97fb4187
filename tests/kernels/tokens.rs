//! Tests of `ops::mean_tokens` and its backward pass: ascending sums and one division, with the
//! bits of a plain loop.

use crate::gradients::{Case, SEEDS, extents, leaf, normal};
use crate::hostile::attack;
use crate::support::{Random, on_each_device};
use crate::tolerance::{Closeness, Exact};
use crate::trial::{assert_refused, assert_same, trial};
use stepscope::ops;

/// Batch, tokens, columns.
const SHAPES: [[usize; 3]; 9] =
    [[0, 12, 4], [1, 1, 1], [1, 16, 5], [2, 12, 3], [3, 5, 4], [9, 12, 256], [257, 3, 7], [300, 12, 8], [350, 12, 256]];

/// Returns the means in float64; `x`: `[batch, tokens, cols]`.
pub(crate) fn in_float64(x: &[f64], tokens: usize, cols: usize) -> Vec<f64> {
    let sample = |x: &[f64]| {
        (0..cols).map(|c| (0..tokens).map(|t| x[t * cols + c]).sum::<f64>() / tokens as f64).collect::<Vec<f64>>()
    };
    x.chunks_exact(tokens * cols).flat_map(sample).collect()
}

on_each_device! {
    fn mean_tokens_forward(device: &Device) {
        let mut closeness = Closeness::new("mean over tokens");
        for [batch, tokens, cols] in SHAPES {
            let x = Random::new(cols as u64).normals(batch * tokens * cols);
            let got = trial(device, |trial| {
                let x = trial.upload(&x, [batch, tokens, cols])?;
                trial.output(&ops::mean_tokens(trial, &x)?)
            });
            let shape = format!("{batch} x {tokens} x {cols}");
            let terms =
                |place: usize| (0..tokens).map(move |token| (place / cols * tokens + token) * cols + place % cols);
            let plain = |place| terms(place).fold(0.0, |sum, at| sum + x[at]) / tokens as f32;
            assert_same(&shape, &got, &(0..batch * cols).map(plain).collect::<Vec<_>>());
            let exact =
                |place| Exact::sum(tokens, terms(place).map(|at| Exact::given(x[at]))) / Exact::given(tokens as f32);
            closeness.check(&shape, &got, &(0..batch * cols).map(exact).collect::<Vec<_>>());
        }
        closeness.finish();
    }

    fn mean_tokens_backward(device: &Device) {
        for [batch, tokens, cols] in SHAPES {
            let dy = Random::new(cols as u64).normals(batch * cols);
            let got = trial(device, |trial| {
                let dy = trial.upload(&dy, [batch, cols])?;
                trial.output(&ops::launch::mean_tokens_backward(trial, &dy, [batch, tokens, cols])?)
            });
            let exact = |at: usize| (f64::from(dy[at / (tokens * cols) * cols + at % cols]) / tokens as f64) as f32;
            assert_same(
                format_args!("{batch} x {tokens} x {cols}"),
                &got,
                &(0..batch * tokens * cols).map(exact).collect::<Vec<_>>(),
            );
        }
    }

    fn shapes_must_agree(device: &Device) {
        trial(device, |trial| {
            let x = trial.upload(&[1.0; 6], [2, 3])?;
            assert_refused(ops::mean_tokens(trial, &x), &["mean_tokens", "[batch, tokens, cols]", "[2, 3]"]);
            let none = trial.upload::<f32>(&[], [2, 0, 3])?;
            assert_refused(ops::mean_tokens(trial, &none), &["mean_tokens", "at least one token", "[2, 0, 3]"]);
            assert_refused(
                ops::launch::mean_tokens_backward(trial, &x, [2, 4, 4]),
                &["mean_tokens_backward", "[2, 4]", "[2, 3]"],
            );
            Ok(())
        });
    }

    fn gradient(device: &Device) {
        for seed in SEEDS {
            let mut random = Random::new(seed);
            let [batch, tokens, cols] = extents(&mut random, seed, [7, 13, 5]);
            let values = vec![normal(&mut random, &[batch, tokens, cols])];
            Case::new("mean_tokens", seed, tokens, values).check(device, |_, tape, p| {
                tape.mean_tokens(&leaf(tape, p[0])?)
            }, |p| in_float64(&p[0], tokens, cols));
        }
    }
}

attack! {
    tokens::mean_tokens_forward<S> { x: stored 24, tokens: number 3, cols: number 4, length: number 8, y: out_stored 8 }
    tokens::mean_tokens_backward<S> { dy: stored 8, tokens: number 3, cols: number 4, dx: out_stored 24 }
}
