//! Tensor core products of lanes that read each other's operands. They add one product after
//! another, k ascending.
//!
//! The lanes of [`matmul_bf16`](crate::matmul_bf16) accumulate directly in the layout of
//! [`quads`], so they exchange nothing.

use crate::format::{Bf16, Format, Tf32};
use crate::mma::fragments::{CHUNK_WORDS, Sums, Words, quads_place, swizzled};
use crate::mma::{Factor, Sums as PackedSums};
use crate::tile::SharedTile;
use crate::vector::{F4, load_word_raw, store_words};
use crate::warp::Converged;
use cuda_std::emulator::{lanes, meet};
use cuda_std::{GpuFloat, warp};
use half::bf16;

/// A format of mma operands that a GPU has an instruction for.
pub trait Instruction {}
impl Instruction for Tf32 {}
impl Instruction for Bf16 {}

/// Accumulates the products of the warp's packed fragments; see [`mma`](crate::mma).
#[inline(always)]
#[track_caller]
pub fn multiply_packed(_: Converged, sums: &mut PackedSums, a: Factor, b: Factor) {
    let (g, t) = (warp::lane_id() as usize / 4, warp::lane_id() as usize % 4);
    let of_lane = [a, b];
    let factors = lanes(&of_lane);
    for lane in 0..4 {
        // SAFETY: each lane's fragments live until `meet` below, which all lanes reach, as
        // they reached this.
        let [[rows, _], [_, left], [_, right]] =
            unsafe { [4 * g + lane, 8 * t + lane, 8 * t + 4 + lane].map(|lane| *factors[lane]) };
        for word in 0..2 {
            let value = |factor: [u32; 2]| f32::from_bits(factor[word]);
            let (rows, [c0, c1, c2, c3], [c4, c5, c6, c7]) = (rows.map(value), left.map(value), right.map(value));
            let columns = [c0, c1, c2, c3, c4, c5, c6, c7];
            for row in 0..4 {
                for column in 0..8 {
                    sums[row][column] = GpuFloat::mul_add(rows[row], columns[column], sums[row][column]);
                }
            }
        }
    }
    meet();
}

/// Accumulates the products of squares; see [`multiply`](crate::mma::fragments::multiply).
#[track_caller]
pub fn multiply<F: Format, const ROWS: usize, const COLS: usize, const TILES: usize>(
    _: Converged,
    sums: &mut Sums<ROWS, TILES>,
    first: usize,
    a: &[[u32; 4]; ROWS],
    b: &[[u32; 4]; COLS],
) {
    let of_lane = (*a, *b);
    let factors = lanes(&of_lane);
    let (g, t) = (warp::lane_id() as usize / 4, warp::lane_id() as usize % 4);
    let chunk = F::PER_STEP / 2;
    // The lane and the chunk that have this k of a row or column, which begins at lane `first`.
    let place = |first: usize, k: u32| (first + (k % chunk / F::PER_WORD) as usize, (k / chunk) as usize);
    let left = |row: usize, half: usize, k: u32| {
        let (lane, chunk) = place(4 * g, k);
        // SAFETY: each lane's operands live until `meet` below, which all lanes reach, as they
        // reached this.
        F::value(unsafe { (&(*factors[lane]).0)[row][half + 2 * chunk] }, k % F::PER_WORD)
    };
    let right = |square: usize, at: usize, k: u32| {
        let (lane, chunk) = place(4 * (2 * t + at % 2), k);
        // SAFETY: each lane's operands live until `meet` below.
        F::value(unsafe { (&(*factors[lane]).1)[square][2 * (at / 2) + chunk] }, k % F::PER_WORD)
    };
    let mut columns = [[[0.0; 4]; MOST_K]; COLS];
    for (square, columns) in columns.iter_mut().enumerate() {
        for (k, columns) in (0..F::PER_STEP).zip(columns) {
            *columns = [0, 1, 2, 3].map(|at| right(square, at, k));
        }
    }
    for (row, sums) in sums.iter_mut().enumerate() {
        let mut rows = [[0.0; MOST_K]; 2];
        for (half, rows) in rows.iter_mut().enumerate() {
            (0..F::PER_STEP).zip(rows).for_each(|(k, value)| *value = left(row, half, k));
        }
        let rows = rows.each_ref().map(|row| &row[..F::PER_STEP as usize]);
        for (square, columns) in columns.iter().enumerate() {
            let tiles = &mut sums[2 * (first + square)..2 * (first + square) + 2];
            let mut chains = [0, 1].map(|half| [0, 1, 2, 3].map(|at: usize| tiles[at / 2][2 * half + at % 2]));
            add_rows(&mut chains, rows, columns);
            for (half, chains) in chains.iter().enumerate() {
                (0..4).for_each(|at| tiles[at / 2][2 * half + at % 2] = chains[at]);
            }
        }
    }
    meet();
}

/// The maximum k of one instruction: that of BF16.
const MOST_K: usize = Bf16::PER_STEP as usize;

/// Adds the products of two rows with `COLS` columns, k ascending. Their operands are in the order
/// of k, of which the rows have as many as they are long.
///
/// The callers are compiled once, not in each version of a kernel, so the instructions are chosen
/// here. Every version gives the same bits.
pub(super) fn add_rows<const COLS: usize>(sums: &mut [[f32; COLS]; 2], rows: [&[f32]; 2], columns: &[[f32; COLS]]) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    if std::is_x86_feature_detected!("avx2") && std::is_x86_feature_detected!("fma") {
        // SAFETY: the processor has these instructions.
        return unsafe { add_rows_fused(sums, rows, columns) };
    }
    add_rows_portably(sums, rows, columns);
}

