//! Copies of a part of each row to a part of each row of another array: slices and concatenation.
//!
//! Invariant: an element is moved bit by bit. Elements outside the part are not accessed.

use crate::block::BLOCK;
use crate::window::Window;
use crate::{family, for_own_vector};
use cuda_std::prelude::*;
use half::bf16;

family! {
    /// Computes `out[out_start + r out_stride + c] = x[start + r stride + c]` for r below `rows`
    /// and c below `cols`. Overwrites these elements of `out`.
    copy_rows<S: Stored> { copy_rows_f32: f32; copy_rows_bf16: bf16; }
    unsafe fn(
        x: &[S],
        rows: usize,
        cols: usize,
        stride: usize,
        start: usize,
        out_stride: usize,
        out_start: usize,
        out: *mut S,
    ) {
        let (from, to) = (Window { cols, stride, start }, Window { cols, stride: out_stride, start: out_start });
        for_own_vector!(rows * cols, |index, part| {
            // SAFETY: both windows lie inside their arrays.
            unsafe { to.store(from.load(x, index, part), out, index, part) };
        });
    }
    // SAFETY: `x` and `out` have the elements of their windows, and the grid covers the elements of
    // one.
    contract unsafe { block: BLOCK, shared: 0 } |k| {
        Window { cols: k.cols, stride: k.stride, start: k.start }.check("x", k.rows, k.x.len())?;
        Window { cols: k.cols, stride: k.out_stride, start: k.out_start }.check("out", k.rows, k.out.len())?;
        crate::block::vector_grid(k.rows.saturating_mul(k.cols))
    }
}
