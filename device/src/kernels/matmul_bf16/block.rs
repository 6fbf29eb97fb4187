//! One block's tile of the output: stages arrive in shared memory, warps multiply them, and the
//! epilogue finishes the accumulators.
//!
//! Three or four stages of two steps each form a ring. The iteration of stage s overlaps fragment
//! reads, copies and mma, here with four stages:
//!
//! ```text
//! read fragments                 multiply           copies, by slot
//!                                                   s: in use   s + 1, s + 2, s + 3: in flight
//! (s, step 1)                    (s, step 0)
//!     wait until stage s + 1 has arrived, barrier: all warps have read stage s
//! (s + 1, step 0)                (s, step 1)        stage s + 4 into the slot of s
//! ```
//! That is the GPU's loop, `block/gpu.rs`. The emulator's, `block/emulated.rs`, multiplies one
//! stage after another.
//!
//! Invariant: the products of an output are accumulated in the same order in every tile.

#[cfg(not(target_arch = "nvptx64"))]
#[path = "block/emulated.rs"]
mod machine;
#[cfg(target_arch = "nvptx64")]
#[path = "block/gpu.rs"]
mod machine;

use super::finish::finish;
use super::operand::Operand;
use super::tile::{DEPTH, Tile};
use crate::format::{Bf16, Format};
use crate::matmul::epilogue::Epilogue;
use crate::mma::fragments::total_of_column;
use crate::stored::Stored;
use crate::unroll_on_gpu;
use crate::vector::put;
use crate::warp::Converged;
use cuda_std::{thread, warp};
use machine::sum;

/// The k of one mma instruction.
const STEP: u32 = Bf16::PER_STEP;

/// Blocks run down the columns within a group of this many rows of tiles.
pub(crate) const GROUP: u32 = 16;

const _: () = assert!(DEPTH == 2 * STEP, "a stage has two steps");

/// One matrix multiply, from the point of view of one thread.
#[derive(Clone, Copy)]
pub(crate) struct Problem<'p, S> {
    pub(crate) a: Operand<'p>,
    pub(crate) b: Operand<'p>,
    pub(crate) epilogue: Epilogue<'p, S>,
    pub(crate) columns: ColumnSums,
    /// The range of k that this block accumulates: its first k, and one past its last.
    pub(crate) k: [u32; 2],
}

/// The destination of the sums of B's columns, if they are wanted.
#[derive(Clone, Copy)]
pub(crate) struct ColumnSums {
    pub(crate) wanted: bool,
    /// A flag: if not 0, the sums are added to the memory's content.
    pub(crate) accumulate: u32,
    pub(crate) sums: *mut f32,
    /// The index of the sums of this block's batch and split.
    pub(crate) start: usize,
}

/// Computes the tile in this row and this column of tiles. `A_ALONG` is true if A is contiguous
/// along k. A warp has `ROWS x COLS` squares of 16 x 16 outputs, and `TILES`, twice `COLS`, mma
/// tiles along the columns. `A_PASSES` and `B_PASSES` are [`Tile::passes`].
///
/// # Safety
/// The contract has accepted the problem, and the const parameters match `tile`. All threads of the
/// block call it together.
#[inline(always)]
pub(crate) unsafe fn compute<
    const A_ALONG: bool,
    const ROWS: usize,
    const COLS: usize,
    const TILES: usize,
    const A_PASSES: usize,
    const B_PASSES: usize,
    S: Stored,
>(
    problem: Problem<'_, S>,
    tile: Tile,
    [row, col]: [u32; 2],
) {
    let epilogue = problem.epilogue;
    let first = [row * tile.rows(), col * tile.cols()];
    let warp = thread::thread_idx_x() / 32;
    let origin = [warp / tile.warps[1] * 16 * ROWS as u32, warp % tile.warps[1] * 16 * COLS as u32];

    // The first row of tiles covers all columns. Kernels of another layout or type have no code for
    // the column sums.
    let summed = const { !A_ALONG && size_of::<S>() == size_of::<f32>() } && problem.columns.wanted && row == 0;

    // SAFETY: the contract has accepted the problem, and all threads of the block execute this.
    unsafe {
        let sums = sum::<A_ALONG, ROWS, COLS, TILES, A_PASSES, B_PASSES, S>(problem, tile, first, origin, summed);
        let first = [first[0] + origin[0], first[1] + origin[1]];
        finish::<ROWS, TILES, COLS, S>(Converged::assume(), epilogue, first, sums);
    }
}

/// The columns of B that a warp sums: a half of its own, because the two warps that share the same
/// columns sum one half each. Returns the half's number, and its first column in the tile.
#[inline(always)]
fn summed_half<const COLS: usize>(tile: Tile, origin: [u32; 2]) -> [u32; 2] {
    const { assert!(COLS.is_multiple_of(2), "a warp has half of the columns") };
    let half = thread::thread_idx_x() / 32 / tile.warps[1];
    [half, origin[1] + half * 8 * COLS as u32]
}

/// Writes a warp's sums of B's columns from `first` on. Columns past the end are skipped.
///
/// # Safety
/// The contract has accepted the problem.
#[inline(always)]
unsafe fn finish_columns<const TILES: usize>(
    converged: Converged,
    columns: ColumnSums,
    first: u32,
    count: u32,
    sums: [f32; TILES],
) {
    let (g, t) = (warp::lane_id() / 4, warp::lane_id() % 4);
    unroll_on_gpu!(tile < TILES => {
        let total = total_of_column(converged, sums[tile]);
        let column = first + 8 * tile as u32 + g;
        if t == 0 && column < count {
            // SAFETY: the column exists, so the contract has checked that it has an element.
            unsafe { put(columns.sums, columns.start + column as usize, total, columns.accumulate) };
        }
    });
}
