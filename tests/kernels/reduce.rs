//! Tests of `ops::{sum, mean, scaled_sum, sum_columns, sum_rows, squared_norm, max, max_columns,
//! argmax_columns}`.
//!
//! Sums have the bits of the documented tree ([`crate::trees`]), which is close to the float64 sum.

use crate::gradients::{Case, Roundings, SEEDS, extents, leaf_as, normal, parameters_of, stored_as_each};
use crate::hostile::attack;
use crate::shapes::{LENGTHS, ROWS};
use crate::support::{Random, SPECIAL, on_each_device};
use crate::tolerance::{Closeness, Exact};
use crate::trees;
use crate::trial::{assert_refused, assert_same, trial};
use stepscope::{Arena, Capacity, Device, Gradients, Result, Step, Tape, Tensor, ops};

type Whole = for<'s> fn(&Step<'s>, &Tensor<'s>) -> Result<Tensor<'s>>;

/// Reduces all elements to `[1]`.
fn whole(device: &Device, op: Whole, x: &[f32]) -> f32 {
    trial(device, |trial| {
        let x = trial.upload(x, [x.len()])?;
        let total = trial.with_scratch(|| op(trial, &x))?;
        assert_eq!(total.shape().extents(), [1]);
        Ok(trial.output(&total)?[0])
    })
}

fn check_whole(device: &Device, name: &'static str, op: Whole, tree: fn(&[f32]) -> f32, exact: fn(&[f32]) -> Exact) {
    let mut closeness = Closeness::new(name);
    for length in LENGTHS.into_iter().filter(|&length| length > 0 || name != "mean") {
        for seed in 0..if length < 5000 { 12 } else { 2 } {
            let x = Random::new(seed).uniforms(length, -0.5 * (seed % 3) as f32, 1.0);
            let got = [whole(device, op, &x)];
            assert_same(length, &got, &[tree(&x)]);
            closeness.check(length, &got, &[exact(&x)]);
        }
    }
    closeness.finish();
}

fn given(x: &[f32]) -> impl Iterator<Item = Exact> {
    x.iter().copied().map(Exact::given)
}

fn exact_sum(x: &[f32]) -> Exact {
    Exact::sum(trees::all_depth(x.len()), given(x))
}

/// Compares `a` with `b`: a NaN is above all numbers, and zeros are equal.
fn above(a: f32, b: f32) -> bool {
    (a.is_nan() && !b.is_nan()) || a > b
}

/// Returns the place of the largest: the first of equals.
fn argmax(x: &[f32]) -> usize {
    (1..x.len()).fold(0, |best, at| if above(x[at], x[best]) { at } else { best })
}

