//! LayerNorm over the columns of each row, after an optional residual is added, forward and
//! backward (Ba, Kiros and Hinton, 2016).
//!
//! Invariant: the order of a row's sums depends only on its length, and that of a column's sums
//! only on the number of rows. The variance is the mean of squared differences from the mean, so
//! that a row of large, nearly equal numbers keeps its precision.

use crate::block::{divide, no_unroll};
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
    /// Computes `h = x + residual`, `y[r, c] = (h[r, c] - mean[r]) s[r] gain[c] + bias[c]`, with
    /// `s[r] = 1 / sqrt(mean_c (h[r, c] - mean[r])^2 + epsilon)`.
    ///
    /// Shapes: `x`, `residual`, `h`, `y`: `[rows, cols]`, `gain`, `bias`: `[cols]`, `mean`,
    /// `inverse_std` (s): `[rows]`. If `residual` is empty, h is x and is not written. The norm
    /// uses h as rounded for storage. Overwrites its outputs.
    layer_norm_forward<S: Stored> { layer_norm_forward_f32: f32; layer_norm_forward_bf16: bf16; }
    unsafe fn(
        x: &[S],
        residual: &[S],
        gain: &[f32],
        bias: &[f32],
        cols: usize,
        epsilon: f32,
        h: *mut S,
        y: *mut S,
        mean: *mut f32,
        inverse_std: *mut f32,
    ) {
        // SAFETY: the row lies inside the arguments; its lanes stay converged.
        unsafe {
            let Some(row) = Row::new(x.len(), cols) else { return };
            with_held!(row, cols, forward(x, residual, gain, bias, cols, epsilon, h, y, mean, inverse_std))
        }
    }
    // SAFETY: `x` is whole rows of `cols`, `y` as long, and so are `residual` and `h` if used.
    // `gain` and `bias` are one row. `mean` and `inverse_std` have an element for each row. A row
    // is accessed only if it begins inside `x`.
    contract unsafe { block: crate::warp::ROW_BLOCK, shared: 0 } |k| {
        let rows = crate::warp::rows_in("x", k.x.len(), k.cols)?;
        if !k.residual.is_empty() {
            Violation::unless_length("residual", k.x.len(), k.residual.len())?;
            Violation::unless_length("h", k.x.len(), k.h.len())?;
        }
        Violation::unless_length("gain", k.cols, k.gain.len())?;
        Violation::unless_length("bias", k.cols, k.bias.len())?;
        Violation::unless_length("y", k.x.len(), k.y.len())?;
        Violation::unless_length("mean", rows, k.mean.len())?;
        Violation::unless_length("inverse_std", rows, k.inverse_std.len())?;
        Row::grid("x", k.x.len(), k.cols)
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
    bias: &[f32],
    cols: usize,
    epsilon: f32,
    h: *mut S,
    y: *mut S,
    mean: *mut f32,
    inverse_std: *mut f32,
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
        let mut factor = rescale::FIRST;
        let [center, scale] = loop {
            no_unroll();
            let (mut sum, mut squares) = (F4::splat(0.0), F4::splat(0.0));
            for_each_vector!(REGS, row, cols, |at, column, part| {
                sum = sum + row_value!(at, column, part) * F4::splat(factor);
            });
            let center = row.sum(sum) / cols as f32;
            for_each_vector!(REGS, row, cols, |at, column, part| {
                let value = row_value!(at, column, part) * F4::splat(factor);
                let difference = (value - F4::splat(center)).only(part);
                squares = squares.fma(difference, difference);
            });
            let sum = row.sum(squares);
            match rescale::again(sum, factor) {
                Some(smaller) => factor = smaller,
                None => break [center, rescale::inverse_root(sum, cols, epsilon, factor)],
            }
        };
        for_each_vector!(REGS, row, cols, |at, column, part| {
            let value = row_value!(at, column, part) * F4::splat(factor);
            let normal = (value - F4::splat(center)) * F4::splat(scale);
            let (gain, bias) = (F4::load_part(gain, column, part, 0.0), F4::load_part(bias, column, part, 0.0));
            bias.fma(normal, gain).store_part(y, row.start + column, part);
        });
        if row.is_first_lane() {
            store(mean, row.number, rescale::restored(center, factor));
            store(inverse_std, row.number, scale * factor);
        }
    }
}

