//! Activations: tanh, the tanh form of GELU, squared ReLU and softplus, forward and backward.
//!
//! `gelu_bias_backward` also sums over rows. Its blocks have the thread layout of a [`ColumnTile`],
//! which has a picture. Here a chunk has 128 rows, and a thread 4 of them.
//!
//! Invariant: an element of an output depends only on the same element of the inputs. The order of
//! a bias gradient's sum depends only on the number of rows.

use crate::activations::Activations;
use crate::block::ColumnTile;
use crate::math;
use crate::stored::Stored;
use crate::tile::SharedTile;
use crate::vector::{F4, VectorPart, put};
use crate::{family, map4, unroll_on_gpu, write_own_vectors};
use cuda_std::prelude::*;
use half::bf16;

family! {
    /// Computes y = tanh(x). Shapes: `x`, `y`: `[n]`. Overwrites `y`.
    tanh_forward<S: Stored> { tanh_forward_f32: f32; tanh_forward_bf16: bf16; }
    unsafe fn(x: &[S], y: *mut S) {
        // SAFETY: the vector lies inside `x`, and `y` is as long.
        unsafe {
            write_own_vectors!(twice S, x.len(), y, [x] |_index| map4!(x, S::hyperbolic_tangent));
        }
    }
    // SAFETY: a thread accesses only its own vectors inside `x`; `y` is as long.
    contract unsafe { block: crate::block::BLOCK, shared: 0 } |k| {
        Violation::unless_length("y", k.x.len(), k.y.len())?;
        crate::block::twice_grid::<S>(k.x.len())
    }
}

family! {
    /// Computes dx = dy (1 - y^2), where y = tanh(x). Shapes: `y`, `dy`, `dx`: `[n]`. Overwrites
    /// `dx`.
    tanh_backward<S: Stored> { tanh_backward_f32: f32; tanh_backward_bf16: bf16; }
    unsafe fn(y: &[S], dy: &[S], dx: *mut S) {
        // SAFETY: the vector lies inside `y`, and the others are as long.
        unsafe {
            write_own_vectors!(S, y.len(), dx, [y, dy] |_index| dy * F4::splat(1.0).fma(-y, y));
        }
    }
    // SAFETY: a thread accesses only its own vectors inside `y`; `dy` and `dx` are as long.
    contract unsafe { block: crate::block::BLOCK, shared: 0 } |k| {
        Violation::unless_length("dy", k.y.len(), k.dy.len())?;
        Violation::unless_length("dx", k.y.len(), k.dx.len())?;
        crate::block::own_grid::<S>(k.y.len())
    }
}

family! {
    /// Computes y = gelu(x), the tanh form: 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))).
    /// Shapes: `x`, `y`: `[n]`. Overwrites `y`.
    gelu_forward<S: Stored> { gelu_forward_f32: f32; gelu_forward_bf16: bf16; }
    unsafe fn(x: &[S], y: *mut S) {
        // SAFETY: the vector lies inside `x`, and `y` is as long.
        unsafe {
            write_own_vectors!(twice S, x.len(), y, [x] |_index| map4!(x, S::gelu));
        }
    }
    // SAFETY: a thread accesses only its own vectors inside `x`; `y` is as long.
    contract unsafe { block: crate::block::BLOCK, shared: 0 } |k| {
        Violation::unless_length("y", k.x.len(), k.y.len())?;
        crate::block::twice_grid::<S>(k.x.len())
    }
}

family! {
    /// Computes dx = dy gelu'(x). Shapes: `x`, `dy`, `dx`: `[n]`. Overwrites `dx`.
    gelu_backward<S: Stored> { gelu_backward_f32: f32; gelu_backward_bf16: bf16; }
    unsafe fn(x: &[S], dy: &[S], dx: *mut S) {
        // SAFETY: the vector lies inside `x`, and the others are as long.
        unsafe {
            write_own_vectors!(S, x.len(), dx, [x, dy] |_index| dy * map4!(x, S::gelu_derivative));
        }
    }
    // SAFETY: a thread accesses only its own vectors inside `x`; `dy` and `dx` are as long.
    contract unsafe { block: crate::block::BLOCK, shared: 0 } |k| {
        Violation::unless_length("dy", k.x.len(), k.dy.len())?;
        Violation::unless_length("dx", k.x.len(), k.dx.len())?;
        crate::block::own_grid::<S>(k.x.len())
    }
}

