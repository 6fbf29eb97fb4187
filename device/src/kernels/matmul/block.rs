//! One block's tile of the output: stages come to shared memory, products are summed in registers, sums are finished.
//!
//! Invariant: each sum is one chain over ascending k that begins with zero; nothing is added beyond k.

use super::{GELU, KEEP, Operand, Tile};
use crate::tile::{SharedTile, commit_copies, wait_copies};
use crate::vector::{F4, Part};
use crate::{map4, math};
use cuda_std::{GpuFloat, prelude::*};

/// Rows of tiles that are walked column by column, so that blocks that run together share operands in the L2 cache.
const GROUP: u32 = 8;

/// One matrix multiply as a thread sees it.
pub(super) struct Problem<'p> {
    pub(super) a: Operand<'p>,
    pub(super) b: Operand<'p>,
    pub(super) bias: &'p [f32],
    pub(super) bias_start: usize,
    pub(super) c: *const f32,
    pub(super) out: *mut f32,
    pub(super) pre: *mut f32,
    pub(super) start: usize,
    pub(super) m: u32,
    pub(super) n: u32,
    pub(super) k: u32,
    pub(super) ldc: u32,
    pub(super) beta: f32,
    pub(super) flags: u32,
}

/// Repeats a block for each index below `$count`, at most 16, with the index constant: what is indexed by it stays in
/// registers however large the block is.
macro_rules! unroll {
    ($index:ident < $count:expr => $body:block) => {
        unroll!(@ $index, $count, $body, 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15)
    };
    (@ $index:ident, $count:expr, $body:block, $($at:literal)*) => {
        $(if $at < $count {
            let $index: usize = $at;
            $body
        })*
    };
}

#[cfg(not(target_arch = "nvptx64"))]
pub(super) use unroll;

/// Computes this block's tile: `TM x TN` outputs for each thread, stages of `DEPTH`, of which `AHEAD + 1` are on their
/// way while one is in use; the factors of `AT_ONCE` k are read together.
///
/// # Safety
/// The contract has accepted the problem, and these are the constants of `tile`.
#[inline(always)]
pub(super) unsafe fn compute<
    const TM: usize,
    const TN: usize,
    const DEPTH: u32,
    const AHEAD: u32,
    const AT_ONCE: usize,
>(
    problem: Problem<'_>,
    tile: Tile,
) {
    let Problem { m, n, k, .. } = problem;
    let (rows, cols) = (tile.rows(), tile.cols());
    let [row, col] = place(m.div_ceil(rows), n.div_ceil(cols));
    let first = [row * rows, col * cols];
    let own = within(tile);

    for stage in 0..=AHEAD {
        fetch(&problem, tile, first, stage);
    }
    let mut sums = [[0.0f32; TN]; TM];
    for stage in 0..k.div_ceil(DEPTH) {
        wait_copies::<AHEAD>();
        thread::sync_threads();
        // Into the slot that was read before this barrier.
        fetch(&problem, tile, first, stage + AHEAD + 1);
        let slot = slot(tile, stage);
        let left = k - stage * DEPTH;
        if left < DEPTH || !cfg!(target_arch = "nvptx64") {
            for p in 0..(if left < DEPTH { left } else { DEPTH }) {
                accumulate(&mut sums, factors(slot, tile, own, p));
            }
        } else {
            // The next factors are on their way while the last are multiplied.
            let mut next = read_some(slot, tile, own, 0);
            unroll!(some < DEPTH as usize / AT_ONCE => {
                let now: [_; AT_ONCE] = next;
                if some + 1 < DEPTH as usize / AT_ONCE {
                    next = read_some(slot, tile, own, ((some + 1) * AT_ONCE) as u32);
                }
                unroll!(p < AT_ONCE => { accumulate(&mut sums, now[p]); });
            });
        }
    }
    unroll!(i < TM => {
        let i_out = first[0] + own[0] + spread(i, TM, rows);
        unroll!(group < TN.div_ceil(4) => {
            let j_out = first[1] + own[1] + spread(4 * group, TN, cols);
            if i_out < m && j_out < n {
                let width = if TN < 4 { TN } else { 4 };
                let [w, x, y, z] = [0, 1, 2, 3].map(|j| if j < width { sums[i][group * 4 + j] } else { 0.0 });
                // SAFETY: row and columns lie inside the output.
                unsafe { finish(&problem, i_out, j_out, width as u32, F4([w, x, y, z])) };
            }
        });
    });
}

/// Row and column of this block's tile among `rows` x `cols` tiles.
#[inline(always)]
pub(super) fn place(rows: u32, cols: u32) -> [u32; 2] {
    let block = thread::block_idx_x();
    let height = rows.min(GROUP);
    let above = block / (height * cols) * height;
    let (height, within) = (height.min(rows - above), block - above * cols);
    [above + within % height, within / height]
}

