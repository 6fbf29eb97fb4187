//! Operands: how a block brings a stage of one to shared memory, and how a lane reads its factors from there.
//!
//! A stage holds an operand as memory does: rows of sixteen words along k, two to a line of 128 bytes. Chunks of four words are
//! permuted within a line, so that neither the copies nor the reads of a warp meet in a bank.
//!
//! Invariant: every place of a stage is written, with zero outside the operand.

use super::tile::WORDS;
use crate::format::Format;
use crate::mma::{self, Factor};
use crate::tile::SharedTile;
use crate::unroll_on_gpu;
use crate::vector::words;
use cuda_std::{thread, warp};

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
        let (chunk, row) = (thread::thread_idx_x() % CHUNKS, thread::thread_idx_x() / CHUNKS);
        let word = first_word + chunk * CHUNK;
        unroll_on_gpu!(pass < 8 => {
            if pass < PASSES {
                let row = row + pass as u32 * (threads / CHUNKS);
                let across = first_row + row;
                let from = self.start + across as usize * self.stride + word as usize;
                // SAFETY: a chunk of the row, on a 16-byte boundary, lies inside the operand as far as k does.
                unsafe { part.copy4_or_zero(place(row, chunk), self.words, from, across < self.rows && word < self.k) };
            }
        });
    }
}

/// Which of the chunks and rows that a matrix instruction reads at once a lane has the start of.
#[derive(Clone, Copy)]
pub(super) enum Side {
    /// Two rows for the first half of the words, then both for the second.
    Left,
    /// Both halves of the words of one row, then of the next.
    Right,
}

/// Where in a part this lane's row starts: for each step of eight words the first of 32 rows.
#[inline(always)]
pub(super) fn starts(side: Side, first_row: u32) -> [u32; 2] {
    let (matrix, row) = (warp::lane_id() / 8, warp::lane_id() % 8);
    let (next, half) = match side {
        Side::Left => (matrix % 2, matrix / 2),
        Side::Right => (matrix / 2, matrix % 2),
    };
    [0, 1].map(|step| place(first_row + 4 * row + next, 2 * step + half))
}

/// This lane's factors of eight words of k, of the `block`th 32 rows.
///
/// # Safety
/// All lanes of the warp make the call.
#[inline(always)]
#[track_caller]
pub(super) unsafe fn read(side: Side, part: SharedTile<f32>, start: u32, block: usize) -> Factor {
    let mut factor = [[0; 2]; 4];
    unroll_on_gpu!(pair < 2 => {
        // A block is 32 rows, a pair two: whole lines, in which the chunks are permuted alike.
        // SAFETY: the caller's promise.
        let [a, b, c, d] = unsafe { mma::load(part, start, (block * 32 + pair * 2) as u32 * WORDS) };
        [factor[2 * pair], factor[2 * pair + 1]] = match side {
            Side::Left => [[a, c], [b, d]],
            Side::Right => [[a, b], [c, d]],
        };
    });
    factor
}

/// The word at which `chunk` of `row` lies: eight rows that are four apart have it in other banks.
#[inline(always)]
fn place(row: u32, chunk: u32) -> u32 {
    let (line, place) = (row / 2, row % 2 * CHUNKS + chunk);
    line * 2 * WORDS + (place ^ (row / 4 % 8)) * CHUNK
}
