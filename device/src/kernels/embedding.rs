//! Table rows by id, and the sums of rows with the same id: token embedding, its gradient, gather,
//! and the places of ids in groups.
//!
//! ```text
//! ids     7  2  7  0  7  2     a token's row of the table
//! sorted  0 | 2  2 | 7  7  7   a stable sort, integers only: `sort_ids`, then `merge_ids` until
//!                              one run is left
//! order   3 | 1  5 | 0  2  4   the original positions: those of an id ascend
//!         |   |      |
//! sums    a warp for each id and 128 columns begins where its id does; for more than 64 positions,
//!         a warp for each 64
//!         first 64 -> row of the table     others -> partial sums -> `rows_finish` adds them to
//!                                          the row, ascending
//! ```
//! Invariant: no id causes an access out of bounds. The order of a row's sum depends only on how
//! often its id occurs. A sort by (id, position) has one result, so the bits are the same on every
//! device.

use crate::block::{BLOCK, divide};
use crate::stored::Stored;
use crate::tile::SharedTile;
use crate::vector::{F4, VectorPart, load, store};
use crate::warp::{LANES, Row, RowFragment};
use crate::{contract, family, for_each_vector, unroll_on_gpu, with_held};
use cuda_std::prelude::*;
use half::bf16;

family! {
    /// Computes `y[t, c] = table[ids[t], c]`. Shapes: `table`: `[rows, cols]`, `ids`: `[tokens]`,
    /// `y`: `[tokens, cols]`. An id past the table gives a row of NaN. Overwrites `y`.
    embedding_forward<S: Stored> { embedding_forward_f32: f32; embedding_forward_bf16: bf16; }
    unsafe fn(table: &[f32], ids: &[u32], cols: usize, y: *mut S) {
        // SAFETY: the row lies inside `y`, and `ids` has its number; its lanes stay converged.
        unsafe {
            let Some(row) = Row::new(ids.len() * cols, cols) else { return };
            with_held!(row, cols, row_of(table, ids, cols, y))
        }
    }
    // SAFETY: `table` is whole rows of `cols`, and `y` has a row for each id. A thread accesses
    // `table` only if the id is one of its rows.
    contract unsafe { block: crate::warp::ROW_BLOCK, shared: 0 } |k| {
        crate::warp::rows_in("table", k.table.len(), k.cols)?;
        Violation::unless_length("y", Size::of(k.ids.len()).times(k.cols), k.y.len())?;
        Row::grid("y", k.y.len(), k.cols)
    }
}

family! {
    /// Computes `y[t, c] = x[ids[t], c]`, like [`embedding_forward`], for rows stored in the type
    /// of y.
    gather<S: Stored> { gather_f32: f32; gather_bf16: bf16; }
    unsafe fn(x: &[S], ids: &[u32], cols: usize, y: *mut S) {
        // SAFETY: the row lies inside `y`, and `ids` has its number; its lanes stay converged.
        unsafe {
            let Some(row) = Row::new(ids.len() * cols, cols) else { return };
            with_held!(row, cols, row_of(x, ids, cols, y))
        }
    }
    // SAFETY: `x` is whole rows of `cols`, and `y` has a row for each id. A thread accesses `x`
    // only if the id is one of its rows.
    contract unsafe { block: crate::warp::ROW_BLOCK, shared: 0 } |k| {
        crate::warp::rows_in("x", k.x.len(), k.cols)?;
        Violation::unless_length("y", Size::of(k.ids.len()).times(k.cols), k.y.len())?;
        Row::grid("y", k.y.len(), k.cols)
    }
}

