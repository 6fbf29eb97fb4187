//! Tests of `ops::attention` and its backward pass in f32, TF32 and BF16 against float64: every
//! mask with every head width, over few tokens and many.
//!
//! Only some of many tokens are compared, as queries and as keys. The contributions of other
//! queries to a key's gradient are computed in float64 from the device's outputs and `lse`. Below
//! f32, the norm bounds of [`crate::flash_attention_mma`] would hide one wrong element, so each
//! element of `out` has a bound too.
//!
//! In BF16, an element is rounded once, and the weights p before they are multiplied by v. So `sum
//! p v` is off by at most `2^-8 sum p |v|`. Roundings have either sign, so it is off by at most
//! four times `2^-9 sqrt(sum p^2 v^2)`. In TF32, p and v are rounded, and also q and k, which
//! changes a score of size 1 like one or two more roundings: four roundings of `2^-11`.

use crate::flash_reference::{Inputs, PLAIN, Results, Setup, window};
use crate::support::{narrow, on_each_device, relative_l2, tolerance};
use stepscope::ops::launch::AttentionKept;
use stepscope::ops::{self, AttentionElement, AttentionMask, Precision, QkNorm};
use stepscope::{Arena, Capacity, Device, DeviceKind, Tensor, bf16};

/// The columns of a head.
const WIDTHS: [usize; 6] = [32, 64, 80, 96, 128, 256];

/// The permitted distances of results from float64.
#[derive(Clone, Copy)]
struct Bounds {
    /// The bound by the norm of all compared rows.
    out: f64,
    lse: f64,
    gradients: f64,
    /// The bound of an element of `out`: a factor of its rounding error, and an addend. None for
    /// f32, where the norm suffices.
    element: Option<[f64; 2]>,
}

impl Bounds {
    fn of_f32(setup: Setup) -> Self {
        let all = tolerance(setup.tokens.max(setup.width));
        Self { out: all, lse: all, gradients: all, element: None }
    }

    fn of_tf32(setup: Setup) -> Self {
        let [out, lse, gradients] = crate::flash_attention_mma::bounds::<f32>(setup.tokens.max(setup.width));
        Self { out, lse, gradients, element: Some([4.0 / 2048.0, tolerance(setup.tokens.max(setup.width))]) }
    }

    fn of_bf16(setup: Setup) -> Self {
        let [out, lse, gradients] = crate::flash_attention_mma::bounds::<bf16>(setup.tokens.max(setup.width));
        // Weights are within 2^-17 before rounding, and so is their sum.
        let lse = lse + 1.0 / f64::from(1 << 17);
        Self { out, lse, gradients, element: Some([1.0 / 256.0, lse]) }
    }
}

/// Returns the setup without a mask and with each single mask. With few tokens there are two
/// samples of two heads.
fn setups(tokens: usize, width: usize) -> [Setup; 5] {
    let plain = if tokens < 1000 { Setup { batch: 2, heads: [2, 2], ..PLAIN } } else { PLAIN };
    let plain = Setup { tokens, width, ..plain };
    [
        plain,
        Setup { sees: AttentionMask::Causal, ..plain },
        Setup { sees: window((tokens as u32 / 5 + 1).min(200)), ..plain },
        Setup { masks: [true, false], ..plain },
        Setup { masks: [false, true], ..plain },
    ]
}

/// Returns the tokens to compare: all if they are few, otherwise those at the ends of tiles and of
/// the existing tokens, and some between.
fn compared(tokens: usize) -> Vec<usize> {
    let end = tokens - tokens / 3;
    if tokens < 1000 { (0..tokens).collect() } else { vec![0, 63, 64, end / 2, tokens / 2, end - 1, end, tokens - 1] }
}

/// Returns inputs whose values S can hold.
pub(crate) fn inputs<S: AttentionElement>(setup: Setup) -> Inputs {
    let mut inputs = Inputs::new(setup);
    for x in inputs.qkv.iter_mut().chain(&mut inputs.dout) {
        *x = S::narrow(*x).widen();
    }
    inputs
}

