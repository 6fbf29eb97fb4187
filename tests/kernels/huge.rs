//! Rows of huge numbers: squares and sums of them are right up to the largest f32, or not finite,
//! but never a plausible wrong number.

use crate::support::{Random, on_each_device, relative_l2};
use crate::trial::{canonical, trial};
use stepscope::ops::{self, AttentionConfig};
use stepscope::tensor::{Shape, Stored};
use stepscope::{Device, bf16};

/// The magnitudes of a row's numbers.
const SIZES: [f32; 8] = [1.0, 1e17, 3e18, 1e19, 1e25, 1e30, 1e37, 1e38];
/// The columns of each path: one lane, several, a whole warp, rows that are read again, and a
/// number that is not a multiple of four.
const COLS: [usize; 6] = [4, 20, 132, 600, 1300, 67];
const EPSILON: f32 = 1e-5;

/// Returns rows of `cols` normals of each size, and rows of mixed magnitudes, up to the largest f32
/// and BF16.
fn rows(cols: usize) -> Vec<f32> {
    let mut random = Random::new(cols as u64);
    let mut x: Vec<f32> =
        SIZES.iter().flat_map(|size| random.normals(cols).into_iter().map(move |x| x * size / 8.0)).collect();
    // One huge number among small ones; huge ones of either sign; some that overflow f32.
    let mut one = random.normals(cols);
    one[cols / 2] = 2e38;
    let mut two = random.normals(cols);
    (two[0], two[cols - 1]) = (3e38, -3e38);
    let mut ends = vec![1e20; cols];
    (ends[0], ends[1]) = (3.3e38, 3.3e38);
    x.extend([one, two, ends].concat());
    x
}

/// Returns the values as S stores them.
fn as_stored<S: Stored>(values: &[f32]) -> Vec<S> {
    values.iter().map(|&value| S::narrow(value)).collect()
}

fn widened<S: Stored>(values: &[S]) -> Vec<f32> {
    values.iter().map(|value| value.widen()).collect()
}

fn exact<S: Stored>(values: &[S]) -> Vec<f64> {
    values.iter().map(|value| f64::from(value.widen())).collect()
}

/// Returns the norm of a row in float64: y, and dx and the row's part of dgain from dy. `centered`
/// selects LayerNorm.
fn row_in_float64(x: &[f64], gain: &[f64], dy: &[f64], centered: bool) -> [Vec<f64>; 3] {
    let cols = x.len() as f64;
    let mean = if centered { x.iter().sum::<f64>() / cols } else { 0.0 };
    let square = x.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / cols;
    let scale = 1.0 / (square + f64::from(EPSILON)).sqrt();
    let normal: Vec<f64> = x.iter().map(|x| (x - mean) * scale).collect();
    let g: Vec<f64> = dy.iter().zip(gain).map(|(dy, gain)| dy * gain).collect();
    let mean_g = if centered { g.iter().sum::<f64>() / cols } else { 0.0 };
    let mean_g_normal = g.iter().zip(&normal).map(|(g, normal)| g * normal).sum::<f64>() / cols;
    let y = normal.iter().zip(gain).map(|(normal, gain)| normal * gain).collect();
    let dx = g.iter().zip(&normal).map(|(g, normal)| scale * (g - mean_g - normal * mean_g_normal)).collect();
    let dgain = normal.iter().zip(dy).map(|(normal, dy)| normal * dy).collect();
    [y, dx, dgain]
}

/// Compares row by row, so that small rows count as much as large ones. Gradients of rows of 1e38
/// are subnormal numbers, which are `step` apart, so an error of that size is allowed.
#[track_caller]
fn assert_rows(what: &str, got: &[f32], want: &[f64], cols: usize, tolerance: f64, step: f64) {
    for (row, (got, want)) in got.chunks(cols).zip(want.chunks(cols)).enumerate() {
        let size = (want.iter().map(|want| want * want).sum::<f64>() / cols as f64).sqrt();
        let lost = step / size.max(1e-300);
        let off = relative_l2(got, want);
        assert!(off <= tolerance + lost, "{what}, {cols} columns, row {row} of size {size:e}: {off:e}");
    }
}

