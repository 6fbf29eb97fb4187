//! The results of a mixture's experts, added up for each token, and the gradient.
//!
//! Each token has `each` places among the rows of all experts, and a gate for each place:
//!
//! ```text
//! tokens, each = 2             rows in the order of their experts
//! token 0  gates .7 .3  ->     place 0   token 1        y[0] = .7 x[2] + .3 x[1]
//! token 1  gates .6 .4         place 1   token 0        y[1] = .6 x[0] + .4 x[3]
//!                              place 2   token 0
//!                              place 3   token 1        order: 2 1 0 3, each token's entry of `gates`
//! ```
//! Invariant: no place causes an access out of bounds. A token's places are added in their order.

use crate::block::divide;
use crate::vector::{F4, load, store};
use crate::warp::Row;
use crate::{family, for_each_vector};
use cuda_std::prelude::*;
use half::bf16;

family! {
    /// Computes `y[t, c] = sum over j of gates[t, j] x[places[t, j], c]`, a chain of fused
    /// multiply-adds over ascending j. Without gates each is 1. A place past the rows of x counts
    /// as NaN.
    ///
    /// Shapes: `x`: rows of `cols`, `gates`: `[tokens, each]` or empty, `places`: `[tokens, each]`,
    /// `y`: `[tokens, cols]` of `length` elements. Overwrites `y`.
    combine_forward<S: Stored> { combine_forward_f32: f32; combine_forward_bf16: bf16; }
    unsafe fn(x: &[S], gates: &[f32], places: &[u32], each: usize, cols: usize, length: usize, y: *mut S) {
        // SAFETY: the row lies inside `y`, and `places` and `gates` have its entries. A row that
        // begins inside `x` ends there. The row's lanes stay converged.
        unsafe {
            let Some(row) = Row::new(length, cols) else { return };
            let first = row.number * each;
            for_each_vector!(row, cols, |column, part| {
                let (mut sum, mut at) = (F4::splat(0.0), first);
                while at < first + each {
                    let start = load(places, at) as usize * cols;
                    let gate = if gates.is_empty() { 1.0 } else { load(gates, at) };
                    let value = match start < x.len() {
                        true => F4::load_part(x, start + column, part, 0.0),
                        false => F4::splat(f32::NAN),
                    };
                    sum = sum.fma(F4::splat(gate), value);
                    at += 1;
                }
                sum.store_part(y, row.start + column, part);
            });
        }
    }
    // SAFETY: `x` is whole rows of `cols`, and `places` has `each` entries for each row of `y`, as
    // `gates` does unless it is empty. A thread accesses `x` only if the place is one of its rows.
    contract unsafe { block: crate::warp::ROW_BLOCK, shared: 0 } |k| {
        crate::warp::rows_in("x", k.x.len(), k.cols)?;
        let entries = Size::of(crate::warp::rows_in("y", k.length, k.cols)?).times(k.each);
        Violation::unless_length("places", entries, k.places.len())?;
        if !k.gates.is_empty() {
            Violation::unless_length("gates", entries, k.gates.len())?;
        }
        Violation::unless_length("y", k.length, k.y.len())?;
        Row::grid("y", k.length, k.cols)
    }
}

family! {
    /// Computes the gradients of [`combine_forward`] for the row of each place i, whose entry is
    /// `order[i]`: `dx[i, c] = gates[order[i]] dy[order[i] / each, c]`, and `dgates[i] = sum over c
    /// of dy[order[i] / each, c] x[i, c]`, in the order of [`warp`](crate::warp). A row whose entry
    /// lies past the end of the gates is skipped.
    ///
    /// Shapes: `x`, `dx`: `[n, cols]`, `dy`: `[n / each, cols]`, `gates`, `order`, `dgates`: `[n]`.
    /// Overwrites `dx` and `dgates`.
    combine_backward<S: Stored> { combine_backward_f32: f32; combine_backward_bf16: bf16; }
    unsafe fn(
        x: &[S],
        dy: &[S],
        gates: &[f32],
        order: &[u32],
        each: usize,
        cols: usize,
        dx: *mut S,
        dgates: *mut f32,
    ) {
        // SAFETY: the row lies inside `x` and `dx`, and `order` and `dgates` have its number. An
        // entry inside `gates` is of a row of `dy`. The row's lanes stay converged.
        unsafe {
            let Some(row) = Row::new(x.len(), cols) else { return };
            let entry = load(order, row.number) as usize;
            if entry >= gates.len() {
                return;
            }
            let (gate, from) = (F4::splat(load(gates, entry)), divide(entry, each).0 * cols);
            let mut products = F4::splat(0.0);
            for_each_vector!(row, cols, |column, part| {
                let dy_here = F4::load_part(dy, from + column, part, 0.0);
                let x_here = F4::load_part(x, row.start + column, part, 0.0);
                products = products.fma(dy_here, x_here);
                (dy_here * gate).store_part(dx, row.start + column, part);
            });
            let sum = row.sum(products);
            if row.is_first_lane() {
                store(dgates, row.number, sum);
            }
        }
    }
    // SAFETY: `x` and `dx` are whole rows of `cols`, and `gates`, `order` and `dgates` have an
    // element for each. `each` is not 0, and `dy` has a row for each `each` of them.
    contract unsafe { block: crate::warp::ROW_BLOCK, shared: 0 } |k| {
        let rows = crate::warp::rows_in("x", k.x.len(), k.cols)?;
        Violation::unless(k.each > 0, "each", "at least 1", k.each)?;
        Violation::unless_length("gates", rows, k.gates.len())?;
        Violation::unless_length("order", rows, k.order.len())?;
        Violation::unless_length("dgates", rows, k.dgates.len())?;
        Violation::unless_length("dx", k.x.len(), k.dx.len())?;
        Violation::unless_length("dy", Size::of(rows).div_ceil(k.each).times(k.cols), k.dy.len())?;
        Row::grid("x", k.x.len(), k.cols)
    }
}
