//! Tests of `ops::{rms_norm, rms_norm_residual}` and their backward pass.

use crate::crossasset::norm_project;
use crate::gradients::{Case, SEEDS, extents, leaf, longest, normal, stack};
use crate::hostile::attack;
use crate::linear;
use crate::shapes::ROWS;
use crate::support::{Random, on_each_device};
use crate::tolerance::{Closeness, Exact};
use crate::trees;
use crate::trial::{assert_refused, assert_same, trial};
use kernels::math;
use stepscope::nn::RmsNorm;
use stepscope::{Device, ops};

const EPSILON: f32 = 1e-6;

struct Inputs {
    rows: usize,
    cols: usize,
    x: Vec<f32>,
    gain: Vec<f32>,
    dy: Vec<f32>,
}

impl Inputs {
    fn new([rows, cols]: [usize; 2]) -> Self {
        let mut random = Random::new(cols as u64);
        let (x, gain, dy) = (random.normals(rows * cols), random.uniforms(cols, 0.5, 1.5), random.normals(rows * cols));
        Self { rows, cols, x, gain, dy }
    }

    fn shape(&self) -> String {
        format!("{} x {}", self.rows, self.cols)
    }

    /// Returns the value that the forward kernel gives: the documented tree.
    fn inverse_rms(&self) -> Vec<f32> {
        let row = |row: usize| {
            let x = &self.x[row * self.cols..][..self.cols];
            let squares = trees::row(self.cols, |sum, column| x[column].mul_add(x[column], sum));
            math::rsqrt(squares / self.cols as f32 + EPSILON)
        };
        (0..self.rows).map(row).collect()
    }

    /// Returns x, gain and dy of one element.
    fn at(&self, index: usize) -> [Exact; 3] {
        [self.x[index], self.gain[index % self.cols], self.dy[index]].map(Exact::given)
    }

    /// Returns `1 / sqrt(mean x^2 + epsilon)` of each row.
    fn exact_inverse_rms(&self) -> Vec<Exact> {
        let row = |row: usize| {
            let squares = (0..self.cols).map(|column| self.at(row * self.cols + column)[0]).map(|x| x.times(x));
            let mean = Exact::sum(trees::row_depth(self.cols), squares) / Exact::given(self.cols as f32);
            Exact::given(1.0) / (mean + Exact::given(EPSILON)).sqrt()
        };
        (0..self.rows).map(row).collect()
    }
}

impl Inputs {
    /// Returns dx and dgain from dy, which may have parts, added to the given values.
    fn backward(
        &self,
        device: &Device,
        dy: &[f32],
        so_far: Option<&[f32]>,
        old: Option<&[f32]>,
    ) -> (Vec<f32>, Vec<f32>) {
        let (shape, inverse_rms) = ([self.rows, self.cols], self.inverse_rms());
        let stale = vec![f32::NAN; self.cols];
        trial(device, |trial| {
            let (x, gain) = (trial.upload(&self.x, shape)?, trial.upload(&self.gain, [self.cols])?);
            let scale = trial.upload(&inverse_rms, [self.rows])?;
            let dy = match dy.len().checked_div(self.x.len()) {
                Some(parts) if parts > 1 => trial.upload(dy, [parts, self.rows, self.cols])?,
                _ => trial.upload(dy, shape)?,
            };
            let so_far = so_far.map(|values| trial.upload(values, shape)).transpose()?;
            let mut dgain = trial.upload(old.unwrap_or(&stale), [self.cols])?;
            let accumulate = old.is_some();
            let dx = trial.with_scratch(|| {
                ops::launch::rms_norm_backward(trial, &x, &gain, &scale, &dy, so_far, &mut dgain, accumulate)
            })?;
            Ok((trial.output(&dx)?, trial.output(&dgain)?))
        })
    }
}

/// Returns the norm of rows of `gain`'s length in float64.
pub(crate) fn in_float64(x: &[f64], gain: &[f64], epsilon: f64) -> Vec<f64> {
    let row = |x: &[f64]| {
        let mean = x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64;
        x.iter().zip(gain).map(|(x, gain)| x * gain / (mean + epsilon).sqrt()).collect::<Vec<f64>>()
    };
    x.chunks_exact(gain.len()).flat_map(row).collect()
}

