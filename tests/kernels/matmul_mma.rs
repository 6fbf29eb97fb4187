//! Matrix multiply in TF32: `ops::gemm_into` and the shaped ops in [`Precision::Tf32`], and every
//! tile below them.
//!
//! Three claims are tested on every device. Factors are rounded exactly as [`Precision`] documents.
//! Sums are within its bound of the exact sums. They have the bits of [`rule::sum`], eight k at
//! once.

use crate::hostile::attack;
use crate::launches::launched;
use crate::support::{Random, on_each_device};
use crate::trial::{Trial, assert_refused, assert_same, trial};
use kernels::matmul_mma::*;
use kernels::mma::rule;
use stepscope::ops::{self, Gemm, MMA_TILES, Precision};
use stepscope::{Device, Error, Result, Tensor};

/// m, n, k: tails and multiples of every tile, zero or one products, around a stage of 16 and of
/// 32, the model's 193.
const SHAPES: [[usize; 3]; 9] = [
    [16, 16, 1],
    [17, 19, 0],
    [64, 64, 32],
    [65, 63, 48],
    [70, 36, 193],
    [33, 66, 15],
    [129, 257, 33],
    [16, 260, 100],
    [130, 20, 17],
];

/// Rounds `x` as a factor: the nearest number with this many bits of significand, found by
/// distance, and the even one of two that are as near.
fn round(precision: Precision, x: f32) -> f32 {
    const DROPPED: u32 = 13;
    if precision == Precision::F32 {
        return x;
    }
    if !x.is_finite() {
        return x;
    }
    let below = x.to_bits() >> DROPPED << DROPPED;
    let above = below + (1 << DROPPED);
    // The step past the largest number would be the next power of two.
    let beyond = 2.0f64.powi(128).copysign(f64::from(x));
    let value = |bits: u32| if f32::from_bits(bits).is_finite() { f64::from(f32::from_bits(bits)) } else { beyond };
    let [down, up] = [below, above].map(|bits| (value(bits) - f64::from(x)).abs());
    let is_up = up < down || (up == down && (above >> DROPPED).is_multiple_of(2));
    f32::from_bits(if is_up { above } else { below })
}

/// A multiply with its operands, each just long enough.
#[derive(Debug)]
struct Case {
    form: Gemm,
    a: Vec<f32>,
    b: Vec<f32>,
    bias: Vec<f32>,
    old: Vec<f32>,
}

impl Case {
    /// Returns a case. `variant` 0 is packed. 1 has three batches that share B, with bias, added to
    /// the old content. 2 has padded rows in two batches, added to half of the old content.
    fn new([m, n, k]: [usize; 3], [transpose_a, transpose_b]: [bool; 2], variant: usize) -> Self {
        let mut form = Gemm::new(m, n, k);
        form = if transpose_a { form.transpose_a() } else { form };
        form = if transpose_b { form.transpose_b() } else { form };
        let pads = [[0, 0, 0], [0, 0, 0], [3, 8, 1]][variant];
        (form.lda, form.ldb, form.ldc) = (form.lda + pads[0], form.ldb + pads[1], form.ldc + pads[2]);
        let (a_rows, b_rows) = (if transpose_a { k } else { m }, if transpose_b { n } else { k });
        form.batches = [1, 3, 2][variant];
        form.beta = [0.0, 1.0, 0.5][variant];
        (form.stride_a, form.stride_c, form.stride_bias) = (a_rows * form.lda, m * form.ldc, n);
        form.stride_b = if variant == 1 { 0 } else { b_rows * form.ldb };
        let mut random = Random::new((m * 1_000_003 + n * 1009 + k) as u64);
        let batches = form.batches;
        Self {
            a: random.normals(batches * form.stride_a),
            b: random.normals(if variant == 1 { b_rows * form.ldb } else { batches * form.stride_b }),
            bias: random.normals(if variant == 1 { batches * n } else { 0 }),
            old: random.normals(batches * form.stride_c),
            form,
        }
    }

    /// Returns the outputs' places, batches, rows and columns.
    fn places(&self) -> impl Iterator<Item = (usize, [usize; 3])> {
        let Gemm { m, n, batches, stride_c, ldc, .. } = self.form;
        (0..batches * m * n).map(move |at| {
            let [z, i, j] = [at / (m * n), at / n % m, at % n];
            (z * stride_c + i * ldc + j, [z, i, j])
        })
    }

