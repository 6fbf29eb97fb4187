//! Tiles: what part of the output a block computes, and how its warps divide it.
//!
//! A warp has neighbouring blocks of 32 x 32 outputs; `mma.rs` shows the lanes of such a block.
//!
//! ```text
//! 128 x 128, 2 x 2 warps:    columns 0..31  32..63  64..95  96..127
//!             rows  0..31            w0      w0      w1      w1
//!                  32..63            w0      w0      w1      w1
//!                  64..95            w2      w2      w3      w3
//!                  96..127           w2      w2      w3      w3
//! ```
//! Invariant: a stage is sixteen words deep whatever the format. So a tile's shared memory does not depend on the format.

use crate::matmul::Cost;
use crate::mma::STEP;

/// Steps of k in a stage.
pub(super) const STEPS: u32 = 2;
/// Words along k in a stage.
pub(super) const WORDS: u32 = STEPS * STEP;
/// Stages in shared memory: one is in use, the others are being copied.
pub(super) const STAGES: u32 = 4;

/// A block's part of the output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tile {
    /// Warps along the rows and along the columns of the tile.
    pub warps: [u32; 2],
    /// A warp's blocks of 32 x 32 outputs, along the rows and along the columns.
    pub blocks: [usize; 2],
    /// How long a block takes, in TF32.
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

    /// Copies of 16 bytes that a thread makes for a stage: of A, and of B.
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

    /// Shared bytes of a block.
    pub const fn shared_bytes(self) -> u32 {
        4 * STAGES * self.stage_len()
    }
}
