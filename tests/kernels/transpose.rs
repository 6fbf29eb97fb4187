//! `ops::transpose`: elements are moved as they are, whatever they hold.

use crate::gradients::{Case, SEEDS, extents, leaf, normal};
use crate::hostile::attack;
use crate::support::{Random, SPECIAL, bits, on_each_device};
use crate::trial::{assert_refused, trial};
use stepscope::ops;

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

/// Each `[rows, cols]` of `x` as `[cols, rows]`.
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
            // In float64 too there is nothing to round: the bits are those of x.
            let place = |at: usize| at / (rows * cols) * (rows * cols) + at % rows * cols + at / rows % cols;
            let want: Vec<f32> = (0..x.len()).map(|at| x[place(at)]).collect();
            assert!(bits(&got) == bits(&want), "{matrices} x {rows} x {cols}");
        }
    }

    /// Two and four extents; and twice is not at all.
    fn the_last_two_extents_change_places(device: &Device) {
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

    fn fewer_extents_are_refused(device: &Device) {
        trial(device, |trial| {
            let x = trial.upload(&[1.0; 6], [6])?;
            assert_refused(ops::transpose(trial, &x), &["transpose", "two extents", "[6]"]);
            Ok(())
        });
    }

    fn gradient(device: &Device) {
        for seed in SEEDS {
            let mut random = Random::new(seed);
            let [a, rows, cols] = extents(&mut random, seed, [3, 35, 67]);
            let values = vec![normal(&mut random, &[a, rows, cols])];
            Case::new("transpose", seed, 1, values.clone()).check(device, |_, tape, p| {
                tape.tanh(&tape.transpose(&leaf(tape, p[0])?)?)
            }, |p| in_float64(&p[0], rows, cols).iter().map(|x| x.tanh()).collect());
            Case::new("transpose of a matrix", seed, 1, values).check(device, |_, tape, p| {
                tape.transpose(&tape.reshape(&leaf(tape, p[0])?, [a * rows, cols])?)
            }, |p| in_float64(&p[0], a * rows, cols));
        }
    }
}

attack! {
    transpose::transpose { x: f32s 24, rows: number 3, cols: number 4, y: out 24 }
}
