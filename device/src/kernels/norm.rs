//! RMSNorm over the columns of each row, forward and backward (Zhang and Sennrich, 2019).
//!
//! Invariant: the sums of a row follow from its length alone, those of a column from the number of rows.

use crate::block::{BLOCK, divide};
use crate::math;
use crate::tile::SharedTile;
use crate::vector::{F4, Part, load, store};
use crate::warp::{Row, lanes_of};
use crate::{contract, for_each_vector};
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

/// Rows of a block of [`rms_norm_backward`](fn@rms_norm_backward).
pub const BACKWARD_ROWS: usize = 16;
/// Threads that share four columns of these rows.
const GROUPS: u32 = 4;
/// Columns that a block takes at once.
const COLUMNS: usize = (BLOCK / GROUPS) as usize * F4::LEN;
/// Shared bytes: a factor for each row, and four sums for each thread.
pub const BACKWARD_BYTES: u32 = (BACKWARD_ROWS as u32 + BLOCK * F4::LEN as u32) * 4;
/// `add`: the gradient of x is added to what `dx` holds.
pub const ADD_DX: u32 = 1;
/// `add`: the gradient of the gain is added to what `dgain` holds.
pub const ADD_DGAIN: u32 = 2;

/// What a block of the backward pass works on.
#[derive(Clone, Copy)]
struct Backward<'k> {
    x: &'k [f32],
    gain: &'k [f32],
    inverse_rms: &'k [f32],
    dy: &'k [f32],
    parts: usize,
    cols: usize,
    add: u32,
    dx: *mut f32,
    /// The factors of x in dx.
    pulls: SharedTile<f32>,
    /// The block's first row.
    first: usize,
}

impl Backward<'_> {
    /// The gradient of y at an index: the sum of its parts, ascending.
    #[inline(always)]
    unsafe fn dy(self, index: usize, part: Part) -> F4 {
        // SAFETY: each part is as long as x, in which the index lies.
        unsafe {
            let mut sum = F4::load_part(self.dy, index, part, 0.0);
            let mut at = 1;
            while at < self.parts {
                sum = sum + F4::load_part(self.dy, index + at * self.x.len(), part, 0.0);
                at += 1;
            }
            sum
        }
    }

    /// Four columns of a row of the block.
    #[inline(always)]
    unsafe fn load(self, row: u32, column: usize, part: Part) -> Loaded {
        let number = self.first + row as usize;
        let index = number * self.cols + column;
        // SAFETY: the row lies inside `x`, `dy`, `dx` and `inverse_rms`, as the caller promises.
        unsafe {
            let old =
                if self.add & ADD_DX == 0 { F4::splat(0.0) } else { F4::load_part_raw(self.dx, index, part, 0.0) };
            let x = F4::load_part(self.x, index, part, 0.0);
            Loaded { index, row, x, dy: self.dy(index, part), old, scale: F4::splat(load(self.inverse_rms, number)) }
        }
    }

    /// Writes them of dx and adds to their gain's gradients.
    #[inline(always)]
    unsafe fn finish(self, loaded: Loaded, gain: F4, part: Part, sum: F4) -> F4 {
        let Loaded { index, row, x, dy, old, scale } = loaded;
        let own = (dy * gain * scale).fma(F4::splat(-self.pulls.get(row)), x);
        // SAFETY: the index is that of a row of `dx`.
        unsafe {
            (old + own).store_part(self.dx, index, part);
        }
        sum.fma(x * scale, dy)
    }

    /// Writes four columns of dx in every fourth row; the sums for their gain, over these rows ascending.
    #[inline(always)]
    unsafe fn columns(self, group: u32, column: usize, part: Part) -> F4 {
        // SAFETY: there are `cols` columns, not 0.
        let left = unsafe { divide(self.x.len(), self.cols).0 } - self.first;
        let end = if left < BACKWARD_ROWS { left as u32 } else { BACKWARD_ROWS as u32 };
        let (mut row, mut sum) = (group, F4::splat(0.0));
        // SAFETY: the rows are below `end`, the column is one.
        unsafe {
            let gain = F4::load_part(self.gain, column, part, 0.0);
            // Two at a time, so that the GPU's loads overlap; more would cost registers.
            while row + GROUPS < end {
                let (a, b) = (self.load(row, column, part), self.load(row + GROUPS, column, part));
                sum = self.finish(a, gain, part, sum);
                sum = self.finish(b, gain, part, sum);
                row += 2 * GROUPS;
            }
            while row < end {
                sum = self.finish(self.load(row, column, part), gain, part, sum);
                row += GROUPS;
            }
        }
        sum
    }
}

