//! Tiles: the part of the output that a block computes, and its stages in shared memory.
//!
//! ```text
//! 128 x 256:   rows   0..63    warpgroup 0    all columns
//!              rows  64..127   warpgroup 1    all columns
//! ```
//! Invariant: every tile adds the same products in the same instructions, in the same order.

use crate::matmul::Cost;
use crate::wgmma::{CHUNKS, DEPTH, GROUP_ROWS, PANEL, ROW_WORDS};

/// The stages that are copied ahead of the one in use.
pub(super) const AHEAD: u32 = 2;
/// The stages in shared memory. One is being multiplied, and the one before may be, too.
pub(super) const STAGES: u32 = AHEAD + 2;

/// The words of a warp's staged outputs: 16 rows of 64 columns of BF16.
pub(super) const STAGING_LEN: u32 = 16 * 64 / 2;

/// The elements of a 16-byte chunk.
pub(super) const CHUNK: u32 = 8;

/// A block's part of the output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tile {
    /// The warpgroups, each with 64 rows.
    pub groups: u32,
    /// The columns.
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

    /// The threads of a block.
    #[inline(always)]
    pub const fn threads(self) -> u32 {
        128 * self.groups
    }

    /// The rows of 128 bytes in a stage of B. Panels are complete.
    #[inline(always)]
    pub(super) const fn lines(self) -> u32 {
        self.columns.next_multiple_of(PANEL)
    }

    /// The rows of 128 bytes that the threads copy at once.
    #[inline(always)]
    pub(super) const fn lines_at_once(self) -> u32 {
        self.threads() / CHUNKS
    }

    /// The 16-byte copies that a thread makes for a stage: of A, and of B.
    #[inline(always)]
    pub(super) const fn passes(self) -> [usize; 2] {
        [(self.rows() * CHUNKS / self.threads()) as usize, (self.lines() * CHUNKS / self.threads()) as usize]
    }

    /// The words of a stage: A's part, then B's.
    #[inline(always)]
    pub(super) const fn stage_len(self) -> u32 {
        (self.rows() + self.lines()) * ROW_WORDS
    }

    /// The word at which the memory begins that a warp stages its output in.
    #[inline(always)]
    pub(super) const fn staging(self, warp: u32) -> u32 {
        STAGES * self.stage_len() + warp * STAGING_LEN
    }

    /// True if the loop without checks of rows computes a product of `m` x `n` outputs whose
    /// shortest split sums `k` products. The last tile along an edge is moved back until it ends
    /// there, by a multiple of `units`, and only its new outputs are written. A tile has more
    /// stages than are copied ahead, so the copies are at most one tile ahead.
    #[inline(always)]
    pub(super) const fn fits(self, [m, n, k]: [u32; 3], units: [u32; 2]) -> bool {
        m >= self.rows()
            && n >= self.cols()
            && m.is_multiple_of(units[0])
            && n.is_multiple_of(units[1])
            && k.is_multiple_of(CHUNK)
            && k > AHEAD * DEPTH
    }

    /// The shared memory of a block, in bytes: the stages, and the staged outputs of each warp.
    pub const fn shared_bytes(self) -> u32 {
        4 * self.staging(self.threads() / 32)
    }
}

const _: () = assert!(DEPTH == PANEL, "a panel has as many rows of 128 bytes in either layout");