fn norms_match<S: Stored>(device: &Device, centered: bool) {
    // A norm of n numbers rounds about as often as their sum; BF16 rounds each result once more.
    let (stored, step) = if size_of::<S>() == 2 { (2f64.powi(-8), 2f64.powi(-133)) } else { (0.0, 2f64.powi(-149)) };
    for cols in COLS {
        let x: Vec<S> = as_stored(&rows(cols));
        let count = x.len() / cols;
        let mut random = Random::new(7);
        let (gain, dy) = (random.uniforms(cols, 0.5, 1.5), as_stored::<S>(&random.normals(x.len())));
        let bias = vec![0.0; cols];
        let (y, dx, dgain) = trial(device, |trial| {
            let (x, dy) = (trial.upload(&x, [count, cols])?, trial.upload(&dy, [count, cols])?);
            let gain = trial.upload(&gain, [cols])?;
            let mut dgain = trial.upload(&vec![0.0; cols], [cols])?;
            if centered {
                let (bias, mut dbias) = (trial.upload(&bias, [cols])?, trial.upload(&vec![0.0; cols], [cols])?);
                let made = ops::layer_norm(trial, &x, &gain, &bias, EPSILON)?;
                let y = trial.output(&made.y)?;
                let kept = [&made.mean, &made.inverse_std];
                let (_, _) = (trial.output(kept[0])?, trial.output(kept[1])?);
                let dx = trial.with_scratch(|| {
                    ops::launch::layer_norm_backward(
                        trial,
                        &x,
                        &gain,
                        kept,
                        &dy,
                        None,
                        [&mut dgain, &mut dbias],
                        [false; 2],
                    )
                })?;
                trial.output(&dbias)?;
                return Ok((y, trial.output(&dx)?, trial.output(&dgain)?));
            }
            let (y, scale) = ops::rms_norm(trial, &x, &gain, EPSILON)?;
            let (y, _) = (trial.output(&y)?, trial.output(&scale)?);
            let dx = trial.with_scratch(|| {
                ops::launch::rms_norm_backward(trial, &x, &gain, &scale, &dy, None, &mut dgain, false)
            })?;
            Ok((y, trial.output(&dx)?, trial.output(&dgain)?))
        });
        let gain: Vec<f64> = gain.iter().map(|&gain| f64::from(gain)).collect();
        let (mut want_y, mut want_dx, mut want_dgain) = (Vec::new(), Vec::new(), vec![0.0; cols]);
        for (x, dy) in exact(&x).chunks(cols).zip(exact(&dy).chunks(cols)) {
            let [y, dx, dgain] = row_in_float64(x, &gain, dy, centered);
            want_y.extend(y);
            want_dx.extend(dx);
            want_dgain.iter_mut().zip(dgain).for_each(|(sum, part)| *sum += part);
        }
        let tolerance = 2e-6 + stored;
        assert_rows("y", &widened(&y), &want_y, cols, tolerance, step);
        assert_rows("dx", &widened(&dx), &want_dx, cols, 2e-5 + stored, step);
        assert_rows("dgain", &dgain, &want_dgain, cols, 1e-5 + stored, step);
    }
}

