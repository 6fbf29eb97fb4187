//! The operands of a stage: their copies to shared memory, and A's way from there to registers.
//!
//! A keeps its layout in memory. Chunks of 16 bytes are permuted within a row, so that the lanes of
//! a warp read their words of A from all 32 banks:
//!
//! ```text
//! along k: 128 rows of 8 chunks             across k: 32 rows of 32 chunks, the period is 4 rows
//!   row 0   | k 0..3 | k 4..7 | ..            k 0    | rows 0..3 | rows 4..7 | rows 8..11 | ..
//!   row 1   | k 4..7 | k 0..3 | ..            k 1    | rows 8..11 | rows 12..15 | rows 0..3 | ..
//!
//! the instruction's rows g and g + 8:
//!   rows g and g + 8, by `ldmatrix`           rows 2 g and 2 g + 1, two words at a time
//! ```
//! B is a copy of its images, in the layout that [`wgmma`](crate::wgmma) reads.
//!
//! Invariant: every word of a stage is written, with zero past the end of k. Rows past the end of
//! an operand repeat others, or are zero. No output depends on them.

use super::tile::{DEPTH, IMAGE, IMAGE_ROWS, WARPGROUP};
use crate::format::round_tf32;
use crate::machine::bulk::copy_runs_if;
use crate::mma::fragments::{CHUNK_WORDS, swizzled};
use crate::tile::SharedTile;
use crate::unroll_on_gpu;
use crate::vector::words;
use crate::warp::Converged;
use crate::wgmma::CHUNKS;
use cuda_std::{thread, warp};

/// The chunks of A that a thread copies for a stage.
const PASSES: usize = 8;
/// The rows of a tile, and the chunks of as many rows.
const ROWS: u32 = 128;
const ACROSS: u32 = ROWS / CHUNK_WORDS;

const _: () = assert!(PASSES as u32 * WARPGROUP == ROWS * CHUNKS, "a warpgroup copies a stage of A");

/// A as it is stored: `rows` x k, starting at index `start`. Consecutive rows (or consecutive k)
/// are `stride` elements apart.
#[derive(Clone, Copy)]
pub(super) struct StreamedOperand<'p> {
    pub(super) values: &'p [f32],
    pub(super) start: usize,
    pub(super) rows: u32,
    pub(super) stride: u32,
}

impl StreamedOperand<'_> {
    /// Starts this thread's copies of the stage of 128 rows from `first_row` on, with the k from
    /// `first_k` up to `end`. `ALONG`: the elements of a row are contiguous.
    ///
    /// # Safety
    /// The contract has accepted the operand, and `first_row` exists. The threads of the first
    /// warpgroup call it.
    #[inline(always)]
    pub(super) unsafe fn copy<const ALONG: bool>(
        &self,
        stage: SharedTile<u32>,
        first_row: u32,
        [first_k, end]: [u32; 2],
    ) {
        let chunks = const { if ALONG { CHUNKS } else { ACROSS } };
        let [line, chunk] = [thread::thread_idx_x() / chunks, thread::thread_idx_x() % chunks];
        let to = place_of::<ALONG>(line, chunk) * CHUNK_WORDS;
        unroll_on_gpu!(pass < PASSES => {
            let down = pass as u32 * (WARPGROUP / chunks) + line;
            let (from, left) = if ALONG {
                let row = (first_row + down).min(self.rows - 1);
                let k = first_k + CHUNK_WORDS * chunk;
                (row as usize * self.stride as usize + k as usize, end.saturating_sub(k))
            } else {
                let row = first_row + CHUNK_WORDS * chunk;
                let left = if first_k + down < end { self.rows.saturating_sub(row) } else { 0 };
                ((first_k + down) as usize * self.stride as usize + row as usize, left)
            };
            // The swizzle is the same in each pass.
            let word = to + pass as u32 * WARPGROUP * CHUNK_WORDS;
            // SAFETY: so many elements exist, on a 16-byte boundary.
            unsafe { stage.copy_chunk_part(word, self.values, self.start.wrapping_add(from), left.min(CHUNK_WORDS)) };
        });
    }
}

