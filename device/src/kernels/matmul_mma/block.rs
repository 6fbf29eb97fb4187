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
//! Invariant: the words of k are accumulated in the same order in every tile.

use super::operand::{PackedOperand, read, start};
use super::tile::{STAGES, STEPS, Tile, WORDS};
use crate::machine::IS_GPU;
use crate::matmul::epilogue::{Epilogue, Places};
use crate::matmul::tile::place;
use crate::mma::{Factor, Side, Sums, multiply};
use crate::tile::{SharedTile, commit_copies, wait_copies};
use crate::unroll_on_gpu;
use crate::vector::F4;
use crate::warp::Converged;
use cuda_std::{thread, warp};

/// Blocks run down the columns within a group of this many rows of tiles.
const GROUP: u32 = 16;

/// One matrix multiply, from the point of view of one thread.
#[derive(Clone, Copy)]
pub(super) struct Problem<'p> {
    pub(super) a: PackedOperand<'p>,
    pub(super) b: PackedOperand<'p>,
    pub(super) epilogue: Epilogue<'p, f32>,
    /// The range of k steps that this block accumulates: its first step, and one past its last.
    pub(super) steps: [u32; 2],
}

/// A warp's operand fragments of one step.
type Factors<const ROWS: usize, const COLS: usize> = ([Factor; ROWS], [Factor; COLS]);

/// Returns this thread's accumulators of the block's tile. A warp has `ROWS x COLS` blocks of 32 x
/// 32 outputs. `A_PASSES` and `B_PASSES` are [`Tile::passes`].
///
/// # Safety
/// The contract has accepted the problem, and the const parameters match `tile`. All threads of the
/// block call it together.
#[inline(always)]
pub(super) unsafe fn sum<const ROWS: usize, const COLS: usize, const A_PASSES: usize, const B_PASSES: usize>(
    problem: Problem<'_>,
    tile: Tile,
) -> [[Sums; COLS]; ROWS] {
    let Problem { a, b, steps: [first_step, end], .. } = problem;
    let (rows, cols, threads) = (tile.rows(), tile.cols(), tile.threads());
    let (first, origin) = (first(problem, tile), warp_origin::<ROWS, COLS>(tile));
    let (left, right) = (start(origin[0]), start(origin[1]));

    let stages = (end - first_step).div_ceil(STEPS);
    // SAFETY: the parts follow each other in the shared memory that the contract declares.
    let part = |stage: u32, start: u32, width: u32| unsafe {
        SharedTile::new((stage % STAGES * tile.stage_len() + start * WORDS) * 4, width * WORDS)
    };
    // The GPU also copies stages past the last, which are zeros, and reads fragments that it will
    // not use: a condition would cost more.
    let is_needed = |stage: u32| IS_GPU || stage < stages;
    let fetch = |stage: u32| {
        if is_needed(stage) {
            // SAFETY: the contract has accepted the operands.
            unsafe {
                let step = first_step + stage * STEPS;
                a.stage::<A_PASSES>(part(stage, 0, rows), threads, first[0], step);
                b.stage::<B_PASSES>(part(stage, rows, cols), threads, first[1], step);
            }
        }
        commit_copies();
    };
    let factors = |stage: u32, step: u32| -> Factors<ROWS, COLS> {
        let (a, b) = (part(stage, 0, rows), part(stage, rows, cols));
        let mut factors = ([[[0; 2]; 4]; ROWS], [[[0; 2]; 4]; COLS]);
        unroll_on_gpu!(row < ROWS => { factors.0[row] = read(Side::Left, a, left, step, row as u32); });
        unroll_on_gpu!(col < COLS => { factors.1[col] = read(Side::Right, b, right, step, col as u32); });
        factors
    };

    for stage in 0..STAGES {
        fetch(stage);
    }
    let mut sums = [[[[0.0; 8]; 4]; COLS]; ROWS];
    wait_copies::<{ STAGES - 1 }>();
    thread::sync_threads();
    let mut now = ([[[0; 2]; 4]; ROWS], [[[0; 2]; 4]; COLS]);
    if is_needed(0) {
        now = factors(0, 0);
    }
    // SAFETY: nothing in the loop diverges.
    let warp = unsafe { Converged::assume() };
    for stage in 0..stages {
        // The reads of the next fragments overlap the mma of the current ones, also across the end
        // of a stage.
        let next = factors(stage, 1);
        multiply_all::<ROWS, COLS>(warp, &mut sums, now);
        wait_copies::<{ STAGES - 2 }>();
        thread::sync_threads();
        if is_needed(stage + 1) {
            now = factors(stage + 1, 0);
        }
        // Into the slot whose last fragments all warps have read before the barrier.
        fetch(stage + STAGES);
        multiply_all::<ROWS, COLS>(warp, &mut sums, next);
    }
    sums
}

/// Applies the epilogue to a thread's accumulators and writes them.
///
/// # Safety
/// The contract has accepted the problem, and [`sum`] returned the accumulators.
#[inline(always)]
pub(super) unsafe fn finish<const ROWS: usize, const COLS: usize>(
    problem: Problem<'_>,
    tile: Tile,
    mut sums: [[Sums; COLS]; ROWS],
) {
    let epilogue = problem.epilogue;
    let (first, origin) = (first(problem, tile), warp_origin::<ROWS, COLS>(tile));
    let (g, t) = (warp::lane_id() / 4, warp::lane_id() % 4);
    // One block of 32 x 32 at a time; then the next block's accumulators move into its place. The
    // epilogue is long code, so it is instantiated once.
    for block in 0..(ROWS * COLS) as u32 {
        let (row, col) = (block / COLS as u32, block % COLS as u32);
        let i = first[0] + origin[0] + 32 * row + 4 * g;
        let j = first[1] + origin[1] + 32 * col + 4 * t;
        let places = Places::new(i, [j, j + 16], 4);
        let halves = [0, 1, 2, 3].map(|line| {
            let [w, x, y, z, p, q, r, s] = sums[0][0][line];
            [F4([w, x, y, z]), F4([p, q, r, s])]
        });
        // SAFETY: the contract has accepted the problem.
        unsafe { epilogue.finish(places, halves) };
        unroll_on_gpu!(at < ROWS * COLS - 1 => {
            sums[at / COLS][at % COLS] = sums[(at + 1) / COLS][(at + 1) % COLS];
        });
    }
}

/// Returns row and column of the block's first output.
#[inline(always)]
fn first(problem: Problem<'_>, tile: Tile) -> [u32; 2] {
    let Epilogue { m, n, .. } = problem.epilogue;
    let [row, col] = place([m.div_ceil(tile.rows()), n.div_ceil(tile.cols())], GROUP);
    [row * tile.rows(), col * tile.cols()]
}

/// Returns row and column of the warp's first output in the tile.
#[inline(always)]
fn warp_origin<const ROWS: usize, const COLS: usize>(tile: Tile) -> [u32; 2] {
    let warp = thread::thread_idx_x() / 32;
    [warp / tile.warps[1] * 32 * ROWS as u32, warp % tile.warps[1] * 32 * COLS as u32]
}

/// Accumulates the products of all blocks of a warp.
#[inline(always)]
fn multiply_all<const ROWS: usize, const COLS: usize>(
    warp: Converged,
    sums: &mut [[Sums; COLS]; ROWS],
    (a, b): Factors<ROWS, COLS>,
) {
    let warp = warp.again();
    unroll_on_gpu!(row < ROWS => {
        unroll_on_gpu!(col < COLS => { multiply(warp, &mut sums[row][col], a[row], b[col]); });
    });
}
