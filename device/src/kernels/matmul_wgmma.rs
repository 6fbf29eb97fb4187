//! Matrix multiply of BF16 tensors by wgmma, Hopper's matrix instruction. It computes the same as
//! [`matmul_bf16`](super::matmul_bf16), on devices of compute capability 9.0 and on the emulator.
//!
//! ```text
//! global memory               shared memory, 4 stages of 64 k
//! A, B  --------------------->  boxes of 64 rows of   ---------------------->  sums -> out
//!        copy engine (TMA)      128 bytes, swizzled   wgmma reads both           epilogue
//!        a warpgroup, ring.rs                         operands  block.rs         finish.rs
//! ```
//! An instruction adds the same products at once as in `matmul_bf16`, so both give the same bits.
//! The epilogue is the same code. The split of k is the same rule
//! ([`k_per_split`](super::matmul_bf16::k_per_split)).
//!
//! The parameters are as in `matmul_bf16`, with these differences:
//! - The layouts of A and of B are part of the variant, and
//!   [`TRANSPOSE_B`](super::matmul::TRANSPOSE_B) is not read.
//! - `a` and `b` are tensor maps, which have the strides: matrices of rows along k, or across k if
//!   the layout says so. `steps_a` and `steps_b` are the matrices from a batch to the next: 1, or 0
//!   if all batches share one.
//! - `blocks` limits the grid: a block computes every `blocks`th tile, so that the copies of the
//!   next tile overlap the epilogue of this one. The grid changes no bit.

mod align;
pub(super) mod block;
mod columns;
mod finish;
pub(super) mod ring;
pub(super) mod tile;

use super::matmul::Cost;
#[cfg(not(target_arch = "nvptx64"))]
use super::matmul::checks::{self, check_outputs, check_split_k};
use super::matmul::epilogue::Epilogue;
use super::matmul::split::SplitRange;
use super::matmul_bf16::block::ColumnSums;
#[cfg(not(target_arch = "nvptx64"))]
use super::matmul_bf16::check_column_sums;
use super::matmul_bf16::{ADD_TO_SUMS, BIAS_GRAD, OperandLayout};
use crate::block::launder_reg;
use crate::family;
use crate::machine::hints::block_bounds;
use crate::matmul::{EpilogueForm, ProductExtents};
#[cfg(not(target_arch = "nvptx64"))]
use crate::wgmma::box_rows;
#[cfg(not(target_arch = "nvptx64"))]
pub use align::Aligning;
pub use align::{align_rows, aligned_stride};
use block::{Operands, Outputs, compute};
#[cfg(not(target_arch = "nvptx64"))]
use cuda_std::launch::{self, Violation};
use cuda_std::tensor_map::TensorMap;
// The family declares kernels of warpgroups.
use cuda_std::warpgroup_kernel as kernel;
use half::bf16;
pub use tile::Tile;

/// 128 x 256, 384 threads.
pub const T128X256: Tile = Tile { groups: 2, columns: 256, cost: Cost::new(9, 9, 4000) };
/// 128 x 192, 384 threads.
pub const T128X192: Tile = Tile { groups: 2, columns: 192, cost: Cost::new(7, 7, 2900) };
/// 128 x 128, 384 threads.
pub const T128X128: Tile = Tile { groups: 2, columns: 128, cost: Cost::new(6, 6, 2500) };
/// 128 x 64, 384 threads.
pub const T128X64: Tile = Tile { groups: 2, columns: 64, cost: Cost::new(5, 5, 2200) };

/// Tiles run down the columns within a group of this many rows of tiles.
const GROUP: u32 = 16;

