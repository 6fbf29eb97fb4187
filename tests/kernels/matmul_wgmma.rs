//! Products of BF16 tensors by wgmma. On the emulator they have the bits of `matmul_bf16`, for each
//! tile, layout, epilogue, split and grid, also of operands that are copied first. Tests of the ops
//! run with them too, if the device chooses wgmma.

use crate::hostile::attack;
use crate::matmul_case::{Case as GemmCase, VARIANTS, Variant};
use crate::support::{Random, narrow, on_each_device};
use crate::trial::{assert_same, trial};
use cuda_std::emulator::Mode;
use cuda_std::launch::{Contract as _, PointerMut, Slice, TensorMap};
use kernels::matmul::{EpilogueForm, ProductExtents};
use kernels::matmul::{GELU, GELU_DERIVATIVE, SILU, STORE_PREACT, SWIGLU, TRANSPOSE_A, TRANSPOSE_B};
use kernels::matmul_bf16::{ADD_TO_SUMS, BIAS_GRAD, OperandLayout, matmul_bf16};
use kernels::matmul_wgmma::{self as wgmma, Aligning, align_rows, aligned_stride, matmul_wgmma};
use kernels::wgmma::box_rows;
use stepscope::device::MatrixInstruction;
use stepscope::tensor::{Element, Source as _, Stored, Target as _};
use stepscope::{Arena, Capacity, Device, DeviceKind, EagerStep, Result, Tensor, bf16, ops};

/// A product of one layout.
#[derive(Clone, Copy, Debug)]
struct Case {
    extents: [usize; 3],
    layouts: [OperandLayout; 2],
    batches: usize,
    k_per_split: usize,
    /// Elements between a row's end and the next row of the output.
    pad: usize,
    scales: [f32; 2],
    has_bias: bool,
    flags: u32,
    /// The blocks of the grid at most.
    blocks: u32,
}

const LAYOUTS: [[OperandLayout; 2]; 4] = {
    use OperandLayout::{Plain, Transposed};
    [[Plain, Plain], [Plain, Transposed], [Transposed, Plain], [Transposed, Transposed]]
};

const ALL: usize = usize::MAX;

/// Extents with tails of every kind, no k, one chunk, more stages than slots, several tiles. In the
/// last three, the last tiles are moved back: by parts, by chunks and by rows.
const EXTENTS: [[usize; 3]; 10] = [
    [1, 1, 1],
    [3, 8, 0],
    [64, 128, 64],
    [129, 130, 40],
    [128, 256, 128],
    [17, 300, 333],
    [256, 520, 96],
    [144, 320, 136],
    [136, 328, 192],
    [129, 264, 136],
];

/// Returns random BF16 values.
fn numbers<S: Stored>(seed: u64, length: usize) -> Vec<S> {
    Random::new(seed).normals(length).into_iter().map(S::narrow).collect()
}

