//! Tests of `ops::{layer_norm, layer_norm_residual}` and their backward pass.

use crate::gradients::{Case, SEEDS, extents, leaf, longest, normal};
use crate::hostile::attack;
use crate::shapes::ROWS;
use crate::support::{Random, on_each_device};
use crate::tolerance::{Closeness, Exact};
use crate::trees;
use crate::trial::{assert_refused, assert_same, trial};
use kernels::math;
use stepscope::{Device, ops};

const EPSILON: f32 = 1e-5;

struct Inputs {
    rows: usize,
    cols: usize,
    x: Vec<f32>,
    residual: Vec<f32>,
    gain: Vec<f32>,
    bias: Vec<f32>,
    dy: Vec<f32>,
}

impl Inputs {
    fn new([rows, cols]: [usize; 2]) -> Self {
        let mut random = Random::new(cols as u64);
        let [x, residual, dy] = [(); 3].map(|()| random.normals(rows * cols));
        let (gain, bias) = (random.uniforms(cols, 0.5, 1.5), random.normals(cols));
        Self { rows, cols, x, residual, gain, bias, dy }
    }

    fn shape(&self) -> String {
        format!("{} x {}", self.rows, self.cols)
    }

    /// Returns the sums with the residual.
    fn h(&self) -> Vec<f32> {
        self.x.iter().zip(&self.residual).map(|(x, residual)| x + residual).collect()
    }

    /// Returns the mean and `1 / sqrt(variance + epsilon)` of each row as the forward kernel gives
    /// them, by the documented tree.
    fn statistics(&self) -> [Vec<f32>; 2] {
        let h = self.h();
        let row = |row: usize| {
            let h = &h[row * self.cols..][..self.cols];
            let mean = trees::row(self.cols, |sum, column| sum + h[column]) / self.cols as f32;
            let squares = trees::row(self.cols, |sum, column| {
                let difference = h[column] - mean;
                difference.mul_add(difference, sum)
            });
            [mean, math::rsqrt(squares / self.cols as f32 + EPSILON)]
        };
        let rows: Vec<_> = (0..self.rows).map(row).collect();
        [0, 1].map(|at| rows.iter().map(|row| row[at]).collect())
    }

    /// Returns `(h - mean) s` of an element, with these statistics.
    fn normal(&self, index: usize, [mean, scale]: [Exact; 2]) -> Exact {
        (Exact::given(self.x[index]) + Exact::given(self.residual[index]) - mean) * scale
    }

    /// Returns the mean and `1 / sqrt(variance + epsilon)` of each row.
    fn exact(&self) -> Vec<[Exact; 2]> {
        let (depth, cols) = (trees::row_depth(self.cols), Exact::given(self.cols as f32));
        let row = |row: usize| {
            let h = |at: usize| Exact::given(self.x[at]) + Exact::given(self.residual[at]);
            let all = row * self.cols..(row + 1) * self.cols;
            let mean = Exact::sum(depth, all.clone().map(h)) / cols;
            let squares = all.map(|at| h(at) - mean).map(|difference| difference.times(difference));
            let variance = Exact::sum(depth, squares) / cols;
            [mean, Exact::given(1.0) / (variance + Exact::given(EPSILON)).sqrt()]
        };
        (0..self.rows).map(row).collect()
    }