/// # Safety
/// The row lies inside `y`, and `ids` has its number. `table` is whole rows of `cols`.
#[inline(always)]
unsafe fn row_of<const REGS: usize, T: Stored>(row: Row, table: &[T], ids: &[u32], cols: usize, y: *mut impl Stored) {
    // SAFETY: the row lies inside `y`, and a row that begins inside `table` ends there.
    unsafe {
        let start = load(ids, row.number) as usize * cols;
        if start < table.len() {
            let values = RowFragment::<REGS, _>::new(row, table, start, cols, 0.0);
            for_each_vector!(REGS, row, cols, |at, column, part| {
                values.get(at, column, part).store_part(y, row.start + column, part);
            });
        } else {
            for_each_vector!(REGS, row, cols, |_at, column, part| {
                F4::splat(f32::NAN).store_part(y, row.start + column, part);
            });
        }
    }
}

/// The ids that a block of [`sort_ids`](struct@sort_ids) sorts.
pub const RUN: usize = 512;
/// The ids that each of its threads places.
const OWN: usize = RUN / BLOCK as usize;

/// Sorts each [`RUN`] of `ids`, stably. `order` gets their original positions. Shapes: `ids`,
/// `sorted`, `order`: `[n]`, n below 2^32. Overwrites `sorted` and `order`.
///
/// An id's position in the result is the number of ids that come before it. Each thread compares
/// its ids with all ids of the block.
#[kernel]
pub unsafe fn sort_ids(ids: &[u32], sorted: *mut u32, order: *mut u32) {
    let start = thread::block_idx_x() as usize * RUN;
    let place = |own: usize| own * BLOCK as usize + thread::thread_idx_x() as usize;
    // SAFETY: the tile is the declared shared memory, and its indices are below `RUN`. A position
    // below the number of the block's ids is inside the arguments. All threads reach the barrier.
    unsafe {
        let tile = SharedTile::<u32>::new(0, RUN as u32);
        let mut own = 0;
        while own < OWN {
            let index = start + place(own);
            // The padding of the last run has the largest value and the last positions, so it sorts
            // after all ids.
            tile.set(place(own) as u32, if index < ids.len() { load(ids, index) } else { u32::MAX });
            own += 1;
        }
        thread::sync_threads();
        let mut own = 0;
        while own < OWN {
            let here = place(own) as u32;
            let id = tile.get(here);
            let mut before = 0;
            let mut other = 0;
            while other < RUN as u32 {
                let compared = tile.get(other);
                before += usize::from(compared < id) + usize::from(compared == id && other < here);
                other += 1;
            }
            if start + place(own) < ids.len() {
                store(sorted, start + before, id);
                store(order, start + before, (start + place(own)) as u32);
            }
            own += 1;
        }
    }
}

// SAFETY: a block has one run of `ids`. An id's rank is below the number of ids in its run, not
// counting the padding. It is therefore written inside `sorted` and `order`, which are as long as
// `ids`.
contract! { unsafe sort_ids { block: BLOCK, shared: RUN * 4, align: 4 } |k| {
    Violation::unless(k.ids.len() <= u32::MAX as usize, "ids", "less than 2^32", k.ids.len())?;
    Violation::unless_length("sorted", k.ids.len(), k.sorted.len())?;
    Violation::unless_length("order", k.ids.len(), k.order.len())?;
    Grid::cover(k.ids.len(), RUN)
}}

/// Merges each two runs of `run` sorted ids into one. Equal ids of the first run come first.
/// Shapes: `ids`, `order`, `merged`, `merged_order`: `[n]`. Overwrites the last two.
///
/// An id's position in the result is its position in its own run plus the number of ids in the
/// other run that come before it. Bisection finds that number.
#[kernel]
pub unsafe fn merge_ids(ids: &[u32], order: &[u32], run: usize, merged: *mut u32, merged_order: *mut u32) {
    let index = thread::block_idx_x() as usize * BLOCK as usize + thread::thread_idx_x() as usize;
    if index >= ids.len() {
        return;
    }
    // SAFETY: `run` is not 0. Both runs lie inside `ids`, and the number of ids of the other run is
    // at most its length.
    unsafe {
        let id = load(ids, index);
        let (number, _) = divide(index, run);
        let is_first = number % 2 == 0;
        let start = (if is_first { number } else { number - 1 }) * run;
        let middle = smaller(start + run, ids.len());
        let place = if is_first {
            index + bisect(ids, middle, smaller(middle + run, ids.len()), |other| other < id)
        } else {
            index - middle + start + bisect(ids, start, middle, |other| other <= id)
        };
        store(merged, place, id);
        store(merged_order, place, load(order, index));
    }
}

