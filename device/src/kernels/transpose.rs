//! Transposes of a batch of matrices.
//!
//! A block transposes a square of 32 x 32 elements in shared memory, so that both its reads and its
//! writes run along rows:
//!
//! ```text
//! x: lane = column            shared memory, pitch 33: banks      y: lane = row of x
//!            c0 c1 .. c31            c0  c1  c2  ..  c31                     r0 r1 .. r31
//! warp 0  r0  a  b ..           r0    0   1   2  ..   31          warp 0  c0  a  d ..
//! warp 1  r1  d  e ..      ->   r1    1   2   3  ..    0     ->   warp 1  c1  b  e ..
//! ..                            ..                                ..
//! warp 7  r7                   r31   31   0   1  ..   30          warp 7  c7
//! warp 0  r8                  a warp writes a row and reads       warp 0  c8
//! ..                          a column: 32 banks, both times      ..
//! ```
//! Invariant: an element is moved bit by bit, except that a BF16 NaN may change its payload.

use crate::block::{BLOCK, divide};
use crate::family;
use crate::stored::Stored;
use crate::tile::SharedTile;
use crate::vector::{load, store};
use crate::warp::LANES;
use cuda_std::prelude::*;
use half::bf16;

/// The rows and columns of a block's square.
const SIDE: usize = LANES as usize;
/// The elements from one row of the square to the next in shared memory. One pad per row makes a
/// column cover all 32 banks.
const PITCH: u32 = LANES + 1;
/// The elements of the square in shared memory, including the pad of each row.
const SQUARE: u32 = LANES * PITCH;
/// The rows that a block moves at once.
const WARPS: u32 = BLOCK / LANES;

family! {
    /// Computes `y[m, c, r] = x[m, r, c]`. Shapes: `x`: `[matrices, rows, cols]`, `y`: `[matrices,
    /// cols, rows]`. Overwrites `y`.
    transpose<S: Stored> { transpose_f32: f32; transpose_bf16: bf16; }
    unsafe fn(x: &[S], rows: usize, cols: usize, y: *mut S) {
        let (lane, warp) = (thread::thread_idx_x() % LANES, thread::thread_idx_x() / LANES);
        // SAFETY: the contract checks that neither dimension is 0, and that `x` and `y` hold the
        // elements of every matrix. Every access is inside the rows and columns. Both indices into
        // the square are below 32.
        unsafe {
            let (before, across) = divide(thread::block_idx_x() as usize, cols.div_ceil(SIDE));
            let (matrix, down) = divide(before, rows.div_ceil(SIDE));
            let (start, first_row, first_column) = (matrix * rows * cols, down * SIDE, across * SIDE);
            let square = SharedTile::<f32>::new(0, SQUARE);
            let column = first_column + lane as usize;
            let mut at = warp;
            while at < LANES {
                let row = first_row + at as usize;
                if row < rows && column < cols {
                    square.set(at * PITCH + lane, load(x, start + row * cols + column).widen());
                }
                at += WARPS;
            }
            thread::sync_threads();
            let row = first_row + lane as usize;
            let mut at = warp;
            while at < LANES {
                let column = first_column + at as usize;
                if row < rows && column < cols {
                    store(y, start + column * rows + row, S::narrow(square.get(lane * PITCH + at)));
                }
                at += WARPS;
            }
        }
    }
    // SAFETY: `x` has whole matrices of `rows` x `cols`, neither of which is 0, and `y` is as long.
    // Each block has one square of one matrix, and there are as many squares as blocks. The square
    // fills the shared memory.
    contract unsafe { block: BLOCK, shared: SQUARE * 4 } |k| {
        Violation::unless(k.rows > 0, "rows", "at least 1", k.rows)?;
        let all_rows = crate::warp::rows_in("x", k.x.len(), k.cols)?;
        Violation::unless(all_rows.is_multiple_of(k.rows), "x", "whole matrices of rows x cols", k.x.len())?;
        Violation::unless_length("y", k.x.len(), k.y.len())?;
        Grid::cover(Size::of(all_rows).div_ceil(k.rows).times(k.rows.div_ceil(SIDE)).times(k.cols.div_ceil(SIDE)), 1)
    }
}