/// Returns `out`, `pre` and the column sums of a case: by wgmma in this tile, or by `matmul_bf16`.
fn outputs<S: Stored>(step: &EagerStep<'_>, case: Case, tile: Option<wgmma::Tile>) -> Result<[Vec<f32>; 3]> {
    let Case { extents: [m, n, k], layouts, batches, pad, scales: [alpha, beta], flags, .. } = case;
    let of = |transposed: bool, [rows, cols]: [usize; 2]| {
        let [rows, cols] = if transposed { [cols, rows] } else { [rows, cols] };
        (rows, cols.next_multiple_of(8))
    };
    let (a_rows, lda) = of(layouts[0] == OperandLayout::Transposed, [m, k]);
    let (b_rows, ldb) = of(layouts[1] == OperandLayout::Transposed, [k, n]);
    let (split_k, ldc) = (k.div_ceil(case.k_per_split.min(k.max(1))).max(1), n + pad);
    let length = batches * split_k * m * ldc;
    let a = step.upload(&numbers::<bf16>(1, batches * a_rows * lda), [batches * a_rows * lda])?;
    let b = step.upload(&numbers::<bf16>(2, batches * b_rows * ldb), [batches * b_rows * ldb])?;
    let bias = step.upload(&numbers::<f32>(3, batches * n), [batches * n])?;
    let mut out = step.upload(&numbers::<S>(4, length), [length])?;
    let mut pre = step.upload(&numbers::<S>(5, length), [length])?;
    let mut sums = step.upload(&numbers::<f32>(6, batches * split_k * n), [batches * split_k * n])?;
    let (c, written) = out.in_place();
    let map = |layout, memory, [rows, cols]: [usize; 2], ld: usize| {
        let [rows, cols] = if layout == OperandLayout::Transposed { [cols, rows] } else { [rows, cols] };
        TensorMap {
            memory,
            extents: [cols, rows, batches].map(|x| x as u32),
            strides: [ld, rows * ld],
            box_rows: box_rows::<bf16>(true),
        }
    };
    macro_rules! launch {
        ($kernel:ident { $($own:ident: $value:expr),* }) => {
            step.launch($kernel {
                $($own: $value,)*
                bias: if case.has_bias { bias.slice() } else { Slice::empty() },
                c,
                out: written,
                pre: pre.out(),
                sums: if flags & BIAS_GRAD == 0 { PointerMut::empty() } else { sums.out() },
                extents: ProductExtents { m: m as u32, n: n as u32, k: k as u32, k_per_split: case.k_per_split.min(k.max(1)) as u32, batches: batches as u32 },
                epilogue: EpilogueForm { stride_c: m * ldc, stride_bias: n, ldc: ldc as u32, alpha, beta, flags: flags | if layouts[1] == OperandLayout::Transposed { TRANSPOSE_B } else { 0 } },
            })?
        };
    }
    match tile {
        Some(tile) => launch!(matmul_wgmma {
            variant: (layouts, tile),
            a: map(layouts[0], a.slice(), [m, k], lda),
            b: map(layouts[1], b.slice(), [k, n], ldb),
            steps_a: 1,
            steps_b: 1,
            blocks: case.blocks
        }),
        None => launch!(matmul_bf16 {
            variant: (layouts[0], ops::BF16_TILES[0]),
            a: a.slice(),
            b: b.slice(),
            lda: lda as u32,
            ldb: ldb as u32,
            stride_a: a_rows * lda,
            stride_b: b_rows * ldb
        }),
    }
    let read = |values: Vec<S>| values.into_iter().map(S::widen).collect();
    Ok([read(step.read(&out)?), read(step.read(&pre)?), step.read(&sums)?])
}

/// Checks that every tile gives the bits of `matmul_bf16`, with S outputs.
fn assert_same_bits<S: Stored>(case: Case) {
    let device = Device::open(DeviceKind::Emulated).unwrap();
    let run = |tile| {
        let mut arena = Arena::builder(&device).capacity(Capacity::mib(32)).build().unwrap();
        arena.step(|step| outputs::<S>(step, case, tile)).unwrap()
    };
    let want = run(None);
    for tile in wgmma::TILES {
        for (got, want) in run(Some(tile)).iter().zip(&want) {
            assert_same(format_args!("{case:?}, {tile:?}, {}", <S as Element>::NAME), got, want);
        }
    }
}

fn plain(extents: [usize; 3], layouts: [OperandLayout; 2]) -> Case {
    Case {
        extents,
        layouts,
        batches: 1,
        k_per_split: ALL,
        pad: 0,
        scales: [1.0, 0.0],
        has_bias: false,
        flags: 0,
        blocks: 132,
    }
}

#[test]
fn all_layouts_match_bits() {
    for extents in EXTENTS {
        for layouts in LAYOUTS {
            assert_same_bits::<f32>(plain(extents, layouts));
            assert_same_bits::<bf16>(plain(extents, layouts));
        }
    }
}

