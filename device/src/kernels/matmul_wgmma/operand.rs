//! The copies of a stage of an operand to shared memory, in the layout that
//! [`wgmma`](crate::wgmma) reads. Chunks lie on 16-byte boundaries in memory; the contract demands
//! it.
//!
//! Invariant: every word of a stage is written, with zero past the end of the rows and of k.

use super::tile::CHUNK;
use crate::block::launder_index;
use crate::matmul_bf16::operand::Operand;
use crate::mma::fragments::{CHUNK_WORDS, swizzled};
use crate::tile::SharedTile;
use crate::unroll_on_gpu;
use crate::wgmma::{CHUNKS, DEPTH, PANEL};
use cuda_std::thread;

/// A block's part of an operand, with one thread's copy state. `LINES` rows of 128 bytes of a stage
/// are copied at once, a multiple of eight, so that the swizzle is the same in each pass.
#[derive(Clone, Copy)]
pub(super) struct Part<'p, const ALONG: bool, const LINES: u32> {
    operand: Operand<'p>,
    first_row: u32,
    /// The index of the thread's first element in the next stage.
    from: usize,
    /// The distance in elements from a pass to the next.
    step: usize,
}

impl<'p, const ALONG: bool, const LINES: u32> Part<'p, ALONG, LINES> {
    /// Returns the part from `first_row` on, positioned at the stage that begins with `first_k`.
    #[inline(always)]
    pub(super) fn new(operand: Operand<'p>, first_row: u32, first_k: u32) -> Self {
        const { assert!(PANEL.is_multiple_of(LINES) && LINES.is_multiple_of(8)) };
        let [line, chunk] = own();
        let (across, within) = if ALONG { (first_row, first_k) } else { (first_k, first_row) };
        // Past the end of the rows nothing is read, so the index may be out of range.
        let ahead = (across + line) as usize * operand.stride as usize + (within + chunk * CHUNK) as usize;
        // The compiler would multiply in each stage instead of adding.
        let step = launder_index(LINES as usize * operand.stride as usize);
        Self { operand, first_row, from: operand.start.wrapping_add(ahead), step }
    }

    /// True if `width` rows exist.
    #[inline(always)]
    pub(super) fn has(&self, width: u32) -> bool {
        self.first_row + width <= self.operand.rows
    }

    /// Returns the distance in memory from the thread's first chunk of a stage to that of a pass.
    #[inline(always)]
    fn ahead(&self, pass: u32) -> usize {
        let line = pass * LINES;
        if ALONG {
            line as usize * self.operand.stride as usize
        } else {
            (line % PANEL) as usize * self.operand.stride as usize + (line / PANEL * PANEL) as usize
        }
    }

    /// Moves on to the next stage.
    #[inline(always)]
    fn advance(&mut self) {
        let stage = if ALONG { DEPTH as usize } else { DEPTH as usize * self.operand.stride as usize };
        self.from = self.from.wrapping_add(stage);
    }

    /// Starts this thread's copies of the next stage, of which the first `k_left` k exist: `PASSES`
    /// chunks, with zeros past the end of k. Addresses are advanced by additions.
    ///
    /// # Safety
    /// The contract has accepted the operand. All rows of the stage exist, and `k_left` is a
    /// multiple of eight.
    #[inline(always)]
    pub(super) unsafe fn copy_rows<const PASSES: usize>(&mut self, stage: SharedTile<u32>, k_left: u32) {
        let (to, [line, chunk]) = (own_word(), own());
        let mut from = self.from;
        unroll_on_gpu!(pass < PASSES => {
            let down = pass as u32 * LINES;
            let k = if ALONG { chunk * CHUNK } else { down % PANEL + line };
            // SAFETY: the caller guarantees that these eight elements lie inside the operand if
            // their k exist, on a 16-byte boundary.
            unsafe { stage.copy_chunk_or_zero(to + down * CHUNKS * CHUNK_WORDS, self.operand.values, from, k < k_left) };
            // Across k, the next panel begins again with the first k.
            from = if ALONG || !(down + LINES).is_multiple_of(PANEL) {
                from.wrapping_add(self.step)
            } else {
                self.from.wrapping_add((down + LINES) as usize)
            };
        });
        self.advance();
    }

    /// Starts the copies of the stage with the k from `first_k` up to `end`, with zeros for
    /// elements that do not exist.
    ///
    /// # Safety
    /// The contract has accepted the operand.
    #[inline(always)]
    pub(super) unsafe fn copy_existing<const PASSES: usize>(
        &mut self,
        stage: SharedTile<u32>,
        [first_k, end]: [u32; 2],
    ) {
        let (to, [line, chunk]) = (own_word(), own());
        let Operand { values, rows, .. } = self.operand;
        unroll_on_gpu!(pass < PASSES => {
            let pass = pass as u32;
            let down = pass * LINES + line;
            let [across, within] = if ALONG {
                [self.first_row + down, first_k + chunk * CHUNK]
            } else {
                [first_k + down % PANEL, self.first_row + down / PANEL * PANEL + chunk * CHUNK]
            };
            let (most, length) = if ALONG { (rows, end) } else { (end, rows) };
            let left = if across < most { length.saturating_sub(within).min(CHUNK) } else { 0 };
            // SAFETY: so many elements exist, on a 16-byte boundary.
            unsafe { stage.copy_chunk_part(to + pass * LINES * CHUNKS * CHUNK_WORDS, values, self.from.wrapping_add(self.ahead(pass)), left) };
        });
        self.advance();
    }
}

/// Returns this thread's row of 128 bytes in the first pass, and its chunk there.
#[inline(always)]
fn own() -> [u32; 2] {
    [thread::thread_idx_x() / CHUNKS, thread::thread_idx_x() % CHUNKS]
}

/// Returns the word of this thread's first chunk in a stage.
#[inline(always)]
fn own_word() -> u32 {
    let [line, chunk] = own();
    swizzled(CHUNKS, line, chunk) * CHUNK_WORDS
}
