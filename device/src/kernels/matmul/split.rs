//! Split-K products: which products are split, into how many splits, and how the splits become one
//! result.
//!
//! A product with few outputs and a long k would leave most multiprocessors idle. A product whose
//! tiles fill the multiprocessors one and a quarter times would idle a third of them. One chain
//! over all of k would also accumulate too many roundings. So k is cut into the number of splits
//! that takes the least time, and each split into chains:
//!
//! ```text
//! m = n = 512, k = 10000:  8 splits of 1280, of which the last has 1040 k
//!
//! k    0     1024  1280  2304  2560        8960  9984  10000
//!      | chain | chain | chain | chain | .. | chain | chain |
//!      |    split 0    |    split 1    | .. |    split 7    |     a chain has up to 1024 k
//! blocks    y = 0           y = 1                 y = 7           each adds its chains in order
//! partials   p0              p1                    p7             for each batch
//! out = epilogue(((p0 + p1) + ..) + p7)                           sum_splits
//! ```
//! Invariant: splits and chains depend only on m, n and k, never on the device or the number of
//! batches.

use super::epilogue::{Epilogue, Places};
#[cfg(not(target_arch = "nvptx64"))]
use super::{checks, checks::check_outputs};
use crate::block::divide;
use crate::family;
use crate::matmul::{EpilogueForm, ProductExtents};
use crate::unroll_on_gpu;
use crate::vector::{F4, VectorPart};
use cuda_std::prelude::*;
use half::bf16;

/// The products of a chain, if k is split.
pub const CHAIN: u32 = 1024;

/// The cost model of a kernel's blocks, which decides how its products are split.
pub(crate) struct SplitK {
    /// The tiles that are compared: rows, columns, and the cycles of an H200 multiprocessor for one
    /// k.
    pub(crate) tiles: &'static [[usize; 3]],
    /// The cost of the beginning and the end of a block, in k.
    pub(crate) ends: usize,
    /// The cycles to write and read back the partial sums of 128 x 128 outputs.
    pub(crate) partial: usize,
    /// The minimum of products in a split. Smaller splits save nothing.
    pub(crate) least: usize,
    /// The unit of a split's size. Multiples of it start on a vector boundary and end with a stage.
    pub(crate) step: usize,
}

/// The multiprocessors that the cost model assumes: as many as an H200 has. One rule serves all
/// devices, so that a sum's order is the same on all. The cost of partial sums lies between an
/// H200's and a GB10's. A GB10 multiplies half as fast and moves a twentieth of the bytes.
const PROCESSORS: usize = 132;
/// The maximum number of splits. More splits cost the reduction more time than they save.
const MAX_SPLIT_K: usize = 64;
/// The outputs to which [`Splits::partial`] refers.
const OUTPUTS: usize = 128 * 128;

impl SplitK {
    /// Returns the k of one split of the split-K product `[m, k] [k, n]`. It depends only on
    /// these three. If the product is not split, it is all of k, and at least 1.
    pub(crate) fn k_per_split(&self, m: usize, n: usize, k: usize) -> usize {
        let most = (k / self.least).clamp(1, MAX_SPLIT_K);
        let split_k = (1..=most).min_by_key(|split_k| self.time(m, n, k, *split_k)).unwrap_or(1);
        if split_k < 2 { k.max(1) } else { k.div_ceil(split_k).next_multiple_of(self.step) }
    }

    /// Estimates the cycles of a product in `split_k` splits, in the tile that takes the fewest.
    fn time(&self, m: usize, n: usize, k: usize, split_k: usize) -> usize {
        let products = k.div_ceil(split_k);
        // A block that has a multiprocessor to itself waits a quarter of the time.
        let alone = products + products / 3 + self.ends;
        let times = self.tiles.iter().map(|[rows, cols, cycles]| {
            let blocks = m.div_ceil(*rows).saturating_mul(n.div_ceil(*cols)).max(1).saturating_mul(split_k);
            let together = blocks.div_ceil(PROCESSORS).saturating_mul(products + self.ends);
            let partials = if split_k > 1 { blocks.saturating_mul(rows * cols * self.partial / OUTPUTS) } else { 0 };
            together.max(alone).saturating_mul(*cycles).saturating_add(partials)
        });
        times.min().unwrap_or(usize::MAX)
    }
}

/// The cost of the tiles that are fastest with many outputs and with few.
const SPLIT_K: SplitK = SplitK { tiles: &[[64, 128, 88], [32, 64, 30]], ends: 20, partial: 225, least: 256, step: 64 };

/// Returns the k of one split of the split-K product `[m, k] [k, n]`. It depends only on these
/// three. If the product is not split, it is all of k, and at least 1.
#[must_use]
pub fn k_per_split(m: usize, n: usize, k: usize) -> usize {
    SPLIT_K.k_per_split(m, n, k)
}

