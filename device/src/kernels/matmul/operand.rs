//! Operands of a matrix multiply, and how a block brings a stage of one to shared memory.
//!
//! Invariant: a stage is k-major whatever the operand's order, and every place of it is written, with zero outside the
//! operand.

use super::Tile;
use crate::tile::SharedTile;
use cuda_std::thread;

/// Threads side by side along k where an operand is contiguous along k: together with four neighbouring rows a warp
/// then writes to all 32 banks, and reads whole sectors.
const LANES_ALONG_K: u32 = 8;

/// One operand: `rows` x `k` from `start` on, contiguous along k or along the rows, `stride` between the others.
pub(super) struct Operand<'p> {
    pub(super) values: &'p [f32],
    pub(super) start: usize,
    pub(super) rows: u32,
    pub(super) k: u32,
    pub(super) stride: u32,
    pub(super) along_k: bool,
}

/// A part of an operand on its way to shared memory; pairs are along the operand's contiguous axis and across it.
struct Part {
    slot: SharedTile<f32>,
    /// Where the part starts in the slot.
    start: u32,
    /// Floats of the slot between neighbours.
    pitch: [u32; 2],
    /// Where the part starts in the operand.
    first: [u32; 2],
    /// Where the operand ends.
    end: [u32; 2],
    extent: [u32; 2],
}

impl Operand<'_> {
    /// Starts this thread's copies of a stage: `width` rows from `first_row` and k from `first_k`, to column `column` of
    /// `slot`.
    #[inline(always)]
    pub(super) fn stage(
        &self,
        tile: Tile,
        slot: SharedTile<f32>,
        (column, width): (u32, u32),
        first_row: u32,
        first_k: u32,
    ) {
        let part = |first, end, extent, pitch| Part { slot, start: column, pitch, first, end, extent };
        let (depth, threads, pitch) = (tile.depth, tile.threads(), tile.pitch());
        let whole = first_row + width <= self.rows && first_k + depth <= self.k;
        // SAFETY: a copy that is not whole looks where the operand ends.
        unsafe {
            if self.along_k {
                let part = part([first_k, first_row], [self.k, self.rows], [depth, width], [pitch, 1]);
                if whole {
                    self.copy::<1, true>(part, LANES_ALONG_K, threads);
                } else {
                    self.copy::<1, false>(part, LANES_ALONG_K, threads);
                }
            } else {
                let part = part([first_row, first_k], [self.rows, self.k], [width, depth], [1, pitch]);
                if whole && self.start.is_multiple_of(4) && self.stride.is_multiple_of(4) {
                    self.copy::<4, true>(part, lanes(width / 4, threads), threads);
                } else if whole {
                    self.copy::<1, true>(part, lanes(width, threads), threads);
                } else {
                    self.copy::<1, false>(part, lanes(width, threads), threads);
                }
            }
        }
    }

    /// Copies `VECTOR` floats at once, `lanes` threads side by side.
    ///
    /// # Safety
    /// `WHOLE` only where the part lies inside the operand; a vector is 16-byte aligned on both sides.
    #[inline(always)]
    unsafe fn copy<const VECTOR: u32, const WHOLE: bool>(&self, part: Part, lanes: u32, threads: u32) {
        let Part { slot, start, pitch, first, end, extent } = part;
        let thread = thread::thread_idx_x();
        let own = [thread % lanes * VECTOR, thread / lanes];
        let stride = self.stride as usize;
        let from = self.start + (first[1] + own[1]) as usize * stride + (first[0] + own[0]) as usize;
        let at = start + own[0] * pitch[0] + own[1] * pitch[1];
        for across in (0..extent[1]).step_by((threads / lanes) as usize) {
            for along in (0..extent[0]).step_by((lanes * VECTOR) as usize) {
                let at = at + along * pitch[0] + across * pitch[1];
                let from = from + across as usize * stride + along as usize;
                let inside = first[0] + own[0] + along < end[0] && first[1] + own[1] + across < end[1];
                if !(WHOLE || inside) {
                    slot.set(at, 0.0);
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
