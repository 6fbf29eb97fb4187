//! A block's share of flat arrays, and sums and maxima over its threads.
//!
//! Invariant: a reduction combines lanes first (distances 16, 8, 4, 2, 1), then the warps in ascending order, so its
//! result depends on the threads' values alone.

use crate::tile::SharedTile;
use crate::vector::{F4, Part};
use crate::warp::{LANES, combine_lanes};
use cuda_std::{thread, warp};

/// Threads in a block of the kernels on flat arrays.
pub const BLOCK: u32 = 256;
/// Elements that such a block covers with one vector a thread.
pub const BLOCK_ELEMENTS: usize = BLOCK as usize * F4::LEN;
/// Shared bytes of a reduction over [`BLOCK`] threads: a value a warp.
pub const REDUCTION_BYTES: u32 = BLOCK / LANES * 4;

/// Elements that a block of [`BLOCK`] threads reduces to one.
pub const CHUNK: usize = 4096;
/// Rows that a thread of a [`RowChunk`] reduces to one.
pub const ROW_CHUNK: usize = 64;
/// Threads in a block of the kernels that reduce over rows: a vector of columns each.
pub const COLUMN_BLOCK: u32 = 32;
const COLUMN_TILE: usize = COLUMN_BLOCK as usize * F4::LEN;

/// The index of this thread's first element in a flat array, a multiple of four.
#[inline(always)]
pub fn own_index() -> usize {
    thread::block_idx_x() as usize * BLOCK_ELEMENTS + thread::thread_idx_x() as usize * F4::LEN
}

/// Runs `body` for this thread's four elements of a flat array of `length`, if there are any, with the index of the
/// first and the [`Part`] that exists. The body is compiled once for a whole vector and once for the last few elements;
/// a macro, because a closure may stay a call, compiled without the CPU's fused multiply-add.
#[macro_export]
macro_rules! for_own_vector {
    ($length:expr, |$index:ident, $part:ident| $body:block) => {{
        let length = $length;
        let $index = $crate::block::own_index();
        if $index + $crate::vector::F4::LEN <= length {
            let $part = $crate::vector::Part::Whole;
            $body
        } else if $index < length {
            let $part = $crate::vector::Part::First(length - $index);
            $body
        }
    }};
}

/// The grid of a kernel that takes its elements by [`for_own_vector`].
#[cfg(not(target_arch = "nvptx64"))]
pub fn vector_grid(length: usize) -> Result<cuda_std::launch::Grid, cuda_std::launch::Violation> {
    cuda_std::launch::Grid::cover(length, BLOCK_ELEMENTS)
}

/// `number / divisor` and the remainder, without a check for zero on the GPU.
///
/// # Safety
/// `divisor` is not 0. The CPU checks it, the GPU does not.
#[inline(always)]
pub unsafe fn divide(number: usize, divisor: usize) -> (usize, usize) {
    #[cfg(target_arch = "nvptx64")]
    // SAFETY: the caller's contract; the check would be a call of a panic.
    unsafe {
        core::hint::assert_unchecked(divisor != 0);
    }
    (number / divisor, number % divisor)
}

/// Combines one value of each of the block's [`BLOCK`] threads; every thread gets the result. `tile` holds a value a
/// warp, and is free for other use after the block's next barrier.
///
/// # Safety
/// All threads of a block of [`BLOCK`] call it together.
#[inline(always)]
pub unsafe fn block_combine(tile: SharedTile<f32>, value: f32, combine: impl Fn(f32, f32) -> f32) -> f32 {
    // SAFETY: whole warps, as the caller promises.
    let value = unsafe { combine_lanes(u32::MAX, LANES, value, &combine) };
    if warp::lane_id() == 0 {
        tile.set(thread::thread_idx_x() / LANES, value);
    }
    thread::sync_threads();
    let mut total = tile.get(0);
    let mut at = 1;
    while at < BLOCK / LANES {
        total = combine(total, tile.get(at));
        at += 1;
    }
    total
}