family! {
    /// Multiplies BF16 tensors by wgmma. The module's documentation describes the parameters.
    matmul_wgmma<S: Stored>(variant: ([OperandLayout; 2], Tile) as VARIANT) {
        ([OperandLayout::Plain, OperandLayout::Plain], T128X256) => { matmul_wgmma_nn_128x256_f32: f32; matmul_wgmma_nn_128x256_bf16: bf16; }
        ([OperandLayout::Plain, OperandLayout::Plain], T128X192) => { matmul_wgmma_nn_128x192_f32: f32; matmul_wgmma_nn_128x192_bf16: bf16; }
        ([OperandLayout::Plain, OperandLayout::Plain], T128X128) => { matmul_wgmma_nn_128x128_f32: f32; matmul_wgmma_nn_128x128_bf16: bf16; }
        ([OperandLayout::Plain, OperandLayout::Plain], T128X64) => { matmul_wgmma_nn_128x64_f32: f32; matmul_wgmma_nn_128x64_bf16: bf16; }
        ([OperandLayout::Plain, OperandLayout::Transposed], T128X256) => { matmul_wgmma_nt_128x256_f32: f32; matmul_wgmma_nt_128x256_bf16: bf16; }
        ([OperandLayout::Plain, OperandLayout::Transposed], T128X192) => { matmul_wgmma_nt_128x192_f32: f32; matmul_wgmma_nt_128x192_bf16: bf16; }
        ([OperandLayout::Plain, OperandLayout::Transposed], T128X128) => { matmul_wgmma_nt_128x128_f32: f32; matmul_wgmma_nt_128x128_bf16: bf16; }
        ([OperandLayout::Plain, OperandLayout::Transposed], T128X64) => { matmul_wgmma_nt_128x64_f32: f32; matmul_wgmma_nt_128x64_bf16: bf16; }
        ([OperandLayout::Transposed, OperandLayout::Plain], T128X256) => { matmul_wgmma_tn_128x256_f32: f32; matmul_wgmma_tn_128x256_bf16: bf16; }
        ([OperandLayout::Transposed, OperandLayout::Plain], T128X192) => { matmul_wgmma_tn_128x192_f32: f32; matmul_wgmma_tn_128x192_bf16: bf16; }
        ([OperandLayout::Transposed, OperandLayout::Plain], T128X128) => { matmul_wgmma_tn_128x128_f32: f32; matmul_wgmma_tn_128x128_bf16: bf16; }
        ([OperandLayout::Transposed, OperandLayout::Plain], T128X64) => { matmul_wgmma_tn_128x64_f32: f32; matmul_wgmma_tn_128x64_bf16: bf16; }
        ([OperandLayout::Transposed, OperandLayout::Transposed], T128X256) => { matmul_wgmma_tt_128x256_f32: f32; matmul_wgmma_tt_128x256_bf16: bf16; }
        ([OperandLayout::Transposed, OperandLayout::Transposed], T128X192) => { matmul_wgmma_tt_128x192_f32: f32; matmul_wgmma_tt_128x192_bf16: bf16; }
        ([OperandLayout::Transposed, OperandLayout::Transposed], T128X128) => { matmul_wgmma_tt_128x128_f32: f32; matmul_wgmma_tt_128x128_bf16: bf16; }
        ([OperandLayout::Transposed, OperandLayout::Transposed], T128X64) => { matmul_wgmma_tt_128x64_f32: f32; matmul_wgmma_tt_128x64_bf16: bf16; }
    }
    unsafe fn(
        a: TensorMap<bf16>,
        b: TensorMap<bf16>,
        bias: &[f32],
        c: *const S,
        out: *mut S,
        pre: *mut S,
        sums: *mut f32,
        extents: ProductExtents,
        blocks: u32,
        steps_a: u32,
        steps_b: u32,
        epilogue: EpilogueForm,
    ) {
        let ProductExtents { m, n, k, k_per_split, batches } = extents;
        let EpilogueForm { stride_c, stride_bias, ldc, alpha, beta, flags } = epilogue;
        const TILE: Tile = VARIANT.1;
        const A_ALONG: bool = matches!(VARIANT.0[0], OperandLayout::Plain);
        const B_ALONG: bool = matches!(VARIANT.0[1], OperandLayout::Transposed);
        block_bounds::<{ TILE.threads() }, 1>();
        // The grid follows from `blocks`, which only the contract reads.
        let _ = blocks;
        // All of these are computed again for each tile: the compiler would keep them in registers
        // that the sums need. Divisors are at least one, so that no division can fail.
        let extents = || [launder_reg(m).div_ceil(TILE.rows()).max(1), launder_reg(n).div_ceil(TILE.cols()).max(1)];
        let splits = || {
            let k = launder_reg(k);
            if k_per_split < k { k.div_ceil(k_per_split.max(1)).max(1) } else { 1 }
        };
        let count = || {
            let [rows, cols] = extents();
            rows * cols * splits() * batches
        };
        // Most products are one matrix. Then two divisions fewer delay the next tile's copies.
        let is_one = batches == 1 && k_per_split >= k;
        let matrix = |item: u32| {
            let [rows, cols] = extents();
            if is_one { 0 } else { item / (rows * cols).max(1) }
        };
        let place = |item: u32| {
            let [rows, cols] = extents();
            let tile = if is_one { item } else { item % (rows * cols).max(1) };
            let [row, col] = place_of(tile, [rows, cols]);
            [row * TILE.rows(), col * TILE.cols()]
        };
        let range = |matrix: u32| {
            let split_k = splits();
            let (batch, split) = if split_k == 1 { (matrix, 0) } else { (matrix / split_k, matrix % split_k) };
            let SplitRange { first, end, .. } = SplitRange::new(k, k_per_split, split);
            (batch, [first, end])
        };
        let outputs = |matrix: u32| {
            // Only products without splits have a bias, so that a matrix is a batch.
            let (start, bias_start) = (matrix as usize * stride_c, matrix as usize * stride_bias);
            let epilogue = Epilogue { bias, bias_start, c, out, pre, start, m, n, ldc, alpha, beta, flags };
            let columns = ColumnSums {
                wanted: flags & BIAS_GRAD != 0,
                accumulate: flags & ADD_TO_SUMS,
                sums,
                start: matrix as usize * n as usize,
            };
            Outputs { epilogue, columns }
        };
        let operands = Operands { maps: [a, b], steps: [steps_a, steps_b] };
        // SAFETY: the contract has checked that each batch lies inside its arguments.
        unsafe {
            const TILES: usize = TILE.cols() as usize / 8;
            compute::<A_ALONG, B_ALONG, TILES, S>(count, operands, matrix, place, range, outputs, TILE);
        }
    }
    // SAFETY: every matrix of `a` and `b` lies inside its argument, and a box has zeros past their
    // extents. Every matrix of a batch and split lies inside `out` (and `c`, `pre`, `bias` where
    // they are used), and none overlaps another. `sums`, where it is used, has a row of n for each
    // of them. A split ends with a step or with k. A block computes existing tiles, whichever grid
    // it is in. A thread writes nothing past the end of the rows and the columns.
    contract unsafe { block: VARIANT.1.threads(), shared: VARIANT.1.shared_bytes() } |p| {
        let ([of_a, of_b], tile) = VARIANT;
        let split_k = check_split_k!(p);
        check_outputs!(p, split_k);
        check_column_sums!(p, S, split_k, of_a == OperandLayout::Transposed, of_b == OperandLayout::Plain);
        let stored = |[rows, cols]: [u32; 2], layout| if layout == OperandLayout::Transposed { [cols, rows] } else { [rows, cols] };
        check_map("a", &p.a, stored([p.extents.m, p.extents.k], of_a), box_rows::<bf16>(true), p.steps_a, p.extents.batches)?;
        check_map("b", &p.b, stored([p.extents.k, p.extents.n], of_b), box_rows::<bf16>(true), p.steps_b, p.extents.batches)?;
        Violation::unless(split_k == 1 || p.extents.k_per_split.is_multiple_of(16), "k_per_split", "a multiple of 16", p.extents.k_per_split)?;
        Violation::unless(p.blocks > 0, "blocks", "at least one", p.blocks)?;
        let count = Size::of(p.extents.m).div_ceil(tile.rows()).times(Size::of(p.extents.n).div_ceil(tile.cols())).times(split_k).times(p.extents.batches);
        Violation::unless(count.at_most(1 << 31), "m", "at most 2^31 tiles", p.extents.m)?;
        let blocks = count.number().map_or(0, |count| count.min(p.blocks as usize));
        Grid::new(blocks, 1, 1)
    }
}

