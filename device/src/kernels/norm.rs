//! RMSNorm over the columns of each row, forward and backward (Zhang and Sennrich, 2019). Per head, the rows are heads
//! and `cols` is the head's width.
//!
//! Invariant: the sums of a row follow from its length alone.

use crate::block::{RowChunk, in_turns};
use crate::math;
use crate::vector::{F4, load, store};
use crate::warp::Row;
use crate::{contract, for_each_row, for_each_vector};
use cuda_std::prelude::*;

/// `y[r, c] = x[r, c] s[r] gain[c]`, `s[r] = 1 / sqrt(mean_c x[r, c]^2 + epsilon)`; `x`, `y`: `[rows, cols]`, `gain`:
/// `[cols]`, `inverse_rms` (s): `[rows]`. Overwrites `y` and `inverse_rms`.
#[kernel]
pub unsafe fn rms_norm_forward(x: &[f32], gain: &[f32], cols: usize, epsilon: f32, y: *mut f32, inverse_rms: *mut f32) {
    let Some(row) = Row::new(x.len(), cols) else { return };
    let mut squares = F4::splat(0.0);
    // SAFETY: the row lies inside `x`, `y` and `inverse_rms`; its lanes stay together.
    unsafe {
        for_each_vector!(row, cols, |column, part| {
            let x = F4::load_part(x, row.start + column, part, 0.0);
            squares = squares.fma(x, x);
        });
        let scale = math::rsqrt(row.sum(squares) / cols as f32 + epsilon);
        for_each_vector!(row, cols, |column, part| {
            let x = F4::load_part(x, row.start + column, part, 0.0);
            let gain = F4::load_part(gain, column, part, 0.0);
            (x * F4::splat(scale) * gain).store_part(y, row.start + column, part);
        });
        if row.is_first_lane() {
            store(inverse_rms, row.number, scale);
        }
    }
}

contract! { rms_norm_forward { block: crate::warp::ROW_BLOCK } |k| {
    let rows = crate::warp::rows_in("x", k.x.len(), k.cols)?;
    Violation::unless_length("gain", k.cols, k.gain.len())?;
    Violation::unless_length("y", k.x.len(), k.y.len())?;
    Violation::unless_length("inverse_rms", rows, k.inverse_rms.len())?;
    crate::warp::Row::grid("x", k.x.len(), k.cols)
}}

/// `dx[r, c] = s g[c] - x[r, c] s^3 / cols sum_c g[c] x[r, c]`, where `g[c] = dy[r, c] gain[c]`, `s = inverse_rms[r]`;
/// `x`, `dy`, `dx`: `[rows, cols]`, `gain`: `[cols]`, `inverse_rms`: `[rows]`. Overwrites `dx`.
#[kernel]
pub unsafe fn rms_norm_backward(x: &[f32], gain: &[f32], inverse_rms: &[f32], dy: &[f32], cols: usize, dx: *mut f32) {
    let Some(row) = Row::new(x.len(), cols) else { return };
    let mut dot = F4::splat(0.0);
    // SAFETY: the row lies inside `x`, `dy`, `dx` and `inverse_rms`; its lanes stay together.
    unsafe {
        let scale = load(inverse_rms, row.number);
        for_each_vector!(row, cols, |column, part| {
            let x = F4::load_part(x, row.start + column, part, 0.0);
            let dy = F4::load_part(dy, row.start + column, part, 0.0);
            let gain = F4::load_part(gain, column, part, 0.0);
            dot = dot.fma(dy * gain, x);
        });
        // s^3 alone could overflow where the product does not.
        let pull = row.sum(dot) * scale / cols as f32 * scale * scale;
        for_each_vector!(row, cols, |column, part| {
            let x = F4::load_part(x, row.start + column, part, 0.0);
            let dy = F4::load_part(dy, row.start + column, part, 0.0);
            let gain = F4::load_part(gain, column, part, 0.0);
            let push = dy * gain * F4::splat(scale);
            push.fma(F4::splat(-pull), x).store_part(dx, row.start + column, part);
        });
    }
}

contract! { rms_norm_backward { block: crate::warp::ROW_BLOCK } |k| {
    let rows = crate::warp::rows_in("x", k.x.len(), k.cols)?;
    Violation::unless_length("gain", k.cols, k.gain.len())?;
    Violation::unless_length("inverse_rms", rows, k.inverse_rms.len())?;
    Violation::unless_length("dy", k.x.len(), k.dy.len())?;
    Violation::unless_length("dx", k.x.len(), k.dx.len())?;
    crate::warp::Row::grid("x", k.x.len(), k.cols)
}}

/// `partials[i, c]` = sum of `dy[r, c] x[r, c] inverse_rms[r]` over the rows r of chunk i, [in turns](in_turns): the
/// gradient of the gain, to be finished by [`sum_rows`](fn@crate::reduce::sum_rows); `x`, `dy`: `[rows, cols]`, `inverse_rms`:
/// `[rows]`, `partials`: `[ceil(rows / 64), cols]`. Four columns a thread. Overwrites `partials`.
#[kernel]
pub unsafe fn rms_norm_gain_partials(x: &[f32], inverse_rms: &[f32], dy: &[f32], cols: usize, partials: *mut f32) {
    // SAFETY: the contract checks `cols`.
    let Some(rows) = (unsafe { RowChunk::new(x.len(), cols) }) else { return };
    let mut row = rows.first_row();
    let mut sums = [F4::splat(0.0); 4];
    // SAFETY: the chunk's columns lie inside `x` and `dy`, its rows inside `inverse_rms`, its place inside `partials`.
    unsafe {
        for_each_row!(rows, cols, |index, part| {
            let scale = load(inverse_rms, row);
            let x = F4::load_part(x, index, part, 0.0);
            let dy = F4::load_part(dy, index, part, 0.0);
            let [first, second, third, fourth] = sums;
            sums = [second, third, fourth, first.fma(x * F4::splat(scale), dy)];
            row += 1;
        });
        in_turns(sums).store_part(partials, rows.place, rows.part);
    }
}

contract! { rms_norm_gain_partials { block: crate::block::COLUMN_BLOCK } |k| {
    let rows = crate::warp::rows_in("x", k.x.len(), k.cols)?;
    Violation::unless_length("inverse_rms", rows, k.inverse_rms.len())?;
    Violation::unless_length("dy", k.x.len(), k.dy.len())?;
    Violation::unless_length("partials", rows.div_ceil(crate::block::ROW_CHUNK) * k.cols, k.partials.len())?;
    RowChunk::grid(rows, k.cols)
}}
