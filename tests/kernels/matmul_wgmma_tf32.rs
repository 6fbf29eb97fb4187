//! Products of f32 tensors in TF32 by wgmma. On the emulator they have the bits of `matmul_mma`,
//! for each tile, layout, epilogue, split and grid, in either order of the operands. Tests of the
//! ops run with them too, if the device chooses wgmma.

use crate::hostile::attack;
use crate::support::{Random, SPECIAL, on_each_device};
use crate::trial::{assert_same, trial};
use cuda_std::emulator::Mode;
use cuda_std::launch::{Slice, TensorMap};
use kernels::matmul::{EpilogueForm, ProductExtents};
use kernels::matmul::{GELU, SILU, STORE_PREACT, SWIGLU};
use kernels::matmul_bf16::OperandLayout;
use kernels::matmul_mma::matmul_mma;
use kernels::matmul_wgmma_tf32::{self as wgmma, Alignment, SWAP, align_along_k, aligned_stride, matmul_wgmma_tf32};
use kernels::mma::{Side, fragments};
use kernels::precision::{Rounding, round_to_tf32};
use kernels::wgmma::box_rows;
use stepscope::device::MatrixInstruction;
use stepscope::ops::{Gemm, Precision};
use stepscope::tensor::{Source as _, Target as _};
use stepscope::{Arena, Capacity, Device, DeviceKind, EagerStep, Result, Tensor, ops};

/// A product. `transposed` says which operands are stored transposed: A `[k, m]`, B `[n, k]`.
#[derive(Clone, Copy, Debug)]
struct Case {
    extents: [usize; 3],
    transposed: [bool; 2],
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

const LAYOUTS: [[bool; 2]; 4] = [[false, false], [false, true], [true, false], [true, true]];
const ALL: usize = usize::MAX;

/// Extents with tails of every kind, no k, one chunk, more stages than slots, several tiles.
const EXTENTS: [[usize; 3]; 8] = [
    [1, 1, 1],
    [3, 8, 0],
    [64, 128, 32],
    [129, 130, 40],
    [128, 256, 96],
    [17, 300, 233],
    [256, 520, 33],
    [300, 140, 136],
];

/// An operand of a product as it is stored: rows of k elements, or the other way around.
struct Operand<'s> {
    values: Tensor<'s>,
    rows: usize,
    ld: usize,
    stride: usize,
    is_across: bool,
}

impl<'s> Operand<'s> {
    fn new(step: &EagerStep<'s>, seed: u64, case: Case, rows: usize, is_across: bool) -> Result<Self> {
        let k = case.extents[2];
        let (lines, length) = if is_across { (k, rows) } else { (rows, k) };
        let ld = length.next_multiple_of(4);
        let values = Random::new(seed).normals(case.batches * lines * ld);
        Ok(Self { values: step.upload(&values, [values.len()])?, rows, ld, stride: lines * ld, is_across })
    }

    /// Describes the operand for `round_to_tf32`.
    fn rounding<'a>(&'a self, case: Case, side: Side, out: &'a mut Tensor<'s, u32>) -> Rounding<'a> {
        let [rows, cols] = if self.is_across { [case.extents[2], self.rows] } else { [self.rows, case.extents[2]] };
        let wanted = Some((side, out.out()));
        let (along, across) = if self.is_across { (None, wanted) } else { (wanted, None) };
        let (values, batches) = (Some(self.values.slice()), case.batches);
        Rounding { values, rows, cols, ld: self.ld, batches, stride: self.stride, along, across }
    }

    /// Returns the operand along k, copied if it is not.
    fn along(self, step: &EagerStep<'s>, case: Case) -> Result<Self> {
        let Self { rows, ld, stride, is_across, .. } = self;
        if !is_across {
            return Ok(self);
        }
        let (k, to) = (case.extents[2], aligned_stride::<f32>(case.extents[2]));
        let mut copy = step.empty([case.batches * rows * to])?;
        let (values, out) = (Some(self.values.slice()), Some(copy.out()));
        let alignment = Alignment { values, out, rows, k, ld, batches: case.batches, stride, is_across };
        step.launch(align_along_k::of([alignment, Alignment::default()]))?;
        Ok(Self { values: copy, rows, ld: to, stride: rows * to, is_across: false })
    }

    fn map(&self, case: Case) -> TensorMap<'_, f32> {
        let [rows, cols] = if self.is_across { [case.extents[2], self.rows] } else { [self.rows, case.extents[2]] };
        let extents = [cols, rows, case.batches].map(|extent| extent as u32);
        TensorMap {
            memory: self.values.slice(),
            extents,
            strides: [self.ld, self.stride],
            box_rows: box_rows::<f32>(!self.is_across),
        }
    }
}

