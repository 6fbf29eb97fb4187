//! Matrix multiply of BF16 tensors by wgmma, Hopper's matrix instruction. It computes the same as
//! [`matmul_bf16`](super::matmul_bf16), on devices of compute capability 9.0 and on the emulator.
//!
//! ```text
//! global memory             shared memory, 4 stages of 64 k
//! row-major A, B  ------->  16-byte chunks,         ------------------------->  sums -> out
//!                 cp.async  swizzled                wgmma reads both operands         epilogue
//!                 operand.rs                        from shared memory  block.rs
//! ```
//! The emulator adds the same products in the same order as in `matmul_bf16`, so both give the same
//! bits there. The epilogue is the same code. The split of k is the same rule
//! ([`k_per_split`](super::matmul_bf16::k_per_split)).
//!
//! The parameters are as in `matmul_bf16`, with three differences. The layouts of A and of B are
//! part of the variant, and [`TRANSPOSE_B`](super::matmul::TRANSPOSE_B) is not read. Rows and
//! batches of A and B begin on 16 bytes: `lda` and `ldb` are multiples of eight, and so are
//! `stride_a` and `stride_b` if there are several batches. `blocks` limits the grid: a block
//! computes every `blocks`th tile, so that the copies of the next tile overlap the epilogue of this
//! one. The grid changes no bit.

mod block;
mod columns;
mod finish;
mod operand;
mod tile;

use super::matmul::Cost;
#[cfg(not(target_arch = "nvptx64"))]
use super::matmul::checks::{self, check_factors, check_outputs, check_split_k};
use super::matmul::epilogue::Epilogue;
use super::matmul::split::SplitRange;
use super::matmul::tile::place_of;
use super::matmul::{GELU_DERIVATIVE, SWIGLU};
#[cfg(not(target_arch = "nvptx64"))]
use super::matmul::{TRANSPOSE_A, TRANSPOSE_B};
use super::matmul_bf16::block::{ColumnSums, Problem};
#[cfg(not(target_arch = "nvptx64"))]
use super::matmul_bf16::check_column_sums;
use super::matmul_bf16::operand::Operand;
use super::matmul_bf16::{ADD_TO_SUMS, BIAS_GRAD, OperandLayout};
use crate::family;
use block::{Place, compute};
// The family declares kernels of warpgroups.
use cuda_std::warpgroup_kernel as kernel;
use half::bf16;
pub use tile::Tile;

/// 128 x 256, 256 threads.
pub const T128X256: Tile = Tile { groups: 2, columns: 256, cost: Cost::new(9, 9, 4000) };
/// 128 x 128, 256 threads.
pub const T128X128: Tile = Tile { groups: 2, columns: 128, cost: Cost::new(6, 6, 2500) };

/// Tiles run down the columns within a group of this many rows of tiles.
const GROUP: u32 = 16;

/// The unit, in elements, on which rows and splits begin: 16 bytes.
const ALIGNED: u32 = tile::CHUNK;

