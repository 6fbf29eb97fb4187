//! Tiles: the part of the output that a block computes, and how its warps divide it.
//!
//! A warp has neighboring blocks of 32 x 32 outputs. `mma.rs` shows the lanes of such a block.
//!
//! ```text
//! 128 x 128, 2 x 2 warps:    columns 0..31  32..63  64..95  96..127
//!             rows  0..31            w0      w0      w1      w1
//!                  32..63            w0      w0      w1      w1
//!                  64..95            w2      w2      w3      w3
//!                  96..127           w2      w2      w3      w3
//! ```
//! Invariant: a stage is sixteen words deep in every format, so a tile's shared memory does not
//! depend on the format.

use crate::matmul::Cost;
use crate::mma::STEP;

/// The k steps in a stage.
pub(super) const STEPS: u32 = 2;
/// The words along k in a stage.
pub(super) const WORDS: u32 = STEPS * STEP;
/// The stages in shared memory: one is in use, and the others are being copied.
pub(super) const STAGES: u32 = 4;

/// A block's part of the output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tile {
    /// The warps along the rows and along the columns of the tile.
    pub warps: [u32; 2],
    /// A warp's blocks of 32 x 32 outputs, along the rows and along the columns.
    pub blocks: [usize; 2],
    /// The time a block takes, in TF32.
    pub cost: Cost,
}

impl Tile {
    /// The rows of the tile.
    #[inline(always)]
    pub const fn rows(self) -> u32 {
        32 * self.warps[0] * self.blocks[0] as u32
    }

    /// The columns of the tile.
    #[inline(always)]
    pub const fn cols(self) -> u32 {
        32 * self.warps[1] * self.blocks[1] as u32
    }

    /// The threads of a block.
    #[inline(always)]
    pub const fn threads(self) -> u32 {
        32 * self.warps[0] * self.warps[1]
    }

    /// The 16-byte copies that a thread makes for a stage: of A, and of B.
    #[inline(always)]
    pub(super) const fn passes(self) -> [usize; 2] {
        let copied = self.threads() * 4 / WORDS;
        [(self.rows() / copied) as usize, (self.cols() / copied) as usize]
    }

    /// The words of a stage: A's rows, then B's columns.
    #[inline(always)]
    pub(super) const fn stage_len(self) -> u32 {
        (self.rows() + self.cols()) * WORDS
    }

    /// The shared memory of a block, in bytes.
    pub const fn shared_bytes(self) -> u32 {
        4 * STAGES * self.stage_len()
    }
}
