//! The GPU's loop over the stages: fragments are read one step ahead of their products.

use super::{DEPTH, Problem, STEP, Tile, finish_columns, summed_half};
use crate::format::Bf16;
use crate::matmul_bf16::operand::{Operand, OperandTile, chunks};
use crate::matmul_bf16::tile::{CHUNK, wait_for_stage};
use crate::mma::fragments::{Squares, Sums, multiply};
use crate::stored::Stored;
use crate::tile::{SharedTile, commit_copies};
use crate::unroll;
use crate::warp::{Converged, converge_warp};
use cuda_std::thread;

/// Returns a thread's accumulators of the block's tile. The tile begins at `first`, and the warp's
/// part begins `origin` further. If `summed`, also writes the sums of B's columns.
///
/// # Safety
/// The contract has accepted the problem, and the const parameters are those of `tile`. All threads
/// of the block call it together.
#[inline(always)]
pub(super) unsafe fn sum<
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
    first: [u32; 2],
    origin: [u32; 2],
    summed: bool,
) -> Sums<ROWS, TILES> {
    // The operand layout and the column-sum flag are constants of the loop.
    macro_rules! sums {
        ($b:literal, $summed:literal) => {
            // SAFETY: the contract has accepted the problem, and its operands have this layout.
            unsafe {
                pipeline::<A_ALONG, $b, $summed, ROWS, COLS, TILES, A_PASSES, B_PASSES, S>(problem, tile, first, origin)
            }
        };
    }
    if summed {
        sums!(false, true)
    } else if problem.b.along_k {
        sums!(true, false)
    } else {
        sums!(false, false)
    }
}

/// Returns the squares of an operand in a stage of `width` rows, from `first` on.
#[inline(always)]
fn squares<const ALONG_K: bool>(width: u32, first: u32, is_left: bool) -> Squares {
    let chunks = chunks(ALONG_K, width);
    let [row, chunk] = if ALONG_K { [first, 0] } else { [0, first / CHUNK] };
    if is_left == ALONG_K { Squares::down(chunks, row, chunk) } else { Squares::across(chunks, row, chunk) }
}

/// Reads the lane's words of a square of a step, the `square`th from the first on.
#[inline(always)]
fn read_square<const ALONG_K: bool>(
    warp: Converged,
    squares: Squares,
    part: SharedTile<u32>,
    square: u32,
    step: u32,
) -> [u32; 4] {
    if ALONG_K {
        squares.read(warp, part, 16 * square, step, false)
    } else {
        squares.read(warp, part, STEP * step, square, true)
    }
}

