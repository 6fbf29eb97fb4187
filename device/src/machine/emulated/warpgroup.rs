//! Products of a warpgroup: each thread adds its own sums from shared memory by the rule of an
//! instruction, [`rule`]. Lanes read the operand A in registers from each other.

use crate::format::{Bf16, Format};
use crate::mma::fragments::{CHUNK_WORDS, swizzled};
use crate::mma::rule;
use crate::tile::SharedTile;
use cuda_std::emulator::{lanes, meet, products};
use cuda_std::{thread, warp};

/// The k of an instruction.
const STEP: usize = Bf16::PER_STEP as usize;
/// The k of a product, the words of a row of as many BF16, and its chunks.
const DEPTH: usize = 64;
const WORDS: u32 = DEPTH as u32 / 2;
const CHUNKS: u32 = WORDS / CHUNK_WORDS;

/// An operand in shared memory: rows of 64 BF16, swizzled.
#[derive(Clone, Copy)]
pub struct Operand {
    tile: SharedTile<u32>,
    /// The row at which it begins, and the rows from one part to the next.
    first: u32,
    part: u32,
}

impl Operand {
    /// Returns the operand whose rows are m or n, from `row` of part `part` on. A part has `rows`
    /// rows of 64 k.
    pub fn along(tile: SharedTile<u32>, rows: u32, part: u32, row: u32) -> Self {
        Self { tile, first: part * rows + row, part: rows }
    }

    /// Returns the operand whose rows are k, from `row` on. A part has `rows` rows of 64 n.
    pub fn across(tile: SharedTile<u32>, rows: u32, row: u32) -> Self {
        Self { tile, first: row, part: rows }
    }

    /// Returns a chunk, eight BF16, of a row.
    #[inline(always)]
    #[track_caller]
    fn chunk(self, row: u32, chunk: u32) -> [f32; 8] {
        let words = self.tile.chunk(swizzled(CHUNKS, self.first + row, chunk) * CHUNK_WORDS);
        core::array::from_fn(|at| Bf16::value(words[at / 2], at as u32 % 2))
    }
}

/// A thread's accumulators of 64 rows, as on the GPU.
pub trait Accumulators {
    /// Adds (or, without `ADD`, stores) the products of 64 k of two operands in shared memory,
    /// whose rows are m and n.
    ///
    /// # Safety
    /// See the GPU's version.
    unsafe fn multiply_shared<const ADD: bool>(&mut self, a: Operand, b: Operand);

    /// Adds (or, without `ADD`, stores) the products of 64 k of A in registers, four squares of
    /// 16 x 16, with B, whose rows are k if it lies `ACROSS`, otherwise n.
    ///
    /// # Safety
    /// See the GPU's version.
    unsafe fn multiply_registers<const ADD: bool, const ACROSS: bool>(&mut self, a: &[[u32; 4]; 4], b: Operand);

    /// Waits until the products of all lanes of the warp have ended.
    ///
    /// # Safety
    /// See the GPU's version.
    unsafe fn wait<const PENDING: u32>(&mut self);
}

impl<const TILES: usize> Accumulators for [[f32; 4]; TILES] {
    #[track_caller]
    unsafe fn multiply_shared<const ADD: bool>(&mut self, a: Operand, b: Operand) {
        if !ADD {
            *self = [[0.0; 4]; TILES];
        }
        let row = thread::thread_idx_x() % 128 / 32 * 16 + warp::lane_id() / 4;
        let mut left = [[0.0; DEPTH]; 2];
        products::begin();
        for (half, left) in left.iter_mut().enumerate() {
            for chunk in 0..CHUNKS {
                left[8 * chunk as usize..][..8].copy_from_slice(&a.chunk(row + 8 * half as u32, chunk));
            }
        }
        add_products::<TILES, false>(self, &left, b);
        products::end();
    }