family! {
    /// Computes y = max(x, 0)^2. A NaN stays NaN. Shapes: `x`, `y`: `[n]`. Overwrites `y`.
    relu_squared_forward<S: Stored> { relu_squared_forward_f32: f32; relu_squared_forward_bf16: bf16; }
    unsafe fn(x: &[S], y: *mut S) {
        // SAFETY: the vector lies inside `x`, and `y` is as long.
        unsafe {
            write_own_vectors!(S, x.len(), y, [x] |_index| x.zip(x, |x, _| if x <= 0.0 { 0.0 } else { x * x }));
        }
    }
    // SAFETY: a thread accesses only its own vectors inside `x`; `y` is as long.
    contract unsafe { block: crate::block::BLOCK, shared: 0 } |k| {
        Violation::unless_length("y", k.x.len(), k.y.len())?;
        crate::block::own_grid::<S>(k.x.len())
    }
}

family! {
    /// Computes dx = 2 max(x, 0) dy, and 0 where x <= 0. Shapes: `x`, `dy`, `dx`: `[n]`. Overwrites
    /// `dx`.
    relu_squared_backward<S: Stored> { relu_squared_backward_f32: f32; relu_squared_backward_bf16: bf16; }
    unsafe fn(x: &[S], dy: &[S], dx: *mut S) {
        // SAFETY: the vector lies inside `x`, and the others are as long.
        unsafe {
            write_own_vectors!(S, x.len(), dx, [x, dy] |_index| {
                x.zip(dy, |x, dy| if x <= 0.0 { 0.0 } else { 2.0 * x * dy })
            });
        }
    }
    // SAFETY: a thread accesses only its own vectors inside `x`; `dy` and `dx` are as long.
    contract unsafe { block: crate::block::BLOCK, shared: 0 } |k| {
        Violation::unless_length("dy", k.x.len(), k.dy.len())?;
        Violation::unless_length("dx", k.x.len(), k.dx.len())?;
        crate::block::own_grid::<S>(k.x.len())
    }
}

/// Computes log(1 + e^x) as max(x, 0) + log(1 + e^-|x|), which overflows at no x. A NaN stays NaN.
#[inline(always)]
pub fn softplus(x: f32) -> f32 {
    math::rectified(x) + math::log_and_1_of_exp(x)
}

family! {
    /// Computes y = log(1 + e^x). A NaN stays NaN. Shapes: `x`, `y`: `[n]`. Overwrites `y`.
    softplus_forward<S: Stored> { softplus_forward_f32: f32; softplus_forward_bf16: bf16; }
    unsafe fn(x: &[S], y: *mut S) {
        // SAFETY: the vector lies inside `x`, and `y` is as long.
        unsafe {
            write_own_vectors!(twice S, x.len(), y, [x] |_index| map4!(x, softplus));
        }
    }
    // SAFETY: a thread accesses only its own vectors inside `x`; `y` is as long.
    contract unsafe { block: crate::block::BLOCK, shared: 0 } |k| {
        Violation::unless_length("y", k.x.len(), k.y.len())?;
        crate::block::twice_grid::<S>(k.x.len())
    }
}

family! {
    /// Computes dx = dy / (1 + e^-x). Shapes: `x`, `dy`, `dx`: `[n]`. Overwrites `dx`.
    softplus_backward<S: Stored> { softplus_backward_f32: f32; softplus_backward_bf16: bf16; }
    unsafe fn(x: &[S], dy: &[S], dx: *mut S) {
        // SAFETY: the vector lies inside `x`, and the others are as long.
        unsafe {
            write_own_vectors!(S, x.len(), dx, [x, dy] |_index| dy * map4!(x, math::sigmoid));
        }
    }
    // SAFETY: a thread accesses only its own vectors inside `x`; `dy` and `dx` are as long.
    contract unsafe { block: crate::block::BLOCK, shared: 0 } |k| {
        Violation::unless_length("dy", k.x.len(), k.dy.len())?;
        Violation::unless_length("dx", k.x.len(), k.dx.len())?;
        crate::block::own_grid::<S>(k.x.len())
    }
}

/// The rows that a block of [`gelu_bias_backward`](struct@gelu_bias_backward) sums: few, because
/// each element takes much work.
pub const BIAS_ROWS: usize = 128;

