//! Shapes: the tile sizes that a kernel is compiled for.
//!
//! ```text
//! shared memory:  | resident rows | again, in backward |
//!                 | slot 0: a tile of k, of v (or of q, of dout) | slot 1 .. |
//!                 | lse and delta of each slot's rows (if the tiles are of queries) | barriers |
//! ```
//! Invariant: the tile depends only on the width and the kernel, because it determines the order of
//! sums.

use crate::machine::mbarrier::BARRIER_BYTES;

/// Returns the registers of a thread that copies, and of one that multiplies, in a block of
/// `groups` multiplying warpgroups and `parts` parts of 64 columns. Threads begin with equal
/// numbers, multiples of 8, of the 65,536 of a multiprocessor, and later have no more together.
pub(super) const fn registers_of(groups: u32, parts: u32) -> [u32; 2] {
    let threads = WARPGROUP * (groups + 1);
    let all = 65_536 / threads / 8 * 8 * (groups + 1);
    let copying = match (groups, parts) {
        (2, 1) => 40,
        (2, _) => 24,
        _ => 32,
    };
    [copying, (all - copying) / groups / 8 * 8]
}

/// The threads of a warpgroup, and its resident rows.
pub(super) const WARPGROUP: u32 = 128;
pub(super) const GROUP_ROWS: u32 = 64;
/// The columns of a part of a tile: 128 bytes of a row.
pub(super) const PART: u32 = 64;
/// The words of a row of a part.
pub(super) const ROW: u32 = PART / 2;

/// Returns the barriers of a block: two for the resident rows, and two for each array of each slot.
pub(super) const fn barriers_of(slots: u32) -> u32 {
    2 + 2 * 2 * slots
}

/// The sizes that a kernel is compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// The warpgroups that multiply. Each has 64 resident rows.
    pub groups: u32,
    /// The rows of a streamed tile.
    pub tile: u32,
    /// The slots for streamed tiles.
    pub slots: u32,
    /// The parts of resident rows that registers hold, if any.
    pub held: usize,
    /// The columns of the widest head.
    pub width: usize,
}

impl Shape {
    /// The threads of a block: those that multiply, and a warpgroup that copies.
    pub const fn threads(self) -> u32 {
        WARPGROUP * (self.groups + 1)
    }

    /// The resident rows of a block.
    pub const fn rows(self) -> u32 {
        GROUP_ROWS * self.groups
    }

    /// The accumulator tiles of eight columns in a warp's rows of scores.
    pub const fn tiles(self) -> usize {
        self.tile as usize / 8
    }

    /// The parts of 64 columns of a row.
    pub const fn parts(self) -> usize {
        self.width / PART as usize
    }

    /// The accumulator tiles of eight columns in a row of the widest head.
    pub const fn made(self) -> usize {
        self.width / 8
    }

    /// Returns the divisor of all head widths, and the widest head.
    #[cfg(not(target_arch = "nvptx64"))]
    pub(super) const fn widths(self) -> (u32, usize) {
        (8, self.width)
    }

    /// Returns the first of `shapes`, whose widths ascend, that suits heads of `width` columns;
    /// otherwise the last.
    pub const fn suiting(width: usize, shapes: &[Self]) -> Self {
        let mut at = 0;
        while at + 1 < shapes.len() && shapes[at].width < width {
            at += 1;
        }
        shapes[at]
    }

    /// Returns the shared memory of a kernel in bytes. Its block has resident rows of `arrays`
    /// arrays, and `numbers` values for each row of a tile.
    pub const fn shared_bytes(self, arrays: u32, numbers: u32) -> u32 {
        let tiles = (self.rows() * arrays + 2 * self.slots * self.tile) * 2 * self.width as u32;
        tiles + self.slots * numbers * self.tile * 4 + barriers_of(self.slots) * BARRIER_BYTES
    }
}