    #[track_caller]
    unsafe fn multiply_registers<const ADD: bool, const ACROSS: bool>(&mut self, a: &[[u32; 4]; 4], b: Operand) {
        if !ADD {
            *self = [[0.0; 4]; TILES];
        }
        // SAFETY: all threads of the warpgroup execute this: the function's contract.
        let left = unsafe { rows_of(a) };
        products::begin();
        add_products::<TILES, ACROSS>(self, &left, b);
        products::end();
    }

    #[track_caller]
    unsafe fn wait<const PENDING: u32>(&mut self) {
        products::wait();
    }
}

/// Returns a thread's two rows of A, of which each of the row's four lanes has a part.
///
/// # Safety
/// All threads of the warpgroup call it together.
#[track_caller]
unsafe fn rows_of(a: &[[u32; 4]; 4]) -> [[f32; DEPTH]; 2] {
    let own = *a;
    let lanes = lanes(&own);
    let mut left = [[0.0; DEPTH]; 2];
    for (half, left) in left.iter_mut().enumerate() {
        for (k, value) in left.iter_mut().enumerate() {
            let (square, chunk, pair) = (k / 16, k / 8 % 2, k / 2 % 4);
            // SAFETY: each lane's operand lives until `meet` below, which all lanes
            // reach, as they reached this.
            let word = unsafe { (*lanes[warp::lane_id() as usize / 4 * 4 + pair])[square][half + 2 * chunk] };
            *value = Bf16::value(word, k as u32 % 2);
        }
    }
    meet();
    left
}

/// Adds the products of a thread's two rows of A with its columns of B.
#[track_caller]
fn add_products<const TILES: usize, const ACROSS: bool>(
    sums: &mut [[f32; 4]; TILES],
    left: &[[f32; DEPTH]; 2],
    b: Operand,
) {
    let t = warp::lane_id() % 4;
    // Four tiles of columns at a time: eight sums of a row.
    for (group, sums) in sums.chunks_mut(4).enumerate() {
        let mut right = [[0.0; 8]; DEPTH];
        for at in 0..8 {
            let column = 8 * (4 * group as u32 + at / 2) + 2 * t + at % 2;
            for k in 0..DEPTH as u32 {
                let (row, element) = if ACROSS { (column / 64 * b.part + k, column % 64) } else { (column, k) };
                if ACROSS || k % 8 == 0 {
                    let chunk = b.chunk(row, element / 8);
                    if ACROSS {
                        right[k as usize][at as usize] = chunk[element as usize % 8];
                    } else {
                        (0..8).for_each(|next| right[k as usize + next][at as usize] = chunk[next]);
                    }
                }
            }
        }
        let mut both = [0, 1].map(|half| core::array::from_fn(|at| sums[at / 2][2 * half + at % 2]));
        let [upper, lower] = left.each_ref().map(|row| row.as_chunks::<STEP>().0);
        for ((upper, lower), right) in upper.iter().zip(lower).zip(right.as_chunks::<STEP>().0) {
            rule::add::<8, STEP>(&mut both, [upper, lower], right);
        }
        for (half, both) in both.iter().enumerate() {
            (0..8).for_each(|at| sums[at / 2][2 * half + at % 2] = both[at]);
        }
    }
}

/// Does nothing: waits stay where they are.
pub fn hold(_: f32) {}

/// Does nothing: products have ended when they return.
///
/// # Safety
/// See the GPU's version.
pub unsafe fn begin_products() {}

/// Does nothing: products have ended when they return.
///
/// # Safety
/// See the GPU's version.
pub unsafe fn commit_products() {}

/// Waits until the products of all lanes of the warp have ended.
///
/// # Safety
/// See the GPU's version.
#[track_caller]
pub unsafe fn wait_products<const PENDING: u32>() {
    products::wait();
}

/// Does nothing: a CPU's threads do not share registers.
///
/// # Safety
/// See the GPU's version.
pub unsafe fn registers<const COUNT: u32, const MORE: bool>() {}
