//! How much of a head a block has at once.
//!
//! ```text
//! shared memory, in floats:
//!   | own rows, each width + 4 | again, in backward | pairs: a row of 64 every 72 | two chunks: a row of 32 every 36 |
//! ```
//! Rows start at such distances that the lanes of a warp meet banks of their own, whether they read eight rows of a chunk, four own
//! rows, or write pairs.
//!
//! Invariant: the tile is the same for every width. The rest changes no bit.

use crate::vector::F4;

/// Threads of a block.
pub const BLOCK: u32 = 128;
/// Rows of a tile: part of the order of sums, so the same for every width.
pub const TILE: u32 = 64;
/// Columns of a chunk.
pub(super) const COLUMNS: u32 = 32;
/// Lanes that share a row, and a row's pairs of each.
pub(super) const ACROSS: u32 = COLUMNS / F4::LEN as u32;
pub(super) const PAIRS: usize = (TILE / ACROSS) as usize;
/// Rows that a block copies at once, a vector a thread.
pub(super) const AT_ONCE: u32 = BLOCK / ACROSS;
/// Floats from one row to the next: of pairs, of a chunk.
pub(super) const PAIR_ROW: u32 = TILE + 8;
pub(super) const CHUNK_ROW: u32 = COLUMNS + 4;
pub(super) const CHUNK_LEN: u32 = TILE * CHUNK_ROW;

/// What a kernel is compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Own rows of a thread.
    pub each: usize,
    /// Chunks that the widest head fills.
    pub chunks: usize,
}

impl Shape {
    /// Rows that a block owns.
    pub const fn rows(self) -> u32 {
        AT_ONCE * self.each as u32
    }

    /// Columns of the widest head.
    pub const fn width(self) -> usize {
        self.chunks * COLUMNS as usize
    }

    /// What widths of heads are multiples of, and the widest.
    #[cfg(not(target_arch = "nvptx64"))]
    pub(super) const fn widths(self) -> (u32, usize) {
        (F4::LEN as u32, self.width())
    }

    /// Chunks that a head's `width` columns fill.
    #[inline(always)]
    pub(super) const fn chunks_of(width: u32) -> u32 {
        width.div_ceil(COLUMNS)
    }

    /// Floats from one own row to the next.
    pub(super) const fn own_row(self) -> u32 {
        self.width() as u32 + 4
    }

    /// The first of these, whose widths ascend, that suits heads of `width` columns; else the last.
    pub const fn suiting(width: usize, shapes: &[Self]) -> Self {
        let mut at = 0;
        while at + 1 < shapes.len() && shapes[at].width() < width {
            at += 1;
        }
        shapes[at]
    }

    /// Shared bytes of a kernel whose block owns rows of so many arrays.
    pub const fn shared_bytes(self, arrays: u32) -> u32 {
        (self.rows() * (arrays * self.own_row() + PAIR_ROW) + 2 * CHUNK_LEN) * 4
    }
}

/// The widest head.
pub const MAX_WIDTH: usize = 256;
/// Heads of up to 64 columns.
pub const W64: Shape = Shape { each: 4, chunks: 2 };
/// Heads of up to 128 columns, where a thread has four rows or two.
pub const W128: Shape = Shape { each: 4, chunks: 4 };
/// The same, where a thread also holds what backward needs.
pub const W128_BACKWARD: Shape = Shape { each: 2, chunks: 4 };
/// Heads of up to 256 columns.
pub const W256: Shape = Shape { each: 2, chunks: 8 };
/// The shapes of the forward kernel.
pub const FORWARD: [Shape; 3] = [W64, W128, W256];
/// The shapes of the kernel for the gradient of q.
pub const QUERIES: [Shape; 3] = [W64, W128_BACKWARD, W256];
/// The shapes of the kernel for the gradients of k and v.
pub const KEYS: [Shape; 3] = QUERIES;
