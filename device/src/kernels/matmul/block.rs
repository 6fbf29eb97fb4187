//! One block's tile of the output: stages arrive in shared memory, threads accumulate in registers,
//! and the epilogue finishes the sums.
//!
//! The stages form a ring. An example with three slots (`AHEAD` is 1):
//!
//! ```text
//!                                  slot 0            slot 1            slot 2
//! before the loop                  copy stage 0      copy stage 1
//! stage 0, from its first k on     MULTIPLY 0        .. copy 1         copy stage 2
//!   its last group: wait until stage 1 has arrived, barrier
//! stage 1                          copy stage 3      MULTIPLY 1        .. copy 2
//!   its last group: wait until stage 2 has arrived, barrier
//! stage 2                          .. copy 3         copy stage 4      MULTIPLY 2
//! ```
//! A copy goes to the slot of the previous stage: every thread has read its factors of that stage
//! before the last barrier. Factors are also read one group of k ahead of their use.
//!
//! Invariant: each sum is one chain over ascending k that begins with zero. Nothing past the end of
//! k is added. The chains of a split are added in order.

use super::epilogue::{Epilogue, Places};
use super::operand::Stage;
use super::split::SplitRange;
use super::{Operand, Tile};
use crate::machine::IS_GPU;
use crate::tile::{SharedTile, commit_copies, wait_copies};
use crate::unroll;
use crate::vector::F4;
use cuda_std::{GpuFloat, prelude::*};

/// Blocks run down the columns within a group of this many rows of tiles.
pub(crate) const GROUP: u32 = 8;

/// One matrix multiply, from the point of view of one thread.
pub(crate) struct Problem<'p> {
    pub(crate) a: Operand<'p>,
    pub(crate) b: Operand<'p>,
    pub(crate) epilogue: Epilogue<'p, f32>,
    pub(crate) k: SplitRange,
}

impl Problem<'_> {
    /// True if the split has another chain after `until`. The problem then becomes that chain,
    /// added to the output so far.
    #[inline(always)]
    pub(super) fn goes_on(&mut self, until: u32) -> bool {
        self.epilogue.c = self.epilogue.out;
        self.epilogue.beta = 1.0;
        self.k.first = until;
        until < self.k.end
    }
}

/// Computes the tile in this row and this column of tiles. A thread has `TM x TN` outputs. `AHEAD +
/// 1` stages are being copied while one is in use. A thread reads the factors of `AT_ONCE` k
/// together, `GROUPS` times in the loop's body.
///
/// # Safety
/// The contract has accepted the problem, and the const parameters match `tile`.
#[inline(always)]
pub(crate) unsafe fn compute<
    const TM: usize,
    const TN: usize,
    const AHEAD: u32,
    const AT_ONCE: usize,
    const GROUPS: usize,
>(
    mut problem: Problem<'_>,
    tile: Tile,
    [row, col]: [u32; 2],
) {
    let (rows, cols) = (tile.rows(), tile.cols());
    let first = [row * rows, col * cols];
    let origin = within(tile);
    loop {
        let [from, until] = problem.k.chain();
        let mut sums = [[0.0f32; TN]; TM];
        multiply::<TM, TN, AHEAD, AT_ONCE, GROUPS>(&problem, tile, first, origin, [from, until], &mut sums);
        // Two rows at a time; then the next two rows move into their place. The epilogue is long
        // code, so it is instantiated once.
        for from in (0..TM).step_by(2) {
            let i = first[0] + origin[0] + spread(from, TM, rows);
            let j = |group: usize| first[1] + origin[1] + spread(4 * group, TN, cols);
            let element = |i: usize, j: usize| if j < TN { sums[i][j] } else { 0.0 };
            let vector = |i: usize, group: usize| F4([0, 1, 2, 3].map(|j| element(i, 4 * group + j)));
            // SAFETY: the contract has accepted the problem.
            unsafe {
                let epilogue = problem.epilogue;
                if TN > F4::LEN {
                    epilogue.finish(Places::new(i, [j(0), j(1)], 4), [0, 1].map(|i| [vector(i, 0), vector(i, 1)]));
                } else {
                    epilogue.finish(Places::new(i, [j(0)], TN as u32), [0, 1].map(|i| [vector(i, 0)]));
                }
            }
            unroll!(pair < TM / 2 - 1 => {
                sums[2 * pair] = sums[2 * pair + 2];
                sums[2 * pair + 1] = sums[2 * pair + 3];
            });
        }
        if !problem.goes_on(until) {
            return;
        }
        // After this barrier no thread reads factors of this chain.
        thread::sync_threads();
    }
}

