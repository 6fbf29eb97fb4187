//! Tiles: the part of the output that a block computes, and how its warps divide it.
//!
//! ```text
//! 128 x 256, 2 x 4 warps of 64 x 64:   columns  0..63   64..127   128..191   192..255
//!                         rows   0..63            w0       w1        w2         w3
//!                               64..127           w4       w5        w6         w7
//! ```
//! Invariant: every tile adds the same products in the same mma instructions, in the same order.

use crate::matmul::Cost;
use crate::tile::wait_copies;

/// The k of a stage.
pub const DEPTH: u32 = 32;
/// The elements of a 16-byte copy.
pub(super) const CHUNK: u32 = 8;
/// The words of a 16-byte copy.
pub(super) const CHUNK_WORDS: u32 = CHUNK / 2;

/// A block's part of the output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tile {
    /// The warps along the rows and along the columns of the tile.
    pub warps: [u32; 2],
    /// A warp's squares of 16 x 16 outputs, along the rows and along the columns.
    pub each: [usize; 2],
    /// The stages in shared memory: one is in use, and the others are being copied.
    pub stages: u32,
    /// The time a block takes.
    pub cost: Cost,
}

impl Tile {
    /// The rows of the tile.
    #[inline(always)]
    pub const fn rows(self) -> u32 {
        16 * self.warps[0] * self.each[0] as u32
    }

    /// The columns of the tile.
    #[inline(always)]
    pub const fn cols(self) -> u32 {
        16 * self.warps[1] * self.each[1] as u32
    }

    /// The threads of a block.
    #[inline(always)]
    pub const fn threads(self) -> u32 {
        32 * self.warps[0] * self.warps[1]
    }

    /// The 16-byte copies that a thread makes for a stage: of A, and of B.
    #[inline(always)]
    pub(crate) const fn passes(self) -> [usize; 2] {
        let chunks = DEPTH / CHUNK;
        [(self.rows() * chunks / self.threads()) as usize, (self.cols() * chunks / self.threads()) as usize]
    }

    /// The words of a stage: A's part, then B's.
    #[inline(always)]
    pub(super) const fn stage_len(self) -> u32 {
        (self.rows() + self.cols()) * DEPTH / 2
    }

    /// The slot of a stage: its offset in shared memory, in bytes.
    #[inline(always)]
    pub(super) const fn slot(self, stage: u32) -> u32 {
        // The remainder is the fraction of `stage / stages`, in 32 bits, times `stages`. That is
        // exact for up to eight stages and numbers below 2^29; a k of 32 bits has 2^27 stages. The
        // compiler's own remainder takes 15 instructions more in the loop, and spills.
        let fraction = stage.wrapping_mul(u32::MAX / self.stages + 1);
        let remainder = ((fraction as u64 * self.stages as u64) >> 32) as u32;
        remainder * 4 * self.stage_len()
    }

    /// The shared memory of a block, in bytes.
    pub const fn shared_bytes(self) -> u32 {
        4 * self.stages * self.stage_len()
    }
}

/// Waits until all stages but the last `pending` ones, 1 to 3, have arrived.
#[inline(always)]
pub(super) fn wait_for_stage(pending: u32) {
    match pending {
        1 => wait_copies::<1>(),
        2 => wait_copies::<2>(),
        _ => wait_copies::<3>(),
    }
}