/// Each epilogue, for whole tiles, ragged ones, and rows that do not begin on 16 bytes.
#[test]
fn all_epilogues_match_bits() {
    for (layouts, extents, pad) in [
        (LAYOUTS[0], [128, 256, 136], 0),
        (LAYOUTS[1], [150, 264, 72], 0),
        (LAYOUTS[1], [144, 320, 136], 8),
        (LAYOUTS[0], [131, 264, 136], 0),
        (LAYOUTS[2], [128, 256, 80], 4),
        (LAYOUTS[1], [144, 320, 72], 2),
        (LAYOUTS[3], [130, 131, 80], 1),
    ] {
        for (flags, scales, has_bias) in [
            (0, [0.5, 0.25], true),
            (GELU | STORE_PREACT, [1.0, 0.0], true),
            (GELU, [0.3, 0.5], true),
            (SILU | STORE_PREACT, [1.0, -1.0], false),
            (SWIGLU | STORE_PREACT, [1.0, 0.0], true),
            (STORE_PREACT, [1.0, 0.0], false),
            (GELU_DERIVATIVE, [1.0, 0.0], false),
        ] {
            let case = Case { pad, scales, has_bias, flags, ..plain(extents, layouts) };
            assert_same_bits::<bf16>(case);
            if flags & GELU_DERIVATIVE == 0 {
                assert_same_bits::<f32>(case);
            }
        }
    }
}

/// Batches, splits of k, grids of fewer blocks than tiles, and the sums of B's columns.
#[test]
fn batches_splits_and_sums_match_bits() {
    let sums = LAYOUTS[2];
    for (layouts, extents, batches, k_per_split, blocks, flags) in [
        (LAYOUTS[0], [130, 260, 200], 2, ALL, 1, 0),
        (LAYOUTS[1], [200, 130, 208], 3, 96, 2, 0),
        (LAYOUTS[3], [72, 520, 320], 1, 160, 5, 0),
        (LAYOUTS[0], [144, 320, 200], 2, ALL, 1, 0),
        (LAYOUTS[1], [128, 320, 560], 1, 192, 4, 0),
        (sums, [144, 320, 560], 2, 192, 3, BIAS_GRAD),
        (sums, [256, 320, 136], 1, ALL, 2, BIAS_GRAD | ADD_TO_SUMS),
        (sums, [130, 260, 97], 1, ALL, 132, BIAS_GRAD),
        (sums, [129, 300, 168], 2, ALL, 3, BIAS_GRAD | ADD_TO_SUMS),
        (sums, [17, 300, 680], 1, 224, 2, BIAS_GRAD),
        (sums, [5, 70, 0], 1, ALL, 132, BIAS_GRAD | ADD_TO_SUMS),
    ] {
        let case = Case { batches, k_per_split, blocks, flags, ..plain(extents, layouts) };
        assert_same_bits::<f32>(case);
        if k_per_split == ALL && flags == 0 {
            assert_same_bits::<bf16>(case);
        }
    }
}

/// Nothing writes a slot of the ring while products read it, and no two warps an output.
#[test]
fn ring_has_no_race() {
    let races = Mode { races: true, ..Mode::default() };
    races.scope(|| {
        for layouts in LAYOUTS {
            assert_same_bits::<bf16>(Case { blocks: 1, ..plain([130, 260, 400], layouts) });
        }
        assert_same_bits::<bf16>(Case { blocks: 1, ..plain([144, 328, 400], LAYOUTS[1]) });
        for extents in [[130, 260, 400], [144, 320, 400]] {
            let sums = Case { flags: BIAS_GRAD, blocks: 1, ..plain(extents, LAYOUTS[2]) };
            assert_same_bits::<f32>(sums);
        }
    });
}

