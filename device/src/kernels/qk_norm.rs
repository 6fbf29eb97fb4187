//! RMSNorm over each head of q and of k, each with its own gains (Henry et al., "Query-Key
//! Normalization for Transformers", 2020), forward and backward. v is unchanged.
//!
//! q, k and v are rows of `width` columns, one for each head of each token. A row's number
//! determines its part:
//!
//! ```text
//! packed   row: | q0 | q1 | q2 | q3 | k0 | k1 | v0 | v1 |  then those of the next token
//!               the part follows from: number mod heads of q, k and v
//! stacked  all rows of q, then all of k, then all of v
//!               the part follows from: number / a third of all rows
//! ```
//! Forward gives each row its own lanes; see [`warp`](crate::warp). Backward also sums over rows,
//! for the gains. A group of lanes has every g-th row of a chunk, and holds a sum for each gain of
//! its columns (see [`row_chunk`](crate::row_chunk)).
//!
//! Invariant: the order of a row's sums depends only on its width. The order of the sums for a gain
//! depends only on the numbers of rows and columns.

use crate::block::{divide, no_unroll};
use crate::qkv_layout::QkvLayout;
use crate::row_chunk::{BLOCK, RowChunk, groups_of};
use crate::tile::SharedTile;
use crate::vector::{F4, load, store};
use crate::warp::{Row, lanes_of};
use crate::{family, for_each_vector, rescale};
use cuda_std::prelude::*;
use half::bf16;

/// The columns of the widest head: as many as the lanes of a row hold.
pub const MAX_WIDTH: usize = 256;
/// The vectors of a row that a lane holds.
const REGS: usize = 4;
/// The shared memory of the backward pass in bytes: the sums of all threads, for the gains of q and
/// of k.
const BACKWARD_BYTES: u32 = 2 * BLOCK * (REGS * F4::LEN) as u32 * 4;

/// Returns the part that a row belongs to: q (0), k (1) or v (2).
///
/// # Safety
/// No number except `row` and `stacked` is 0.
#[inline(always)]
unsafe fn part_of(row: usize, rows: usize, layout: QkvLayout) -> u32 {
    let QkvLayout { heads, kv_heads, stacked, .. } = layout;
    // SAFETY: the caller guarantees that no divisor is 0; a third of the rows is not 0 if there is
    // a row.
    unsafe {
        if stacked != 0 {
            return divide(row, rows / 3).0 as u32;
        }
        let (_, head) = divide(row, (heads + 2 * kv_heads) as usize);
        if head < heads as usize {
            0
        } else if head < (heads + kv_heads) as usize {
            1
        } else {
            2
        }
    }
}