/// Returns the device's results on tensors of S, widened. f32 uses this precision.
pub(crate) fn results<S: AttentionElement>(inputs: &Inputs, device: &Device, precision: Precision) -> Results<f32> {
    let Setup { batch, tokens, heads, width, .. } = inputs.setup;
    let widen = |values: Vec<S>| values.into_iter().map(S::widen).collect();
    let mut arena = Arena::builder(device).capacity(Capacity::mib(128)).build().unwrap();
    arena
        .step(|step| {
            step.set_precision(precision);
            let form = inputs.form(|mask, shape| step.upload(mask, shape))?;
            let qkv = step.upload(&narrow::<S>(&inputs.qkv), inputs.setup.shape())?;
            let dout = step.upload(&narrow::<S>(&inputs.dout), [batch, tokens, heads[0] * width])?;
            let made = ops::attention(step, &qkv, None, &form)?;
            let AttentionKept::Flash { lse, normal: None } = made.kept else { panic!("{:?}", made.kept) };
            let none = None::<(QkNorm<'_, '_>, &mut Tensor<'_>, bool)>;
            let dqkv = ops::launch::attention_backward(step, &qkv, none, &form, &made, &dout)?;
            Ok([widen(step.read(&made.out)?), step.read(&lse)?, widen(step.read(&dqkv)?)])
        })
        .unwrap()
}

/// The float64 results of a query.
struct Row {
    lse: f64,
    out: Vec<f64>,
    /// The possible effect of roundings on each element of `out`, in units of one rounding.
    roundings: Vec<f64>,
}

impl Row {
    /// Returns `None` for a token that attends to no key.
    fn of(inputs: &Inputs, [sample, head]: [usize; 2], token: usize) -> Option<Self> {
        let (setup, width) = (inputs.setup, inputs.setup.width);
        let row = |part, token| &inputs.qkv[setup.place(part, sample, token, head)..][..width];
        let keys = (0..setup.tokens).filter(|&j| inputs.sees(sample, token, j));
        let scores: Vec<_> = keys.map(|j| (j, f64::from(setup.scale()) * dot(row(0, token), row(1, j)))).collect();
        let lse = scores.iter().map(|(_, score)| score.exp()).sum::<f64>().ln();
        let [mut out, mut sizes, mut squares] = [(); 3].map(|()| vec![0.0; width]);
        for (j, score) in &scores {
            let weight = (score - lse).exp();
            for (column, &v) in row(2, *j).iter().enumerate() {
                let part = weight * f64::from(v);
                out[column] += part;
                sizes[column] += part.abs();
                squares[column] += part * part;
            }
        }
        let of_sum = sizes.iter().zip(&squares).map(|(size, square)| size.min(2.0 * square.sqrt()));
        let roundings = out.iter().zip(of_sum).map(|(out, of_sum)| out.abs() + of_sum).collect();
        (!scores.is_empty()).then_some(Self { lse, out, roundings })
    }
}

/// Returns an error unless the rows of the compared tokens are within the bounds. Each head has its
/// own keys.
fn compare(inputs: &Inputs, [out, lse, dqkv]: &Results<f32>, bounds: Bounds) -> Result<(), String> {
    let setup = inputs.setup;
    let Setup { tokens, width, .. } = setup;
    let scale = f64::from(setup.scale());
    let mut seen = [(); 4].map(|()| (Vec::new(), Vec::new(), Vec::new()));
    // True if no compared token attends to another, and none attends to it.
    let mut alone = true;
    for [sample, head, kv_head] in setup.each_head() {
        assert_eq!(head, kv_head);
        let place = |part, token| setup.place(part, sample, token, head);
        let row = |part, token| &inputs.qkv[place(part, token)..][..width];
        let at = |token| setup.output(sample, token, head);
        let (of_out, dout) = (|token| &out[at(token)..][..width], |token| &inputs.dout[at(token)..][..width]);
        let lse = |token| f64::from(lse[setup.statistic(sample, token, head)]);
        let score = |i, j| scale * dot(row(0, i), row(1, j));
        let p = |i, j| f64::exp(score(i, j) - lse(i));
        let ds = |i, j| p(i, j) * (dot(dout(i), row(2, j)) - dot(dout(i), of_out(i))) * scale;
        for token in compared(tokens) {
            let got =
                [of_out(token), &dqkv[place(0, token)..][..width], &dqkv[place(1, token)..], &dqkv[place(2, token)..]];
            let got = got.map(|row| &row[..width]);
            let Some(exact) = Row::of(inputs, [sample, head], token) else {
                let nothing = lse(token) == f64::NEG_INFINITY && got.iter().all(|row| row.iter().all(|&x| x == 0.0));
                nothing
                    .then_some(())
                    .ok_or(format!("token {token} attends to no key, but its results are not zero"))?;
                continue;
            };
            let error = (lse(token) - exact.lse).abs() / exact.lse.abs().max(1.0);
            within(format_args!("lse of token {token}"), error, bounds.lse)?;
            for (column, (&got, &want)) in got[0].iter().zip(&exact.out).enumerate() {
                if let Some([rounding, besides]) = bounds.element {
                    let limit = rounding * exact.roundings[column] + besides;
                    within(format_args!("out {column} of token {token}"), (f64::from(got) - want).abs(), limit)?;
                }
            }
            alone &= (0..tokens).all(|other| {
                other == token || !inputs.sees(sample, token, other) && !inputs.sees(sample, other, token)
            });
            let [mut dq, mut dk, mut dv] = [(); 3].map(|()| vec![0.0; width]);
            for j in (0..tokens).filter(|&j| inputs.sees(sample, token, j)) {
                let ds = ds(token, j);
                dq.iter_mut().zip(row(1, j)).for_each(|(dq, &k)| *dq += ds * f64::from(k));
            }
            for i in (0..tokens).filter(|&i| inputs.sees(sample, i, token)) {
                let (weight, ds) = (p(i, token), ds(i, token));
                dk.iter_mut().zip(row(0, i)).for_each(|(dk, &q)| *dk += ds * f64::from(q));
                dv.iter_mut().zip(dout(i)).for_each(|(dv, &dout)| *dv += weight * f64::from(dout));
            }
            // The contributions of a token to itself: the two parts of ds.
            let alone = 2.0 * p(token, token) * dot(dout(token), row(2, token)) * scale;
            let parts = [None, Some(row(1, token)), Some(row(0, token)), None];
            for (((seen, got), want), part) in seen.iter_mut().zip(got).zip([exact.out, dq, dk, dv]).zip(parts) {
                seen.0.extend_from_slice(got);
                seen.1.extend(want);
                seen.2.extend(part.into_iter().flatten().map(|&x| alone * f64::from(x)));
            }
        }
    }
    let limits = [bounds.out, bounds.gradients, bounds.gradients, bounds.gradients];
    for ((what, limit), (got, want, parts)) in ["out", "dq", "dk", "dv"].into_iter().zip(limits).zip(seen) {
        // A token that attends only to itself has the gradient 0. The difference of the parts is
        // measured against their norm.
        let error = if alone && !parts.is_empty() {
            let differences = got.iter().zip(&want).map(|(&got, want)| f64::from(got) - want);
            norm(differences) / norm(parts.into_iter())
        } else {
            relative_l2(&got, &want)
        };
        within(format_args!("{what}"), error, limit)?;
    }
    Ok(())
}

fn norm(values: impl Iterator<Item = f64>) -> f64 {
    values.map(|x| x * x).sum::<f64>().sqrt()
}

fn dot(a: &[f32], b: &[f32]) -> f64 {
    a.iter().zip(b).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum()
}

fn within(what: std::fmt::Arguments<'_>, error: f64, limit: f64) -> Result<(), String> {
    if error <= limit { Ok(()) } else { Err(format!("{what}: {error:.2e} > {limit:.2e}")) }
}

/// Checks that the results are within their bounds, and that they are not if the element with the
/// least rounding error is 1 % off.
fn check<S: AttentionElement>(device: &Device, setup: Setup, precision: Precision, bounds: fn(Setup) -> Bounds) {
    let inputs = inputs::<S>(setup);
    let mut results = results::<S>(&inputs, device, precision);
    compare(&inputs, &results, bounds(setup)).unwrap_or_else(|reason| panic!("{setup:?}: {reason}"));
    let middle = inputs.length(0) / 2;
    let Row { out, roundings, .. } = Row::of(&inputs, [0; 2], middle).expect("a token that exists");
    let share = |column: &usize| roundings[*column] / out[*column].abs();
    let column = (0..setup.width).min_by(|a, b| share(a).total_cmp(&share(b))).expect("a column");
    results[0][setup.output(0, middle, 0) + column] = 1.01 * out[column] as f32;
    let planted = compare(&inputs, &results, bounds(setup));
    assert!(planted.as_ref().is_err_and(|cause| cause.starts_with("out")), "{setup:?}, 1 % off: {planted:?}");
}

/// True if the emulator is to run a setup. With many tokens it takes minutes: each mask runs with
/// the narrowest heads, and each width with the window, which skips most tiles. Setups for matrix
/// instructions take twenty times as long. A GPU runs all.
fn is_quick(setup: Setup, by_tensor_cores: bool) -> bool {
    let (narrow, windowed) = (setup.width == WIDTHS[0], matches!(setup.sees, AttentionMask::SlidingWindow(_)));
    match (setup.tokens, by_tensor_cores) {
        (..1000, _) | (1000, false) => true,
        (1000, true) | (_, false) => narrow || windowed,
        (_, true) => (narrow && setup.sees == AttentionMask::Causal) || (windowed && setup.width <= 64),
    }
}

/// Checks every mask with every head width in BF16, for each number of tokens.
pub(crate) fn check_bf16(device: &Device, tokens: [usize; 2]) {
    for setup in tokens.into_iter().flat_map(|tokens| WIDTHS.into_iter().flat_map(move |width| setups(tokens, width))) {
        check::<bf16>(device, setup, Precision::F32, Bounds::of_bf16);
    }
}

fn check_all(device: &Device, tokens: usize) {
    let on_gpu = device.description().kind == DeviceKind::Cuda;
    for setup in WIDTHS.into_iter().flat_map(|width| setups(tokens, width)) {
        if on_gpu || is_quick(setup, false) {
            check::<f32>(device, setup, Precision::F32, Bounds::of_f32);
        }
        if on_gpu || is_quick(setup, true) {
            check::<f32>(device, setup, Precision::Tf32, Bounds::of_tf32);
            check::<bf16>(device, setup, Precision::F32, Bounds::of_bf16);
        }
    }
}

on_each_device! {
    fn over_few_tokens(device: &Device) {
        [1, 17, 64].into_iter().for_each(|tokens| check_all(device, tokens));
    }

    fn over_1000_tokens(device: &Device) {
        check_all(device, 1000);
    }

    fn over_4096_tokens(device: &Device) {
        check_all(device, 4096);
    }
}
