//! Softmax and log-softmax over the columns of each row, forward and backward.
//!
//! ```text
//! cols = 512: a warp a row       lane 0             lane 1       ..    lane 31     all lanes
//!   columns, in registers   0..3, 128..131, ..   4..7, 132..135, ..  124..127, ..
//!   forward: x              largest, then exp(x - m) and its sum                   m, then the sum
//!   backward: y and dy      the sum of dy y                                        sum of dy y
//!   out                     a lane writes the columns that it holds
//! (forward: see `exps.rs`)
//! ```
//! Shorter rows have fewer lanes, and several share a warp; see [`warp`](crate::warp).
//!
//! Invariant: the order of a row's sums depends only on its length.

use crate::exps::Exps;
use crate::math;
use crate::stored::Stored;
use crate::vector::F4;
use crate::warp::{Row, RowFragment};
use crate::{family, for_each_vector, map4, with_held};
use cuda_std::prelude::*;
use half::bf16;

family! {
    /// Computes `y[r, c] = exp(x[r, c] - m) / sum_c exp(x[r, c] - m)`, `m = max_c x[r, c]`. Shapes:
    /// `x`, `y`: `[rows, cols]`. A row that has a NaN, or nothing above -infinity, becomes NaN.
    /// Overwrites `y`.
    softmax_forward<S: Stored> { softmax_forward_f32: f32; softmax_forward_bf16: bf16; }
    unsafe fn(x: &[S], cols: usize, y: *mut S) {
        // SAFETY: the row lies inside `x` and `y`; its lanes stay converged.
        unsafe {
            let Some(row) = Row::new(x.len(), cols) else { return };
            with_held!(row, cols, forward(x, cols, y))
        }
    }
    // SAFETY: `x` has whole rows of `cols`, and `y` is as long; a thread accesses a row only if it
    // begins inside `x`.
    contract unsafe { block: crate::warp::ROW_BLOCK, shared: 0 } |k| {
        Violation::unless_length("y", k.x.len(), k.y.len())?;
        crate::warp::Row::grid("x", k.x.len(), k.cols)
    }
}

/// # Safety
/// The row lies inside `x` and `y`.
#[inline(always)]
unsafe fn forward<const REGS: usize, S: Stored>(row: Row, x: &[S], cols: usize, y: *mut S) {
    // SAFETY: the row lies inside `x` and `y`.
    unsafe {
        let exps = Exps::<REGS, _>::new(row, x, cols);
        let inverse = 1.0 / exps.sum;
        for_each_vector!(REGS, row, cols, |at, column, part| {
            (exps.get(at, column, part) * F4::splat(inverse)).store_part(y, row.start + column, part);
        });
    }
}

family! {
    /// Computes `dx[r, c] = y[r, c] (dy[r, c] - sum_c dy[r, c] y[r, c])`, where y is the softmax.
    /// Shapes: `y`, `dy`, `dx`: `[rows, cols]`. Overwrites `dx`.
    softmax_backward<S: Stored> { softmax_backward_f32: f32; softmax_backward_bf16: bf16; }
    unsafe fn(y: &[S], dy: &[S], cols: usize, dx: *mut S) {
        // SAFETY: the row lies inside `y`, and the others are as long; its lanes stay converged.
        unsafe {
            let Some(row) = Row::new(y.len(), cols) else { return };
            with_held!(row, cols, backward(y, dy, cols, dx))
        }
    }
    // SAFETY: `y` has whole rows of `cols`, and `dy` and `dx` are as long; a thread accesses a row
    // only if it begins inside `y`.
    contract unsafe { block: crate::warp::ROW_BLOCK, shared: 0 } |k| {
        Violation::unless_length("dy", k.y.len(), k.dy.len())?;
        Violation::unless_length("dx", k.y.len(), k.dx.len())?;
        crate::warp::Row::grid("y", k.y.len(), k.cols)
    }
}

/// # Safety
/// The row lies inside `y`, `dy` and `dx`.
#[inline(always)]
unsafe fn backward<const REGS: usize, S: Stored>(row: Row, y: &[S], dy: &[S], cols: usize, dx: *mut S) {
    let mut dot = F4::splat(0.0);
    // SAFETY: the row lies inside `y`, `dy` and `dx`.
    unsafe {
        let y = RowFragment::<REGS, _>::new(row, y, row.start, cols, 0.0);
        let dy = RowFragment::<REGS, _>::new(row, dy, row.start, cols, 0.0);
        for_each_vector!(REGS, row, cols, |at, column, part| {
            dot = dot.fma(dy.get(at, column, part), y.get(at, column, part));
        });
        let dot = F4::splat(row.sum(dot));
        for_each_vector!(REGS, row, cols, |at, column, part| {
            let gradient = y.get(at, column, part) * (dy.get(at, column, part) - dot);
            gradient.store_part(dx, row.start + column, part);
        });
    }
}

