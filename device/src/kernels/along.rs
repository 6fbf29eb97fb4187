//! Elements selected, added and counted along an extent, of arrays `[outer, n, inner]`.
//!
//! A thread has a column, and walks along the extent in ascending order. Additions therefore have
//! one order, and need no atomics.
//!
//! Invariant: an element of the result has one thread, which adds in ascending order of the
//! selected places.

use crate::block::{BLOCK, divide};
use crate::family;
use crate::stored::Stored;
use crate::vector::{load, load_raw, store};
use crate::warp::{LANES, combine_lanes, rank, rank_column};
use cuda_std::prelude::*;
use cuda_std::warp;
use half::bf16;

/// Returns the index of this thread.
#[inline(always)]
fn own() -> usize {
    thread::block_idx_x() as usize * BLOCK as usize + thread::thread_idx_x() as usize
}

family! {
    /// Computes `out[o, j, i]` = the sum of `x[o, k, i]` for k up to j, in ascending order, or if
    /// `reverse` is 1 for k from j on, in descending order. Sums are f32. Overwrites `out`.
    cumulative_sum<S: Stored> { cumulative_sum_f32: f32; cumulative_sum_bf16: bf16; }
    unsafe fn(x: &[S], n: usize, inner: usize, reverse: u32, out: *mut S) {
        // SAFETY: no extent is 0, and `x` has whole blocks of them. The column lies inside `x` and
        // `out`, which is as long.
        unsafe {
            let number = own();
            if number < x.len() / n {
                let (outer, column) = divide(number, inner);
                let first = outer * n * inner + column;
                let (mut sum, mut step) = (0.0, 0);
                while step < n {
                    let place = first + (if reverse == 0 { step } else { n - 1 - step }) * inner;
                    sum += load(x, place).widen();
                    store(out, place, S::narrow(sum));
                    step += 1;
                }
            }
        }
    }
    // SAFETY: `x` is whole blocks of `n` x `inner`, neither of which is 0, and `out` is as long. A
    // thread accesses its own column.
    contract unsafe { block: BLOCK, shared: 0 } |k| {
        let columns = Size::of(crate::fold::outer_of(k.x.len(), k.n, k.inner)?).times(k.inner);
        Violation::unless_length("out", k.x.len(), k.out.len())?;
        Grid::cover(columns, BLOCK as usize)
    }
}

family! {
    /// Computes `out[o, j, i] = x[o, ids[o, j, i], i]` for j below `count`. An id beyond the extent
    /// gives NaN. `strides` are those of ids, which may be 0: outer, along, inner. Overwrites
    /// `out`.
    take_along<S: Stored> { take_along_f32: f32; take_along_bf16: bf16; }
    unsafe fn(x: &[S], ids: &[u32], n: usize, count: usize, inner: usize, strides: [usize; 3], out: *mut S) {
        // SAFETY: no extent is 0, and `x` has whole blocks of them. The id lies inside `ids`, the
        // element inside `out`, and what is read inside `x`.
        unsafe {
            let (block, place) = (x.len() / n * count, own());
            if place < block {
                let (rest, i) = divide(place, inner);
                let (o, j) = divide(rest, count);
                let id = load(ids, o * strides[0] + j * strides[1] + i * strides[2]) as usize;
                let value = if id < n { load(x, (o * n + id) * inner + i) } else { S::narrow(f32::NAN) };
                store(out, place, value);
            }
        }
    }
    // SAFETY: `x` is whole blocks of `n` x `inner`, neither of which is 0, and `out` has `count`
    // elements for each column. `ids` has the elements that its strides reach.
    contract unsafe { block: BLOCK, shared: 0 } |k| {
        let outer = crate::fold::outer_of(k.x.len(), k.n, k.inner)?;
        let all = Size::of(outer).times(k.count).times(k.inner);
        Violation::unless_length("out", all, k.out.len())?;
        if k.count > 0 && outer > 0 {
            crate::broadcast::check_inside("ids", &[outer, k.count, k.inner], 0, &k.strides, k.ids.len())?;
        }
        Grid::cover(all, BLOCK as usize)
    }
}