/// The part of k that a block sums.
pub(crate) struct SplitRange {
    /// The start of its first chain.
    pub(crate) first: u32,
    /// The end of its last chain.
    pub(crate) end: u32,
    /// The products of a chain. The last chain may have fewer.
    pub(crate) chain: u32,
}

impl SplitRange {
    /// Returns the `index`th split of `k`.
    #[inline(always)]
    pub(crate) fn new(k: u32, k_per_split: u32, index: u32) -> Self {
        if k_per_split >= k {
            return Self { first: 0, end: k, chain: k };
        }
        let first = index * k_per_split;
        let end = if k - first < k_per_split { k } else { first + k_per_split };
        Self { first, end, chain: CHAIN }
    }

    /// Returns the start and the end of the next chain.
    #[inline(always)]
    pub(super) fn chain(&self) -> [u32; 2] {
        let Self { first, end, chain } = *self;
        [first, if end - first > chain { first + chain } else { end }]
    }
}

/// The threads in a block of [`sum_splits`].
const THREADS: u32 = 64;

family! {
    /// Reduces a split-K product: `out = epilogue(partials[0] + partials[1] + ..)` for each batch,
    /// in that order.
    ///
    /// `partials`: `[batches, splits of k, m, n]`. The other parameters are as in a multiply. A
    /// thread has four columns of a row, and the next thread has the next four, if necessary of
    /// the next row.
    sum_splits<S: Stored> { sum_splits_f32: f32; sum_splits_bf16: bf16; }
    unsafe fn(
        partials: &[f32],
        bias: &[f32],
        c: *const S,
        out: *mut S,
        pre: *mut S,
        extents: ProductExtents,
        epilogue: EpilogueForm,
    ) {
        let ProductExtents { m, n, k, k_per_split, batches } = extents;
        let EpilogueForm { stride_c, stride_bias, ldc, alpha, beta, flags } = epilogue;
        // At least one, so that no division can fail.
        let split_k = k.div_ceil(k_per_split.max(1)).max(1);
        let (m, cols, batch) = (m as usize, n as usize, thread::block_idx_y() as usize);
        let number = thread::block_idx_x() as usize * THREADS as usize + thread::thread_idx_x() as usize;
        // SAFETY: `cols` is not 0: if there are no columns, the grid has no block.
        let (row, across) = unsafe { divide(number, cols.div_ceil(F4::LEN)) };
        let column = across * F4::LEN;
        if batch >= batches as usize || row >= m {
            return;
        }
        // If rows are whole vectors, the partial sums' rows are too.
        let part = if cols.is_multiple_of(F4::LEN) { VectorPart::Whole } else { VectorPart::first(cols - column) };
        let first = ((batch * split_k as usize) * m + row) * cols + column;
        // SAFETY: these columns of the row lie inside each partial sum's matrix.
        let sum = unsafe {
            match part {
                VectorPart::Whole => total(split_k, |split| F4::load(partials, first + split * m * cols)),
                part => total(split_k, |split| F4::load_part(partials, first + split * m * cols, part, 0.0)),
            }
        };
        let (start, bias_start) = (batch * stride_c, batch * stride_bias);
        let epilogue = Epilogue { bias, bias_start, c, out, pre, start, m: m as u32, n, ldc, alpha, beta, flags };
        // SAFETY: row and columns lie inside the output.
        unsafe { epilogue.finish(Places::new(row as u32, [column as u32], 4), [[sum]]) };
    }
    // SAFETY: `partials` holds `split_k` packed matrices for each batch. `check_outputs!` has
    // checked the matrices of `out`, `c`, `pre` and `bias` that are used. A thread first checks its
    // row and batch, and drops columns past `n`.
    contract unsafe { block: THREADS, shared: 0 } |p| {
        let [m, n] = [p.extents.m, p.extents.n].map(|x| x as usize);
        let split_k = checks::splits(p.extents)?;
        let partials = Size::of(p.extents.batches).times(split_k);
        checks::holds("partials", p.partials.len(), partials, m.saturating_mul(n), [m, n], n)?;
        check_outputs!(p, 1);
        Grid::new(Size::of(m).times(n.div_ceil(F4::LEN)).div_ceil(THREADS), p.extents.batches, 1)
    }
}

/// Returns the sum of `split_k` partial sums, in order. Eight are loaded before the first is added.
#[inline(always)]
fn total(split_k: u32, partial: impl Fn(usize) -> F4) -> F4 {
    // Adding -0 changes no number, not even -0.
    let (mut sum, mut next, end) = (F4::splat(-0.0), 0, split_k as usize);
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
