//! Matrix multiply on tensor cores: [`matmul`](super::matmul) with operands rounded to TF32.
//!
//! `out = epilogue(alpha op(round(A)) op(round(B)) + bias + beta C)`. An instruction adds eight
//! products to the f32 accumulator at once, as [`mma`](crate::mma) describes. The bits do not depend
//! on the tile, the grid or the run, and are those of `matmul_wgmma_tf32`.
//!
//! The kernels of [`precision`](super::precision) first round both operands and pack them as
//! fragments. A block copies stages of both operands to shared memory, several stages ahead of the
//! one in use. Warps read the fragments into registers and multiply, as in NVIDIA's CUTLASS.
//!
//! ```text
//! global memory: fragments  -- operand.rs ->  stage: 2 steps of k  -- operand.rs ->  fragments in
//!   of 32 rows x 8 words         16 bytes       of A's rows, then      16 bytes       registers,
//!                                a thread       of B's columns         a lane       of a warp's
//!                                                                                   32 x 32 blocks
//! fragments  -- mma.rs ->  accumulators  -- epilogue ->  out
//! ```
//! The parameters are as in [`matmul`](super::matmul), without the operands' transposes and leading
//! dimensions. A's rows are m, and B's rows are n. `stride_a` and `stride_b` count words. If k is
//! split, `k_per_split` is a multiple of the elements in a step.

mod block;
mod operand;
mod tile;

use super::matmul::Cost;
#[cfg(not(target_arch = "nvptx64"))]
use super::matmul::checks::{self, check_outputs, check_split_k};
use super::matmul::epilogue::Epilogue;
use super::matmul::split::{SplitK, SplitRange};
use crate::family;
use crate::matmul::{EpilogueForm, ProductExtents};
use crate::mma::STEP;
#[cfg(not(target_arch = "nvptx64"))]
use crate::mma::fragments;
use block::{Problem, finish, sum};
use cuda_std::prelude::*;
use operand::PackedOperand;
pub use tile::Tile;

/// 64 x 64, 128 threads.
pub const T64X64: Tile = Tile { warps: [2, 2], blocks: [1, 1], cost: Cost::new(31, 11, 1250) };
/// 64 x 128, 128 threads.
pub const T64X128: Tile = Tile { warps: [2, 2], blocks: [1, 2], cost: Cost::new(24, 24, 1500) };
/// 128 x 128, 128 threads.
pub const T128X128: Tile = Tile { warps: [2, 2], blocks: [2, 2], cost: Cost::new(40, 36, 4500) };
/// 128 x 256, 256 threads.
pub const T128X256: Tile = Tile { warps: [2, 4], blocks: [2, 2], cost: Cost::new(61, 52, 30000) };

/// Returns the grid that covers `[m, n]` with tiles: y indexes the split, z the batch.
///
/// Why these checks suffice: all fragments of each batch of `a` and `b` lie inside the argument, on
/// 16-byte boundaries. A split begins with a fragment. Outputs are checked as in
/// [`matmul`](super::matmul).
#[cfg(not(target_arch = "nvptx64"))]
macro_rules! grid {
    ($p:ident, $tile:expr) => {{
        for (name, len, rows, stride) in
            [("a", $p.a.len(), $p.extents.m, $p.stride_a), ("b", $p.b.len(), $p.extents.n, $p.stride_b)]
        {
            let words = fragments([rows as usize, $p.extents.k as usize]);
            checks::holds(name, len, $p.extents.batches, stride, [1, words], words)?;
        }
        let split_k = check_split_k!($p);
        check_outputs!($p, split_k);
        for (name, words) in [("stride_a", $p.stride_a), ("stride_b", $p.stride_b)] {
            Violation::unless_aligned(name, words, 4)?;
        }
        Violation::unless(
            split_k == 1 || $p.extents.k_per_split.is_multiple_of(STEP),
            "k_per_split",
            "whole steps of k",
            $p.extents.k_per_split,
        )?;
        Grid::new(
            Size::of($p.extents.m).div_ceil($tile.rows()).times(Size::of($p.extents.n).div_ceil($tile.cols())),
            split_k,
            $p.extents.batches,
        )
    }};
}

family! {
    /// Multiplies rounded operands. The module's documentation describes the parameters.
    matmul_mma(tile: Tile as TILE) {
        /// 64 x 64, 128 threads.
        matmul_tf32_64x64 = T64X64;
        /// 64 x 128, 128 threads.
        matmul_tf32_64x128 = T64X128;
        /// 128 x 128, 128 threads.
        matmul_tf32_128x128 = T128X128;
        /// 128 x 256, 256 threads.
        matmul_tf32_128x256 = T128X256;
    }
    unsafe fn(
        a: &[u32],
        b: &[u32],
        bias: &[f32],
        c: *const f32,
        out: *mut f32,
        pre: *mut f32,
        extents: ProductExtents,
        stride_a: usize,
        stride_b: usize,
        epilogue: EpilogueForm,
    ) {
        let ProductExtents { m, n, k, k_per_split, batches } = extents;
        let EpilogueForm { stride_c, stride_bias, ldc, alpha, beta, flags } = epilogue;
        let z = thread::block_idx_z() as usize;
        if z >= batches as usize {
            return;
        }
        // grid_dim_y is the number of splits of k.
        let (split_k, split) = (thread::grid_dim_y() as usize, thread::block_idx_y());
        let SplitRange { first, end, .. } = SplitRange::new(k, k_per_split, split);
        let (start, bias_start) = ((z * split_k + split as usize) * stride_c, z * stride_bias);
        let epilogue = Epilogue { bias, bias_start, c, out, pre, start, m, n, ldc, alpha, beta, flags };
        let [all, first, end] = [k, first, end].map(|k| k.div_ceil(STEP));
        let a = PackedOperand::new(a, z * stride_a, m, [all, end]);
        let b = PackedOperand::new(b, z * stride_b, n, [all, end]);
        let problem = Problem { a, b, epilogue, steps: [first, end] };
        // SAFETY: the contract has checked that each batch lies inside its arguments.
        unsafe {
            const ROWS: usize = TILE.blocks[0];
            const COLS: usize = TILE.blocks[1];
            let sums = sum::<ROWS, COLS, { TILE.passes()[0] }, { TILE.passes()[1] }>(problem, TILE);
            finish(problem, TILE, sums);
        }
    }
    // SAFETY: the comment on `grid!` shows that the checks suffice.
    contract unsafe { block: TILE.threads(), shared: TILE.shared_bytes() } |p| grid!(p, TILE)
}

const SPLIT_K: SplitK =
    SplitK { tiles: &[[64, 128, 24], [128, 128, 36]], ends: 125, partial: 150, least: 256, step: 64 };

/// The k of one split of the split-K product `[m, k] [k, n]`. It depends only on these three. If
/// the product is not split, it is all of k, and at least 1.
#[must_use]
pub fn k_per_split(m: usize, n: usize, k: usize) -> usize {
    SPLIT_K.k_per_split(m, n, k)
}

/// The tiles.
#[cfg(not(target_arch = "nvptx64"))]
pub const TILES: [Tile; matmul_mma::VARIANTS.len()] = {
    let mut tiles = [T64X64; matmul_mma::VARIANTS.len()];
    let mut at = 0;
    while at < tiles.len() {
        tiles[at] = matmul_mma::VARIANTS[at].1;
        at += 1;
    }
    tiles
};