family! {
    /// Computes the log-softmax `y[r, c] = x[r, c] - m - log(sum_c exp(x[r, c] - m))`, `m = max_c
    /// x[r, c]`. Shapes: `x`, `y`: `[rows, cols]`. A row that has a NaN, or nothing above
    /// -infinity, becomes NaN. Overwrites `y`.
    log_softmax_forward<S: Stored> { log_softmax_forward_f32: f32; log_softmax_forward_bf16: bf16; }
    unsafe fn(x: &[S], cols: usize, y: *mut S) {
        // SAFETY: the row lies inside `x` and `y`; its lanes stay converged.
        unsafe {
            let Some(row) = Row::new(x.len(), cols) else { return };
            with_held!(row, cols, log_forward(x, cols, y))
        }
    }
    // SAFETY: `x` has whole rows of `cols`, and `y` is as long; a thread accesses a row only if it
    // begins inside `x`.
    contract unsafe { block: crate::warp::ROW_BLOCK, shared: 0 } |k| {
        Violation::unless_length("y", k.x.len(), k.y.len())?;
        crate::warp::Row::grid("x", k.x.len(), k.cols)
    }
}

/// # Safety
/// The row lies inside `x` and `y`.
#[inline(always)]
unsafe fn log_forward<const REGS: usize, S: Stored>(row: Row, x: &[S], cols: usize, y: *mut S) {
    // SAFETY: the row lies inside `x` and `y`.
    unsafe {
        let exps = Exps::<REGS, _>::new(row, x, cols);
        let log = math::log(exps.sum);
        // The row is read again, because the registers hold its exponentials.
        for_each_vector!(REGS, row, cols, |_at, column, part| {
            let value = F4::load_part(x, row.start + column, part, 0.0) - F4::splat(exps.largest) - F4::splat(log);
            value.store_part(y, row.start + column, part);
        });
    }
}

family! {
    /// Computes `dx[r, c] = dy[r, c] - exp(y[r, c]) sum_c dy[r, c]`, where y is the log-softmax.
    /// Shapes: `y`, `dy`, `dx`: `[rows, cols]`. Overwrites `dx`.
    log_softmax_backward<S: Stored> { log_softmax_backward_f32: f32; log_softmax_backward_bf16: bf16; }
    unsafe fn(y: &[S], dy: &[S], cols: usize, dx: *mut S) {
        // SAFETY: the row lies inside `y`, and the others are as long; its lanes stay converged.
        unsafe {
            let Some(row) = Row::new(y.len(), cols) else { return };
            with_held!(row, cols, log_backward(y, dy, cols, dx))
        }
    }
    // SAFETY: `y` has whole rows of `cols`, and `dy` and `dx` are as long; a thread accesses a row
    // only if it begins inside `y`.
    contract unsafe { block: crate::warp::ROW_BLOCK, shared: 0 } |k| {
        Violation::unless_length("dy", k.y.len(), k.dy.len())?;
        Violation::unless_length("dx", k.y.len(), k.dx.len())?;
        crate::warp::Row::grid("y", k.y.len(), k.cols)
    }
}

/// # Safety
/// The row lies inside `y`, `dy` and `dx`.
#[inline(always)]
unsafe fn log_backward<const REGS: usize, S: Stored>(row: Row, y: &[S], dy: &[S], cols: usize, dx: *mut S) {
    let mut sum = F4::splat(0.0);
    // SAFETY: the row lies inside `y`, `dy` and `dx`.
    unsafe {
        let y = RowFragment::<REGS, _>::new(row, y, row.start, cols, f32::NEG_INFINITY);
        let dy = RowFragment::<REGS, _>::new(row, dy, row.start, cols, 0.0);
        for_each_vector!(REGS, row, cols, |at, column, part| {
            sum = sum + dy.get(at, column, part);
        });
        let sum = F4::splat(-row.sum(sum));
        for_each_vector!(REGS, row, cols, |at, column, part| {
            let p = map4!(y.get(at, column, part), math::exp_negative);
            dy.get(at, column, part).fma(p, sum).store_part(dx, row.start + column, part);
        });
    }
}
