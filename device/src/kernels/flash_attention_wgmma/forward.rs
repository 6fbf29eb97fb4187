//! The forward pass of a block's queries, as FlashAttention-3 orders it (Shah et al., 2024): the
//! products of a tile run while the exponentials of the tile before are computed.
//!
//! ```text
//! start S = q k_j^T -> start out += p v_(j - 1) -> wait for S -> free k_j, mask, maximum, p of S
//!   -> wait for out -> free v_(j - 1), rescale out, round p
//! ```
//! Rows are rescaled as in [`flash_attention_mma`](crate::flash_attention_mma): between blocks of
//! 64 keys. A tile may have two. If a row of the warp is rescaled between them, which is rare, the
//! warp first adds the products of the first block by `mma.sync`, and wgmma adds those of the
//! second.
//!
//! Invariant: the four lanes of a row have the same maximum, bit for bit. Until the end, each lane
//! has the sum of its own keys.

use super::heads::Inputs;
use super::items::{Items, slot_of};
use super::rows::{copies, hide, kv_head_of, leave_registers, multiplying_group, resident_row, round, store};
use super::shape::{GROUP_ROWS, WARPGROUP};
use super::tile::Memory;
use crate::flash_attention::place::{MaskRange, ResidentRows};
use crate::flash_attention_mma::{is_known, within_growth};
use crate::machine::warpgroup::{Accumulators, hold};
use crate::math::{self, exp2_negative, exp2_weight, larger_or_nan};
use crate::unroll_on_gpu;
use crate::vector;
use crate::warp::{Converged, LANES, add};
use core::f32::consts::LOG2_E;
use cuda_std::{GpuFloat, thread, warp::lane_id};
use half::bf16;

/// The lanes that share a row of scores.
const ACROSS: u32 = 4;

/// The accumulator tiles of the 64 keys between two decisions to rescale a row.
const DECIDED: usize = 8;

/// A lane's part of two rows: the running maximum, and the sum of the lane's weights.
struct Softmax {
    largest: [f32; 2],
    totals: [f32; 2],
}

/// The factors of the sums before each block of keys.
struct Shrink<const BLOCKS: usize> {
    factors: [[f32; 2]; BLOCKS],
    /// True if all of the warp's factors are 1.
    stay: [bool; BLOCKS],
}

impl<const BLOCKS: usize> Shrink<BLOCKS> {
    /// Multiplies the sums by the factors before a block, unless all are 1.
    #[inline(always)]
    fn apply<const MADE: usize>(&self, block: usize, sums: &mut [[f32; 4]; MADE]) {
        if !self.stay[block] {
            unroll_on_gpu!(n < MADE, at most 32 => {
                unroll_on_gpu!(at < 4 => { sums[n][at] *= self.factors[block][at / 2]; });
            });
        }
    }
}

impl Softmax {
    /// Replaces scores by their weights. Returns the factors of the sums so far.
    #[inline(always)]
    fn weigh<const TILES: usize, const BLOCKS: usize, const PARTS: u32>(
        &mut self,
        warp: Converged,
        scores: &mut [[f32; 4]; TILES],
        factor: f32,
    ) -> Shrink<BLOCKS> {
        const { assert!(TILES == BLOCKS * DECIDED) };
        let mut most = [[f32::NEG_INFINITY; 2]; BLOCKS];
        let mut within = true;
        unroll_on_gpu!(n < TILES, at most 16 => {
            unroll_on_gpu!(half < 2 => {
                let larger = larger_or_nan(scores[n][2 * half], scores[n][2 * half + 1]);
                most[n / DECIDED][half] = larger_or_nan(most[n / DECIDED][half], larger);
            });
        });
        unroll_on_gpu!(block < BLOCKS => {
            unroll_on_gpu!(half < 2 => { within &= stays(most[block][half], factor, self.largest[half]); });
        });
        let mut shrink = Shrink { factors: [[1.0; 2]; BLOCKS], stay: [true; BLOCKS] };
        let mut bases = [self.bases(factor); BLOCKS];
        if !warp.again().all(within) {
            let warp = warp.again();
            unroll_on_gpu!(block < BLOCKS => {
                let mut stay = true;
                unroll_on_gpu!(half < 2 => {
                    let of_lane = larger_or_nan(self.largest[half], most[block][half]);
                    most[block][half] = warp.combine(ACROSS, of_lane, larger_or_nan);
                });
                unroll_on_gpu!(half < 2 => {
                    // Decided per row: another row's scores must not change a bit of this one.
                    let (most, largest) = (most[block][half], self.largest[half]);
                    let stays = stays(most, factor, largest);
                    let smaller = exp2_negative(GpuFloat::mul_add(largest, factor, most * -factor));
                    shrink.factors[block][half] = if stays { 1.0 } else { smaller };
                    self.largest[half] = if stays { largest } else { most };
                    stay &= stays;
                });
                shrink.stay[block] = warp.all(stay);
                bases[block] = self.bases(factor);
            });
        }
        unroll_on_gpu!(n < TILES, at most 16 => {
            let block = n / DECIDED;
            if n.is_multiple_of(DECIDED) {
                unroll_on_gpu!(half < 2 => { self.totals[half] *= shrink.factors[block][half]; });
            }
            unroll_on_gpu!(at < 4 => {
                scores[n][at] = exp2_weight(scores[n][at], factor, bases[block][at / 2]);
                self.totals[at / 2] += scores[n][at];
            });
        });
        // The weights come before what follows. Measured for narrow heads: the loop is faster, and
        // the first tile does not spill registers. It is slower for others.
        if PARTS == 1 {
            hold(self.totals[0] + self.totals[1]);
        }
        shrink
    }

