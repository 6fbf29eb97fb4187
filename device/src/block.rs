//! A block's share of flat arrays, and sums and maxima over its threads.
//!
//! ```text
//! flat array, 256 threads:  block 0                       block 1
//!   elements                0..3   4..7  ..  1020..1023   1024..1027  ..
//!   thread                    0      1   ..     255            0
//!   BF16: a thread has two vectors next to each other, 16 bytes
//!
//! reduction over a block:       lanes 0..31 of warp 0   ..   lanes 0..31 of warp 7
//!   shuffles, 16 8 4 2 1 apart        lane 0                       lane 0
//!   shared memory, a value a warp       w0       w1      ..          w7
//!   every thread                  ((w0 + w1) + ..) + w7
//! ```
//! Invariant: a reduction combines the lanes of each warp first, then the warps in ascending order.
//! Its result depends only on the threads' values.

use crate::machine::hints::assume_not_zero;
pub(crate) use crate::machine::hints::launder_index;
pub use crate::machine::hints::{launder_reg, no_unroll};
use crate::stored::Stored;
use crate::tile::SharedTile;
use crate::vector::{F4, VectorPart};
use crate::warp::{LANES, combine_lanes};
use cuda_std::{thread, warp};

/// The threads in a block of the kernels on flat arrays.
pub const BLOCK: u32 = 256;
/// The elements that such a block covers if each thread has one vector.
pub const BLOCK_ELEMENTS: usize = BLOCK as usize * F4::LEN;
/// The shared memory in bytes of a reduction over [`BLOCK`] threads: one value of each warp.
pub const REDUCTION_BYTES: u32 = BLOCK / LANES * 4;

/// The elements that a block of [`BLOCK`] threads reduces to one.
pub const CHUNK: usize = 4096;
/// The vectors in a row of a [`ColumnTile`].
const TILE_QUADS: u32 = 8;

/// Returns the rows that a block reduces to one, if `rows` rows are summed: all of them up to 1024,
/// otherwise 128. Many blocks then share a long sum, and a short one needs one launch.
pub fn row_chunk(rows: usize) -> usize {
    if rows <= 1024 { 1024 } else { 128 }
}

/// Returns the number of vectors that a thread has of a flat array of S: 16 bytes.
pub const fn own_vectors<S>() -> usize {
    16 / (F4::LEN * size_of::<S>())
}

/// Returns true if a thread of a kernel with `twice` has two rounds of a flat array of S of
/// `length`. An array of less than 2048 blocks of two rounds has one round, so that it has more
/// blocks.
#[inline(always)]
pub const fn has_two_rounds<S>(length: usize) -> bool {
    length >= 2 * 2048 * own_vectors::<S>() * BLOCK_ELEMENTS
}

/// Returns the index of this thread's first element of a flat array of S, and the end of its
/// block's elements. If `has_two`, the second round follows a block's elements later.
#[inline(always)]
pub fn own_places<S>(has_two: bool) -> (usize, usize) {
    let each = own_vectors::<S>() * F4::LEN;
    let of_block = (each * BLOCK as usize) << has_two as u32;
    let start = thread::block_idx_x() as usize * of_block;
    (start + thread::thread_idx_x() as usize * each, start + of_block)
}

/// Returns the index of the first element of this thread in a flat array of which each thread has
/// four elements.
#[inline(always)]
pub fn own_index() -> usize {
    thread::block_idx_x() as usize * BLOCK_ELEMENTS + thread::thread_idx_x() as usize * F4::LEN
}

/// Runs `body` for this thread's four elements of a flat f32 array of `length`, if any exist.
/// `body` gets the index of the first and the [`VectorPart`] that exists.
///
/// The body is compiled twice: for a whole vector, and for the last few elements. It is a macro,
/// because a closure may stay a call that is compiled without the CPU's fused multiply-add.
#[macro_export]
macro_rules! for_own_vector {
    ($length:expr, |$index:ident, $part:ident| $body:block) => {{
        let length = $length;
        let $index = $crate::block::own_index();
        if $index + $crate::vector::F4::LEN <= length {
            let $part = $crate::vector::VectorPart::Whole;
            $body
        } else if $index < length {
            let $part = $crate::vector::VectorPart::First(length - $index);
            $body
        }
    }};
}