    /// Returns dh, dgain and dbias, added to the given values.
    fn backward(&self, device: &Device, so_far: Option<&[f32]>, old: [Option<&[f32]>; 2]) -> [Vec<f32>; 3] {
        let (shape, statistics) = ([self.rows, self.cols], self.statistics());
        let stale = vec![f32::NAN; self.cols];
        trial(device, |trial| {
            let (h, gain, dy) = (
                trial.upload(&self.h(), shape)?,
                trial.upload(&self.gain, [self.cols])?,
                trial.upload(&self.dy, shape)?,
            );
            let [mean, scale] = statistics.each_ref().map(|values| trial.upload(values, [self.rows]));
            let (mean, scale) = (mean?, scale?);
            let so_far = so_far.map(|values| trial.upload(values, shape)).transpose()?;
            let [dgain, dbias] = old.map(|old| trial.upload(old.unwrap_or(&stale), [self.cols]));
            let (mut dgain, mut dbias) = (dgain?, dbias?);
            let accumulate = old.map(|old| old.is_some());
            let dh = trial.with_scratch(|| {
                let sums = [&mut dgain, &mut dbias];
                ops::launch::layer_norm_backward(trial, &h, &gain, [&mean, &scale], &dy, so_far, sums, accumulate)
            })?;
            Ok([trial.output(&dh)?, trial.output(&dgain)?, trial.output(&dbias)?])
        })
    }
}

