//! Rows and the lanes of a warp that share them.
//!
//! A row of `cols` columns gets the fewest lanes, a power of two up to 32, that leave at most four
//! vectors to each. Several short rows share a warp:
//!
//! ```text
//! cols          1..16   17..32   33..64   65..128   129..256   257..
//! lanes           1        2        4        8         16        32
//! rows a warp    32       16        8        4          2         1
//!
//! cols = 40:  lane 0  lane 1  lane 2  lane 3 | lane 4 ..  the tree of a row's sum
//!   columns    0..3    4..7    8..11  12..15 | row 1      a lane:   v = (0 + 1) + (2 + 3)
//!             16..19  20..23  24..27  28..31 |            2 apart:  v0 + v2, v1 + v3
//!             32..35  36..39    -       -    |            1 apart:  (v0 + v2) + (v1 + v3)
//! ```
//! Invariant: the order of every operation depends only on `cols`. Column `c` belongs to lane `(c /
//! 4) % lanes` and to element `c % 4` of its vector. Lanes read the row by vectors, or element by
//! element if `cols` is not a multiple of four; the order is the same. Every lane of the row ends
//! with the same bits.
//!
//! A kernel that makes several passes over a row reads it once, up to 1024 columns: its lanes hold
//! their [`RowFragment`]s in registers. The operations and their order are the same if a share is
//! read again.

use crate::for_each_vector;
use crate::machine::warp as machine;
use crate::stored::Stored;
use crate::vector::{F4, VectorPart};
use cuda_std::{thread, warp};

/// The lanes in a warp.
pub const LANES: u32 = 32;
/// The threads in a block of the kernels that give each row its own lanes.
pub const ROW_BLOCK: u32 = 128;
/// The columns of the longest row that lanes hold in registers: eight vectors a lane.
pub const REG_COLUMNS: usize = 8 * F4::LEN * LANES as usize;

/// This thread's row, and its place among the row's lanes.
///
/// It is also proof that the row's lanes execute the code that holds it together. The code that
/// makes a row promises this: up to its last use, its lanes make the same calls in the same order.
#[derive(Clone, Copy)]
pub struct Row {
    /// The row's number.
    pub number: usize,
    /// The index of the row's first element.
    pub start: usize,
    /// The first of this lane's columns.
    pub first: usize,
    /// The distance in columns from one of this lane's vectors to the next.
    pub stride: usize,
    lanes: u32,
    mask: u32,
}

impl Row {
    /// Returns this thread's row among the `length` elements in rows of `cols`. Returns none past
    /// the end.
    ///
    /// # Safety
    /// The lanes of a row make the call together, and up to the row's last use the same calls in
    /// the same order.
    #[inline(always)]
    pub unsafe fn new(length: usize, cols: usize) -> Option<Self> {
        // SAFETY: the lanes of a row execute this together.
        unsafe { Self::after(thread::block_idx_x() as usize * rows_at_once(ROW_BLOCK, cols), length, cols) }
    }

    /// Returns this thread's row, if the block's first threads have row `first`, the next threads
    /// the next row, and so on.
    ///
    /// # Safety
    /// The caller meets the requirements of [`Row::new`].
    #[inline(always)]
    pub unsafe fn after(first: usize, length: usize, cols: usize) -> Option<Self> {
        let lanes = lanes_of(cols);
        let lane = warp::lane_id();
        let number = first + (thread::thread_idx_x() >> lanes.trailing_zeros()) as usize;
        let start = number * cols;
        if start >= length {
            return None;
        }
        let first = (lane & (lanes - 1)) as usize * F4::LEN;
        let mask = (u32::MAX >> (LANES - lanes)) << (lane & !(lanes - 1));
        Some(Self { number, start, first, stride: lanes as usize * F4::LEN, lanes, mask })
    }

    /// Returns the row `rows` further down, which may lie past the end.
    #[inline(always)]
    pub fn later(self, rows: usize, cols: usize) -> Self {
        Self { number: self.number + rows, start: self.start + rows * cols, ..self }
    }

    /// Returns the same row, for a row that has a whole warp. The lane count is then a compile-time
    /// constant.
    ///
    /// # Safety
    /// The row has a whole warp: its columns are more than 256.
    #[inline(always)]
    pub unsafe fn of_whole_warp(self) -> Self {
        let stride = LANES as usize * F4::LEN;
        Self { first: warp::lane_id() as usize * F4::LEN, stride, lanes: LANES, mask: u32::MAX, ..self }
    }

    /// True if this lane writes the row's result.
    #[inline(always)]
    pub fn is_first_lane(self) -> bool {
        self.first == 0
    }

