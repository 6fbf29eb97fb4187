//! Tiles: the part of the output that a block computes, and its shared memory.
//!
//! ```text
//! 128 x 256:   rows   0..63    warpgroup 1    all columns
//!              rows  64..127   warpgroup 2    all columns       warpgroup 0 copies
//!
//! shared memory:   | stage 0: A, B | stage 1 | .. | staged outputs of each warp | barriers |
//! ```
//! Invariant: every tile adds the same products in the same instructions, in the same order.

use crate::machine::mbarrier::BARRIER_BYTES;
use crate::matmul::Cost;
use crate::wgmma::{GROUP_ROWS, PANEL, ROW_WORDS};

/// The threads of a warpgroup.
pub(crate) const WARPGROUP: u32 = 128;

/// The words of all stages.
const STAGES_LEN: u32 = 48 * 1024;

/// The words of a part of a warp's outputs, which is staged: 16 rows of 64 columns of BF16.
pub(crate) const STAGING_LEN: u32 = 16 * 64 / 2;

/// A block's part of the output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tile {
    /// The warpgroups that multiply, each with 64 rows.
    pub groups: u32,
    /// The columns, a multiple of 64.
    pub columns: u32,
    /// The time a block takes.
    pub cost: Cost,
}

impl Tile {
    /// The rows of the tile.
    #[inline(always)]
    pub const fn rows(self) -> u32 {
        GROUP_ROWS * self.groups
    }

    /// The columns of the tile.
    #[inline(always)]
    pub const fn cols(self) -> u32 {
        self.columns
    }

    /// The threads of a block: those that multiply, and a warpgroup that copies.
    #[inline(always)]
    pub const fn threads(self) -> u32 {
        WARPGROUP * (self.groups + 1)
    }

    /// The warps that multiply.
    #[inline(always)]
    pub(crate) const fn warps(self) -> u32 {
        4 * self.groups
    }

    /// The words of a stage: A's part, then B's.
    #[inline(always)]
    pub(crate) const fn stage_len(self) -> u32 {
        (self.rows() + self.columns) * ROW_WORDS
    }

    /// The stages in shared memory.
    #[inline(always)]
    pub(crate) const fn stages(self) -> u32 {
        STAGES_LEN / self.stage_len()
    }

    /// The word at which the memory begins that a warp stages its output in: two parts.
    #[inline(always)]
    pub(crate) const fn staging(self, warp: u32) -> u32 {
        self.stages() * self.stage_len() + warp * 2 * STAGING_LEN
    }

    /// The byte at which a barrier lies: of each stage, the one at which it is full, then of each
    /// the one at which it is free.
    #[inline(always)]
    pub(crate) const fn barrier(self, number: u32) -> u32 {
        4 * self.staging(self.warps()) + number * BARRIER_BYTES
    }

    /// The shared memory of a block, in bytes.
    pub const fn shared_bytes(self) -> u32 {
        assert!(self.columns.is_multiple_of(PANEL), "B is copied in panels");
        self.barrier(2 * self.stages())
    }
}