/// The shared memory of the backward pass in bytes: the sums for the gain and for the bias, and two
/// means for each row.
#[cfg(not(target_arch = "nvptx64"))]
const BACKWARD_BYTES: u32 = 2 * (SUMS + MAX_ROWS) as u32 * 4;
/// A flag of `add`: the gradient of h is added to the content of `dh`.
pub const ADD_DH: u32 = 1;
/// A flag of `add`: the gradient of the gain is added to the content of `dgain`.
pub const ADD_DGAIN: u32 = 2;
/// A flag of `add`: the gradient of the bias is added to the content of `dbias`.
pub const ADD_DBIAS: u32 = 4;

/// The statistics of a row: mean and inverse deviation after scaling by `factor`. See [`rescale`].
#[derive(Clone, Copy)]
struct RowPlace {
    center: f32,
    scale: f32,
    factor: f32,
}

impl RowPlace {
    /// Returns `(h - mean) s`.
    #[inline(always)]
    fn normal(self, h: F4) -> F4 {
        (h * F4::splat(self.factor) - F4::splat(self.center)) * F4::splat(self.scale)
    }
}

/// The work of one block of the backward pass.
#[derive(Clone, Copy)]
struct Backward<'k, S> {
    h: &'k [S],
    gain: &'k [f32],
    mean: &'k [f32],
    inverse_std: &'k [f32],
    dy: &'k [S],
    cols: usize,
    add: u32,
    dh: *mut S,
    /// The block's rows.
    rows: RowChunk,
    /// The mean of g, and of g n, for each row.
    means: [SharedTile<f32>; 2],
}