    /// Combines the lanes' values pairwise, at distances lanes / 2, ..., 2, 1. `combine` is
    /// commutative.
    #[inline(always)]
    pub fn combine<T: LaneValue>(self, value: T, combine: impl Fn(T, T) -> T) -> T {
        // SAFETY: the mask names the lanes of the row, and the row shows that all of them execute
        // this.
        unsafe { combine_lanes(self.mask, self.lanes, value, combine) }
    }

    /// Returns the sum of the lanes' vectors: a lane's four as ((0 + 1) + (2 + 3)), then the lanes.
    #[inline(always)]
    pub fn sum(self, value: F4) -> f32 {
        self.combine(sum4(value), add)
    }

    /// Returns the largest of the lanes' values, or NaN if any is NaN.
    #[inline(always)]
    pub fn max(self, value: F4) -> f32 {
        self.combine(max4(value), max)
    }

    /// Returns the grid over `length` elements in rows of `cols`, or the violation.
    #[cfg(not(target_arch = "nvptx64"))]
    pub fn grid(
        argument: &'static str,
        length: usize,
        cols: usize,
    ) -> Result<cuda_std::launch::Grid, cuda_std::launch::Violation> {
        cuda_std::launch::Grid::cover(rows_in(argument, length, cols)?, rows_at_once(ROW_BLOCK, cols))
    }
}

/// A lane's vectors of a row. If `REGS` is above 0, registers hold them: `REGS` vectors, which must
/// be all. If `REGS` is 0, they are read each time.
///
/// ```text
/// 512 columns, a whole warp, REGS = 4:   held[0]   held[1]    held[2]    held[3]
///                              lane 0     0..3     128..131   256..259   384..387
///                              lane 1     4..7     132..135   260..263   388..391
///                                  ..
///                              lane 31  124..127   252..255   380..383   508..511
/// ```
#[derive(Clone, Copy)]
pub struct RowFragment<'k, const REGS: usize, S> {
    values: &'k [S],
    start: usize,
    fill: f32,
    held: [F4; REGS],
}

impl<'k, const REGS: usize, S: Stored> RowFragment<'k, REGS, S> {
    /// Loads this lane's share of the `cols` elements of `values` at `start`, with `fill` past
    /// them. All reads are issued before the lane waits for the first.
    ///
    /// # Safety
    /// The row lies inside `values`. If `REGS` is not 0, it is the one that
    /// [`with_held`](crate::with_held) selects.
    #[inline(always)]
    pub unsafe fn new(row: Row, values: &'k [S], start: usize, cols: usize, fill: f32) -> Self {
        let mut held = [F4::splat(fill); REGS];
        if REGS > 0 {
            for_each_vector!(REGS, row, cols, |at, column, part| {
                // SAFETY: the column is inside the row.
                held[at] = unsafe { F4::load_part(values, start + column, part, fill) };
            });
        }
        Self { values, start, fill, held }
    }

    /// Returns the vector at `column`, the lane's vector number `at`.
    ///
    /// # Safety
    /// `at`, `column` and `part` are as in [`for_each_vector`] over the same row.
    #[inline(always)]
    pub unsafe fn get(&self, at: usize, column: usize, part: VectorPart) -> F4 {
        if REGS > 0 {
            return self.held[at];
        }
        // SAFETY: the column is inside the row.
        unsafe { F4::load_part(self.values, self.start + column, part, self.fill) }
    }

    /// Replaces a held vector, so that a later pass reads a result in place of its operand. Does
    /// nothing if `REGS` is 0.
    #[inline(always)]
    pub fn hold(&mut self, at: usize, value: F4) {
        if REGS > 0 {
            self.held[at] = value;
        }
    }
}

/// Returns the number of lanes that share a row of `cols`. It rounds up as a `u32`, because
/// rust-cuda counts the bits of other types wrongly (device/rust-cuda/README.md).
#[inline(always)]
pub fn lanes_of(cols: usize) -> u32 {
    const SHARE: usize = 4 * F4::LEN;
    if cols > LANES as usize / 2 * SHARE { LANES } else { (cols.div_ceil(SHARE) as u32).next_power_of_two() }
}

/// Returns the number of rows of `cols` that a block of `threads` threads, a power of two,
/// processes at once.
#[inline(always)]
pub fn rows_at_once(threads: u32, cols: usize) -> usize {
    (threads >> lanes_of(cols).trailing_zeros()) as usize
}

