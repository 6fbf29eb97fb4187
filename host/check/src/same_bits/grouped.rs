//! Cases of products of groups of rows, and of the sums of a token's rows.

use super::inputs::Inputs;
use half::bf16;
use kernels::matmul::{EpilogueForm, ProductExtents, TRANSPOSE_A, TRANSPOSE_B, Tile};
use kernels::matmul_bf16::{self as of_bf16, OperandLayout};
use kernels::matmul_grouped::{matmul_grouped, matmul_grouped_of_bf16};
use stepscope_core::ops::{self, Groups};
use stepscope_core::{Result, Source, Stored, Target, Tensor};

/// Groups of rows, inputs and outputs, the flags of the layouts, and alpha and beta.
type Layer = (&'static [u32], [usize; 2], u32, [f32; 2]);

/// Layers with empty groups and with several tiles, in each direction. Some rows are no vectors.
const LAYERS: [Layer; 6] = [
    (&[0, 1], [8, 16], 0, [1.0, 0.0]),
    (&[0, 5, 5, 139, 140], [136, 72], 0, [0.3, 0.5]),
    (&[0, 0, 150, 150], [33, 70], TRANSPOSE_B, [1.0, 1.0]),
    (&[0, 64, 200], [72, 264], TRANSPOSE_B, [1.0, 0.0]),
    (&[0, 40, 40, 131], [136, 72], TRANSPOSE_A, [1.0, 0.5]),
    (&[0, 3, 9], [65, 5], TRANSPOSE_A, [0.3, 0.0]),
];

/// A part of these for the self-test.
const SMALLEST: [Layer; 3] = [
    (&[0, 5, 5, 70], [136, 72], 0, [1.0, 0.0]),
    (&[0, 9, 20], [33, 24], TRANSPOSE_B, [1.0, 0.5]),
    (&[0, 40, 40, 59], [24, 40], TRANSPOSE_A, [1.0, 0.5]),
];

/// Launches the products of a kernel whose layout of A is this flag, or any.
macro_rules! layers {
    ($i:ident, $kernel:ident { $choice:ident }, <$F:ty, $S:ty>, $layout:expr, $factors:expr) => {{
        let layout: Option<u32> = $layout;
        let factors = $factors;
        for &(offsets, [inputs, outputs], flags, [alpha, beta]) in $i.by_size(&LAYERS[..], &SMALLEST) {
            if layout.is_some_and(|layout| layout != flags & TRANSPOSE_A) {
                continue;
            }
            let (rows, groups) = (offsets[offsets.len() - 1] as usize, offsets.len() - 1);
            let all = groups * outputs;
            let [x, y, w] = [rows * inputs, rows * outputs, inputs * all];
            let ([m, n, k], [lda, ldb, ldc], [a, b, out]) = match flags {
                TRANSPOSE_A => ([inputs, outputs, rows], [inputs, outputs, all], [x, y, w]),
                TRANSPOSE_B => ([rows, inputs, outputs], [outputs, all, inputs], [y, w, x]),
                _ => ([rows, outputs, inputs], [inputs, all, outputs], [x, w, y]),
            };
            let (a, b): (Tensor<'_, $F>, Tensor<'_, $F>) = (factors($i, a)?, factors($i, b)?);
            let (offsets, mut out) = ($i.step.upload(offsets, [offsets.len()])?, $i.normals::<$S>([out])?);
            let [m, n, k, batches, lda, ldb, ldc] = [m, n, k, groups, lda, ldb, ldc].map(|extent| extent as u32);
            $i.step.launch($kernel {
                $choice,
                a: a.slice(),
                b: b.slice(),
                offsets: offsets.slice(),
                out: out.out(),
                extents: ProductExtents { m, n, k, k_per_split: k, batches },
                lda,
                ldb,
                stride_b: outputs,
                epilogue: EpilogueForm { stride_c: outputs, stride_bias: 0, ldc, alpha, beta, flags },
            })?;
            $i.keep(&out)?;
        }
        Ok(())
    }};
}

/// Runs the case of a tile of f32. All tiles give the same bits.
pub(super) fn products(i: &Inputs<'_, '_>, tile: Tile) -> Result<()> {
    fn factors<'s>(i: &Inputs<'_, 's>, length: usize) -> Result<Tensor<'s>> {
        i.normals([length])
    }
    layers!(i, matmul_grouped { tile }, <f32, f32>, None, factors)
}

/// Runs the case of a kernel for BF16.
pub(super) fn bf16_products(i: &Inputs<'_, '_>, variant: (OperandLayout, of_bf16::Tile)) -> Result<()> {
    fn factors<'s>(i: &Inputs<'_, 's>, length: usize) -> Result<Tensor<'s, bf16>> {
        i.factors(length)
    }
    match variant.0 {
        OperandLayout::Plain => layers!(i, matmul_grouped_of_bf16 { variant }, <bf16, bf16>, Some(0), factors),
        OperandLayout::Transposed => {
            layers!(i, matmul_grouped_of_bf16 { variant }, <bf16, f32>, Some(TRANSPOSE_A), factors)
        }
    }
}

/// Runs the op on rows, gates and groups.
pub(super) fn combined<'s, S: Stored>(
    i: &Inputs<'_, 's>,
    op: impl Fn(&Inputs<'_, 's>, &Tensor<'s, S>, &Tensor<'s>, &Groups<'s>) -> Result<()>,
) -> Result<()> {
    for (tokens, each, groups, cols) in
        i.by_size([(1, 1, 1, 4), (70, 3, 5, 132), (40, 2, 9, 1100), (9, 2, 3, 35)], [(7, 2, 3, 36); 4])
    {
        let ids = i.random.borrow_mut().belows(tokens * each, groups as u32);
        let groups = ops::group_by(i.step, &i.step.upload_indices(&ids, [tokens, each])?, groups)?;
        op(i, &i.normals([tokens * each, cols])?, &i.normals([tokens, each])?, &groups)?;
    }
    Ok(())
}
