//! Matrix multiply of BF16 tensors on tensor cores, accumulated in f32. It computes the same as
//! [`matmul`](super::matmul) with half the memory.
//!
//! `out = epilogue(alpha op(A) op(B) + bias + beta C)`. The operands are read straight from global
//! memory in either layout. Nothing is rounded or packed beforehand.
//!
//! ```text
//! global memory             shared memory, stages of 32 k           registers
//! row-major A, B  ------->  16-byte chunks,         -- ldmatrix ->  fragments -mma-> sums -> out
//!                 cp.async  swizzled                  (.trans if k                       epilogue
//!                 operand.rs                          is not contiguous)  block.rs
//! ```
//! An instruction adds sixteen products to the f32 accumulator at once, as [`mma`](crate::mma)
//! describes. The bits do not depend on the tile, the grid or the run, and are those of
//! `matmul_wgmma`.
//!
//! The parameters are as in [`matmul`](super::matmul), except that the [`OperandLayout`] gives the
//! storage of A, not a flag. `out`, `c` and `pre` hold S. If k is split, `k_per_split` is a
//! multiple of a stage's k, and S is f32.
//!
//! [`BIAS_GRAD`] adds an epilogue output `sums`, f32, `[batches, split_k, n]`: the sums of B's
//! columns over k. For dw = x^T dy this is the bias gradient, so dy is not read a second time. The
//! blocks of the first row of tiles compute it from the fragments that they multiply. The order is
//! the same in every tile and on every device:
//!
//! ```text
//! lane t of four adds its elements, k ascending    k mod 16:  2 t, 2 t + 1, 2 t + 8, 2 t + 9
//! sums = (lane 0 + lane 1) + (lane 2 + lane 3)     of each split of k
//! ```

pub(crate) mod block;
pub(crate) mod finish;
pub(crate) mod operand;
mod tile;

use super::matmul::TRANSPOSE_A;
#[cfg(not(target_arch = "nvptx64"))]
use super::matmul::checks::{self, check_factors, check_outputs, check_split_k};
use super::matmul::epilogue::Epilogue;
use super::matmul::split::{SplitK, SplitRange};
use super::matmul::tile::place;
use super::matmul::{Cost, TRANSPOSE_B};
use crate::family;
use crate::matmul::{EpilogueForm, ProductExtents};
use block::{ColumnSums, GROUP, Problem, compute};
use cuda_std::prelude::*;
use half::bf16;
use operand::Operand;
pub use tile::{DEPTH, Tile};

/// 64 x 64, 128 threads.
pub const T64X64: Tile = Tile { warps: [2, 2], each: [2, 2], stages: 4, cost: Cost::new(6, 6, 1000) };
/// 128 x 128, 128 threads. With three stages, two blocks fit the shared memory of a GB10's
/// multiprocessor: one multiplies while the other writes its outputs.
pub const T128X128: Tile = Tile { warps: [2, 2], each: [4, 4], stages: 3, cost: Cost::new(20, 15, 5000) };
/// 128 x 256, 256 threads. Only one block fits a multiprocessor's registers, so nothing multiplies
/// at its end. It reads less memory for each product, and is faster if k is long.
pub const T128X256: Tile = Tile { warps: [2, 4], each: [4, 4], stages: 4, cost: Cost::new(28, 28, 13500) };

/// A flag in addition to those of [`matmul`](super::matmul): B's columns are summed. It requires
/// [`OperandLayout::Transposed`], S = f32, B stored as `[k, n]`, and m of at least 1.
pub const BIAS_GRAD: u32 = 1 << 30;
/// A flag for use with [`BIAS_GRAD`]: its sums are added to the content of `sums`.
pub const ADD_TO_SUMS: u32 = 1 << 31;

/// The two warps that multiply the same columns of B each sum half of them.
const _: () =
    assert!(T64X64.warps[0] == 2 && T128X128.warps[0] == 2 && T128X256.warps[0] == 2, "two warps along the rows");

/// Slots are remainders, up to the last stage of a k of 32 bits.
const _: () = {
    let (last, tiles) = (u32::MAX / DEPTH, [T64X64, T128X128, T128X256]);
    let mut at = 0;
    while at < 3 * tiles.len() as u32 {
        let (tile, stage) = (tiles[at as usize / 3], last - at % 3);
        assert!(tile.slot(stage) == stage % tile.stages * (tile.shared_bytes() / tile.stages), "the slot of a stage");
        at += 1;
    }
};

/// The storage of A that a kernel is compiled for. The two layouts are separate kernels because of
/// `ptxas`. If one kernel has four or five main loops, it moves the barrier of one or two of them
/// past half of the mma. Then too few mma are left to hide the reads after the barrier, and those
/// loops take 7 to 15 % longer (docs/lab/products.md).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OperandLayout {
    /// A is stored as `[m, k]`, B in either layout.
    Plain,
    /// A is stored as `[k, m]`, B in either layout.
    Transposed,
}

/// Checks the output of the sums of B's columns, if they are requested.
#[cfg(not(target_arch = "nvptx64"))]
macro_rules! check_column_sums {
    ($p:ident, $S:ty, $split_k:ident, $a_is_transposed:expr, $b_is_plain:expr) => {
        if $p.epilogue.flags & $crate::matmul_bf16::BIAS_GRAD != 0 {
            let sums_b = $a_is_transposed && size_of::<$S>() == size_of::<f32>();
            Violation::unless(
                sums_b,
                "flags",
                "sums of B only with a transposed A and an f32 output",
                $p.epilogue.flags,
            )?;
            Violation::unless($b_is_plain, "flags", "B as [k, n] if it is summed", $p.epilogue.flags)?;
            Violation::unless($p.extents.m > 0, "m", "at least one if B is summed", $p.extents.m)?;
            let matrices = Size::of($p.extents.batches).times($split_k);
            checks::holds(
                "sums",
                $p.sums.len(),
                matrices,
                $p.extents.n as usize,
                [1, $p.extents.n as usize],
                $p.extents.n as usize,
            )?;
        }
    };
}
#[cfg(not(target_arch = "nvptx64"))]
pub(crate) use check_column_sums;

