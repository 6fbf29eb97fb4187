//! Matrix multiply of f32 tensors rounded to TF32, by wgmma, Hopper's matrix instruction. It
//! computes the same as [`matmul_mma`](super::matmul_mma), on devices of compute capability 9.0 and
//! on the emulator.
//!
//! wgmma reads TF32 only along k, and truncates what it reads, so both operands are rounded first.
//! B comes rounded from `pack_tf32_stages`, as images of shared memory. A comes as it is stored.
//! It is rounded where it is read into registers, so no launch reads and writes all of it.
//!
//! ```text
//! A, row-major, f32     -- cp.async -->  16-byte chunks, swizzled  -->  registers, rounded
//!                                                                             | wgmma -> sums -> out
//! B, images of stages   -- in bulk --->  the same bytes  ----------------->---+
//! ```
//! The emulator adds the same products in the same order as in `matmul_mma`, so both give the same
//! bits there. The epilogue is the same code. The split of k is the same rule
//! ([`k_per_split`](super::matmul_mma::k_per_split)).
//!
//! The parameters are as in [`matmul`](super::matmul), with these differences. The layout of A is
//! part of the variant. `b` holds [`stage_words`] words a matrix, and `stride_b` counts words. Rows
//! and batches of A begin on 16 bytes: `lda` is a multiple of four, and so is `stride_a` if there
//! are several batches. If k is split, `k_per_split` is a multiple of 32. `blocks` limits the grid,
//! as in [`matmul_wgmma`](super::matmul_wgmma): a block computes every `blocks`th tile.

mod block;
mod finish;
mod operand;
mod pack;
mod tile;

use super::matmul::Cost;
#[cfg(not(target_arch = "nvptx64"))]
use super::matmul::checks::{self, check_outputs, check_split_k};
use super::matmul::epilogue::Epilogue;
use super::matmul::split::SplitRange;
use super::matmul::tile::place_of;
use super::matmul_bf16::OperandLayout;
use crate::family;
use block::{Place, Problem, compute};
// The family declares kernels of warpgroups.
use cuda_std::warpgroup_kernel as kernel;
use operand::{PackedOperand, StreamedOperand};
#[cfg(not(target_arch = "nvptx64"))]
pub use pack::Packing;
pub use pack::{pack_tf32_stages, stage_words};
use tile::DEPTH;
pub use tile::Tile;

/// 128 x 256, 384 threads.
pub const T128X256: Tile = Tile { columns: 256, cost: Cost::new(38, 38, 8000) };
/// 128 x 128, 384 threads.
pub const T128X128: Tile = Tile { columns: 128, cost: Cost::new(29, 29, 4500) };

/// Flag: the roles of the operands are exchanged. `a` then holds B, with n rows, and `b` the images
/// of A, with m rows. The bits are the same.
pub const SWAP: u32 = 1 << 31;

/// Tiles run down the columns within a group of this many rows of tiles.
const GROUP: u32 = 16;

family! {
    /// Multiplies f32 tensors by wgmma, in TF32. The module's documentation describes the
    /// parameters.
    matmul_wgmma_tf32(variant: (OperandLayout, Tile) as VARIANT) {
        /// A is stored along k. 128 x 256, 384 threads.
        matmul_wgmma_tf32_n_128x256 = (OperandLayout::Plain, T128X256);
        /// A is stored along k. 128 x 128, 384 threads.
        matmul_wgmma_tf32_n_128x128 = (OperandLayout::Plain, T128X128);
        /// A is stored across k. 128 x 256, 384 threads.
        matmul_wgmma_tf32_t_128x256 = (OperandLayout::Transposed, T128X256);
        /// A is stored across k. 128 x 128, 384 threads.
        matmul_wgmma_tf32_t_128x128 = (OperandLayout::Transposed, T128X128);
    }
    unsafe fn(
        a: &[f32],
        b: &[u32],
        bias: &[f32],
        c: *const f32,
        out: *mut f32,
        pre: *mut f32,
        m: u32,
        n: u32,
        k: u32,
        lda: u32,
        ldc: u32,
        k_per_split: u32,
        batches: u32,
        blocks: u32,
        stride_a: usize,
        stride_b: usize,
        stride_c: usize,
        stride_bias: usize,
        alpha: f32,
        beta: f32,
        flags: u32,
    ) {
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
            let [row, col] = place_of(tile, extents, GROUP);
            Place { batch, split, first: [row * TILE.rows(), col * TILE.cols()] }
        };
        let problem = |Place { batch, split, .. }: Place| {
            let (z, matrix) = (batch as usize, (batch * split_k + split) as usize);
            let a = StreamedOperand { values: a, start: z * stride_a, rows, stride: lda };
            let b = PackedOperand::new(b, z * stride_b, [cols, k]);
            let (start, bias_start) = (matrix * stride_c, z * stride_bias);
            let epilogue = Epilogue { bias, bias_start, c, out, pre, start, m, n, ldc, alpha, beta, flags };
            let SplitRange { first, end, .. } = SplitRange::new(k, k_per_split, split);
            Problem { a, b, epilogue, k: [first, end] }
        };
        // SAFETY: the contract has checked that each batch lies inside its arguments.
        unsafe {
            const TILES: usize = TILE.cols() as usize / 8;
            const IMAGES: usize = TILE.images();
            compute::<ALONG, TILES, IMAGES>(tiles * matrices, place, problem, TILE, is_swapped);
        }
    }
    // SAFETY: every batch of `a` lies inside its argument, and `b` holds every image of a batch.
    // Every matrix of a batch and split lies inside `out` (and `c`, `pre`, `bias` where they are
    // used), and none overlaps another. Rows and batches of `a` begin on 16 bytes, and splits with
    // a stage. A block computes existing tiles, whichever grid it is in. A thread reads and writes
    // nothing past the end of the rows, the columns or k.
    contract unsafe { block: VARIANT.1.threads(), shared: VARIANT.1.shared_bytes() } |p| {
        let (layout, tile) = VARIANT;
        let split_k = check_split_k!(p);
        let [m, n, k, lda] = [p.m, p.n, p.k, p.lda].map(|x| x as usize);
        let [rows, cols] = if p.flags & SWAP != 0 { [n, m] } else { [m, n] };
        let extents = if layout == OperandLayout::Transposed { [k, rows] } else { [rows, k] };
        checks::holds("a", p.a.len(), p.batches, p.stride_a, extents, lda)?;
        let words = stage_words([cols, k]);
        checks::holds("b", p.b.len(), p.batches, p.stride_b, [1, words], words)?;
        check_outputs!(p, split_k);
        Violation::unless_aligned("lda", lda, 4)?;
        if p.batches > 1 {
            Violation::unless_aligned("stride_a", p.stride_a, 4)?;
            Violation::unless_aligned("stride_b", p.stride_b, 4)?;
        }
        Violation::unless(split_k == 1 || p.k_per_split.is_multiple_of(DEPTH), "k_per_split", "a multiple of 32", p.k_per_split)?;
        Violation::unless(p.blocks > 0, "blocks", "at least one", p.blocks)?;
        let count = Size::of(rows).div_ceil(tile.rows()).times(Size::of(cols).div_ceil(tile.cols())).times(split_k).times(p.batches);
        Violation::unless(count.at_most(1 << 31), "m", "at most 2^31 tiles", p.m)?;
        let blocks = count.number().map_or(0, |count| count.min(p.blocks as usize));
        Grid::new(blocks, 1, 1)
    }
}

/// The tiles. Both layouts of A have them.
#[cfg(not(target_arch = "nvptx64"))]
pub const TILES: [Tile; 2] = [T128X128, T128X256];