/// Folds this thread's share of the block's [`CHUNK`] of `x`: four vectors, each a whole block apart. Missing elements
/// are `fill`.
///
/// # Safety
/// The block has [`BLOCK`] threads.
#[inline(always)]
pub unsafe fn chunk_fold(x: &[f32], start: F4, fill: f32, combine: impl Fn(f32, f32) -> f32) -> F4 {
    let first = thread::block_idx_x() as usize * CHUNK + thread::thread_idx_x() as usize * F4::LEN;
    let load = |at: usize| {
        let index = first + at * BLOCK_ELEMENTS;
        let left = if index < x.len() { x.len() - index } else { 0 };
        let part = if left >= F4::LEN { Part::Whole } else { Part::First(left) };
        // SAFETY: `left` elements remain at `index`.
        unsafe { F4::load_part(x, index, part, fill) }
    };
    const { assert!(CHUNK == 4 * BLOCK_ELEMENTS) };
    let vectors = [load(0), load(1), load(2), load(3)];
    let value = start.zip(vectors[0], &combine);
    let value = value.zip(vectors[1], &combine);
    let value = value.zip(vectors[2], &combine);
    value.zip(vectors[3], &combine)
}

/// The total of four sums to which the rows of a chunk were added in turns, the last row to the fourth: `(0 + 1) + (2 + 3)`.
/// Where terms cancel, as in a bias's gradient, sums of every fourth row stay smaller than one of all, and so do their
/// rounding errors; and four chains wait less for each other.
#[inline(always)]
pub fn in_turns([first, second, third, fourth]: [F4; 4]) -> F4 {
    (first + second) + (third + fourth)
}

/// A thread's part of `[rows, cols]` reduced over its rows to `[ceil(rows / 64), cols]`: four columns of one chunk of
/// [`ROW_CHUNK`] rows. Blocks of [`COLUMN_BLOCK`] threads run over the columns first, then over the chunks.
pub struct RowChunk {
    /// The index of the first of the four columns in the output.
    pub place: usize,
    /// How many of the four columns exist.
    pub part: Part,
    chunk: usize,
    /// The index of the first of the four columns in the chunk's first row.
    pub first: usize,
    /// The index where the chunk ends.
    pub end: usize,
}

impl RowChunk {
    /// This thread's chunk and columns in an input of `length` elements in rows of `cols`; none beyond the last column.
    ///
    /// # Safety
    /// `cols` is not 0.
    #[inline(always)]
    pub unsafe fn new(length: usize, cols: usize) -> Option<Self> {
        let tiles = cols.div_ceil(COLUMN_TILE);
        // SAFETY: at least one tile, as the caller promises.
        let (chunk, tile) = unsafe { divide(thread::block_idx_x() as usize, tiles) };
        let column = tile * COLUMN_TILE + thread::thread_idx_x() as usize * F4::LEN;
        if column >= cols {
            return None;
        }
        let first = chunk * ROW_CHUNK * cols + column;
        let after = first + ROW_CHUNK * cols;
        let end = if after < length { after } else { length };
        let part = if cols.is_multiple_of(F4::LEN) { Part::Whole } else { Part::first(cols - column) };
        Some(Self { place: chunk * cols + column, part, chunk, first, end })
    }

    /// The first row of the chunk.
    #[inline(always)]
    pub fn first_row(&self) -> usize {
        self.chunk * ROW_CHUNK
    }

    /// The grid over `rows` rows of `cols`.
    #[cfg(not(target_arch = "nvptx64"))]
    pub fn grid(rows: usize, cols: usize) -> Result<cuda_std::launch::Grid, cuda_std::launch::Violation> {
        cuda_std::launch::Grid::cover(rows.div_ceil(ROW_CHUNK) * cols.div_ceil(COLUMN_TILE), 1)
    }
}

/// Runs `body` for each row of a [`RowChunk`](crate::block::RowChunk) of an input with `cols` columns, ascending, with
/// the index of the first of the four columns and the [`Part`](crate::vector::Part) that exists. As for
/// [`for_own_vector`], compiled twice.
#[macro_export]
macro_rules! for_each_row {
    ($chunk:expr, $cols:expr, |$index:ident, $part:ident| $body:block) => {{
        let (cols, end) = ($cols, $chunk.end);
        let mut $index = $chunk.first;
        if let $crate::vector::Part::First(count) = $chunk.part {
            let $part = $crate::vector::Part::First(count);
            while $index < end {
                $body
                $index += cols;
            }
        } else {
            let $part = $crate::vector::Part::Whole;
            // Four at a time, so that the GPU's loads overlap.
            #[cfg(target_arch = "nvptx64")]
            while $index + 3 * cols < end {
                $body
                $index += cols;
                $body
                $index += cols;
                $body
                $index += cols;
                $body
                $index += cols;
            }
            while $index < end {
                $body
                $index += cols;
            }
        }
    }};
}
