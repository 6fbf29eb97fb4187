//! Operands of a matrix multiply, and how a block copies a stage of an operand to shared memory.
//!
//! A "row" is a row of op(A) or a column of op(B). The operand's layout determines which thread
//! copies which elements:
//!
//! ```text
//! contiguous along k: one float a lane,       contiguous along the rows: 4 rows of one k a thread
//! 4 rows x 8 k a warp                         (16 bytes), here 64 rows and 128 threads
//!            k  0   1   2  ..  7                         k   0     1   ..    7
//! row 0  lane   0   1   2  ..  7              rows   0..3   t0   t16   ..  t112
//!     1         8   9  10  .. 15                     4..7   t1   t17   ..  t113
//!     2        16  17  18  .. 23                       ..
//!     3        24  25  26  .. 31                   60..63  t15   t31   ..  t127   then 8 k further
//! (row r, k p) goes to bank 4 p + r:          one float a thread if 4 rows are no aligned vector
//! 32 banks in all
//! ```
//! Invariant: a stage is k-major in every operand layout. Each row of the stage is written up to
//! the end of k, with zero past the operand's rows.

use super::Tile;
use crate::block::launder_reg;
use crate::tile::SharedTile;
use cuda_std::thread;

/// The adjacent threads along k if an operand is contiguous along k. A warp then covers four
/// neighboring rows: it writes to all 32 banks, and reads whole sectors of 32 bytes.
const LANES_ALONG_K: u32 = 8;

/// One operand: `rows` x k, starting at index `start`. It is contiguous along k (`along_k`) or
/// along the rows. Consecutive rows (or consecutive k) are `stride` elements apart.
pub(crate) struct Operand<'p> {
    pub(crate) values: &'p [f32],
    pub(crate) start: usize,
    pub(crate) rows: u32,
    pub(crate) stride: u32,
    pub(crate) along_k: bool,
}

/// The part of an operand that is copied, and its destination.
#[derive(Clone, Copy)]
pub(super) struct Stage {
    pub(super) slot: SharedTile<f32>,
    /// The position and the number of the operand's rows in each k of the slot.
    pub(super) column: u32,
    pub(super) width: u32,
    pub(super) first_row: u32,
    pub(super) first_k: u32,
    /// The end of k.
    pub(super) end: u32,
}

impl Operand<'_> {
    /// Starts this thread's copies of a stage.
    #[inline(always)]
    pub(super) fn stage(&self, tile: Tile, stage: Stage) {
        let whole = stage.end - stage.first_k >= tile.depth;
        let vectors = (self.start | self.stride as usize | self.rows as usize).is_multiple_of(4);
        let threads = tile.threads();
        // SAFETY: `WHOLE` is passed only if the stage lies before the end of k. `VECTOR` is 4 only
        // if start, stride and rows are multiples of four, as width and pitch of every stage are.
        unsafe {
            match (self.along_k, whole) {
                (true, true) => self.copy::<1, true, true>(tile, stage, LANES_ALONG_K),
                (true, false) => self.copy::<1, true, false>(tile, stage, LANES_ALONG_K),
                (false, true) if vectors => self.copy::<4, false, true>(tile, stage, lanes(stage.width / 4, threads)),
                (false, true) => self.copy::<1, false, true>(tile, stage, lanes(stage.width, threads)),
                (false, false) => self.copy::<1, false, false>(tile, stage, lanes(stage.width, threads)),
            }
        }
    }

    /// Copies `VECTOR` rows at once. `lanes` threads are adjacent along the contiguous axis.
    ///
    /// # Safety
    /// `WHOLE` is true only if the stage lies before the end of k. A vector is 16-byte aligned on
    /// both sides.
    #[inline(always)]
    unsafe fn copy<const VECTOR: u32, const ALONG_K: bool, const WHOLE: bool>(
        &self,
        tile: Tile,
        stage: Stage,
        lanes: u32,
    ) {
        let Stage { slot, column, width, first_row, first_k, end } = stage;
        let (thread, stride, others) =
            (launder_reg(thread::thread_idx_x()), self.stride as usize, tile.threads() / lanes);
        let (along, across) = (thread % lanes * VECTOR, thread / lanes);
        let ([own_row, own_k], [row_step, k_step], [row_stride, k_stride]) = if ALONG_K {
            ([across, along], [others, lanes], [stride, 1])
        } else {
            ([along, across], [lanes * VECTOR, others], [1, stride])
        };
        // If a row does not exist, this index may be out of range, because nothing is read.
        let own = (first_row + own_row) as usize * row_stride;
        let first = self.start.wrapping_add(own).wrapping_add((first_k + own_k) as usize * k_stride);
        for row in (0..width).step_by(row_step as usize) {
            let there = first_row + own_row + row < self.rows;
            let from = first.wrapping_add(row as usize * row_stride);
            for k in (0..tile.depth).step_by(k_step as usize) {
                if !WHOLE && first_k + own_k + k >= end {
                    break;
                }
                let at = column + (own_k + k) * tile.pitch() + own_row + row;
                let from = from.wrapping_add(k as usize * k_stride);
                // SAFETY: if the row exists, the element lies inside the operand, which the
                // contract has checked. `VECTOR` rows exist together.
                unsafe {
                    if VECTOR == 4 {
                        slot.copy4_or_zero(at, self.values, from, there);
                    } else {
                        slot.copy_or_zero(at, self.values, from, there);
                    }
                }
            }
        }
    }
}

/// Returns the largest power of two of adjacent threads among which `count` divides evenly.
#[inline(always)]
const fn lanes(count: u32, threads: u32) -> u32 {
    let even = count & count.wrapping_neg();
    if even < threads { even } else { threads }
}

/// True if the copies of a stage of `width` rows divide evenly among a block's threads, in both
/// operand layouts.
pub(crate) const fn is_even(tile: Tile, width: u32) -> bool {
    let threads = tile.threads();
    width.is_multiple_of(threads / LANES_ALONG_K)
        && tile.depth.is_multiple_of(LANES_ALONG_K)
        && tile.depth.is_multiple_of(threads / lanes(width, threads))
        && tile.depth.is_multiple_of(threads / lanes(width / 4, threads))
}