/// Returns `out` and `pre` of a case: by wgmma in this tile with these flags, or by `matmul_mma`.
fn outputs(step: &EagerStep<'_>, case: Case, by: Option<(wgmma::Tile, u32)>) -> Result<[Vec<f32>; 2]> {
    let Case { extents: [m, n, k], transposed, batches, pad, scales: [alpha, beta], flags, .. } = case;
    let (split_k, ldc) = (k.div_ceil(case.k_per_split.min(k.max(1))).max(1), n + pad);
    let length = batches * split_k * m * ldc;
    let left = Operand::new(step, 1, case, m, transposed[0])?;
    let right = Operand::new(step, 2, case, n, !transposed[1])?;
    let bias = step.upload(&Random::new(3).normals(batches * n), [batches * n])?;
    let mut out = step.upload(&Random::new(4).normals(length), [length])?;
    let mut pre = step.upload(&Random::new(5).normals(length), [length])?;
    let (c, written) = out.in_place();
    let (k_per_split, [m32, n32, k32]) = (case.k_per_split.min(k.max(1)) as u32, [m, n, k].map(|extent| extent as u32));
    let extents = ProductExtents { m: m32, n: n32, k: k32, k_per_split, batches: batches as u32 };
    macro_rules! launch {
        ($kernel:ident, $flags:expr, { $($own:ident: $value:expr),* }) => {
            step.launch($kernel {
                $($own: $value,)*
                bias: if case.has_bias { bias.slice() } else { Slice::empty() },
                c,
                out: written,
                pre: pre.out(),
                extents,
                epilogue: EpilogueForm {
                    stride_c: m * ldc,
                    stride_bias: n,
                    ldc: ldc as u32,
                    alpha,
                    beta,
                    flags: $flags,
                },
            })?
        };
    }
    if let Some((tile, swap)) = by {
        let (first, second) = if swap == 0 { (left, right) } else { (right, left) };
        let second = second.along(step, case)?;
        let layout = if first.is_across { OperandLayout::Transposed } else { OperandLayout::Plain };
        launch!(matmul_wgmma_tf32, flags | swap, {
            variant: (layout, tile),
            a: first.map(case),
            b: second.map(case),
            blocks: case.blocks,
            steps_a: 1,
            steps_b: 1
        });
    } else {
        let words = [fragments([m, k]), fragments([n, k])];
        let (mut a, mut b) = (step.empty::<u32>([batches * words[0]])?, step.empty::<u32>([batches * words[1]])?);
        let roundings = [left.rounding(case, Side::Left, &mut a), right.rounding(case, Side::Right, &mut b)];
        let [of_a, of_b] = roundings;
        step.launch(round_to_tf32::of([of_a, of_b, Rounding::default()]))?;
        launch!(matmul_mma, flags, {
            tile: ops::MMA_TILES[0],
            a: a.slice(),
            b: b.slice(),
            stride_a: words[0],
            stride_b: words[1]
        });
    }
    Ok([step.read(&out)?, step.read(&pre)?])
}

