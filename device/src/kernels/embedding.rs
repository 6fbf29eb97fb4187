//! Rows of a table by number, and the sums of rows that have one number: the embedding of tokens, its gradient, and gather.
//!
//! ```text
//! ids              7  2  7  0  7  2                 a token's row of the table
//! sorted           0 | 2  2 | 7  7  7               a stable sort, integers only: `sort_ids`, then `merge_ids` until one run is left
//! order            3 | 1  5 | 0  2  4               where they stood: positions of an id ascend
//!                  |   |      |
//! sums             a warp for each id and 128 columns begins where its id does; where there are more than 64, a warp for each 64
//!                  first 64 -> row of the table     others -> partial sums -> `rows_finish` adds them to the row, ascending
//! ```
//! Invariant: no number leads outside, whatever it is. The order of a row's sum follows from how often its id comes alone. A sort by
//! (id, position) has one result, so the bits depend on no device.

use crate::block::{BLOCK, divide};
use crate::stored::Stored;
use crate::tile::SharedTile;
use crate::vector::{F4, Part, load, store};
use crate::warp::{LANES, Row, Share};
use crate::{contract, family, for_each_vector, unroll_on_gpu, with_held};
use cuda_std::prelude::*;
use half::bf16;

family! {
    /// `y[t, c] = table[ids[t], c]`; `table`: `[rows, cols]`, `ids`: `[tokens]`, `y`: `[tokens, cols]`. An id without a row makes a row of
    /// NaN. Overwrites `y`.
    embedding_forward<S: Stored> { embedding_forward_f32: f32; embedding_forward_bf16: bf16; }
    unsafe fn(table: &[f32], ids: &[u32], cols: usize, y: *mut S) {
        let Some(row) = Row::new(ids.len() * cols, cols) else { return };
        // SAFETY: the row lies inside `y`, and `ids` has its number; its lanes stay together.
        unsafe { with_held!(row, cols, row_of(table, ids, cols, y)) }
    }
    // SAFETY: `table` is whole rows of `cols`, and `y` has one for each id; a thread touches a row of `table` only where the id is one's.
    contract unsafe { block: crate::warp::ROW_BLOCK, shared: 0 } |k| {
        crate::warp::rows_in("table", k.table.len(), k.cols)?;
        Violation::unless_length("y", Size::of(k.ids.len()).times(k.cols), k.y.len())?;
        Row::grid("y", k.y.len(), k.cols)
    }
}

family! {
    /// `y[t, c] = x[ids[t], c]`: as [`embedding_forward`], of rows that are stored as y is.
    gather<S: Stored> { gather_f32: f32; gather_bf16: bf16; }
    unsafe fn(x: &[S], ids: &[u32], cols: usize, y: *mut S) {
        let Some(row) = Row::new(ids.len() * cols, cols) else { return };
        // SAFETY: the row lies inside `y`, and `ids` has its number; its lanes stay together.
        unsafe { with_held!(row, cols, row_of(x, ids, cols, y)) }
    }
    // SAFETY: `x` is whole rows of `cols`, and `y` has one for each id; a thread touches a row of `x` only where the id is one's.
    contract unsafe { block: crate::warp::ROW_BLOCK, shared: 0 } |k| {
        crate::warp::rows_in("x", k.x.len(), k.cols)?;
        Violation::unless_length("y", Size::of(k.ids.len()).times(k.cols), k.y.len())?;
        Row::grid("y", k.y.len(), k.cols)
    }
}

/// # Safety
/// The row lies inside `y`, and `ids` has its number. `table` is whole rows of `cols`. The row's lanes call it together.
#[inline(always)]
unsafe fn row_of<const HELD: usize, T: Stored>(row: Row, table: &[T], ids: &[u32], cols: usize, y: *mut impl Stored) {
    // SAFETY: the row lies inside `y`, and a row that begins inside `table` ends there, as is asked.
    unsafe {
        let start = load(ids, row.number) as usize * cols;
        if start < table.len() {
            let values = Share::<HELD, _>::new(row, table, start, cols, 0.0);
            for_each_vector!(HELD, row, cols, |at, column, part| {
                values.get(at, column, part).store_part(y, row.start + column, part);
            });
        } else {
            for_each_vector!(HELD, row, cols, |_at, column, part| {
                F4::splat(f32::NAN).store_part(y, row.start + column, part);
            });
        }
    }
}

