//! Reductions of `[outer, reduced, inner]` over the middle extent: sums, maxima, minima, and the
//! indices of extremes.
//!
//! ```text
//! inner = 1: a warp reduces a chunk          otherwise: a block reduces 32 columns of a chunk
//!   lane p     elements p, p + 32, ..          warp w     rows p, p + 32, ..  for p = w, w + 8, w + 16, w + 24
//!              ascending                       lane c     column c
//!   lanes      pairwise, 16 8 4 2 1 apart      then a warp's lanes p hold column c: the same
//! ```
//! A thread reduces up to eight elements, in the same tree.
//!
//! A chunk is [`CHUNK`] elements of the middle extent, or all of them if they are fewer. The host
//! reduces the chunks' results in turn.
//!
//! Invariant: every tree depends only on `reduced`.

use crate::block::{BLOCK, divide};
use crate::stored::Stored;
use crate::tile::SharedTile;
use crate::vector::{load, store};
use crate::warp::{LANES, add, combine_lanes, max, rank, rank_column};
use crate::{family, unroll};
use cuda_std::prelude::*;
use cuda_std::warp;
use half::bf16;

/// The elements that one launch reduces to one.
pub const CHUNK: usize = 1024;
/// The most elements that one thread reduces.
const FEW: usize = 8;

const WARPS: u32 = BLOCK / LANES;
/// The rows that a thread has at once.
const EACH: u32 = LANES / WARPS;
/// The elements from one part's row of sums in shared memory to the next. The pad spreads a column
/// over all banks.
const PITCH: u32 = LANES + 1;
const SHARED: u32 = LANES * PITCH * 4;

/// Returns the smaller of two, or NaN if either is NaN.
#[inline(always)]
fn min(a: f32, b: f32) -> f32 {
    let smaller = if b < a { b } else { a };
    if b.is_nan() { b } else { smaller }
}