on_each_device! {
    fn forward(device: &Device) {
        let (mut closeness, mut scales) = (Closeness::new("layer norm"), Closeness::new("inverse std"));
        for shape in ROWS {
            let inputs = Inputs::new(shape);
            let [h, y, mean, scale] = trial(device, |trial| {
                let (x, residual) = (trial.upload(&inputs.x, shape)?, trial.upload(&inputs.residual, shape)?);
                let (gain, bias) = (trial.upload(&inputs.gain, [inputs.cols])?, trial.upload(&inputs.bias, [inputs.cols])?);
                let (h, out) = ops::layer_norm_residual(trial, &x, &residual, &gain, &bias, EPSILON)?;
                Ok([trial.output(&h)?, trial.output(&out.y)?, trial.output(&out.mean)?, trial.output(&out.inverse_std)?])
            });
            assert_same(inputs.shape(), &h, &inputs.h());
            let [means, stds] = inputs.statistics();
            assert_same(inputs.shape(), &mean, &means);
            assert_same(inputs.shape(), &scale, &stds);
            let exact = inputs.exact();
            scales.check(inputs.shape(), &scale, &exact.iter().map(|[_, scale]| *scale).collect::<Vec<_>>());
            let want = |index: usize| {
                let column = index % inputs.cols;
                let normal = inputs.normal(index, exact[index / inputs.cols]);
                normal.times(Exact::given(inputs.gain[column])) + Exact::given(inputs.bias[column])
            };
            closeness.check(inputs.shape(), &y, &(0..y.len()).map(want).collect::<Vec<_>>());
        }
        closeness.finish();
        scales.finish();
    }

    /// The bits without a residual are those of the norm of the sum.
    fn norm_without_residual(device: &Device) {
        for shape in ROWS {
            let inputs = Inputs::new(shape);
            let [plain, with_gradient] = [false, true].map(|with_residual| trial(device, |trial| {
                let (gain, bias) = (trial.upload(&inputs.gain, [inputs.cols])?, trial.upload(&inputs.bias, [inputs.cols])?);
                let out = if with_residual {
                    let (x, residual) = (trial.upload(&inputs.x, shape)?, trial.upload(&inputs.residual, shape)?);
                    let (h, out) = ops::layer_norm_residual(trial, &x, &residual, &gain, &bias, EPSILON)?;
                    trial.output(&h)?;
                    out
                } else {
                    ops::layer_norm(trial, &trial.upload(&inputs.h(), shape)?, &gain, &bias, EPSILON)?
                };
                Ok([trial.output(&out.y)?, trial.output(&out.mean)?, trial.output(&out.inverse_std)?].concat())
            }));
            assert_same(inputs.shape(), &plain, &with_gradient);
        }
    }

    /// Large and nearly equal numbers keep their differences; a row of equal numbers gives its
    /// bias.
    fn large_means(device: &Device) {
        trial(device, |trial| {
            let x = trial.upload(&[1e6, 1e6 + 1.0, 1e6 - 1.0, 1e6, 7.0, 7.0, 7.0, 7.0], [2, 4])?;
            let (gain, bias) = (trial.upload(&[1.0; 4], [4])?, trial.upload(&[0.5; 4], [4])?);
            let out = ops::layer_norm(trial, &x, &gain, &bias, 0.0)?;
            let unit = math::rsqrt(0.5);
            assert_same("differences", &trial.output(&out.y)?[..4], &[0.5, 0.5 + unit, 0.5 - unit, 0.5]);
            assert_same("means", &trial.output(&out.mean)?, &[1e6, 7.0]);
            trial.output(&out.inverse_std)?;
            let out = ops::layer_norm(trial, &x, &gain, &bias, EPSILON)?;
            assert_same("equal numbers", &trial.output(&out.y)?[4..], &[0.5; 4]);
            trial.output(&out.mean)?;
            trial.output(&out.inverse_std)
        });
    }

    fn backward(device: &Device) {
        let [mut dh_seen, mut dgain_seen, mut dbias_seen] =
            ["layer norm backward", "layer norm gain", "layer norm bias"].map(Closeness::new);
        for shape in ROWS {
            let inputs = Inputs::new(shape);
            let (rows, cols, [means, scales], h) = (inputs.rows, inputs.cols, inputs.statistics(), inputs.h());
            let [dh, dgain, dbias] = inputs.backward(device, None, [None, None]);
            // Uses the statistics that it was given.
            let normal = |index: usize| {
                let (mean, scale) = (Exact::given(means[index / cols]), Exact::given(scales[index / cols]));
                (Exact::given(h[index]) - mean) * scale
            };
            let of_dy = |index: usize| Exact::given(inputs.dy[index]) * Exact::given(inputs.gain[index % cols]);
            let (depth, length) = (trees::row_depth(cols), Exact::given(cols as f32));
            let all = |row: usize| row * cols..(row + 1) * cols;
            let of_row = |row: usize| {
                let dot = all(row).map(|at| of_dy(at).times(normal(at)));
                [Exact::sum(depth, all(row).map(of_dy)) / length, Exact::sum(depth, dot) / length]
            };
            let of_rows: Vec<_> = (0..rows).map(of_row).collect();
            let want = |index: usize| {
                let [mean, dot] = of_rows[index / cols];
                (of_dy(index) - mean - dot.times(normal(index))) * Exact::given(scales[index / cols])
            };
            dh_seen.check(inputs.shape(), &dh, &(0..dh.len()).map(want).collect::<Vec<_>>());

            let sums = trees::chunks(rows, cols, trees::row_chunk(shape), &|sum, index| {
                ((h[index] - means[index / cols]) * scales[index / cols]).mul_add(inputs.dy[index], sum)
            });
            assert_same(inputs.shape(), &dgain, &sums);
            assert_same(inputs.shape(), &dbias, &trees::chunks(rows, cols, trees::row_chunk(shape), &|sum, at| sum + inputs.dy[at]));
            let over_rows = |term: &dyn Fn(usize) -> Exact, column: usize| {
                Exact::sum(trees::chunks_depth(rows, trees::row_chunk(shape)), (0..rows).map(|row| term(row * cols + column)))
            };
            let of_gain = |index: usize| normal(index).times(Exact::given(inputs.dy[index]));
            let of_bias = |index: usize| Exact::given(inputs.dy[index]);
            dgain_seen.check(inputs.shape(), &dgain, &(0..cols).map(|at| over_rows(&of_gain, at)).collect::<Vec<_>>());
            dbias_seen.check(inputs.shape(), &dbias, &(0..cols).map(|at| over_rows(&of_bias, at)).collect::<Vec<_>>());
        }
        dh_seen.finish();
        dgain_seen.finish();
        dbias_seen.finish();
    }

    /// Each gradient is added to the existing values, or overwrites them.
    fn backward_adds(device: &Device) {
        let mut closeness = Closeness::new("layer norm backward, added");
        for shape in ROWS {
            let inputs = Inputs::new(shape);
            let mut random = Random::new(9);
            let (old_dh, old_dgain, old_dbias) =
                (random.normals(inputs.x.len()), random.normals(inputs.cols), random.normals(inputs.cols));
            let [dh, dgain, dbias] = inputs.backward(device, None, [None, None]);
            let [sum_dh, sum_dgain, _] = inputs.backward(device, Some(&old_dh), [Some(&old_dgain), None]);
            let [_, _, sum_dbias] = inputs.backward(device, Some(&old_dh), [None, Some(&old_dbias)]);
            let add = |old: &[f32], new: &[f32]| old.iter().zip(new).map(|(old, new)| old + new).collect::<Vec<_>>();
            assert_same(inputs.shape(), &sum_dgain, &add(&old_dgain, &dgain));
            assert_same(inputs.shape(), &sum_dbias, &add(&old_dbias, &dbias));
            // The sum and the product before it are rounded once.
            let want: Vec<_> = old_dh.iter().zip(&dh).map(|(old, new)| Exact::given(*old) + Exact::given(*new) * Exact::given(1.0)).collect();
            closeness.check(inputs.shape(), &sum_dh, &want);
        }
        closeness.finish();
    }

    fn shapes_must_agree(device: &Device) {
        trial(device, |trial| {
            let (x, other) = (trial.upload(&[1.0; 6], [2, 3])?, trial.upload(&[1.0; 6], [3, 2])?);
            let (three, two) = (trial.upload(&[1.0; 3], [3])?, trial.upload(&[1.0; 2], [2])?);
            let norm = |gain, bias| ops::layer_norm(trial, &x, gain, bias, EPSILON);
            assert_refused(norm(&two, &three), &["layer_norm", "gain of shape [3]", "[2]"]);
            assert_refused(norm(&three, &two), &["layer_norm", "bias of shape [3]", "[2]"]);
            let refused = ops::layer_norm_residual(trial, &x, &other, &three, &three, EPSILON);
            assert_refused(refused, &["layer_norm_residual", "[2, 3]", "[3, 2]"]);
            let [mut a, mut b, mut short] = [trial.upload(&[1.0; 3], [3])?, trial.upload(&[1.0; 3], [3])?, trial.upload(&[1.0; 2], [2])?];
            let flat = trial.upload(&[1.0; 6], [6])?;
            macro_rules! refuse {
                ($gain:expr, $mean:expr, $scale:expr, $dy:expr, $so_far:expr, $db:expr, $words:expr) => {
                    let refused =
                        ops::launch::layer_norm_backward(trial, &x, $gain, [$mean, $scale], $dy, $so_far, [&mut a, $db], [false; 2]);
                    assert_refused(refused, $words);
                };
            }
            refuse!(&three, &two, &two, &other, None, &mut b, &["layer_norm_backward", "[2, 3]", "[3, 2]"]);
            refuse!(&two, &two, &two, &x, None, &mut b, &["layer_norm_backward", "gain", "[3]"]);
            refuse!(&three, &three, &two, &x, None, &mut b, &["layer_norm_backward", "[2]", "[3]"]);
            refuse!(&three, &two, &three, &x, None, &mut b, &["layer_norm_backward", "[2]", "[3]"]);
            refuse!(&three, &two, &two, &x, None, &mut short, &["layer_norm_backward", "bias", "[3]"]);
            refuse!(&three, &two, &two, &x, Some(flat), &mut b, &["layer_norm_backward", "[2, 3]", "[6]"]);
            Ok(())
        });
    }

    fn gradient(device: &Device) {
        for seed in SEEDS {
            let mut random = Random::new(seed);
            let [rows, cols] = extents(&mut random, seed, if seed % 2 == 1 { [131, 9] } else { [5, 301] });
            // A row of one number equals its mean, and a short row may be close to it. Epsilon
            // bounds the effect of a small step there.
            let epsilon = 0.5;
            let values = vec![normal(&mut random, &[rows, cols]), normal(&mut random, &[cols]), normal(&mut random, &[cols])];
            Case::new("layer_norm", seed, longest(&[rows, cols]), values).check(device, |_, tape, p| {
                tape.layer_norm(&leaf(tape, p[0])?, p[1], p[2], epsilon)
            }, |p| in_float64(&p[0], &p[1], &p[2], f64::from(epsilon)));
        }
    }

    /// Both outputs affect the loss, and both inputs get their gradients through h.
    fn gradient_with_residual(device: &Device) {
        for seed in SEEDS {
            let mut random = Random::new(seed);
            let [rows, cols] = extents(&mut random, seed, if seed % 2 == 1 { [131, 9] } else { [5, 301] });
            let epsilon = 0.5;
            let [x, residual] = [(); 2].map(|()| normal(&mut random, &[rows, cols]));
            let values = vec![x, residual, normal(&mut random, &[cols]), normal(&mut random, &[cols])];
            Case::new("layer_norm_residual", seed, longest(&[rows, cols]), values).check(device, |_, tape, p| {
                let (x, residual) = (leaf(tape, p[0])?, leaf(tape, p[1])?);
                let [h, y] = tape.layer_norm_residual(&x, &residual, p[2], p[3], epsilon)?;
                h.mul(0.5)?.add(y)
            }, |p| {
                let h: Vec<f64> = p[0].iter().zip(&p[1]).map(|(x, residual)| x + residual).collect();
                let y = in_float64(&h, &p[2], &p[3], f64::from(epsilon));
                h.iter().zip(y).map(|(h, y)| 0.5 * h + y).collect()
            });
        }
    }

    /// One output that affects the loss suffices. If it is only h, gain and bias have no gradient.
    fn one_output_is_enough(device: &Device) {
        let mut random = Random::new(3);
        let values = [&[4, 6][..], &[4, 6], &[6], &[6]].map(|shape| normal(&mut random, shape));
        for of_h in [true, false] {
            Case::new("layer_norm_residual", 3, 24, values.to_vec()).check(device, |_, tape, p| {
                let (x, residual) = (leaf(tape, p[0])?, leaf(tape, p[1])?);
                let [h, y] = tape.layer_norm_residual(&x, &residual, p[2], p[3], 0.5)?;
                Ok(if of_h { h } else { y })
            }, |p| {
                let h: Vec<f64> = p[0].iter().zip(&p[1]).map(|(x, residual)| x + residual).collect();
                if of_h { h } else { in_float64(&h, &p[2], &p[3], 0.5) }
            });
        }
    }
}

