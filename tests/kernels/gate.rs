//! Tests of `ops::{relu, sigmoid, silu, gelu_exact, swiglu}` and their backward passes.

use crate::gradients::{Case, Roundings, SEEDS, extents, leaf_as, normal, stored_as_each};
use crate::hostile::attack;
use crate::reference::{self, ulps};
use crate::shapes::{LENGTHS, ROWS};
use crate::support::{Random, on_each_device, sample};
use crate::tolerance::{Closeness, Exact};
use crate::trial::{assert_refused, assert_same, trial};
use kernels::math;
use stepscope::{Device, Result, Step, Tensor, ops};

type Unary = for<'s> fn(&Step<'s>, &Tensor<'s>) -> Result<Tensor<'s>>;
type Backward = for<'s> fn(&Step<'s>, &Tensor<'s>, &Tensor<'s>) -> Result<Tensor<'s>>;

fn forward(device: &Device, op: Unary, x: &[f32]) -> Vec<f32> {
    trial(device, |trial| {
        let x = trial.upload(x, [x.len()])?;
        trial.output(&op(trial, &x)?)
    })
}

fn backward(device: &Device, op: Backward, kept: &[f32], dy: &[f32]) -> Vec<f32> {
    trial(device, |trial| {
        let (kept, dy) = (trial.upload(kept, [kept.len()])?, trial.upload(dy, [dy.len()])?);
        trial.output(&op(trial, &kept, &dy)?)
    })
}

/// Checks the bits against the scalar function, over all magnitudes and every length. `math.rs` and
/// `scalars.rs` compare that function with float64.
fn check(device: &Device, op: Unary, scalar: fn(f32) -> f32) {
    let mut inputs = vec![sample(31, -15.0, 15.0)];
    inputs.extend(LENGTHS.map(|length| Random::new(length as u64).normals(length)));
    for x in inputs {
        let want: Vec<f32> = x.iter().map(|&x| scalar(x)).collect();
        assert_same(x.len(), &forward(device, op, &x), &want);
    }
}

/// Checks that `op` is as close to `dy` times the derivative as the derivative's error allows, over
/// every length.
fn check_backward(device: &Device, name: &'static str, op: Backward, derivative: fn(f32) -> Exact) {
    let mut closeness = Closeness::new(name);
    for length in LENGTHS {
        let mut random = Random::new(length as u64);
        let (kept, dy) = (random.uniforms(length, -6.0, 6.0), random.normals(length));
        let want: Vec<Exact> = kept.iter().zip(&dy).map(|(&x, &dy)| Exact::given(dy) * derivative(x)).collect();
        closeness.check(length, &backward(device, op, &kept, &dy), &want);
    }
    closeness.finish();
}

/// Returns a function's value with an error of this many units in the last place.
fn of(value: f64, ulps: f64) -> Exact {
    Exact { value, error: 2.0 * ulps * value.abs() }
}

fn sigmoid(x: f32) -> Exact {
    of(reference::sigmoid(f64::from(x)), ulps::SIGMOID)
}

fn silu(x: f32) -> Exact {
    of(reference::silu(f64::from(x)), ulps::SILU)
}

/// Computes s + x s (1 - s).
fn silu_derivative(x: f32) -> Exact {
    let fused = (Exact::given(x) * sigmoid(x)).times(sigmoid(-x));
    fused + sigmoid(x)
}

/// Computes the Gaussian distribution function at x plus x times the density. At -|x| this is
/// e^(-x^2 / 2) times the difference of the distribution's other factor and |x| / sqrt(2 pi).
fn gelu_exact_derivative(x: f32) -> Exact {
    let size = f64::from(x.abs());
    let exp = of((-0.5 * size * size).exp(), ulps::EXP);
    let share = of(0.5 * libm::erfc(size / 2f64.sqrt()) / exp.value, ulps::GELU_EXACT);
    let density = of(size / (2.0 * std::f64::consts::PI).sqrt(), 0.25);
    let below = exp * (share - density);
    if x < 0.0 { below } else { Exact::given(1.0) - below }
}

fn rectified(x: f32) -> f32 {
    if x <= 0.0 { 0.0 } else { x }
}

