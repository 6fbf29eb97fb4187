//! One block's tile of the output: stages arrive in shared memory, warps multiply them, and the
//! epilogue finishes the accumulators.
//!
//! Four stages of two steps each form a ring. The iteration of stage s overlaps fragment reads,
//! copies and mma:
//!
//! ```text
//! read fragments                 multiply           copies, by slot
//!                                                   s: in use   s + 1, s + 2, s + 3: in flight
//! (s, step 1)                    (s, step 0)
//!     wait until stage s + 1 has arrived, barrier: all warps have read stage s
//! (s + 1, step 0)                (s, step 1)        stage s + 4 into the slot of s
//! ```
//! Invariant: the products of an output are accumulated in the same order in every tile.

use super::finish::finish;
use super::fragment::{STEP, Sums, total_of_column};
#[cfg(target_arch = "nvptx64")]
use super::fragment::{Source, add_columns, multiply};
use super::operand::{Operand, Part};
use super::tile::{DEPTH, STAGES, Tile};
use crate::matmul::epilogue::Epilogue;
use crate::matmul::tile::place;
use crate::stored::Stored;
use crate::tile::{SharedTile, commit_copies, wait_copies};
use crate::unroll_on_gpu;
use crate::vector::put;
#[cfg(target_arch = "nvptx64")]
use crate::warp::converge_warp;
use cuda_std::{thread, warp};

/// Blocks run down the columns within a group of this many rows of tiles.
const GROUP: u32 = 16;

const _: () = assert!(DEPTH == 2 * STEP, "a stage has two steps");

/// One matrix multiply, from the point of view of one thread.
#[derive(Clone, Copy)]
pub(super) struct Problem<'p, S> {
    pub(super) a: Operand<'p>,
    pub(super) b: Operand<'p>,
    pub(super) epilogue: Epilogue<'p, S>,
    pub(super) columns: ColumnSums,
    /// The range of k that this block accumulates: its first k, and one past its last.
    pub(super) k: [u32; 2],
}

/// The destination of the sums of B's columns, if they are wanted.
#[derive(Clone, Copy)]
pub(super) struct ColumnSums {
    pub(super) wanted: bool,
    /// A flag: if not 0, the sums are added to the memory's content.
    pub(super) accumulate: u32,
    pub(super) sums: *mut f32,
    /// The index of the sums of this block's batch and chunk.
    pub(super) start: usize,
}

/// Computes the block's tile. `A_ALONG` is true if A is contiguous along k. A warp has `ROWS x
/// COLS` squares of 16 x 16 outputs, and `TILES`, twice `COLS`, mma tiles along the columns.
/// `A_PASSES` and `B_PASSES` are [`Tile::passes`].
///
/// # Safety
/// The contract has accepted the problem, and the const parameters match `tile`.
#[inline(always)]
pub(super) unsafe fn compute<
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
) {
    let epilogue = problem.epilogue;
    let (rows, cols) = (tile.rows(), tile.cols());
    let [row, col] = place([epilogue.m.div_ceil(rows), epilogue.n.div_ceil(cols)], GROUP);
    let first = [row * rows, col * cols];
    let warp = thread::thread_idx_x() / 32;
    let origin = [warp / tile.warps[1] * 16 * ROWS as u32, warp % tile.warps[1] * 16 * COLS as u32];

    // The first row of tiles covers all columns. Kernels of another layout or type have no code for
    // the column sums.
    let summed = const { !A_ALONG && size_of::<S>() == size_of::<f32>() } && problem.columns.wanted && row == 0;

    // On a GPU, the operand layout and the column-sum flag are compile-time constants of the loop.
    #[cfg(target_arch = "nvptx64")]
    macro_rules! sums {
        ($b:literal, $summed:literal) => {
            // SAFETY: the contract has accepted the problem, and its operands have this layout.
            unsafe {
                sum::<A_ALONG, $b, $summed, ROWS, COLS, TILES, A_PASSES, B_PASSES, S>(
                    problem, tile, first, origin, $summed,
                )
            }
        };
    }
    #[cfg(target_arch = "nvptx64")]
    let sums = if summed {
        sums!(false, true)
    } else if problem.b.along_k {
        sums!(true, false)
    } else {
        sums!(false, false)
    };
    // SAFETY: the contract has accepted the problem.
    #[cfg(not(target_arch = "nvptx64"))]
    let sums = unsafe {
        sum::<true, true, true, ROWS, COLS, TILES, A_PASSES, B_PASSES, S>(problem, tile, first, origin, summed)
    };
    // SAFETY: the contract has accepted the problem.
    unsafe { finish::<ROWS, TILES, COLS, S>(epilogue, [first[0] + origin[0], first[1] + origin[1]], sums) };
}

