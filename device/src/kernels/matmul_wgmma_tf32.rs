//! Matrix multiply of f32 tensors rounded to TF32, by wgmma, Hopper's matrix instruction. It
//! computes the same as [`matmul_mma`](super::matmul_mma), on devices of compute capability 9.0 and
//! on the emulator.
//!
//! The copy engine rounds both operands to TF32 on their way to shared memory. wgmma reads TF32
//! from there only along k, so B is stored along k. A goes through registers, and is stored either
//! way.
//!
//! ```text
//! global memory               shared memory, 4 stages of 32 k
//! A, B  --------------------->  boxes of rows of      -- A -> registers, B -->  sums -> out
//!        copy engine (TMA),     128 bytes, swizzled      wgmma                  epilogue
//!        rounded                                         block.rs               finish.rs
//! ```
//! An instruction adds the same products at once as in `matmul_mma`, so both give the same bits.
//! The epilogue is the same code. The split of k is the same rule
//! ([`k_per_split`](super::matmul_mma::k_per_split)).
//!
//! The parameters are as in [`matmul_wgmma`](super::matmul_wgmma), with these differences. The
//! layout of A is part of the variant, and `b` is a map of n rows of k elements. If k is split,
//! `k_per_split` is a multiple of 32. [`SWAP`] exchanges the roles of the operands.

mod along;
mod block;
mod finish;
mod operand;

use super::matmul::Cost;
#[cfg(not(target_arch = "nvptx64"))]
use super::matmul::checks::{self, check_outputs, check_split_k};
use super::matmul::epilogue::Epilogue;
use super::matmul::split::SplitRange;
use super::matmul_bf16::OperandLayout;
use super::matmul_wgmma::block::Operands;
#[cfg(not(target_arch = "nvptx64"))]
use super::matmul_wgmma::check_map;
use super::matmul_wgmma::place_of;
pub use super::matmul_wgmma::{Tile, aligned_stride};
use crate::family;
use crate::matmul::{EpilogueForm, ProductExtents};
#[cfg(not(target_arch = "nvptx64"))]
use crate::wgmma::box_rows;
#[cfg(not(target_arch = "nvptx64"))]
pub use along::Alignment;
pub use along::align_along_k;
use block::{Problem, TileLocation, compute};
use cuda_std::tensor_map::TensorMap;
// The family declares kernels of warpgroups.
use cuda_std::warpgroup_kernel as kernel;
use operand::DEPTH;

/// 128 x 256, 384 threads.
pub const T128X256: Tile = Tile { groups: 2, columns: 256, cost: Cost::new(37, 37, 6300) };
/// 128 x 128, 384 threads.
pub const T128X128: Tile = Tile { groups: 2, columns: 128, cost: Cost::new(26, 26, 3100) };
/// 128 x 64, 384 threads.
pub const T128X64: Tile = Tile { groups: 2, columns: 64, cost: Cost::new(23, 23, 1900) };

/// Flag: the roles of the operands are exchanged. `a` is then B, with n rows, and `b` is A, with m
/// rows. The bits are the same.
pub const SWAP: u32 = 1 << 31;