on_each_device! {
    fn forward_by_function(device: &Device) {
        check(device, |step, x| ops::relu(step, x), rectified);
        check(device, |step, x| ops::sigmoid(step, x), math::sigmoid);
        check(device, |step, x| ops::silu(step, x), math::silu);
        check(device, |step, x| ops::gelu_exact(step, x), math::gelu_exact);
    }

    fn relu_backward(device: &Device) {
        let y = [0.0, -0.0, 3.0, f32::NAN, f32::INFINITY, 1e-45];
        let got = backward(device, |step, y, dy| ops::launch::relu_backward(step, y, dy), &y, &[2.0, 2.0, 2.0, 2.0, -2.0, 5.0]);
        assert_same("relu", &got, &[0.0, 0.0, 2.0, 2.0, -2.0, 5.0]);
    }

    fn sigmoid_backward(device: &Device) {
        let op: Backward = |step, y, dy| ops::launch::sigmoid_backward(step, y, dy);
        check_backward(device, "sigmoid backward", op, |y| {
            let y = Exact::given(y);
            y - y.times(y)
        });
    }

    fn silu_backward(device: &Device) {
        check_backward(device, "silu backward", |step, x, dy| ops::launch::silu_backward(step, x, dy), silu_derivative);
        let far = [f32::INFINITY, -f32::INFINITY, 3e38, -3e38, f32::NAN];
        let got = backward(device, |step, x, dy| ops::launch::silu_backward(step, x, dy), &far, &[1.0; 5]);
        assert_same("silu", &got, &[1.0, 0.0, 1.0, 0.0, f32::NAN]);
    }

    fn gelu_exact_backward(device: &Device) {
        let op: Backward = |step, x, dy| ops::launch::gelu_exact_backward(step, x, dy);
        check_backward(device, "exact gelu backward", op, gelu_exact_derivative);
        let x = sample(32, -15.0, 15.0);
        let got = backward(device, op, &x, &vec![1.0; x.len()]);
        assert_same("dy = 1", &got, &x.iter().map(|&x| math::gelu_exact_derivative(x)).collect::<Vec<_>>());
    }

    /// Tests two tensors and one combined tensor, forward and backward.
    fn swiglu(device: &Device) {
        let (mut values, mut gradients) = (Closeness::new("swiglu"), Closeness::new("swiglu backward"));
        for shape @ [rows, cols] in ROWS {
            let mut random = Random::new(cols as u64);
            let [gate, up, dy] = [(); 3].map(|()| random.normals(rows * cols));
            let packed: Vec<f32> = (0..rows)
                .flat_map(|row| [&gate[row * cols..][..cols], &up[row * cols..][..cols]].concat())
                .collect();
            let [y, dgate, dup] = trial(device, |trial| {
                let (gate, up, dy) = (trial.upload(&gate, shape)?, trial.upload(&up, shape)?, trial.upload(&dy, shape)?);
                let y = ops::swiglu(trial, &gate, &up)?;
                let [dgate, dup] = ops::launch::swiglu_backward(trial, &gate, &up, &dy)?;
                Ok([trial.output(&y)?, trial.output(&dgate)?, trial.output(&dup)?])
            });
            let [one, dx] = trial(device, |trial| {
                let (x, dy) = (trial.upload(&packed, [rows, 2 * cols])?, trial.upload(&dy, shape)?);
                let (y, dx) = (ops::swiglu_packed(trial, &x)?, ops::launch::swiglu_packed_backward(trial, &x, &dy)?);
                assert_eq!(y.shape().extents(), shape);
                Ok([trial.output(&y)?, trial.output(&dx)?])
            });
            assert_same(format_args!("{shape:?}"), &one, &y);
            let both = (0..rows).flat_map(|row| [&dgate[row * cols..][..cols], &dup[row * cols..][..cols]].concat());
            assert_same(format_args!("{shape:?}"), &dx, &both.collect::<Vec<_>>());
            let each = |f: &dyn Fn([f32; 3]) -> Exact| -> Vec<Exact> {
                (0..rows * cols).map(|at| f([gate[at], up[at], dy[at]])).collect()
            };
            values.check(format_args!("{shape:?}"), &y, &each(&|[gate, up, _]| silu(gate) * Exact::given(up)));
            let of_gate = each(&|[gate, up, dy]| Exact::given(dy) * Exact::given(up) * silu_derivative(gate));
            gradients.check(format_args!("{shape:?}, gate"), &dgate, &of_gate);
            gradients.check(format_args!("{shape:?}, up"), &dup, &each(&|[gate, _, dy]| Exact::given(dy) * silu(gate)));
        }
        values.finish();
        gradients.finish();
    }

    fn shapes_must_agree(device: &Device) {
        trial(device, |trial| {
            let (a, b) = (trial.upload(&[1.0; 6], [2, 3])?, trial.upload(&[1.0; 6], [6])?);
            assert_refused(ops::swiglu(trial, &a, &b), &["swiglu", "[2, 3]", "[6]"]);
            assert_refused(ops::launch::swiglu_backward(trial, &a, &a, &b), &["swiglu_backward", "[2, 3]", "[6]"]);
            assert_refused(ops::swiglu_packed(trial, &a), &["swiglu_packed", "two equal halves", "[2, 3]"]);
            assert_refused(ops::launch::swiglu_packed_backward(trial, &b, &a), &["swiglu_packed_backward", "[3]", "[2, 3]"]);
            Ok(())
        });
    }
}