/// Returns a thread's accumulators of the block's tile. The tile begins at `first`, and the warp's
/// part begins `origin` further. If `summed`, also writes the sums of B's columns. On a GPU
/// `A_ALONG`, `B_ALONG` and `SUMMED` are the operands' layouts and `summed` as constants. The
/// emulator reads the run-time values instead.
///
/// # Safety
/// The contract has accepted the problem, and the const parameters match `tile`.
#[inline(always)]
#[cfg_attr(not(target_arch = "nvptx64"), allow(clippy::extra_unused_type_parameters))]
unsafe fn sum<
    const A_ALONG: bool,
    const B_ALONG: bool,
    const SUMMED: bool,
    const ROWS: usize,
    const COLS: usize,
    const TILES: usize,
    const A_PASSES: usize,
    const B_PASSES: usize,
    S: Stored,
>(
    problem: Problem<'_, S>,
    tile: Tile,
    first: [u32; 2],
    origin: [u32; 2],
    summed: bool,
) -> Sums<ROWS, TILES> {
    let Problem { a, b, k: [first_k, end], .. } = problem;
    let summed = SUMMED && summed;
    #[cfg(target_arch = "nvptx64")]
    let (a, b) = (Operand { along_k: A_ALONG, ..a }, Operand { along_k: B_ALONG, ..b });
    let (rows, cols, threads) = (tile.rows(), tile.cols(), tile.threads());
    let stages = (end - first_k).div_ceil(DEPTH);
    // SAFETY: the parts follow each other in the shared memory that the contract declares.
    let slot = |stage: u32, start: u32, width: u32| unsafe {
        SharedTile::<u32>::new((stage % STAGES * tile.stage_len() + start * DEPTH / 2) * 4, width * DEPTH / 2)
    };
    let mut left = Part::new(a, [first[0], rows], threads, first_k);
    let mut right = Part::new(b, [first[1], cols], threads, first_k);
    // The number of stages that both operands fill completely: their copies need no bounds checks.
    let whole = if left.is_whole() && right.is_whole() { (end - first_k) / DEPTH } else { 0 };
    macro_rules! fetch {
        (whole $stage:expr) => {
            // SAFETY: the contract has accepted the operands; both parts and the stage are whole.
            unsafe {
                left.copy_whole::<A_PASSES>(slot($stage, 0, rows));
                right.copy_whole::<B_PASSES>(slot($stage, rows, cols));
            }
        };
        ($stage:expr) => {
            if $stage < whole {
                fetch!(whole $stage);
            } else if $stage < stages {
                // SAFETY: the contract has accepted the operands.
                unsafe {
                    let k = [first_k + $stage * DEPTH, end];
                    left.copy_existing::<A_PASSES>(slot($stage, 0, rows), k);
                    right.copy_existing::<B_PASSES>(slot($stage, rows, cols), k);
                }
            }
        };
    }
    for stage in 0..STAGES {
        fetch!(stage);
        commit_copies();
    }
    let mut sums: Sums<ROWS, TILES> = [[[0.0; 4]; TILES]; ROWS];
    // The two warps that share the same columns sum one half each.
    const { assert!(COLS.is_multiple_of(2), "a warp has half of the columns") };
    let half = thread::thread_idx_x() / 32 / tile.warps[1];
    let summed_from = origin[1] + half * 8 * COLS as u32;
    let mut of_columns = [0.0; COLS];
    wait_copies::<{ STAGES - 1 }>();
    thread::sync_threads();
    #[cfg(target_arch = "nvptx64")]
    {
        let of_left = Source::<A_ALONG>::left(rows, origin[0]);
        let of_right = Source::<B_ALONG>::right(cols, origin[1]);
        let read = |stage: u32, step: u32| {
            let (a, b) = (slot(stage, 0, rows), slot(stage, rows, cols));
            let mut fragments = ([[0; 4]; ROWS], [[0; 4]; COLS]);
            // SAFETY: all lanes of the warp execute this: nothing in the loop diverges.
            unsafe {
                converge_warp();
                unroll_on_gpu!(row < ROWS => { fragments.0[row] = of_left.read(a, row as u32, step); });
                unroll_on_gpu!(col < COLS => { fragments.1[col] = of_right.read(b, col as u32, step); });
            }
            fragments
        };
        // The column-sum flag is a constant here.
        macro_rules! multiply {
            ($fragments:expr) => {
                // SAFETY: all lanes of the warp execute this.
                unsafe {
                    converge_warp();
                    multiply::<ROWS, COLS, TILES>(&mut sums, &$fragments.0, &$fragments.1);
                }
                if SUMMED {
                    add_columns(&mut of_columns, &$fragments.1, half);
                }
            };
        }
        let mut now = read(0, 0);
        // The reads of the next fragments overlap the mma of the current ones, also across the end
        // of a stage. Fragments of a stage past the last are read and not used: a condition would
        // cost more.
        macro_rules! turn {
            ($stage:expr, $fetch:expr) => {
                let next = read($stage, 1);
                multiply!(now);
                wait_copies::<{ STAGES - 2 }>();
                thread::sync_threads();
                // Into the slot whose last fragments all warps have read before the barrier.
                $fetch;
                commit_copies();
                now = read($stage + 1, 0);
                multiply!(next);
            };
        }
        let mut stage = 0;
        while stage + STAGES < whole {
            turn!(stage, fetch!(whole stage + STAGES));
            stage += 1;
        }
        if whole == stages {
            while stage < stages {
                turn!(stage, {});
                stage += 1;
            }
        } else {
            // Not pipelined: the bounds-checked copies need the registers.
            while stage < stages {
                wait_copies::<{ STAGES - 1 }>();
                thread::sync_threads();
                for step in 0..2 {
                    let now = read(stage, step);
                    multiply!(now);
                }
                thread::sync_threads();
                fetch!(stage + STAGES);
                commit_copies();
                stage += 1;
            }
        }
    }
    #[cfg(not(target_arch = "nvptx64"))]
    for stage in 0..stages {
        let parts = [slot(stage, 0, rows), slot(stage, rows, cols)];
        let along = [a.along_k, b.along_k];
        for step in 0..2 {
            super::fragment::multiply_one_by_one(&mut sums, parts, along, [rows, cols], origin, step);
            if summed {
                super::fragment::add_columns_one_by_one(&mut of_columns, parts[1], b.along_k, cols, summed_from, step);
            }
        }
        wait_copies::<{ STAGES - 2 }>();
        thread::sync_threads();
        fetch!(stage + STAGES);
    }
    if summed {
        // SAFETY: all lanes of the warp execute this, and the contract has accepted the problem.
        unsafe { finish_columns(problem.columns, first[1] + summed_from, problem.b.rows, of_columns) };
    }
    sums
}

/// Writes a warp's sums of B's columns from `first` on. Columns past the end are skipped.
///
/// # Safety
/// All lanes of the warp make the call, and the contract has accepted the problem.
#[inline(always)]
unsafe fn finish_columns<const TILES: usize>(columns: ColumnSums, first: u32, count: u32, sums: [f32; TILES]) {
    let (g, t) = (warp::lane_id() / 4, warp::lane_id() % 4);
    unroll_on_gpu!(tile < TILES => {
        // SAFETY: the caller guarantees that all lanes of the warp execute this; the column has an
        // element in `sums`.
        unsafe {
            let total = total_of_column(sums[tile]);
            let column = first + 8 * tile as u32 + g;
            if t == 0 && column < count {
                put(columns.sums, columns.start + column as usize, total, columns.accumulate);
            }
        }
    });
}
