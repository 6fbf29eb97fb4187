//! Tests of `ops::{matmul, linear, linear_residual, linear_gelu, linear_silu, linear_swiglu,
//! gemm_into}` and of every tile below them.
//!
//! The contract is bits: each output is one chain of fused multiply-adds over ascending k. With
//! split-K it is the sum of several chains, in order. The result is multiplied by alpha. Then come
//! the bias, beta times the old content, and gelu, silu or a gate. The reference here computes this
//! with plain loops, and is close to float64.

use crate::hostile::attack;
use crate::launches::launched;
use crate::matmul_case::{Case, VARIANTS, Variant};
use crate::support::{Random, on_each_device};
use crate::tolerance::Closeness;
use crate::trial::{MARK, Trial, assert_refused, assert_same, trial, trial_of_one};
use cuda_std::launch::Slice;
use kernels::matmul::*;
use kernels::matmul::{EpilogueForm, ProductExtents};
use std::ops::Range;
use stepscope::ops::{self, Gemm};
use stepscope::tensor::{Source, Target};
use stepscope::{Device, DeviceKind, Result, Tensor};

/// m, n, k: tails and multiples of every tile, zero or one products, around a stage of 16, the
/// model's 193, more than all stages of 64.
const SHAPES: [[usize; 3]; 18] = [
    [1, 1, 1],
    [1, 1, 0],
    [3, 4, 0],
    [5, 7, 3],
    [12, 256, 17],
    [16, 64, 16],
    [17, 65, 31],
    [33, 66, 1],
    [64, 64, 32],
    [65, 63, 48],
    [70, 36, 193],
    [13, 20, 333],
    [127, 129, 15],
    [128, 128, 16],
    [129, 257, 17],
    [0, 5, 3],
    [5, 0, 3],
    [2, 1, 193],
];

/// Runs a case on the kernel of every tile that the device has. Returns its name, `out` and `pre`.
fn each_tile(device: &Device, case: &Case) -> Vec<(&'static str, [Vec<f32>; 2])> {
    let mut results = Vec::new();
    let is_there = |tile: Tile| !tile.is_on_cpu() || device.description().kind == DeviceKind::Emulated;
    for &(kernel, tile) in matmul::VARIANTS.iter().filter(|(_, tile)| is_there(*tile)) {
        let result = trial(device, |trial| {
            let upload = |values: &[f32]| trial.upload(values, [values.len()]);
            let (a, b, bias) = (upload(&case.a)?, upload(&case.b)?, upload(&case.bias)?);
            let (mut out, mut pre) = (upload(&case.old)?, upload(&case.old)?);
            let (c, written) = out.in_place();
            trial.launch(matmul {
                tile,
                a: a.slice(),
                b: b.slice(),
                bias: if case.bias.is_empty() { Slice::empty() } else { bias.slice() },
                c,
                out: written,
                pre: pre.out(),
                extents: ProductExtents {
                    m: case.form.m as u32,
                    n: case.form.n as u32,
                    k: case.form.k as u32,
                    k_per_split: case.form.k.max(1) as u32,
                    batches: case.form.batches as u32,
                },
                lda: case.form.lda as u32,
                ldb: case.form.ldb as u32,
                stride_a: case.form.stride_a,
                stride_b: case.form.stride_b,
                epilogue: EpilogueForm {
                    stride_c: case.form.stride_c,
                    stride_bias: case.form.stride_bias,
                    ldc: case.form.ldc as u32,
                    alpha: case.form.alpha,
                    beta: case.form.beta,
                    flags: case.flags,
                },
            })?;
            Ok([trial.output(&out)?, trial.output(&pre)?])
        });
        results.push((kernel, result));
    }
    results
}

fn gemm(device: &Device, case: &Case) -> Vec<f32> {
    trial(device, |trial| {
        let upload = |values: &[f32]| trial.upload(values, [values.len()]);
        let (a, b, bias, mut out) = (upload(&case.a)?, upload(&case.b)?, upload(&case.bias)?, upload(&case.old)?);
        let bias = (!case.bias.is_empty()).then_some(&bias);
        trial.with_scratch(|| {
            ops::gemm_into(trial, &case.form, &a, &b, bias, &mut out)?;
            workspace(trial, &case.form)
        })?;
        trial.output(&out)
    })
}

