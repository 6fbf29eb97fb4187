//! Products that are split along k: which ones, into what parts, and how the parts become one result.
//!
//! A multiply of few outputs with many products each would leave most multiprocessors idle, and one whose tiles fill them one time and a
//! quarter, a third of them. One chain over all products would add up too many roundings. So k is cut into the chunks that take the least time,
//! and each chunk into chains:
//!
//! ```text
//! m = n = 512, k = 10000:  8 chunks of 1280, of which the last has 1040 k
//!
//! k    0     1024  1280  2304  2560        8960  9984  10000
//!      | chain | chain | chain | chain | .. | chain | chain |
//!      |    chunk 0    |    chunk 1    | .. |    chunk 7    |     a chain has up to 1024 k
//! blocks    y = 0           y = 1                 y = 7           each adds its chains in order
//! partials   p0              p1                    p7             for each batch
//! out = epilogue(((p0 + p1) + ..) + p7)                           sum_splits
//! ```
//! Invariant: chunks and chains follow from m, n and k alone, never from the device or the number of batches.

use super::epilogue::{Epilogue, Places};
#[cfg(not(target_arch = "nvptx64"))]
use super::{checks, checks::check_outputs};
use crate::block::divide;
use crate::family;
use crate::unroll_on_gpu;
use crate::vector::{F4, Part};
use cuda_std::prelude::*;
use half::bf16;

/// Products of a chain, where k is split.
pub const CHAIN: u32 = 1024;

/// How long the blocks of a kernel take: what decides how its products are split.
pub(crate) struct Splits {
    /// The tiles that count: rows, columns, and the cycles of a multiprocessor of an H200 for one k.
    pub(crate) tiles: &'static [[usize; 3]],
    /// The beginning and the end of a block take as long as so many k.
    pub(crate) ends: usize,
    /// Cycles in which the partial sums of 128 x 128 outputs are written and read again.
    pub(crate) partial: usize,
    /// With fewer products in a chunk, more chunks save nothing.
    pub(crate) least: usize,
    /// A chunk is a multiple of this: so each starts where a vector may start, and ends with a stage.
    pub(crate) step: usize,
}

/// The rule is one for all devices, so that a sum's order is: blocks are counted as an H200 runs them, partial sums between what they cost
/// there and on a GB10, which multiplies half as fast and moves a twentieth of the bytes.
const PROCESSORS: usize = 132;
/// With more chunks, a thread that adds them up waits longer than they save.
const MOST_CHUNKS: usize = 64;
/// The outputs to which [`Splits::partial`] refers.
const OUTPUTS: usize = 128 * 128;

impl Splits {
    /// The k of a chunk in the product `[m, k] [k, n]`; it follows from these alone. Where the product is not split: all of k, at least 1.
    pub(crate) fn chunk(&self, m: usize, n: usize, k: usize) -> usize {
        let most = (k / self.least).clamp(1, MOST_CHUNKS);
        let chunks = (1..=most).min_by_key(|chunks| self.time(m, n, k, *chunks)).unwrap_or(1);
        if chunks < 2 { k.max(1) } else { k.div_ceil(chunks).next_multiple_of(self.step) }
    }

    /// Cycles that a product in so many chunks takes, in the tile that takes the fewest.
    fn time(&self, m: usize, n: usize, k: usize, chunks: usize) -> usize {
        let products = k.div_ceil(chunks);
        // A block that is alone on its multiprocessor waits a quarter of the time.
        let alone = products + products / 3 + self.ends;
        let times = self.tiles.iter().map(|[rows, cols, cycles]| {
            let blocks = m.div_ceil(*rows).saturating_mul(n.div_ceil(*cols)).max(1).saturating_mul(chunks);
            let together = blocks.div_ceil(PROCESSORS).saturating_mul(products + self.ends);
            let partials = if chunks > 1 { blocks.saturating_mul(rows * cols * self.partial / OUTPUTS) } else { 0 };
            together.max(alone).saturating_mul(*cycles).saturating_add(partials)
        });
        times.min().unwrap_or(usize::MAX)
    }
}

/// Of the tiles those that multiply fastest with many outputs and with few.
const SPLITS: Splits = Splits { tiles: &[[64, 128, 88], [32, 64, 30]], ends: 20, partial: 225, least: 256, step: 64 };

/// The k of a chunk in the product `[m, k] [k, n]`; it follows from these alone. Where the product is not split: all of k, at least 1.
#[must_use]
pub fn chunk(m: usize, n: usize, k: usize) -> usize {
    SPLITS.chunk(m, n, k)
}