family! {
    /// Computes `out[o, k, i]` = the sum of `x[o, j, i]` over the j below `count` with
    /// `ids[o, j, i] = k`, ascending. An id beyond the extent adds nothing. `strides` are those of
    /// ids, as in [`take_along`](struct@take_along). Overwrites `out`.
    add_along<S: Stored> { add_along_f32: f32; add_along_bf16: bf16; }
    unsafe fn(x: &[S], ids: &[u32], n: usize, count: usize, inner: usize, strides: [usize; 3], out: *mut f32) {
        // SAFETY: no extent is 0, and `x` has whole blocks of them. The column lies inside `x` and
        // `out`, and its ids inside `ids`.
        unsafe {
            let number = own();
            if number < x.len() / count {
                let (o, i) = divide(number, inner);
                let mut k = 0;
                while k < n {
                    store(out, (o * n + k) * inner + i, 0.0);
                    k += 1;
                }
                let mut j = 0;
                while j < count {
                    let id = load(ids, o * strides[0] + j * strides[1] + i * strides[2]) as usize;
                    if id < n {
                        let place = (o * n + id) * inner + i;
                        let sum = load_raw(out, place) + load(x, (o * count + j) * inner + i).widen();
                        store(out, place, sum);
                    }
                    j += 1;
                }
            }
        }
    }
    // SAFETY: `x` is whole blocks of `count` x `inner`, neither of which is 0, and `out` has `n`
    // elements for each column. `ids` has the elements that its strides reach. A thread accesses
    // its own column of `out`.
    contract unsafe { block: BLOCK, shared: 0 } |k| {
        let outer = crate::fold::outer_of(k.x.len(), k.count, k.inner)?;
        Violation::unless_length("out", Size::of(outer).times(k.n).times(k.inner), k.out.len())?;
        if outer > 0 {
            crate::broadcast::check_inside("ids", &[outer, k.count, k.inner], 0, &k.strides, k.ids.len())?;
        }
        Grid::cover(Size::of(outer).times(k.inner), BLOCK as usize)
    }
}

family! {
    /// Computes `out[j, c]` = 1 where `ids[j] = c`, and 0 elsewhere. Shapes: `ids`: `[n]`, `out`:
    /// `[n, classes]`. Overwrites `out`.
    one_hot<S: Stored> { one_hot_f32: f32; one_hot_bf16: bf16; }
    unsafe fn(ids: &[u32], classes: usize, out: *mut S) {
        // SAFETY: there are classes. The id lies inside `ids`, and the element inside `out`.
        unsafe {
            let place = own();
            if place < ids.len() * classes {
                let (j, class) = divide(place, classes);
                store(out, place, S::narrow(if load(ids, j) as usize == class { 1.0 } else { 0.0 }));
            }
        }
    }
    // SAFETY: there are classes, and `out` has as many elements for each id.
    contract unsafe { block: BLOCK, shared: 0 } |k| {
        let all = Size::of(k.ids.len()).times(k.classes);
        Violation::unless(k.classes > 0, "classes", "at least 1", k.classes)?;
        Violation::unless_length("out", all, k.out.len())?;
        Grid::cover(all, BLOCK as usize)
    }
}

family! {
    /// Finds the columns of the `count` largest elements of each row, descending. Among equal ones
    /// the first comes first, and a NaN counts as the largest. Shapes: `x`: `[rows, cols]`, cols
    /// below 2^32, `out`: `[rows, count]`, count up to cols. Overwrites `out`.
    top_k<S: Stored> { top_k_f32: f32; top_k_bf16: bf16; }
    unsafe fn(x: &[S], cols: usize, count: usize, out: *mut u32) {
        // SAFETY: `cols` is not 0. A warp has a row inside `x`, and its elements of `out`.
        unsafe {
            let (row, lane) = (own() / LANES as usize, warp::lane_id() as usize);
            if row < x.len() / cols {
                let mut below = u64::MAX;
                let mut at = 0;
                while at < count {
                    let mut best = 0;
                    let mut column = lane;
                    while column < cols {
                        let rank = rank(load(x, row * cols + column).widen(), column as u32);
                        best = if rank > best && rank < below { rank } else { best };
                        column += LANES as usize;
                    }
                    below = combine_lanes(u32::MAX, LANES, best, |a, b| if b > a { b } else { a });
                    if lane == 0 {
                        store(out, row * count + at, rank_column(below));
                    }
                    at += 1;
                }
            }
        }
    }
    // SAFETY: `x` has whole rows of `cols`, and `out` has `count` elements for each.
    contract unsafe { block: BLOCK, shared: 0 } |k| {
        let rows = crate::warp::rows_in("x", k.x.len(), k.cols)?;
        Violation::unless(k.cols <= u32::MAX as usize, "cols", "less than 2^32", k.cols)?;
        Violation::unless(k.count <= k.cols, "count", "at most cols", k.count)?;
        Violation::unless_length("out", Size::of(rows).times(k.count), k.out.len())?;
        Grid::cover(rows, (BLOCK / LANES) as usize)
    }
}
