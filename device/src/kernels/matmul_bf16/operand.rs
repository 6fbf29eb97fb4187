//! Operands, and how a block copies a stage of an operand to shared memory.
//!
//! A "row" is a row of op(A) or a column of op(B). A stage keeps the operand's layout, in chunks of
//! eight elements (16 bytes) that are [`swizzled`]:
//!
//! ```text
//! contiguous along k: 4 chunks a row             contiguous along the rows: width / 8 chunks a k
//!   row 0   | c 0 | c 1 | c 2 | c 3 |              k 0   | rows 0..7 | rows 8..15 | ..
//!   row 1   | c 0 | c 1 | c 2 | c 3 |              k 1   | rows 8..15 | rows 0..7 | ..
//!   row 2   | c 1 | c 0 | c 3 | c 2 |              ..
//!   row 3   | c 1 | c 0 | c 3 | c 2 |
//! ```
//!
//! Invariant: every word of a stage is written, with zero past the end of the rows and of k.

use super::tile::{CHUNK, CHUNK_WORDS, DEPTH};
use crate::block::launder_index;
use crate::mma::fragments::swizzled;
use crate::tile::SharedTile;
use crate::unroll_on_gpu;
use crate::vector::load;
use cuda_std::thread;
use half::bf16;

/// The chunks along k of a stage.
const ALONG: u32 = DEPTH / CHUNK;

/// One operand: `rows` x k, starting at index `start`. It is contiguous along k (`along_k`) or
/// along the rows. Consecutive rows (or consecutive k) are `stride` elements apart.
#[derive(Clone, Copy)]
pub(crate) struct Operand<'p> {
    pub(crate) values: &'p [bf16],
    pub(crate) start: usize,
    pub(crate) rows: u32,
    pub(crate) stride: u32,
    pub(crate) along_k: bool,
}

/// A block's part of an operand: `width` rows from `first_row` on, with one thread's copy state.
#[derive(Clone, Copy)]
pub(super) struct OperandTile<'p> {
    operand: Operand<'p>,
    first_row: u32,
    width: u32,
    /// The number of threads that copy.
    threads: u32,
    /// The word of this thread's first chunk in a stage. Its other chunks follow `threads` chunks
    /// apart, because the period of the swizzle is shorter.
    to: u32,
    /// The index of the thread's first element in the next stage.
    from: usize,
    /// Distances in elements, modulo 2^64: from one of the thread's chunks to the next, and from
    /// past its last chunk to its first in the next stage.
    chunk_stride: usize,
    stage_stride: usize,
}

impl<'p> OperandTile<'p> {
    /// Returns the part, positioned at the stage that begins with `first_k`.
    #[inline(always)]
    pub(super) fn new(operand: Operand<'p>, [first_row, width]: [u32; 2], threads: u32, first_k: u32) -> Self {
        let Operand { start, stride, along_k, .. } = operand;
        let (down, along) = divide(thread::thread_idx_x(), chunks(along_k, width));
        let to = swizzled(chunks(along_k, width), down, along) * CHUNK_WORDS;
        let (across, within) = if along_k { (first_row, first_k) } else { (first_k, first_row) };
        // If there are no k or no rows, nothing is read, so the index may be out of range.
        let ahead = (across + down) as usize * stride as usize + (within + along * CHUNK) as usize;
        let from = start.wrapping_add(ahead);
        let chunk_stride = divide(threads, chunks(along_k, width)).0 as usize * stride as usize;
        let stage = if along_k { DEPTH as usize } else { DEPTH as usize * stride as usize };
        let passes = (width * DEPTH / CHUNK / threads) as usize;
        let stage_stride = stage.wrapping_sub(passes * chunk_stride);
        Self { operand, first_row, width, threads, to, from, chunk_stride, stage_stride }
    }

    /// True if chunks lie on 16-byte boundaries.
    #[inline(always)]
    fn is_aligned(&self) -> bool {
        (self.operand.start | self.operand.stride as usize).is_multiple_of(CHUNK as usize)
    }

    /// True if chunks lie on 16-byte boundaries and all rows exist.
    #[inline(always)]
    pub(super) fn is_whole(&self) -> bool {
        self.is_aligned() && self.first_row + self.width <= self.operand.rows
    }

    /// Starts this thread's copies of the next stage: `PASSES` chunks.
    ///
    /// # Safety
    /// The contract has accepted the operand. The part is [whole](Self::is_whole), and so is the
    /// stage.
    #[inline(always)]
    pub(super) unsafe fn copy_whole<const PASSES: usize>(&mut self, stage: SharedTile<u32>) {
        unroll_on_gpu!(pass < PASSES => {
            let to = self.to + pass as u32 * self.threads * CHUNK_WORDS;
            // SAFETY: the caller guarantees that these eight elements lie inside the operand, on a
            // 16-byte boundary.
            unsafe { stage.copy_chunk(to, self.operand.values, self.from) };
            // Advanced step by step, so that one register holds the index for all chunks.
            self.from = launder_index(self.from.wrapping_add(self.chunk_stride));
        });
        self.from = self.from.wrapping_add(self.stage_stride);
    }

    /// Copies this thread's chunks of the stage with the k from `first_k` up to `end`, and writes
    /// zeros for elements that do not exist. Whole chunks are copied as
    /// [`OperandTile::copy_whole`] does. The others are copied synchronously, element by element.
    ///
    /// # Safety
    /// The contract has accepted the operand.
    #[inline(always)]
    pub(super) unsafe fn copy_existing<const PASSES: usize>(&self, stage: SharedTile<u32>, [first_k, end]: [u32; 2]) {
        let Operand { values, start, rows, stride, along_k } = self.operand;
        let aligned = self.is_aligned();
        let mut pass = 0;
        while pass < PASSES as u32 {
            let (down, along) = divide(thread::thread_idx_x() + pass * self.threads, chunks(along_k, self.width));
            let across = if along_k { self.first_row } else { first_k } + down;
            let within = if along_k { first_k } else { self.first_row } + along * CHUNK;
            let (most, length) = if along_k { (rows, end) } else { (end, rows) };
            let count = if across < most && within < length { length - within } else { 0 };
            let from = start.wrapping_add(across as usize * stride as usize + within as usize);
            let to = self.to + pass * self.threads * CHUNK_WORDS;
            if count == 0 || (aligned && count >= CHUNK) {
                // SAFETY: eight elements that exist, on a 16-byte boundary; or none, and then
                // nothing is read.
                unsafe { stage.copy_chunk_or_zero(to, values, from, count > 0) };
            } else {
                let half = |at: u32| {
                    // SAFETY: the element lies in a row and at a k that exist.
                    if at < count { u32::from(unsafe { load(values, from + at as usize) }.to_bits()) } else { 0 }
                };
                let mut pair = 0;
                while pair < CHUNK_WORDS {
                    stage.set(to + pair, half(2 * pair) | half(2 * pair + 1) << 16);
                    pair += 1;
                }
            }
            pass += 1;
        }
    }
}

/// Returns the number of adjacent chunks in a stage: of a row along k, or of a k along the rows. It
/// is a power of two.
#[inline(always)]
pub(super) fn chunks(along_k: bool, width: u32) -> u32 {
    if along_k { ALONG } else { width / CHUNK }
}

/// Returns `number / divisor` and the remainder. `divisor` is a power of two.
#[inline(always)]
fn divide(number: u32, divisor: u32) -> (u32, u32) {
    (number >> divisor.trailing_zeros(), number & (divisor - 1))
}
