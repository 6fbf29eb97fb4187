//! Tests of `ops::{tanh, gelu, relu_squared, softplus}` and their backward passes.

use crate::gradients::{Case, Roundings, SEEDS, extents, leaf_as, normal, stored_as_each};
use crate::hostile::attack;
use crate::reference::{gelu, gelu_derivative, sigmoid, ulps};
use crate::shapes::{LENGTHS, ROWS};
use crate::support::{Random, on_each_device, sample};
use crate::tolerance::Closeness;
use crate::trees;
use crate::trial::{assert_refused, assert_same, trial};
use kernels::block::{BLOCK_ELEMENTS, has_two_rounds};
use kernels::{activation, math};
use stepscope::{Device, Result, Step, Tensor, ops};

type Unary = for<'s> fn(&Step<'s>, &Tensor<'s>) -> Result<Tensor<'s>>;
type Backward = for<'s> fn(&Step<'s>, &Tensor<'s>, &Tensor<'s>) -> Result<Tensor<'s>>;

fn forward(device: &Device, op: Unary, x: &[f32]) -> Vec<f32> {
    trial(device, |trial| {
        let x = trial.upload(x, [x.len()])?;
        let y = op(trial, &x)?;
        assert_eq!(y.shape(), x.shape());
        trial.output(&y)
    })
}

fn backward(device: &Device, op: Backward, x: &[f32], dy: &[f32]) -> Vec<f32> {
    trial(device, |trial| {
        let (x, dy) = (trial.upload(x, [x.len()])?, trial.upload(dy, [dy.len()])?);
        let dx = op(trial, &x, &dy)?;
        assert_eq!(dx.shape(), x.shape());
        trial.output(&dx)
    })
}