/// Allocates the memory that a split-K product used and freed, so that the trial accounts for it.
fn workspace<'s>(trial: &Trial<'_, 's>, form: &Gemm) -> Result<Option<Tensor<'s>>> {
    let Gemm { m, n, k, batches, .. } = *form;
    let split_k = k.div_ceil(k_per_split(m, n, k));
    (split_k > 1).then(|| trial.empty([batches * split_k, m, n])).transpose()
}

on_each_device! {
    fn every_tile_is_the_plain_chain(device: &Device) {
        let mut closeness = Closeness::new("matmul");
        for (number, shape) in SHAPES.into_iter().enumerate() {
            for (form, transpose) in [0, TRANSPOSE_A, TRANSPOSE_B, TRANSPOSE_A | TRANSPOSE_B].into_iter().enumerate() {
                // Each variant with each shape, in one of the layouts.
                for variant in VARIANTS.into_iter().skip((number + form) % 4).step_by(4) {
                    let case = Case::new(shape, transpose, variant);
                    let name = format!("{:?}, flags {}", case.form, case.flags);
                    let want = case.chain();
                    let results = each_tile(device, &case);
                    for (tile, got) in &results {
                        assert_same(format_args!("{tile}, {name}"), &got[0], &want[0]);
                        assert_same(format_args!("{tile}, {name}, before the activation"), &got[1], &want[1]);
                    }
                    if case.flags & (GELU | SILU | SWIGLU) == 0 {
                        let sums: Vec<f32> = case.places().map(|(place, _)| results[0].1[0][place]).collect();
                        closeness.check(&name, &sums, &case.exact());
                    }
                }
            }
        }
        closeness.finish();
    }

    /// The old content is not read if beta is 0: a NaN there disappears.
    fn beta_zero_overwrites(device: &Device) {
        for shape in [[5, 7, 3], [40, 70, 17], [129, 130, 16], [3, 4, 0]] {
            let mut case = Case::new(shape, 0, VARIANTS[0]);
            case.old.fill(f32::NAN);
            let [want, _] = case.chain();
            assert!(want.iter().all(|value| value.is_finite()));
            assert_same(format_args!("{shape:?}"), &gemm(device, &case), &want);
        }
    }

    /// NaN and infinity reach only the outputs whose products contain them.
    fn special_numbers_stay_in_rows(device: &Device) {
        for shape in [[7, 9, 5], [70, 130, 33]] {
            let mut case = Case::new(shape, 0, VARIANTS[0]);
            case.a[2 * case.form.lda + 1] = f32::NAN;
            case.a[4 * case.form.lda] = f32::INFINITY;
            case.b[3] = 0.0;
            let got = gemm(device, &case);
            assert_same(format_args!("{shape:?}"), &got, &case.chain()[0]);
            for (place, [_, i, j]) in case.places() {
                assert_eq!(got[place].is_nan(), i == 2 || (i == 4 && j == 3), "row {i}, column {j}");
            }
        }
    }

    /// The op launches the tile that is set, and the result is the same without a setting.
    fn the_op_takes_any_tile(device: &Device) {
        let mut case = Case::new([33, 100, 40], TRANSPOSE_B, Variant { batches: 2, ..VARIANTS[1] });
        let want = &case.chain()[0];
        assert_same("the tile that the op chooses", &gemm(device, &case), want);
        for &(kernel, tile) in matmul::VARIANTS.iter().filter(|(_, tile)| TILES.contains(tile)) {
            case.form = case.form.tile(tile);
            let names = launched(|| assert_same(kernel, &gemm(device, &case), want));
            let names: Vec<_> = names.iter().filter(|name| name.starts_with("matmul")).collect();
            assert_eq!(names, [kernel]);
        }
        let unknown = Tile { stages: 1, ..TILES[0] };
        case.form = case.form.tile(unknown);
        trial(device, |trial| {
            let (a, b, mut out) = (trial.upload(&case.a, [case.a.len()])?, trial.upload(&case.b, [case.b.len()])?, trial.upload(&case.old, [case.old.len()])?);
            let refused = ops::gemm_into(trial, &case.form, &a, &b, None::<&Tensor<'_>>, &mut out);
            assert_refused(refused, &["one of `ops::TILES`", "stages: 1"]);
            Ok(())
        });
    }

    /// Every tile gives the documented bits in split-K products, however k ends. The last split of
    /// the last shape is shorter, and its splits have two chains.
    fn every_tile_splits_k_alike(device: &Device) {
        let mut closeness = Closeness::new("split matmul");
        let everything = Variant { pads: [3, 1, 2], batches: 2, scales: [0.5, 0.5], bias: true, flags: 0 };
        for (shape, transpose, variant) in [
            ([12, 256, 1024], 0, VARIANTS[0]),
            ([33, 70, 513], TRANSPOSE_A, everything),
            ([130, 36, 771], TRANSPOSE_B, everything),
            ([16, 20, 1537], TRANSPOSE_A | TRANSPOSE_B, VARIANTS[0]),
            ([3, 4, 70_001], TRANSPOSE_A, VARIANTS[0]),
        ] {
            let mut case = Case::new(shape, transpose, variant);
            assert!(k_per_split(shape[0], shape[1], shape[2]) < shape[2]);
            let want = &case.chain()[0];
            for tile in TILES {
                case.form = case.form.tile(tile);
                let mut got = vec![];
                let names = launched(|| got = gemm(device, &case));
                assert_same(format_args!("{shape:?}, {tile:?}"), &got, want);
                assert_eq!(names.iter().filter(|name| *name == "sum_splits_f32").count(), 1);
            }
            let sums: Vec<f32> = case.places().map(|(place, _)| want[place]).collect();
            closeness.check(format_args!("{shape:?}"), &sums, &case.exact());
        }
        closeness.finish();
    }

    /// The sums of splits are scratch memory, which is freed when the product is queued.
    fn split_k_frees_its_memory(device: &Device) {
        let case = Case::new([64, 64, 1024], 0, VARIANTS[0]);
        trial(device, |trial| {
            let upload = |values: &[f32]| trial.upload(values, [values.len()]);
            let (a, b, mut out) = (upload(&case.a)?, upload(&case.b)?, upload(&case.old)?);
            let out_end = out.slice().address() + size_of_val(&case.old[..]) as u64;
            ops::gemm_into(trial, &case.form, &a, &b, None::<&Tensor<'_>>, &mut out)?;
            trial.with_scratch(|| {
                // The scratch marker lies where the product's workspace was.
                let next = trial.empty::<f32>([0])?.slice().address();
                assert_eq!(next, out_end + (MARK * size_of::<f32>()) as u64);
                workspace(trial, &case.form)
            })?;
            trial.output(&out).map(drop)
        });
    }

    fn large(device: &Device) {
        let mut closeness = Closeness::new("large matmul");
        for (shape, transpose) in
            [([1031, 259, 193], 0), ([193, 257, 1536], TRANSPOSE_A), ([1536, 193, 256], TRANSPOSE_B)]
        {
            let case = Case::new(shape, transpose, VARIANTS[1 - usize::from(transpose == 0)]);
            let got = gemm(device, &case);
            assert_same(format_args!("{shape:?}"), &got, &case.chain()[0]);
            let sums: Vec<f32> = case.places().map(|(place, _)| got[place]).collect();
            closeness.check(format_args!("{shape:?}"), &sums, &case.exact());
        }
        closeness.finish();
    }

    /// B is transposed first if there are many rows, and not for half as many. Each row has the
    /// same bits.
    fn transposed_b_keeps_bits(device: &Device) {
        let [m, n, k] = [4096, 2048, 1024];
        assert_eq!(k_per_split(m, n, k), k_per_split(m / 2, n, k));
        let [a, b, bias, old] = [m * k, n * k, n, m * n].map(|count| Random::new(count as u64).normals(count));
        let product = |rows: Range<usize>| {
            trial_of_one(device, |trial| {
                let (a, b) = (trial.upload(&a[rows.start * k..rows.end * k], [rows.len(), k])?, trial.upload(&b, [n, k])?);
                let bias = trial.upload(&bias, [n])?;
                let mut out = trial.upload(&old[rows.start * n..rows.end * n], [rows.len(), n])?;
                let form = Gemm { beta: 0.5, ..Gemm::new(rows.len(), n, k).transpose_b().scaled(2.0) };
                let mut done = Ok(());
                let names = launched(|| done = ops::gemm_into(trial, &form, &a, &b, Some(&bias), &mut out));
                assert_eq!(names.contains("transpose_f32"), rows.len() == m, "{names:?}");
                done?;
                if rows.len() == m {
                    trial.with_scratch(|| trial.empty::<f32>([k, n]))?;
                }
                trial.output(&out)
            })
        };
        let halves = [product(0..m / 2), product(m / 2..m)].concat();
        assert_same("4096 rows", &product(0..m), &halves);
    }

    fn interleaved_batches(device: &Device) {
        let case = Case::interleaved([5, 9, 6], 4);
        assert_same("interleaved", &gemm(device, &case), &case.chain()[0]);
    }

    /// The shaped ops: inputs of any rank, bias, residual, and gelu with its kept input.
    fn shaped_ops(device: &Device) {
        for [batch, tokens, k, n] in [[2, 12, 193, 256], [1, 1, 1, 1], [0, 12, 5, 7], [3, 7, 0, 5], [3, 7, 66, 5], [1, 12, 1024, 24]] {
            let rows = batch * tokens;
            let mut case = Case::new([rows, n, k], 0, Variant { bias: true, ..VARIANTS[0] });
            // Without rows, the case's own bias has no length.
            case.bias = Random::new(1).normals(n);
            let residual = case.old.clone();
            let got = trial(device, |trial| {
                let (x, w) = (trial.upload(&case.a, [batch, tokens, k])?, trial.upload(&case.b, [k, n])?);
                let (bias, residual) = (trial.upload(&case.bias, [n])?, trial.upload(&residual, [batch, tokens, n])?);
                let outputs = trial.with_scratch(|| {
                    let done = || workspace(trial, &Gemm::new(rows, n, k));
                    let plain = ops::matmul(trial, &x, &w)?;
                    done()?;
                    let biased = ops::linear(trial, &x, &w, Some(&bias))?;
                    done()?;
                    let added = ops::linear_residual(trial, &x, &w, Some(&bias), &residual)?;
                    done()?;
                    let (active, pre) = ops::linear_gelu(trial, &x, &w, Some(&bias))?;
                    done()?;
                    let unbiased = ops::linear_residual(trial, &x, &w, None::<&Tensor<'_>>, &residual)?;
                    done()?;
                    Ok([plain, biased, added, active, pre, unbiased])
                })?;
                assert!(outputs.iter().all(|output| output.shape() == residual.shape()));
                outputs.iter().map(|output| trial.output(output)).collect::<Result<Vec<_>>>()
            });
            let mut chain = |bias: bool, beta: f32, flags: u32| {
                let held = if bias { vec![] } else { std::mem::take(&mut case.bias) };
                (case.form.beta, case.flags) = (beta, flags);
                let chain = case.chain();
                if !bias {
                    case.bias = held;
                }
                chain
            };
            let [active, pre] = chain(true, 0.0, GELU | STORE_PREACT);
            let [[plain, _], [biased, _]] = [chain(false, 0.0, 0), chain(true, 0.0, 0)];
            let [[added, _], [unbiased, _]] = [chain(true, 1.0, 0), chain(false, 1.0, 0)];
            let names = ["matmul", "linear", "linear_residual", "linear_gelu", "before gelu", "residual without bias"];
            for ((got, want), name) in got.iter().zip([plain, biased, added, active, pre, unbiased]).zip(names) {
                assert_same(format_args!("{name} of [{batch}, {tokens}, {k}] [{k}, {n}]"), got, &want);
            }
        }
    }

    /// A launch that would leave its arguments, or write an element twice, names the argument and
    /// runs nothing.
    fn violations_name_the_argument(device: &Device) {
        let sound = Gemm { batches: 2, stride_a: 6, stride_b: 8, stride_c: 12, stride_bias: 4, ..Gemm::new(3, 4, 2) };
        trial(device, |trial| {
            let ones = |length: usize| trial.upload(&vec![1.0; length], [length]);
            let (a, b, bias, mut out) = (ones(12)?, ones(16)?, ones(8)?, ones(24)?);
            for (form, argument) in [
                (Gemm { m: 4, ..sound }, "a"),
                (Gemm { stride_a: 7, ..sound }, "a"),
                (Gemm { stride_a: usize::MAX, ..sound }, "a"),
                (Gemm { stride_b: 9, ..sound }, "b"),
                (Gemm { ldb: 5, ..sound }, "b"),
                (Gemm { transpose_b: true, ldb: 4, ..sound }, "b"),
                (Gemm { stride_bias: 5, ..sound }, "bias"),
                (Gemm { stride_c: 13, ..sound }, "out"),
                (Gemm { ldc: 3, ..sound }, "out"),
                (Gemm { stride_c: 11, ..sound }, "stride_c"),
                (Gemm { stride_c: 0, ..sound }, "stride_c"),
                // More than 32 bits of index, counting a tile's last rows. The check needs no
                // memory.
                (Gemm { m: (1 << 31) + 1, n: 0, k: 0, ..sound }, "m"),
                (Gemm { m: 0, n: (1 << 31) + 1, k: 0, ..sound }, "n"),
                (Gemm { m: 0, n: 0, k: (1 << 31) + 1, ..sound }, "k"),
            ] {
                let refused = ops::gemm_into(trial, &form, &a, &b, Some(&bias), &mut out);
                assert_refused(refused, &["kernel `matmul_", &format!("`{argument}`: expected")]);
            }
            let huge = Gemm { m: 1 << 32, ..sound };
            assert_refused(ops::gemm_into(trial, &huge, &a, &b, Some(&bias), &mut out), &["matmul", "`m` below 2^32"]);
            Ok(())
        });
    }

    /// Launches may have one activation at most, and no derivative in f32. Nothing is added if `c`
    /// is a gate, and nothing follows a split's sum.
    fn epilogues_must_agree(device: &Device) {
        trial(device, |trial| {
            let ones = trial.upload(&[1.0; 64], [64])?;
            for (k_per_split, flags, [alpha, beta], argument) in [
                (8, GELU | SILU, [1.0, 0.0], "flags"),
                (8, SILU | SWIGLU, [1.0, 0.0], "flags"),
                (8, GELU_DERIVATIVE, [1.0, 0.0], "flags"),
                (8, SWIGLU, [1.0, 1.0], "beta"),
                (4, SILU, [1.0, 0.0], "k_per_split"),
                (4, SWIGLU, [1.0, 0.0], "k_per_split"),
                (4, 0, [0.5, 0.0], "k_per_split"),
            ] {
                let (mut out, mut pre) = (trial.empty::<f32>([16])?, trial.empty::<f32>([8])?);
                let refused = trial.launch(matmul {
                    tile: TILES[0],
                    a: ones.slice(),
                    b: ones.slice(),
                    bias: Slice::empty(),
                    c: ones.pointer(),
                    out: out.out(),
                    pre: pre.out(),
                    extents: ProductExtents { m: 2, n: 4, k: 8, k_per_split, batches: 1 },
                    lda: 8,
                    ldb: 4,
                    stride_a: 16,
                    stride_b: 32,
                    epilogue: EpilogueForm { stride_c: 8, stride_bias: 4, ldc: 4, alpha, beta, flags },
                });
                assert_refused(refused, &["kernel `matmul_", &format!("`{argument}`: expected")]);
            }
            Ok(())
        });
    }

    fn shapes_must_agree(device: &Device) {
        trial(device, |trial| {
            let (x, w) = (trial.upload(&[1.0; 6], [2, 3])?, trial.upload(&[1.0; 8], [4, 2])?);
            assert_refused(ops::matmul(trial, &x, &w), &["linear", "[.., 4]", "[4, 2]", "[2, 3]"]);
            assert_refused(
                ops::matmul(trial, &x, &w.reshape([2, 2, 2])?),
                &["weights of shape [in, out]", "[2, 2, 2]"],
            );
            let (w, bias) = (trial.upload(&[1.0; 6], [3, 2])?, trial.upload(&[1.0; 1], [1])?);
            assert_refused(ops::linear(trial, &x, &w, Some(&bias)), &["`bias`: expected", "1 elements"]);
            let refused = ops::linear_residual(trial, &x, &w, None::<&Tensor<'_>>, &x);
            assert_refused(refused, &["linear_residual", "[2, 2]", "[2, 3]"]);
            let refused = ops::linear_swiglu(trial, &x, &w, None::<&Tensor<'_>>, &x);
            assert_refused(refused, &["linear_swiglu", "[2, 2]", "[2, 3]"]);
            Ok(())
        });
    }
}

// Products: two batches of `[5, 7] [7, 6]`.
attack! {
    matmul::matmul by tile {
        a: f32s 70, b: f32s 84, bias: f32s 12, c: pointer 60, out: out 60, pre: out 60,
        extents: product [5, 6, 7, 7, 2], lda: number 7, ldb: number 6, stride_a: number 35, stride_b: number 42,
        epilogue: epilogue ([30, 6], 6, [0.5, 1.0], 12),
    }
    matmul::sum_splits<S> {
        partials: f32s 180, bias: f32s 12, c: stored_pointer 60, out: out_stored 60, pre: out_stored 60,
        extents: product [5, 6, 3, 1, 2], epilogue: epilogue ([30, 6], 6, [0.5, 1.0], 12),
    }
}