family! {
    /// Computes `y[r, c] = x[r, c] s[r] gains[part, c]`, `s[r] = 1 / sqrt(mean_c x[r, c]^2 +
    /// epsilon)`, for the rows of q (`part` 0) and k (1). Rows of v are copied, with s = 1.
    ///
    /// `x`, `y`: q, k and v as for [`flash_forward`](struct@crate::flash_attention::flash_forward).
    /// `gains`: those of q, and `distance` (a multiple of four) elements further those of k.
    /// `inverse_rms` (s): an element for each row. Overwrites `y` and `inverse_rms`.
    qk_norm_forward<S: Stored> { qk_norm_forward_f32: f32; qk_norm_forward_bf16: bf16; }
    unsafe fn(
        x: &[S],
        gains: &[f32],
        layout: QkvLayout,
        distance: u32,
        epsilon: f32,
        y: *mut S,
        inverse_rms: *mut f32,
    ) {
        let cols = layout.width as usize;
        // SAFETY: the row lies inside `x`, `y` and `inverse_rms`, and its lanes stay converged. The
        // sizes are not 0.
        unsafe {
            let Some(row) = Row::new(x.len(), cols) else { return };
            let part = part_of(row.number, inverse_rms_rows(x.len(), cols), layout);
            let mut held = [F4::splat(0.0); REGS];
            for_each_vector!(REGS, row, cols, |at, column, present| {
                held[at] = F4::load_part(x, row.start + column, present, 0.0);
            });
            let mut factor = rescale::FIRST;
            let scale = loop {
                no_unroll();
                let mut squares = F4::splat(0.0);
                for_each_vector!(REGS, row, cols, |at, _column, _present| {
                    let value = held[at] * F4::splat(factor);
                    squares = squares.fma(value, value);
                });
                let sum = row.sum(squares);
                match rescale::again(sum, factor) {
                    Some(smaller) => factor = smaller,
                    None => break rescale::inverse_root(sum, cols, epsilon, factor),
                }
            };
            let is_normed = part < 2;
            for_each_vector!(REGS, row, cols, |at, column, present| {
                let gain = F4::load_part(gains, part as usize % 2 * distance as usize + column, present, 0.0);
                let value = held[at] * F4::splat(factor) * F4::splat(scale) * gain;
                (if is_normed { value } else { held[at] }).store_part(y, row.start + column, present);
            });
            if row.is_first_lane() {
                store(inverse_rms, row.number, if is_normed { scale * factor } else { 1.0 });
            }
        }
    }
    // SAFETY: `x` has whole rows of `width`, those of all heads of a whole number of tokens. `y` is
    // as long, `gains` has two rows, and `inverse_rms` an element for each row. A thread accesses a
    // row only if it begins inside `x`.
    contract unsafe { block: crate::warp::ROW_BLOCK, shared: 0 } |k| {
        let rows = rows_in(k.x.len(), k.layout)?;
        Violation::unless(k.distance >= k.layout.width, "distance", "at least `width`", k.distance)?;
        Violation::unless_aligned("distance", k.distance, F4::LEN)?;
        Violation::unless(Size::of(k.distance).plus(k.layout.width).at_most(u32::MAX as usize), "distance", "less than 2^32", k.distance)?;
        Violation::unless_length("gains", Size::of(k.distance).plus(k.layout.width), k.gains.len())?;
        Violation::unless_length("y", k.x.len(), k.y.len())?;
        Violation::unless_length("inverse_rms", rows, k.inverse_rms.len())?;
        crate::warp::Row::grid("x", k.x.len(), k.layout.width as usize)
    }
}

/// Returns the number of rows of `cols` in `length` elements.
///
/// # Safety
/// `cols` is not 0.
#[inline(always)]
unsafe fn inverse_rms_rows(length: usize, cols: usize) -> usize {
    // SAFETY: the caller guarantees it.
    unsafe { divide(length, cols).0 }
}