    /// Returns the `p`th factors of an output.
    fn factors(&self, [z, i, j]: [usize; 3], p: usize) -> (f32, f32) {
        let Gemm { lda, ldb, stride_a, stride_b, transpose_a, transpose_b, .. } = self.form;
        let at = |transposed: bool, outer: usize, inner: usize, ld: usize| {
            if transposed { inner * ld + outer } else { outer * ld + inner }
        };
        (self.a[z * stride_a + at(transpose_a, i, p, lda)], self.b[z * stride_b + at(transpose_b, p, j, ldb)])
    }

    fn bias(&self, [z, _, j]: [usize; 3]) -> Option<f32> {
        (!self.bias.is_empty()).then(|| self.bias[z * self.form.stride_bias + j])
    }

    /// Returns the expected `out`: eight k at once, ascending, by the rule of an instruction.
    fn by_rule(&self, precision: Precision) -> Vec<f32> {
        let mut out = self.old.clone();
        for (place, at) in self.places() {
            let mut sum = (0..self.form.k).step_by(8).fold(0.0, |sum: f32, first| {
                let exists = |p: usize| first + p < self.form.k;
                let factors = |p: usize| if exists(p) { self.factors(at, first + p) } else { (0.0, 0.0) };
                let row: [f32; 8] = std::array::from_fn(|p| round(precision, factors(p).0));
                rule::sum(rule::RULE, sum, &row, |p| round(precision, factors(p).1))
            });
            sum = self.bias(at).map_or(sum, |bias| sum + bias);
            out[place] = if self.form.beta == 0.0 { sum } else { self.form.beta.mul_add(self.old[place], sum) };
        }
        out
    }

    /// Checks every output against the bound of [`Precision`], with bias and old content. Returns
    /// the largest share of the bound.
    fn check_bound(&self, precision: Precision, out: &[f32]) -> f64 {
        let unit = 2.0f64.powi(-11);
        let mut worst = 0.0f64;
        for (place, at) in self.places() {
            let (mut sum, mut size) = (0.0, 0.0);
            for p in 0..self.form.k {
                let (a, b) = self.factors(at, p);
                sum += f64::from(a) * f64::from(b);
                size += (f64::from(a) * f64::from(b)).abs();
            }
            let bias = self.bias(at).map_or(0.0, f64::from);
            let old = if self.form.beta == 0.0 { 0.0 } else { f64::from(self.form.beta) * f64::from(self.old[place]) };
            let k = self.form.k as f64;
            let bound = (2.0 * unit + unit * unit + k * 2.0f64.powi(-22)) * size;
            // The two roundings after the sum.
            let bound = bound + 2.0f64.powi(-23) * (size + bias.abs() + old.abs());
            let error = (f64::from(out[place]) - (sum + bias + old)).abs();
            assert!(
                error <= bound,
                "{precision} {:?}: {at:?} is {:e}, {error:e} off, allowed {bound:e}",
                self.form,
                out[place]
            );
            worst = if bound > 0.0 { worst.max(error / bound) } else { worst };
        }
        worst
    }
}

fn gemm(device: &Device, case: &Case, form: &Gemm) -> Vec<f32> {
    trial(device, |trial| {
        let upload = |values: &[f32]| trial.upload(values, [values.len()]);
        let (a, b, bias, mut out) = (upload(&case.a)?, upload(&case.b)?, upload(&case.bias)?, upload(&case.old)?);
        let bias = (!case.bias.is_empty()).then_some(&bias);
        trial.with_scratch(|| {
            ops::gemm_into(trial, form, &a, &b, bias, &mut out)?;
            workspace(trial, form)
        })?;
        trial.output(&out)
    })
}

/// Allocates at least the memory that a product used for rounded operands and freed, so that the
/// trial accounts for it.
fn workspace<'s>(trial: &Trial<'_, 's>, form: &Gemm) -> Result<Tensor<'s>> {
    let Gemm { m, n, k, batches, .. } = *form;
    let rows = m.next_multiple_of(32) + n.next_multiple_of(32);
    // An operand that is not rounded has a place without elements.
    trial.empty([batches * rows * k.next_multiple_of(16) + 2 * 64])
}

