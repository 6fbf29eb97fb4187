//! Operands: how a block brings a stage of one to shared memory, and how a lane reads its factors from there.
//!
//! A stage holds an operand as memory does: rows of sixteen words along k, or, where the operand is contiguous across k, a
//! row of its width for each k. Chunks of 16 bytes are permuted within 128-byte lines, so that neither the copies nor the
//! reads of a warp meet in a bank. Lanes take words in another order than the instruction numbers them, both operands the
//! same one: lane `4 g + t` brings the words `2 t` and `2 t + 1` of eight, which one read gives.
//!
//! Invariant: every place of a stage is written, with zero outside the operand.

use super::tile::WORDS;
use crate::format::Format;
use crate::mma::Factor;
use crate::tile::SharedTile;
use crate::unroll_on_gpu;
use crate::vector::words;
use cuda_std::{thread, warp};

/// Words of a chunk.
const CHUNK: u32 = 4;

/// One operand: `rows` x `k` elements from `start` on, contiguous along k or along the rows, `stride` between the others.
#[derive(Clone, Copy)]
pub(super) struct Operand<'p> {
    pub(super) words: &'p [f32],
    pub(super) start: usize,
    pub(super) rows: u32,
    pub(super) k: u32,
    pub(super) stride: u32,
    pub(super) along_k: bool,
}

impl<'p> Operand<'p> {
    /// The operand in `values`, words of any type.
    #[inline(always)]
    pub(super) fn new<T: Copy>(values: &'p [T], start: usize, rows: u32, k: u32, stride: u32, along_k: bool) -> Self {
        Self { words: words(values), start, rows, k, stride, along_k }
    }

    /// Starts this thread's copies of a stage: `width` rows from `first_row` and k from `first_k` to `part`.
    ///
    /// # Safety
    /// The contract has accepted the operand.
    #[inline(always)]
    pub(super) unsafe fn stage<F: Format>(
        &self,
        part: SharedTile<f32>,
        width: u32,
        threads: u32,
        first_row: u32,
        first_k: u32,
    ) {
        let elements = CHUNK * F::PER_WORD;
        // Chunks of a row of the stage; along the contiguous axis and across it: where the stage starts, where the operand ends.
        let (chunks, first, end) = if self.along_k {
            (WORDS / CHUNK, [first_k, first_row], [self.k, self.rows])
        } else {
            (width / elements, [first_row, first_k], [self.rows, self.k])
        };
        let (chunk, row) = (thread::thread_idx_x() % chunks, thread::thread_idx_x() / chunks);
        let along = first[0] + chunk * elements;
        let inside = if along < end[0] { (end[0] - along).min(elements) } else { 0 };
        let aligned = F::PER_WORD > 1 || (self.start.is_multiple_of(4) && self.stride.is_multiple_of(4));
        for pass in 0..width * CHUNK / threads {
            let row = row + pass * (threads / chunks);
            let across = first[1] + row;
            let inside = if across < end[1] { inside } else { 0 };
            let from = self.start + across as usize * self.stride as usize + along as usize;
            let from = if inside > 0 { from / F::PER_WORD as usize } else { 0 };
            let at = if self.along_k { along_k(row, chunk) } else { along_rows::<F>(width, row, chunk) };
            // SAFETY: the first `inside` elements lie inside the operand, in a chunk that is aligned where it is copied as one.
            unsafe {
                if aligned {
                    part.copy_bytes(at, self.words, from, inside * 4 / F::PER_WORD);
                    continue;
                }
                for word in 0..CHUNK {
                    if word < inside {
                        part.copy(at + word, self.words, from + word as usize);
                    } else {
                        part.set(at + word, 0.0);
                    }
                }
            }
        }
    }
}

/// This lane's factors of eight words of k, the `step`th of a stage, of 32 rows from `first_row` of the part on.
#[inline(always)]
#[track_caller]
pub(super) fn read<F: Format>(
    part: SharedTile<f32>,
    is_along_k: bool,
    width: u32,
    first_row: u32,
    step: u32,
) -> Factor {
    let (g, t) = (warp::lane_id() / 4, warp::lane_id() % 4);
    let first_word = 8 * step + 2 * t;
    let mut factor = [[0; 2]; 4];
    if is_along_k {
        unroll_on_gpu!(row < 4 => {
            let at = along_k(first_row + 4 * g + row as u32, first_word / CHUNK) + first_word % CHUNK;
            factor[row] = part.get2(at).map(f32::to_bits);
        });
    } else if F::PER_WORD == 1 {
        unroll_on_gpu!(word < 2 => {
            let at = along_rows::<F>(width, first_word + word as u32, first_row / 4 + g);
            let rows = part.get4(at).0;
            unroll_on_gpu!(row < 4 => { factor[row][word] = rows[row].to_bits(); });
        });
    } else {
        unroll_on_gpu!(word < 2 => {
            // The same four rows for two k; a word pairs rows, and the instruction wants it to pair k.
            let [[a, b], [c, d]] = [0, 1].map(|half| {
                let at = along_rows::<F>(width, 2 * (first_word + word as u32) + half, first_row / 8 + g / 2);
                part.get2(at + g % 2 * 2).map(f32::to_bits)
            });
            let low = |first: u32, second: u32| first & 0xffff | second << 16;
            let high = |first: u32, second: u32| first >> 16 | second & 0xffff_0000;
            let pairs = [low(a, c), high(a, c), low(b, d), high(b, d)];
            unroll_on_gpu!(row < 4 => { factor[row][word] = pairs[row]; });
        });
    }
    factor.map(|words| words.map(F::factor))
}

/// The word at which `chunk` of `row` lies where rows run along k. Two rows share a line; four rows further, where a lane's
/// neighbour reads, the chunks lie in other banks.
#[inline(always)]
fn along_k(row: u32, chunk: u32) -> u32 {
    let (line, place) = (row / 2, row % 2 * 4 + chunk);
    line * 32 + (place ^ (row / 4 % 4 * 2)) * CHUNK
}

/// The word at which `chunk` of the row of `k` lies, `width` elements long. Two words of k further, where a lane's neighbour
/// reads, the chunks lie in other banks.
#[inline(always)]
fn along_rows<F: Format>(width: u32, k: u32, chunk: u32) -> u32 {
    k * (width / F::PER_WORD) + (chunk ^ (k / (2 * F::PER_WORD) % 4 * 2)) * CHUNK
}
