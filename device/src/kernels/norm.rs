//! RMSNorm over the columns of each row, after an optional residual is added, forward and backward
//! (Zhang and Sennrich, 2019).
//!
//! Forward gives each row its own lanes; see [`warp`](crate::warp). Backward also sums over rows,
//! for the gain. A block has a chunk of rows. Its threads form groups, and a group processes one
//! row at a time:
//!
//! ```text
//! cols = 128: 8 lanes a row, 16 groups of 8 threads    shared memory, a row of sums a group
//!   group 0     threads   0..7     rows  0, 16, 32, ..   | columns 0..127 |
//!   group 1     threads   8..15    rows  1, 17, 33, ..   | columns 0..127 |
//!   ..                                                    ..
//!   group 15    threads 120..127   rows 15, 31, 47, ..   | columns 0..127 |
//! finish: thread t adds columns 4 t .. 4 t + 3 of all groups, ascending  ->  dgain[chunk]
//!
//! per row: dx in the row's own lanes; each lane adds x s dy to its columns of the group's sums
//! ```
//! Rows that registers cannot hold have more than 1024 columns, or not a multiple of four. They are
//! read twice: once by their lanes for the factors of dx, then by columns, up to 1024 at a time.
//!
//! Invariant: the order of a row's sums depends only on its length. The order of a column's sums
//! depends only on the number of rows and their length.

use crate::block::{divide, no_unroll};
use crate::machine::hints::block_bounds;
use crate::rescale;
#[cfg(not(target_arch = "nvptx64"))]
use crate::row_chunk::chunk_of;
use crate::row_chunk::{BLOCK, MAX_ROWS, RowChunk, SUMS, groups_of, width};
use crate::stored::Stored;
use crate::tile::SharedTile;
use crate::vector::{F4, VectorPart, load, store};
use crate::warp::{REG_COLUMNS, Row, RowFragment};
use crate::{family, for_each_vector, with_held};
use cuda_std::prelude::*;
use half::bf16;

family! {
    /// Computes `h = x + residual`, `y[r, c] = h[r, c] s[r] gain[c]`, with `s[r] = 1 / sqrt(mean_c
    /// h[r, c]^2 + epsilon)`.
    ///
    /// Shapes: `x`, `residual`, `h`, `y`: `[rows, cols]`, `gain`: `[cols]`, `inverse_rms` (s):
    /// `[rows]`. If `residual` is empty, h is x and is not written. The norm uses h as rounded for
    /// storage. Overwrites its outputs.
    rms_norm_forward<S: Stored> { rms_norm_forward_f32: f32; rms_norm_forward_bf16: bf16; }
    unsafe fn(
        x: &[S],
        residual: &[S],
        gain: &[f32],
        cols: usize,
        epsilon: f32,
        h: *mut S,
        y: *mut S,
        inverse_rms: *mut f32,
    ) {
        // SAFETY: the row lies inside the arguments; its lanes stay converged.
        unsafe {
            let Some(row) = Row::new(x.len(), cols) else { return };
            with_held!(row, cols, forward(x, residual, gain, cols, epsilon, h, y, inverse_rms))
        }
    }
    // SAFETY: `x` has whole rows of `cols`, `y` is as long, and so are `residual` and `h` if used.
    // `gain` has one row, and `inverse_rms` one element for each row. A thread accesses a row only
    // if it begins inside `x`.
    contract unsafe { block: crate::warp::ROW_BLOCK, shared: 0 } |k| {
        let rows = crate::warp::rows_in("x", k.x.len(), k.cols)?;
        if !k.residual.is_empty() {
            Violation::unless_length("residual", k.x.len(), k.residual.len())?;
            Violation::unless_length("h", k.x.len(), k.h.len())?;
        }
        Violation::unless_length("gain", k.cols, k.gain.len())?;
        Violation::unless_length("y", k.x.len(), k.y.len())?;
        Violation::unless_length("inverse_rms", rows, k.inverse_rms.len())?;
        crate::warp::Row::grid("x", k.x.len(), k.cols)
    }
}