on_each_device! {
    fn rms_norm(device: &Device) {
        norms_match::<f32>(device, false);
        norms_match::<bf16>(device, false);
    }

    fn layer_norm(device: &Device) {
        norms_match::<f32>(device, true);
        norms_match::<bf16>(device, true);
    }

    /// Rows of one repeated number, however large, have no deviation: LayerNorm gives the bias.
    fn constant_row_gives_its_bias(device: &Device) {
        for value in [1e19f32, 1e30, -2.0f32.powi(127), f32::MAX] {
            let cols = 64;
            let (y, mean) = trial(device, |trial| {
                let x = trial.upload(&vec![value; cols], [1, cols])?;
                let (gain, bias) = (trial.upload(&vec![2.0; cols], [cols])?, trial.upload(&vec![0.25; cols], [cols])?);
                let made = ops::layer_norm(trial, &x, &gain, &bias, EPSILON)?;
                trial.output(&made.inverse_std)?;
                Ok((trial.output(&made.y)?, trial.output(&made.mean)?))
            });
            assert_eq!(mean, [value]);
            assert!(y.iter().all(|&y| y == 0.25), "{value:e}: {y:?}");
        }
    }

    /// A row with an infinity or a NaN is NaN in every element, and no other row is.
    fn non_finite_rows_give_nan(device: &Device) {
        for cols in COLS {
            let bad = [f32::INFINITY, f32::NEG_INFINITY, f32::NAN];
            let mut x = Random::new(5).normals(5 * cols);
            for (row, value) in bad.into_iter().enumerate() {
                x[row * cols + cols / 3] = value;
            }
            let outputs = trial(device, |trial| {
                let (x, gain) = (trial.upload(&x, [5, cols])?, trial.upload(&vec![1.0; cols], [cols])?);
                let bias = trial.upload(&vec![0.0; cols], [cols])?;
                let (rms, scale) = ops::rms_norm(trial, &x, &gain, EPSILON)?;
                let layer = ops::layer_norm(trial, &x, &gain, &bias, EPSILON)?;
                trial.output(&scale)?;
                trial.output(&layer.mean)?;
                trial.output(&layer.inverse_std)?;
                Ok([trial.output(&rms)?, trial.output(&layer.y)?])
            });
            for y in outputs {
                for (row, y) in y.chunks(cols).enumerate() {
                    assert!(y.iter().all(|y| if row < bad.len() { y.is_nan() } else { y.is_finite() }), "row {row}: {y:?}");
                }
            }
        }
    }

    /// Queries and keys of any size are normalised, in the kernel for few tokens and in the others.
    /// Attention depends only on their directions.
    fn attention_of_huge_heads(device: &Device) {
        let (shape, tokens) = (Shape::from([3, 2, 12, 128]), 12);
        let mut random = Random::new(11);
        let x = random.normals(shape.elements());
        let (gains, third) = (random.uniforms(128, 0.5, 1.5), x.len() / 3);
        let run = |size: f32, masked: bool| {
            // v keeps its values.
            let scaled: Vec<f32> = x.iter().enumerate().map(|(at, x)| if at < 2 * third { x * size } else { *x }).collect();
            trial(device, |trial| {
                let (x, gains) = (trial.upload(&scaled, shape)?, trial.upload(&gains, [2, 64])?);
                let lengths = trial.upload(&[tokens; 2], [2])?;
                let form = AttentionConfig::new(2);
                let form = if masked { form.lengths(lengths) } else { form };
                let norm = ops::QkNorm::new(&gains, 1e-20);
                trial.with_scratch(|| {
                    let made = ops::attention(trial, &x, Some(norm), &form)?;
                    ops::copy(trial, &made.out)
                })
                .and_then(|out| trial.output(&out))
            })
        };
        for masked in [false, true] {
            let want: Vec<f64> = run(1.0, masked).iter().map(|&x| f64::from(x)).collect();
            // Powers of two keep the directions exactly.
            for exponent in [40, 64, 70, 100, 124] {
                let off = relative_l2(&run(2f32.powi(exponent), masked), &want);
                assert!(off < 1e-5, "2^{exponent}, masked {masked}: {off:e}");
            }
        }
    }

    /// Activations and cross-entropy saturate at their limits.
    fn activations_and_loss_saturate(device: &Device) {
        let x = [1e38f32, -1e38, f32::MAX, f32::MIN, 1e20, -1e20];
        let [gelu, silu, exact] = trial(device, |trial| {
            let x = trial.upload(&x, [x.len()])?;
            let [gelu, silu, exact] = [ops::gelu(trial, &x)?, ops::silu(trial, &x)?, ops::gelu_exact(trial, &x)?];
            Ok([trial.output(&gelu)?, trial.output(&silu)?, trial.output(&exact)?])
        });
        let want: Vec<u32> = x.iter().map(|&x| canonical(if x > 0.0 { x } else { 0.0 })).collect();
        for (name, got) in [("gelu", gelu), ("silu", silu), ("gelu_exact", exact)] {
            let got: Vec<u32> = got.iter().map(|&y| canonical(if y == 0.0 { 0.0 } else { y })).collect();
            assert_eq!(got, want, "{name}");
        }
        let logits = [3e38f32, -3e38, 1e38, 3e38, 0.0, 3e38];
        let [softmax, loss] = trial(device, |trial| {
            let logits = trial.upload(&logits, [2, 3])?;
            let labels = trial.upload_indices(&[0, 2], [2])?;
            let softmax = ops::softmax(trial, &logits)?;
            let softmax = trial.output(&softmax)?;
            let loss = trial.with_scratch(|| Ok(ops::cross_entropy_by(trial, &logits, &labels, ops::LabelRules::default().weighted(1.0))?.0))?;
            Ok([softmax, trial.output(&loss)?])
        });
        assert_eq!(softmax, [1.0, 0.0, 0.0, 0.5, 0.0, 0.5]);
        assert!((f64::from(loss[0]) - 2f64.ln()).abs() < 1e-6, "{loss:?}");
    }

    /// A sum that overflows f32 is infinite, never a plausible number. This holds for a mean, and
    /// for the gradient norm that `Trainer` and `Optimizer::update` report. The clip factor of such
    /// gradients is 0.
    fn overflowing_sum_is_not_finite(device: &Device) {
        let [mean, squares, factor] = trial(device, |trial| {
            let x = trial.upload(&[3e38f32; 8], [8])?;
            let mean = trial.with_scratch(|| ops::mean(trial, &x))?;
            let mean = trial.output(&mean)?;
            let squares = trial.with_scratch(|| ops::squared_norm(trial, &x))?;
            let factor = ops::clip_factor(trial, &squares, 1.0)?;
            Ok([mean, trial.output(&squares)?, trial.output(&factor)?])
        });
        assert!(!mean[0].is_finite() && !squares[0].is_finite() && factor[0] == 0.0, "{mean:?} {squares:?} {factor:?}");
    }
}