    /// Returns the addends of the exponents of both rows' weights. A row that has seen no key yet
    /// has scores of -infinity, whose weights are 0.
    #[inline(always)]
    fn bases(&self, factor: f32) -> [f32; 2] {
        self.largest.map(|largest| if largest == f32::NEG_INFINITY { 0.0 } else { largest * -factor })
    }
}

/// True if a row's maximum may stay: it has grown little, or the row has seen no key.
#[inline(always)]
fn stays(most: f32, factor: f32, largest: f32) -> bool {
    within_growth(most, factor, largest) | (most == f32::NEG_INFINITY)
}

/// Computes the output of this block's items, one after another. While one ends, the copies of the
/// next run.
///
/// # Safety
/// The contract has accepted the problem. Its heads have up to `PARTS` parts of 64 columns. All
/// threads of the block call it together.
#[inline(always)]
pub(super) unsafe fn forward<
    const GROUPS: u32,
    const TILE: u32,
    const TILES: usize,
    const BLOCKS: usize,
    const PARTS: u32,
    const SLOTS: u32,
    const MADE: usize,
>(
    inputs: Inputs<'_>,
    out: *mut bf16,
    lse: *mut f32,
) where
    [[f32; 4]; TILES]: Accumulators,
    [[f32; 4]; MADE]: Accumulators,
{
    let problem = inputs.problem;
    // SAFETY: the contract has checked that the rows of every head lie inside the arguments. Each
    // warpgroup loops over the same tiles and reaches every barrier of its role. The lanes of a
    // warp are converged at every product and shuffle.
    unsafe {
        let memory = Memory::<GROUPS, TILE, PARTS, SLOTS>::new(1, 0);
        let items = Items::new::<GROUPS>(&inputs);
        let bounds = |mask: MaskRange<'_>| [mask.length, problem.width];
        // The turns and the items with turns so far.
        let (mut turns, mut parts) = (0, 0);
        let mut own_round = items.occupied(&problem, 0);
        if copies() {
            leave_registers::<GROUPS, PARTS>();
            while slot_of(&problem, own_round) < items.end {
                let (ResidentRows { sample, head, first, mask }, own_rows) =
                    items.place::<GROUPS>(&problem, slot_of(&problem, own_round));
                own_round = items.occupied(&problem, own_round + 1);
                let [from, until] = mask.keys_of(first, own_rows, TILE);
                if from >= until {
                    continue;
                }
                let kv_head = kv_head_of(&problem, head);
                let (k, v) = (inputs.head(1, sample, kv_head), inputs.head(2, sample, kv_head));
                // Before the queries, whose place becomes free later.
                memory.fill(turns, 0, k, from * TILE, bounds(mask));
                memory.resident_free().wait((parts + 1) % 2);
                memory.fill_resident([inputs.head(0, sample, head)], first, bounds(mask));
                memory.fill(turns, 1, v, from * TILE, bounds(mask));
                (turns, parts) = (turns + 1, parts + 1);
                let mut tile = from + 1;
                while tile < until {
                    memory.fill(turns, 0, k, tile * TILE, bounds(mask));
                    memory.fill(turns, 1, v, tile * TILE, bounds(mask));
                    (turns, tile) = (turns + 1, tile + 1);
                }
            }
            return;
        }
        let group = multiplying_group::<GROUPS, PARTS>();
        let warp = Converged::assume();
        // A score's weight is 2^(score factor - maximum factor).
        let factor = problem.scale * LOG2_E;
        while slot_of(&problem, own_round) < items.end {
            let (ResidentRows { sample, head, first, mask }, own_rows) =
                items.place::<GROUPS>(&problem, slot_of(&problem, own_round));
            own_round = items.occupied(&problem, own_round + 1);
            let [from, until] = mask.keys_of(first, own_rows, TILE);
            let end = first + own_rows;
            let first = first + group * GROUP_ROWS;
            let mut softmax = Softmax { largest: [f32::NEG_INFINITY; 2], totals: [0.0; 2] };
            let mut sums: [[f32; 4]; MADE] = core::mem::zeroed();
            if from < until {
                let own = if first < end { mask.keys_of(first, GROUP_ROWS, TILE) } else { [0, 0] };
                let [own_from, own_until] = Memory::<GROUPS, TILE, PARTS, SLOTS>::own(own, until);
                memory.skip(turns, turns + own_from - from);
                // The turn of tile 0.
                let zero = turns.wrapping_sub(from);
                memory.resident_full().wait(parts % 2);
                if own_from < own_until {
                    let mut scores: [[f32; 4]; TILES] = core::mem::zeroed();
                    let mut p: [[[u32; 4]; 4]; BLOCKS] = core::mem::zeroed();
                    // The first tile is not a turn of the loop with conditions: the assembler must
                    // see on every path that the sums are waited for before p changes.
                    let mut tile = own_from;
                    let turn = zero.wrapping_add(tile);
                    memory.wait_full(turn, 0);
                    memory.multiply_rows(&mut scores, group, 0, turn, 0);
                    scores.wait::<0>();
                    memory.set_free_if(true, turn, 0);
                    hide(&mut scores, mask, [first, tile * TILE], [GROUP_ROWS, TILE], false);
                    let shrink = softmax.weigh::<TILES, BLOCKS, PARTS>(warp, &mut scores, factor);
                    round(&scores, &mut p);
                    rescale_between(warp, memory, &shrink, &mut sums, &mut p, turn);
                    tile += 1;
                    while tile < own_until {
                        let turn = zero.wrapping_add(tile);
                        memory.wait_full(turn, 0);
                        memory.multiply_rows(&mut scores, group, 0, turn, 0);
                        memory.wait_full(turn - 1, 1);
                        memory.multiply_weights(&mut sums, &p, turn - 1, 1);
                        scores.wait::<1>();
                        memory.set_free_if(true, turn, 0);
                        hide(&mut scores, mask, [first, tile * TILE], [GROUP_ROWS, TILE], false);
                        let shrink = softmax.weigh::<TILES, BLOCKS, PARTS>(warp, &mut scores, factor);
                        sums.wait::<0>();
                        memory.set_free_if(true, turn - 1, 1);
                        shrink.apply(0, &mut sums);
                        round(&scores, &mut p);
                        rescale_between(warp, memory, &shrink, &mut sums, &mut p, turn);
                        tile += 1;
                    }
                    memory.resident_free().arrive_if(lane_id() == 0);
                    let turn = zero.wrapping_add(tile) - 1;
                    memory.wait_full(turn, 1);
                    memory.multiply_weights(&mut sums, &p, turn, 1);
                    sums.wait::<0>();
                    memory.set_free_if(true, turn, 1);
                } else {
                    memory.resident_free().arrive_if(lane_id() == 0);
                }
                memory.skip(zero.wrapping_add(own_until), zero.wrapping_add(until));
                (turns, parts) = (turns + until - from, parts + 1);
            }

            // Rows from `end` on belong to other items.
            let end = if end < problem.tokens { end } else { problem.tokens };
            let statistics = problem.statistics(sample, head);
            let warp = warp.again();
            let mut inverse = [0.0; 2];
            unroll_on_gpu!(half < 2 => {
                let total = warp.combine(ACROSS, softmax.totals[half], add);
                let most = softmax.largest[half];
                // Otherwise the row's whole output becomes NaN.
                let known = is_known(most, factor);
                inverse[half] = if known { 1.0 / total } else { f32::NAN };
                let token = first + resident_row(half);
                if lane_id().is_multiple_of(ACROSS) && token < end {
                    let value =
                        if known { GpuFloat::mul_add(most, problem.scale, math::log(total)) } else { f32::NAN };
                    let value = if token < mask.length { value } else { f32::NEG_INFINITY };
                    vector::store(lse, statistics + token as usize, value);
                }
            });
            unroll_on_gpu!(n < MADE, at most 32 => {
                unroll_on_gpu!(at < 4 => { sums[n][at] *= inverse[at / 2]; });
            });
            let rows = problem.output_rows(&[], sample, head);
            let warp_row = first + thread::thread_idx_x() % WARPGROUP / LANES * 16;
            store(warp, &sums, 1.0, rows, [warp_row, mask.length, end, problem.width], out);
        }
    }
}

/// Adds the products of a turn's first block of keys to the sums of the warp and clears its
/// weights, if a row is rescaled before the second. The sums are then rescaled.
///
/// # Safety
/// All lanes of the warp call it together. No products of the sums are in flight.
#[inline(always)]
unsafe fn rescale_between<
    const GROUPS: u32,
    const TILE: u32,
    const PARTS: u32,
    const SLOTS: u32,
    const BLOCKS: usize,
    const MADE: usize,
>(
    warp: Converged,
    memory: Memory<GROUPS, TILE, PARTS, SLOTS>,
    shrink: &Shrink<BLOCKS>,
    sums: &mut [[f32; 4]; MADE],
    p: &mut [[[u32; 4]; 4]; BLOCKS],
    turn: u32,
) {
    if BLOCKS == 2 && !shrink.stay[BLOCKS - 1] {
        // SAFETY: all lanes of the warp execute this: `stay` is the same for all.
        unsafe {
            memory.wait_full(turn, 1);
            memory.multiply_in_warp(warp.again(), sums, &p[0], turn, 1);
        }
        shrink.apply(BLOCKS - 1, sums);
        p[0] = [[0; 4]; 4];
    }
}