/// # Safety
/// The row lies inside the arguments.
#[inline(always)]
unsafe fn forward<const REGS: usize, S: Stored>(
    row: Row,
    x: &[S],
    residual: &[S],
    gain: &[f32],
    cols: usize,
    epsilon: f32,
    h: *mut S,
    y: *mut S,
    inverse_rms: *mut f32,
) {
    // SAFETY: the row lies inside the arguments.
    unsafe {
        let mut held = RowFragment::<REGS, _>::new(row, x, row.start, cols, 0.0);
        if !residual.is_empty() {
            let residual = RowFragment::<REGS, _>::new(row, residual, row.start, cols, 0.0);
            for_each_vector!(REGS, row, cols, |at, column, part| {
                let value = (held.get(at, column, part) + residual.get(at, column, part)).rounded::<S>();
                value.store_part(h, row.start + column, part);
                held.hold(at, value);
            });
        }
        // Values that are not held in registers are added again.
        macro_rules! row_value {
            ($at:ident, $column:ident, $part:ident) => {
                if REGS > 0 || residual.is_empty() {
                    held.get($at, $column, $part)
                } else {
                    (held.get($at, $column, $part) + F4::load_part(residual, row.start + $column, $part, 0.0))
                        .rounded::<S>()
                }
            };
        }
        let gain = RowFragment::<REGS, _>::new(row, gain, 0, cols, 0.0);
        let mut factor = rescale::FIRST;
        let scale = loop {
            no_unroll();
            let mut squares = F4::splat(0.0);
            for_each_vector!(REGS, row, cols, |at, column, part| {
                let value = row_value!(at, column, part) * F4::splat(factor);
                squares = squares.fma(value, value);
            });
            let sum = row.sum(squares);
            match rescale::again(sum, factor) {
                Some(smaller) => factor = smaller,
                None => break rescale::inverse_root(sum, cols, epsilon, factor),
            }
        };
        for_each_vector!(REGS, row, cols, |at, column, part| {
            let value = row_value!(at, column, part) * F4::splat(factor);
            (value * F4::splat(scale) * gain.get(at, column, part)).store_part(y, row.start + column, part);
        });
        if row.is_first_lane() {
            store(inverse_rms, row.number, scale * factor);
        }
    }
}

/// The shared memory of the backward pass in bytes: the sums, and a factor for each row.
#[cfg(not(target_arch = "nvptx64"))]
const BACKWARD_BYTES: u32 = (SUMS + MAX_ROWS) as u32 * 4;
/// A flag of `add`: the gradient of x is added to the content of `dx`.
pub const ADD_DX: u32 = 1;
/// A flag of `add`: the gradient of the gain is added to the content of `dgain`.
pub const ADD_DGAIN: u32 = 2;

/// The work of one block of the backward pass.
#[derive(Clone, Copy)]
struct Backward<'k, S> {
    x: &'k [S],
    gain: &'k [f32],
    inverse_rms: &'k [f32],
    dy: &'k [S],
    parts: usize,
    cols: usize,
    add: u32,
    dx: *mut S,
    dgain: *mut f32,
    /// The block's rows.
    rows: RowChunk,
    /// The sums for the gain.
    sums: SharedTile<f32>,
}