stored_as_each! {
    fn gradient<S>(device: &Device) {
        for seed in SEEDS {
            let mut random = Random::new(seed);
            let shape @ [a, b, cols] = extents(&mut random, seed, [7, 5, 13]);
            let values = vec![normal(&mut random, &shape)];
            let each = |p: &[Vec<f64>], f: fn(f64) -> f64| p[0].iter().map(|&x| f(x)).collect::<Vec<f64>>();
            let case = |name, roundings| Case::new(name, seed, 1, values.clone()).stored_as::<S>(roundings);
            let once = Roundings::ONCE;
            case("relu", once).check(device, |_, tape, p| leaf_as::<S>(tape, p[0])?.relu(), |p| each(p, |x| x.max(0.0)));
            // The derivative y (1 - y) uses the rounded output: it is off by up to y |1 - 2 y|
            // roundings.
            let kept = Roundings { kept: 1.0, ..once };
            case("sigmoid", kept).check(device, |_, tape, p| leaf_as::<S>(tape, p[0])?.sigmoid(), |p| each(p, reference::sigmoid));
            case("silu", once).check(device, |_, tape, p| leaf_as::<S>(tape, p[0])?.silu(), |p| each(p, reference::silu));
            case("gelu_exact", once)
                .check(device, |_, tape, p| leaf_as::<S>(tape, p[0])?.gelu_exact(), |p| each(p, reference::gelu_exact));
            let two = vec![normal(&mut random, &shape), normal(&mut random, &shape)];
            Case::new("swiglu", seed, 1, two).stored_as::<S>(once).check(device, |_, tape, p| {
                tape.swiglu(&leaf_as::<S>(tape, p[0])?, &leaf_as(tape, p[1])?)
            }, |p| p[0].iter().zip(&p[1]).map(|(&gate, up)| reference::silu(gate) * up).collect());
            let packed = vec![normal(&mut random, &[a, b, 2 * cols])];
            Case::new("swiglu_packed", seed, 1, packed).stored_as::<S>(once).check(device, |_, tape, p| {
                tape.swiglu_packed(&leaf_as::<S>(tape, p[0])?)
            }, |p| {
                let row = |x: &[f64]| (0..cols).map(|at| reference::silu(x[at]) * x[cols + at]).collect::<Vec<_>>();
                p[0].chunks_exact(2 * cols).flat_map(row).collect()
            });
        }
    }
}

attack! {
    gate::swiglu_forward<S> { gate: stored 24, up: stored 24, cols: number 8, length: number 24, y: out_stored 24 }
    gate::swiglu_backward<S> {
        gate: stored 24, up: stored 24, dy: stored 24, cols: number 8, dgate: out_stored 24, dup: out_stored 24,
    }
}