family! {
    /// Multiplies f32 tensors by wgmma, in TF32. The module's documentation describes the
    /// parameters.
    matmul_wgmma_tf32(variant: (OperandLayout, Tile) as VARIANT) {
        /// A is stored along k. 128 x 256, 384 threads.
        matmul_wgmma_tf32_n_128x256 = (OperandLayout::Plain, T128X256);
        /// A is stored along k. 128 x 128, 384 threads.
        matmul_wgmma_tf32_n_128x128 = (OperandLayout::Plain, T128X128);
        /// A is stored along k. 128 x 64, 384 threads.
        matmul_wgmma_tf32_n_128x64 = (OperandLayout::Plain, T128X64);
        /// A is stored across k. 128 x 256, 384 threads.
        matmul_wgmma_tf32_t_128x256 = (OperandLayout::Transposed, T128X256);
        /// A is stored across k. 128 x 128, 384 threads.
        matmul_wgmma_tf32_t_128x128 = (OperandLayout::Transposed, T128X128);
        /// A is stored across k. 128 x 64, 384 threads.
        matmul_wgmma_tf32_t_128x64 = (OperandLayout::Transposed, T128X64);
    }
    unsafe fn(
        a: TensorMap<f32>,
        b: TensorMap<f32>,
        bias: &[f32],
        c: *const f32,
        out: *mut f32,
        pre: *mut f32,
        extents: ProductExtents,
        blocks: u32,
        steps_a: u32,
        steps_b: u32,
        epilogue: EpilogueForm,
    ) {
        let ProductExtents { m, n, k, k_per_split, batches } = extents;
        let EpilogueForm { stride_c, stride_bias, ldc, alpha, beta, flags } = epilogue;
        const TILE: Tile = VARIANT.1;
        const ALONG: bool = matches!(VARIANT.0, OperandLayout::Plain);
        // The grid follows from `blocks`, which only the contract reads.
        let _ = blocks;
        // At least one, so that no division can fail.
        let is_swapped = flags & SWAP != 0;
        let [rows, cols] = if is_swapped { [n, m] } else { [m, n] };
        let extents = [rows.div_ceil(TILE.rows()).max(1), cols.div_ceil(TILE.cols()).max(1)];
        let tiles = (extents[0] * extents[1]).max(1);
        let split_k = if k_per_split < k { k.div_ceil(k_per_split.max(1)).max(1) } else { 1 };
        let matrices = split_k * batches;
        let place = |item: u32| {
            let (matrix, tile) = if matrices == 1 { (0, item) } else { (item / tiles, item % tiles) };
            let (batch, split) = if matrices == 1 { (0, 0) } else { (matrix / split_k, matrix % split_k) };
            let [row, col] = place_of(tile, extents);
            TileLocation { batch, split, first: [row * TILE.rows(), col * TILE.cols()] }
        };
        let problem = |TileLocation { batch, split, .. }: TileLocation| {
            let (z, matrix) = (batch as usize, (batch * split_k + split) as usize);
            let (start, bias_start) = (matrix * stride_c, z * stride_bias);
            let epilogue = Epilogue { bias, bias_start, c, out, pre, start, m, n, ldc, alpha, beta, flags };
            let SplitRange { first, end, .. } = SplitRange::new(k, k_per_split, split);
            Problem { epilogue, k: [first, end] }
        };
        let operands = Operands { maps: [a, b], steps: [steps_a, steps_b] };
        // SAFETY: the contract has checked that each batch lies inside its arguments.
        unsafe {
            const TILES: usize = TILE.cols() as usize / 8;
            compute::<ALONG, TILES>(tiles * matrices, operands, place, problem, TILE, is_swapped);
        }
    }
    // SAFETY: every matrix of `a` and `b` lies inside its argument, and a box has zeros past their
    // extents. Every matrix of a batch and split lies inside `out` (and `c`, `pre`, `bias` where
    // they are used), and none overlaps another. A split ends with a stage or with k. A block
    // computes existing tiles, whichever grid it is in. A thread writes nothing past the end of the
    // rows or the columns.
    contract unsafe { block: VARIANT.1.threads(), shared: VARIANT.1.shared_bytes() } |p| {
        let (layout, tile) = VARIANT;
        let split_k = check_split_k!(p);
        let [rows, cols] = if p.epilogue.flags & SWAP != 0 { [p.extents.n, p.extents.m] } else { [p.extents.m, p.extents.n] };
        check_outputs!(p, split_k);
        let extents = if layout == OperandLayout::Transposed { [p.extents.k, rows] } else { [rows, p.extents.k] };
        check_map("a", &p.a, extents, box_rows::<f32>(layout != OperandLayout::Transposed), p.steps_a, p.extents.batches)?;
        check_map("b", &p.b, [cols, p.extents.k], box_rows::<f32>(true), p.steps_b, p.extents.batches)?;
        Violation::unless(split_k == 1 || p.extents.k_per_split.is_multiple_of(DEPTH), "k_per_split", "a multiple of 32", p.extents.k_per_split)?;
        Violation::unless(p.blocks > 0, "blocks", "at least one", p.blocks)?;
        let count = Size::of(rows).div_ceil(tile.rows()).times(Size::of(cols).div_ceil(tile.cols())).times(split_k).times(p.extents.batches);
        Violation::unless(count.at_most(1 << 31), "m", "at most 2^31 tiles", p.extents.m)?;
        let blocks = count.number().map_or(0, |count| count.min(p.blocks as usize));
        Grid::new(blocks, 1, 1)
    }
}

/// The tiles. Both layouts of A have them.
#[cfg(not(target_arch = "nvptx64"))]
pub const TILES: [Tile; 3] = [T128X64, T128X128, T128X256];