/// Checks that every tile gives the bits of `matmul_mma`, in either order of the operands.
fn assert_same_bits(case: Case) {
    let device = Device::open(DeviceKind::Emulated).unwrap();
    let run = |by| {
        let mut arena = Arena::builder(&device).capacity(Capacity::mib(32)).build().unwrap();
        arena.step(|step| outputs(step, case, by)).unwrap()
    };
    let want = run(None);
    for tile in wgmma::TILES {
        for swap in [0, SWAP] {
            for (got, want) in run(Some((tile, swap))).iter().zip(&want) {
                assert_same(format_args!("{case:?}, {tile:?}, {swap:#x}"), got, want);
            }
        }
    }
}

fn plain(extents: [usize; 3], transposed: [bool; 2]) -> Case {
    Case {
        extents,
        transposed,
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
        for transposed in LAYOUTS {
            assert_same_bits(plain(extents, transposed));
        }
    }
}

/// Each epilogue, for whole tiles, ragged ones, and rows that do not begin on 16 bytes.
#[test]
fn all_epilogues_match_bits() {
    for (transposed, extents, pad) in [
        (LAYOUTS[0], [128, 256, 72], 0),
        (LAYOUTS[1], [150, 264, 40], 8),
        (LAYOUTS[2], [256, 128, 33], 4),
        (LAYOUTS[3], [130, 131, 80], 1),
    ] {
        for (flags, scales, has_bias) in [
            (0, [0.5, 0.25], true),
            (GELU | STORE_PREACT, [1.0, 0.0], true),
            (GELU, [0.3, 0.5], true),
            (SILU | STORE_PREACT, [1.0, -1.0], false),
            (SWIGLU | STORE_PREACT, [1.0, 0.0], true),
            (STORE_PREACT, [1.0, 0.0], false),
        ] {
            assert_same_bits(Case { pad, scales, has_bias, flags, ..plain(extents, transposed) });
        }
    }
}

/// Batches, splits of k, and grids of fewer blocks than tiles.
#[test]
fn batches_and_splits_match_bits() {
    for (transposed, extents, batches, k_per_split, blocks) in [
        (LAYOUTS[0], [130, 260, 100], 2, ALL, 1),
        (LAYOUTS[1], [200, 130, 208], 3, 96, 2),
        (LAYOUTS[3], [72, 520, 320], 1, 160, 5),
        (LAYOUTS[2], [128, 256, 200], 2, 64, 3),
        (LAYOUTS[2], [17, 300, 330], 1, 224, 2),
    ] {
        assert_same_bits(Case { batches, k_per_split, blocks, ..plain(extents, transposed) });
    }
}

/// Nothing writes a slot of the ring while products read it, and no two warps an output.
#[test]
fn ring_has_no_race() {
    let races = Mode { races: true, ..Mode::default() };
    races.scope(|| {
        for transposed in LAYOUTS {
            assert_same_bits(Case { blocks: 1, ..plain([130, 260, 200], transposed) });
        }
    });
}

/// The gradients and a product have the bits of `mma.sync`: with operands that are copied because
/// both lie across k or no rows begin on 16 bytes, and with so few outputs that `mma.sync` remains.
#[test]
fn ops_match_mma_sync() {
    let results = |instruction| {
        let device = Device::builder(DeviceKind::Emulated).matrix_instruction(instruction).open().unwrap();
        let mut arena = Arena::builder(&device).capacity(Capacity::mib(64)).build().unwrap();
        let of = |step: &EagerStep<'_>, [rows, inputs, outputs]: [usize; 3]| -> Result<Vec<Vec<f32>>> {
            step.set_precision(Precision::Tf32);
            let number =
                |seed, extents: [usize; 2]| step.upload(&Random::new(seed).normals(extents[0] * extents[1]), extents);
            let (x, w) = (number(1, [rows, inputs])?, number(2, [inputs, outputs])?);
            let (dy, mut dw, mut dx) =
                (number(3, [rows, outputs])?, number(4, [inputs, outputs])?, number(5, [rows, inputs])?);
            let y = ops::linear(step, &x, &w, None::<&Tensor<'_>>)?;
            let for_dw = Gemm::new(inputs, outputs, rows).transpose_a().accumulate();
            let for_dx = Gemm::new(rows, inputs, outputs).transpose_b();
            ops::launch::gradients_into(
                step,
                &dy,
                ops::launch::Gradient { form: for_dw, of: &x, into: &mut dw },
                None::<ops::launch::BiasGradient<'_, Tensor<'_>>>,
                Some(ops::launch::Gradient { form: for_dx, of: &w, into: &mut dx }),
            )?;
            Ok(vec![step.read(&y)?, step.read(&dw)?, step.read(&dx)?])
        };
        [[2900, 132, 140], [2900, 140, 132], [2900, 140, 130], [150, 33, 49]]
            .map(|extents| arena.step(|step| of(step, extents)).unwrap())
    };
    let want = results(MatrixInstruction::MmaSync);
    for (case, (got, want)) in results(MatrixInstruction::Wgmma).iter().zip(&want).enumerate() {
        for (what, (got, want)) in ["y", "dw", "dx"].iter().zip(got.iter().zip(want)) {
            assert_same(format_args!("{what} of case {case}"), got, want);
        }
    }
}