on_each_device! {
    fn rms_norm_forward(device: &Device) {
        let (mut closeness, mut scales) = (Closeness::new("rms norm"), Closeness::new("inverse rms"));
        for shape in ROWS {
            let inputs = Inputs::new(shape);
            let (y, inverse_rms) = trial(device, |trial| {
                let (x, gain) = (trial.upload(&inputs.x, shape)?, trial.upload(&inputs.gain, [inputs.cols])?);
                let (y, inverse_rms) = ops::rms_norm(trial, &x, &gain, EPSILON)?;
                Ok((trial.output(&y)?, trial.output(&inverse_rms)?))
            });
            assert_same(inputs.shape(), &inverse_rms, &inputs.inverse_rms());
            let scale = inputs.exact_inverse_rms();
            scales.check(inputs.shape(), &inverse_rms, &scale);
            let want = |index: usize| {
                let [x, gain, _] = inputs.at(index);
                x * scale[index / inputs.cols] * gain
            };
            closeness.check(inputs.shape(), &y, &(0..y.len()).map(want).collect::<Vec<_>>());
        }
        closeness.finish();
        scales.finish();
    }

    /// Heads are rows of 64, whatever extents precede them.
    fn heads_are_normalised_as_rows(device: &Device) {
        let inputs = Inputs::new([2 * 12 * 4, 64]);
        let [heads, rows] = [[2, 12, 4, 64].as_slice(), &[96, 64]].map(|extents| {
            trial(device, |trial| {
                let shape = match *extents {
                    [a, b, c, d] => stepscope::tensor::Shape::from([a, b, c, d]),
                    _ => stepscope::tensor::Shape::from([96, 64]),
                };
                let (x, gain) = (trial.upload(&inputs.x, shape)?, trial.upload(&inputs.gain, [64])?);
                let (y, inverse_rms) = ops::rms_norm(trial, &x, &gain, EPSILON)?;
                assert_eq!((y.shape(), inverse_rms.shape().extents()), (shape, &[96][..]));
                Ok([trial.output(&y)?, trial.output(&inverse_rms)?].concat())
            })
        });
        assert_same("heads", &heads, &rows);
    }

    fn a_row_of_zeros(device: &Device) {
        let (y, inverse_rms) = trial(device, |trial| {
            let (x, gain) = (trial.upload(&[0.0; 5], [1, 5])?, trial.upload(&[2.0; 5], [5])?);
            let (y, inverse_rms) = ops::rms_norm(trial, &x, &gain, EPSILON)?;
            Ok((trial.output(&y)?, trial.output(&inverse_rms)?))
        });
        assert_same("zeros", &y, &[0.0; 5]);
        assert_same("their scale", &inverse_rms, &[math::rsqrt(EPSILON)]);
    }

    fn rms_norm_backward(device: &Device) {
        let (mut dx_seen, mut dgain_seen) = (Closeness::new("rms norm backward"), Closeness::new("rms norm gain"));
        for shape in ROWS {
            let inputs = Inputs::new(shape);
            let (rows, cols, inverse_rms) = (inputs.rows, inputs.cols, inputs.inverse_rms());
            let (dx, dgain) = inputs.backward(device, &inputs.dy, None, None);

            let dot = |row: usize| {
                let term = |[x, gain, dy]: [Exact; 3]| (dy * gain).times(x);
                Exact::sum(trees::row_depth(cols), (row * cols..(row + 1) * cols).map(|at| term(inputs.at(at))))
            };
            let dots: Vec<Exact> = (0..rows).map(dot).collect();
            let want = |index: usize| {
                let ([x, gain, dy], row) = (inputs.at(index), index / cols);
                let scale = Exact::given(inverse_rms[row]);
                let pull = dots[row] * scale / Exact::given(cols as f32) * scale * scale;
                dy * gain * scale - pull.times(x)
            };
            dx_seen.check(inputs.shape(), &dx, &(0..dx.len()).map(want).collect::<Vec<_>>());

            let sums = trees::chunks(rows, cols, trees::row_chunk(shape), &|sum, index| {
                (inputs.x[index] * inverse_rms[index / cols]).mul_add(inputs.dy[index], sum)
            });
            assert_same(inputs.shape(), &dgain, &sums);
            let term = |index: usize| {
                let [x, _, dy] = inputs.at(index);
                (x * Exact::given(inverse_rms[index / cols])).times(dy)
            };
            let want = |column: usize| {
                Exact::sum(trees::chunks_depth(rows, trees::row_chunk(shape)), (0..rows).map(|row| term(row * cols + column)))
            };
            dgain_seen.check(inputs.shape(), &dgain, &(0..cols).map(want).collect::<Vec<_>>());
        }
        dx_seen.finish();
        dgain_seen.finish();
    }

    /// The parts of dy are summed first, and both gradients are added to the existing values.
    fn backward_adds(device: &Device) {
        for shape in ROWS {
            let inputs = Inputs::new(shape);
            let mut random = Random::new(9);
            let parts = random.normals(3 * inputs.x.len());
            let part = |number: usize, at: usize| parts[number * inputs.x.len() + at];
            let sum: Vec<f32> = (0..inputs.x.len()).map(|at| part(0, at) + part(1, at) + part(2, at)).collect();
            let (dx, dgain) = inputs.backward(device, &sum, None, None);
            let (from_parts, _) = inputs.backward(device, &parts, None, None);
            assert_same(inputs.shape(), &from_parts, &dx);
            let (old_dx, old_dgain) = (random.normals(inputs.x.len()), random.normals(inputs.cols));
            let (sum_dx, sum_dgain) = inputs.backward(device, &parts, Some(&old_dx), Some(&old_dgain));
            let add = |old: &[f32], new: &[f32]| old.iter().zip(new).map(|(old, new)| old + new).collect::<Vec<_>>();
            assert_same(inputs.shape(), &sum_dx, &add(&old_dx, &dx));
            assert_same(inputs.shape(), &sum_dgain, &add(&old_dgain, &dgain));
        }
    }

    fn shapes_must_agree(device: &Device) {
        trial(device, |trial| {
            let (x, other) = (trial.upload(&[1.0; 6], [2, 3])?, trial.upload(&[1.0; 6], [3, 2])?);
            let (mut three, two) = (trial.upload(&[1.0; 3], [3])?, trial.upload(&[1.0; 2], [2])?);
            assert_refused(ops::rms_norm(trial, &x, &two, EPSILON), &["rms_norm", "gain of shape [3]", "[2]"]);
            let gain = trial.upload(&[1.0; 3], [3])?;
            let flat = trial.upload(&[1.0; 6], [6])?;
            macro_rules! refuse {
                ($gain:expr, $scale:expr, $dy:expr, $so_far:expr, $words:expr) => {
                    let refused =
                        ops::launch::rms_norm_backward(trial, &x, $gain, $scale, $dy, $so_far, &mut three, false);
                    assert_refused(refused, $words);
                };
            }
            refuse!(&gain, &two, &other, None, &["rms_norm_backward", "[2, 3]", "[3, 2]"]);
            refuse!(&gain, &gain, &x, None, &["rms_norm_backward", "[2]", "[3]"]);
            refuse!(&two, &two, &x, None, &["rms_norm_backward", "gain", "[3]"]);
            refuse!(&gain, &two, &x, Some(flat), &["rms_norm_backward", "[2, 3]", "[6]"]);
            Ok(())
        });
    }

    fn gradient(device: &Device) {
        for seed in SEEDS {
            let mut random = Random::new(seed);
            let [rows, cols] = extents(&mut random, seed, if seed % 2 == 1 { [131, 9] } else { [5, 301] });
            // The norm of one number is its sign, whose gradient comes only from epsilon: let that
            // be noticeable.
            let epsilon = if cols == 1 { 0.5 } else { 1e-6 };
            let values = vec![normal(&mut random, &[rows, cols]), normal(&mut random, &[cols])];
            Case::new("rms_norm", seed, longest(&[rows, cols]), values).check(device, |_, tape, p| {
                tape.rms_norm(&leaf(tape, p[0])?, p[1], epsilon)
            }, |p| in_float64(&p[0], &p[1], f64::from(epsilon)));
        }
    }

    /// The bits after a residual are those of the norm of the sum.
    fn residual(device: &Device) {
        for shape in ROWS {
            let inputs = Inputs::new(shape);
            trial(device, |trial| {
                let (x, residual) = (trial.upload(&inputs.x, shape)?, trial.upload(&inputs.dy, shape)?);
                let gain = trial.upload(&inputs.gain, [inputs.cols])?;
                let (h, y, scale) = ops::rms_norm_residual(trial, &x, &residual, &gain, EPSILON)?;
                let sum = ops::add(trial, &x, &residual)?;
                let (want, want_scale) = ops::rms_norm(trial, &sum, &gain, EPSILON)?;
                for [got, want] in [[&h, &sum], [&y, &want], [&scale, &want_scale]] {
                    assert_same(inputs.shape(), &trial.output(got)?, &trial.output(want)?);
                }
                Ok(())
            });
        }
    }

    fn gradient_of_residual(device: &Device) {
        for seed in SEEDS {
            let mut random = Random::new(seed);
            let [rows, cols] = extents(&mut random, seed, [7, 41]);
            let epsilon = if cols == 1 { 0.5 } else { 1e-6 };
            let values = vec![normal(&mut random, &[rows, cols]), normal(&mut random, &[rows, cols]), normal(&mut random, &[cols])];
            // h is used through its norm and directly.
            Case::new("rms_norm_residual", seed, longest(&[rows, cols]), values).check(device, |_, tape, p| {
                let [h, y] = tape.rms_norm_residual(&leaf(tape, p[0])?, &leaf(tape, p[1])?, p[2], epsilon)?;
                y.add(h.tanh()?)
            }, |p| {
                let h: Vec<f64> = p[0].iter().zip(&p[1]).map(|(x, residual)| x + residual).collect();
                in_float64(&h, &p[2], f64::from(epsilon)).iter().zip(&h).map(|(y, h)| y + h.tanh()).collect()
            });
        }
    }

    fn gradient_of_norm_project(device: &Device) {
        for seed in SEEDS {
            let mut random = Random::new(seed);
            let [batch, tokens, members] = extents(&mut random, seed, [13, 5, 3]);
            let [k, n] = extents(&mut random, seed, [71, 9]);
            let epsilon = if k == 1 { 0.5 } else { 1e-6 };
            let operands = vec![
                normal(&mut random, &[batch, tokens, k]),
                normal(&mut random, &[k]),
                stack(&mut random, members, &[k, n]),
            ];
            let case = Case::new("norm_project", seed, longest(&[batch * tokens, members * n, k]), operands);
            case.check(device, |_, tape, p| {
                norm_project(tape, &leaf(tape, p[0])?, RmsNorm { gain: p[1], epsilon }, &p.stacks[2])
            }, |p| {
                let z = in_float64(&p[0], &p[1], f64::from(epsilon));
                p[2].chunks_exact(k * n).flat_map(|w| linear::in_float64(&z, w, &[], k, n)).collect()
            });
        }
    }
}

attack! {
    norm::rms_norm_forward<S> {
        x: stored 24, residual: stored 24, gain: f32s 8, cols: number 8, epsilon: float 1e-6, h: out_stored 24,
        y: out_stored 24, inverse_rms: out 3,
    }
    norm::rms_norm_backward<S> {
        x: stored 24, gain: f32s 8, inverse_rms: f32s 3, dy: stored 48, parts: number 2, cols: number 8,
        chunk: number kernels::row_chunk::chunk_of(3, 8), add: number 3, dx: out_stored 24, dgain: out 8,
    }
}