family! {
    /// Multiplies BF16 tensors by wgmma. The module's documentation describes the parameters.
    matmul_wgmma<S: Stored>(variant: ([OperandLayout; 2], Tile) as VARIANT) {
        ([OperandLayout::Plain, OperandLayout::Plain], T128X256) => { matmul_wgmma_nn_128x256_f32: f32; matmul_wgmma_nn_128x256_bf16: bf16; }
        ([OperandLayout::Plain, OperandLayout::Plain], T128X128) => { matmul_wgmma_nn_128x128_f32: f32; matmul_wgmma_nn_128x128_bf16: bf16; }
        ([OperandLayout::Plain, OperandLayout::Transposed], T128X256) => { matmul_wgmma_nt_128x256_f32: f32; matmul_wgmma_nt_128x256_bf16: bf16; }
        ([OperandLayout::Plain, OperandLayout::Transposed], T128X128) => { matmul_wgmma_nt_128x128_f32: f32; matmul_wgmma_nt_128x128_bf16: bf16; }
        ([OperandLayout::Transposed, OperandLayout::Plain], T128X256) => { matmul_wgmma_tn_128x256_f32: f32; matmul_wgmma_tn_128x256_bf16: bf16; }
        ([OperandLayout::Transposed, OperandLayout::Plain], T128X128) => { matmul_wgmma_tn_128x128_f32: f32; matmul_wgmma_tn_128x128_bf16: bf16; }
        ([OperandLayout::Transposed, OperandLayout::Transposed], T128X256) => { matmul_wgmma_tt_128x256_f32: f32; matmul_wgmma_tt_128x256_bf16: bf16; }
        ([OperandLayout::Transposed, OperandLayout::Transposed], T128X128) => { matmul_wgmma_tt_128x128_f32: f32; matmul_wgmma_tt_128x128_bf16: bf16; }
    }
    unsafe fn(
        a: &[bf16],
        b: &[bf16],
        bias: &[f32],
        c: *const S,
        out: *mut S,
        pre: *mut S,
        sums: *mut f32,
        m: u32,
        n: u32,
        k: u32,
        lda: u32,
        ldb: u32,
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
        const A_ALONG_K: bool = matches!(VARIANT.0[0], OperandLayout::Plain);
        const B_ALONG_K: bool = matches!(VARIANT.0[1], OperandLayout::Transposed);
        // The grid follows from `blocks`, which only the contract reads.
        let _ = blocks;
        // At least one, so that no division can fail.
        let extents = [m.div_ceil(TILE.rows()).max(1), n.div_ceil(TILE.cols()).max(1)];
        let tiles = extents[0] * extents[1];
        let split_k = if k_per_split < k { k.div_ceil(k_per_split.max(1)) } else { 1 };
        let matrices = split_k * batches;
        // Most products are one matrix. Then two divisions fewer delay the next tile's copies.
        let place = |item: u32| {
            let (matrix, tile) = if matrices == 1 { (0, item) } else { (item / tiles, item % tiles) };
            let (batch, split) = if matrices == 1 { (0, 0) } else { (matrix / split_k, matrix % split_k) };
            let [row, col] = place_of(tile, extents, GROUP);
            Place { batch, split, first: [row * TILE.rows(), col * TILE.cols()] }
        };
        let problem = |Place { batch, split, .. }: Place| {
            let (z, matrix) = (batch as usize, (batch * split_k + split) as usize);
            let a = Operand { values: a, start: z * stride_a, rows: m, stride: lda, along_k: A_ALONG_K };
            let b = Operand { values: b, start: z * stride_b, rows: n, stride: ldb, along_k: B_ALONG_K };
            let (start, bias_start) = (matrix * stride_c, z * stride_bias);
            let epilogue = Epilogue { bias, bias_start, c, out, pre, start, m, n, ldc, alpha, beta, flags };
            let SplitRange { first, end, .. } = SplitRange::new(k, k_per_split, split);
            let columns = ColumnSums {
                wanted: flags & BIAS_GRAD != 0,
                accumulate: flags & ADD_TO_SUMS,
                sums,
                start: matrix * n as usize,
            };
            Problem { a, b, epilogue, columns, k: [first, end] }
        };
        let starts = if matrices == 1 { 0 } else { stride_c | if bias.is_empty() { 0 } else { stride_bias } };
        let shortest = k - (split_k - 1) * k_per_split.min(k);
        // Old outputs are skipped by chunk and row if nothing reads C, else by warp and part.
        let reads_c = const { size_of::<S>() == size_of::<f32>() } || beta != 0.0 || flags & (SWIGLU | GELU_DERIVATIVE) != 0;
        let units = if reads_c { [16, 64] } else { [if A_ALONG_K { 1 } else { ALIGNED }, ALIGNED] };
        let is_whole = TILE.fits([m, n, shortest], units) && (starts | ldc as usize).is_multiple_of(ALIGNED as usize);
        // SAFETY: the contract has checked that each batch lies inside its arguments.
        unsafe {
            const TILES: usize = TILE.cols() as usize / 8;
            const PASSES: [usize; 2] = TILE.passes();
            const LINES: u32 = TILE.lines_at_once();
            let count = tiles * matrices;
            if is_whole {
                compute::<A_ALONG_K, B_ALONG_K, TILES, { PASSES[0] }, { PASSES[1] }, LINES, true, S>(count, place, problem, TILE);
            } else {
                compute::<A_ALONG_K, B_ALONG_K, TILES, { PASSES[0] }, { PASSES[1] }, LINES, false, S>(count, place, problem, TILE);
            }
        }
    }
    // SAFETY: every batch of `a` and `b` lies inside its argument. Every matrix of a batch and
    // split lies inside `out` (and `c`, `pre`, `bias` where they are used), and none overlaps
    // another. `sums`, where it is used, has a row of n for each of them. Rows, batches and splits
    // begin on 16 bytes. A block computes existing tiles, whichever grid it is in. A thread reads
    // and writes nothing past the end of the rows, the columns or k.
    contract unsafe { block: VARIANT.1.threads(), shared: VARIANT.1.shared_bytes() } |p| {
        let ([of_a, of_b], tile) = VARIANT;
        let transposed = |layout: OperandLayout, flag: u32| if layout == OperandLayout::Transposed { flag } else { 0 };
        let split_k = check_split_k!(p);
        check_factors!(p, transposed(of_a, TRANSPOSE_A) | transposed(of_b, TRANSPOSE_B));
        check_outputs!(p, split_k);
        check_column_sums!(p, S, split_k, of_a == OperandLayout::Transposed, of_b == OperandLayout::Plain);
        let aligned = |name, extent: usize| {
            Violation::unless(extent.is_multiple_of(ALIGNED as usize), name, "a multiple of 8, so that rows begin on 16 bytes", extent)
        };
        aligned("lda", p.lda as usize)?;
        aligned("ldb", p.ldb as usize)?;
        if p.batches > 1 {
            aligned("stride_a", p.stride_a)?;
            aligned("stride_b", p.stride_b)?;
        }
        Violation::unless(split_k == 1 || p.k_per_split.is_multiple_of(16), "k_per_split", "a multiple of 16", p.k_per_split)?;
        Violation::unless(p.blocks > 0, "blocks", "at least one", p.blocks)?;
        let count = Size::of(p.m).div_ceil(tile.rows()).times(Size::of(p.n).div_ceil(tile.cols())).times(split_k).times(p.batches);
        Violation::unless(count.at_most(1 << 31), "m", "at most 2^31 tiles", p.m)?;
        let blocks = count.number().map_or(0, |count| count.min(p.blocks as usize));
        Grid::new(blocks, 1, 1)
    }
}

/// The tiles. All layouts and both output types have them.
#[cfg(not(target_arch = "nvptx64"))]
pub const TILES: [Tile; 2] = [T128X128, T128X256];
