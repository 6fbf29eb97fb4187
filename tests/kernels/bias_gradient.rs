//! The gradient of a bias, which the product of the weight's gradient sums: its order of sums, its
//! shapes, and its bounds.

use crate::hostile::{emulated, hostile_launches};
use crate::matmul_bf16::{form, numbers, product};
use crate::support::{Random, on_each_device};
use crate::trial::{assert_refused, assert_same, trial};
use cuda_std::launch::{Contract as _, Pointer, PointerMut, Slice};
use kernels::matmul::TRANSPOSE_B;
use kernels::matmul::{EpilogueForm, ProductExtents};
use kernels::matmul_bf16::{ADD_TO_SUMS, BIAS_GRAD, OperandLayout, matmul_bf16};
use kernels::stored::Stored as _;
use stepscope::tensor::{Saved, Source, Stored, Target};
use stepscope::{Device, Result, Step, Tensor, bf16, ops};

/// Returns the sums of the columns of `b`, `[k, n]`, in the documented order: four lanes of each
/// split, their tree, the splits.
fn column_sums(b: &[bf16], [n, k, k_per_split]: [usize; 3]) -> Vec<f32> {
    let of_split = |column: usize, first: usize| {
        let mut lanes = [0.0f32; 4];
        (first..k.min(first + k_per_split)).for_each(|p| lanes[(p - first) % 8 / 2] += b[p * n + column].widen());
        (lanes[0] + lanes[1]) + (lanes[2] + lanes[3])
    };
    let sum =
        |column| (0..k.max(1)).step_by(k_per_split).map(|first| of_split(column, first)).reduce(|sum, next| sum + next);
    (0..n).map(|column| sum(column).expect("k has at least one split")).collect()
}

/// Returns the gradients of a weight and a bias from dy, `[k, n]`, which is `b`. `old` is the
/// bias's gradient to add to, if any.
fn weight_gradients(device: &Device, form: &ops::Gemm, a: &[bf16], b: &[bf16], old: Option<&[f32]>) -> [Vec<f32>; 2] {
    let ops::Gemm { m, n, k, .. } = *form;
    trial(device, |trial| {
        let (a, b) = (trial.upload(a, [k, m])?, trial.upload(b, [k, n])?);
        let mut dw = trial.empty::<f32>([m, n])?;
        let mut db = match old {
            Some(old) => trial.upload(old, [n])?,
            None => trial.empty([n])?,
        };
        let split_k = k.div_ceil(kernels::matmul_bf16::k_per_split(m, n, k));
        trial.with_scratch(|| {
            let for_dw = ops::launch::Gradient { form: *form, of: &a, into: &mut dw };
            let for_db = ops::launch::BiasGradient { into: &mut db, accumulate: old.is_some() };
            let none = None::<ops::launch::Gradient<'_, Saved<'_, bf16>, Tensor<'_>>>;
            ops::launch::gradients_into(trial, &b, for_dw, Some(for_db), none)?;
            // As in `gemm`.
            let scratch = || Ok((trial.empty::<f32>([split_k, n])?, trial.empty::<f32>([split_k, m, n])?));
            (split_k > 1).then(scratch).transpose()
        })?;
        Ok([trial.output(&dw)?, trial.output(&db)?])
    })
}

on_each_device! {
    /// The bias gradient in the weight's product has the documented bits in every tile, and is
    /// close to the float64 sum. It does not change the product.
    fn columns_sum_in_order(device: &Device) {
        // Rows of blocks that do not sum; no k; whole stages, and tails of all kinds; k in splits.
        for [m, n, k] in [[1, 1, 1], [3, 5, 0], [130, 260, 97], [256, 256, 160], [17, 300, 205], [48, 72, 2100]] {
            let (a, b) = (numbers(11, m * k, false), numbers(12, k * n, false));
            let old = Random::new(13).normals(n);
            let k_per_split = kernels::matmul_bf16::k_per_split(m, n, k);
            assert_eq!(k_per_split < k, k == 2100);
            let want = column_sums(&b, [n, k, k_per_split]);
            let added: Vec<f32> = want.iter().zip(&old).map(|(sum, old)| old + sum).collect();
            for (column, sum) in want.iter().enumerate() {
                let numbers = || (0..k).map(|p| f64::from(b[p * n + column]));
                let bound = numbers().map(f64::abs).sum::<f64>() * k as f64 * f64::from(f32::EPSILON);
                assert!((f64::from(*sum) - numbers().sum::<f64>()).abs() <= bound, "{m} {n} {k}: column {column}");
            }
            for tile in ops::BF16_TILES {
                let form = form([m, n, k], [true, false], tile);
                let [dw, db] = weight_gradients(device, &form, &a, &b, None);
                assert_same(format!("db of {form:?}"), &db, &want);
                assert_same(format!("added db of {form:?}"), &weight_gradients(device, &form, &a, &b, Some(&old))[1], &added);
                if k_per_split >= k {
                    assert_same(format!("dw of {form:?}"), &dw, &product::<f32>(device, &form, &a, &b));
                }
            }
        }
    }

    fn bias_matches_columns(device: &Device) {
        trial(device, |trial| {
            let (x, dy) = (trial.upload(&[bf16::ONE; 12], [3, 4])?, trial.upload(&[bf16::ONE; 6], [3, 2])?);
            for (form, length, words) in [
                (ops::Gemm::new(4, 2, 3).transpose_a(), 3, ["2 elements", "[3]"]),
                (ops::Gemm::new(4, 2, 3), 2, ["x^T dy", "transpose_a: false"]),
            ] {
                let (mut dw, mut db) = (trial.upload(&[0.0; 8], [4, 2])?, trial.upload(&[0.0; 3][..length], [length])?);
                let for_dw = ops::launch::Gradient { form, of: &x, into: &mut dw };
                let for_db = ops::launch::BiasGradient { into: &mut db, accumulate: false };
                let none = None::<ops::launch::Gradient<'_, Saved<'_, bf16>, Tensor<'_>>>;
                assert_refused(ops::launch::gradients_into(trial, &dy, for_dw, Some(for_db), none), &words);
            }
            Ok(())
        });
    }
}

