//! Softmax over the columns of each row, forward and backward.
//!
//! Invariant: the sums of a row follow from its length alone.

use crate::math;
use crate::vector::F4;
use crate::warp::{Row, max};
use crate::{contract, for_each_vector, map4};
use cuda_std::prelude::*;

/// `y[r, c] = exp(x[r, c] - m) / sum_c exp(x[r, c] - m)`, `m = max_c x[r, c]`; `x`, `y`: `[rows, cols]`. A row that
/// holds a NaN, or nothing above -infinity, becomes NaN. Overwrites `y`.
#[kernel]
pub unsafe fn softmax_forward(x: &[f32], cols: usize, y: *mut f32) {
    let Some(row) = Row::new(x.len(), cols) else { return };
    let mut largest = F4::splat(f32::NEG_INFINITY);
    let mut sum = F4::splat(0.0);
    // SAFETY: the row lies inside `x` and `y`; its lanes stay together.
    unsafe {
        for_each_vector!(row, cols, |column, part| {
            largest = largest.zip(F4::load_part(x, row.start + column, part, f32::NEG_INFINITY), max);
        });
        let largest = row.max(largest);
        for_each_vector!(row, cols, |column, part| {
            let x = F4::load_part(x, row.start + column, part, f32::NEG_INFINITY);
            sum = sum + map4!(x - F4::splat(largest), math::exp);
        });
        let inverse = 1.0 / row.sum(sum);
        for_each_vector!(row, cols, |column, part| {
            let x = F4::load_part(x, row.start + column, part, 0.0);
            let exp = map4!(x - F4::splat(largest), math::exp);
            (exp * F4::splat(inverse)).store_part(y, row.start + column, part);
        });
    }
}

contract! { softmax_forward { block: crate::warp::ROW_BLOCK } |k| {
    Violation::unless_length("y", k.x.len(), k.y.len())?;
    crate::warp::Row::grid("x", k.x.len(), k.cols)
}}

/// `dx[r, c] = y[r, c] (dy[r, c] - sum_c dy[r, c] y[r, c])`, where y is the softmax; `y`, `dy`, `dx`: `[rows, cols]`.
/// Overwrites `dx`.
#[kernel]
pub unsafe fn softmax_backward(y: &[f32], dy: &[f32], cols: usize, dx: *mut f32) {
    let Some(row) = Row::new(y.len(), cols) else { return };
    let mut dot = F4::splat(0.0);
    // SAFETY: the row lies inside `y`, and the others are as long; its lanes stay together.
    unsafe {
        for_each_vector!(row, cols, |column, part| {
            let y = F4::load_part(y, row.start + column, part, 0.0);
            let dy = F4::load_part(dy, row.start + column, part, 0.0);
            dot = dot.fma(dy, y);
        });
        let dot = row.sum(dot);
        for_each_vector!(row, cols, |column, part| {
            let y = F4::load_part(y, row.start + column, part, 0.0);
            let dy = F4::load_part(dy, row.start + column, part, 0.0);
            (y * (dy - F4::splat(dot))).store_part(dx, row.start + column, part);
        });
    }
}

contract! { softmax_backward { block: crate::warp::ROW_BLOCK } |k| {
    Violation::unless_length("dy", k.y.len(), k.dy.len())?;
    Violation::unless_length("dx", k.y.len(), k.dx.len())?;
    crate::warp::Row::grid("y", k.y.len(), k.cols)
}}
