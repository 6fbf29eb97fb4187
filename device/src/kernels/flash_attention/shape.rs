//! Shapes: the tile sizes that a kernel is compiled for.
//!
//! ```text
//! shared memory, in floats:
//!   | resident rows, each width + 4 | again, in backward | pairs: a row of 64 every 72 |
//!   | two chunks: a row of 32 every 36 |
//! ```
//! The row strides avoid bank conflicts when a warp reads eight rows of a chunk, reads four
//! resident rows, or writes pairs.
//!
//! Invariant: the tile is the same for every width. The other sizes change no bit.

use crate::vector::F4;

/// The threads of a block.
pub const BLOCK: u32 = 128;
/// The rows of a tile. They determine the order of sums, so they are the same for every width.
pub const TILE: u32 = 64;
/// The columns of a chunk.
pub(super) const COLUMNS: u32 = 32;
/// The lanes that share a row, and the pairs of a row that each lane has.
pub(super) const ACROSS: u32 = COLUMNS / F4::LEN as u32;
pub(super) const PAIRS: usize = (TILE / ACROSS) as usize;
/// The rows that a block copies at once, one vector a thread.
pub(super) const AT_ONCE: u32 = BLOCK / ACROSS;
/// The floats from one row to the next: of pairs, and of a chunk.
pub(super) const PAIR_ROW: u32 = TILE + 8;
pub(super) const CHUNK_ROW: u32 = COLUMNS + 4;
pub(super) const CHUNK_LEN: u32 = TILE * CHUNK_ROW;

/// The sizes that a kernel is compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// The resident rows of a thread.
    pub each: usize,
    /// The chunks that the widest head fills.
    pub chunks: usize,
}

impl Shape {
    /// The resident rows of a block.
    pub const fn rows(self) -> u32 {
        AT_ONCE * self.each as u32
    }

    /// The columns of the widest head.
    pub const fn width(self) -> usize {
        self.chunks * COLUMNS as usize
    }

    /// Returns the divisor of all head widths, and the widest head.
    #[cfg(not(target_arch = "nvptx64"))]
    pub(super) const fn widths(self) -> (u32, usize) {
        (F4::LEN as u32, self.width())
    }

    /// Returns the chunks that a head's `width` columns fill.
    #[inline(always)]
    pub(super) const fn chunks_of(width: u32) -> u32 {
        width.div_ceil(COLUMNS)
    }

    /// The floats from one resident row to the next.
    pub(super) const fn resident_row(self) -> u32 {
        self.width() as u32 + 4
    }

    /// Returns the first of `shapes`, whose widths ascend, that suits heads of `width` columns;
    /// otherwise the last.
    pub const fn suiting(width: usize, shapes: &[Self]) -> Self {
        let mut at = 0;
        while at + 1 < shapes.len() && shapes[at].width() < width {
            at += 1;
        }
        shapes[at]
    }

    /// Returns the shared memory in bytes of a kernel whose block has resident rows of `arrays`
    /// arrays.
    pub const fn shared_bytes(self, arrays: u32) -> u32 {
        (self.rows() * (arrays * self.resident_row() + PAIR_ROW) + 2 * CHUNK_LEN) * 4
    }
}

/// The columns of the widest head.
pub const MAX_WIDTH: usize = 256;
/// The shape of heads of up to 64 columns.
pub const W64: Shape = Shape { each: 4, chunks: 2 };
/// The forward shape of heads of up to 128 columns. A thread has four rows.
pub const W128: Shape = Shape { each: 4, chunks: 4 };
/// The backward shape of heads of up to 128 columns. A thread has two rows, because backward holds
/// more per row.
pub const W128_BACKWARD: Shape = Shape { each: 2, chunks: 4 };
/// The shape of heads of up to 256 columns.
pub const W256: Shape = Shape { each: 2, chunks: 8 };
/// The shapes of the forward kernel.
pub const FORWARD: [Shape; 3] = [W64, W128, W256];
/// The shapes of the kernel for the gradient of q.
pub const QUERIES: [Shape; 3] = [W64, W128_BACKWARD, W256];
/// The shapes of the kernel for the gradients of k and v.
pub const KEYS: [Shape; 3] = QUERIES;