/// Returns the position of a chunk in a stage of A.
#[inline(always)]
fn place_of<const ALONG: bool>(line: u32, chunk: u32) -> u32 {
    if ALONG { swizzled(CHUNKS, line, chunk) } else { line * ACROSS + (chunk ^ (2 * (line % 4))) }
}

/// Reads and rounds a lane's words of A for two instructions, 16 k from `first_k` of the stage on:
/// its elements t and t + 4 along k, in the instruction's rows g and g + 8 of the warp's 16 rows,
/// which begin with `first_row`.
#[inline(always)]
#[track_caller]
pub(super) fn fragments<const ALONG: bool>(
    converged: Converged,
    stage: SharedTile<u32>,
    first_row: u32,
    first_k: u32,
) -> [[u32; 4]; 2] {
    let lane = warp::lane_id();
    let mut fragments = [[0; 4]; 2];
    unroll_on_gpu!(step < 2 => {
        let first_k = first_k + 8 * step as u32;
        if ALONG {
            let (row, chunk) = (first_row + lane % 16, first_k / CHUNK_WORDS + lane / 16);
            fragments[step] = stage.matrices(converged.again(), place_of::<ALONG>(row, chunk) * CHUNK_WORDS, false);
        } else {
            unroll_on_gpu!(half < 2 => {
                let (row, k) = (first_row + lane / 4 * 2, first_k + 4 * half as u32 + lane % 4);
                let at = place_of::<ALONG>(k, row / CHUNK_WORDS) * CHUNK_WORDS + row % CHUNK_WORDS;
                [fragments[step][2 * half], fragments[step][2 * half + 1]] = stage.pair(at);
            });
        }
        fragments[step] = fragments[step].map(|word| round_tf32(f32::from_bits(word)));
    });
    fragments
}

/// Returns the instruction's row, among the warp's 16, that has this row of the tile.
#[inline(always)]
pub(super) fn staged_row<const ALONG: bool>(row: u32) -> u32 {
    if ALONG { row } else { row / 2 + 8 * (row % 2) }
}

/// B, packed as images (`pack_tf32_stages`(super::pack_tf32_stages)), starting at word `start`:
/// `blocks` blocks of 128 rows with `stages` stages each.
#[derive(Clone, Copy)]
pub(super) struct PackedOperand<'p> {
    words: &'p [f32],
    start: usize,
    blocks: u32,
    stages: u32,
}

impl<'p> PackedOperand<'p> {
    /// Returns the operand of `rows` rows of `k` elements that starts at word `start`.
    #[inline(always)]
    pub(super) fn new(values: &'p [u32], start: usize, [rows, k]: [u32; 2]) -> Self {
        Self { words: words(values), start, blocks: rows.div_ceil(IMAGE_ROWS), stages: k.div_ceil(DEPTH) }
    }

    /// One thread arrives at a barrier and starts the copies of the stage of `IMAGES` images from
    /// `first_row` on, a multiple of 128, that begins with `first_k`, a multiple of 32. Images past
    /// the last repeat it.
    ///
    /// # Safety
    /// The contract has accepted the operand, and the first row and k exist. The threads of the
    /// first warpgroup call it. The barrier at this byte is initialized, and nothing accesses the
    /// stage before a wait for it.
    #[inline(always)]
    pub(super) unsafe fn copy<const IMAGES: usize>(
        &self,
        stage: SharedTile<u32>,
        barrier: u32,
        first_row: u32,
        first_k: u32,
    ) {
        let mut from = [0; IMAGES];
        unroll_on_gpu!(image < IMAGES => {
            let block = (first_row / IMAGE_ROWS + image as u32).min(self.blocks - 1);
            let number = block as usize * self.stages as usize + (first_k / DEPTH) as usize;
            from[image] = self.start + number * IMAGE as usize;
        });
        // SAFETY: the images lie inside the operand and inside the stage, on 16-byte boundaries.
        unsafe { copy_runs_if(thread::thread_idx_x() == 0, barrier, stage, IMAGE, self.words, from) };
    }
}
