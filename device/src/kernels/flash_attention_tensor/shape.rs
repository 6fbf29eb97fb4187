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
/// Columns of a tile of sums, which an instruction gives.
pub(super) const COLUMNS: u32 = 8;
/// Bytes of a chunk, which a thread copies at once.
const CHUNK_BYTES: u32 = 16;

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
    /// Bytes of an element in memory.
    pub bytes: u32,
}

impl Shape {
    /// A warp owns so many squares of rows, and passes over tiles of `tile` rows, of up to `width` columns of BF16.
    pub const fn of_bf16(squares: usize, tile: u32, width: usize) -> Self {
        Self { squares, tile, width, parts: 1, bytes: 2 }
    }

    /// The same, of f32.
    pub const fn of_f32(squares: usize, tile: u32, width: usize) -> Self {
        Self { bytes: 4, ..Self::of_bf16(squares, tile, width) }
    }

    /// So many blocks divide the columns.
    pub const fn in_parts(self, parts: u32) -> Self {
        Self { parts, ..self }
    }

    /// Rows that a block owns.
    pub const fn rows(self) -> u32 {
        rows_of(self.squares)
    }

    /// Tiles of eight columns that the scores of a warp's rows have.
    pub const fn tiles(self) -> usize {
        (self.tile / COLUMNS) as usize
    }

    /// Chunks of a row.
    pub const fn chunks(self) -> usize {
        self.width * self.bytes as usize / CHUNK_BYTES as usize
    }

    /// Tiles of eight columns that a block makes of its rows.
    pub const fn made(self) -> usize {
        self.width / COLUMNS as usize / self.parts as usize
    }

    /// What widths of heads are multiples of, and the widest.
    #[cfg(not(target_arch = "nvptx64"))]
    pub(super) const fn widths(self) -> (u32, usize) {
        (CHUNK_BYTES / self.bytes, self.width)
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
        (self.rows() * arrays + 2 * 2 * self.tile) * self.bytes * self.width as u32 + 2 * numbers * self.tile * 4
    }
}

/// Rows of a block whose warps own so many squares.
pub(super) const fn rows_of(squares: usize) -> u32 {
    16 * WARPS * squares as u32
}