family! {
    /// Multiplies BF16 tensors. The module's documentation describes the parameters.
    matmul_bf16<S: Stored>(variant: (OperandLayout, Tile) as VARIANT) {
        (OperandLayout::Plain, T64X64) => { matmul_of_bf16_64x64_f32: f32; matmul_of_bf16_64x64_bf16: bf16; }
        (OperandLayout::Plain, T128X128) => { matmul_of_bf16_128x128_f32: f32; matmul_of_bf16_128x128_bf16: bf16; }
        (OperandLayout::Plain, T128X256) => { matmul_of_bf16_128x256_f32: f32; matmul_of_bf16_128x256_bf16: bf16; }
        (OperandLayout::Transposed, T64X64) => { matmul_of_bf16_transposed_64x64_f32: f32; matmul_of_bf16_transposed_64x64_bf16: bf16; }
        (OperandLayout::Transposed, T128X128) => { matmul_of_bf16_transposed_128x128_f32: f32; matmul_of_bf16_transposed_128x128_bf16: bf16; }
        (OperandLayout::Transposed, T128X256) => { matmul_of_bf16_transposed_128x256_f32: f32; matmul_of_bf16_transposed_128x256_bf16: bf16; }
    }
    unsafe fn(
        a: &[bf16],
        b: &[bf16],
        bias: &[f32],
        c: *const S,
        out: *mut S,
        pre: *mut S,
        sums: *mut f32,
        extents: ProductExtents,
        lda: u32,
        ldb: u32,
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
        const A_ALONG_K: bool = matches!(VARIANT.0, OperandLayout::Plain);
        let a = Operand { values: a, start: z * stride_a, rows: m, stride: lda, along_k: A_ALONG_K };
        let b = Operand { values: b, start: z * stride_b, rows: n, stride: ldb, along_k: flags & TRANSPOSE_B != 0 };
        // grid_dim_y is the number of splits of k.
        let (split_k, split) = (thread::grid_dim_y() as usize, thread::block_idx_y());
        let (start, bias_start) = ((z * split_k + split as usize) * stride_c, z * stride_bias);
        let epilogue = Epilogue { bias, bias_start, c, out, pre, start, m, n, ldc, alpha, beta, flags };
        let SplitRange { first, end, .. } = SplitRange::new(k, k_per_split, split);
        let columns = ColumnSums {
            wanted: flags & BIAS_GRAD != 0,
            accumulate: flags & ADD_TO_SUMS,
            sums,
            start: (z * split_k + split as usize) * n as usize,
        };
        let problem = Problem { a, b, epilogue, columns, k: [first, end] };
        // SAFETY: the contract has checked that each batch lies inside its arguments.
        unsafe {
            const TILE: Tile = VARIANT.1;
            const ROWS: usize = TILE.each[0];
            const COLS: usize = TILE.each[1];
            let place = place([m.div_ceil(TILE.rows()), n.div_ceil(TILE.cols())], GROUP);
            compute::<A_ALONG_K, ROWS, COLS, { 2 * COLS }, { TILE.passes()[0] }, { TILE.passes()[1] }, S>(problem, TILE, place);
        }
    }
    // SAFETY: every batch of `a` and `b` lies inside its argument. Every matrix of a batch and
    // split lies inside `out` (and `c`, `pre`, `bias` where they are used), and none overlaps
    // another. `sums`, where it is used, has a row of n for each of them. A split of k begins with
    // a stage. A thread reads and writes nothing past the end of the rows, the columns or k.
    contract unsafe { block: VARIANT.1.threads(), shared: VARIANT.1.shared_bytes() } |p| {
        let (form, tile) = VARIANT;
        let of_a = if form == OperandLayout::Plain { 0 } else { TRANSPOSE_A };
        let split_k = check_split_k!(p);
        check_factors!(p, of_a | p.epilogue.flags & TRANSPOSE_B);
        check_outputs!(p, split_k);
        check_column_sums!(p, S, split_k, form == OperandLayout::Transposed, p.epilogue.flags & TRANSPOSE_B == 0);
        Violation::unless(split_k == 1 || p.extents.k_per_split.is_multiple_of(DEPTH), "k_per_split", "whole stages of k", p.extents.k_per_split)?;
        Grid::new(Size::of(p.extents.m).div_ceil(tile.rows()).times(Size::of(p.extents.n).div_ceil(tile.cols())), split_k, p.extents.batches)
    }
}

const SPLIT_K: SplitK =
    SplitK { tiles: &[[128, 128, 15], [128, 192, 22]], ends: 333, partial: 150, least: 512, step: DEPTH as usize };

/// The k of one split of the split-K product `[m, k] [k, n]`. It depends only on these three. If
/// the product is not split, it is all of k, and at least 1.
#[must_use]
pub fn k_per_split(m: usize, n: usize, k: usize) -> usize {
    SPLIT_K.k_per_split(m, n, k)
}

/// The tiles. Both output types have all of them.
#[cfg(not(target_arch = "nvptx64"))]
pub const TILES: [Tile; 3] = [T64X64, T128X128, T128X256];