on_each_device! {
    fn sum(device: &Device) {
        let tree: fn(&[f32]) -> f32 = |x| trees::all(x, &|sum, x| sum + x);
        check_whole(device, "sum", |step, x| ops::sum(step, x), tree, exact_sum);
    }

    fn scaled_sum(device: &Device) {
        // The factor is applied to a sum; without elements there is no sum.
        let tree: fn(&[f32]) -> f32 = |x| if x.is_empty() { 0.0 } else { trees::all(x, &|sum, x| sum + x) * -0.3 };
        let exact: fn(&[f32]) -> Exact = |x| exact_sum(x) * Exact::given(-0.3f32);
        check_whole(device, "scaled sum", |step, x| ops::scaled_sum(step, x, -0.3), tree, exact);
    }

    fn mean(device: &Device) {
        let tree: fn(&[f32]) -> f32 = |x| trees::all(x, &|sum, x| sum + x) * (1.0 / x.len() as f32);
        let exact: fn(&[f32]) -> Exact = |x| exact_sum(x) * (Exact::given(1.0) / Exact::given(x.len() as f32));
        check_whole(device, "mean", |step, x| ops::mean(step, x), tree, exact);
    }

    fn squared_norm(device: &Device) {
        let tree: fn(&[f32]) -> f32 = |x| trees::all(x, &|sum, x| x.mul_add(x, sum));
        let exact: fn(&[f32]) -> Exact = |x| Exact::sum(trees::all_depth(x.len()), given(x).map(|x| x.times(x)));
        check_whole(device, "squared norm", |step, x| ops::squared_norm(step, x), tree, exact);
    }

    fn sum_columns(device: &Device) {
        let mut closeness = Closeness::new("sum columns");
        for [rows, cols] in ROWS.into_iter().chain([[0, 0], [3, 0]]) {
            let x = Random::new(cols as u64).uniforms(rows * cols, -0.5, 1.0);
            let got = trial(device, |trial| {
                let x = trial.upload(&x, [rows, cols])?;
                trial.output(&ops::sum_columns(trial, &x)?)
            });
            let row = |row: usize| &x[row * cols..][..cols];
            let tree: Vec<f32> = (0..rows).map(|at| trees::row(cols, |sum, column| sum + row(at)[column])).collect();
            assert_same(format_args!("{rows} x {cols}"), &got, &tree);
            let exact: Vec<Exact> = (0..rows).map(|at| Exact::sum(trees::row_depth(cols), given(row(at)))).collect();
            closeness.check(format_args!("{rows} x {cols}"), &got, &exact);
        }
        closeness.finish();
    }

    fn sum_rows(device: &Device) {
        let mut closeness = Closeness::new("sum rows");
        for [rows, cols] in ROWS {
            let mut random = Random::new(cols as u64);
            let (x, old) = (random.uniforms(rows * cols, -0.5, 1.0), random.normals(cols));
            let [made, replaced, added] = trial(device, |trial| {
                let x = trial.upload(&x, [rows, cols])?;
                let (mut replaced, mut added) = (trial.upload(&old, [cols])?, trial.upload(&old, [cols])?);
                let made = trial.with_scratch(|| ops::sum_rows(trial, &x))?;
                trial.with_scratch(|| ops::launch::sum_rows_into(trial, &x, &mut replaced, false))?;
                trial.with_scratch(|| ops::launch::sum_rows_into(trial, &x, &mut added, true))?;
                Ok([trial.output(&made)?, trial.output(&replaced)?, trial.output(&added)?])
            });
            let shape = format!("{rows} x {cols}");
            let tree = trees::rows(rows, cols, &|sum, index| sum + x[index]);
            assert_same(&shape, &made, &tree);
            assert_same(&shape, &replaced, &tree);
            assert_same(&shape, &added, &old.iter().zip(&tree).map(|(old, sum)| old + sum).collect::<Vec<_>>());
            let column = |column: usize| (0..rows).map(move |row| row * cols + column).map(|at| Exact::given(x[at]));
            let exact: Vec<Exact> = (0..cols).map(|at| Exact::sum(trees::rows_depth(rows), column(at))).collect();
            closeness.check(&shape, &made, &exact);
        }
        closeness.finish();
    }

    fn max(device: &Device) {
        let op: Whole = |step, x| ops::max(step, x);
        for length in LENGTHS.into_iter().filter(|&length| length > 0) {
            let mut x = Random::new(length as u64).normals(length);
            assert_same(length, &[whole(device, op, &x)], &[x[argmax(&x)]]);
            x.iter_mut().for_each(|x| *x = -*x - 100.0);
            assert_same(length, &[whole(device, op, &x)], &[x[argmax(&x)]]);
            for place in [0, length / 2, length - 1] {
                for special in [f32::NAN, -f32::NAN, f32::INFINITY] {
                    let mut x = x.clone();
                    x[place] = special;
                    assert_same(length, &[whole(device, op, &x)], &[special]);
                }
            }
        }
        assert_same("the maximum without finite elements", &[whole(device, op, &[f32::NEG_INFINITY; 5])], &[f32::NEG_INFINITY]);
        assert_eq!(whole(device, op, &[-0.0, 0.0, -1.0]), 0.0);
    }

    fn max_and_argmax_of_rows(device: &Device) {
        for [rows, cols] in ROWS {
            let mut random = Random::new(cols as u64);
            // Few values, so that most rows hold their maximum more than once, and special ones in
            // a quarter of the rows.
            let mut x: Vec<f32> = (0..rows * cols).map(|_| random.below(7) as f32 - 3.0).collect();
            for row in (0..rows).step_by(4) {
                for _ in 0..3 {
                    x[row * cols + random.below(cols as u32) as usize] = SPECIAL[random.below(12) as usize];
                }
            }
            check_rows(device, [rows, cols], &x);
        }
        let none = f32::NEG_INFINITY;
        check_rows(device, [1, 4], &[-0.0, 0.0, -0.0, 0.0]);
        check_rows(device, [1, 4], &[none; 4]);
        check_rows(device, [1, 4], &[f32::INFINITY, -f32::NAN, f32::NAN, 1.0]);
        check_rows(device, [1, 40], &[[0.0; 20], [-0.0; 20]].concat());
    }

    fn one_element_is_needed(device: &Device) {
        trial(device, |trial| {
            let (none, no_columns) = (trial.upload::<f32>(&[], [0])?, trial.upload::<f32>(&[], [3, 0])?);
            assert_refused(ops::mean(trial, &none), &["mean", "at least one element"]);
            assert_refused(ops::max(trial, &none), &["max", "at least one element"]);
            assert_refused(ops::max_columns(trial, &no_columns), &["max_columns", "rows with elements", "[3, 0]"]);
            assert_refused(
                ops::argmax_columns(trial, &no_columns),
                &["argmax_columns", "rows with elements", "[3, 0]"],
            );
            let (x, mut out) = (trial.upload(&[1.0; 6], [2, 3])?, trial.upload(&[1.0; 2], [2])?);
            assert_refused(ops::launch::sum_rows_into(trial, &x, &mut out, true), &["sum_rows", "3 elements", "[2]"]);
            Ok(())
        });
    }
}