/// Returns [`sum`] for operands with the layouts `A_ALONG` and `B_ALONG`, and sums columns if
/// `SUMMED`.
///
/// # Safety
/// The caller meets the requirements of [`sum`].
#[inline(always)]
unsafe fn pipeline<
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
) -> Sums<ROWS, TILES> {
    let Problem { a, b, k: [first_k, end], .. } = problem;
    let (a, b) = (Operand { along_k: A_ALONG, ..a }, Operand { along_k: B_ALONG, ..b });
    let (rows, cols, threads) = (tile.rows(), tile.cols(), tile.threads());
    let stages = (end - first_k).div_ceil(DEPTH);
    let ring = tile.stages;
    // SAFETY: the parts follow each other in the shared memory that the contract declares.
    let part = |slot: u32, start: u32, width: u32| unsafe {
        SharedTile::<u32>::new(slot + start * DEPTH / 2 * 4, width * DEPTH / 2)
    };
    let mut left = OperandTile::new(a, [first[0], rows], threads, first_k);
    let mut right = OperandTile::new(b, [first[1], cols], threads, first_k);
    // The number of stages that both operands fill completely: their copies need no bounds checks.
    let whole = if left.is_whole() && right.is_whole() { (end - first_k) / DEPTH } else { 0 };
    macro_rules! fetch {
        (whole $slot:expr) => {
            // SAFETY: the contract has accepted the operands; both parts and the stage are whole.
            unsafe {
                left.copy_whole::<A_PASSES>(part($slot, 0, rows));
                right.copy_whole::<B_PASSES>(part($slot, rows, cols));
            }
        };
        ($stage:expr, $slot:expr) => {
            if $stage < whole {
                fetch!(whole $slot);
            } else if $stage < stages {
                // SAFETY: the contract has accepted the operands.
                unsafe {
                    let k = [first_k + $stage * DEPTH, end];
                    left.copy_existing::<A_PASSES>(part($slot, 0, rows), k);
                    right.copy_existing::<B_PASSES>(part($slot, rows, cols), k);
                }
            }
        };
    }
    for stage in 0..ring {
        fetch!(stage, tile.slot(stage));
        commit_copies();
    }
    let mut sums: Sums<ROWS, TILES> = [[[0.0; 4]; TILES]; ROWS];
    let [half, summed_from] = summed_half::<COLS>(tile, origin);
    let mut of_columns = [0.0; COLS];
    wait_for_stage(ring - 1);
    thread::sync_threads();
    let of_left = squares::<A_ALONG>(rows, origin[0], true);
    let of_right = squares::<B_ALONG>(cols, origin[1], false);
    let read = |slot: u32, step: u32| {
        let (a, b) = (part(slot, 0, rows), part(slot, rows, cols));
        let mut fragments = ([[0; 4]; ROWS], [[0; 4]; COLS]);
        // SAFETY: all lanes of the warp execute this: nothing in the loop diverges.
        let warp = unsafe { converge_warp() };
        unroll!(row < ROWS => { fragments.0[row] = read_square::<A_ALONG>(warp, of_left, a, row as u32, step); });
        unroll!(col < COLS => { fragments.1[col] = read_square::<B_ALONG>(warp, of_right, b, col as u32, step); });
        fragments
    };
    // The column-sum flag is a constant here.
    macro_rules! multiply {
        ($fragments:expr) => {
            // SAFETY: all lanes of the warp execute this: nothing in the loop diverges.
            let warp = unsafe { converge_warp() };
            multiply::<Bf16, ROWS, COLS, TILES>(warp, &mut sums, 0, &$fragments.0, &$fragments.1);
            if SUMMED {
                add_columns(&mut of_columns, &$fragments.1, half);
            }
        };
    }
    let mut now = read(0, 0);
    // The slot of the current stage. It is derived from the stage's number, not from the previous
    // slot: `ptxas` would then move the barrier of the second loop past half of the mma.
    let mut slot = 0;
    // The reads of the next fragments overlap the mma of the current ones, also across the end
    // of a stage. Fragments of a stage past the last are read and not used: a condition would
    // cost more.
    macro_rules! turn {
        ($stage:expr, $fetch:expr) => {
            let next = read(slot, 1);
            multiply!(now);
            wait_for_stage(ring - 2);
            thread::sync_threads();
            // Into the slot whose last fragments all warps have read before the barrier.
            $fetch;
            commit_copies();
            slot = tile.slot($stage + 1);
            now = read(slot, 0);
            multiply!(next);
        };
    }
    let mut stage = 0;
    while stage + ring < whole {
        turn!(stage, fetch!(whole slot));
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
            wait_for_stage(ring - 1);
            thread::sync_threads();
            for step in 0..2 {
                let now = read(slot, step);
                multiply!(now);
            }
            thread::sync_threads();
            fetch!(stage + ring, slot);
            commit_copies();
            stage += 1;
            slot = tile.slot(stage);
        }
    }
    if SUMMED {
        // SAFETY: all lanes of the warp execute this, and the contract has accepted the problem.
        unsafe {
            finish_columns(Converged::assume(), problem.columns, first[1] + summed_from, problem.b.rows, of_columns)
        };
    }
    sums
}

/// Adds a step's four elements of each column to a lane's column sums, k ascending. `half` selects
/// the first or the second half of the columns, which has as many tiles of 8 columns as there are
/// squares.
#[inline(always)]
fn add_columns<const COLS: usize>(columns: &mut [f32; COLS], b: &[[u32; 4]; COLS], half: u32) {
    unroll!(tile < COLS => {
        let second = b[tile / 2 + COLS / 2];
        let [near, far] = [0, 1].map(|at| {
            let at = tile % 2 * 2 + at;
            if half == 0 { b[tile / 2][at] } else { second[at] }
        });
        let two = |sum: f32, word: u32| sum + f32::from_bits(word << 16) + f32::from_bits(word & 0xffff_0000);
        columns[tile] = two(two(columns[tile], near), far);
    });
}