/// Declares reductions that differ in the start of each part and in the function of two numbers.
macro_rules! fold {
    ($($(#[doc = $doc:literal])* $name:ident { $f32:ident: f32; $bf16:ident: bf16; } $start:expr, $combine:path;)*) => {$(
        family! {
            $(#[doc = $doc])*
            ///
            /// Shapes: `x`: `[outer, reduced, inner]`, `out`:
            /// `[outer, ceil(reduced / 1024), inner]`. Overwrites `out`.
            $name<S: Stored> { $f32: f32; $bf16: bf16; }
            unsafe fn(x: &[S], reduced: usize, inner: usize, scale: f32, out: *mut f32) {
                // SAFETY: no extent is 0, and `x` has whole blocks of them. A thread, a warp or a
                // block has a chunk inside `x`, and its elements of `out`. The sums fill the shared
                // memory.
                unsafe {
                    let chunks = reduced.div_ceil(CHUNK);
                    let lane = warp::lane_id();
                    if reduced <= FEW {
                        let number = (thread::block_idx_x() * BLOCK + thread::thread_idx_x()) as usize;
                        if number < x.len() / reduced {
                            let (outer, column) = divide(number, inner);
                            let all = few(x, outer * reduced * inner + column, [reduced, inner], $start, $combine);
                            store(out, number, all * scale);
                        }
                    } else if inner == 1 {
                        let number = (thread::block_idx_x() * WARPS + thread::thread_idx_x() / LANES) as usize;
                        let (outer, chunk) = divide(number, chunks);
                        if outer < x.len() / reduced {
                            let (first, end) = (outer * reduced + chunk * CHUNK, (outer + 1) * reduced);
                            let end = if first + CHUNK < end { first + CHUNK } else { end };
                            let part = part_of_row(x, first + lane as usize, end, $start, $combine);
                            let all = combine_lanes(u32::MAX, LANES, part, $combine);
                            if lane == 0 {
                                store(out, number, all * scale);
                            }
                        }
                    } else {
                        let (number, tile) = divide(thread::block_idx_x() as usize, inner.div_ceil(LANES as usize));
                        let (outer, chunk) = divide(number, chunks);
                        let (row, end) = (outer * reduced + chunk * CHUNK, (outer + 1) * reduced);
                        let end = if row + CHUNK < end { row + CHUNK } else { end };
                        let group = thread::thread_idx_x() / LANES;
                        let column = tile * LANES as usize + lane as usize;
                        let sums = SharedTile::<f32>::new(0, LANES * PITCH);
                        let parts = parts_of_columns(x, [row + group as usize, end], [column, inner], $start, $combine);
                        unroll!(at < 4 => { sums.set((group + at as u32 * WARPS) * PITCH + lane, parts[at]); });
                        thread::sync_threads();
                        let mut at = group;
                        while at < LANES {
                            let all = combine_lanes(u32::MAX, LANES, sums.get(lane * PITCH + at), $combine);
                            let column = tile * LANES as usize + at as usize;
                            if lane == 0 && column < inner {
                                store(out, number * inner + column, all * scale);
                            }
                            at += WARPS;
                        }
                    }
                }
            }
            // SAFETY: `x` is whole blocks of `reduced` x `inner`, neither of which is 0, and `out`
            // has an element for each column of each chunk. The grid has a thread for each column,
            // a warp for each chunk, or a block for each 32 columns of it.
            contract unsafe { block: BLOCK, shared: SHARED } |k| {
                let chunks = Size::of(outer_of(k.x.len(), k.reduced, k.inner)?).times(k.reduced.div_ceil(CHUNK));
                Violation::unless_length("out", chunks.times(k.inner), k.out.len())?;
                if k.reduced <= FEW {
                    Grid::cover(chunks.times(k.inner), BLOCK as usize)
                } else if k.inner == 1 {
                    Grid::cover(chunks, WARPS as usize)
                } else {
                    Grid::cover(chunks.times(k.inner.div_ceil(LANES as usize)), 1)
                }
            }
        }
    )*};
}

fold! {
    /// Computes `out` = scale times the sums of x.
    fold_sum { fold_sum_f32: f32; fold_sum_bf16: bf16; } 0.0, add;

    /// Computes `out` = scale times the maxima of x, or NaN where x has one.
    fold_max { fold_max_f32: f32; fold_max_bf16: bf16; } f32::NEG_INFINITY, max;

    /// Computes `out` = scale times the minima of x, or NaN where x has one.
    fold_min { fold_min_f32: f32; fold_min_bf16: bf16; } f32::INFINITY, min;
}

/// Combines a column of up to [`FEW`] elements that are `inner` apart, from `first` on. The tree is
/// that of lanes of which all others hold the start.
///
/// # Safety
/// The elements lie inside `x`.
#[inline(always)]
unsafe fn few<S: Stored>(
    x: &[S],
    first: usize,
    [reduced, inner]: [usize; 2],
    start: f32,
    combine: impl Fn(f32, f32) -> f32,
) -> f32 {
    let mut parts = [start; FEW];
    unroll!(at < 8 => {
        if at < reduced {
            // SAFETY: this is one of the elements.
            parts[at] = combine(start, unsafe { load(x, first + at * inner).widen() });
        }
    });
    unroll!(at < 4 => { parts[at] = combine(parts[at], parts[at + 4]); });
    unroll!(at < 2 => { parts[at] = combine(parts[at], parts[at + 2]); });
    combine(parts[0], parts[1])
}

/// Combines every 32nd element from `at` to `end`, ascending.
///
/// # Safety
/// `end` lies inside `x`, or is its length.
#[inline(always)]
unsafe fn part_of_row<S: Stored>(
    x: &[S],
    mut at: usize,
    end: usize,
    start: f32,
    combine: impl Fn(f32, f32) -> f32,
) -> f32 {
    const STEP: usize = LANES as usize;
    // SAFETY: only elements before `end` are read.
    let element = |at: usize| unsafe { load(x, at).widen() };
    let mut part = start;
    // Four at a time, so that the GPU's loads overlap.
    while at + 3 * STEP < end {
        let [a, b, c, d] = [element(at), element(at + STEP), element(at + 2 * STEP), element(at + 3 * STEP)];
        part = combine(combine(combine(combine(part, a), b), c), d);
        at += 4 * STEP;
    }
    while at < end {
        part = combine(part, element(at));
        at += STEP;
    }
    part
}

/// Combines a column's rows from `row` to `end`: four parts, 8 rows apart, each of every 32nd row,
/// ascending. A column past the last has the starts.
///
/// # Safety
/// The rows lie inside `x`.
#[inline(always)]
unsafe fn parts_of_columns<S: Stored>(
    x: &[S],
    [mut row, end]: [usize; 2],
    [column, inner]: [usize; 2],
    start: f32,
    combine: impl Fn(f32, f32) -> f32,
) -> [f32; EACH as usize] {
    let mut parts = [start; EACH as usize];
    if column < inner {
        while row < end {
            unroll!(at < 4 => {
                let own = row + at * WARPS as usize;
                if own < end {
                    // SAFETY: the row lies inside `x`, and the column inside the row.
                    parts[at] = combine(parts[at], unsafe { load(x, own * inner + column).widen() });
                }
            });
            row += LANES as usize;
        }
    }
    parts
}

/// Declares searches for the index of an extreme.
macro_rules! find {
    ($($(#[doc = $doc:literal])* $name:ident { $f32:ident: f32; $bf16:ident: bf16; } |$value:ident| $key:expr;)*) => {$(
        family! {
            $(#[doc = $doc])*
            ///
            /// A NaN counts as the extreme, as in PyTorch.
            ///
            /// Shapes: `x`: `[outer, reduced, inner]`, reduced below 2^32, `out`: `[outer, inner]`.
            /// Overwrites `out`.
            $name<S: Stored> { $f32: f32; $bf16: bf16; }
            unsafe fn(x: &[S], reduced: usize, inner: usize, out: *mut u32) {
                // SAFETY: no extent is 0, and `x` has whole blocks of them. A warp or a thread has
                // a column inside `x`, and its element of `out`.
                unsafe {
                    let better = |a: u64, b: u64| if b > a { b } else { a };
                    let columns = x.len() / reduced;
                    let own = thread::block_idx_x() as usize * BLOCK as usize + thread::thread_idx_x() as usize;
                    let lane = warp::lane_id() as usize;
                    let (number, first, step) =
                        if inner == 1 { (own / LANES as usize, lane, LANES as usize) } else { (own, 0, 1) };
                    if number < columns {
                        let (outer, column) = divide(number, inner);
                        let mut best = 0;
                        let mut at = first;
                        while at < reduced {
                            let $value = load(x, (outer * reduced + at) * inner + column).widen();
                            best = better(best, rank($key, at as u32));
                            at += step;
                        }
                        if inner == 1 {
                            best = combine_lanes(u32::MAX, LANES, best, better);
                        }
                        if inner > 1 || lane == 0 {
                            store(out, number, rank_column(best));
                        }
                    }
                }
            }
            // SAFETY: `x` is whole blocks of `reduced` x `inner`, neither of which is 0, and `out`
            // has an element for each column. The grid has a warp or a thread for each column.
            contract unsafe { block: BLOCK, shared: 0 } |k| {
                let columns = Size::of(outer_of(k.x.len(), k.reduced, k.inner)?).times(k.inner);
                Violation::unless(k.reduced <= u32::MAX as usize, "reduced", "less than 2^32", k.reduced)?;
                Violation::unless_length("out", columns, k.out.len())?;
                Grid::cover(columns, if k.inner == 1 { WARPS } else { BLOCK } as usize)
            }
        }
    )*};
}

find! {
    /// Finds the first index of the largest element.
    find_max { find_max_f32: f32; find_max_bf16: bf16; } |value| value;

    /// Finds the first index of the smallest element.
    find_min { find_min_f32: f32; find_min_bf16: bf16; } |value| -value;
}

/// Returns the number of blocks of `reduced` x `inner` in `length`.
#[cfg(not(target_arch = "nvptx64"))]
pub(crate) fn outer_of(length: usize, reduced: usize, inner: usize) -> Result<usize, cuda_std::launch::Violation> {
    use cuda_std::launch::{Size, Violation};
    Violation::unless(
        reduced > 0 && inner > 0,
        "reduced, inner",
        "at least 1 each",
        std::format!("{reduced}, {inner}"),
    )?;
    crate::warp::rows_in("x", length, Size::of(reduced).times(inner))
}