/// Rows whose squares do not overflow have the bits of the documented formulas, unchanged by the
/// support of huge rows.
mod finite_rows {
    use super::*;
    use crate::trees;
    use crate::trial::assert_same;
    use kernels::math::rsqrt;

    /// Returns rows of sizes up to just below where a row's squares overflow.
    fn rows(cols: usize) -> Vec<f32> {
        let mut random = Random::new(cols as u64);
        let most = 1.8e19 / (cols as f32).sqrt();
        let sizes = [1e-30, 1e-3, 1.0, 1e9, most / 8.0];
        let mut x: Vec<f32> =
            sizes.iter().flat_map(|size| random.normals(cols).into_iter().map(move |x| x * size)).collect();
        x.extend(vec![most; cols]);
        x
    }

    on_each_device! {
        fn rms_norm(device: &Device) {
            for cols in COLS {
                let (x, mut random) = (rows(cols), Random::new(3));
                let (count, gain, dy) = (x.len() / cols, random.uniforms(cols, 0.5, 1.5), random.normals(x.len()));
                let (y, dx) = trial(device, |trial| {
                    let (x, dy) = (trial.upload(&x, [count, cols])?, trial.upload(&dy, [count, cols])?);
                    let (gain, mut dgain) = (trial.upload(&gain, [cols])?, trial.upload(&vec![0.0; cols], [cols])?);
                    let (y, scale) = ops::rms_norm(trial, &x, &gain, EPSILON)?;
                    let (y, _) = (trial.output(&y)?, trial.output(&scale)?);
                    let dx = trial.with_scratch(|| {
                        ops::launch::rms_norm_backward(trial, &x, &gain, &scale, &dy, None, &mut dgain, false)
                    })?;
                    trial.output(&dgain)?;
                    Ok((y, trial.output(&dx)?))
                });
                let (mut want_y, mut want_dx) = (Vec::new(), Vec::new());
                for (x, dy) in x.chunks(cols).zip(dy.chunks(cols)) {
                    let sum = trees::row(cols, |sum, column| x[column].mul_add(x[column], sum));
                    assert!(sum.is_finite());
                    let scale = rsqrt(sum / cols as f32 + EPSILON);
                    let dot = trees::row(cols, |sum, column| (dy[column] * gain[column]).mul_add(x[column], sum));
                    let coefficient = dot * scale / cols as f32 * scale * scale;
                    want_y.extend((0..cols).map(|column| x[column] * scale * gain[column]));
                    want_dx.extend((0..cols).map(|column| {
                        0.0 + (-coefficient).mul_add(x[column], dy[column] * gain[column] * scale)
                    }));
                }
                assert_same(format!("y of {cols} columns"), &y, &want_y);
                assert_same(format!("dx of {cols} columns"), &dx, &want_dx);
            }
        }

        fn layer_norm(device: &Device) {
            for cols in COLS {
                let (x, mut random) = (rows(cols), Random::new(3));
                let (count, gain, bias) = (x.len() / cols, random.uniforms(cols, 0.5, 1.5), random.normals(cols));
                let (y, mean) = trial(device, |trial| {
                    let x = trial.upload(&x, [count, cols])?;
                    let (gain, bias) = (trial.upload(&gain, [cols])?, trial.upload(&bias, [cols])?);
                    let made = ops::layer_norm(trial, &x, &gain, &bias, EPSILON)?;
                    trial.output(&made.inverse_std)?;
                    Ok((trial.output(&made.y)?, trial.output(&made.mean)?))
                });
                let (mut want_y, mut want_mean) = (Vec::new(), Vec::new());
                for x in x.chunks(cols) {
                    let center = trees::row(cols, |sum, column| sum + x[column]) / cols as f32;
                    let sum = trees::row(cols, |sum, column| (x[column] - center).mul_add(x[column] - center, sum));
                    let scale = rsqrt(sum / cols as f32 + EPSILON);
                    want_mean.push(center);
                    want_y.extend((0..cols).map(|at| ((x[at] - center) * scale).mul_add(gain[at], bias[at])));
                }
                assert_same(format!("mean of {cols} columns"), &mean, &want_mean);
                assert_same(format!("y of {cols} columns"), &y, &want_y);
            }
        }
    }
}
