//! The cases of TF32 products by wgmma, and of the kernel that copies an operand for them.
//!
//! Invariant: results depend only on the case and its size, as [`cases`](super::cases) requires.

#![forbid(unsafe_code)]

use super::CaseSize;
use super::inputs::Inputs;
use super::products::{ALL, Product, epilogue, extents, keep_outputs, reads_c, unless_split};
use cuda_std::launch::TensorMap;
use kernels::matmul::{GELU, SILU, STORE_PREACT, SWIGLU};
use kernels::matmul_bf16::OperandLayout;
use kernels::matmul_wgmma_tf32::{Alignment, SWAP, Tile, align_along_k, aligned_stride, matmul_wgmma_tf32};
use kernels::wgmma::box_rows;
use stepscope_core::{Result, Source, Target};

/// Ragged and whole tiles, several stages, a batch, k in splits, and each epilogue.
const PRODUCTS: [Product; 7] = [
    (1, [1, 8, 0], ALL, 0, [1.0, 1.0]),
    (1, [129, 264, 72], ALL, GELU, [1.0, 0.0]),
    (2, [128, 256, 200], ALL, 0, [0.5, 0.5]),
    (1, [20, 256, 9], ALL, SWIGLU | STORE_PREACT, [0.3, 0.0]),
    (1, [130, 257, 40], ALL, SILU | STORE_PREACT, [0.3, 0.5]),
    (1, [150, 275, 261], ALL, GELU | STORE_PREACT, [1.0, 0.5]),
    (1, [4, 8, 80], 32, 0, [1.0, 0.0]),
];

/// A part of these for the self-test.
const SMALLEST_PRODUCTS: [Product; 4] = [
    (1, [129, 264, 72], ALL, GELU | STORE_PREACT, [1.0, 0.0]),
    (1, [128, 256, 200], ALL, 0, [0.5, 0.5]),
    (1, [9, 36, 8], ALL, SWIGLU, [0.3, 0.0]),
    (1, [4, 8, 80], 32, 0, [1.0, 0.0]),
];

/// Runs the case of a tile and a layout of the instruction's A, which is A or, if the operands are
/// swapped, B. All give the same bits. The operands are [`factors`](Inputs::factors).
pub(super) fn product(i: &Inputs<'_, '_>, variant: (OperandLayout, Tile)) -> Result<()> {
    let products = i.by_size(&PRODUCTS[..], &SMALLEST_PRODUCTS).iter();
    for (number, &(batches, [m, n, k], k_per_split, flags, [alpha, beta])) in products.enumerate() {
        // The smallest size swaps the operands of every other product.
        for swap in [0, SWAP].into_iter().filter(|&swap| i.by_size(true, (swap != 0) == (number % 2 != 0))) {
            let [rows, cols] = if swap == 0 { [m, n] } else { [n, m] };
            let is_transposed = variant.0 == OperandLayout::Transposed;
            let (lines, length) = if is_transposed { (k, rows) } else { (rows, k) };
            let [lda, ldb] = [length, k].map(aligned_stride::<f32>);
            let (a, b) = (i.factors(batches * lines * lda)?, i.factors(batches * cols * ldb)?);
            let map = |memory, [rows, cols]: [usize; 2], ld, along_k| TensorMap {
                memory,
                extents: [cols, rows, batches].map(|extent| extent as u32),
                strides: [ld, rows * ld],
                box_rows: box_rows::<f32>(along_k),
            };
            let bias = if i.size == CaseSize::Whole { i.whole(batches * n)? } else { i.normals([batches * n])? };
            let outputs = batches * k.div_ceil(k_per_split).max(1) * m * n;
            let mut out = i.output(reads_c(flags, beta), [outputs], || i.whole(outputs))?;
            let mut pre = i.output(false, [outputs], || i.step.upload(&i.step.read(&out)?, [outputs]))?;
            let (c, written) = out.in_place();
            i.step.launch(matmul_wgmma_tf32 {
                variant,
                a: map(a.slice(), [lines, length], lda, !is_transposed),
                b: map(b.slice(), [cols, k], ldb, true),
                bias: unless_split(k_per_split < k, &bias),
                c,
                out: written,
                pre: pre.out(),
                extents: extents(batches, [m, n, k], k_per_split),
                blocks: 2,
                steps_a: 1,
                steps_b: 1,
                epilogue: epilogue([m, n], [alpha, beta], flags | swap),
            })?;
            keep_outputs(i, flags, &out, &pre)?;
        }
    }
    Ok(())
}

/// Runs the case of the kernel that copies: operands stored along and across k, with and without
/// tails, with special numbers among them.
pub(super) fn copies(i: &Inputs<'_, '_>) -> Result<()> {
    i.squares(|i, x| {
        let [rows, cols] = x.shape().as_rows();
        let mut along = i.step.empty::<f32>([rows, aligned_stride::<f32>(cols)])?;
        let mut transposed = i.step.empty::<f32>([cols, aligned_stride::<f32>(rows)])?;
        let of = |out, [rows, k]: [usize; 2], is_across| Alignment {
            values: Some(x.slice()),
            out: Some(out),
            rows,
            k,
            ld: cols,
            batches: 1,
            stride: 0,
            is_across,
        };
        i.step.launch(align_along_k::of([
            of(along.out(), [rows, cols], false),
            of(transposed.out(), [cols, rows], true),
        ]))?;
        i.keep(&along)?;
        i.keep(&transposed)
    })
}