impl<S: Stored> Backward<'_, S> {
    /// Processes the rows of this thread's group, from `row` on. Its lanes read each row once and
    /// hold it in registers. They write dh, and sum their columns for gain and bias.
    ///
    /// # Safety
    /// The rows lie inside the arguments and suit `REGS`, which is not 0.
    #[inline(always)]
    unsafe fn held<const REGS: usize>(self, mut row: Row, [of_gain, of_bias]: [SharedTile<f32>; 2]) {
        let Self { cols, .. } = self;
        let group = (row.number - self.rows.first) * width(cols);
        // SAFETY: the rows lie inside the arguments and suit `REGS`.
        unsafe {
            for_each_vector!(REGS, row, cols, |_at, column, _part| {
                of_gain.set4((group + column) as u32, F4::splat(0.0));
                of_bias.set4((group + column) as u32, F4::splat(0.0));
            });
            while row.number < self.rows.end {
                let (place, scale) = self.place(row.number);
                let mut normal = RowFragment::<REGS, _>::new(row, self.h, row.start, cols, 0.0);
                let mut g = RowFragment::<REGS, _>::new(row, self.dy, row.start, cols, 0.0);
                let (mut sum, mut dot) = (F4::splat(0.0), F4::splat(0.0));
                for_each_vector!(REGS, row, cols, |at, column, part| {
                    let n = place.normal(normal.get(at, column, part));
                    let dy = g.get(at, column, part);
                    // Sums in registers would lower the occupancy.
                    let place = (group + column) as u32;
                    of_gain.set4(place, of_gain.get4(place).fma(n, dy));
                    of_bias.set4(place, of_bias.get4(place) + dy);
                    let g_here = dy * F4::load_part(self.gain, column, part, 0.0);
                    sum = sum + g_here;
                    dot = dot.fma(g_here, n);
                    normal.hold(at, n);
                    g.hold(at, g_here);
                });
                let (mean_g, mean_g_n) = (row.sum(sum) / cols as f32, row.sum(dot) / cols as f32);
                let mut old = [F4::splat(0.0); REGS];
                if self.add & ADD_DH != 0 {
                    for_each_vector!(REGS, row, cols, |at, column, part| {
                        old[at] = F4::load_part_raw(self.dh, row.start + column, part, 0.0);
                    });
                }
                for_each_vector!(REGS, row, cols, |at, column, part| {
                    let centered = g.get(at, column, part) - F4::splat(mean_g);
                    let unscaled = centered.fma(F4::splat(-mean_g_n), normal.get(at, column, part));
                    old[at].fma(unscaled, F4::splat(scale)).store_part(self.dh, row.start + column, part);
                });
                row = row.later(groups_of(cols), cols);
            }
        }
    }

    /// Computes the means of the block's rows. Each row's lanes compute its sums.
    ///
    /// # Safety
    /// The rows lie inside the arguments; all threads of the block call it together.
    #[inline(always)]
    unsafe fn means(self) {
        let Self { h, cols, .. } = self;
        // SAFETY: the rows lie inside the arguments, and all threads of the block execute this, as
        // the caller guarantees.
        unsafe {
            let mut next = Row::after(self.rows.first, h.len(), cols);
            while let Some(row) = next
                && row.number < self.rows.end
            {
                let (mut sum, mut dot) = (F4::splat(0.0), F4::splat(0.0));
                let (place, _) = self.place(row.number);
                for_each_vector!(row, cols, |column, part| {
                    let normal = self.normal(row.start + column, part, place);
                    let g = F4::load_part(self.dy, row.start + column, part, 0.0)
                        * F4::load_part(self.gain, column, part, 0.0);
                    sum = sum + g;
                    dot = dot.fma(g, normal);
                });
                let (sum, dot) = (row.sum(sum), row.sum(dot));
                if row.is_first_lane() {
                    let at = (row.number - self.rows.first) as u32;
                    self.means[0].set(at, sum / cols as f32);
                    self.means[1].set(at, dot / cols as f32);
                }
                next = Some(row.later(groups_of(cols), cols));
            }
        }
    }

    /// Returns the statistics of a row, and s.
    ///
    /// # Safety
    /// The row has an element in `mean` and in `inverse_std`.
    #[inline(always)]
    unsafe fn place(self, row: usize) -> (RowPlace, f32) {
        // SAFETY: the caller guarantees it.
        let (center, scale) = unsafe { (load(self.mean, row), load(self.inverse_std, row)) };
        let [factor, of_scaled] = rescale::of_scale(scale, self.cols);
        (RowPlace { center: center * factor, scale: of_scaled, factor }, scale)
    }

    /// Returns `(h - mean) s` at an index of a row.
    #[inline(always)]
    unsafe fn normal(self, index: usize, part: VectorPart, place: RowPlace) -> F4 {
        // SAFETY: the index lies in `h`.
        unsafe { place.normal(F4::load_part(self.h, index, part, 0.0)) }
    }

    /// Writes four columns of dh in the rows of a group. Returns their sums for gain and bias.
    ///
    /// # Safety
    /// The rows lie inside the arguments, the column is below `cols`, and the means were computed.
    #[inline(always)]
    unsafe fn columns(self, group: usize, column: usize, part: VectorPart) -> [F4; 2] {
        let (mut number, mut dgain, mut dbias) = (self.rows.first + group, F4::splat(0.0), F4::splat(0.0));
        // SAFETY: the caller guarantees that the rows lie inside the arguments, and that the column
        // is below `cols`.
        unsafe {
            let gain = F4::load_part(self.gain, column, part, 0.0);
            while number < self.rows.end {
                let index = number * self.cols + column;
                let (place, scale) = self.place(number);
                let normal = self.normal(index, part, place);
                let dy = F4::load_part(self.dy, index, part, 0.0);
                let [of_g, of_g_n] = self.means.map(|means| F4::splat(means.get((number - self.rows.first) as u32)));
                let old =
                    if self.add & ADD_DH == 0 { F4::splat(0.0) } else { F4::load_part_raw(self.dh, index, part, 0.0) };
                let unscaled = (dy * gain - of_g).fma(-of_g_n, normal);
                old.fma(unscaled, F4::splat(scale)).store_part(self.dh, index, part);
                dgain = dgain.fma(normal, dy);
                dbias = dbias + dy;
                number += groups_of(self.cols);
            }
        }
        [dgain, dbias]
    }
}