/// Ids that a block of [`sort_ids`](struct@sort_ids) sorts.
pub const RUN: usize = 512;
/// Those that each of its threads places.
const OWN: usize = RUN / BLOCK as usize;

/// Sorts each [`RUN`] of `ids`; `order` is where they stood. Equal ones stay in their order. `ids`, `sorted`, `order`: `[n]`, n below 2^32.
/// Overwrites `sorted` and `order`.
///
/// The place of an id is the number of those that come before it: each thread looks at all of the block's.
#[kernel]
pub unsafe fn sort_ids(ids: &[u32], sorted: *mut u32, order: *mut u32) {
    let start = thread::block_idx_x() as usize * RUN;
    let place = |own: usize| own * BLOCK as usize + thread::thread_idx_x() as usize;
    // SAFETY: the tile is the declared shared memory, and its indices are below `RUN`. A place below the number of the block's ids is
    // inside the arguments. All threads come to the barrier.
    unsafe {
        let tile = SharedTile::<u32>::new(0, RUN as u32);
        let mut own = 0;
        while own < OWN {
            let index = start + place(own);
            // What fills the last run comes behind all ids: it stands behind them.
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

// SAFETY: a block has one run of `ids`. As many ids come before one of a run as are in it at most, those that fill it up left out, so each is
// written inside `sorted` and `order`, which are as long as `ids`.
contract! { unsafe sort_ids { block: BLOCK, shared: RUN * 4, align: 4 } |k| {
    Violation::unless(k.ids.len() <= u32::MAX as usize, "ids", "less than 2^32", k.ids.len())?;
    Violation::unless_length("sorted", k.ids.len(), k.sorted.len())?;
    Violation::unless_length("order", k.ids.len(), k.order.len())?;
    Grid::cover(k.ids.len(), RUN)
}}

/// Merges each two runs of `run` sorted ids into one. Of equal ids those of the first run come first. `ids`, `order`, `merged`,
/// `merged_order`: `[n]`. Overwrites the last two.
///
/// An id's place is its place in its own run and the number of those in the other run that come before it, by bisection.
#[kernel]
pub unsafe fn merge_ids(ids: &[u32], order: &[u32], run: usize, merged: *mut u32, merged_order: *mut u32) {
    let index = thread::block_idx_x() as usize * BLOCK as usize + thread::thread_idx_x() as usize;
    if index >= ids.len() {
        return;
    }
    // SAFETY: `run` is not 0. Both runs lie inside `ids`, and the number of ids of the other run is at most its length.
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

// SAFETY: a thread reads `ids` only inside its length, and what it writes lies between the begin of the first run and the end of the second.
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

/// How many of `ids[first..end]`, which ascend, come `before`.
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

/// Positions of an id that are added up at once; and the ids among which there is one partial sum.
pub const CHUNK: usize = 64;
/// Columns of a warp.
const COLUMNS: usize = LANES as usize * F4::LEN;
/// Rows that a thread reads before it adds them up.
const BATCH: usize = 4;

/// This thread's item of `items` and its columns, where a warp has 128 columns of one.
///
/// # Safety
/// `cols` is not 0.
#[inline(always)]
unsafe fn item_and_columns(items: usize, cols: usize) -> Option<(usize, usize, Part)> {
    let warp = thread::block_idx_x() as usize * (BLOCK / LANES) as usize + (thread::thread_idx_x() / LANES) as usize;
    // SAFETY: `cols` is not 0, so there is at least one tile.
    let (item, tile) = unsafe { divide(warp, cols.div_ceil(COLUMNS)) };
    let column = tile * COLUMNS + (thread::thread_idx_x() % LANES) as usize * F4::LEN;
    if item >= items || column >= cols {
        return None;
    }
    let part = if cols.is_multiple_of(F4::LEN) { Part::Whole } else { Part::first(cols - column) };
    Some((item, column, part))
}

family! {
    /// `out[id, c] = sum of dy[t, c] over the t with ids[t] = id`, for each id that comes: the positions ascend, in chunks of [`CHUNK`]. The
    /// first chunk goes to `out`, is added to what it holds where `accumulate` is 1, and each other to `partials`;
    /// [`rows_finish`](struct@rows_finish) adds those. Rows of `out` whose id does not come stay as they are.
    ///
    /// `dy`: `[n, cols]`, `sorted`, `order`: `[n]`, `out`: `length` elements in rows of `cols`, `partials`: `[ceil(n / 64), cols]`.
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
        // SAFETY: the contract checks `cols`. An index below the number of ids is one of `sorted` and `order`, and a position below it is a
        // row of `dy`. A row that begins before `length` lies inside `out`, and `partials` has one for each 64 ids.
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
                // A sum that began with 0 is never -0, so zeros beyond the end change nothing.
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
    // SAFETY: `dy` has a row of `cols` for each id, `order` an element; `out` is whole rows, and `partials` has a row for each 64 ids. A position
    // and an id are compared with these numbers before they lead anywhere.
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

/// Whether a chunk of `id` other than the first begins at `first`, which holds it.
///
/// # Safety
/// `first < sorted.len()`.
#[inline(always)]
unsafe fn begins_chunk(sorted: &[u32], first: usize, id: u32) -> bool {
    // SAFETY: `first` is inside, as is asked.
    unsafe {
        first >= CHUNK
            && load(sorted, first - CHUNK) == id
            && (first - bisect(sorted, 0, first, |other| other < id)).is_multiple_of(CHUNK)
    }
}

/// Adds to each row of `out` whose id comes more than [`CHUNK`] times what [`rows_sum`] has left of it in `partials`, ascending.
/// `sorted`: `[n]`, `partials`: `[ceil(n / 64), cols]`, `out`: `length` elements in rows of `cols`.
///
/// Of the chunks that begin among 64 ids, one at most is not the first of its id: so each has a row of `partials` to itself.
#[kernel]
pub unsafe fn rows_finish(sorted: &[u32], partials: &[f32], cols: usize, length: usize, out: *mut f32) {
    // SAFETY: the contract checks `cols`. Indices are compared with the number of ids, and a row with `length`.
    unsafe {
        let Some((window, column, part)) = item_and_columns(sorted.len().div_ceil(CHUNK), cols) else { return };
        // The one id that begins here and comes more often than a chunk has room.
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

// SAFETY: `partials` has a row of `cols` for each 64 ids, and `out` is whole rows; an id is compared with their number before it leads
// anywhere.
contract! { unsafe rows_finish { block: BLOCK } |k| {
    Violation::unless(k.cols > 0, "cols", "at least 1", k.cols)?;
    Violation::unless_length("partials", Size::of(k.sorted.len().div_ceil(CHUNK)).times(k.cols), k.partials.len())?;
    crate::warp::rows_in("out", k.out.len(), k.cols)?;
    Violation::unless_length("out", k.length, k.out.len())?;
    warps(k.sorted.len().div_ceil(CHUNK), k.cols)
}}

/// The grid of a warp for each item and 128 columns.
#[cfg(not(target_arch = "nvptx64"))]
fn warps(items: usize, cols: usize) -> Result<cuda_std::launch::Grid, cuda_std::launch::Violation> {
    use cuda_std::launch::{Grid, Size};
    Grid::cover(Size::of(items).times(cols.div_ceil(COLUMNS)), (BLOCK / LANES) as usize)
}
