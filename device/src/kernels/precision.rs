//! Rounding of whole matrices to TF32 or BF16, as they lie or transposed, for multiplies that take it.
//!
//! Invariant: an element is rounded as [`Format`] says, whatever stands beside it. Rounded rows are as long as a multiple of
//! eight elements, with zero beyond the last.

use crate::block::divide;
use crate::contract;
use crate::format::{Bf16, Format, Tf32};
use crate::tile::SharedTile;
use crate::unroll_on_gpu;
use crate::vector::{F4, Part, load};
use cuda_std::prelude::*;

const BLOCK: u32 = 256;
/// Elements that a thread rounds.
const ELEMENTS: usize = 8;
/// Rows and columns of a block's part of a matrix that is transposed: a thread has eight elements of one column.
const ROWS: usize = 64;
const COLS: usize = BLOCK as usize * ELEMENTS / ROWS;
/// Floats between its rows in shared memory: a column lies in several banks.
const PITCH: u32 = COLS as u32 + 1;

/// The entry points: the same parameters, another format, as they lie or transposed.
macro_rules! entries {
    ($($(#[$doc:meta])* $name:ident: $round:ident to $format:ident;)*) => {$(
        $(#[$doc])*
        #[kernel]
        pub unsafe fn $name(
            x: &[f32],
            out: *mut u32,
            rows: usize,
            cols: usize,
            batches: usize,
            ld: usize,
            stride: usize,
        ) {
            // SAFETY: by the contract.
            unsafe { $round::<$format>(x, out, [rows, cols], batches, [ld, stride]) }
        }
    )*};
}

entries! {
    /// Rounds `batches` matrices of `rows` x `cols`, the elements of `x` at `z stride + i ld + j`, to TF32 in rows of `cols`
    /// rounded up to eight, one after another: `out: [batches, rows, ceil(cols / 8) * 8]`.
    round_to_tf32: round to Tf32;
    /// The same to pairs of BF16, the first in the lower half: `out: [batches, rows, ceil(cols / 8) * 4]`.
    round_to_bf16: round to Bf16;
    /// As [`round_to_tf32`], and transposes each matrix: `out: [batches, cols, ceil(rows / 8) * 8]`.
    transpose_to_tf32: transpose to Tf32;
    /// As [`round_to_bf16`], and transposes each matrix: `out: [batches, cols, ceil(rows / 8) * 4]`.
    transpose_to_bf16: transpose to Bf16;
}

/// Eight neighbours of a row for each thread.
///
/// # Safety
/// The contract has accepted the arguments.
#[inline(always)]
unsafe fn round<F: Format>(
    x: &[f32],
    out: *mut u32,
    [rows, cols]: [usize; 2],
    batches: usize,
    [ld, stride]: [usize; 2],
) {
    let chunks = cols.div_ceil(ELEMENTS);
    let chunk = thread::index_1d() as usize;
    if chunk >= batches * rows * chunks {
        return;
    }
    // SAFETY: without rows or columns there are no chunks.
    let (column, (batch, row)) = unsafe {
        let (row, chunk) = divide(chunk, chunks);
        (chunk * ELEMENTS, divide(row, rows))
    };
    let from = batch * stride + row * ld + column;
    let four = |at: usize| {
        let left = cols.saturating_sub(column + at);
        let whole = left >= F4::LEN && (from + at).is_multiple_of(F4::LEN);
        let part = if whole { Part::Whole } else { Part::first(left) };
        // SAFETY: the part of these columns that exists lies inside `x`, as the contract has checked.
        unsafe { F4::load_part(x, from + at, part, 0.0) }
    };
    let (first, second) = (four(0), four(F4::LEN));
    // SAFETY: `out` has room for each chunk, as the contract has checked.
    unsafe { F::store(first, second, out, chunk) };
}

/// A part of a matrix for each block, through shared memory: warps read rows, and write columns.
///
/// # Safety
/// The contract has accepted the arguments.
#[inline(always)]
unsafe fn transpose<F: Format>(x: &[f32], out: *mut u32, [rows, cols]: [usize; 2], _: usize, [ld, stride]: [usize; 2]) {
    let thread = thread::thread_idx_x() as usize;
    // SAFETY: no block runs without columns.
    let (above, across) = unsafe { divide(thread::block_idx_x() as usize, cols.div_ceil(COLS)) };
    let (batch, first_row, first_col) = (thread::block_idx_y() as usize, above * ROWS, across * COLS);
    // SAFETY: as declared in the contract.
    let tile = unsafe { SharedTile::<f32>::new(0, ROWS as u32 * PITCH) };

    let (row, col) = (thread / COLS, thread % COLS);
    unroll_on_gpu!(pass < ELEMENTS => {
        let row = row + pass * (ROWS / ELEMENTS);
        let mut value = 0.0;
        if first_row + row < rows && first_col + col < cols {
            // SAFETY: an element of the matrix, which lies inside `x`, as the contract has checked.
            value = unsafe { load(x, batch * stride + (first_row + row) * ld + first_col + col) };
        }
        tile.set(row as u32 * PITCH + col as u32, value);
    });
    thread::sync_threads();

    let (col, chunk) = (thread / (ROWS / ELEMENTS), thread % (ROWS / ELEMENTS));
    let (chunks, chunk_of_row) = (rows.div_ceil(ELEMENTS), first_row / ELEMENTS + chunk);
    if first_col + col >= cols || chunk_of_row >= chunks {
        return;
    }
    let four = |row: usize| {
        let at = |row: usize| tile.get(row as u32 * PITCH + col as u32);
        F4([at(row), at(row + 1), at(row + 2), at(row + 3)])
    };
    let (first, second) = (four(chunk * ELEMENTS), four(chunk * ELEMENTS + F4::LEN));
    // SAFETY: `out` has room for each chunk, as the contract has checked.
    unsafe { F::store(first, second, out, (batch * cols + first_col + col) * chunks + chunk_of_row) };
}

/// What the contracts check: the matrices lie inside `x`, and `out` has a row of `$along` elements for each of `$across`.
#[cfg(not(target_arch = "nvptx64"))]
macro_rules! check {
    ($p:ident, $format:ident, $across:ident, $along:ident) => {{
        super::matmul::checks::holds("x", $p.x.len(), $p.batches, $p.stride, [$p.rows, $p.cols], $p.ld)?;
        let chunks = $p.batches.saturating_mul($p.$across).saturating_mul($p.$along.div_ceil(ELEMENTS));
        let words = ELEMENTS / $format::PER_WORD as usize;
        Violation::unless_length("out", chunks.saturating_mul(words), $p.out.len())?;
        Violation::unless(chunks <= u32::MAX as usize - BLOCK as usize, "x", "fewer than 2^35 elements", $p.x.len())?;
        chunks
    }};
}

#[cfg(not(target_arch = "nvptx64"))]
macro_rules! parts {
    ($p:ident) => {
        Grid::new($p.rows.div_ceil(ROWS).saturating_mul($p.cols.div_ceil(COLS)), $p.batches, 1)
    };
}

contract! { round_to_tf32 { block: BLOCK } |p| {
    Grid::cover(check!(p, Tf32, rows, cols), BLOCK as usize)
}}
contract! { round_to_bf16 { block: BLOCK } |p| {
    Grid::cover(check!(p, Bf16, rows, cols), BLOCK as usize)
}}
contract! { transpose_to_tf32 { block: BLOCK, shared: 4 * ROWS as u32 * PITCH } |p| {
    check!(p, Tf32, cols, rows);
    parts!(p)
}}
contract! { transpose_to_bf16 { block: BLOCK, shared: 4 * ROWS as u32 * PITCH } |p| {
    check!(p, Bf16, cols, rows);
    parts!(p)
}}
