//! Tiles: what part of the output a block computes, and how it divides it among its warps.
//!
//! Invariant: a stage is sixteen words deep whatever the format, so a tile's shared memory does not depend on it.

use crate::matmul::Cost;
use crate::mma::STEP;

/// Steps of k of a stage.
pub(super) const STEPS: u32 = 2;
/// Words along k of a stage.
pub(super) const WORDS: u32 = STEPS * STEP;
/// Stages in shared memory: one in use, the others on their way.
pub(super) const STAGES: u32 = 4;

/// A block's part of the output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tile {
    /// Warps along the rows and the columns of the tile.
    pub warps: [u32; 2],
    /// Blocks of 32 x 32 outputs of a warp along both.
    pub blocks: [usize; 2],
    /// How long it takes, in TF32.
    pub cost: Cost,
}

impl Tile {
    /// Rows of the tile.
    #[inline(always)]
    pub const fn rows(self) -> u32 {
        32 * self.warps[0] * self.blocks[0] as u32
    }

    /// Columns of the tile.
    #[inline(always)]
    pub const fn cols(self) -> u32 {
        32 * self.warps[1] * self.blocks[1] as u32
    }

    /// Threads of a block.
    #[inline(always)]
    pub const fn threads(self) -> u32 {
        32 * self.warps[0] * self.warps[1]
    }

    /// Copies of 16 bytes that a thread makes of a stage: of A and of B.
    #[inline(always)]
    pub(super) const fn passes(self) -> [usize; 2] {
        let copied = self.threads() * 4 / WORDS;
        [(self.rows() / copied) as usize, (self.cols() / copied) as usize]
    }

    /// Words of a stage: A's rows, then B's columns.
    #[inline(always)]
    pub(super) const fn stage_len(self) -> u32 {
        (self.rows() + self.cols()) * WORDS
    }

    /// Bytes of shared memory of a block.
    pub const fn shared_bytes(self) -> u32 {
        4 * STAGES * self.stage_len()
    }
}
