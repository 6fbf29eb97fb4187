//! Copies of kernels with a bug planted in their writes to global memory.

use cuda_std::prelude::*;
use kernels::block::{BLOCK, CHUNK, REDUCTION_BYTES, block_combine, chunk_fold};
use kernels::tile::SharedTile;
use kernels::vector::{F4, VectorPart, store};
use kernels::warp::{ROW_BLOCK, Row, add, max, sum4};
use kernels::{contract, for_each_vector};

/// A copy of `fill` whose last thread takes one element too many.
#[kernel]
pub(crate) unsafe fn off_by_one_tail(out: *mut f32, length: usize, value: f32) {
    let index = kernels::block::own_index();
    // SAFETY: none: this is the planted bug.
    unsafe {
        if index + F4::LEN <= length {
            F4::splat(value).store(out, index);
        } else if index < length {
            F4::splat(value).store_part(out, index, VectorPart::First(length - index + 1));
        }
    }
}

// SAFETY: none: the bug is one element past the end of `out`, which race mode refuses before it is
// written.
contract! { unsafe off_by_one_tail { block: BLOCK } |k| {
    Violation::unless_length("out", k.length, k.out.len())?;
    kernels::block::vector_grid(k.length)
}}

macro_rules! maxima {
    ($($(#[$doc:meta])* $name:ident: |$row:ident| $writes:expr, $place:expr;)*) => {$(
        $(#[$doc])*
        #[kernel]
        pub(crate) unsafe fn $name(x: &[f32], cols: usize, out: *mut f32) {
            let mut largest = F4::splat(f32::NEG_INFINITY);
            // SAFETY: as in `max_columns`, apart from the planted bug.
            unsafe {
                let Some($row) = Row::new(x.len(), cols) else { return };
                for_each_vector!($row, cols, |column, part| {
                    largest = largest.zip(F4::load_part(x, $row.start + column, part, f32::NEG_INFINITY), max);
                });
                let largest = $row.max(largest);
                if $writes {
                    store(out, $place, largest);
                }
            }
        }
        // SAFETY: a row begins inside `x`, and `out` has an element for each. Where the planted bug
        // breaks this, race mode refuses the access first.
        contract! { unsafe $name { block: ROW_BLOCK } |k| {
            let rows = kernels::warp::rows_in("x", k.x.len(), k.cols)?;
            Violation::unless_length("out", rows, k.out.len())?;
            Row::grid("x", k.x.len(), k.cols)
        }}
    )*};
}

maxima! {
    /// A copy of `max_columns` that counts its rows from 1: the last lies in the padding after the
    /// tensor.
    overrun_into_padding: |row| row.is_first_lane(), row.number + 1;
    /// A copy of `max_columns` in which every lane of a row writes the result.
    two_writers: |row| true, row.number;
}

/// A copy of `sum_all` with two blocks for each place of the output.
#[kernel]
pub(crate) unsafe fn cross_block_write(x: &[f32], out: *mut f32) {
    // SAFETY: as in `sum_all`.
    unsafe {
        let sum = chunk_fold(x, F4::splat(0.0), 0.0, add);
        let total = block_combine(SharedTile::new(0, REDUCTION_BYTES / 4), sum4(sum), add);
        if thread::thread_idx_x() == 0 {
            store(out, thread::block_idx_x() as usize / 2, total);
        }
    }
}

// SAFETY: a block writes the element of its chunk or of the one before: `out` has an element for
// every two. The order of the blocks is the planted bug.
contract! { unsafe cross_block_write { block: BLOCK, shared: REDUCTION_BYTES } |k| {
    Violation::unless_length("out", Size::of(k.x.len()).div_ceil(2 * CHUNK), k.out.len())?;
    Grid::cover(k.x.len(), CHUNK)
}}

/// A copy of `copy` whose blocks are one vector too close.
#[kernel]
pub(crate) unsafe fn block_stride_overlap(x: &[f32], out: *mut f32) {
    let stride = (BLOCK as usize - 1) * F4::LEN;
    let index = thread::block_idx_x() as usize * stride + thread::thread_idx_x() as usize * F4::LEN;
    if index + F4::LEN <= x.len() {
        // SAFETY: inside both, as the contract checks.
        unsafe { F4::load(x, index).store(out, index) }
    }
}

// SAFETY: a thread touches elements from an index that is at most its own, as far as `x` has them;
// `out` has the same length.
contract! { unsafe block_stride_overlap { block: BLOCK } |k| {
    Violation::unless_length("out", k.x.len(), k.out.len())?;
    kernels::block::vector_grid(k.x.len())
}}