family! {
    /// Computes the gradients of [`qk_norm_forward`](struct@qk_norm_forward). `dx` holds the
    /// gradient of y and becomes that of x:
    ///
    /// ```text
    /// dx[r, c] = s (g[c] - x[r, c] s^2 / width sum_c g[c] x[r, c])
    ///   with g[c] = dy[r, c] gains[part, c]; for v, dx = dy
    /// dgains[i, part, c] = sum_r x[r, c] s dy[r, c]
    ///   over the rows r of chunk i that are of this part
    /// ```
    /// `dgains`: `[ceil(rows / chunk), distance + width]`, 0 between the gains.
    /// [`sum_rows`](struct@crate::reduce::sum_rows) reduces its rows. A block has one chunk of
    /// [`chunk_of`](crate::row_chunk::chunk_of) rows. It first sums the rows with equal number mod
    /// [`groups_of`], ascending, then these sums, ascending. Changes `dx`, and overwrites `dgains`.
    qk_norm_backward<S: Stored> { qk_norm_backward_f32: f32; qk_norm_backward_bf16: bf16; }
    unsafe fn(
        x: &[S],
        gains: &[f32],
        inverse_rms: &[f32],
        layout: QkvLayout,
        distance: u32,
        chunk: usize,
        dx: *mut S,
        dgains: *mut f32,
    ) {
        let (width, cols) = (layout.width, layout.width as usize);
        let rows = RowChunk::of_block(chunk, inverse_rms.len());
        let mut sums = [[F4::splat(0.0); REGS]; 2];
        // SAFETY: the rows lie inside the arguments. Their lanes stay converged, and every thread
        // reaches the barrier. The tile fills the declared shared memory.
        unsafe {
            let mut next = Row::after(rows.first, x.len(), cols);
            while let Some(row) = next
                && row.number < rows.end
            {
                let part = part_of(row.number, inverse_rms.len(), layout);
                let [factor, scale] = rescale::of_scale(load(inverse_rms, row.number), cols);
                let (mut held, mut gradients, mut dot) = ([F4::splat(0.0); REGS], [F4::splat(0.0); REGS], F4::splat(0.0));
                for_each_vector!(REGS, row, cols, |at, column, present| {
                    held[at] = F4::load_part(x, row.start + column, present, 0.0) * F4::splat(factor);
                    let dy = F4::load_part_raw(dx, row.start + column, present, 0.0);
                    gradients[at] = dy * F4::load_part(gains, part as usize % 2 * distance as usize + column, present, 0.0);
                    dot = dot.fma(gradients[at], held[at]);
                    let normal = held[at] * F4::splat(scale);
                    if part == 0 {
                        sums[0][at] = sums[0][at].fma(normal, dy);
                    } else if part == 1 {
                        sums[1][at] = sums[1][at].fma(normal, dy);
                    }
                });
                // s^3 could overflow where this product does not.
                let coefficient = row.sum(dot) * scale / cols as f32 * scale * scale;
                if part < 2 {
                    for_each_vector!(REGS, row, cols, |at, column, present| {
                        let gradient = (gradients[at] * F4::splat(scale)).fma(F4::splat(-coefficient), held[at]);
                        (gradient * F4::splat(factor)).store_part(dx, row.start + column, present);
                    });
                }
                next = Some(row.later(groups_of(cols), cols));
            }

            let tile = SharedTile::new(0, BACKWARD_BYTES / 4);
            let lanes = lanes_of(cols);
            let (group, lane) = (thread::thread_idx_x() / lanes, thread::thread_idx_x() % lanes);
            let row_len = lanes * (REGS * F4::LEN) as u32;
            crate::unroll_on_gpu!(part < 2 => {
                crate::unroll_on_gpu!(at < 4 => {
                    let column = (lane + at as u32 * lanes) * F4::LEN as u32;
                    tile.set4((group * 2 + part as u32) * row_len + column, sums[part][at]);
                });
            });
            thread::sync_threads();
            let groups = groups_of(cols) as u32;
            let mut column = thread::thread_idx_x();
            while column < distance + width {
                let mut total = 0.0;
                if column < width || column >= distance {
                    let at = if column < width { column } else { row_len + column - distance };
                    total = tile.get(at);
                    let mut group = 1;
                    while group < groups {
                        total += tile.get(group * 2 * row_len + at);
                        group += 1;
                    }
                }
                store(dgains, thread::block_idx_x() as usize * (distance + width) as usize + column as usize, total);
                column += BLOCK;
            }
        }
    }
    // SAFETY: the argument for `qk_norm_forward` holds here too. `dx` is as long as `x`, `chunk` is
    // a number of rows, and `dgains` has two rows for each chunk.
    contract unsafe { block: BLOCK, shared: BACKWARD_BYTES } |k| {
        let rows = rows_in(k.x.len(), k.layout)?;
        Violation::unless(k.distance >= k.layout.width, "distance", "at least `width`", k.distance)?;
        Violation::unless_aligned("distance", k.distance, F4::LEN)?;
        Violation::unless(Size::of(k.distance).plus(k.layout.width).at_most(u32::MAX as usize), "distance", "less than 2^32", k.distance)?;
        Violation::unless_length("gains", Size::of(k.distance).plus(k.layout.width), k.gains.len())?;
        Violation::unless_length("inverse_rms", rows, k.inverse_rms.len())?;
        let chunk = crate::row_chunk::chunk_of(rows, k.layout.width as usize);
        Violation::unless(k.chunk == chunk, "chunk", "the value of `chunk_of`", k.chunk)?;
        Violation::unless_length("dx", k.x.len(), k.dx.len())?;
        Violation::unless_length("dgains", Size::of(rows).div_ceil(chunk).times(k.gains.len()), k.dgains.len())?;
        Grid::cover(rows, chunk)
    }
}

/// Returns the number of rows of q, k and v in `length` elements, or the violation.
#[cfg(not(target_arch = "nvptx64"))]
fn rows_in(length: usize, layout: QkvLayout) -> Result<usize, cuda_std::launch::Violation> {
    let all = layout.check(F4::LEN, MAX_WIDTH)?;
    crate::warp::rows_in("x", length, all.times(layout.width))?;
    crate::warp::rows_in("x", length, layout.width)
}