attack! {
    layer_norm::layer_norm_forward<S> {
        x: stored 24, residual: stored 24, gain: f32s 8, bias: f32s 8, cols: number 8, epsilon: float 1e-5, h: out_stored 24, y: out_stored 24,
        mean: out 3, inverse_std: out 3,
    }
    layer_norm::layer_norm_backward<S> {
        h: stored 24, gain: f32s 8, mean: f32s 3, inverse_std: f32s 3, dy: stored 24, cols: number 8,
        chunk: number kernels::row_chunk::chunk_of(3, 8), add: number 7, dh: out_stored 24, dgain: out 8, dbias: out 8,
    }
}

/// Computes the norm in float64, by rows of `gain`'s length.
fn in_float64(x: &[f64], gain: &[f64], bias: &[f64], epsilon: f64) -> Vec<f64> {
    let row = |x: &[f64]| {
        let mean = |values: &[f64]| values.iter().sum::<f64>() / values.len() as f64;
        let centered: Vec<f64> = x.iter().map(|value| value - mean(x)).collect();
        let variance = mean(&centered.iter().map(|value| value * value).collect::<Vec<_>>());
        let scale = 1.0 / (variance + epsilon).sqrt();
        let at = |(at, value): (usize, &f64)| value * scale * gain[at] + bias[at];
        centered.iter().enumerate().map(at).collect::<Vec<f64>>()
    };
    x.chunks_exact(gain.len()).flat_map(row).collect()
}