/// Attacks like `attack!`, with sums of B's columns, which BF16 outputs do not support: two
/// batches, two splits.
#[test]
fn column_sums_stay_in_bounds() {
    emulated(|step| {
        let (a, b) = (step.upload(&[bf16::ONE; 700], [700])?, step.upload(&[bf16::ONE; 840], [840])?);
        let (mut out, mut sums) = (step.upload(&[1.0; 120], [120])?, step.upload(&[1.0; 24], [24])?);
        let variants =
            matmul_bf16::<'_, f32>::VARIANTS.iter().filter(|(_, (form, _), _)| *form == OperandLayout::Transposed);
        for &(name, variant, _) in variants {
            hostile_launches(name, &[700, 840, 120, 24], variant.1 == ops::BF16_TILES[0], &mut |numbers, launch| {
                let kernel = matmul_bf16::<'_, f32> {
                    variant,
                    a: a.slice(),
                    b: b.slice(),
                    bias: Slice::empty(),
                    c: Pointer::empty(),
                    out: out.out(),
                    pre: PointerMut::empty(),
                    sums: sums.out(),
                    extents: ProductExtents {
                        m: numbers.next("m", 5),
                        n: numbers.next("n", 6),
                        k: numbers.next("k", 70),
                        k_per_split: numbers.next("k_per_split", 64),
                        batches: numbers.next("batches", 2),
                    },
                    lda: numbers.next("lda", 5),
                    ldb: numbers.next("ldb", 6),
                    stride_a: numbers.next("stride_a", 350),
                    stride_b: numbers.next("stride_b", 420),
                    epilogue: EpilogueForm {
                        stride_c: numbers.next("stride_c", 30),
                        stride_bias: numbers.next("stride_bias", 0),
                        ldc: numbers.next("ldc", 6),
                        alpha: 1.0,
                        beta: 0.0,
                        flags: numbers.next("flags", BIAS_GRAD | ADD_TO_SUMS),
                    },
                };
                match kernel.grid() {
                    Ok(_) if !launch => Ok(()),
                    _ => step.launch(kernel),
                }
            });
        }
        // Only into f32, together with a transposed A, and only for an untransposed dy.
        let mut halves = step.upload(&[bf16::ONE; 120], [120])?;
        let refused = "`flags`: expected sums of B only with a transposed A and an f32 output";
        assert_refused(
            summed(step, [&a, &b], &mut halves, &mut sums, (OperandLayout::Transposed, 0)),
            &["_bf16`", refused],
        );
        assert_refused(summed(step, [&a, &b], &mut out, &mut sums, (OperandLayout::Plain, 0)), &["_f32`", refused]);
        let launched = summed(step, [&a, &b], &mut out, &mut sums, (OperandLayout::Transposed, TRANSPOSE_B));
        assert_refused(launched, &["`flags`: expected B as [k, n] if it is summed"]);
        Ok(())
    });
}

/// Launches a product whose B is summed: `[5, 7] [7, 6]`.
fn summed<'s, S: Stored>(
    step: &Step<'s>,
    [a, b]: [&Tensor<'s, bf16>; 2],
    out: &mut Tensor<'s, S>,
    sums: &mut Tensor<'s>,
    (form, flags): (OperandLayout, u32),
) -> Result<()> {
    step.launch(matmul_bf16 {
        variant: (form, ops::BF16_TILES[0]),
        a: a.slice(),
        b: b.slice(),
        bias: Slice::empty(),
        c: Pointer::empty(),
        out: out.out(),
        pre: PointerMut::empty(),
        sums: sums.out(),
        extents: ProductExtents { m: 5, n: 6, k: 7, k_per_split: 7, batches: 1 },
        lda: if form == OperandLayout::Plain { 7 } else { 5 },
        ldb: 7,
        stride_a: 0,
        stride_b: 0,
        epilogue: EpilogueForm {
            stride_c: 30,
            stride_bias: 0,
            ldc: 6,
            alpha: 1.0,
            beta: 0.0,
            flags: flags | BIAS_GRAD,
        },
    })
}