on_each_device! {
    /// Each row is moved to its place bit by bit, with zeros up to the next 16 bytes.
    fn rows_are_aligned_along_k(device: &Device) {
        if device.description().kind == DeviceKind::Cuda && !device.description().has_wgmma {
            return;
        }
        let extents = [[1, 1], [3, 8], [128, 32], [129, 33], [5, 0], [0, 4], [300, 12], [256, 96], [31, 70]];
        for (turn, [rows, k]) in extents.into_iter().enumerate() {
            for is_across in [false, true] {
                let (batches, ld) = (1 + turn % 2, if is_across { rows } else { k } + turn % 3);
                let (stride, padded) = (if is_across { k } else { rows } * ld, aligned_stride::<f32>(k));
                let mut x = Random::new(turn as u64).normals(batches * stride);
                x.iter_mut().zip(SPECIAL).for_each(|(x, special)| *x = special);
                let mut want = vec![0; batches * rows * padded];
                for (batch, [row, p]) in (0..batches * rows * k).map(|at| (at / (rows * k), [at / k % rows, at % k])) {
                    let at = batch * stride + if is_across { p * ld + row } else { row * ld + p };
                    want[(batch * rows + row) * padded + p] = x[at].to_bits();
                }
                let got = trial(device, |trial| {
                    let values = trial.upload(&x, [x.len()])?;
                    let mut out = trial.empty::<f32>([want.len()])?;
                    let (values, made) = (Some(values.slice()), Some(out.out()));
                    let alignment = Alignment { values, out: made, rows, k, ld, batches, stride, is_across };
                    // The second operand, so that none precedes it.
                    trial.launch(align_along_k::of([Alignment::default(), alignment]))?;
                    trial.output(&out)
                });
                let different = got.iter().zip(&want).position(|(got, want)| got.to_bits() != *want);
                assert_eq!(different, None, "{rows} x {k}, across: {is_across}: first at this element");
            }
        }
    }
}

// Squares, so that the map of A suits both layouts, and two operands of two batches of 3 x 5.
attack! {
    matmul_wgmma_tf32::matmul_wgmma_tf32 by variant {
        a: f32_map (96, [6, 6, 2], [8, 48], box_rows::<f32>(variant.0 == OperandLayout::Plain)),
        b: f32_map (96, [6, 6, 2], [8, 48], 64_u32), bias: f32s 12, c: pointer 72, out: out 72, pre: out 72,
        extents: product [6, 6, 6, 6, 2], blocks: number 3, steps_a: number 1, steps_b: number 1,
        epilogue: epilogue ([36, 6], 6, [0.5, 1.0], 12),
    }
    matmul_wgmma_tf32::align_along_k {
        a: f32s 30, a_out: out 48, a_rows: number 3, a_k: number 5, a_ld: number 5, a_batches: number 2, a_stride: number 15,
        b: f32s 30, b_out: out 40, b_rows: number 5, b_k: number 3, b_ld: number 5, b_batches: number 2, b_stride: number 15,
        across: number 2,
    }
}