/// Writes `value` for each of this thread's vectors of `out`, a flat array of `length`. A thread
/// has 16 bytes of an array of S. The operands, slices or pointers of `length` elements, are loaded
/// by 16 bytes. `value` gets a vector of each under its name, and the index of the vector's first
/// element.
///
/// With `twice`, a thread has two such rounds of a long array; see
/// [`has_two_rounds`](crate::block::has_two_rounds). That is for kernels whose arithmetic takes as
/// long as the bytes of one operand: the reads of both rounds are under way before the arithmetic
/// begins. The compiler moves no read before a write.
///
/// The value is compiled for each round of whole vectors, and for the block at the array's end.
#[macro_export]
macro_rules! write_own_vectors {
    (twice $S:ty, $length:expr, $($rest:tt)*) => {
        $crate::write_own_vectors!(@list $S, $crate::block::has_two_rounds::<$S>($length), $length, $($rest)*)
    };
    (@list $S:ty, $has_two:expr, $length:expr, $out:expr, [] |$index:ident| $value:expr) => {
        $crate::write_own_vectors!(@all $S, $has_two, $length, $out, [*const $S; 0], [] |$index| $value)
    };
    (@list $S:ty, $has_two:expr, $length:expr, $out:expr, [$($x:ident),+] |$index:ident| $value:expr) => {
        $crate::write_own_vectors!(
            @all $S, $has_two, $length, $out, [_; [$(stringify!($x)),+].len()], [$($x),+] |$index| $value
        )
    };
    (@all $S:ty, $has_two:expr, $length:expr, $out:expr, $operands:ty, [$($x:ident),*] |$index:ident| $value:expr) => {{
        use $crate::flat::Outputs as _;
        const VECTORS: usize = $crate::block::own_vectors::<$S>();
        const STEP: usize = VECTORS * $crate::block::BLOCK_ELEMENTS;
        let (length, outputs, has_two) = ($length, $out, $has_two);
        let operands: $operands = [$($crate::flat::Flat::start($x)),*];
        let (first, end) = $crate::block::own_places::<$S>(has_two);
        if end <= length {
            let load = |first| operands.map(|x| $crate::flat::Fours::<_, VECTORS>::load(x, first));
            let loaded = load(first);
            // Without a second round this is the first again, so that no read waits for another.
            let second = load(first + if has_two { STEP } else { 0 });
            $crate::write_own_vectors!(@round VECTORS, outputs, first, loaded, [$($x),*] |$index| $value);
            if has_two {
                $crate::write_own_vectors!(@round VECTORS, outputs, first + STEP, second, [$($x),*] |$index| $value);
            }
        } else {
            let mut round = first;
            while round < end && round < length {
                let mut $index = round;
                while $index < round + VECTORS * $crate::vector::F4::LEN && $index < length {
                    let [$($x),*] =
                        operands.map(|x| $crate::flat::Fours::<_, 1>::load_part(x, $index, length).get(0));
                    outputs.store_part($value, $index, length);
                    $index += $crate::vector::F4::LEN;
                }
                round += STEP;
            }
        }
    }};
    (@round $VECTORS:expr, $outputs:expr, $first:expr, $loaded:expr, [$($x:ident),*] |$index:ident| $value:expr) => {{
        let mut values = [$outputs.zeros(); $VECTORS];
        $crate::unroll_on_gpu!(at < $VECTORS => {
            let $index = $first + at * $crate::vector::F4::LEN;
            let [$($x),*] = $loaded.map(|fours| fours.get(at));
            values[at] = $value;
        });
        $outputs.store(values, $first);
    }};
    ($S:ty, $($rest:tt)*) => { $crate::write_own_vectors!(@list $S, false, $($rest)*) };
}

/// Returns the grid of a kernel that uses [`for_own_vector`].
#[cfg(not(target_arch = "nvptx64"))]
pub fn vector_grid(length: usize) -> Result<cuda_std::launch::Grid, cuda_std::launch::Violation> {
    cuda_std::launch::Grid::cover(length, BLOCK_ELEMENTS)
}

/// Returns the grid of a kernel that uses [`write_own_vectors`] for arrays of S.
#[cfg(not(target_arch = "nvptx64"))]
pub fn own_grid<S>(length: usize) -> Result<cuda_std::launch::Grid, cuda_std::launch::Violation> {
    cuda_std::launch::Grid::cover(length, own_vectors::<S>() * BLOCK_ELEMENTS)
}