/// The part of k that a block sums.
pub(crate) struct Chunk {
    /// Where its first chain begins.
    pub(crate) first: u32,
    /// Where its last chain ends.
    pub(crate) end: u32,
    /// Products of a chain. The last chain may have fewer.
    pub(super) chain: u32,
}

impl Chunk {
    /// The `index`th chunk of `k`.
    #[inline(always)]
    pub(crate) fn new(k: u32, chunk: u32, index: u32) -> Self {
        if chunk >= k {
            return Self { first: 0, end: k, chain: k };
        }
        let first = index * chunk;
        let end = if k - first < chunk { k } else { first + chunk };
        Self { first, end, chain: CHAIN }
    }

    /// Where the next chain begins and ends.
    #[inline(always)]
    pub(super) fn chain(&self) -> [u32; 2] {
        let Self { first, end, chain } = *self;
        [first, if end - first > chain { first + chain } else { end }]
    }
}

/// Threads in a block of [`sum_splits`].
const THREADS: u32 = 64;
/// Columns that such a block covers.
const COLUMNS: usize = THREADS as usize * F4::LEN;

family! {
    /// Ends a split product: `out = epilogue(partials[0] + partials[1] + ..)` for each batch, in that order.
    ///
    /// `partials`: `[batches, splits, m, n]`, at least one split. The other parameters are those of a multiply. A thread has four columns of
    /// a row.
    sum_splits<S: Stored> { sum_splits_f32: f32; sum_splits_bf16: bf16; }
    unsafe fn(
        partials: &[f32],
        splits: u32,
        bias: &[f32],
        c: *const S,
        out: *mut S,
        pre: *mut S,
        m: u32,
        n: u32,
        ldc: u32,
        batches: u32,
        stride_c: usize,
        stride_bias: usize,
        alpha: f32,
        beta: f32,
        flags: u32,
    ) {
        let (m, cols, batch) = (m as usize, n as usize, thread::block_idx_y() as usize);
        // SAFETY: `cols` is not 0: without columns the grid has no block.
        let (row, across) = unsafe { divide(thread::block_idx_x() as usize, cols.div_ceil(COLUMNS)) };
        let column = across * COLUMNS + thread::thread_idx_x() as usize * F4::LEN;
        if batch >= batches as usize || row >= m || column >= cols {
            return;
        }
        // Where rows are whole vectors, all partials are.
        let part = if cols.is_multiple_of(F4::LEN) { Part::Whole } else { Part::first(cols - column) };
        let first = ((batch * splits as usize) * m + row) * cols + column;
        // SAFETY: these columns of the row lie inside each partial sum's matrix.
        let sum = unsafe {
            match part {
                Part::Whole => total(splits, |split| F4::load(partials, first + split * m * cols)),
                part => total(splits, |split| F4::load_part(partials, first + split * m * cols, part, 0.0)),
            }
        };
        let (start, bias_start) = (batch * stride_c, batch * stride_bias);
        let epilogue = Epilogue { bias, bias_start, c, out, pre, start, m: m as u32, n, ldc, alpha, beta, flags };
        // SAFETY: row and columns lie inside the output.
        unsafe { epilogue.finish(Places::new(row as u32, [column as u32], 4), [[sum]]) };
    }
    // SAFETY: `partials` holds `splits` packed matrices for each batch. `check_outputs!` has found the matrices of `out`, `c`, `pre`
    // and `bias`, as far as they are used. A thread looks at its row and batch first, and cuts its columns off at `n`.
    contract unsafe { block: THREADS, shared: 0 } |p| {
        let [m, n] = [p.m, p.n].map(|x| x as usize);
        Violation::unless(p.splits > 0, "splits", "at least one", p.splits)?;
        let partials = Size::of(p.batches).times(p.splits);
        checks::holds("partials", p.partials.len(), partials, m.saturating_mul(n), [m, n], n)?;
        check_outputs!(p, 1);
        Grid::new(Size::of(m).times(n.div_ceil(COLUMNS)), p.batches, 1)
    }
}

/// The sum of `splits` partial sums, in order. Eight are loaded before the first is added.
#[inline(always)]
fn total(splits: u32, partial: impl Fn(usize) -> F4) -> F4 {
    // Adding -0 changes no number, not even -0.
    let (mut sum, mut next, end) = (F4::splat(-0.0), 0, splits as usize);
    while next + 8 <= end {
        let mut some = [sum; 8];
        unroll_on_gpu!(i < 8 => { some[i] = partial(next + i); });
        unroll_on_gpu!(i < 8 => { sum = sum + some[i]; });
        next += 8;
    }
    while next < end {
        sum = sum + partial(next);
        next += 1;
    }
    sum
}
