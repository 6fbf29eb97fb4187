//! Tests of `ops::{transpose, swap_extents}`: elements are copied exactly, whatever they hold.

use crate::gradients::{Case, Roundings, SEEDS, extents, leaf_as, normal, stored_as_each};
use crate::hostile::attack;
use crate::support::{Random, SPECIAL, bits, on_each_device};
use crate::trial::{assert_refused, trial};
use stepscope::{bf16, ops};

/// Matrices, rows, columns: around one square of 32 x 32 and several, in each direction.
const SHAPES: [[usize; 3]; 15] = [
    [0, 3, 4],
    [2, 0, 4],
    [2, 3, 0],
    [1, 1, 1],
    [1, 1, 100],
    [1, 100, 1],
    [3, 5, 7],
    [2, 31, 32],
    [2, 32, 33],
    [5, 33, 31],
    [1, 64, 64],
    [2, 65, 130],
    [1, 7, 2000],
    [1, 2000, 7],
    [300, 12, 8],
];

/// Returns each `[rows, cols]` of `x` as `[cols, rows]`.
pub(crate) fn in_float64(x: &[f64], rows: usize, cols: usize) -> Vec<f64> {
    let matrix = |x: &[f64]| (0..rows * cols).map(|at| x[at % rows * cols + at / rows]).collect::<Vec<f64>>();
    x.chunks_exact(rows * cols).flat_map(matrix).collect()
}

on_each_device! {
    fn transpose(device: &Device) {
        for [matrices, rows, cols] in SHAPES {
            let mut x = Random::new(cols as u64).normals(matrices * rows * cols);
            x.iter_mut().rev().zip(SPECIAL).for_each(|(x, special)| *x = special);
            let got = trial(device, |trial| {
                let x = trial.upload(&x, [matrices, rows, cols])?;
                let y = ops::transpose(trial, &x)?;
                assert_eq!(y.shape().extents(), [matrices, cols, rows]);
                trial.output(&y)
            });
            // Nothing is rounded in float64 either: the bits are those of x.
            let place = |at: usize| at / (rows * cols) * (rows * cols) + at % rows * cols + at / rows % cols;
            let want: Vec<f32> = (0..x.len()).map(|at| x[place(at)]).collect();
            assert!(bits(&got) == bits(&want), "{matrices} x {rows} x {cols}");
        }
    }

    /// Two and four extents. Transposing twice gives the original.
    fn last_two_extents_swap(device: &Device) {
        let x = Random::new(1).normals(2 * 3 * 5 * 7);
        trial(device, |trial| {
            let cube = trial.upload(&x, [2, 3, 5, 7])?;
            let y = ops::transpose(trial, &cube)?;
            assert_eq!(y.shape().extents(), [2, 3, 7, 5]);
            trial.output(&y)?;
            let back = ops::transpose(trial, &y)?;
            assert_eq!(bits(&trial.output(&back)?), bits(&x));
            let y = ops::transpose(trial, &cube.reshape([30, 7])?)?;
            assert_eq!(y.shape().extents(), [7, 30]);
            assert_eq!(trial.output(&y)?[30], x[1]);
            Ok(())
        });
    }

    /// Any two extents, against a plain walk over the places.
    fn any_two_extents_swap(device: &Device) {
        for shape in [[2, 3, 5, 7], [1, 1, 1, 1], [4, 12, 3, 64], [2, 33, 2, 20], [3, 2, 40, 1], [2, 0, 3, 4]] {
            let x = Random::new(2).normals(shape.iter().product());
            let halves: Vec<bf16> = x.iter().map(|&x| bf16::from_f32(x)).collect();
            for (a, b) in [(0, 1), (0, 2), (0, 3), (1, 2), (3, 1), (2, 3), (2, 2)] {
                let mut swapped = shape;
                swapped.swap(a, b);
                let place = |at: usize| {
                    let [_, s1, s2, s3] = swapped;
                    let mut index = [at / (s1 * s2 * s3), at / (s2 * s3) % s1, at / s3 % s2, at % s3];
                    index.swap(a, b);
                    ((index[0] * shape[1] + index[1]) * shape[2] + index[2]) * shape[3] + index[3]
                };
                let want: Vec<f32> = (0..x.len()).map(|at| x[place(at)]).collect();
                trial(device, |trial| {
                    let (x, halves_there) = (trial.upload(&x, shape)?, trial.upload(&halves, shape)?);
                    let y = ops::swap_extents(trial, &x, a, b)?;
                    assert_eq!(y.shape().extents(), swapped);
                    assert!(bits(&trial.output(&y)?) == bits(&want), "{shape:?}, {a} and {b}");
                    let y = ops::swap_extents(trial, &halves_there, a, b)?;
                    assert_eq!(trial.output(&y)?, (0..want.len()).map(|at| halves[place(at)]).collect::<Vec<_>>());
                    Ok(())
                });
            }
        }
    }

    fn fewer_extents_are_refused(device: &Device) {
        trial(device, |trial| {
            let x = trial.upload(&[1.0; 6], [6])?;
            assert_refused(ops::transpose(trial, &x), &["transpose", "two extents", "[6]"]);
            assert_refused(ops::swap_extents(trial, &x, 1, 0), &["swap_extents", "an extent number 1", "[6]"]);
            Ok(())
        });
    }
}

stored_as_each! {
    fn gradient_of_swapped_extents<S>(device: &Device) {
        for seed in SEEDS {
            let mut random = Random::new(seed);
            let [tokens, heads, cols] = extents(&mut random, seed, [5, 3, 9]);
            let values = vec![normal(&mut random, &[tokens, heads, cols])];
            Case::new("swap_extents", seed, 1, values).stored_as::<S>(Roundings::TANH).check(device, |_, tape, p| {
                leaf_as::<S>(tape, p[0])?.transpose(0, 1)?.tanh()
            }, |p| {
                let row = |at: usize| &p[0][at % tokens * heads * cols + at / tokens * cols..][..cols];
                (0..heads * tokens).flat_map(row).map(|x| x.tanh()).collect()
            });
        }
    }

    fn gradient<S>(device: &Device) {
        for seed in SEEDS {
            let mut random = Random::new(seed);
            let [a, rows, cols] = extents(&mut random, seed, [3, 35, 67]);
            let values = vec![normal(&mut random, &[a, rows, cols])];
            Case::new("transpose", seed, 1, values.clone()).stored_as::<S>(Roundings::TANH).check(device, |_, tape, p| {
                leaf_as::<S>(tape, p[0])?.transpose(-1, -2)?.tanh()
            }, |p| in_float64(&p[0], rows, cols).iter().map(|x| x.tanh()).collect());
            Case::new("transpose of a matrix", seed, 1, values).stored_as::<S>(Roundings::default()).check(device, |_, tape, p| {
                (leaf_as::<S>(tape, p[0])?.reshape([a * rows, cols])?).transpose(-1, -2)
            }, |p| in_float64(&p[0], a * rows, cols));
        }
    }
}

attack! {
    transpose::transpose<S> { x: stored 24, rows: number 3, cols: number 4, y: out_stored 24 }
}