/// Returns the number of rows of `cols` elements in `length`, or the violation if they do not
/// divide it.
#[cfg(not(target_arch = "nvptx64"))]
pub fn rows_in(
    argument: &'static str,
    length: usize,
    cols: impl Into<cuda_std::launch::Size>,
) -> Result<usize, cuda_std::launch::Violation> {
    use cuda_std::launch::Violation;
    let cols = cols.into();
    Violation::unless(!cols.is(0), "cols", "at least 1", cols)?;
    match cols.number().filter(|cols| length.is_multiple_of(*cols)) {
        Some(cols) => Ok(length / cols),
        None => Err(Violation::new(
            argument,
            std::format!("a multiple of cols = {cols} elements"),
            std::format!("{length}"),
        )),
    }
}

/// Runs `body` for each vector of this lane in a [`Row`] of `cols`, ascending, with its first
/// column and its [`VectorPart`](crate::vector::VectorPart).
///
/// The body is compiled twice: for whole vectors, and for single elements. It is a macro, because a
/// closure may stay a call that is compiled without the CPU's fused multiply-add.
///
/// If a constant `REGS` precedes the row, the body also gets the vector's number, first. If `REGS`
/// is not 0, the body runs for exactly `REGS` vectors, and those past the row have an empty part.
/// The loop is unrolled, so that arrays indexed by the number stay in registers.
#[macro_export]
macro_rules! for_each_vector {
    ($held:expr, $row:expr, $cols:expr, |$at:ident, $column:ident, $part:ident| $body:block) => {{
        if $held > 0 {
            let (cols, first, stride) = ($cols, $row.first, $row.stride);
            $crate::unroll_on_gpu!($at < $held => {
                let $column = first + $at * stride;
                let $part = if $column < cols { $crate::vector::VectorPart::Whole } else { $crate::vector::VectorPart::First(0) };
                $body
            });
        } else {
            let $at = 0_usize;
            $crate::for_each_vector!($row, $cols, |$column, $part| $body);
        }
    }};
    ($row:expr, $cols:expr, |$column:ident, $part:ident| $body:block) => {{
        let (cols, stride) = ($cols, $row.stride);
        let mut $column = $row.first;
        if cols.is_multiple_of($crate::vector::F4::LEN) {
            let $part = $crate::vector::VectorPart::Whole;
            // Four at a time for a long row, so that the GPU's loads overlap.
            $crate::only_on_gpu! {
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
            }
            while $column < cols {
                $body
                $column += stride;
            }
        } else {
            while $column < cols {
                let $part = $crate::vector::VectorPart::first(cols - $column);
                $body
                $column += stride;
            }
        }
    }};
}

/// Calls `function::<REGS, _>(row, arguments)` with the number of vectors that a lane holds of a
/// row of `cols`. See [`RowFragment`](crate::warp::RowFragment).
///
/// ```text
/// cols        no multiple of four   up to 512   516..1024          more
/// REGS                 0                4       8, a whole warp    0: lanes read the row again
/// ```
#[macro_export]
macro_rules! with_held {
    ($row:expr, $cols:expr, $function:ident($($argument:expr),* $(,)?)) => {{
        let (row, cols): ($crate::warp::Row, usize) = ($row, $cols);
        if !cols.is_multiple_of($crate::vector::F4::LEN) || cols > $crate::warp::REG_COLUMNS {
            $function::<0, _>(row, $($argument),*)
        } else if cols > $crate::warp::REG_COLUMNS / 2 {
            $function::<8, _>(row.of_whole_warp(), $($argument),*)
        } else {
            $function::<4, _>(row, $($argument),*)
        }
    }};
}

/// A value that lanes exchange.
///
/// # Safety
/// It has 4 or 8 bytes, none of them padding, and one lane's value is valid in any other.
pub unsafe trait LaneValue: Copy {}
// SAFETY: numbers of 4 and 8 bytes, and arrays of them, have no padding. Every bit pattern is
// valid. An array of another size does not compile in an exchange.
unsafe impl LaneValue for f32 {}
// SAFETY: as above.
unsafe impl LaneValue for u32 {}
// SAFETY: as above.
unsafe impl LaneValue for u64 {}
// SAFETY: as above.
unsafe impl<const N: usize> LaneValue for [u32; N] {}

/// Proof that all lanes of the warp execute the code that holds it together, so that they may
/// exchange values.
///
/// The code that makes a token promises this for all its uses: from there to the last use, the
/// lanes make the same calls in the same order. A token takes no register.
#[derive(Clone, Copy)]
pub struct Converged(());

/// Converges the warp up to the next branch.
///
/// All lanes must execute some instructions together, and the compiler cannot determine which. It
/// may copy code between two branches on one condition into both. A shuffle is marked as such an
/// instruction ("convergent"), and the compiler copies no code around one. The result of this
/// shuffle is unused.
///
/// # Safety
/// All lanes of the warp make the call. Up to the token's last use, they make the same calls in the
/// same order.
#[inline(always)]
pub unsafe fn converge_warp() -> Converged {
    // SAFETY: all lanes of the warp execute this.
    unsafe { machine::converge() };
    Converged(())
}