on_each_device! {
    fn every_tile_is_within_the_bound(device: &Device) {
        let precision = Precision::Tf32;
        let mut worst = 0.0f64;
        for (number, shape) in SHAPES.into_iter().enumerate() {
            for transposed in [[false, false], [true, false], [false, true], [true, true]] {
                let case = Case::new(shape, transposed, (number + usize::from(transposed[0])) % 3);
                let results = MMA_TILES.iter().map(|&tile| {
                    gemm(device, &case, &Gemm { mma_tile: Some(tile), ..case.form.precision(precision) })
                });
                let results: Vec<_> = results.collect();
                worst = worst.max(case.check_bound(precision, &results[0]));
                for result in &results[1..] {
                    assert_same(format_args!("{precision}, another tile, {:?}", case.form), result, &results[0]);
                }
                let name = format_args!("{precision}, {:?}", case.form).to_string();
                assert_same(name, &results[0], &case.by_rule(precision));
            }
        }
        println!("{precision}: the worst error is {worst:.3} of its bound");
        // A single product of two factors that both lie near a tie comes close.
        assert!(worst >= 0.5, "{precision}: the bound is loose: the worst error is only {worst:.3} of it");
    }

    /// A product with one is the factor itself.
    fn factors_are_rounded_exactly(device: &Device) {
        let mut values = vec![0.0, -0.0, 1.0, f32::MAX, f32::MIN, f32::INFINITY, f32::NEG_INFINITY, f32::NAN, -f32::NAN];
        values.extend([0x7fff_ffff, 0xffff_ffff, 0x7f80_0001].map(f32::from_bits));
        let dropped = 13;
        // A tie and its neighbours, after an even and an odd last bit, of either sign, normal
        // and subnormal.
        for kept in [0x3f80_0000, 0x3f80_0000 + (1 << dropped), 0x7f7f_ffff >> dropped << dropped, 0x0040_0000, 1 << dropped] {
            for rest in [1, (1 << (dropped - 1)) - 1, 1 << (dropped - 1), (1 << (dropped - 1)) + 1, (1 << dropped) - 1] {
                values.extend([0, 1 << 31].map(|sign| f32::from_bits(sign | kept | rest)));
            }
        }
        values.extend(Random::new(3).normals(1000));
        let m = values.len();
        let precision = Precision::Tf32;
        let want: Vec<f32> = values.iter().flat_map(|&value| [round(precision, value); 16]).collect();
        let form = Gemm { mma_tile: Some(MMA_TILES[0]), ..Gemm::new(m, 16, 1).precision(precision) };
        let case = Case { form, a: values.clone(), b: vec![1.0; 16], bias: vec![], old: vec![0.0; m * 16] };
        assert_same(format_args!("{precision}, on the left"), &gemm(device, &case, &form), &without_zero_signs(&want));
        let form = Gemm { mma_tile: Some(MMA_TILES[0]), ..Gemm::new(16, m, 1).precision(precision) };
        let case = Case { form, a: vec![1.0; 16], b: values.clone(), bias: vec![], old: vec![0.0; m * 16] };
        let want: Vec<f32> = (0..16).flat_map(|_| values.iter().map(|&value| round(precision, value))).collect();
        assert_same(format_args!("{precision}, on the right"), &gemm(device, &case, &form), &without_zero_signs(&want));
    }

    /// NaN and infinity reach only the outputs whose products contain them.
    fn special_numbers_stay_in_rows(device: &Device) {
        let precision = Precision::Tf32;
        for shape in [[17, 19, 5], [70, 130, 33]] {
            let mut case = Case::new(shape, [false, false], 0);
            case.a[2 * case.form.lda + 1] = f32::NAN;
            case.a[4 * case.form.lda] = f32::INFINITY;
            case.b[3] = 0.0;
            let got = gemm(device, &case, &case.form.precision(precision));
            for (place, [_, i, j]) in case.places() {
                assert_eq!(got[place].is_nan(), i == 2 || (i == 4 && j == 3), "{precision}: row {i}, column {j}");
                assert_eq!(got[place].is_infinite(), i == 4 && j != 3, "{precision}: row {i}, column {j}");
            }
        }
    }

    /// `F32` keeps its bits whatever the step's precision, and so do multiplies too small for
    /// matrix instructions.
    fn f32_products_stay_f32(device: &Device) {
        for (shape, own) in [([40, 70, 17], Some(Precision::F32)), ([15, 70, 17], None), ([70, 15, 17], Some(Precision::Tf32))] {
            let case = Case::new(shape, [false, true], 1);
            let multiply = |step: Precision, precision| {
                let mut names = Vec::new();
                let out = trial(device, |trial| {
                    trial.set_precision(step);
                    let upload = |values: &[f32]| trial.upload(values, [values.len()]);
                    let (a, b, bias, mut out) = (upload(&case.a)?, upload(&case.b)?, upload(&case.bias)?, upload(&case.old)?);
                    let form = Gemm { precision, ..case.form };
                    trial.with_scratch(|| {
                        ops::gemm_into(trial, &form, &a, &b, Some(&bias), &mut out)?;
                        workspace(trial, &form)
                    })?;
                    trial.output(&out)
                });
                names.extend(launched(|| drop(gemm(device, &case, &Gemm { precision, ..case.form }))));
                assert!(names.iter().all(|name| !name.starts_with("matmul_tf32")));
                out
            };
            assert_same(format_args!("{shape:?}"), &multiply(Precision::Tf32, own), &multiply(Precision::F32, None));
        }
    }

    /// Multiplies without a precision use that of their step. A scratch step uses that of its outer
    /// step.
    fn steps_set_the_precision(device: &Device) {
        let [m, n, k] = [24, 40, 33];
        let case = Case::new([m, n, k], [false, false], 0);
        for (precision, kernel) in [(Precision::F32, "matmul_"), (Precision::Tf32, "matmul_tf32_")] {
            let mut arena = stepscope::Arena::builder(device).capacity(stepscope::Capacity::mib(4)).build().unwrap();
            let names = launched(|| {
                let made = arena.step(|step| {
                    assert_eq!(step.precision(), Precision::F32);
                    step.set_precision(precision);
                    let (x, w) = (step.upload(&case.a, [m, k])?, step.upload(&case.b, [k, n])?);
                    let mut y = ops::linear(step, &x, &w, None::<&Tensor<'_>>)?;
                    step.scratch(|inner| {
                        let (x, w) = (inner.lend(&x), inner.lend(&w));
                        ops::gemm_into(inner, &Gemm::new(m, n, k), &x, &w, None::<&Tensor<'_>>, &mut inner.lend_mut(&mut y))
                    })?;
                    step.read(&y)
                });
                let form = case.form.precision(precision);
                assert_same(format_args!("{precision}"), &made.unwrap(), &gemm(device, &case, &form));
            });
            let multiplies: Vec<_> = names.iter().filter(|name| name.starts_with("matmul_")).collect();
            assert!(multiplies.iter().all(|name| name.starts_with(kernel)), "{precision}: {names:?}");
            let rounds = names.iter().any(|name| name == "round_to_tf32");
            assert_eq!(rounds, precision == Precision::Tf32, "{precision}: {names:?}");
        }
    }

    /// The epilogues: gelu with its kept input, silu, a gate, a residual, and a scale.
    fn shaped_ops(device: &Device) {
        let [m, n, k] = [24, 40, 33];
        let case = Case::new([m, n, k], [false, false], 0);
        let precision = Precision::Tf32;
        let plain = gemm(device, &case, &case.form.precision(precision));
        let (bias, residual) = (Random::new(1).normals(n), Random::new(2).normals(m * n));
        let [active, pre, silu, gated, added] = trial(device, |trial| {
            trial.set_precision(precision);
            let (x, w) = (trial.upload(&case.a, [m, k])?, trial.upload(&case.b, [k, n])?);
            let (bias, residual) = (trial.upload(&bias, [n])?, trial.upload(&residual, [m, n])?);
            let mut made = None;
            trial.with_scratch(|| {
                let (active, pre) = ops::linear_gelu(trial, &x, &w, Some(&bias))?;
                let (silu, _) = ops::linear_silu(trial, &x, &w, Some(&bias))?;
                let (gated, _) = ops::linear_swiglu(trial, &x, &w, Some(&bias), &residual)?;
                made = Some([active, pre, silu, gated, ops::linear_residual(trial, &x, &w, Some(&bias), &residual)?]);
                workspace(trial, &case.form)
            })?;
            let outputs = made.expect("made");
            let outputs = outputs.iter().map(|output| trial.output(output)).collect::<Result<Vec<_>>>()?;
            Ok(<[Vec<f32>; 5]>::try_from(outputs).expect("five"))
        });
        let biased: Vec<f32> = plain.iter().enumerate().map(|(at, sum)| sum + bias[at % n]).collect();
        let gelu: Vec<f32> = biased.iter().map(|&sum| kernels::math::gelu(sum)).collect();
        let sums: Vec<f32> = biased.iter().zip(&residual).map(|(sum, old)| 1.0f32.mul_add(*old, *sum)).collect();
        assert_same(format_args!("{precision}, before gelu"), &pre, &biased);
        assert_same(format_args!("{precision}, gelu"), &active, &gelu);
        let activated: Vec<f32> = biased.iter().map(|&sum| kernels::math::silu(sum)).collect();
        let times_gate: Vec<f32> = biased.iter().zip(&residual).map(|(sum, &gate)| kernels::math::silu(gate) * sum).collect();
        let half: Vec<f32> = plain.iter().map(|sum| 0.5 * sum).collect();
        assert_same(format_args!("{precision}, silu"), &silu, &activated);
        assert_same(format_args!("{precision}, gated"), &gated, &times_gate);
        assert_same(format_args!("{precision}, residual"), &added, &sums);
        assert_same(format_args!("{precision}, scaled"), &gemm(device, &case, &case.form.precision(precision).scaled(0.5)), &half);
    }

    fn violations_name_the_argument(device: &Device) {
        let sound = Gemm { batches: 2, stride_a: 340, stride_b: 400, stride_c: 340, stride_bias: 20, ..Gemm::new(17, 20, 20) };
        let precision = Precision::Tf32;
        trial(device, |trial| {
            let ones = |length: usize| trial.upload(&vec![1.0; length], [length]);
            let (a, b, bias, mut out) = (ones(680)?, ones(800)?, ones(40)?, ones(680)?);
            for (form, argument) in [
                (Gemm { stride_a: 341, ..sound }, "a"),
                (Gemm { ldb: 21, ..sound }, "b"),
                (Gemm { stride_bias: 21, ..sound }, "bias"),
                (Gemm { stride_c: 341, ..sound }, "out"),
                (Gemm { stride_c: 339, ..sound }, "stride_c"),
            ] {
                trial.with_scratch(|| {
                    let refused = ops::gemm_into(trial, &form.precision(precision), &a, &b, Some(&bias), &mut out);
                    if let Err(full @ Error::ArenaFull { .. }) = refused {
                        // The trial starts again, in a larger arena.
                        return Err(full);
                    }
                    assert_refused(refused, &[&format!("`{argument}`: expected")]);
                    workspace(trial, &sound)
                })?;
            }
            let unknown = Tile { warps: [1, 1], ..TILES[0] };
            trial.with_scratch(|| {
                let form = Gemm { mma_tile: Some(unknown), ..sound.precision(precision) };
                let refused = ops::gemm_into(trial, &form, &a, &b, None::<&Tensor<'_>>, &mut out);
                assert_refused(refused, &["one of `ops::MMA_TILES`", "warps: [1, 1]"]);
                workspace(trial, &form)
            })?;
            Ok(())
        });
    }
}

/// A sum begins with zero, so a product of minus zero leaves zero.
fn without_zero_signs(values: &[f32]) -> Vec<f32> {
    values.iter().map(|value| value + 0.0).collect()
}

#[test]
fn precisions_have_names() -> Result<(), Error> {
    for precision in Precision::ALL {
        assert_eq!(precision.to_string().parse::<Precision>()?, precision);
    }
    assert_refused("fp8".parse::<Precision>(), &["f32 or tf32", "`fp8`"]);
    Ok(())
}

/// The words of the fragments of one matrix of up to 32 rows and eight k.
const WORDS: usize = kernels::mma::FRAGMENT as usize;

// Products: two batches of `[5, 7] [7, 6]`.
attack! {
    matmul_mma::matmul_mma by tile {
        a: u32s 2 * WORDS, b: u32s 2 * WORDS, bias: f32s 12, c: pointer 60, out: out 60, pre: out 60,
        extents: product [5, 6, 7, 7, 2], stride_a: number WORDS, stride_b: number WORDS,
        epilogue: epilogue ([30, 6], 6, [0.5, 1.0], 12),
    }
}