impl<S: Stored> Backward<'_, S> {
    /// Returns the coefficient of x in dx: `dot`, which is `sum_c dy gain x`, times `s^3 / cols`.
    /// If a row is rescaled, all of these and dx are.
    #[inline(always)]
    fn x_coefficient(self, dot: f32, scale: f32) -> f32 {
        // s^3 could overflow where this product does not.
        dot * scale / self.cols as f32 * scale * scale
    }

    /// Processes the rows of this thread's group, from `row` on. Its lanes read each row once and
    /// hold it in registers. They write dx, and sum their columns for the gain.
    ///
    /// # Safety
    /// The rows lie inside the arguments and suit `REGS`, which is not 0.
    #[inline(always)]
    unsafe fn held<const REGS: usize>(self, mut row: Row) {
        let Self { cols, .. } = self;
        let group = (row.number - self.rows.first) * width(cols);
        // SAFETY: the rows lie inside the arguments and suit `REGS`.
        unsafe {
            for_each_vector!(REGS, row, cols, |_at, column, _part| {
                self.sums.set4((group + column) as u32, F4::splat(0.0));
            });
            while row.number < self.rows.end {
                let [factor, scale] = rescale::of_scale(load(self.inverse_rms, row.number), cols);
                let mut x = RowFragment::<REGS, _>::new(row, self.x, row.start, cols, 0.0);
                let mut dy = RowFragment::<REGS, _>::new(row, self.dy, row.start, cols, 0.0);
                let mut part = 1;
                while part < self.parts {
                    no_unroll();
                    let more = RowFragment::<REGS, _>::new(row, self.dy, row.start + part * self.x.len(), cols, 0.0);
                    for_each_vector!(REGS, row, cols, |at, column, part| {
                        dy.hold(at, dy.get(at, column, part) + more.get(at, column, part));
                    });
                    part += 1;
                }
                let mut dot = F4::splat(0.0);
                for_each_vector!(REGS, row, cols, |at, column, part| {
                    let (x_here, dy_here) = (x.get(at, column, part) * F4::splat(factor), dy.get(at, column, part));
                    x.hold(at, x_here);
                    let dy_gain = dy_here * F4::load_part(self.gain, column, part, 0.0);
                    // Sums in registers would lower the occupancy.
                    let sum = self.sums.get4((group + column) as u32);
                    self.sums.set4((group + column) as u32, sum.fma(x_here * F4::splat(scale), dy_here));
                    dot = dot.fma(dy_gain, x_here);
                    dy.hold(at, dy_gain);
                });
                let coefficient = self.x_coefficient(row.sum(dot), scale);
                let mut old = [F4::splat(0.0); REGS];
                if self.add & ADD_DX != 0 {
                    for_each_vector!(REGS, row, cols, |at, column, part| {
                        old[at] = F4::load_part_raw(self.dx, row.start + column, part, 0.0);
                    });
                }
                for_each_vector!(REGS, row, cols, |at, column, part| {
                    let gradient = dy.get(at, column, part) * F4::splat(scale);
                    let gradient = gradient.fma(F4::splat(-coefficient), x.get(at, column, part));
                    (old[at] + gradient * F4::splat(factor)).store_part(self.dx, row.start + column, part);
                });
                row = row.later(groups_of(cols), cols);
            }
        }
    }

    /// Processes rows of any length. The block reads them twice: by their lanes for the factors,
    /// then by columns.
    ///
    /// # Safety
    /// The rows lie inside the arguments. All threads of the block call it together.
    #[inline(always)]
    unsafe fn read_twice(self, coefficients: SharedTile<f32>) {
        let Self { x, gain, cols, .. } = self;
        let at_once = groups_of(cols);
        // SAFETY: the rows lie inside the arguments, and all threads of the block execute this, as
        // the caller guarantees.
        unsafe {
            let mut next = Row::after(self.rows.first, x.len(), cols);
            while let Some(row) = next
                && row.number < self.rows.end
            {
                let mut dot = F4::splat(0.0);
                let [factor, scale] = rescale::of_scale(load(self.inverse_rms, row.number), cols);
                for_each_vector!(row, cols, |column, part| {
                    let x = F4::load_part(x, row.start + column, part, 0.0) * F4::splat(factor);
                    let gain = F4::load_part(gain, column, part, 0.0);
                    dot = dot.fma(self.dy(row.start + column, part) * gain, x);
                });
                let coefficient = self.x_coefficient(row.sum(dot), scale);
                if row.is_first_lane() {
                    coefficients.set((row.number - self.rows.first) as u32, coefficient);
                }
                next = Some(row.later(at_once, cols));
            }
            thread::sync_threads();

            let width = width(cols);
            let quads = width / F4::LEN;
            let mut start = 0;
            while start < cols {
                let mut item = thread::thread_idx_x() as usize;
                while item < quads * at_once {
                    let (group, quad) = divide(item, quads);
                    let column = start + quad * F4::LEN;
                    if column < cols {
                        let sum = if cols.is_multiple_of(F4::LEN) {
                            self.columns(coefficients, group, column, VectorPart::Whole)
                        } else {
                            self.columns(coefficients, group, column, VectorPart::first(cols - column))
                        };
                        self.sums.set4((group * width + quad * F4::LEN) as u32, sum);
                    }
                    item += BLOCK as usize;
                }
                thread::sync_threads();
                self.rows.finish(self.sums, start, cols, self.add & ADD_DGAIN != 0, self.dgain);
                thread::sync_threads();
                start += width;
            }
        }
    }

    /// Returns the gradient of y at an index: the sum of its parts, ascending.
    #[inline(always)]
    unsafe fn dy(self, index: usize, part: VectorPart) -> F4 {
        // SAFETY: each part is as long as x, in which the index lies.
        unsafe {
            let mut sum = F4::load_part(self.dy, index, part, 0.0);
            let mut at = 1;
            while at < self.parts {
                no_unroll();
                sum = sum + F4::load_part(self.dy, index + at * self.x.len(), part, 0.0);
                at += 1;
            }
            sum
        }
    }

    /// Writes four columns of dx in the rows of a group. Returns their sums for the gain.
    #[inline(always)]
    unsafe fn columns(self, coefficients: SharedTile<f32>, group: usize, column: usize, part: VectorPart) -> F4 {
        let (mut number, mut sum) = (self.rows.first + group, F4::splat(0.0));
        // SAFETY: the rows lie inside the arguments, and the column is below `cols`.
        unsafe {
            let gain = F4::load_part(self.gain, column, part, 0.0);
            while number < self.rows.end {
                let index = number * self.cols + column;
                let [factor, scale] = rescale::of_scale(load(self.inverse_rms, number), self.cols).map(F4::splat);
                let (x, dy) = (F4::load_part(self.x, index, part, 0.0) * factor, self.dy(index, part));
                let coefficient = F4::splat(-coefficients.get((number - self.rows.first) as u32));
                let old =
                    if self.add & ADD_DX == 0 { F4::splat(0.0) } else { F4::load_part_raw(self.dx, index, part, 0.0) };
                (old + (dy * gain * scale).fma(coefficient, x) * factor).store_part(self.dx, index, part);
                sum = sum.fma(x * scale, dy);
                number += groups_of(self.cols);
            }
        }
        sum
    }
}

