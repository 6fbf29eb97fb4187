//! Tests of `ops::{softmax, log_softmax}` and their backward passes.

use crate::gradients::{Case, Roundings, SEEDS, extents, leaf_as, normal, stored_as_each};
use crate::shapes::ROWS;
use crate::support::{Random, on_each_device};
use crate::tolerance::{Closeness, Exact};
use crate::trees;
use crate::trial::{assert_same, trial};
use stepscope::{Device, ops};

/// Returns the softmax of one row.
pub(crate) fn softmax(x: &[f32]) -> Vec<Exact> {
    let exps = exps(x);
    let inverse = Exact::given(1.0) / Exact::sum(trees::row_depth(x.len()), exps.iter().copied());
    exps.into_iter().map(|exp| exp * inverse).collect()
}

/// Returns `exp(x - max)` of one row.
pub(crate) fn exps(x: &[f32]) -> Vec<Exact> {
    let largest = Exact::given(x.iter().copied().fold(f32::NEG_INFINITY, f32::max));
    x.iter().map(|&x| (Exact::given(x) - largest).exp()).collect()
}

fn forward(device: &Device, x: &[f32], shape: [usize; 2]) -> Vec<f32> {
    trial(device, |trial| {
        let x = trial.upload(x, shape)?;
        trial.output(&ops::softmax(trial, &x)?)
    })
}

/// Returns the softmax of one row in float64.
pub(crate) fn in_float64(x: &[f64]) -> Vec<f64> {
    let largest = x.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let exps: Vec<f64> = x.iter().map(|x| (x - largest).exp()).collect();
    let sum: f64 = exps.iter().sum();
    exps.iter().map(|exp| exp / sum).collect()
}

on_each_device! {
    fn softmax_forward(device: &Device) {
        let mut closeness = Closeness::new("softmax");
        for [rows, cols] in ROWS {
            for spread in [1.0, 40.0] {
                let x: Vec<f32> = Random::new(cols as u64).normals(rows * cols).iter().map(|x| x * spread).collect();
                let got = forward(device, &x, [rows, cols]);
                let want: Vec<Exact> = x.chunks_exact(cols).flat_map(softmax).collect();
                closeness.check(format_args!("{rows} x {cols}, spread {spread}"), &got, &want);
            }
        }
        closeness.finish();
    }

    fn special_rows(device: &Device) {
        let (none, all) = (f32::NEG_INFINITY, f32::INFINITY);
        let x =
            [[none, none, none], [1.0, f32::NAN, 2.0], [all, 0.0, 1.0], [none, 5.0, none], [f32::MAX, f32::MIN, 0.0]];
        let nan = [f32::NAN; 3];
        let want = [nan, nan, nan, [0.0, 1.0, 0.0], [1.0, 0.0, 0.0]].concat();
        assert_same("special rows", &forward(device, &x.concat(), [5, 3]), &want);
    }

    /// A row has the same bits at every place.
    fn rows_are_independent(device: &Device) {
        for cols in [3, 64, 193, 600] {
            let x = Random::new(5).normals(17 * cols);
            let whole = forward(device, &x, [17, cols]);
            for row in [0, 8, 16] {
                let alone = forward(device, &x[row * cols..][..cols], [1, cols]);
                assert_same(format_args!("row {row} of {cols}"), &alone, &whole[row * cols..][..cols]);
            }
        }
    }

    fn softmax_backward(device: &Device) {
        let mut closeness = Closeness::new("softmax backward");
        for [rows, cols] in ROWS {
            let mut random = Random::new(cols as u64);
            let dy = random.normals(rows * cols);
            let y: Vec<f32> =
                random.normals(rows * cols).chunks_exact(cols).flat_map(softmax).map(|y| y.value as f32).collect();
            let got = trial(device, |trial| {
                let (y, dy) = (trial.upload(&y, [rows, cols])?, trial.upload(&dy, [rows, cols])?);
                trial.output(&ops::launch::softmax_backward(trial, &y, &dy)?)
            });
            let want: Vec<Exact> =
                y.chunks_exact(cols).zip(dy.chunks_exact(cols)).flat_map(|(y, dy)| backward(y, dy)).collect();
            closeness.check(format_args!("{rows} x {cols}"), &got, &want);
        }
        closeness.finish();
    }

    fn log_softmax(device: &Device) {
        let (mut values, mut gradients) = (Closeness::new("log-softmax"), Closeness::new("log-softmax backward"));
        for shape @ [rows, cols] in ROWS {
            for spread in [1.0, 40.0] {
                let mut random = Random::new(cols as u64);
                let x: Vec<f32> = random.normals(rows * cols).iter().map(|x| x * spread).collect();
                let dy = random.normals(rows * cols);
                let [y, dx] = trial(device, |trial| {
                    let (x, dy) = (trial.upload(&x, shape)?, trial.upload(&dy, shape)?);
                    let y = ops::log_softmax(trial, &x)?;
                    let dx = ops::launch::log_softmax_backward(trial, &y, &dy)?;
                    Ok([trial.output(&y)?, trial.output(&dx)?])
                });
                let what = format!("{rows} x {cols}, spread {spread}");
                let row = |x: &[f32]| {
                    let largest = Exact::given(x.iter().copied().fold(f32::NEG_INFINITY, f32::max));
                    let log = Exact::sum(trees::row_depth(cols), exps(x)).ln();
                    x.iter().map(|&x| Exact::given(x) - largest - log).collect::<Vec<_>>()
                };
                values.check(&what, &y, &x.chunks_exact(cols).flat_map(row).collect::<Vec<_>>());
                let row = |(y, dy): (&[f32], &[f32])| {
                    let sum = Exact::sum(trees::row_depth(cols), dy.iter().map(|&dy| Exact::given(dy)));
                    let each = |(&y, &dy): (&f32, &f32)| Exact::given(dy) - Exact::given(y).exp().times(sum);
                    y.iter().zip(dy).map(each).collect::<Vec<_>>()
                };
                let want: Vec<Exact> = y.chunks_exact(cols).zip(dy.chunks_exact(cols)).flat_map(row).collect();
                gradients.check(&what, &dx, &want);
            }
        }
        values.finish();
        gradients.finish();
    }

    fn log_softmax_of_special_rows(device: &Device) {
        let (none, all) = (f32::NEG_INFINITY, f32::INFINITY);
        let x = [[none, none, none], [1.0, f32::NAN, 2.0], [all, 0.0, 1.0], [none, 5.0, none], [f32::MAX, f32::MIN, 0.0]];
        let nan = [f32::NAN; 3];
        let want = [nan, nan, nan, [none, 0.0, none], [0.0, none, f32::MIN]].concat();
        let got = trial(device, |trial| trial.output(&ops::log_softmax(trial, &trial.upload(&x.concat(), [5, 3])?)?));
        assert_same("special rows", &got, &want);
    }
}

