//! One block's tile of the output: stages arrive in shared memory, warps multiply them, the epilogue finishes the sums.
//!
//! Four stages, each of two steps, are a ring. The turn of stage s overlaps reads, copies and multiplies:
//!
//! ```text
//! read fragments                 multiply           copies, by slot
//!                                                   s: in use   s + 1, s + 2, s + 3: on their way
//! (s, step 1)                    (s, step 0)
//!     wait until stage s + 1 is there, barrier: no warp reads stage s any more
//! (s + 1, step 0)                (s, step 1)        stage s + 4 into the slot of s
//! ```
//! Invariant: the products of an output are added in the same order in every tile.

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
use crate::warp::stay_together;
use cuda_std::{thread, warp};

/// Rows of tiles within which the blocks run down the columns.
const GROUP: u32 = 16;

const _: () = assert!(DEPTH == 2 * STEP, "a stage has two steps");

/// One matrix multiply, as a thread sees it.
#[derive(Clone, Copy)]
pub(super) struct Problem<'p, S> {
    pub(super) a: Operand<'p>,
    pub(super) b: Operand<'p>,
    pub(super) epilogue: Epilogue<'p, S>,
    pub(super) columns: ColumnSums,
    /// The k that this block adds: the first, and the one behind the last.
    pub(super) k: [u32; 2],
}

/// Where the sums of B's columns go, if there are any.
#[derive(Clone, Copy)]
pub(super) struct ColumnSums {
    pub(super) wanted: bool,
    /// Not 0: they are added to what is there.
    pub(super) accumulate: u32,
    pub(super) sums: *mut f32,
    /// Where those of the block's batch and chunk begin.
    pub(super) start: usize,
}

/// Computes the block's tile. A lies along k (`A_ALONG`) or across. A warp has `ROWS x COLS` squares of 16 x 16 outputs, and twice as many `TILES`
/// along the columns. `A_PASSES` and `B_PASSES` are [`Tile::passes`].
///
/// # Safety
/// The contract has accepted the problem, and these are the constants of `tile`.
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

    // The first row of tiles has all columns. Other kernels have no code for it.
    let summed = const { !A_ALONG && size_of::<S>() == size_of::<f32>() } && problem.columns.wanted && row == 0;

    // On a GPU how the operands lie is a constant of the loop, and whether columns are summed.
    #[cfg(target_arch = "nvptx64")]
    macro_rules! sums {
        ($b:literal, $summed:literal) => {
            // SAFETY: the contract has accepted the problem, whose operands lie so.
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

/// A thread's sums of the block's tile, which begins at `first`; its warp's part begins `origin` further. Where `summed`, writes those of B's
/// columns. `A_ALONG` and `B_ALONG` say how the operands lie, and `SUMMED` is `summed`; the emulator asks the operands and `summed`.
///
/// # Safety
/// The contract has accepted the problem, and these are the constants of `tile`.
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
    // SAFETY: the parts follow each other in what the contract declares.
    let slot = |stage: u32, start: u32, width: u32| unsafe {
        SharedTile::<u32>::new((stage % STAGES * tile.stage_len() + start * DEPTH / 2) * 4, width * DEPTH / 2)
    };
    let mut left = Part::new(a, [first[0], rows], threads, first_k);
    let mut right = Part::new(b, [first[1], cols], threads, first_k);
    // Stages that both operands fill: no thread need look at what it copies.
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
    // The two warps of the same columns add up one half each.
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
            // SAFETY: all lanes are here: nothing in the loop parts them.
            unsafe {
                stay_together();
                unroll_on_gpu!(row < ROWS => { fragments.0[row] = of_left.read(a, row as u32, step); });
                unroll_on_gpu!(col < COLS => { fragments.1[col] = of_right.read(b, col as u32, step); });
            }
            fragments
        };
        // Whether columns are summed is a constant here.
        macro_rules! multiply {
            ($fragments:expr) => {
                // SAFETY: all lanes are here.
                unsafe {
                    stay_together();
                    multiply::<ROWS, COLS, TILES>(&mut sums, &$fragments.0, &$fragments.1);
                }
                if SUMMED {
                    add_columns(&mut of_columns, &$fragments.1, half);
                }
            };
        }
        let mut now = read(0, 0);
        // The reads of the next fragments overlap the multiplies of these, also across the end of a stage. Fragments of a stage beyond the
        // last are read and not used: a condition would cost more.
        macro_rules! turn {
            ($stage:expr, $fetch:expr) => {
                let next = read($stage, 1);
                multiply!(now);
                wait_copies::<{ STAGES - 2 }>();
                thread::sync_threads();
                // Into the slot whose last fragments all warps read before the barrier.
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
            // One after the other: what is copied as far as it exists needs the registers.
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
        // SAFETY: all lanes of the warp are here, and the contract has accepted the problem.
        unsafe { finish_columns(problem.columns, first[1] + summed_from, problem.b.rows, of_columns) };
    }
    sums
}

/// Writes a warp's sums of B's columns from `first` on, as far as they exist.
///
/// # Safety
/// All lanes of the warp make the call, and the contract has accepted the problem.
#[inline(always)]
unsafe fn finish_columns<const TILES: usize>(columns: ColumnSums, first: u32, count: u32, sums: [f32; TILES]) {
    let (g, t) = (warp::lane_id() / 4, warp::lane_id() % 4);
    unroll_on_gpu!(tile < TILES => {
        // SAFETY: all lanes are here, as the caller promises; the column has a place in `sums`.
        unsafe {
            let total = total_of_column(sums[tile]);
            let column = first + 8 * tile as u32 + g;
            if t == 0 && column < count {
                put(columns.sums, columns.start + column as usize, total, columns.accumulate);
            }
        }
    });
}