/// Checks that `op` is within `limit` ulp of `reference` and has the bits of `scalar`, over all
/// magnitudes and every length.
fn check(
    device: &Device,
    (name, limit): (&'static str, f64),
    op: Unary,
    scalar: fn(f32) -> f32,
    reference: fn(f64) -> f64,
) {
    let mut closeness = Closeness::new(name);
    let mut inputs = vec![sample(31, -12.5, 10.0)];
    inputs.extend(LENGTHS.map(|length| Random::new(length as u64).normals(length)));
    for x in inputs {
        let got = forward(device, op, &x);
        let want: Vec<f64> = x.iter().map(|&x| reference(f64::from(x))).collect();
        closeness.check_ulps(limit, x.len(), &got, &want);
        assert_same(x.len(), &got, &x.iter().map(|&x| scalar(x)).collect::<Vec<_>>());
    }
    closeness.finish();
}

/// Checks that `op` is within `ulps` of `reference(x, dy)`, over every length.
fn check_backward(device: &Device, name: &'static str, op: Backward, ulps: f64, reference: fn(f64, f64) -> f64) {
    let mut closeness = Closeness::new(name);
    for length in LENGTHS {
        let mut random = Random::new(length as u64);
        let (x, dy) = (random.uniforms(length, -1.0, 1.0), random.normals(length));
        let got = backward(device, op, &x, &dy);
        let want: Vec<f64> = x.iter().zip(&dy).map(|(&x, &dy)| reference(f64::from(x), f64::from(dy))).collect();
        closeness.check_ulps(ulps, length, &got, &want);
    }
    closeness.finish();
}

/// Returns log(1 + e^x).
fn softplus(x: f64) -> f64 {
    x.max(0.0) + libm::log1p((-x.abs()).exp())
}

on_each_device! {
    fn tanh_forward(device: &Device) {
        check(device, ("tanh", ulps::TANH), |step, x| ops::tanh(step, x), math::tanh, f64::tanh);
    }

    fn tanh_backward(device: &Device) {
        let op: Backward = |step, y, dy| ops::launch::tanh_backward(step, y, dy);
        check_backward(device, "tanh backward", op, 2.0, |y, dy| dy * (1.0 - y * y));
        let special =
            backward(device, op, &[1.0, -1.0, 0.0, -0.0, f32::NAN, 0.5], &[2.0, 2.0, 2.0, 2.0, 2.0, f32::INFINITY]);
        assert_same("special", &special, &[0.0, 0.0, 2.0, 2.0, f32::NAN, f32::INFINITY]);
    }

    fn gelu_forward(device: &Device) {
        check(device, ("gelu", ulps::GELU), |step, x| ops::gelu(step, x), math::gelu, gelu);
    }

    /// A thread has two rounds of an array of this length, which ends within a round.
    fn long_arrays(device: &Device) {
        let length = 2 * 2048 * BLOCK_ELEMENTS + BLOCK_ELEMENTS + 5;
        assert!(has_two_rounds::<f32>(length) && !has_two_rounds::<f32>(length / 2));
        let x: Vec<f32> = (0..length).map(|at| (at % 4099) as f32 / 1024.0 - 2.0).collect();
        let got = forward(device, |step, x| ops::gelu(step, x), &x);
        assert_same(length, &got, &x.iter().map(|&x| math::gelu(x)).collect::<Vec<_>>());
    }

    fn gelu_backward(device: &Device) {
        let op: Backward = |step, x, dy| ops::launch::gelu_backward(step, x, dy);
        let x = sample(32, -12.5, 6.0);
        let got = backward(device, op, &x, &vec![1.0; x.len()]);
        assert_same("dy = 1", &got, &x.iter().map(|&x| math::gelu_derivative(x)).collect::<Vec<_>>());
        // A product's ulp can be half of its factor's in relative terms. Its own rounding comes on
        // top.
        check_backward(device, "gelu backward", op, 2.0 * ulps::GELU_DERIVATIVE + 0.5, |x, dy| dy * gelu_derivative(x));
    }

    fn relu_squared(device: &Device) {
        let mut inputs = LENGTHS.map(|length| Random::new(length as u64).normals(length)).to_vec();
        inputs.push(vec![0.0, -0.0, f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 2e19]);
        for x in inputs {
            let dy = Random::new(33).normals(x.len());
            let y = forward(device, |step, x| ops::relu_squared(step, x), &x);
            let dx = backward(device, |step, x, dy| ops::launch::relu_squared_backward(step, x, dy), &x, &dy);
            let values = x.iter().map(|&x| if x <= 0.0 { 0.0 } else { x * x });
            let gradients = x.iter().zip(&dy).map(|(&x, dy)| if x <= 0.0 { 0.0 } else { 2.0 * x * dy });
            assert_same(x.len(), &y, &values.collect::<Vec<_>>());
            assert_same(x.len(), &dx, &gradients.collect::<Vec<_>>());
        }
    }

    fn softplus_forward(device: &Device) {
        // An ulp of the exponential may be two of the result. The logarithm is within 1.7 ulp.
        let limit = 2.0 * ulps::EXP + 1.7;
        check(device, ("softplus", limit), |step, x| ops::softplus(step, x), activation::softplus, softplus);
    }

    fn softplus_backward(device: &Device) {
        let op: Backward = |step, x, dy| ops::launch::softplus_backward(step, x, dy);
        let x = sample(34, -12.5, 6.0);
        let got = backward(device, op, &x, &vec![1.0; x.len()]);
        assert_same("dy = 1", &got, &x.iter().map(|&x| math::sigmoid(x)).collect::<Vec<_>>());
        check_backward(device, "softplus backward", op, 2.0 * ulps::SIGMOID + 0.5, |x, dy| dy * sigmoid(x));
    }

    /// dx has the bits of [`ops::launch::gelu_backward`], and db is the sum of its rows in the
    /// documented order.
    fn gelu_bias_backward(device: &Device) {
        for [rows, cols] in ROWS {
            let mut random = Random::new(cols as u64);
            let (x, dy, old) = (random.normals(rows * cols), random.normals(rows * cols), random.normals(cols));
            let alone = backward(device, |step, x, dy| ops::launch::gelu_backward(step, x, dy), &x, &dy);
            let sums = trees::chunks(rows, cols, [128, 32], &|sum, index| sum + alone[index]);
            let added: Vec<f32> = old.iter().zip(&sums).map(|(old, sum)| old + sum).collect();
            for (accumulate, want) in [(false, &sums), (true, &added)] {
                let (dx, db) = trial(device, |trial| {
                    let (x, dy) = (trial.upload(&x, [rows, cols])?, trial.upload(&dy, [rows, cols])?);
                    let mut db = trial.upload(&old, [cols])?;
                    let dx = trial.with_scratch(|| ops::launch::gelu_bias_backward(trial, &x, &dy, &mut db, accumulate))?;
                    Ok((trial.output(&dx)?, trial.output(&db)?))
                });
                assert_same(format_args!("{rows} x {cols}"), &dx, &alone);
                assert_same(format_args!("{rows} x {cols}, bias"), &db, want);
            }
        }
    }

    fn shapes_must_agree(device: &Device) {
        trial(device, |trial| {
            let a = trial.upload(&[1.0; 6], [2, 3])?;
            let mut db = trial.upload(&[1.0; 2], [2])?;
            assert_refused(
                ops::launch::gelu_bias_backward(trial, &a, &a, &mut db, false),
                &["gelu_bias_backward", "[3]", "[2]"],
            );
            Ok(())
        });
    }
}

stored_as_each! {
    fn gradient_of_gelu<S>(device: &Device) {
        for seed in SEEDS {
            let mut random = Random::new(seed);
            let shape = extents(&mut random, seed, [7, 5, 13]);
            let values = vec![normal(&mut random, &shape)];
            Case::new("gelu", seed, 1, values).stored_as::<S>(Roundings::ONCE).check(device, |_, tape, p| leaf_as::<S>(tape, p[0])?.gelu(), |p| {
                p[0].iter().map(|&x| gelu(x)).collect()
            });
        }
    }

    fn gradient_of_relu_squared<S>(device: &Device) {
        for seed in SEEDS {
            let mut random = Random::new(seed);
            let shape = extents(&mut random, seed, [7, 5, 13]);
            let values = vec![normal(&mut random, &shape)];
            let case = Case::new("relu_squared", seed, 1, values).stored_as::<S>(Roundings::ONCE);
            case.check(device, |_, tape, p| leaf_as::<S>(tape, p[0])?.relu_squared(), |p| {
                p[0].iter().map(|x| x.max(0.0).powi(2)).collect()
            });
        }
    }

    fn gradient_of_softplus<S>(device: &Device) {
        for seed in SEEDS {
            let mut random = Random::new(seed);
            let shape = extents(&mut random, seed, [7, 5, 13]);
            let values = vec![normal(&mut random, &shape)];
            let case = Case::new("softplus", seed, 1, values).stored_as::<S>(Roundings::ONCE);
            case.check(device, |_, tape, p| leaf_as::<S>(tape, p[0])?.softplus(), |p| {
                p[0].iter().map(|&x| softplus(x)).collect()
            });
        }
    }

    fn gradient_of_tanh<S>(device: &Device) {
        for seed in SEEDS {
            let mut random = Random::new(seed);
            let shape = extents(&mut random, seed, [7, 5, 13]);
            let values = vec![normal(&mut random, &shape)];
            Case::new("tanh", seed, 1, values).stored_as::<S>(Roundings::TANH).check(device, |_, tape, p| leaf_as::<S>(tape, p[0])?.tanh(), |p| {
                p[0].iter().map(|x| x.tanh()).collect()
            });
        }
    }
}

attack! {
    activation::gelu_bias_backward<S> {
        x: stored 24, dy: stored 24, cols: number 8, accumulate: number 1, dx: out_stored 24, db: out 8,
    }
}
