//! Operands: how a block brings a stage of one to shared memory, and how a lane reads its factors from there.
//!
//! A stage holds an operand step by step, of each row eight words of k, 32 bytes. Of 32 rows those that are four apart follow
//! each other; the second step has pairs of rows exchanged, and every other four rows have their halves exchanged: so what a
//! warp copies or reads at once lies in all banks.
//!
//! Invariant: every place of a stage is written, with zero beyond k. Rows beyond the operand hold its last one again: what is
//! computed from them is never stored.

use super::tile::WORDS;
use crate::format::Format;
use crate::mma::Factor;
use crate::tile::SharedTile;
use crate::unroll_on_gpu;
use crate::vector::words;
use cuda_std::{thread, warp};

/// Words of a step.
const STEP: u32 = 8;
/// Words of a chunk, 16 bytes.
const CHUNK: u32 = 4;
/// Chunks of a row.
const CHUNKS: u32 = WORDS / CHUNK;

/// One operand: `rows` of `k` words from word `start` on, `stride` from one to the next.
#[derive(Clone, Copy)]
pub(super) struct Operand<'p> {
    words: &'p [f32],
    start: usize,
    rows: u32,
    k: u32,
    stride: usize,
}

impl<'p> Operand<'p> {
    /// The operand in `values` whose first element is the `start`th, `ld` elements from one row to the next; the elements beyond
    /// `k`, up to a multiple of eight, are zero.
    #[inline(always)]
    pub(super) fn new<F: Format>(values: &'p [u32], start: usize, [rows, k]: [u32; 2], ld: u32) -> Self {
        let per_word = F::PER_WORD as usize;
        let (start, stride) = (start / per_word, ld as usize / per_word);
        Self { words: words(values), start, rows, k: k.div_ceil(F::PER_WORD), stride }
    }

    /// Starts this thread's copies of a stage: `PASSES` times `threads / 4` rows from `first_row`, and words from `first_word`.
    ///
    /// # Safety
    /// The contract has accepted the operand.
    #[inline(always)]
    pub(super) unsafe fn stage<const PASSES: usize>(
        &self,
        part: SharedTile<f32>,
        threads: u32,
        first_row: u32,
        first_word: u32,
    ) {
        let (chunk, place) = (thread::thread_idx_x() % CHUNKS, thread::thread_idx_x() / CHUNKS);
        let (step, half) = (chunk / 2, chunk % 2);
        let (word, each) = (first_word + chunk * CHUNK, threads / CHUNKS);
        let to = start([step, half], place, PASSES as u32 * each);
        unroll_on_gpu!(pass < 8 => {
            if pass < PASSES {
                let row = first_row + row_at(place) + pass as u32 * each;
                let row = if row < self.rows { row } else { self.rows - 1 };
                let from = self.start + row as usize * self.stride + word as usize;
                // SAFETY: a chunk of the row, on a 16-byte boundary, lies inside the operand as far as k does.
                unsafe { part.copy4_or_zero(to + pass as u32 * each * STEP, self.words, from, word < self.k) };
            }
        });
    }
}

/// Where this lane finds its first word of both halves of each step, in a part of `rows`.
#[inline(always)]
pub(super) fn starts(first_row: u32, rows: u32) -> [[u32; 2]; 2] {
    let (row, word) = (first_row + warp::lane_id() / 4, warp::lane_id() % 4);
    [0, 1].map(|step| [0, 1].map(|half| start([step, half], row, rows) + word))
}

/// This lane's factors of a step, of the `block`th 32 rows.
#[inline(always)]
#[track_caller]
pub(super) fn read(part: SharedTile<f32>, starts: [u32; 2], block: usize) -> Factor {
    let mut factor = [[0; 2]; 4];
    unroll_on_gpu!(row < 4 => {
        factor[row] = starts.map(|start| part.get(start + (block * 32 + row * 8) as u32 * STEP).to_bits());
    });
    factor
}

/// The word at which half of a step's row starts, the row at `place` among `rows`.
#[inline(always)]
fn start([step, half]: [u32; 2], place: u32, rows: u32) -> u32 {
    (step * rows + (place ^ (2 * step))) * STEP + (half ^ (place / 4 % 2)) * CHUNK
}

/// The row at a place.
#[inline(always)]
fn row_at(place: u32) -> u32 {
    place / 32 * 32 + place % 8 * 4 + place / 8 % 4
}
