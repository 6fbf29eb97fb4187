//! Rows and the lanes of a warp that share them.
//!
//! A row of `cols` columns is given to the fewest lanes, a power of two up to 32, that leave at most four vectors to
//! each; a warp takes several short rows. Invariant: the order of every operation follows from `cols` alone. Column `c`
//! belongs to lane `(c / 4) % lanes` and to place `c % 4` of its vector, whether the row is read by vectors or, when
//! `cols` is no multiple of four, element by element. Every lane of the row ends with the same bits.

use crate::vector::F4;
use cuda_std::{thread, warp};

/// Lanes in a warp.
pub const LANES: u32 = 32;
/// Threads in a block of the kernels that give each row its lanes.
pub const ROW_BLOCK: u32 = 128;

/// This thread's row, and its place among the row's lanes.
#[derive(Clone, Copy)]
pub struct Row {
    /// The row's number.
    pub number: usize,
    /// The index of the row's first element.
    pub start: usize,
    /// The first of this lane's columns.
    pub first: usize,
    /// Columns from one of this lane's vectors to the next.
    pub stride: usize,
    lanes: u32,
    mask: u32,
}

impl Row {
    /// This thread's row among the `length` elements in rows of `cols`; none beyond the end.
    #[inline(always)]
    pub fn new(length: usize, cols: usize) -> Option<Self> {
        Self::after(thread::block_idx_x() as usize * (ROW_BLOCK / lanes_of(cols)) as usize, length, cols)
    }

    /// This thread's row when the block's first threads have row `first`, the next ones the next.
    #[inline(always)]
    pub fn after(first: usize, length: usize, cols: usize) -> Option<Self> {
        let lanes = lanes_of(cols);
        let lane = warp::lane_id();
        let number = first + (thread::thread_idx_x() / lanes) as usize;
        let start = number * cols;
        if start >= length {
            return None;
        }
        let first = (lane & (lanes - 1)) as usize * F4::LEN;
        let mask = (u32::MAX >> (LANES - lanes)) << (lane & !(lanes - 1));
        Some(Self { number, start, first, stride: lanes as usize * F4::LEN, lanes, mask })
    }

    /// Whether this lane is the one that writes the row's result.
    #[inline(always)]
    pub fn is_first_lane(self) -> bool {
        self.first == 0
    }

    /// Combines the lanes' values pairwise, at distances lanes / 2, ..., 2, 1. `combine` is commutative.
    ///
    /// # Safety
    /// All lanes of the row call it together.
    #[inline(always)]
    pub unsafe fn combine<T: Copy>(self, value: T, combine: impl Fn(T, T) -> T) -> T {
        // SAFETY: the mask names the lanes of the row, as the caller promises.
        unsafe { combine_lanes(self.mask, self.lanes, value, combine) }
    }

    /// The sum of the lanes' vectors: a lane's four as ((0 + 1) + (2 + 3)), then the lanes.
    ///
    /// # Safety
    /// All lanes of the row call it together.
    #[inline(always)]
    pub unsafe fn sum(self, value: F4) -> f32 {
        // SAFETY: the caller's promise.
        unsafe { self.combine(sum4(value), add) }
    }

    /// The largest of the lanes' values; a NaN if there is one.
    ///
    /// # Safety
    /// All lanes of the row call it together.
    #[inline(always)]
    pub unsafe fn max(self, value: F4) -> f32 {
        // SAFETY: the caller's promise.
        unsafe { self.combine(max4(value), max) }
    }

    /// The grid over `length` elements in rows of `cols`, or what is wrong with them.
    #[cfg(not(target_arch = "nvptx64"))]
    pub fn grid(
        argument: &'static str,
        length: usize,
        cols: usize,
    ) -> Result<cuda_std::launch::Grid, cuda_std::launch::Violation> {
        cuda_std::launch::Grid::cover(rows_in(argument, length, cols)?, (ROW_BLOCK / lanes_of(cols)) as usize)
    }
}

/// The lanes that share a row of `cols`.
#[inline(always)]
pub fn lanes_of(cols: usize) -> u32 {
    const SHARE: usize = 4 * F4::LEN;
    if cols > LANES as usize / 2 * SHARE { LANES } else { cols.div_ceil(SHARE).next_power_of_two() as u32 }
}