// SAFETY: a thread reads `ids` only inside its length, and writes between the beginning of the
// first run and the end of the second.
contract! { unsafe merge_ids { block: BLOCK, align: 4 } |k| {
    Violation::unless(k.run > 0 && k.run <= k.ids.len(), "run", "from 1 to the number of ids", k.run)?;
    Violation::unless_length("order", k.ids.len(), k.order.len())?;
    Violation::unless_length("merged", k.ids.len(), k.merged.len())?;
    Violation::unless_length("merged_order", k.ids.len(), k.merged_order.len())?;
    Grid::cover(k.ids.len(), BLOCK as usize)
}}

#[inline(always)]
fn smaller(a: usize, b: usize) -> usize {
    if a < b { a } else { b }
}

/// Returns the number of ids in the ascending `ids[first..end]` for which `before` is true.
///
/// # Safety
/// `first <= end <= ids.len()`.
#[inline(always)]
unsafe fn bisect(ids: &[u32], first: usize, end: usize, before: impl Fn(u32) -> bool) -> usize {
    let (mut low, mut high) = (first, end);
    while low < high {
        let middle = low + (high - low) / 2;
        // SAFETY: `low <= middle < high <= ids.len()`.
        if before(unsafe { load(ids, middle) }) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    low - first
}

/// The positions of an id that are summed at once. There is one partial sum for each such number of
/// ids.
pub const CHUNK: usize = 64;
/// The columns of a warp.
const COLUMNS: usize = LANES as usize * F4::LEN;
/// The rows that a thread reads before it adds them.
const BATCH: usize = 4;

/// Returns this thread's item of `items` and its columns. A warp has 128 columns of one item.
///
/// # Safety
/// `cols` is not 0.
#[inline(always)]
unsafe fn item_and_columns(items: usize, cols: usize) -> Option<(usize, usize, VectorPart)> {
    let warp = thread::block_idx_x() as usize * (BLOCK / LANES) as usize + (thread::thread_idx_x() / LANES) as usize;
    // SAFETY: `cols` is not 0, so there is at least one tile.
    let (item, tile) = unsafe { divide(warp, cols.div_ceil(COLUMNS)) };
    let column = tile * COLUMNS + (thread::thread_idx_x() % LANES) as usize * F4::LEN;
    if item >= items || column >= cols {
        return None;
    }
    let part = if cols.is_multiple_of(F4::LEN) { VectorPart::Whole } else { VectorPart::first(cols - column) };
    Some((item, column, part))
}

family! {
    /// Computes `out[id, c] = sum of dy[t, c] over the t with ids[t] = id`, for each id that
    /// occurs. The positions ascend, in chunks of [`CHUNK`]. The first chunk's sum goes to `out`,
    /// or is added to its content if `accumulate` is 1. Every other chunk's sum goes to `partials`,
    /// which [`rows_finish`](struct@rows_finish) adds. Rows of `out` whose id does not occur are
    /// unchanged.
    ///
    /// Shapes: `dy`: `[n, cols]`, `sorted`, `order`: `[n]`, `out`: `length` elements in rows of
    /// `cols`, `partials`: `[ceil(n / 64), cols]`.
    rows_sum<S: Stored> { rows_sum_f32: f32; rows_sum_bf16: bf16; }
    unsafe fn(
        dy: &[S],
        sorted: &[u32],
        order: &[u32],
        cols: usize,
        length: usize,
        accumulate: u32,
        out: *mut f32,
        partials: *mut f32,
    ) {
        // SAFETY: the contract checks `cols`. An index below the number of ids is valid in `sorted`
        // and `order`, and a position below it is a row of `dy`. A row that begins before `length`
        // lies inside `out`, and `partials` has a row for each 64 ids.
        unsafe {
            let Some((first, column, part)) = item_and_columns(sorted.len(), cols) else { return };
            let id = load(sorted, first);
            let start = id as usize * cols;
            let is_first = first == 0 || load(sorted, first - 1) != id;
            if start >= length || !(is_first || begins_chunk(sorted, first, id)) {
                return;
            }
            let (mut sum, mut done) = (F4::splat(0.0), 0);
            while done < CHUNK {
                let mut values = [F4::splat(0.0); BATCH];
                let mut is_last = false;
                unroll_on_gpu!(at < BATCH => {
                    let index = first + done + at;
                    if index < sorted.len() && load(sorted, index) == id {
                        let position = load(order, index) as usize;
                        if position < sorted.len() {
                            values[at] = F4::load_part(dy, position * cols + column, part, 0.0);
                        }
                    } else {
                        is_last = true;
                    }
                });
                // A sum that began with 0 is never -0, so adding the zeros past the end changes
                // nothing.
                unroll_on_gpu!(at < BATCH => { sum = sum + values[at] });
                done = if is_last { CHUNK } else { done + BATCH };
            }
            if is_first {
                let index = start + column;
                let sum = if accumulate == 0 { sum } else { F4::load_part_raw(out, index, part, 0.0) + sum };
                sum.store_part(out, index, part);
            } else {
                sum.store_part(partials, first / CHUNK * cols + column, part);
            }
        }
    }
    // SAFETY: `dy` has a row of `cols` for each id, and `order` an element. `out` is whole rows,
    // and `partials` has a row for each 64 ids. Every position and id is compared with these
    // numbers before it is used as an index.
    contract unsafe { block: BLOCK, shared: 0 } |k| {
        Violation::unless(k.cols > 0, "cols", "at least 1", k.cols)?;
        Violation::unless_length("dy", Size::of(k.sorted.len()).times(k.cols), k.dy.len())?;
        Violation::unless_length("order", k.sorted.len(), k.order.len())?;
        crate::warp::rows_in("out", k.out.len(), k.cols)?;
        Violation::unless_length("out", k.length, k.out.len())?;
        Violation::unless_length("partials", Size::of(k.sorted.len().div_ceil(CHUNK)).times(k.cols), k.partials.len())?;
        warps(k.sorted.len(), k.cols)
    }
}

/// True if a chunk of `id` other than its first begins at `first`, where `sorted` holds `id`.
///
/// # Safety
/// `first < sorted.len()`.
#[inline(always)]
unsafe fn begins_chunk(sorted: &[u32], first: usize, id: u32) -> bool {
    // SAFETY: `first` is inside, as the caller guarantees.
    unsafe {
        first >= CHUNK
            && load(sorted, first - CHUNK) == id
            && (first - bisect(sorted, 0, first, |other| other < id)).is_multiple_of(CHUNK)
    }
}

/// Adds the partial sums that [`rows_sum`] has left in `partials` to each row of `out` whose id
/// occurs more than [`CHUNK`] times, ascending. Shapes: `sorted`: `[n]`, `partials`: `[ceil(n /
/// 64), cols]`, `out`: `length` elements in rows of `cols`.
///
/// At most one of the chunks that begin among 64 ids is not the first of its id, so each has a row
/// of `partials` of its own.
#[kernel]
pub unsafe fn rows_finish(sorted: &[u32], partials: &[f32], cols: usize, length: usize, out: *mut f32) {
    // SAFETY: the contract checks `cols`. Indices are compared with the number of ids, and a row
    // with `length`.
    unsafe {
        let Some((window, column, part)) = item_and_columns(sorted.len().div_ceil(CHUNK), cols) else { return };
        // Finds the one id that begins here and occurs more often than a chunk holds.
        let end = smaller((window + 1) * CHUNK, sorted.len());
        let mut first = window * CHUNK;
        while first < end {
            let id = load(sorted, first);
            let mut next = first + CHUNK;
            let is_long = next < sorted.len() && load(sorted, next) == id;
            let start = id as usize * cols;
            if is_long && start < length && (first == 0 || load(sorted, first - 1) != id) {
                let index = start + column;
                let mut sum = F4::load_part_raw(out, index, part, 0.0);
                while next < sorted.len() && load(sorted, next) == id {
                    sum = sum + F4::load_part(partials, next / CHUNK * cols + column, part, 0.0);
                    next += CHUNK;
                }
                sum.store_part(out, index, part);
            }
            first += 1;
        }
    }
}

// SAFETY: `partials` has a row of `cols` for each 64 ids, and `out` is whole rows. An id is
// compared with the number of rows before it is used as an index.
contract! { unsafe rows_finish { block: BLOCK } |k| {
    Violation::unless(k.cols > 0, "cols", "at least 1", k.cols)?;
    Violation::unless_length("partials", Size::of(k.sorted.len().div_ceil(CHUNK)).times(k.cols), k.partials.len())?;
    crate::warp::rows_in("out", k.out.len(), k.cols)?;
    Violation::unless_length("out", k.length, k.out.len())?;
    warps(k.sorted.len().div_ceil(CHUNK), k.cols)
}}

/// Finds the places of ids in the order of their sort, and where each id begins. Shapes: `ids`,
/// `sorted`, `order`, `rows`, `places`: `[n]`, `offsets`: `length` elements. `sorted` and `order`
/// are the sorted `ids` and their original positions, of which each `each` are a row.
///
/// Overwrites the last three: `rows[i] = order[i] / each`, `places[order[i]] = i`, and
/// `offsets[id]`, the number of ids below `id`.
#[kernel]
pub unsafe fn group_places(
    ids: &[u32],
    sorted: &[u32],
    order: &[u32],
    each: usize,
    length: usize,
    rows: *mut u32,
    places: *mut u32,
    offsets: *mut u32,
) {
    // SAFETY: the contract checks `each`. This thread's element is compared with the number of ids
    // and with `length`, and bisection stays inside the ids.
    unsafe {
        let own = (thread::block_idx_x() * BLOCK + thread::thread_idx_x()) as usize;
        if own < ids.len() {
            let id = load(ids, own);
            let first = bisect(sorted, 0, sorted.len(), |other| other < id);
            let end = first + bisect(sorted, first, sorted.len(), |other| other == id);
            // The positions of an id ascend.
            store(places, own, (first + bisect(order, first, end, |other| other < own as u32)) as u32);
            store(rows, own, divide(load(order, own) as usize, each).0 as u32);
        }
        if own < length {
            store(offsets, own, bisect(sorted, 0, sorted.len(), |other| other < own as u32) as u32);
        }
    }
}

// SAFETY: `each` is not 0. A thread writes its own element of the results, of which two are as long
// as `ids` and one has `length`.
contract! { unsafe group_places { block: BLOCK } |k| {
    Violation::unless(k.each > 0, "each", "at least 1", k.each)?;
    let ids = k.ids.len();
    Violation::unless(u32::try_from(ids).is_ok(), "ids", "less than 2^32", ids)?;
    Violation::unless(u32::try_from(k.length).is_ok(), "length", "less than 2^32", k.length)?;
    Violation::unless_length("sorted", ids, k.sorted.len())?;
    Violation::unless_length("order", ids, k.order.len())?;
    Violation::unless_length("rows", ids, k.rows.len())?;
    Violation::unless_length("places", ids, k.places.len())?;
    Violation::unless_length("offsets", k.length, k.offsets.len())?;
    Grid::cover(ids.max(k.length), BLOCK as usize)
}}

/// Returns the grid with one warp for each item and 128 columns.
#[cfg(not(target_arch = "nvptx64"))]
fn warps(items: usize, cols: usize) -> Result<cuda_std::launch::Grid, cuda_std::launch::Violation> {
    use cuda_std::launch::{Grid, Size};
    Grid::cover(Size::of(items).times(cols.div_ceil(COLUMNS)), (BLOCK / LANES) as usize)
}