/// Returns the grid of a kernel that uses [`write_own_vectors`] with `twice`.
#[cfg(not(target_arch = "nvptx64"))]
pub fn twice_grid<S>(length: usize) -> Result<cuda_std::launch::Grid, cuda_std::launch::Violation> {
    let rounds = if has_two_rounds::<S>(length) { 2 } else { 1 };
    cuda_std::launch::Grid::cover(length, rounds * own_vectors::<S>() * BLOCK_ELEMENTS)
}

/// Returns `number / divisor` and the remainder. The GPU does not check for zero.
///
/// # Safety
/// `divisor` is not 0. The CPU checks it, the GPU does not.
#[inline(always)]
pub unsafe fn divide(number: usize, divisor: usize) -> (usize, usize) {
    // SAFETY: `divisor` is not 0.
    unsafe { assume_not_zero(divisor) };
    (number / divisor, number % divisor)
}

/// Divides like [`divide`], in 32 bits, which takes a GPU fewer instructions and registers.
///
/// # Safety
/// `divisor` is not 0. The CPU checks it, the GPU does not.
#[inline(always)]
pub unsafe fn divide_short(number: u32, divisor: u32) -> (u32, u32) {
    // SAFETY: `divisor` is not 0.
    unsafe { assume_not_zero(divisor as usize) };
    (number / divisor, number % divisor)
}

