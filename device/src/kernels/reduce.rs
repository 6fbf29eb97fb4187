//! Reductions: sums over columns, over rows and over everything, the squared norm, maxima and the
//! argmax of a row.
//!
//! A row's lanes reduce it over its columns; see [`warp`](crate::warp). Over rows or everything,
//! one launch reduces each chunk to one row or one value. A chunk is
//! [`row_chunk`](crate::block::row_chunk) rows or 4096 elements ([`CHUNK`](crate::block::CHUNK)).
//! The launch is repeated until one row or value remains.
//!
//! ```text
//! sum_rows, 3000 x 80: chunks of 128 rows          sum_all, 10 000 000 elements
//!                   columns 0..31  32..63  64..79    block 0      0 .. 4095
//!   rows    0..127      block 0       1       2      block 1   4096 .. 8191
//!   rows  128..255            3       4       5      ..
//!   ..                                               2442 blocks -> 2442 values -> 1 block
//!   rows 2944..2999          69      70      71        -> 1 value
//! -> 24 x 80: one chunk -> blocks 0, 1, 2 -> 1 x 80  a block's tile and its tree: see `block.rs`
//! ```
//! If `accumulate` is 1, a sum is added to the content of `out`. If it is 0, the sum overwrites it.
//!
//! Invariant: every tree depends only on the lengths.

use crate::block::{ColumnTile, REDUCTION_BYTES, block_combine, chunk_fold};
use crate::tile::SharedTile;
use crate::vector::{F4, put, store};
use crate::warp::{Row, add, max, max4, rank, rank_column, sum4};
use crate::{family, for_each_row, for_each_vector};
use cuda_std::{GpuFloat, prelude::*};
use half::bf16;

family! {
    /// Computes `out[r] = scale sum_c x[r, c]`. Shapes: `x`: `[rows, cols]`, `out`: `[rows]`.
    sum_columns<S: Stored> { sum_columns_f32: f32; sum_columns_bf16: bf16; }
    unsafe fn(x: &[S], cols: usize, scale: f32, accumulate: u32, out: *mut f32) {
        let mut sum = F4::splat(0.0);
        // SAFETY: the row lies inside `x` and `out`; its lanes stay converged.
        unsafe {
            let Some(row) = Row::new(x.len(), cols) else { return };
            for_each_vector!(row, cols, |column, part| {
                sum = sum + F4::load_part(x, row.start + column, part, 0.0);
            });
            let total = row.sum(sum);
            if row.is_first_lane() {
                put(out, row.number, total * scale, accumulate);
            }
        }
    }
    // SAFETY: `x` has whole rows of `cols`, and `out` has one for each; a thread accesses a row
    // only if it begins inside `x`.
    contract unsafe { block: crate::warp::ROW_BLOCK, shared: 0 } |k| {
        let rows = crate::warp::rows_in("x", k.x.len(), k.cols)?;
        Violation::unless_length("out", rows, k.out.len())?;
        crate::warp::Row::grid("x", k.x.len(), k.cols)
    }
}

