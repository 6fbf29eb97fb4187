//! The emulator's loop over the stages: a lane adds the products of one instruction after another
//! to its accumulators, which are in the layout of [`quads`](crate::mma::fragments::quads). So lanes
//! exchange nothing.

use super::{DEPTH, Operand, Problem, STEP, Tile, finish_columns, summed_half};
use crate::machine::mma::add_products;
use crate::matmul_bf16::operand::{OperandTile, chunks};
use crate::matmul_bf16::tile::{CHUNK, CHUNK_WORDS, wait_for_stage};
use crate::mma::fragments::{Sums, swizzled};
use crate::stored::Stored;
use crate::tile::{SharedTile, commit_copies};
use crate::warp::Converged;
use cuda_std::{thread, warp};

/// The stages of a block's operands, and this thread's part of the copies that fill them.
#[derive(Clone, Copy)]
struct Ring<'p, const A_PASSES: usize, const B_PASSES: usize> {
    tile: Tile,
    left: OperandTile<'p>,
    right: OperandTile<'p>,
    /// The first k of the first stage, and one past the last k.
    k: [u32; 2],
    /// The number of stages.
    stages: u32,
    /// The number of stages that both operands fill completely: their copies need no bounds checks.
    whole: u32,
}

impl<'p, const A_PASSES: usize, const B_PASSES: usize> Ring<'p, A_PASSES, B_PASSES> {
    /// Returns the ring of the stages of `a` and `b` for the tile that begins at `first`.
    #[inline(always)]
    fn new(a: Operand<'p>, b: Operand<'p>, tile: Tile, first: [u32; 2], k: [u32; 2]) -> Self {
        let [first_k, end] = k;
        let left = OperandTile::new(a, [first[0], tile.rows()], tile.threads(), first_k);
        let right = OperandTile::new(b, [first[1], tile.cols()], tile.threads(), first_k);
        let whole = if left.is_whole() && right.is_whole() { (end - first_k) / DEPTH } else { 0 };
        Self { tile, left, right, k, stages: (end - first_k).div_ceil(DEPTH), whole }
    }

    /// Returns the parts of A and B in the slot of a stage.
    #[inline(always)]
    fn slot(&self, stage: u32) -> [SharedTile<u32>; 2] {
        let (tile, rows, cols) = (self.tile, self.tile.rows(), self.tile.cols());
        [(0, rows), (rows, cols)].map(|(start, width)| {
            let offset = tile.slot(stage) + start * DEPTH / 2 * 4;
            // SAFETY: the parts follow each other in the shared memory that the contract declares.
            unsafe { SharedTile::new(offset, width * DEPTH / 2) }
        })
    }

    /// Starts to copy a stage without bounds checks.
    ///
    /// # Safety
    /// The contract has accepted the operands, and the stage is [whole](Self::whole).
    #[inline(always)]
    unsafe fn fetch_whole(&mut self, stage: u32) {
        let [a, b] = self.slot(stage);
        // SAFETY: the contract has accepted the operands; both parts and the stage are whole.
        unsafe {
            self.left.copy_whole::<A_PASSES>(a);
            self.right.copy_whole::<B_PASSES>(b);
        }
    }

    /// Starts to copy a stage, if it exists.
    ///
    /// # Safety
    /// The contract has accepted the operands.
    #[inline(always)]
    unsafe fn fetch(&mut self, stage: u32) {
        if stage < self.whole {
            // SAFETY: the contract has accepted the operands, and the stage is whole.
            unsafe { self.fetch_whole(stage) };
        } else if stage < self.stages {
            let [a, b] = self.slot(stage);
            let k = [self.k[0] + stage * DEPTH, self.k[1]];
            // SAFETY: the contract has accepted the operands.
            unsafe {
                self.left.copy_existing::<A_PASSES>(a, k);
                self.right.copy_existing::<B_PASSES>(b, k);
            }
        }
    }

    /// Starts to copy the first stages, and waits until the block has the first.
    ///
    /// # Safety
    /// The contract has accepted the operands. All threads of the block call it together.
    #[inline(always)]
    unsafe fn start(&mut self) {
        for stage in 0..self.tile.stages {
            // SAFETY: the contract has accepted the operands.
            unsafe { self.fetch(stage) };
            commit_copies();
        }
        wait_for_stage(self.tile.stages - 1);
        thread::sync_threads();
    }
}

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
            add_products(
                &mut sums,
                origin,
                STEP * step,
                |row, k| element(parts[0], a.along_k, tile.rows(), row, k),
                |column, k| element(parts[1], b.along_k, tile.cols(), column, k),
            );
            if summed {
                add_columns(&mut columns, parts[1], b.along_k, tile.cols(), summed_from, step);
            }
        }
        wait_for_stage(tile.stages - 2);
        thread::sync_threads();
        // SAFETY: the contract has accepted the operands.
        unsafe { ring.fetch(stage + tile.stages) };
    }
    if summed {
        // SAFETY: all lanes of the warp execute this, and the contract has accepted the problem.
        unsafe { finish_columns(Converged::assume(), problem.columns, first[1] + summed_from, b.rows, columns) };
    }
    sums
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