/// Checks that a map has the matrices of an operand, as they are stored, and the kernel's boxes.
#[cfg(not(target_arch = "nvptx64"))]
pub(super) fn check_map<T>(
    name: &'static str,
    map: &launch::TensorMap<'_, T>,
    [rows, cols]: [u32; 2],
    box_rows: u32,
    steps: u32,
    batches: u32,
) -> Result<(), Violation> {
    let extents = [cols, rows, if steps == 0 { 1 } else { batches }];
    Violation::unless(steps < 2, name, "0 or 1 matrices from a batch to the next", steps)?;
    Violation::unless(
        map.extents == extents,
        name,
        &std::format!("a map of {} matrices of {rows} x {cols}", extents[2]),
        std::format_args!("{:?}", map.extents),
    )?;
    Violation::unless(map.box_rows == box_rows, name, &std::format!("boxes of {box_rows} rows"), map.box_rows)?;
    map.check(name)
}

/// Returns the row and the column of tiles of the tile with this number. Divisors are at least one,
/// so that no division can fail.
#[inline(always)]
pub(super) fn place_of(tile: u32, [rows, cols]: [u32; 2]) -> [u32; 2] {
    let height = rows.min(GROUP);
    let above = tile / (height * cols).max(1) * height;
    let (height, within) = (height.min(rows - above).max(1), tile - above * cols);
    [above + within % height, within / height]
}

/// The tiles. All layouts and both output types have them.
#[cfg(not(target_arch = "nvptx64"))]
pub const TILES: [Tile; 4] = [T128X64, T128X128, T128X192, T128X256];