family! {
    /// Computes `dh[r, c] = s (g[c] - mean_c g - n[c] mean_c (g n))`. Over the rows r of chunk i it
    /// also computes `dgain[i, c] = sum_r n[c] dy[r, c]` and `dbias[i, c] = sum_r dy[r, c]`. Here
    /// `s = inverse_std[r]`, `g[c] = dy[r, c] gain[c]`, and `n[c] = (h[r, c] - mean[r]) s`.
    ///
    /// Shapes: `h`, `dy`, `dh`: `[rows, cols]`, `gain`: `[cols]`, `mean`, `inverse_std`: `[rows]`,
    /// `dgain`, `dbias`: `[ceil(rows / chunk), cols]`. [`sum_rows`](struct@crate::reduce::sum_rows)
    /// reduces the last two. A block has a chunk of [`chunk_of`](crate::row_chunk::chunk_of) rows;
    /// see [`row_chunk`](crate::row_chunk). Overwrites its outputs, or adds to those that `add`
    /// selects.
    layer_norm_backward<S: Stored> { layer_norm_backward_f32: f32; layer_norm_backward_bf16: bf16; }
    unsafe fn(
        h: &[S],
        gain: &[f32],
        mean: &[f32],
        inverse_std: &[f32],
        dy: &[S],
        cols: usize,
        chunk: usize,
        add: u32,
        dh: *mut S,
        dgain: *mut f32,
        dbias: *mut f32,
    ) {
        let rows = RowChunk::of_block(chunk, mean.len());
        // SAFETY: the tiles fill the declared shared memory. Rows and columns are checked against
        // `h`, whose length the others have. Every thread reaches every barrier.
        unsafe {
            let sums = [0, 4].map(|times| SharedTile::new(times * SUMS as u32, SUMS as u32));
            let means = [0, 4].map(|times| SharedTile::new(8 * SUMS as u32 + times * MAX_ROWS as u32, MAX_ROWS as u32));
            let block = Backward { h, gain, mean, inverse_std, dy, cols, add, dh, rows, means };
            if cols.is_multiple_of(F4::LEN) && cols <= REG_COLUMNS {
                if let Some(row) = Row::after(rows.first, h.len(), cols) {
                    if cols > REG_COLUMNS / 2 {
                        block.held::<8>(row.of_whole_warp(), sums);
                    } else {
                        block.held::<4>(row, sums);
                    }
                }
                thread::sync_threads();
                rows.finish(sums[0], 0, cols, add & ADD_DGAIN != 0, dgain);
                rows.finish(sums[1], 0, cols, add & ADD_DBIAS != 0, dbias);
                return;
            }
            // Rows of any other length are read twice: by their lanes for the means, then by
            // columns.
            block.means();
            thread::sync_threads();
            let (width, groups) = (width(cols), groups_of(cols));
            let quads = width / F4::LEN;
            let mut start = 0;
            while start < cols {
                let mut item = thread::thread_idx_x() as usize;
                while item < quads * groups {
                    let (group, quad) = divide(item, quads);
                    let column = start + quad * F4::LEN;
                    if column < cols {
                        let part = if cols.is_multiple_of(F4::LEN) { VectorPart::Whole } else { VectorPart::first(cols - column) };
                        let [of_gain, of_bias] = block.columns(group, column, part);
                        let at = (group * width + quad * F4::LEN) as u32;
                        sums[0].set4(at, of_gain);
                        sums[1].set4(at, of_bias);
                    }
                    item += BLOCK as usize;
                }
                thread::sync_threads();
                rows.finish(sums[0], start, cols, add & ADD_DGAIN != 0, dgain);
                rows.finish(sums[1], start, cols, add & ADD_DBIAS != 0, dbias);
                thread::sync_threads();
                start += width;
            }
        }
    }
    // SAFETY: `h` is whole rows of `cols`, `dy` and `dh` are as long, `gain` is one row, and `mean`
    // and `inverse_std` have an element for each row. The shared memory has room for `chunk` rows,
    // and `dgain` and `dbias` have a row for each chunk.
    contract unsafe { block: BLOCK, shared: BACKWARD_BYTES } |k| {
        let rows = crate::warp::rows_in("h", k.h.len(), k.cols)?;
        Violation::unless_length("gain", k.cols, k.gain.len())?;
        Violation::unless_length("mean", rows, k.mean.len())?;
        Violation::unless_length("inverse_std", rows, k.inverse_std.len())?;
        Violation::unless_length("dy", k.h.len(), k.dy.len())?;
        Violation::unless_length("dh", k.h.len(), k.dh.len())?;
        Violation::unless(k.chunk == chunk_of(rows, k.cols), "chunk", "the value of `chunk_of`", k.chunk)?;
        let sums = Size::of(rows).div_ceil(k.chunk).times(k.cols);
        Violation::unless_length("dgain", sums, k.dgain.len())?;
        Violation::unless_length("dbias", sums, k.dbias.len())?;
        Grid::cover(rows, k.chunk)
    }
}
