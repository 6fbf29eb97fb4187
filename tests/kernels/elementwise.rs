//! Tests of `ops::{add, sub, mul, add_assign, scale, scale_by, add_bias}`.
//!
//! Each element takes one rounded operation. The float64 result rounded to f32 is the correctly
//! rounded one, so the bits are equal.

use crate::gradients::{Case, Roundings, SEEDS, extents, leaf, leaf_as, normal, stored_as_each};
use crate::hostile::attack;
use crate::shapes::{LENGTHS, ROWS};
use crate::support::{Random, SPECIAL, on_each_device};
use crate::trial::{assert_refused, assert_same, trial};
use stepscope::ops;

/// Returns two inputs of this length; the longer ones hold every pair of special numbers.
fn pairs(length: usize) -> (Vec<f32>, Vec<f32>) {
    let mut random = Random::new(length as u64);
    let (mut a, mut b) = (random.normals(length), random.normals(length));
    if length >= SPECIAL.len().pow(2) {
        for (at, place) in (length - SPECIAL.len().pow(2)..length).enumerate() {
            (a[place], b[place]) = (SPECIAL[at % SPECIAL.len()], SPECIAL[at / SPECIAL.len()]);
        }
    }
    (a, b)
}

fn rounded(a: &[f32], b: &[f32], op: impl Fn(f64, f64) -> f64) -> Vec<f32> {
    a.iter().zip(b).map(|(&a, &b)| op(f64::from(a), f64::from(b)) as f32).collect()
}

pub(crate) fn add_in_float64(a: &[f64], b: &[f64]) -> Vec<f64> {
    a.iter().zip(b).map(|(a, b)| a + b).collect()
}

on_each_device! {
    fn add(device: &Device) {
        for length in LENGTHS {
            let (a, b) = pairs(length);
            let got = trial(device, |trial| {
                let (a, b) = (trial.upload(&a, [length])?, trial.upload(&b, [length])?);
                trial.output(&ops::add(trial, &a, &b)?)
            });
            assert_same(length, &got, &rounded(&a, &b, |a, b| a + b));
        }
    }

    fn sub_and_mul(device: &Device) {
        for length in LENGTHS {
            let (a, b) = pairs(length);
            let [difference, product] = trial(device, |trial| {
                let (a, b) = (trial.upload(&a, [length])?, trial.upload(&b, [length])?);
                Ok([trial.output(&ops::sub(trial, &a, &b)?)?, trial.output(&ops::mul(trial, &a, &b)?)?])
            });
            assert_same(length, &difference, &rounded(&a, &b, |a, b| a - b));
            assert_same(length, &product, &rounded(&a, &b, |a, b| a * b));
        }
    }

    fn add_assign(device: &Device) {
        for length in LENGTHS {
            let (a, b) = pairs(length);
            let got = trial(device, |trial| {
                let (a, mut b) = (trial.upload(&a, [length])?, trial.upload(&b, [length])?);
                ops::add_assign(trial, &mut b, &a)?;
                trial.output(&b)
            });
            assert_same(length, &got, &rounded(&a, &b, |a, b| a + b));
        }
    }

    fn scale(device: &Device) {
        for (length, factor) in
            LENGTHS.into_iter().zip([-1.5, 0.1, 0.0, f32::INFINITY, 1e-40, 3.0, f32::NAN].into_iter().cycle())
        {
            let (x, _) = pairs(length);
            let got = trial(device, |trial| {
                let x = trial.upload(&x, [length])?;
                trial.output(&ops::scale(trial, &x, factor)?)
            });
            assert_same(
                format_args!("{length} by {factor}"),
                &got,
                &rounded(&x, &vec![factor; length], |x, factor| x * factor),
            );
        }
    }

    fn scale_by(device: &Device) {
        for (length, factor) in LENGTHS.into_iter().zip([-1.5, 0.1, f32::NAN].into_iter().cycle()) {
            let (x, _) = pairs(length);
            let got = trial(device, |trial| {
                let (x, factor) = (trial.upload(&x, [length])?, trial.upload(&[factor], [1])?);
                trial.output(&ops::scale_by(trial, &x, &factor)?)
            });
            assert_same(length, &got, &rounded(&x, &vec![factor; length], |x, factor| x * factor));
        }
    }

    /// One fused multiply-add, which differs from a product and a sum.
    fn scale_by_accumulates(device: &Device) {
        for length in LENGTHS {
            let (x, y) = pairs(length);
            let got = trial(device, |trial| {
                let (x, factor, mut y) =
                    (trial.upload(&x, [length])?, trial.upload(&[0.1], [1])?, trial.upload(&y, [length])?);
                ops::launch::scale_by_into(trial, &x, &factor, &mut y, true)?;
                trial.output(&y)
            });
            assert_same(length, &got, &rounded(&x, &y, |x, y| f64::from((x as f32).mul_add(0.1, y as f32))));
        }
    }

    fn add_bias(device: &Device) {
        for [rows, cols] in ROWS {
            let (x, bias) = (pairs(rows * cols).0, Random::new(cols as u64).normals(cols));
            let got = trial(device, |trial| {
                let (x, bias) = (trial.upload(&x, [rows, cols])?, trial.upload(&bias, [cols])?);
                trial.output(&ops::add_bias(trial, &x, &bias)?)
            });
            let everywhere = bias.repeat(rows);
            assert_same(format_args!("{rows} x {cols}"), &got, &rounded(&x, &everywhere, |x, bias| x + bias));
        }
    }

    fn shapes_must_agree(device: &Device) {
        trial(device, |trial| {
            let (a, mut b) = (trial.upload(&[1.0; 6], [2, 3])?, trial.upload(&[1.0; 6], [3, 2])?);
            assert_refused(ops::add_assign(trial, &mut b, &a), &["add_assign", "[2, 3]", "[3, 2]"]);
            let bias = trial.upload(&[1.0; 2], [2])?;
            assert_refused(ops::scale_by(trial, &a, &bias), &["scale_by", "[1]", "[2]"]);
            assert_refused(ops::add_bias(trial, &a, &bias), &["add_bias", "[3]", "[2]"]);
            Ok(())
        });
    }

    fn gradient_of_add(device: &Device) {
        for seed in SEEDS {
            let mut random = Random::new(seed);
            let shape = extents(&mut random, seed, [7, 5, 13]);
            let values = vec![normal(&mut random, &shape), normal(&mut random, &shape)];
            Case::new("add", seed, 1, values.clone()).check(device, |_, tape, p| {
                leaf(tape, p[0])?.add(leaf(tape, p[1])?)
            }, |p| add_in_float64(&p[0], &p[1]));
            // A variable added to itself, one that has a gradient already, and inputs, which need
            // none.
            Case::new("add twice", seed, 2, values).check(device, |step, tape, p| {
                let (a, b) = (leaf(tape, p[0])?, leaf(tape, p[1])?);
                let zero = tape.input(ops::fill(step, shape, 0.0)?);
                let twice = zero.add(a)?.add(a.add(zero)?)?;
                let y = a.add(b.tanh()?)?.add(twice.add(twice)?)?;
                y.add(zero.add(zero)?)
            }, |p| p[0].iter().zip(&p[1]).map(|(a, b)| 5.0 * a + b.tanh()).collect());
        }
    }

    fn gradient_of_sub_and_mul(device: &Device) {
        for seed in SEEDS {
            let mut random = Random::new(seed);
            let shape = extents(&mut random, seed, [7, 5, 13]);
            let values = vec![normal(&mut random, &shape), normal(&mut random, &shape)];
            // A variable with itself, and inputs, which need no gradient.
            Case::new("sub and mul", seed, 4, values).check(device, |_, tape, p| {
                let (a, b) = (leaf(tape, p[0])?, leaf(tape, p[1])?);
                let two = tape.input(ops::fill(tape.step(), shape, 2.0)?);
                let product = a.sub(b)?.mul(a.mul(two)?)?;
                product.mul(product)?.sub(two.sub(b.sub(two)?)?)
            }, |p| {
                let y = |(a, b): (&f64, &f64)| ((a - b) * 2.0 * a).powi(2) - (4.0 - b);
                p[0].iter().zip(&p[1]).map(y).collect()
            });
        }
    }
}