/// What a row's part in the backward pass needs.
struct Loaded {
    index: usize,
    row: u32,
    x: F4,
    dy: F4,
    /// What the gradient is added to.
    old: F4,
    scale: F4,
}

/// `dx[r, c] = s g[c] - x[r, c] s^3 / cols sum_c g[c] x[r, c]` and `dgain[i, c] = sum_r x[r, c] s dy[r, c]` over the rows
/// r of chunk i, where `s = inverse_rms[r]`, `g[c] = dy[r, c] gain[c]`, and dy is the sum of `parts` arrays; `x`, `dx`:
/// `[rows, cols]`, `dy`: `[parts, rows, cols]`, `gain`: `[cols]`, `inverse_rms`: `[rows]`, `dgain`:
/// `[ceil(rows / 16), cols]`, to be finished by [`sum_rows`](fn@crate::reduce::sum_rows). A block a chunk: of its rows every
/// fourth is summed first, ascending, then the four sums. Overwrites `dx` and `dgain`, or adds, as `add` says.
#[kernel]
pub unsafe fn rms_norm_backward(
    x: &[f32],
    gain: &[f32],
    inverse_rms: &[f32],
    dy: &[f32],
    parts: usize,
    cols: usize,
    add: u32,
    dx: *mut f32,
    dgain: *mut f32,
) {
    let chunk = thread::block_idx_x() as usize;
    let first = chunk * BACKWARD_ROWS;
    // SAFETY: the tiles fill the declared shared memory; rows and columns are checked against `x`, whose lengths the others
    // have; every thread comes to every barrier.
    unsafe {
        let pulls = SharedTile::new(0, BACKWARD_ROWS as u32);
        let sums = SharedTile::new(BACKWARD_ROWS as u32 * 4, BLOCK * F4::LEN as u32);
        let backward = Backward { x, gain, inverse_rms, dy, parts, cols, add, dx, pulls, first };

        let mut at = 0;
        while at < BACKWARD_ROWS {
            if let Some(row) = Row::after(first + at, x.len(), cols)
                && row.number < first + BACKWARD_ROWS
            {
                let scale = load(inverse_rms, row.number);
                let mut dot = F4::splat(0.0);
                for_each_vector!(row, cols, |column, part| {
                    let x = F4::load_part(x, row.start + column, part, 0.0);
                    let gain = F4::load_part(gain, column, part, 0.0);
                    dot = dot.fma(backward.dy(row.start + column, part) * gain, x);
                });
                // s^3 alone could overflow where the product does not.
                let pull = row.sum(dot) * scale / cols as f32 * scale * scale;
                if row.is_first_lane() {
                    pulls.set((row.number - first) as u32, pull);
                }
            }
            at += (BLOCK / lanes_of(cols)) as usize;
        }
        thread::sync_threads();

        let thread = thread::thread_idx_x();
        let (quad, group) = (thread % (BLOCK / GROUPS), thread / (BLOCK / GROUPS));
        let mut start = 0;
        while start < cols {
            let column = start + quad as usize * F4::LEN;
            let part = Part::first(cols.saturating_sub(column));
            if column < cols {
                let sum = if cols.is_multiple_of(F4::LEN) {
                    backward.columns(group, column, Part::Whole)
                } else {
                    backward.columns(group, column, part)
                };
                sums.set4(thread * F4::LEN as u32, sum);
            }
            thread::sync_threads();
            if group == 0 && column < cols {
                let mut total = sums.get4(quad * F4::LEN as u32);
                let mut at = 1;
                while at < GROUPS {
                    total = total + sums.get4((at * (BLOCK / GROUPS) + quad) * F4::LEN as u32);
                    at += 1;
                }
                let index = chunk * cols + column;
                let old =
                    if add & ADD_DGAIN == 0 { F4::splat(0.0) } else { F4::load_part_raw(dgain, index, part, 0.0) };
                (old + total).store_part(dgain, index, part);
            }
            thread::sync_threads();
            start += COLUMNS;
        }
    }
}

contract! { rms_norm_backward { block: BLOCK, shared: BACKWARD_BYTES } |k| {
    let rows = crate::warp::rows_in("x", k.x.len(), k.cols)?;
    Violation::unless_length("gain", k.cols, k.gain.len())?;
    Violation::unless_length("inverse_rms", rows, k.inverse_rms.len())?;
    Violation::unless(k.parts > 0, "parts", "at least 1", k.parts)?;
    Violation::unless_length("dy", k.parts * k.x.len(), k.dy.len())?;
    Violation::unless_length("dx", k.x.len(), k.dx.len())?;
    Violation::unless_length("dgain", rows.div_ceil(BACKWARD_ROWS) * k.cols, k.dgain.len())?;
    Grid::cover(rows, BACKWARD_ROWS)
}}