/// Accumulates the products of the k from `from` to `until` in a thread's sums.
#[inline(always)]
fn multiply<const TM: usize, const TN: usize, const AHEAD: u32, const AT_ONCE: usize, const GROUPS: usize>(
    problem: &Problem<'_>,
    tile: Tile,
    first: [u32; 2],
    origin: [u32; 2],
    [from, until]: [u32; 2],
    sums: &mut [[f32; TN]; TM],
) {
    for stage in 0..=AHEAD {
        fetch(problem, tile, first, [from + stage * tile.depth, until], stage);
    }
    let factors = Sources::new(tile, origin);
    let end_of_ring = tile.stages * tile.depth;
    let (mut k, mut at) = (from, 0);
    wait_copies::<AHEAD>();
    thread::sync_threads();
    let mut next = [([0.0; TM], [0.0; TN]); AT_ONCE];
    if IS_GPU || until - k >= tile.step() {
        next = factors.read_some(tile, at);
    }
    while until - k >= tile.step() {
        if at.is_multiple_of(tile.depth) {
            // Into the slot that all threads have read before the last barrier.
            let slot = (at / tile.depth + AHEAD + 1) % tile.stages;
            fetch(problem, tile, first, [k + (AHEAD + 1) * tile.depth, until], slot);
        }
        k += tile.step();
        unroll!(group < GROUPS => {
            // The reads of the next factors overlap the multiplies of the current ones, also across
            // the end of a stage.
            let now: [_; AT_ONCE] = next;
            if group + 1 < GROUPS {
                next = factors.read_some(tile, at + ((group + 1) * AT_ONCE) as u32);
            } else {
                at = if at + tile.step() == end_of_ring { 0 } else { at + tile.step() };
                if at.is_multiple_of(tile.depth) {
                    wait_copies::<AHEAD>();
                    thread::sync_threads();
                }
                // The GPU also reads factors that it will not use: a condition would cost register
                // copies.
                if IS_GPU || until - k >= tile.step() {
                    next = factors.read_some(tile, at);
                }
            }
            unroll!(p < AT_ONCE => { accumulate(sums, now[p]); });
        });
    }
    while k < until {
        accumulate(sums, factors.read(tile, at));
        k += 1;
        at += 1;
    }
}

/// Returns row and column of this thread's first output in the tile; `tile.rs` has the picture. Two
/// neighboring lanes share a column, and half a warp has two rows. Half a warp therefore reads 16
/// bytes of each of eight column groups: all 32 banks, in one access.
#[inline(always)]
fn within(tile: Tile) -> [u32; 2] {
    let (warp, lane) = (thread::thread_idx_x() / 32, thread::thread_idx_x() % 32);
    let row = warp / tile.warps[1] * 4 + lane / 16 * 2 + lane % 2;
    let col = warp % tile.warps[1] * 8 + lane / 2 % 8;
    let group = |each: usize| if each < 4 { each as u32 } else { 4 };
    [row * group(tile.each[0]), col * group(tile.each[1])]
}

/// Returns the distance of a thread's `index`th output from its first, along `extent`. A thread has
/// `each` outputs, in groups of four that are evenly spread.
#[inline(always)]
fn spread(index: usize, each: usize, extent: u32) -> u32 {
    if each < 4 { index as u32 } else { index as u32 / 4 * (extent / (each as u32 / 4)) + index as u32 % 4 }
}