family! {
    /// Computes `dx[r, c] = s g[c] - x[r, c] s^3 / cols sum_c g[c] x[r, c]`, and `dgain[i, c] =
    /// sum_r x[r, c] s dy[r, c]` over the rows r of chunk i.
    ///
    /// Here `s = inverse_rms[r]`, `g[c] = dy[r, c] gain[c]`, and dy is the sum of `parts` arrays.
    /// Shapes: `x`, `dx`: `[rows, cols]`, `dy`: `[parts, rows, cols]`, `gain`: `[cols]`,
    /// `inverse_rms`: `[rows]`, `dgain`: `[ceil(rows / chunk), cols]`.
    /// [`sum_rows`](struct@crate::reduce::sum_rows) reduces the rows of `dgain`.
    ///
    /// A block has one chunk of [`chunk_of`] rows. It first sums the rows with equal number mod
    /// [`groups_of`], ascending, then these sums, ascending. Overwrites `dx` and `dgain`, or adds
    /// to those that `add` selects.
    rms_norm_backward<S: Stored> { rms_norm_backward_f32: f32; rms_norm_backward_bf16: bf16; }
    unsafe fn(
        x: &[S],
        gain: &[f32],
        inverse_rms: &[f32],
        dy: &[S],
        parts: usize,
        cols: usize,
        chunk: usize,
        add: u32,
        dx: *mut S,
        dgain: *mut f32,
    ) {
        // Four blocks have more reads under way than the three for which the assembler would leave
        // room. Rows of f32 would not fit the registers.
        if size_of::<S>() == 2 {
            block_bounds::<BLOCK, 4>();
        }
        let rows = RowChunk::of_block(chunk, inverse_rms.len());
        // SAFETY: the tiles fill the declared shared memory. Rows and columns are compared with the
        // length of `x`, which the others share. Every thread reaches every barrier.
        unsafe {
            let sums = SharedTile::new(0, SUMS as u32);
            let coefficients = SharedTile::new(SUMS as u32 * 4, MAX_ROWS as u32);
            let block = Backward { x, gain, inverse_rms, dy, parts, cols, add, dx, rows, sums, dgain };
            if !cols.is_multiple_of(F4::LEN) || cols > REG_COLUMNS {
                block.read_twice(coefficients);
                return;
            }
            if let Some(row) = Row::after(rows.first, x.len(), cols) {
                if cols > REG_COLUMNS / 2 {
                    block.held::<8>(row.of_whole_warp());
                } else {
                    block.held::<4>(row);
                }
            }
            thread::sync_threads();
            rows.finish(sums, 0, cols, add & ADD_DGAIN != 0, dgain);
        }
    }
    // SAFETY: `x` has whole rows of `cols`, `dx` is as long, `dy` is `parts` times as long, `gain`
    // has one row, and `inverse_rms` one element for each row. The shared memory has room for
    // `chunk` rows, and `dgain` has a row for each chunk.
    contract unsafe { block: BLOCK, shared: BACKWARD_BYTES } |k| {
        let rows = crate::warp::rows_in("x", k.x.len(), k.cols)?;
        Violation::unless_length("gain", k.cols, k.gain.len())?;
        Violation::unless_length("inverse_rms", rows, k.inverse_rms.len())?;
        Violation::unless(k.parts > 0, "parts", "at least 1", k.parts)?;
        Violation::unless_length("dy", Size::of(k.parts).times(k.x.len()), k.dy.len())?;
        Violation::unless_length("dx", k.x.len(), k.dx.len())?;
        Violation::unless(k.chunk == chunk_of(rows, k.cols), "chunk", "the value of `chunk_of`", k.chunk)?;
        Violation::unless_length("dgain", Size::of(rows).div_ceil(k.chunk).times(k.cols), k.dgain.len())?;
        Grid::cover(rows, k.chunk)
    }
}