stored_as_each! {
    fn gradient_of_each<S>(device: &Device) {
        for seed in SEEDS {
            let mut random = Random::new(seed);
            let (shape, factor) = (extents(&mut random, seed, [7, 5, 13]), random.uniform(-2.0, 2.0));
            let values = vec![normal(&mut random, &shape), normal(&mut random, &shape)];
            let case = |name| Case::new(name, seed, 1, values.clone()).stored_as::<S>(Roundings::ONCE);
            let each = |p: &[Vec<f64>], f: fn(f64, f64) -> f64| p[0].iter().zip(&p[1]).map(|(&a, &b)| f(a, b)).collect::<Vec<f64>>();
            macro_rules! check {
                ($op:ident, $f:expr) => {
                    case(stringify!($op)).check(device, |_, tape, p| leaf_as::<S>(tape, p[0])?.$op(&leaf_as(tape, p[1])?), |p| each(p, $f));
                };
            }
            check!(add, |a, b| a + b);
            check!(sub, |a, b| a - b);
            check!(mul, |a, b| a * b);
            Case::new("scale", seed, 1, values[..1].to_vec()).stored_as::<S>(Roundings::ONCE).check(device, |_, tape, p| {
                leaf_as::<S>(tape, p[0])?.mul(factor)
            }, |p| p[0].iter().map(|x| f64::from(factor) * x).collect());
        }
    }
}

attack! {
    elementwise::add<S> { a: stored 9, b: stored 9, out: out_stored 9 }
    elementwise::sub<S> { a: stored 9, b: stored 9, out: out_stored 9 }
    elementwise::mul<S> { a: stored 9, b: stored 9, out: out_stored 9 }
    elementwise::add_assign<S> { a: stored 9, out: out_stored 9 }
    elementwise::scale<S> { x: stored 9, factor: float 2.0, out: out_stored 9 }
    elementwise::scale_by<S> { x: stored 9, factor: f32s 1, accumulate: number 1, out: out_stored 9 }
    elementwise::add_bias<S> { x: stored 24, bias: f32s 8, cols: number 8, out: out_stored 24 }
}