/// [`add_rows`], where a fused multiply-add is one instruction.
#[cfg(all(target_arch = "x86_64", not(miri)))]
#[target_feature(enable = "avx2,fma")]
fn add_rows_fused<const COLS: usize>(sums: &mut [[f32; COLS]; 2], rows: [&[f32]; 2], columns: &[[f32; COLS]]) {
    add_rows_portably(sums, rows, columns);
}

#[inline(always)]
fn add_rows_portably<const COLS: usize>(
    sums: &mut [[f32; COLS]; 2],
    [upper, lower]: [&[f32]; 2],
    columns: &[[f32; COLS]],
) {
    // All sums are independent, so a CPU adds those of a row as a vector.
    let mut chains = *sums;
    for ((&upper, &lower), columns) in upper.iter().zip(lower).zip(columns) {
        for (at, &column) in columns.iter().enumerate() {
            chains[0][at] = GpuFloat::mul_add(upper, column, chains[0][at]);
            chains[1][at] = GpuFloat::mul_add(lower, column, chains[1][at]);
        }
    }
    *sums = chains;
}

/// Accumulates the products of the range of k in a lane's accumulators, which are in the layout of
/// [`quads`], k ascending. `origin` is the warp's first row and column. `left` and `right` return
/// an element by its row or column and its k.
#[inline(always)]
pub fn add_products<const ROWS: usize, const TILES: usize>(
    sums: &mut Sums<ROWS, TILES>,
    [first_row, first_col]: [u32; 2],
    range: core::ops::Range<u32>,
    left_at: impl Fn(u32, u32) -> f32,
    right_at: impl Fn(u32, u32) -> f32,
) {
    let [line, column] = quads_place();
    for k in range {
        let mut left = [[0.0; 2]; ROWS];
        for (row, left) in left.iter_mut().enumerate() {
            *left = [0, 8].map(|below| left_at(first_row + 16 * row as u32 + line + below, k));
        }
        // Both rows of two tiles have the same columns.
        let mut right = [0.0; 4];
        for tile in 0..TILES {
            if tile % 2 == 0 {
                let first = first_col + 8 * tile as u32 + column;
                right = [0, 1, 2, 3].map(|at| right_at(first + at, k));
            }
            for (sums, left) in sums.iter_mut().zip(left) {
                for (sum, right) in sums[tile].iter_mut().zip(right) {
                    *sum = GpuFloat::mul_add(left[tile % 2], right, *sum);
                }
            }
        }
    }
}

/// Returns the accumulators of two adjacent tiles, which already are in the layout of a GPU's
/// `quads`: four neighboring columns in row g and four in row g + 8 of one tile.
#[inline(always)]
pub fn quads(_: Converged, tiles: [[f32; 4]; 2]) -> [F4; 2] {
    tiles.map(F4)
}

/// Rounds the [`quads`] and writes them to `out`, in the rows whose 16 columns begin at these
/// indices.
///
/// # Safety
/// The columns may be written, and begin on a boundary of four elements.
#[inline(always)]
pub unsafe fn write_quads(_: Converged, tiles: [[f32; 4]; 2], out: *mut bf16, at: [usize; 2]) {
    let at = at.map(|at| at + quads_place()[1] as usize);
    for (words, at) in tiles.map(Bf16::words).into_iter().zip(at) {
        // SAFETY: the columns may be written, on such a boundary: the function's contract.
        unsafe { store_words(out, at, words) };
    }
}

/// Rounds the [`quads`] and writes them to 16 rows of `chunks` chunks, in chunks `2 pair` and `2
/// pair + 1`, [`swizzled`].
#[track_caller]
pub fn put_words(rows: SharedTile<u32>, chunks: u32, pair: u32, _: u32, tiles: [[f32; 4]; 2]) {
    let [row, column] = quads_place();
    for (half, words) in (0..).zip(tiles.map(Bf16::words)) {
        let word = swizzled(chunks, row + 8 * half, 2 * pair + column / 8) * CHUNK_WORDS + column % 8 / 2;
        words.into_iter().zip(word..).for_each(|(value, word)| rows.set(word, value));
    }
}

/// Writes the f32 sums of two adjacent tiles, pair `pair` of their rows, to rows of `chunks`
/// chunks. `lane` is the lane's own number.
#[inline(always)]
pub fn put_floats(rows: SharedTile<u32>, chunks: u32, pair: u32, _: u32, tiles: [[f32; 4]; 2]) {
    let [row, column] = quads_place();
    for (half, values) in (0..).zip(tiles) {
        let chunk = swizzled(chunks, row + 8 * half, 4 * pair + column / 4);
        rows.set_chunk(chunk * CHUNK_WORDS, values.map(f32::to_bits));
    }
}

/// Reads `c` at a lane's accumulators of two adjacent tiles, in the rows whose 16 columns begin at
/// these indices.
///
/// # Safety
/// The columns may be read, and begin on a boundary of four elements.
#[inline(always)]
pub unsafe fn read_words(c: *const bf16, _: u32, at: [usize; 2]) -> [Words; 2] {
    // SAFETY: the columns may be read, on such a boundary: the function's contract.
    at.map(|at| [0, 2].map(|pair| unsafe { load_word_raw(c, at + quads_place()[1] as usize + pair) }))
}

/// Reads the bias of a lane's accumulators of two adjacent tiles, whose 16 columns begin at this
/// index.
///
/// # Safety
/// The columns lie inside `bias`, and begin on a boundary of four elements.
#[inline(always)]
pub unsafe fn read_bias(bias: &[f32], _: u32, at: usize) -> [[f32; 4]; 2] {
    // SAFETY: the columns lie inside `bias`, on such a boundary: the function's contract.
    unsafe { [F4::load(bias, at + quads_place()[1] as usize).0; 2] }
}
