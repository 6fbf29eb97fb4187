//! The emulator's loop over the stages: a lane adds one product after another to its accumulators,
//! which are in the layout of [`quads`](crate::mma::fragments::quads). So lanes exchange nothing.

use super::{Problem, Ring, STAGES, STEP, Tile, finish_columns, summed_half};
use crate::matmul_bf16::operand::chunks;
use crate::matmul_bf16::tile::{CHUNK, CHUNK_WORDS};
use crate::mma::fragments::{Sums, quads_place, swizzled};
use crate::stored::Stored;
use crate::tile::{SharedTile, wait_copies};
use crate::warp::Converged;
use cuda_std::{GpuFloat, thread, warp};

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
    let Problem { a, b, .. } = problem;
    let mut ring = Ring::<A_PASSES, B_PASSES>::new(a, b, tile, first, problem.k);
    // SAFETY: the contract has accepted the operands, and all threads of the block execute this.
    unsafe { ring.start() };
    let mut sums: Sums<ROWS, TILES> = [[[0.0; 4]; TILES]; ROWS];
    let [_, summed_from] = summed_half::<COLS>(tile, origin);
    let mut columns = [0.0; COLS];
    for stage in 0..ring.stages {
        let parts = ring.slot(stage);
        for step in 0..2 {
            multiply(&mut sums, parts, [a.along_k, b.along_k], [tile.rows(), tile.cols()], origin, step);
            if summed {
                add_columns(&mut columns, parts[1], b.along_k, tile.cols(), summed_from, step);
            }
        }
        wait_copies::<{ STAGES - 2 }>();
        thread::sync_threads();
        // SAFETY: the contract has accepted the operands.
        unsafe { ring.fetch(stage + STAGES) };
    }
    if summed {
        // SAFETY: all lanes of the warp execute this, and the contract has accepted the problem.
        unsafe { finish_columns(Converged::assume(), problem.columns, first[1] + summed_from, b.rows, columns) };
    }
    sums
}

/// Accumulates the products of a stage's step in a lane's accumulators, k ascending.
#[inline(always)]
fn multiply<const ROWS: usize, const TILES: usize>(
    sums: &mut Sums<ROWS, TILES>,
    [a, b]: [SharedTile<u32>; 2],
    [along_a, along_b]: [bool; 2],
    [rows, cols]: [u32; 2],
    [first_row, first_col]: [u32; 2],
    step: u32,
) {
    let [line, column] = quads_place();
    for k in STEP * step..STEP * (step + 1) {
        let mut left = [[0.0; 2]; ROWS];
        for (row, left) in left.iter_mut().enumerate() {
            *left = [0, 8].map(|below| element(a, along_a, rows, first_row + 16 * row as u32 + line + below, k));
        }
        // Both rows of two tiles have the same columns.
        let mut right = [0.0; 4];
        for tile in 0..TILES {
            if tile % 2 == 0 {
                let first = first_col + 8 * tile as u32 + column;
                right = [0, 1, 2, 3].map(|at| element(b, along_b, cols, first + at, k));
            }
            for (sums, left) in sums.iter_mut().zip(left) {
                for (sum, right) in sums[tile].iter_mut().zip(right) {
                    *sum = GpuFloat::mul_add(left[tile % 2], right, *sum);
                }
            }
        }
    }
}

/// Adds the elements of a stage's step to a lane's sums of B's columns, from column `first_col` on,
/// in the GPU's order.
#[inline(always)]
fn add_columns<const COLS: usize>(
    columns: &mut [f32; COLS],
    b: SharedTile<u32>,
    along_k: bool,
    cols: u32,
    first_col: u32,
    step: u32,
) {
    let (g, t) = (warp::lane_id() / 4, warp::lane_id() % 4);
    for (tile, sum) in columns.iter_mut().enumerate() {
        for k in [2 * t, 2 * t + 1, 2 * t + 8, 2 * t + 9] {
            *sum += element(b, along_k, cols, first_col + 8 * tile as u32 + g, STEP * step + k);
        }
    }
}

/// Returns an element of a stage of `width` rows.
#[inline(always)]
fn element(part: SharedTile<u32>, along_k: bool, width: u32, row: u32, k: u32) -> f32 {
    let (down, along) = if along_k { (row, k) } else { (k, row) };
    let word = swizzled(chunks(along_k, width), down, along / CHUNK) * CHUNK_WORDS + along % CHUNK / 2;
    f32::from_bits(if along % 2 == 0 { part.get(word) << 16 } else { part.get(word) & 0xffff_0000 })
}