family! {
    /// Computes dx = dy gelu'(x), and `db[i, c]` = sum of `dx[r, c]` over the rows r of chunk i,
    /// before dx is rounded. The sum has the order of a [`ColumnTile`](crate::block::ColumnTile).
    /// db is the gradient of a bias within x, and [`sum_rows`](struct@crate::reduce::sum_rows)
    /// reduces its rows.
    ///
    /// Shapes: `x`, `dy`, `dx`: `[rows, cols]`, `db`: `[ceil(rows / 128), cols]`. Overwrites `dx`,
    /// and `db` unless `accumulate` is 1.
    gelu_bias_backward<S: Stored> { gelu_bias_backward_f32: f32; gelu_bias_backward_bf16: bf16; }
    unsafe fn(x: &[S], dy: &[S], cols: usize, accumulate: u32, dx: *mut S, db: *mut f32) {
        // SAFETY: the contract checks `cols`. The tile's columns lie inside `x`, and the others are
        // as long. Its outputs lie inside `db`. No thread returns early.
        unsafe {
            let tile = ColumnTile::new(x.len(), cols, BIAS_ROWS);
            let sum = match tile.part {
                VectorPart::Whole => bias_rows(tile, VectorPart::Whole, x, dy, dx),
                VectorPart::First(count) => bias_rows(tile, VectorPart::First(count), x, dy, dx),
            };
            if let Some((place, total)) = tile.finish(SharedTile::new(0, ColumnTile::BYTES / 4), sum) {
                put(db, place, total, accumulate);
            }
        }
    }
    // SAFETY: `x` has whole rows of `cols`. The grid of `ColumnTile` covers exactly their columns.
    // `dy` and `dx` are as long, and `db` has a row for each chunk of rows. The tile's sums fill
    // the shared memory.
    contract unsafe { block: crate::block::BLOCK, shared: ColumnTile::BYTES } |k| {
        let rows = crate::warp::rows_in("x", k.x.len(), k.cols)?;
        Violation::unless_length("dy", k.x.len(), k.dy.len())?;
        Violation::unless_length("dx", k.x.len(), k.dx.len())?;
        Violation::unless_length("db", Size::of(rows).div_ceil(BIAS_ROWS).times(k.cols), k.db.len())?;
        ColumnTile::grid(rows, k.cols, BIAS_ROWS)
    }
}

/// The rows that a thread of [`gelu_bias_backward`](struct@gelu_bias_backward) has.
const EACH: usize = BIAS_ROWS / ColumnTile::GROUPS as usize;

/// Writes four columns of dx in this thread's rows. Returns their sums, rows ascending.
///
/// # Safety
/// The tile lies inside the arguments, and `part` is its own.
#[inline(always)]
unsafe fn bias_rows<S: Stored>(tile: ColumnTile, part: VectorPart, x: &[S], dy: &[S], dx: *mut S) -> F4 {
    let index = |at| tile.first + at * tile.stride();
    let (mut xs, mut dys) = ([F4::splat(0.0); EACH], [F4::splat(0.0); EACH]);
    let mut sum = F4::splat(0.0);
    // SAFETY: a thread accesses only rows before the tile's end, which lie inside `x`. `dy` and
    // `dx` are as long.
    unsafe {
        // All reads first: the compiler moves no read before a write.
        unroll_on_gpu!(at < EACH => {
            if index(at) < tile.end {
                xs[at] = F4::load_part(x, index(at), part, 0.0);
                dys[at] = F4::load_part(dy, index(at), part, 0.0);
            }
        });
        // A CPU's registers hold more than four floats, so here the loop runs over all rows to fill
        // them.
        #[cfg(not(target_arch = "nvptx64"))]
        let derivatives = {
            let mut all = xs.map(|four| four.0);
            for value in all.as_flattened_mut() {
                *value = S::gelu_derivative(*value);
            }
            all
        };
        unroll_on_gpu!(at < EACH => {
            if index(at) < tile.end {
                #[cfg(target_arch = "nvptx64")]
                let derivative = map4!(xs[at], S::gelu_derivative);
                #[cfg(not(target_arch = "nvptx64"))]
                let derivative = F4(derivatives[at]);
                let gradient = dys[at] * derivative;
                gradient.store_part(dx, index(at), part);
                sum = sum + gradient;
            }
        });
    }
    sum
}