stored_as_each! {
    fn gradient<S>(device: &Device) {
        for seed in SEEDS {
            let mut random = Random::new(seed);
            let [a, b, cols] = extents(&mut random, seed, [3, 5, 301]);
            // The softmax of one number has no gradient.
            let cols = cols + 1;
            // Both y in y (dy - sum y dy) are off by a rounding: the first by one rounding of the
            // result.
            let kept = Roundings { forward: 1.0, backward: 2.0, kept: 1.0 };
            let values = vec![normal(&mut random, &[a, b, cols])];
            Case::new("softmax", seed, cols, values).stored_as::<S>(kept).check(device, |_, tape, p| leaf_as::<S>(tape, p[0])?.softmax(), |p| {
                p[0].chunks_exact(cols).flat_map(in_float64).collect()
            });
        }
    }

    fn gradient_of_log_softmax<S>(device: &Device) {
        for seed in SEEDS {
            let mut random = Random::new(seed);
            let [a, b, cols] = extents(&mut random, seed, [2, 3, 41]);
            let cols = cols + 1;
            // In dy - exp(y) sum dy, the exponential is off by up to |y| roundings of itself. The
            // whole is off by up to the root of the columns.
            let kept = Roundings { kept: (cols as f64).sqrt(), ..Roundings::ONCE };
            let values = vec![normal(&mut random, &[a, b, cols])];
            Case::new("log_softmax", seed, cols, values).stored_as::<S>(kept).check(device, |_, tape, p| leaf_as::<S>(tape, p[0])?.log_softmax(), |p| {
                p[0].chunks_exact(cols).flat_map(in_float64).map(f64::ln).collect()
            });
        }
    }
}

/// Computes `y (dy - sum y dy)` for one row.
fn backward(y: &[f32], dy: &[f32]) -> Vec<Exact> {
    let pairs = || y.iter().zip(dy).map(|(&y, &dy)| (Exact::given(y), Exact::given(dy)));
    let dot = Exact::sum(trees::row_depth(y.len()), pairs().map(|(y, dy)| y.times(dy)));
    pairs().map(|(y, dy)| y * (dy - dot)).collect()
}