/// Starts the copies of the stage that begins at `first_k` into slot `slot`, if `first_k` is before
/// the end, and commits them as one group.
#[inline(always)]
fn fetch(problem: &Problem<'_>, tile: Tile, first: [u32; 2], [first_k, end]: [u32; 2], slot: u32) {
    if first_k < end {
        // SAFETY: the slots follow each other in the shared memory that the contract declares.
        let slot = unsafe { SharedTile::new(slot * tile.stage_len() * 4, tile.stage_len()) };
        let stage = |column, width, first_row| Stage { slot, column, width, first_row, first_k, end };
        problem.a.stage(tile, stage(0, tile.rows(), first[0]));
        problem.b.stage(tile, stage(tile.rows(), tile.cols(), first[1]));
    }
    commit_copies();
}

/// A thread's factors of one k: of its rows, and of its columns.
type Factors<const TM: usize, const TN: usize> = ([f32; TM], [f32; TN]);

/// The locations of a thread's factors in the stages: a tile that starts at its first row of A, and
/// a tile that starts at its first column of B.
#[derive(Clone, Copy)]
struct Sources([SharedTile<f32>; 2]);

impl Sources {
    #[inline(always)]
    fn new(tile: Tile, origin: [u32; 2]) -> Self {
        let len = tile.stages * tile.stage_len();
        // SAFETY: both tiles lie inside the stages, which the contract declares.
        Self([origin[0], tile.rows() + origin[1]].map(|from| unsafe { SharedTile::new(4 * from, len - from) }))
    }

    /// Reads the factors of the `p`th k of the ring.
    #[inline(always)]
    fn read<const TM: usize, const TN: usize>(self, tile: Tile, p: u32) -> Factors<TM, TN> {
        let [left, right] = self.0;
        (read(left, p * tile.pitch(), tile.rows()), read(right, p * tile.pitch(), tile.cols()))
    }

    /// Reads the factors of `SOME` k, starting with the `p`th of the ring.
    #[inline(always)]
    fn read_some<const TM: usize, const TN: usize, const SOME: usize>(
        self,
        tile: Tile,
        p: u32,
    ) -> [Factors<TM, TN>; SOME] {
        let mut some = [([0.0; TM], [0.0; TN]); SOME];
        unroll!(i < SOME => { some[i] = self.read(tile, p + i as u32); });
        some
    }
}

/// Reads `EACH` factors. The first is at `at`, and their groups are spread over `extent`.
#[inline(always)]
fn read<const EACH: usize>(stages: SharedTile<f32>, at: u32, extent: u32) -> [f32; EACH] {
    let mut factors = [0.0; EACH];
    match EACH {
        1 => factors[0] = stages.get(at),
        2 => factors.copy_from_slice(&stages.get2(at)),
        _ => {
            unroll!(group < EACH / 4 => {
                factors[group * 4..][..4].copy_from_slice(&stages.get4(at + spread(4 * group, EACH, extent)).0);
            });
        }
    }
    factors
}

/// Accumulates the products of one k in a thread's sums: two rows at a time, back and forth.
/// Consecutive multiply-adds share a factor. The GPU then reads it once, and fewer reads have
/// register bank conflicts.
#[inline(always)]
fn accumulate<const TM: usize, const TN: usize>(sums: &mut [[f32; TN]; TM], (left, right): Factors<TM, TN>) {
    unroll!(pair < TM.div_ceil(2) => {
        for j in 0..TN {
            let j = if pair.is_multiple_of(2) { j } else { TN - 1 - j };
            for e in 0..2 {
                let i = 2 * pair + (e + j) % 2;
                if i < TM {
                    sums[i][j] = GpuFloat::mul_add(left[i], right[j], sums[i][j]);
                }
            }
        }
    });
}
