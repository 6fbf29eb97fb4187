//! Tests of the kernels of reductions (`device/src/kernels/fold.rs`), against float64 and bit for
//! bit against the documented tree.

use crate::hostile::attack;
use crate::support::{Random, on_each_device};
use crate::trial::{assert_same, trial};
use kernels::fold::{CHUNK, fold_max, fold_min, fold_sum};
use stepscope::tensor::{Source as _, Target as _};

/// The extents around and of the reduced one.
const SHAPES: [[usize; 3]; 10] = [
    [1, 1, 1],
    [3, 1, 5],
    [2, 31, 1],
    [2, 33, 3],
    [1, 1024, 2],
    [1, 1025, 2],
    [9, 100, 1],
    [1, 5000, 1],
    [2, 70, 33],
    [3, 7, 64],
];

/// Combines 32 parts of every 32nd element, ascending, and then the parts pairwise, 16, 8, 4, 2 and
/// 1 apart.
fn tree(values: impl Fn(usize) -> f32, count: usize, start: f32, combine: fn(f32, f32) -> f32) -> f32 {
    let mut parts = [start; 32];
    (0..count).for_each(|at| parts[at % 32] = combine(parts[at % 32], values(at)));
    for distance in [16, 8, 4, 2, 1] {
        (0..distance).for_each(|at| parts[at] = combine(parts[at], parts[at + distance]));
    }
    parts[0]
}

/// Reduces each chunk of each column.
fn chunks(x: &[f32], [outer, reduced, inner]: [usize; 3], start: f32, combine: fn(f32, f32) -> f32) -> Vec<f32> {
    let mut all = Vec::new();
    for o in 0..outer {
        for first in (0..reduced).step_by(CHUNK) {
            let count = CHUNK.min(reduced - first);
            all.extend((0..inner).map(|i| tree(|at| x[(o * reduced + first + at) * inner + i], count, start, combine)));
        }
    }
    all
}

fn larger(a: f32, b: f32) -> f32 {
    if b > a || b.is_nan() { b } else { a }
}

fn smaller(a: f32, b: f32) -> f32 {
    if b < a || b.is_nan() { b } else { a }
}

on_each_device! {
    fn chunks_have_the_tree(device: &Device) {
        for shape in SHAPES {
            let [outer, reduced, inner] = shape;
            let mut x = Random::new(reduced as u64).normals(outer * reduced * inner);
            let last = x.len() - 1;
            for with_nan in [false, true] {
                if with_nan {
                    x[last] = f32::NAN;
                }
                let [sum, max, min] = trial(device, |trial| {
                    let x = trial.upload(&x, [x.len()])?;
                    let length = outer * reduced.div_ceil(CHUNK) * inner;
                    let mut outs = [trial.empty([length])?, trial.empty([length])?, trial.empty([length])?];
                    let [sum, max, min] = &mut outs;
                    trial.launch(fold_sum { x: x.slice(), reduced, inner, scale: 0.5, out: sum.out() })?;
                    trial.launch(fold_max { x: x.slice(), reduced, inner, scale: 1.0, out: max.out() })?;
                    trial.launch(fold_min { x: x.slice(), reduced, inner, scale: 1.0, out: min.out() })?;
                    let [sum, max, min] = outs;
                    Ok([trial.output(&sum)?, trial.output(&max)?, trial.output(&min)?])
                });
                let halves: Vec<f32> = chunks(&x, shape, 0.0, |a, b| a + b).iter().map(|sum| 0.5 * sum).collect();
                assert_same(format_args!("sum {shape:?}"), &sum, &halves);
                assert_same(format_args!("max {shape:?}"), &max, &chunks(&x, shape, f32::NEG_INFINITY, larger));
                assert_same(format_args!("min {shape:?}"), &min, &chunks(&x, shape, f32::INFINITY, smaller));
            }
        }
    }
}

attack! {
    fold::fold_sum<S> { x: stored 30, reduced: number 3, inner: number 5, scale: float 1.0, out: out 10 }
    fold::fold_max<S> { x: stored 30, reduced: number 3, inner: number 5, scale: float 1.0, out: out 10 }
    fold::fold_min<S> { x: stored 30, reduced: number 3, inner: number 5, scale: float 1.0, out: out 10 }
    fold::find_max<S> { x: stored 30, reduced: number 3, inner: number 5, out: out_u32 10 }
    fold::find_min<S> { x: stored 30, reduced: number 3, inner: number 5, out: out_u32 10 }
    strided::copy_strided<S> {
        x: stored 30,
        layout: array [1, 1, 1, 2, 3, 5, 0, 0, 0, 15, 5, 1, 0, 0, 0, 0, 15, 5, 1, 0],
        length: number 30,
        out: out_stored 30,
    }
    along::cumulative_sum<S> { x: stored 30, n: number 3, inner: number 5, reverse: number 1, out: out_stored 30 }
    along::take_along<S> {
        x: stored 30, ids: u32s 40, n: number 3, count: number 4, inner: number 5, strides: array [20, 5, 1],
        out: out_stored 40,
    }
    along::add_along<S> {
        x: stored 40, ids: u32s 40, n: number 3, count: number 4, inner: number 5, strides: array [20, 5, 1], out: out 30,
    }
    along::one_hot<S> { ids: u32s 6, classes: number 5, out: out_stored 30 }
    along::top_k<S> { x: stored 30, cols: number 10, count: number 4, out: out_u32 12 }
}