/// Row and column of this thread's first output in the tile. Two neighbouring threads share a column and half a warp
/// two rows, so that a 16-byte read of half a warp is one access to the banks.
#[inline(always)]
fn within(tile: Tile) -> [u32; 2] {
    let (warp, lane) = (thread::thread_idx_x() / 32, thread::thread_idx_x() % 32);
    let row = warp / tile.warps[1] * 4 + lane / 16 * 2 + lane % 2;
    let col = warp % tile.warps[1] * 8 + lane / 2 % 8;
    let group = |each: usize| if each < 4 { each as u32 } else { 4 };
    [row * group(tile.each[0]), col * group(tile.each[1])]
}

/// How far the `index`th of a thread's `each` outputs lies from its first, along `extent`.
#[inline(always)]
fn spread(index: usize, each: usize, extent: u32) -> u32 {
    if each < 4 { index as u32 } else { index as u32 / 4 * (extent / (each as u32 / 4)) + index as u32 % 4 }
}

/// The place of a stage in shared memory.
#[inline(always)]
fn slot(tile: Tile, stage: u32) -> SharedTile<f32> {
    // SAFETY: the slots follow each other in what the contract declares.
    unsafe { SharedTile::new(stage % tile.stages * tile.stage_len() * 4, tile.stage_len()) }
}

/// Starts the copies of a stage, if there is one, and makes them a group.
#[inline(always)]
fn fetch(problem: &Problem<'_>, tile: Tile, first: [u32; 2], stage: u32) {
    let first_k = stage * tile.depth;
    if first_k < problem.k {
        let slot = slot(tile, stage);
        problem.a.stage(tile, slot, (0, tile.rows()), first[0], first_k);
        problem.b.stage(tile, slot, (tile.rows(), tile.cols()), first[1], first_k);
    }
    commit_copies();
}

/// A thread's factors of one k: those of its rows and of its columns.
type Factors<const TM: usize, const TN: usize> = ([f32; TM], [f32; TN]);

/// The factors of `SOME` k from the `p`th of a stage.
#[inline(always)]
fn read_some<const TM: usize, const TN: usize, const SOME: usize>(
    slot: SharedTile<f32>,
    tile: Tile,
    own: [u32; 2],
    p: u32,
) -> [Factors<TM, TN>; SOME] {
    let mut some = [([0.0; TM], [0.0; TN]); SOME];
    unroll!(i < SOME => { some[i] = factors(slot, tile, own, p + i as u32); });
    some
}

/// The factors of the `p`th k of a stage.
#[inline(always)]
fn factors<const TM: usize, const TN: usize>(
    slot: SharedTile<f32>,
    tile: Tile,
    own: [u32; 2],
    p: u32,
) -> Factors<TM, TN> {
    let at = p * tile.pitch();
    (read(slot, at + own[0], tile.rows()), read(slot, at + tile.rows() + own[1], tile.cols()))
}

/// `EACH` factors from `at`, spread over `extent`.
#[inline(always)]
fn read<const EACH: usize>(slot: SharedTile<f32>, at: u32, extent: u32) -> [f32; EACH] {
    let mut factors = [0.0; EACH];
    match EACH {
        1 => factors[0] = slot.get(at),
        2 => factors.copy_from_slice(&slot.get2(at)),
        _ => {
            unroll!(group < EACH / 4 => {
                factors[group * 4..][..4].copy_from_slice(&slot.get4(at + spread(4 * group, EACH, extent)).0);
            });
        }
    }
    factors
}

/// Adds the products of one k to a thread's sums.
#[inline(always)]
fn accumulate<const TM: usize, const TN: usize>(sums: &mut [[f32; TN]; TM], (left, right): Factors<TM, TN>) {
    unroll!(i < TM => {
        for j in 0..TN {
            sums[i][j] = GpuFloat::mul_add(left[i], right[j], sums[i][j]);
        }
    });
}

/// Bias, old content, gelu, and the write of up to `width` neighbours at (`i`, `j`).
#[inline(always)]
pub(super) unsafe fn finish(problem: &Problem<'_>, i: u32, j: u32, width: u32, mut sum: F4) {
    let Problem { bias, bias_start, c, out, pre, start, n, ldc, beta, flags, .. } = problem;
    let at = start + i as usize * *ldc as usize + j as usize;
    let own = part(at, width.min(n - j));
    // SAFETY: row `i` and these columns lie in `out`, `c`, `pre` and `bias`, which the contract checked.
    unsafe {
        if !bias.is_empty() {
            let at = bias_start + j as usize;
            let bias = F4::load_part(bias, at, part(at, width.min(n - j)), 0.0);
            sum = sum.zip(bias, |sum, bias| sum + bias);
        }
        if *beta != 0.0 {
            sum = sum.zip(F4::load_part_raw(*c, at, own, 0.0), |sum, c| GpuFloat::mul_add(*beta, c, sum));
        }
        if flags & KEEP != 0 {
            sum.store_part(*pre, at, own);
        }
        if flags & GELU != 0 {
            sum = map4!(sum, math::gelu);
        }
        sum.store_part(*out, at, own);
    }
}

/// How `count` elements, up to four, at `index` are moved: at once where that is a vector.
#[inline(always)]
fn part(index: usize, count: u32) -> Part {
    if count >= 4 && index.is_multiple_of(F4::LEN) { Part::Whole } else { Part::first(count as usize) }
}
