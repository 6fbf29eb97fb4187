//! Chunks of rows that a block of a backward pass processes, and their sums by column.
//!
//! ```text
//! a chunk of rows, in g groups; a group has every g-th row, and lanes of its own
//!
//!   row 0      group 0 |        row 0      group 0 ----.
//!   row 1      group 1 |  then  row g      group 0 ----+--> sums of group 0  .
//!   ..                 |        row 2 g    group 0 ----'                     |
//!   row g - 1  group g - 1      row 1      group 1 ----.                     +--> one row of `out`
//!   row g      group 0          row g + 1  group 1 ----+--> sums of group 1  |    for the chunk
//!   ..                          ..                                           '
//! ```
//! Invariant: the order in which rows are added depends only on the number of rows and columns.

use crate::tile::SharedTile;
use crate::vector::{F4, VectorPart};
use crate::warp::{LANES, REG_COLUMNS, lanes_of, rows_at_once};
use cuda_std::thread;

/// The threads of a block: few, because each has many registers.
pub const BLOCK: u32 = 128;
/// The maximum of rows in a chunk.
pub const MAX_ROWS: usize = 256;
/// The floats of the sums of all groups: those that the block's threads hold.
pub const SUMS: usize = REG_COLUMNS / LANES as usize * BLOCK as usize;

/// Returns the number of row groups for `cols` columns: the rows that a block processes at once,
/// each with its own lanes.
#[inline(always)]
pub fn groups_of(cols: usize) -> usize {
    rows_at_once(BLOCK, cols)
}

/// Returns the rows of a chunk: twice the rows that a block processes at once. If there are many
/// rows, up to 16 times that, so that fewer partial sums remain.
pub fn chunk_of(rows: usize, cols: usize) -> usize {
    let groups = groups_of(cols);
    groups * (rows / (512 * groups)).clamp(2, 16).min(MAX_ROWS / groups)
}

/// Returns the columns of the tile of sums: those of the vectors that a row's lanes can hold.
#[inline(always)]
pub fn width(cols: usize) -> usize {
    if cols > REG_COLUMNS / 2 { REG_COLUMNS } else { lanes_of(cols) as usize * 4 * F4::LEN }
}

/// The rows of a block.
#[derive(Clone, Copy)]
pub struct RowChunk {
    /// The first row.
    pub first: usize,
    /// The row after the last.
    pub end: usize,
}

impl RowChunk {
    /// Returns this block's chunk of `rows` rows, in chunks of `chunk`.
    #[inline(always)]
    pub fn of_block(chunk: usize, rows: usize) -> Self {
        let first = thread::block_idx_x() as usize * chunk;
        Self { first, end: if first + chunk < rows { first + chunk } else { rows } }
    }

    /// Adds the groups' sums, ascending, for the tile's columns from `start` on. If `add`, adds
    /// them to the content of `out`.
    ///
    /// # Safety
    /// All sums were written before a barrier. `out` has a row of `cols` for each block.
    #[inline(always)]
    pub unsafe fn finish(self, sums: SharedTile<f32>, start: usize, cols: usize, add: bool, out: *mut f32) {
        let width = width(cols);
        let (rows, at_once) = (self.end - self.first, groups_of(cols));
        let groups = if rows < at_once { rows } else { at_once };
        let mut quad = thread::thread_idx_x() as usize * F4::LEN;
        while quad < width && start + quad < cols {
            let mut total = sums.get4(quad as u32);
            let mut group = 1;
            while group < groups {
                total = total + sums.get4((group * width + quad) as u32);
                group += 1;
            }
            let column = start + quad;
            let part = if cols.is_multiple_of(F4::LEN) { VectorPart::Whole } else { VectorPart::first(cols - column) };
            let index = thread::block_idx_x() as usize * cols + column;
            // SAFETY: the caller guarantees that the block has a row in `out`.
            unsafe {
                let old = if add { F4::load_part_raw(out, index, part, 0.0) } else { F4::splat(0.0) };
                (old + total).store_part(out, index, part);
            }
            quad += BLOCK as usize * F4::LEN;
        }
    }
}
