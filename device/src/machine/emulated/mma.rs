//! Tensor core products of lanes that read each other's operands. Each lane adds its own sums by
//! the rule of an instruction, [`rule`].
//!
//! The lanes of [`matmul_bf16`](crate::matmul_bf16) accumulate directly in the layout of
//! [`quads`], so they exchange nothing.

use crate::format::{Bf16, Format, Tf32};
use crate::mma::fragments::{CHUNK_WORDS, Sums, Words, quads_place, swizzled};
use crate::mma::{Factor, Sums as PackedSums, rule};
use crate::tile::SharedTile;
use crate::vector::{F4, load_word_raw, store_words};
use crate::warp::Converged;
use cuda_std::emulator::{lanes, meet};
use cuda_std::warp;
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
    let (mut rows, mut columns) = ([[0.0; STEP]; 4], [[0.0; 8]; STEP]);
    for lane in 0..4 {
        // SAFETY: each lane's fragments live until `meet` below, which all lanes reach, as
        // they reached this.
        let [[left, _], [_, near], [_, far]] =
            unsafe { [4 * g + lane, 8 * t + lane, 8 * t + 4 + lane].map(|lane| *factors[lane]) };
        for word in 0..2 {
            let k = 2 * lane + word;
            for at in 0..4 {
                rows[at][k] = f32::from_bits(left[at][word]);
                columns[k][at] = f32::from_bits(near[at][word]);
                columns[k][at + 4] = f32::from_bits(far[at][word]);
            }
        }
    }
    for (sums, rows) in sums.as_chunks_mut::<2>().0.iter_mut().zip(rows.as_chunks::<2>().0) {
        rule::add(sums, rows.each_ref(), &columns);
    }
    meet();
}

/// The words of k that an instruction multiplies.
const STEP: usize = crate::mma::STEP as usize;

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
        for (square, columns) in columns.iter().enumerate() {
            let tiles = &mut sums[2 * (first + square)..2 * (first + square) + 2];
            let mut both = [0, 1].map(|half| [0, 1, 2, 3].map(|at: usize| tiles[at / 2][2 * half + at % 2]));
            add_rows(&mut both, F::PER_STEP as usize, &rows, columns);
            for (half, both) in both.iter().enumerate() {
                (0..4).for_each(|at| tiles[at / 2][2 * half + at % 2] = both[at]);
            }
        }
    }
    meet();
}

/// The maximum k of one instruction: that of BF16.
const MOST_K: usize = Bf16::PER_STEP as usize;

/// Adds the products of one instruction, of the first `depth` k.
fn add_rows(sums: &mut [[f32; 4]; 2], depth: usize, rows: &[[f32; MOST_K]; 2], columns: &[[f32; 4]; MOST_K]) {
    match (rows[0].first_chunk(), rows[1].first_chunk(), columns.first_chunk()) {
        (Some(upper), Some(lower), Some(columns)) if depth == STEP => {
            rule::add::<4, STEP>(sums, [upper, lower], columns);
        }
        _ => rule::add(sums, rows.each_ref(), columns),
    }
}

/// Accumulates the products of one instruction of BF16, from `first_k` on, in a lane's
/// accumulators, which are in the layout of [`quads`]. `origin` is the warp's first row and column.
/// `left_at` and `right_at` return an element by its row or column and its k.
#[inline(always)]
pub fn add_products<const ROWS: usize, const TILES: usize>(
    sums: &mut Sums<ROWS, TILES>,
    [first_row, first_col]: [u32; 2],
    first_k: u32,
    left_at: impl Fn(u32, u32) -> f32,
    right_at: impl Fn(u32, u32) -> f32,
) {
    let [line, column] = quads_place();
    let mut left = [[[0.0; MOST_K]; 2]; ROWS];
    for (row, left) in left.iter_mut().enumerate() {
        for (half, left) in left.iter_mut().enumerate() {
            let row = first_row + 16 * row as u32 + line + 8 * half as u32;
            (first_k..).zip(left).for_each(|(k, left)| *left = left_at(row, k));
        }
    }
    for pair in 0..TILES / 2 {
        let first = first_col + 16 * pair as u32 + column;
        let mut right = [[0.0; 4]; MOST_K];
        (first_k..).zip(&mut right).for_each(|(k, right)| *right = [0, 1, 2, 3].map(|at| right_at(first + at, k)));
        for (sums, left) in sums.iter_mut().zip(&left) {
            // Both rows of two tiles have the same columns.
            let Some(both) = sums[2 * pair..].first_chunk_mut() else { continue };
            rule::add(both, left.each_ref(), &right);
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
