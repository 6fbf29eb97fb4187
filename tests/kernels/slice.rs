//! Tests of `ops::{slice, concat}`: elements are copied exactly, whatever they hold.

use crate::gradients::{Case, Roundings, SEEDS, extents, leaf_as, normal, stored_as_each};
use crate::support::{Random, SPECIAL, bits, on_each_device};
use crate::trial::{assert_refused, trial};
use stepscope::tensor::Shape;
use stepscope::{Var, bf16, ops};

/// Shapes, an extent, and a range of it: with whole vectors and without, from the front, the middle
/// and the end, all and nothing.
const SLICES: [([usize; 3], usize, [usize; 2]); 13] = [
    ([1, 1, 1], 0, [0, 1]),
    ([3, 5, 7], 2, [2, 6]),
    ([3, 5, 7], 1, [1, 4]),
    ([3, 5, 7], 0, [1, 3]),
    ([3, 5, 8], 2, [4, 8]),
    ([3, 5, 8], 2, [0, 4]),
    ([3, 5, 8], 2, [2, 6]),
    ([3, 5, 8], 1, [2, 5]),
    ([300, 3, 12], 2, [4, 12]),
    ([2, 300, 5], 1, [7, 299]),
    ([2, 3, 4], 1, [1, 1]),
    ([0, 3, 4], 1, [1, 2]),
    ([2, 3, 4], 2, [0, 4]),
];

/// Returns the places in x of the elements of a range of an extent.
fn places(shape: [usize; 3], extent: usize, [start, end]: [usize; 2]) -> Vec<usize> {
    let all = 0..shape.iter().product();
    let inner: usize = shape[extent + 1..].iter().product();
    all.filter(|at| (start..end).contains(&(at / inner % shape[extent]))).collect()
}

on_each_device! {
    fn slices(device: &Device) {
        for (shape, extent, range) in SLICES {
            let mut x = Random::new(5).normals(shape.iter().product());
            x.iter_mut().rev().zip(SPECIAL).for_each(|(x, special)| *x = special);
            let (places, [start, end]) = (places(shape, extent, range), range);
            let part = Shape::from(shape).with(extent, end - start);
            let want: Vec<f32> = places.iter().map(|&at| x[at]).collect();
            let halves: Vec<bf16> = (0..x.len()).map(|at| bf16::from_f32(at as f32)).collect();
            trial(device, |trial| {
                let (x, halves_there) = (trial.upload(&x, shape)?, trial.upload(&halves, shape)?);
                let y = ops::slice(trial, &x, extent, start..end)?;
                assert_eq!(y.shape(), part);
                assert!(bits(&trial.output(&y)?) == bits(&want), "{shape:?}, {extent}, {range:?}");
                let y = ops::slice(trial, &halves_there, extent, start..end)?;
                assert_eq!(trial.output(&y)?, places.iter().map(|&at| halves[at]).collect::<Vec<_>>());
                Ok(())
            });
        }
    }

    /// Slices one after another form the whole.
    fn slices_put_together(device: &Device) {
        for (shape, extent, [start, end]) in SLICES {
            let x = Random::new(6).normals(shape.iter().product());
            trial(device, |trial| {
                let whole = trial.upload(&x, shape)?;
                let mut parts = Vec::new();
                for range in [0..start, start..end, end..shape[extent]] {
                    let part = ops::slice(trial, &whole, extent, range)?;
                    trial.output(&part)?;
                    parts.push(part);
                }
                let y = ops::concat(trial, &parts.iter().collect::<Vec<_>>(), extent)?;
                assert_eq!(y.shape(), whole.shape());
                assert_eq!(bits(&trial.output(&y)?), bits(&x));
                Ok(())
            });
        }
    }

    fn wrong_parts_are_refused(device: &Device) {
        trial(device, |trial| {
            let (x, y) = (trial.upload(&[1.0; 6], [2, 3])?, trial.upload(&[1.0; 6], [3, 2])?);
            assert_refused(ops::slice(trial, &x, 2, 0..1), &["slice", "an extent number 2", "[2, 3]"]);
            assert_refused(ops::slice(trial, &x, 1, 1..4), &["slice", "0..3", "1..4"]);
            #[allow(clippy::reversed_empty_ranges)]
            let turned = 2..1;
            assert_refused(ops::slice(trial, &x, 1, turned), &["slice", "0..3", "2..1"]);
            assert_refused(ops::concat(trial, &[&x, &y], 0), &["concat", "[2, 3]", "[2, 2]"]);
            assert_refused(ops::concat(trial, &[&x], 2), &["concat", "an extent number 2"]);
            assert_refused(ops::concat(trial, &[] as &[&stepscope::Tensor<'_>], 0), &["concat", "at least one part"]);
            Ok(())
        });
    }
}

stored_as_each! {
    fn gradient<S>(device: &Device) {
        for seed in SEEDS {
            let mut random = Random::new(seed);
            let shape = extents(&mut random, seed, [5, 7, 9]);
            for extent in 0..3 {
                // The gradients of three uses of x are summed. A sum of two is written too: its
                // norm is at most root two of that of all.
                let middle = shape[extent] / 2;
                let values = vec![normal(&mut random, &shape), normal(&mut random, &shape)];
                Case::new("concat of slices", seed, 2, values).stored_as::<S>(Roundings::TANH).check(device, |_, tape, p| {
                    let (x, y) = (leaf_as::<S>(tape, p[0])?, leaf_as(tape, p[1])?);
                    let part = x.narrow(extent as i32, middle..shape[extent])?;
                    let mut zero = tape.step().empty(shape)?;
                    ops::fill_into(tape.step(), &mut zero, 0.0)?;
                    let zero = tape.input(zero);
                    Var::cat(&[part, x, y.tanh()?, zero, x], extent as i32)
                }, |p| {
                    let outer: usize = shape[..extent].iter().product();
                    let inner: usize = shape[extent..].iter().product();
                    let skip = middle * inner / shape[extent];
                    (0..outer).flat_map(|at| {
                        let row = |p: &[f64]| p[at * inner..][..inner].to_vec();
                        let (x, y) = (row(&p[0]), row(&p[1]));
                        let tanh = y.iter().map(|y| y.tanh()).collect();
                        [x[skip..].to_vec(), x.clone(), tanh, vec![0.0; inner], x].concat()
                    }).collect()
                });
            }
        }
    }
}