family! {
    /// Computes `out[i, c]` = scale times the sum of `x[r, c]` over the rows r of chunk i, in the
    /// order of a [`ColumnTile`](crate::block::ColumnTile). Shapes: `x`: `[rows, cols]`, `out`:
    /// `[ceil(rows / chunk), cols]`.
    sum_rows<S: Stored> { sum_rows_f32: f32; sum_rows_bf16: bf16; }
    unsafe fn(x: &[S], cols: usize, chunk: usize, scale: f32, accumulate: u32, out: *mut f32) {
        let mut sum = F4::splat(0.0);
        // SAFETY: the contract checks `cols`. The tile's columns lie inside `x`, and its outputs
        // inside `out`. No thread returns early.
        unsafe {
            let tile = ColumnTile::new(x.len(), cols, chunk);
            for_each_row!(tile, |index, part| {
                sum = sum + F4::load_part(x, index, part, 0.0);
            });
            if let Some((place, total)) = tile.finish(SharedTile::new(0, ColumnTile::BYTES / 4), sum) {
                put(out, place, total * scale, accumulate);
            }
        }
    }
    // SAFETY: `x` has whole rows of `cols`. The grid of `ColumnTile` covers exactly their columns,
    // and every chunk's end is a valid index. `out` has a row for each chunk. The tile's sums fill
    // the shared memory.
    contract unsafe { block: crate::block::BLOCK, shared: ColumnTile::BYTES } |k| {
        let rows = crate::warp::rows_in("x", k.x.len(), k.cols)?;
        let grid = ColumnTile::grid(rows, k.cols, k.chunk)?;
        Violation::unless_length("out", Size::of(rows).div_ceil(k.chunk).times(k.cols), k.out.len())?;
        Ok(grid)
    }
}

family! {
    /// Computes `out[i]` = scale times the sum of chunk i of x, 4096 elements. Shapes: `x`: `[n]`,
    /// `out`: `[ceil(n / 4096)]`.
    sum_all<S: Stored> { sum_all_f32: f32; sum_all_bf16: bf16; }
    unsafe fn(x: &[S], scale: f32, accumulate: u32, out: *mut f32) {
        // SAFETY: a block has an element in `out`; all of its threads reach this.
        unsafe {
            let sum = chunk_fold(x, F4::splat(0.0), 0.0, add);
            let total = block_combine(SharedTile::new(0, REDUCTION_BYTES / 4), sum4(sum), add);
            if thread::thread_idx_x() == 0 {
                put(out, thread::block_idx_x() as usize, total * scale, accumulate);
            }
        }
    }
    // SAFETY: a block reads the part of its own chunk inside `x`, and writes the chunk's element of
    // `out`.
    contract unsafe { block: crate::block::BLOCK, shared: REDUCTION_BYTES } |k| {
        Violation::unless_length("out", k.x.len().div_ceil(crate::block::CHUNK), k.out.len())?;
        Grid::cover(k.x.len(), crate::block::CHUNK)
    }
}

family! {
    /// Computes `out[i]` = sum of the squares of chunk i of x, 4096 elements. Shapes: `x`: `[n]`,
    /// `out`: `[ceil(n / 4096)]`. [`sum_all`](struct@sum_all) reduces these. Overwrites `out`.
    squared_norm<S: Stored> { squared_norm_f32: f32; squared_norm_bf16: bf16; }
    unsafe fn(x: &[S], out: *mut f32) {
        // SAFETY: a block has an element in `out`; all of its threads reach this.
        unsafe {
            let sum = chunk_fold(x, F4::splat(0.0), 0.0, |sum, x| GpuFloat::mul_add(x, x, sum));
            let total = block_combine(SharedTile::new(0, REDUCTION_BYTES / 4), sum4(sum), add);
            if thread::thread_idx_x() == 0 {
                store(out, thread::block_idx_x() as usize, total);
            }
        }
    }
    // SAFETY: a block reads the part of its own chunk inside `x`, and writes the chunk's element of
    // `out`.
    contract unsafe { block: crate::block::BLOCK, shared: REDUCTION_BYTES } |k| {
        Violation::unless_length("out", k.x.len().div_ceil(crate::block::CHUNK), k.out.len())?;
        Grid::cover(k.x.len(), crate::block::CHUNK)
    }
}

