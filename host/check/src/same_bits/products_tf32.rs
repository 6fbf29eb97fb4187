//! The cases of TF32 products by wgmma, and of the kernel that packs an operand for them.
//!
//! Invariant: results depend only on the case and its size, as [`cases`](super::cases) requires.

#![forbid(unsafe_code)]

use super::CaseSize;
use super::inputs::Inputs;
use super::products::{ALL, Product, keep_outputs, reads_c, unless_split};
use kernels::matmul::{GELU, SILU, STORE_PREACT, SWIGLU};
use kernels::matmul_bf16::OperandLayout;
use kernels::matmul_wgmma_tf32::{Packing, SWAP, Tile, matmul_wgmma_tf32, pack_tf32_stages, stage_words};
use stepscope_core::error::Result;
use stepscope_core::tensor::{Source, Target, Tensor};

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

/// Packs `batches` of an operand of `rows` x `k`, stored along k or across it. Returns the images,
/// one row for each batch.
fn packed<'s>(
    i: &Inputs<'_, 's>,
    batches: usize,
    [rows, k]: [usize; 2],
    is_across: bool,
    values: &Tensor<'s>,
) -> Result<Tensor<'s, u32>> {
    let mut images = i.step.empty([batches, stage_words([rows, k])])?;
    let (values, out, ld) = (Some(values.slice()), Some(images.out()), if is_across { rows } else { k });
    let packing = Packing { values, out, rows, k, ld, batches, stride: rows * k, is_across };
    i.step.launch(pack_tf32_stages::of([packing, Packing::default()]))?;
    Ok(images)
}

/// Runs the case of a tile and a layout of the operand that is read as it is stored, which is A or,
/// if the operands are swapped, B. All give the same bits. The numbers are whole and so small that
/// every sum is exact, as in the cases of other kernels for tensor cores.
pub(super) fn product(i: &Inputs<'_, '_>, variant: (OperandLayout, Tile)) -> Result<()> {
    let products = i.by_size(&PRODUCTS[..], &SMALLEST_PRODUCTS).iter();
    for (number, &(batches, [m, n, k], k_per_split, flags, [alpha, beta])) in products.enumerate() {
        // The smallest size swaps the operands of every other product.
        for swap in [0, SWAP].into_iter().filter(|&swap| i.by_size(true, (swap != 0) == (number % 2 != 0))) {
            let [rows, cols] = if swap == 0 { [m, n] } else { [n, m] };
            let is_transposed = variant.0 == OperandLayout::Transposed;
            let (lines, length) = if is_transposed { (k, rows) } else { (rows, k) };
            let lda = length.next_multiple_of(4);
            let (a, b) = (i.whole(batches * lines * lda)?, i.whole(batches * cols * k)?);
            let images = packed(i, batches, [cols, k], swap != 0, &b)?;
            let bias = if i.size == CaseSize::Whole { i.whole(batches * n)? } else { i.normals([batches * n])? };
            let length = batches * k.div_ceil(k_per_split).max(1) * m * n;
            let mut out = i.output(reads_c(flags, beta), [length], || i.whole(length))?;
            let mut pre = i.output(false, [length], || i.step.upload(&i.step.read(&out)?, [length]))?;
            let (c, written) = out.in_place();
            i.step.launch(matmul_wgmma_tf32 {
                variant,
                a: a.slice(),
                b: images.slice(),
                bias: unless_split(k_per_split < k, &bias),
                c,
                out: written,
                pre: pre.out(),
                m: m as u32,
                n: n as u32,
                k: k as u32,
                lda: lda as u32,
                ldc: n as u32,
                k_per_split: k_per_split.min(k.max(1)) as u32,
                batches: batches as u32,
                blocks: 2,
                stride_a: lines * lda,
                stride_b: stage_words([cols, k]),
                stride_c: m * n,
                stride_bias: n,
                alpha,
                beta,
                flags: flags | swap,
            })?;
            keep_outputs(i, flags, &out, &pre)?;
        }
    }
    Ok(())
}

/// Runs the case of the kernel that packs: operands stored along and across k, with and without
/// tails, with special numbers among them.
pub(super) fn packing(i: &Inputs<'_, '_>) -> Result<()> {
    i.squares(|i, x| {
        let [rows, cols] = x.shape().as_rows();
        i.keep(&packed(i, 1, [rows, cols], false, x)?)?;
        i.keep(&packed(i, 1, [cols, rows], true, x)?)
    })
}