/// The rows of `cols` elements in `length`, or why they do not divide it.
#[cfg(not(target_arch = "nvptx64"))]
pub fn rows_in(argument: &'static str, length: usize, cols: usize) -> Result<usize, cuda_std::launch::Violation> {
    use cuda_std::launch::Violation;
    Violation::unless(cols > 0, "cols", "at least 1", cols)?;
    if !length.is_multiple_of(cols) {
        return Err(Violation::new(
            argument,
            std::format!("a multiple of cols = {cols} elements"),
            std::format!("{length}"),
        ));
    }
    Ok(length / cols)
}

/// Runs `body` for each vector of this lane in a [`Row`] of `cols`, ascending, with its first column and its
/// [`Part`](crate::vector::Part). The body is compiled once for whole vectors and once for single elements; a macro,
/// because a closure may stay a call, compiled without the CPU's fused multiply-add.
#[macro_export]
macro_rules! for_each_vector {
    ($row:expr, $cols:expr, |$column:ident, $part:ident| $body:block) => {{
        let (cols, stride) = ($cols, $row.stride);
        let mut $column = $row.first;
        if cols.is_multiple_of($crate::vector::F4::LEN) {
            let $part = $crate::vector::Part::Whole;
            // Four at a time where the row is long, so that the GPU's loads overlap.
            #[cfg(target_arch = "nvptx64")]
            while $column + 3 * stride < cols {
                $body
                $column += stride;
                $body
                $column += stride;
                $body
                $column += stride;
                $body
                $column += stride;
            }
            while $column < cols {
                $body
                $column += stride;
            }
        } else {
            while $column < cols {
                let $part = $crate::vector::Part::first(cols - $column);
                $body
                $column += stride;
            }
        }
    }};
}

/// Combines the values of the lanes in `mask` pairwise, at distances lanes / 2, ..., 2, 1; `lanes` is a power of two.
///
/// # Safety
/// The lanes in `mask`, a segment of `lanes`, call it together.
#[inline(always)]
pub unsafe fn combine_lanes<T: Copy>(mask: u32, lanes: u32, value: T, combine: impl Fn(T, T) -> T) -> T {
    let mut value = value;
    let mut distance = lanes / 2;
    while distance > 0 {
        // SAFETY: the caller's promise; the source lane lies in the same segment.
        let (other, _) = unsafe { warp::warp_shuffle_xor(mask, value, distance, LANES) };
        value = combine(value, other);
        distance /= 2;
    }
    value
}

/// `a + b`.
#[inline(always)]
pub fn add(a: f32, b: f32) -> f32 {
    a + b
}

/// The larger of two; a NaN if either is one.
#[inline(always)]
pub fn max(a: f32, b: f32) -> f32 {
    let larger = if b > a { b } else { a };
    if b.is_nan() { b } else { larger }
}

/// The sum of a vector's four, as ((0 + 1) + (2 + 3)).
#[inline(always)]
pub fn sum4(v: F4) -> f32 {
    let [a, b, c, d] = v.0;
    (a + b) + (c + d)
}

/// The largest of a vector's four; a NaN if there is one.
#[inline(always)]
pub fn max4(v: F4) -> f32 {
    let [a, b, c, d] = v.0;
    max(max(a, b), max(c, d))
}

/// A number that is larger for a larger `value`, and for equal values for the smaller `column`. A NaN is larger than
/// any number, -0 equals 0; never 0 itself for a column below 2^32 - 1.
#[inline(always)]
pub fn rank(value: f32, column: u32) -> u64 {
    let bits = (value + 0.0).to_bits();
    let ordered = if bits >> 31 == 0 { bits | 0x8000_0000 } else { !bits };
    let ordered = if value.is_nan() { u32::MAX } else { ordered };
    (u64::from(ordered) << 32) | u64::from(!column)
}

/// The column of a [`rank`].
#[inline(always)]
pub fn rank_column(rank: u64) -> u32 {
    !(rank as u32)
}