/// Runs `of` on an emulator that multiplies by this instruction.
fn with_instruction<R>(instruction: MatrixInstruction, of: impl FnOnce(&EagerStep<'_>) -> Result<R>) -> R {
    let device = Device::builder(DeviceKind::Emulated).matrix_instruction(instruction).open().unwrap();
    let mut arena = Arena::builder(&device).capacity(Capacity::mib(64)).build().unwrap();
    arena.step(|step| of(step)).unwrap()
}

/// Checks that `of` gives the same values with both instructions.
fn assert_same_by_both(what: &str, of: impl Fn(&EagerStep<'_>) -> Result<Vec<Vec<f32>>>) {
    let want = with_instruction(MatrixInstruction::MmaSync, &of);
    for (number, (got, want)) in with_instruction(MatrixInstruction::Wgmma, &of).iter().zip(&want).enumerate() {
        assert_same(format_args!("{what}, output {number}"), got, want);
    }
}

/// Products with one or both operands whose rows do not begin on 16 bytes: each layout, batches,
/// one B for all of them, padded rows, alpha, beta and bias, and k in splits.
#[test]
fn unaligned_products_match_bits() {
    fn product<S: Stored>(step: &EagerStep<'_>, case: &GemmCase) -> Result<Vec<f32>> {
        let [a, b] = [&case.a, &case.b].map(|values| step.upload(&narrow::<bf16>(values), [values.len()]));
        let (a, b, bias) = (a?, b?, step.upload(&case.bias, [case.bias.len()])?);
        let mut out = step.upload(&narrow::<S>(&case.old), [case.old.len()])?;
        let bias = (!case.bias.is_empty()).then_some(&bias);
        ops::gemm_into(step, &case.form, &a, &b, bias, &mut out)?;
        Ok(step.read(&out)?.into_iter().map(S::widen).collect())
    }
    let plain: Vec<Variant> = VARIANTS.into_iter().filter(|variant| variant.flags == 0).collect();
    let shapes: [([usize; 3], &[Variant]); 4] = [
        ([129, 131, 67], &plain),
        ([65, 264, 72], &plain),
        ([136, 65, 128], &plain[..1]),
        ([33, 35, 1057], &plain[..1]),
    ];
    for (extents, variants) in shapes {
        for transpose in [0, TRANSPOSE_A, TRANSPOSE_B, TRANSPOSE_A | TRANSPOSE_B] {
            for &variant in variants {
                let case = GemmCase::new(extents, transpose, variant);
                assert_same_by_both(&format!("{:?}", case.form), |step| {
                    Ok(vec![product::<f32>(step, &case)?, product::<bf16>(step, &case)?])
                });
            }
        }
    }
    let case = GemmCase::interleaved([70, 67, 129], 4);
    assert_same_by_both("interleaved", |step| Ok(vec![product::<f32>(step, &case)?, product::<bf16>(step, &case)?]));
}

/// The epilogues of linear layers, and their gradients with that of the bias, if no extent is a
/// multiple of eight.
#[test]
fn unaligned_layers_match_bits() {
    for [rows, inputs, outputs] in [[131, 67, 261], [1083, 35, 67]] {
        assert_same_by_both(&format!("{rows} x {outputs}, k {inputs}"), |step| {
            let number =
                |seed, extents: [usize; 2]| step.upload(&numbers::<bf16>(seed, extents[0] * extents[1]), extents);
            let (x, w, dy) = (number(1, [rows, inputs])?, number(2, [inputs, outputs])?, number(3, [rows, outputs])?);
            let bias = step.upload(&numbers::<f32>(4, outputs), [outputs])?;
            let (gelu, pre) = ops::linear_gelu(step, &x, &w, Some(&bias))?;
            let (silu, _) = ops::linear_silu(step, &x, &w, None::<&Tensor<'_>>)?;
            let (gated, _) = ops::linear_swiglu(step, &x, &w, Some(&bias), &dy)?;
            let added = ops::linear_residual(step, &x, &w, Some(&bias), &dy)?;
            let dpre = ops::launch::gelu_linear_backward(step, &x, &w, &dy)?;
            let mut dw = step.upload(&numbers::<f32>(5, inputs * outputs), [inputs, outputs])?;
            let mut db = step.upload(&numbers::<f32>(6, outputs), [outputs])?;
            let mut dx = step.empty::<bf16>([rows, inputs])?;
            ops::launch::gradients_into(
                step,
                &dy,
                ops::launch::Gradient {
                    form: ops::Gemm::new(inputs, outputs, rows).transpose_a().accumulate(),
                    of: &x,
                    into: &mut dw,
                },
                Some(ops::launch::BiasGradient { into: &mut db, accumulate: true }),
                Some(ops::launch::Gradient {
                    form: ops::Gemm::new(rows, inputs, outputs).transpose_b(),
                    of: &w,
                    into: &mut dx,
                }),
            )?;
            let mut results = vec![step.read(&dw)?, step.read(&db)?];
            for tensor in [&pre, &gelu, &silu, &gated, &added, &dpre, &dx] {
                results.push(step.read(tensor)?.into_iter().map(f32::from).collect());
            }
            Ok(results)
        });
    }
}

on_each_device! {
    /// Each element is copied bit by bit to its place in rows that begin on 16 bytes, with zeros up
    /// to the next.
    fn rows_are_aligned_with_zeros(device: &Device) {
        if device.description().kind == DeviceKind::Cuda && !device.description().has_wgmma {
            return;
        }
        for (turn, [rows, cols]) in [[1, 1], [3, 8], [5, 0], [0, 4], [31, 70], [300, 17], [7, 1031]].into_iter().enumerate() {
            let (batches, ld) = (1 + turn % 3, cols + turn % 4);
            let (stride, padded) = (rows * ld + turn % 2, aligned_stride::<bf16>(cols));
            // Every pattern of bits, NaNs among them.
            let x: Vec<bf16> =
                (0..batches * stride).map(|at| bf16::from_bits((at as u16).wrapping_mul(40_503))).collect();
            let mut want = vec![0; batches * rows * padded];
            for at in 0..batches * rows * cols {
                let [batch, row, col] = [at / (rows * cols), at / cols % rows, at % cols];
                want[(batch * rows + row) * padded + col] = x[batch * stride + row * ld + col].to_bits();
            }
            let got = trial(device, |trial| {
                let values = trial.upload(&x, [x.len()])?;
                let mut out = trial.empty::<bf16>([want.len()])?;
                let (values, made) = (Some(values.slice()), Some(out.out()));
                let aligning = Aligning { values, out: made, rows, cols, ld, batches, stride };
                // The second operand, so that none precedes it.
                trial.launch(align_rows::of([Aligning::default(), aligning]))?;
                trial.output(&out)
            });
            let different = got.iter().zip(&want).position(|(got, want)| got.to_bits() != *want);
            assert_eq!(different, None, "{rows} x {cols}: first at this element");
        }
    }
}

// Squares, so that the maps suit every layout, and two operands of two batches of 3 x 5.
attack! {
    matmul_wgmma::align_rows {
        a: halves 30, a_out: out_halves 48, a_rows: number 3, a_cols: number 5, a_ld: number 5, a_batches: number 2, a_stride: number 15,
        b: halves 30, b_out: out_halves 48, b_rows: number 3, b_cols: number 5, b_ld: number 5, b_batches: number 2, b_stride: number 15,
    }
    matmul_wgmma::matmul_wgmma by variant <S> {
        a: map (96, [6, 6, 2], [8, 48], 64_u32), b: map (96, [6, 6, 2], [8, 48], 64_u32), bias: f32s 12,
        c: stored_pointer 72, out: out_stored 72, pre: out_stored 72, sums: out 12, extents: product [6, 6, 6, 6, 2],
        blocks: number 3, steps_a: number 1, steps_b: number 1, epilogue: epilogue ([36, 6], 6, [0.5, 1.0], 12),
    }
}