/// Combines one value of each of the block's [`BLOCK`] threads. Every thread gets the result.
/// `tile` holds one value of each warp, and may be reused after the block's next barrier.
///
/// # Safety
/// All threads of a block of [`BLOCK`] call it together.
#[inline(always)]
pub unsafe fn block_combine(tile: SharedTile<f32>, value: f32, combine: impl Fn(f32, f32) -> f32) -> f32 {
    // SAFETY: the caller guarantees that all 256 threads call this together, so all lanes of each
    // warp do.
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

/// Folds this thread's share of the block's [`CHUNK`] of `x`: four vectors, ascending. Missing
/// elements are `fill`.
///
/// ```text
/// chunk of 4096 elements          | 0 .. 1023 | 1024 .. 2047 | 2048 .. 3071 | 3072 .. 4095 |
/// thread t has 4 of each, from         4 t       1024 + 4 t     2048 + 4 t     3072 + 4 t
/// ```
///
/// # Safety
/// The block has [`BLOCK`] threads.
#[inline(always)]
pub unsafe fn chunk_fold<S: Stored>(x: &[S], start: F4, fill: f32, combine: impl Fn(f32, f32) -> f32) -> F4 {
    let first = thread::block_idx_x() as usize * CHUNK + thread::thread_idx_x() as usize * F4::LEN;
    let load = |at: usize| {
        let index = first + at * BLOCK_ELEMENTS;
        let left = if index < x.len() { x.len() - index } else { 0 };
        let part = if left >= F4::LEN { VectorPart::Whole } else { VectorPart::First(left) };
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

/// A block's part of a reduction of `[rows, cols]` over rows to `[ceil(rows / chunk), cols]`. It
/// has 32 columns of one chunk of rows, a cache line of each row. Blocks run over the columns
/// first, then over the chunks.
///
/// ```text
/// rows of the chunk   columns 0..3  4..7  ..  28..31     shared memory       finish
///  0, 32, 64, ..    thread     0      1   ..     7       32 sums, row 0      thread c (of 32) adds
///  1, 33, 65, ..               8      9   ..    15   ->  32 sums, row 1  ->  column c of the rows,
///  ..                                                    ..                  ascending
/// 31, 63, 95, ..             248    249   ..   255       32 sums, row 31
/// ```
/// The order of a column's sum: each thread adds its rows r, those with equal `r mod 32`,
/// ascending. Then these up to 32 sums are added, ascending.
#[derive(Clone, Copy)]
pub struct ColumnTile {
    /// The index of this thread's first element. If it has none, `end` or more.
    pub first: usize,
    /// The index at which the chunk ends.
    pub end: usize,
    /// The part of the thread's four columns that exists.
    pub part: VectorPart,
    /// The tile's first column, and the chunk's number.
    place: (usize, usize),
    cols: usize,
}

impl ColumnTile {
    /// The columns of a tile.
    pub const COLUMNS: u32 = TILE_QUADS * F4::LEN as u32;
    /// The rows that a block processes at once.
    pub const GROUPS: u32 = BLOCK / TILE_QUADS;
    /// The shared memory of [`ColumnTile::finish`] in bytes.
    pub const BYTES: u32 = Self::GROUPS * Self::COLUMNS * 4;

    /// Returns this block's tile of an input of `length` elements in rows of `cols`.
    ///
    /// # Safety
    /// `cols` is not 0.
    #[inline(always)]
    pub unsafe fn new(length: usize, cols: usize, chunk: usize) -> Self {
        // SAFETY: the caller guarantees that `cols` is not 0, so there is at least one tile.
        let (number, tile) = unsafe { divide(thread::block_idx_x() as usize, cols.div_ceil(Self::COLUMNS as usize)) };
        let start = tile * Self::COLUMNS as usize;
        let column = start + (thread::thread_idx_x() % TILE_QUADS) as usize * F4::LEN;
        let (begin, after) = (number * chunk * cols, (number + 1) * chunk * cols);
        let end = if after < length { after } else { length };
        let part = if cols.is_multiple_of(F4::LEN) {
            VectorPart::Whole
        } else {
            VectorPart::first(cols.saturating_sub(column))
        };
        let row = (thread::thread_idx_x() / TILE_QUADS) as usize;
        let first = if column < cols { begin + row * cols + column } else { end };
        Self { first, end, part, place: (start, number), cols }
    }

    /// Returns the distance in elements from one of the thread's rows to the next.
    #[inline(always)]
    pub fn stride(&self) -> usize {
        Self::GROUPS as usize * self.cols
    }

    /// Adds the threads' sums by column. A thread that has a column gets the column's index in the
    /// output and its sum. `tile` holds [`ColumnTile::BYTES`].
    ///
    /// # Safety
    /// All threads of a block of [`BLOCK`] call it together, once.
    #[inline(always)]
    pub unsafe fn finish(self, tile: SharedTile<f32>, sum: F4) -> Option<(usize, f32)> {
        let thread = thread::thread_idx_x();
        tile.set4(thread * F4::LEN as u32, sum);
        thread::sync_threads();
        let (start, chunk) = self.place;
        let column = start + thread as usize;
        if thread >= Self::COLUMNS || column >= self.cols {
            return None;
        }
        let mut total = tile.get(thread);
        let mut group = 1;
        while group < Self::GROUPS {
            total += tile.get(group * Self::COLUMNS + thread);
            group += 1;
        }
        Some((chunk * self.cols + column, total))
    }

    /// Returns the grid over `rows` rows of `cols`.
    #[cfg(not(target_arch = "nvptx64"))]
    pub fn grid(rows: usize, cols: usize, chunk: usize) -> Result<cuda_std::launch::Grid, cuda_std::launch::Violation> {
        use cuda_std::launch::{Grid, Size, Violation};
        let chunks = Size::of(rows).div_ceil(chunk);
        // A block computes the beginning and end of its rows before it clips them to the end of the
        // input.
        let ends = chunks.times(chunk).times(cols).at_most(usize::MAX);
        Violation::unless(ends, "chunk", "at least 1, and chunks that end where an index can", chunk)?;
        Grid::cover(chunks.times(cols.div_ceil(Self::COLUMNS as usize)), 1)
    }
}

/// Runs `body` for each row of this thread in a [`ColumnTile`](crate::block::ColumnTile),
/// ascending. `body` gets the index of the first of its four columns and the
/// [`VectorPart`](crate::vector::VectorPart) that exists. It is compiled twice, like that of
/// [`for_own_vector`].
#[macro_export]
macro_rules! for_each_row {
    ($tile:expr, |$index:ident, $part:ident| $body:block) => {{
        let (stride, end) = ($tile.stride(), $tile.end);
        let mut $index = $tile.first;
        if let $crate::vector::VectorPart::First(count) = $tile.part {
            let $part = $crate::vector::VectorPart::First(count);
            while $index < end {
                $body
                $index += stride;
            }
        } else {
            let $part = $crate::vector::VectorPart::Whole;
            // Four at a time, so that the GPU's loads overlap.
            $crate::only_on_gpu! {
                while $index + 3 * stride < end {
                    $body
                    $index += stride;
                    $body
                    $index += stride;
                    $body
                    $index += stride;
                    $body
                    $index += stride;
                }
            }
            while $index < end {
                $body
                $index += stride;
            }
        }
    }};
}
