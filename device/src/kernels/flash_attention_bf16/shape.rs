//! How much of a head a block has at once.
//!
//! ```text
//! shared memory:   | own rows | again, in backward | slot 0: a tile of k, of v | slot 1 | lse and delta of each slot's rows |
//!                                                     (or of q, of dout)                  (where the tiles are of queries)
//! ```
//! Invariant: the tile follows from the width and the kernel alone, as it is part of the order of sums.

/// Threads of a block.
pub const BLOCK: u32 = 32 * WARPS;
/// Warps of a block.
pub(super) const WARPS: u32 = 4;
/// Elements of a copy of 16 bytes.
pub(super) const CHUNK: u32 = 8;

/// What a kernel is compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Squares of 16 rows that a warp owns.
    pub squares: usize,
    /// Rows of a tile.
    pub tile: u32,
    /// Columns of the widest head.
    pub width: usize,
    /// Blocks that divide the columns of a gradient.
    pub parts: u32,
}

impl Shape {
    /// A warp owns so many squares of rows, and passes over tiles of `tile` rows, of up to `width` columns.
    pub const fn new(squares: usize, tile: u32, width: usize) -> Self {
        Self { squares, tile, width, parts: 1 }
    }

    /// So many blocks divide the columns.
    pub const fn in_parts(self, parts: u32) -> Self {
        Self { parts, ..self }
    }

    /// Rows that a block owns.
    pub const fn rows(self) -> u32 {
        16 * WARPS * self.squares as u32
    }

    /// Tiles of eight columns that the scores of a warp's rows have.
    pub const fn tiles(self) -> usize {
        (self.tile / CHUNK) as usize
    }

    /// Chunks of a row.
    pub const fn chunks(self) -> usize {
        self.width / CHUNK as usize
    }

    /// Chunks of a row of which a block makes a gradient.
    pub const fn made(self) -> usize {
        self.chunks() / self.parts as usize
    }

    /// What widths of heads are multiples of, and the widest.
    #[cfg(not(target_arch = "nvptx64"))]
    pub(super) const fn widths(self) -> (u32, usize) {
        (CHUNK, self.width)
    }

    /// The first of these, whose widths ascend, that suits heads of `width` columns; else the last.
    pub const fn suiting(width: usize, shapes: &[Self]) -> Self {
        let mut at = 0;
        while at + 1 < shapes.len() && shapes[at].width < width {
            at += 1;
        }
        shapes[at]
    }

    /// Shared bytes of a kernel whose block owns rows of so many arrays, and which keeps so many numbers for each row of a tile.
    pub const fn shared_bytes(self, arrays: u32, numbers: u32) -> u32 {
        (self.rows() * arrays + 2 * 2 * self.tile) * 2 * self.width as u32 + 2 * numbers * self.tile * 4
    }
}