family! {
    /// Computes `out[i]` = maximum of chunk i of x, 4096 elements, or NaN if the chunk has one.
    /// Shapes: `x`: `[n]`, `out`: `[ceil(n / 4096)]`. Overwrites `out`.
    max_all<S: Stored> { max_all_f32: f32; max_all_bf16: bf16; }
    unsafe fn(x: &[S], out: *mut f32) {
        // SAFETY: a block has an element in `out`; all of its threads reach this.
        unsafe {
            let largest = chunk_fold(x, F4::splat(f32::NEG_INFINITY), f32::NEG_INFINITY, max);
            let largest = block_combine(SharedTile::new(0, REDUCTION_BYTES / 4), max4(largest), max);
            if thread::thread_idx_x() == 0 {
                store(out, thread::block_idx_x() as usize, largest);
            }
        }
    }
    // SAFETY: a block reads the part of its own chunk inside `x`, and writes the chunk's element of
    // `out`.
    contract unsafe { block: crate::block::BLOCK, shared: REDUCTION_BYTES } |k| {
        Violation::unless_length("out", k.x.len().div_ceil(crate::block::CHUNK), k.out.len())?;
        Grid::cover(k.x.len(), crate::block::CHUNK)
    }
}

family! {
    /// Computes `out[r] = max_c x[r, c]`, or NaN if the row has one. Shapes: `x`: `[rows, cols]`,
    /// `out`: `[rows]`. Overwrites `out`.
    max_columns<S: Stored> { max_columns_f32: f32; max_columns_bf16: bf16; }
    unsafe fn(x: &[S], cols: usize, out: *mut f32) {
        let mut largest = F4::splat(f32::NEG_INFINITY);
        // SAFETY: the row lies inside `x` and `out`; its lanes stay converged.
        unsafe {
            let Some(row) = Row::new(x.len(), cols) else { return };
            for_each_vector!(row, cols, |column, part| {
                largest = largest.zip(F4::load_part(x, row.start + column, part, f32::NEG_INFINITY), max);
            });
            let largest = row.max(largest);
            if row.is_first_lane() {
                store(out, row.number, largest);
            }
        }
    }
    // SAFETY: `x` has whole rows of `cols`, and `out` has one for each; a thread accesses a row
    // only if it begins inside `x`.
    contract unsafe { block: crate::warp::ROW_BLOCK, shared: 0 } |k| {
        let rows = crate::warp::rows_in("x", k.x.len(), k.cols)?;
        Violation::unless_length("out", rows, k.out.len())?;
        crate::warp::Row::grid("x", k.x.len(), k.cols)
    }
}

family! {
    /// Computes `out[r]` = the first c with `x[r, c] = max_c x[r, c]`. A NaN counts as the largest,
    /// as in PyTorch. Shapes: `x`: `[rows, cols]`, cols below 2^32, `out`: `[rows]`. Overwrites
    /// `out`.
    argmax_columns<S: Stored> { argmax_columns_f32: f32; argmax_columns_bf16: bf16; }
    unsafe fn(x: &[S], cols: usize, out: *mut u32) {
        let mut best = 0;
        // SAFETY: the row lies inside `x` and `out`; its lanes stay converged.
        unsafe {
            let Some(row) = Row::new(x.len(), cols) else { return };
            for_each_vector!(row, cols, |column, part| {
                let x = F4::load_part(x, row.start + column, part, 0.0).0;
                let mut at = 0;
                while at < F4::LEN {
                    let rank = if at < part.count() { rank(x[at], (column + at) as u32) } else { 0 };
                    best = if rank > best { rank } else { best };
                    at += 1;
                }
            });
            let best = row.combine(best, |a, b| if b > a { b } else { a });
            if row.is_first_lane() {
                store(out, row.number, rank_column(best));
            }
        }
    }
    // SAFETY: `x` has whole rows of `cols`, and `out` has one for each; a thread accesses a row
    // only if it begins inside `x`.
    contract unsafe { block: crate::warp::ROW_BLOCK, shared: 0 } |k| {
        Violation::unless(k.cols <= u32::MAX as usize, "cols", "less than 2^32", k.cols)?;
        let rows = crate::warp::rows_in("x", k.x.len(), k.cols)?;
        Violation::unless_length("out", rows, k.out.len())?;
        crate::warp::Row::grid("x", k.x.len(), k.cols)
    }
}