stored_as_each! {
    /// Tests the reduction as the loss itself, and as a part of one.
    fn gradient_of_sum_and_mean<S>(device: &Device) {
        for seed in SEEDS {
            let mut random = Random::new(seed);
            let shape = extents(&mut random, seed, [7, 5, 13]);
            let elements: usize = shape.iter().product();
            let mut x = normal(&mut random, &shape);
            // All of one sign, so that they do not cancel.
            x.values.iter_mut().for_each(|x| *x = x.abs() + 0.5);
            let sum = |x: &[f64]| x.iter().map(|x| x.tanh()).sum::<f64>();
            // The output's gradient goes to every element, so the norm of tanh's gradient is the
            // root of their number. A mean's part is written twice.
            let root = (elements as f64).sqrt();
            let [of_sum, of_mean] = [(1.0, root), (3.0, 1.0 / root)]
                .map(|(backward, norm)| Roundings { backward, kept: norm * Roundings::TANH.kept, ..Roundings::TANH });
            Case::new("sum", seed, elements, vec![x.clone()]).stored_as::<S>(of_sum).check(device, |_, tape, p| {
                tape.sum(&leaf_as::<S>(tape, p[0])?.tanh()?)
            }, |p| vec![sum(&p[0])]);
            Case::new("mean", seed, elements, vec![x.clone()]).stored_as::<S>(of_mean).check(device, |_, tape, p| {
                tape.mean(&leaf_as::<S>(tape, p[0])?.tanh()?)
            }, |p| vec![sum(&p[0]) / elements as f64]);

            let (parameters, p) = parameters_of(device, &[x]);
            let mut gradients = Gradients::zeros(&parameters).unwrap();
            let mut arena = Arena::builder(device).capacity(Capacity::mib(1)).build().unwrap();
            for (expected, of_mean) in [(1.0, false), (1.0 / elements as f32, true)] {
                arena.step(|step| {
                    let tape = Tape::new(step, &parameters);
                    let x = leaf_as::<S>(&tape, p[0])?;
                    let loss = if of_mean { tape.mean(&x)? } else { tape.sum(&x)? };
                    assert_eq!(loss.shape().extents(), [1]);
                    tape.backward_overwrite(&loss, &mut gradients)
                }).unwrap();
                assert_eq!(gradients.read(p[0]).unwrap(), vec![S::narrow(expected).widen(); elements]);
            }
        }
    }
}

fn check_rows(device: &Device, [rows, cols]: [usize; 2], x: &[f32]) {
    let (largest, places) = trial(device, |trial| {
        let x = trial.upload(x, [rows, cols])?;
        Ok((trial.output(&ops::max_columns(trial, &x)?)?, trial.output(&ops::argmax_columns(trial, &x)?)?))
    });
    assert_eq!((largest.len(), places.len()), (rows, rows));
    for (row, values) in x.chunks_exact(cols).enumerate() {
        let best = argmax(values);
        assert_eq!(places[row] as usize, best, "row {row} of {rows} x {cols}");
        // Either of two zeros is accepted.
        let same = largest[row] == values[best] || (largest[row].is_nan() && values[best].is_nan());
        assert!(same, "row {row} of {rows} x {cols}: {} for {}", largest[row], values[best]);
    }
}

attack! {
    reduce::sum_columns<S> { x: stored 24, cols: number 8, scale: float 1.0, accumulate: number 1, out: out 3 }
    reduce::sum_rows<S> { x: stored 24, cols: number 8, chunk: number 2, scale: float 1.0, accumulate: number 1, out: out 16 }
    reduce::sum_all<S> { x: stored 5000, scale: float 1.0, accumulate: number 1, out: out 2 }
    reduce::squared_norm<S> { x: stored 5000, out: out 2 }
    reduce::max_all<S> { x: stored 5000, out: out 2 }
    reduce::max_columns<S> { x: stored 24, cols: number 8, out: out 3 }
    reduce::argmax_columns<S> { x: stored 24, cols: number 8, out: out_u32 3 }
}
