//! Operands: how a block copies a stage of one to shared memory, and how a lane reads its factors from there.
//!
//! An operand is stored as fragments ([`precision`](crate::precision)), so both are plain: what lies side by side in memory lies side by
//! side in a stage, and neighbouring lanes read neighbouring 16 bytes.
//!
//! ```text
//! stage of 128 rows, in words; a "row" is a row of A or a column of B:
//!   |         rows 0..31          |         rows 32..63         | 64..95 | 96..127 |
//!   | step 0: 256  | step 1: 256  | step 0: 256  | step 1: 256  |   ..   |   ..    |
//! copied by 128 threads, 4 words each (256 threads: 64 rows a pass):
//!   | t 0 .. t 63  | t 64 .. t 127 | the same threads in pass 1  | pass 2 | pass 3  |
//! read by lanes (a fragment):
//!   | quad 0 of lane 0 | lane 1 | .. | lane 31 | quad 1 of lane 0 | lane 1 | .. | lane 31 |     4 words each
//! ```
//! Invariant: every place of a stage is written, with zero beyond k. Blocks of 32 rows beyond the operand hold its last block again. What
//! a warp computes from them is never stored.

use super::tile::STEPS;
use crate::mma::{FRAGMENT, Factor, QUAD, ROWS, Side};
use crate::tile::SharedTile;
use crate::unroll_on_gpu;
use crate::vector::words;
use cuda_std::{thread, warp};

/// Words of 32 rows in a stage.
const BLOCK: u32 = STEPS * FRAGMENT;
/// Words of a copy of 16 bytes.
const COPY: u32 = 4;

/// One operand, packed as fragments, from word `start` on. Each of `blocks` blocks of 32 rows has `steps` of them; those before `end` count.
#[derive(Clone, Copy)]
pub(super) struct PackedOperand<'p> {
    words: &'p [f32],
    start: usize,
    blocks: u32,
    steps: u32,
    end: u32,
}

impl<'p> PackedOperand<'p> {
    /// The operand of `rows` in `values`, from word `start` on.
    #[inline(always)]
    pub(super) fn new(values: &'p [u32], start: usize, rows: u32, [steps, end]: [u32; 2]) -> Self {
        Self { words: words(values), start, blocks: rows.div_ceil(ROWS), steps, end }
    }

    /// Starts this thread's copies of a stage, `PASSES` times 16 bytes. The stage has the rows from `first_row` and the steps from
    /// `first_step` on.
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
            // SAFETY: 16 bytes of a fragment, which lies inside the operand where its step is before `end`; else nothing is read.
            unsafe { part.copy4_or_zero(to, self.words, from, there) };
        });
    }
}

/// Where this lane's factors start in a stage's part, for the rows from `first_row` on.
#[inline(always)]
pub(super) fn start(first_row: u32) -> u32 {
    first_row / ROWS * BLOCK + warp::lane_id() * QUAD
}

/// This lane's factors of a step, in the `block`th 32 rows from `start` on.
#[inline(always)]
#[track_caller]
pub(super) fn read(side: Side, part: SharedTile<f32>, start: u32, step: u32, block: u32) -> Factor {
    let quad = |half: u32| part.get4(start + block * BLOCK + step * FRAGMENT + half * FRAGMENT / 2).0.map(f32::to_bits);
    side.factor([quad(0), quad(1)])
}
