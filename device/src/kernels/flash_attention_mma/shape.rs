//! Shapes: the tile sizes that a kernel is compiled for.
//!
//! ```text
//! shared memory:  | resident rows | again, in backward |
//!                 | slot 0: a tile of k, of v (or of q, of dout) | slot 1 |
//!                 | lse and delta of each slot's rows (if the tiles are of queries) |
//! in pairs:       | resident rows | again | two tiles of q | one of dout | lse and delta | p and ds |
//! from squares:   | slot 0: a tile's rows | slot 1 | slot 0: a tile's squares | slot 1 |
//! ```
//! Invariant: the tile depends only on the width and the kernel, because it determines the order of
//! sums.

use super::pairs::EXCHANGE_BYTES;

/// The threads of a block.
pub const BLOCK: u32 = 32 * WARPS;
/// The warps of a block.
pub(super) const WARPS: u32 = 4;
/// The columns of an mma accumulator tile.
pub(super) const COLUMNS: u32 = 8;
/// The least number of the last heads of a launch, for
/// [`ResidentRows::in_part`](crate::flash_attention::place::ResidentRows::in_part).
pub(super) const LAST_HEADS: u32 = 32;
/// The bytes of a chunk, the unit of a cp.async copy.
const CHUNK_BYTES: u32 = 16;

/// The sizes that a kernel is compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// The mma tiles of 16 resident rows of a warp.
    pub m_tiles: usize,
    /// The rows of a streamed tile.
    pub tile: u32,
    /// The columns of the widest head.
    pub width: usize,
    /// The number of blocks that divide the columns of a gradient.
    pub parts: u32,
    /// The slots of a streamed tile: with one, a tile is copied while the other array's is used.
    pub slots: u32,
    /// True if two warps share their resident rows; see `pairs`.
    pub paired: bool,
    /// The bytes of an element in memory.
    pub bytes: u32,
}

impl Shape {
    /// Returns the BF16 shape of a warp with `m_tiles` mma tiles of resident rows, streamed tiles
    /// of `tile` rows, and up to `width` columns.
    pub const fn of_bf16(m_tiles: usize, tile: u32, width: usize) -> Self {
        Self { m_tiles, tile, width, parts: 1, slots: 2, paired: false, bytes: 2 }
    }

    /// Returns the f32 shape with these sizes.
    pub const fn of_f32(m_tiles: usize, tile: u32, width: usize) -> Self {
        Self { bytes: 4, ..Self::of_bf16(m_tiles, tile, width) }
    }

    /// Returns the shape with the columns divided among `parts` blocks.
    pub const fn in_parts(self, parts: u32) -> Self {
        Self { parts, ..self }
    }

    /// Returns the shape with one slot for each streamed array.
    pub const fn in_one_slot(self) -> Self {
        Self { slots: 1, ..self }
    }

    /// Returns the shape whose warps share resident rows in pairs.
    pub const fn in_pairs(self) -> Self {
        Self { paired: true, ..self }
    }

    /// The resident rows of a block.
    pub const fn rows(self) -> u32 {
        rows_of(self.m_tiles)
    }

    /// The mma tiles of eight columns in a warp's rows of scores.
    pub const fn tiles(self) -> usize {
        (self.tile / COLUMNS) as usize
    }

    /// The chunks of a row.
    pub const fn chunks(self) -> usize {
        self.width * self.bytes as usize / CHUNK_BYTES as usize
    }

    /// The mma tiles of eight columns that a block computes of its rows.
    pub const fn made(self) -> usize {
        self.width / COLUMNS as usize / self.parts as usize
    }

    /// Returns the divisor of all head widths, and the widest head.
    #[cfg(not(target_arch = "nvptx64"))]
    pub(super) const fn widths(self) -> (u32, usize) {
        (CHUNK_BYTES / self.bytes, self.width)
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
        if self.paired {
            let rows = self.rows() * arrays + 3 * self.tile;
            return rows * self.bytes * self.width as u32 + numbers * self.tile * 4 + EXCHANGE_BYTES;
        }
        (self.rows() * arrays + self.slots * 2 * self.tile) * self.bytes * self.width as u32
            + 2 * numbers * self.tile * 4
    }

    /// Returns the shared memory in bytes of a kernel that streams rows and squares of scores.
    pub const fn squares_bytes(self) -> u32 {
        2 * self.tile * (self.bytes * self.width as u32 + 2 * self.rows())
    }
}

/// Returns the resident rows of a block whose warps have `m_tiles` mma tiles each.
pub(super) const fn rows_of(m_tiles: usize) -> u32 {
    16 * WARPS * m_tiles as u32
}