impl Converged {
    /// Returns a token without an instruction.
    ///
    /// # Safety
    /// All lanes of the warp make the call. Up to the token's last use, they make the same calls in
    /// the same order.
    #[inline(always)]
    pub unsafe fn assume() -> Self {
        Self(())
    }

    /// Converges the warp again, after branches that the compiler may have moved.
    #[inline(always)]
    pub fn again(self) -> Self {
        // SAFETY: all lanes of the warp execute this: the token shows it.
        unsafe { converge_warp() }
    }

    /// Returns the `value` of the lane whose number is this lane's xor `distance`, a power of two.
    #[inline(always)]
    #[track_caller]
    pub fn shfl_xor<T: LaneValue>(self, value: T, distance: u32) -> T {
        // SAFETY: all lanes of the warp execute this: the token shows it.
        unsafe { machine::shfl_xor(u32::MAX, value, distance) }
    }

    /// Combines the values of each segment of `lanes` lanes pairwise, at distances lanes / 2, ...,
    /// 2, 1. `combine` is commutative, so every lane of a segment gets the same result.
    #[inline(always)]
    pub fn combine<T: LaneValue>(self, lanes: u32, value: T, combine: impl Fn(T, T) -> T) -> T {
        // SAFETY: all lanes of the warp execute this: the token shows it.
        unsafe { combine_lanes(u32::MAX, lanes, value, combine) }
    }

    /// Returns the value of the first lane, which all lanes have. Then the assembler knows that
    /// they are the same, and keeps what follows from them in registers that the lanes share. Wgmma
    /// reads the places of its operands there, and only its kernels use this.
    #[cfg(any(not(target_arch = "nvptx64"), cuda_arch = "sm_90a"))]
    #[inline(always)]
    #[track_caller]
    pub fn uniform(self, value: u32) -> u32 {
        // SAFETY: all lanes of the warp execute this: the token shows it.
        unsafe { warp::warp_shuffle_idx(u32::MAX, value, 0, LANES).0 }
    }

    /// Returns true if every lane passed true.
    #[inline(always)]
    #[track_caller]
    pub fn all(self, predicate: bool) -> bool {
        // SAFETY: all lanes of the warp execute this: the token shows it.
        unsafe { warp::warp_vote_all(u32::MAX, predicate) }
    }
}

/// Combines the values of the lanes in `mask` pairwise, at distances lanes / 2, ..., 2, 1. `lanes`
/// is a power of two. `combine` is commutative, so every lane gets the same result.
///
/// # Safety
/// The lanes in `mask`, a segment of `lanes`, call it together, with the same `T`, which has no
/// padding.
#[inline(always)]
pub unsafe fn combine_lanes<T: Copy>(mask: u32, lanes: u32, value: T, combine: impl Fn(T, T) -> T) -> T {
    // SAFETY: the lanes in `mask` execute this together.
    unsafe { machine::combine_lanes(mask, lanes, value, combine) }
}

/// Returns `a + b`.
#[inline(always)]
pub fn add(a: f32, b: f32) -> f32 {
    a + b
}

/// Returns the larger of two. A NaN may be dropped or returned.
#[inline(always)]
pub fn larger(a: f32, b: f32) -> f32 {
    if b < a { a } else { b }
}

/// Returns the larger of two, or NaN if either is NaN.
#[inline(always)]
pub fn max(a: f32, b: f32) -> f32 {
    let larger = if b > a { b } else { a };
    if b.is_nan() { b } else { larger }
}

/// Returns the sum of a vector's four, as ((0 + 1) + (2 + 3)).
#[inline(always)]
pub fn sum4(v: F4) -> f32 {
    let [a, b, c, d] = v.0;
    (a + b) + (c + d)
}

/// Returns the largest of a vector's four, or NaN if any is NaN.
#[inline(always)]
pub fn max4(v: F4) -> f32 {
    let [a, b, c, d] = v.0;
    max(max(a, b), max(c, d))
}

/// Returns a sort key: it is larger for a larger `value` and, among equal values, for a smaller
/// `column`. A NaN is larger than any number, and -0 equals 0. The result is never 0.
#[inline(always)]
pub fn rank(value: f32, column: u32) -> u64 {
    let bits = (value + 0.0).to_bits();
    let ordered = if bits >> 31 == 0 { bits | 0x8000_0000 } else { !bits };
    let ordered = if value.is_nan() { u32::MAX } else { ordered };
    (u64::from(ordered) << 32) | u64::from(!column)
}

/// Returns the column of a [`rank`].
#[inline(always)]
pub fn rank_column(rank: u64) -> u32 {
    !(rank as u32)
}
