//! Operands: how a block copies a stage of an operand to shared memory, and how a lane reads its
//! fragments from there.
//!
//! An operand is stored as packed fragments ([`precision`](crate::precision)), so both steps are
//! plain. Neighbors in memory are neighbors in a stage, and neighboring lanes read neighboring 16
//! bytes.
//!
//! ```text
//! stage of 128 rows, in words; a "row" is a row of A or a column of B:
//!   |         rows 0..31          |         rows 32..63         | 64..95 | 96..127 |
//!   | step 0: 256  | step 1: 256  | step 0: 256  | step 1: 256  |   ..   |   ..    |
//! copied by 128 threads, 4 words each (256 threads: 64 rows a pass):
//!   | t 0 .. t 63  | t 64 .. t 127 | the same threads in pass 1  | pass 2 | pass 3  |
//! read by lanes (a fragment), 4 words each:
//!   | quad 0 of lane 0 | lane 1 | .. | lane 31 | quad 1 of lane 0 | lane 1 | .. | lane 31 |
//! ```
//! Invariant: every word of a stage is written, with zero past the end of k. Blocks of 32 rows past
//! the end of the operand repeat its last block. A warp never stores what it computes from them.

use super::tile::STEPS;
use crate::mma::{FRAGMENT, Factor, QUAD, ROWS, Side};
use crate::tile::SharedTile;
use crate::unroll_on_gpu;
use crate::vector::words;
use cuda_std::{thread, warp};

/// The words of 32 rows in a stage.
const BLOCK: u32 = STEPS * FRAGMENT;
/// The words of a 16-byte copy.
const COPY: u32 = 4;

/// One operand, packed as fragments, starting at word `start`. It has `blocks` blocks of 32 rows
/// with `steps` steps each. Only steps before `end` are read.
#[derive(Clone, Copy)]
pub(super) struct PackedOperand<'p> {
    words: &'p [f32],
    start: usize,
    blocks: u32,
    steps: u32,
    end: u32,
}

impl<'p> PackedOperand<'p> {
    /// Returns the operand with `rows` rows in `values` that starts at word `start`.
    #[inline(always)]
    pub(super) fn new(values: &'p [u32], start: usize, rows: u32, [steps, end]: [u32; 2]) -> Self {
        Self { words: words(values), start, blocks: rows.div_ceil(ROWS), steps, end }
    }

    /// Starts this thread's copies of a stage: `PASSES` copies of 16 bytes. The stage begins at row
    /// `first_row` and step `first_step`.
    ///
    /// # Safety
    /// The contract has accepted the operand.
    #[inline(always)]
    pub(super) unsafe fn stage<const PASSES: usize>(
        &self,
        part: SharedTile<f32>,
        threads: u32,
        first_row: u32,
        first_step: u32,
    ) {
        let (word, each) = (thread::thread_idx_x() * COPY, threads * COPY);
        let there = first_step + word % BLOCK / FRAGMENT < self.end;
        unroll_on_gpu!(pass < PASSES => {
            let to = word + pass as u32 * each;
            let block = first_row / ROWS + word / BLOCK + pass as u32 * (each / BLOCK);
            let block = if block < self.blocks { block } else { self.blocks - 1 };
            let row = self.start + block as usize * (self.steps as usize * FRAGMENT as usize);
            let from = row + (word % BLOCK) as usize + first_step as usize * FRAGMENT as usize;
            // SAFETY: 16 bytes of a fragment. The fragment lies inside the operand if its step is
            // before `end`; otherwise nothing is read.
            unsafe { part.copy4_or_zero(to, self.words, from, there) };
        });
    }
}

/// Returns the first word of this lane's fragments in an operand's part of a stage, for the rows
/// from `first_row` on.
#[inline(always)]
pub(super) fn start(first_row: u32) -> u32 {
    first_row / ROWS * BLOCK + warp::lane_id() * QUAD
}

/// Returns this lane's fragment of a step, in the `block`th 32 rows from `start` on.
#[inline(always)]
#[track_caller]
pub(super) fn read(side: Side, part: SharedTile<f32>, start: u32, step: u32, block: u32) -> Factor {
    let quad = |half: u32| part.get4(start + block * BLOCK + step * FRAGMENT + half * FRAGMENT / 2).0.map(f32::to_bits);
    side.factor([quad(0), quad(1)])
}
