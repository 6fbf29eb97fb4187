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
use crate::wgmma::{GROUP_ROWS, ROW_WORDS};

/// The threads of a warpgroup.
pub(super) const WARPGROUP: u32 = 128;
/// The warpgroups that multiply, each 64 rows.
const GROUPS: u32 = 2;
/// The threads of a block: those that multiply, and a warpgroup that copies.
pub(super) const THREADS: u32 = WARPGROUP * (GROUPS + 1);
/// The registers of a copying thread, and of a multiplying one.
pub(super) const REGISTERS: [u32; 2] = [40, 232];

/// The k of a stage: a row of 128 bytes.
pub(super) const DEPTH: u32 = ROW_WORDS;
/// The words of all stages.
const STAGES_LEN: u32 = 48 * 1024;
/// The words of a warp's staged outputs: 16 rows of 32 columns.
pub(super) const STAGING_LEN: u32 = 16 * 32;

/// The rows of B in an image.
pub(super) const IMAGE_ROWS: u32 = 128;
/// The words of an image: one stage of 128 rows of B.
pub(super) const IMAGE: u32 = IMAGE_ROWS * ROW_WORDS;

/// A block's part of the output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tile {
    /// The columns, a multiple of 128.
    pub columns: u32,
    /// The time a block takes.
    pub cost: Cost,
}

impl Tile {
    /// The rows of the tile.
    #[inline(always)]
    pub const fn rows(self) -> u32 {
        GROUP_ROWS * GROUPS
    }

    /// The columns of the tile.
    #[inline(always)]
    pub const fn cols(self) -> u32 {
        self.columns
    }

    /// The threads of a block.
    #[inline(always)]
    pub const fn threads(self) -> u32 {
        THREADS
    }

    /// The warps that multiply.
    #[inline(always)]
    pub(super) const fn warps(self) -> u32 {
        4 * GROUPS
    }

    /// The images of B in a stage.
    #[inline(always)]
    pub(super) const fn images(self) -> usize {
        (self.columns / IMAGE_ROWS) as usize
    }

    /// The words of a stage of A.
    #[inline(always)]
    pub(super) const fn left_len(self) -> u32 {
        self.rows() * ROW_WORDS
    }

    /// The words of a stage: A's part, then B's.
    #[inline(always)]
    pub(super) const fn stage_len(self) -> u32 {
        self.left_len() + self.columns * ROW_WORDS
    }

    /// The stages in shared memory.
    #[inline(always)]
    pub(super) const fn stages(self) -> u32 {
        STAGES_LEN / self.stage_len()
    }

    /// The word at which the memory begins that a warp stages its output in.
    #[inline(always)]
    pub(super) const fn staging(self, warp: u32) -> u32 {
        self.stages() * self.stage_len() + warp * STAGING_LEN
    }

    /// The byte at which a barrier lies: of each stage, the one at which it is full, then of each
    /// the one at which it is free.
    #[inline(always)]
    pub(super) const fn barrier(self, number: u32) -> u32 {
        4 * self.staging(self.warps()) + number * BARRIER_BYTES
    }

    /// The shared memory of a block, in bytes: the stages, the staged outputs of each warp, and the
    /// barriers.
    pub const fn shared_bytes(self) -> u32 {
        self.barrier(2 * self.stages())
    }
}
