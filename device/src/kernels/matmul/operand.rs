//! Operands of a matrix multiply, and how a block brings a stage of one to shared memory.
//!
//! Invariant: a stage is k-major whatever the operand's order, and every row of it is written up to the end of k. Rows
//! beyond the operand hold its last ones again, so that no copy asks whether its row exists: what is computed from them is
//! never stored.

use super::Tile;
use crate::tile::SharedTile;
use cuda_std::thread;

/// Threads side by side along k where an operand is contiguous along k: together with four neighbouring rows a warp
/// then writes to all 32 banks, and reads whole sectors.
const LANES_ALONG_K: u32 = 8;

/// One operand: `rows` x k from `start` on, contiguous along k or along the rows, `stride` between the others.
pub(super) struct Operand<'p> {
    pub(super) values: &'p [f32],
    pub(super) start: usize,
    pub(super) rows: u32,
    pub(super) stride: u32,
    pub(super) along_k: bool,
}

/// What is copied of an operand, and where to.
#[derive(Clone, Copy)]
pub(super) struct Stage {
    pub(super) slot: SharedTile<f32>,
    /// The operand's place in each k of the slot, and how many rows of it.
    pub(super) column: u32,
    pub(super) width: u32,
    pub(super) first_row: u32,
    pub(super) first_k: u32,
    /// Where k ends.
    pub(super) end: u32,
}

impl Operand<'_> {
    /// Starts this thread's copies of a stage.
    #[inline(always)]
    pub(super) fn stage(&self, tile: Tile, stage: Stage) {
        let whole = stage.end - stage.first_k >= tile.depth;
        let vectors = (self.start | self.stride as usize | self.rows as usize).is_multiple_of(4);
        let threads = tile.threads();
        // SAFETY: whole where k does not end before the stage, vectors where rows, operand and stage consist of them.
        unsafe {
            match (self.along_k, whole) {
                (true, true) => self.copy::<1, true, true>(tile, stage, LANES_ALONG_K),
                (true, false) => self.copy::<1, true, false>(tile, stage, LANES_ALONG_K),
                (false, true) if vectors => self.copy::<4, false, true>(tile, stage, lanes(stage.width / 4, threads)),
                (false, _) => self.copy::<1, false, false>(tile, stage, lanes(stage.width, threads)),
            }
        }
    }

    /// Copies `VECTOR` rows at once, `lanes` threads side by side along the contiguous axis.
    ///
    /// # Safety
    /// `WHOLE` only where k does not end before the stage. A vector is 16-byte aligned on both sides.
    #[inline(always)]
    unsafe fn copy<const VECTOR: u32, const ALONG_K: bool, const WHOLE: bool>(
        &self,
        tile: Tile,
        stage: Stage,
        lanes: u32,
    ) {
        let Stage { slot, column, width, first_row, first_k, end } = stage;
        let (thread, stride) = (again(thread::thread_idx_x()), self.stride as usize);
        let (own_along, own_across) = (thread % lanes * VECTOR, thread / lanes);
        let (along_end, across_end) = if ALONG_K { (tile.depth, width) } else { (width, tile.depth) };
        let last = self.rows - VECTOR;
        let clamp = |row: u32| if row < last { row } else { last } as usize;
        for across in (0..across_end).step_by((tile.threads() / lanes) as usize) {
            for along in (0..along_end).step_by((lanes * VECTOR) as usize) {
                let (along, across) = (own_along + along, own_across + across);
                let (row, k) = if ALONG_K { (across, along) } else { (along, across) };
                let at = column + k * tile.pitch() + row;
                let (row, k) = (clamp(first_row + row), first_k + k);
                let from = self.start + if ALONG_K { row * stride + k as usize } else { k as usize * stride + row };
                if !WHOLE && k >= end {
                    continue;
                }
                // SAFETY: inside the operand, which the contract checked.
                unsafe {
                    if VECTOR == 4 {
                        slot.copy4(at, self.values, from);
                    } else {
                        slot.copy(at, self.values, from);
                    }
                }
            }
        }
    }
}

/// The same value, of which the compiler knows nothing: what follows from it is computed for each stage. Kept from stage to
/// stage, the addresses of every way to copy would take registers that the sums need.
#[inline(always)]
fn again(value: u32) -> u32 {
    #[cfg(target_arch = "nvptx64")]
    {
        let same: u32;
        // SAFETY: a copy of a register. Not `pure`, or the compiler would take it out of the loop.
        unsafe { core::arch::asm!("mov.u32 {0}, {1};", out(reg32) same, in(reg32) value, options(nomem, nostack)) };
        same
    }
    #[cfg(not(target_arch = "nvptx64"))]
    value
}

/// The most threads side by side, a power of two, that divide `count` evenly.
#[inline(always)]
const fn lanes(count: u32, threads: u32) -> u32 {
    let even = count & count.wrapping_neg();
    if even < threads { even } else { threads }
}

/// Whether the copies of a stage of `width` rows fall evenly to the threads of a block, whichever way an operand lies.
pub(super) const fn is_even(tile: Tile, width: u32) -> bool {
    let threads = tile.threads();
    width.is_multiple_of(threads / LANES_ALONG_K)
        && tile.depth.is_multiple_of(LANES_ALONG_K)
        && tile.depth.is_multiple_of(threads / lanes(width, threads))
        && tile.depth.is_multiple_of(threads / lanes(width / 4, threads))
}
