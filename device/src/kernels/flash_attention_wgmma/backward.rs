//! The backward pass: the gradient of a block's queries, and the gradients of a block's keys and
//! values. Both kernels recompute scores and dp, so that each sum belongs to one block and needs no
//! atomics. For heads of 65 to 128 columns, `keys` can store ds, and dq is then a product of
//! [`squares`](super::squares).
//!
//! ```text
//! queries  start s, dp -> wait for s -> p -> wait for dp -> ds -> start dq += ds k
//!   or     wait for s -> start the next s -> p -> wait for dp -> ds -> start dq += ds k, the next dp
//! keys     start s, dp -> wait for s -> p -> start dv += p dout -> wait for dp -> ds -> start dk += ds q
//! ```
//! Invariant: both kernels compute p from the score and `lse` in the same way.

use super::heads::Inputs;
use super::items::{Items, slot_of};
use super::rows::{
    LAST_HEADS, copies, heads_of_group, hide, kv_head_of, leave_registers, multiplying_group, resident_row, round,
    store,
};
use super::shape::{GROUP_ROWS, WARPGROUP};
use super::squares::StoredScores;
use super::tile::Memory;
use crate::block::{divide_short, launder_reg};
use crate::flash_attention::place::{MaskRange, Problem, ResidentRows};
use crate::machine::warpgroup::{Accumulators, hold};
use crate::machine::wgmma::undefined_sums;
use crate::math::exp2_weight;
use crate::unroll_on_gpu;
use crate::vector::load;
use crate::warp::{Converged, LANES};
use core::f32::consts::LOG2_E;
use cuda_std::thread;
use cuda_std::warp::{lane_id, sync_warp};
use half::bf16;

/// Computes dq of this block's items, one after another. While one ends, the copies of the next
/// run.
///
/// # Safety
/// The contract has accepted the problem. Its heads have up to `PARTS` parts of 64 columns. All
/// threads of the block call it together.
#[inline(always)]
pub(super) unsafe fn queries<
    const GROUPS: u32,
    const TILE: u32,
    const TILES: usize,
    const BLOCKS: usize,
    const PARTS: u32,
    const SLOTS: u32,
    const MADE: usize,
>(
    inputs: Inputs<'_>,
    lse: &[f32],
    delta: &[f32],
    dqkv: *mut bf16,
) where
    [[f32; 4]; TILES]: Accumulators,
    [[f32; 4]; MADE]: Accumulators,
{
    let problem = inputs.problem;
    // SAFETY: the contract has checked that the rows of every head lie inside the arguments. Each
    // warpgroup loops over the same tiles and reaches every barrier of its role. The lanes of a
    // warp are converged at every product.
    unsafe {
        let memory = Memory::<GROUPS, TILE, PARTS, SLOTS>::new(2, 0);
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
                let (q, dout) = (inputs.head(0, sample, head), inputs.output_head(sample, head));
                // Before the queries, whose place becomes free later.
                memory.fill(turns, 0, k, from * TILE, bounds(mask));
                memory.fill(turns, 1, v, from * TILE, bounds(mask));
                memory.resident_free().wait((parts + 1) % 2);
                memory.fill_resident([q, dout], first, bounds(mask));
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
        let factor = problem.scale * LOG2_E;
        while slot_of(&problem, own_round) < items.end {
            let (ResidentRows { sample, head, first, mask }, own_rows) =
                items.place::<GROUPS>(&problem, slot_of(&problem, own_round));
            own_round = items.occupied(&problem, own_round + 1);
            let [from, until] = mask.keys_of(first, own_rows, TILE);
            let end = first + own_rows;
            let first = first + group * GROUP_ROWS;
            // The turn of tile 0.
            let zero = turns.wrapping_sub(from);
            let mut sums: [[f32; 4]; MADE] = core::mem::zeroed();
            let own = if first < end { mask.keys_of(first, GROUP_ROWS, TILE) } else { [0, 0] };
            let [own_from, own_until] = Memory::<GROUPS, TILE, PARTS, SLOTS>::own(own, until);
            memory.skip(turns, turns + own_from - from);
            if from < until {
                memory.resident_full().wait(parts % 2);
            }
            if own_from < own_until {
                let (mut base, mut delta_here) = ([0.0; 2], [0.0; 2]);
                unroll_on_gpu!(half < 2 => {
                    let token = first + resident_row(half);
                    if token < mask.length {
                        let at = problem.statistics(sample, head) + token as usize;
                        (base[half], delta_here[half]) = (load(lse, at) * -LOG2_E, load(delta, at));
                    }
                });
                let mut scores: [[f32; 4]; TILES] = core::mem::zeroed();
                let mut scores_after: [[f32; 4]; TILES] = core::mem::zeroed();
                let mut gradients: [[f32; 4]; TILES] = core::mem::zeroed();
                let mut weights: [[[u32; 4]; 4]; BLOCKS] = core::mem::zeroed();
                let mut tile = own_from;
                // Two warpgroups start a turn's scores one turn ahead; three have no registers for
                // that, and need it less.
                let ahead = GROUPS == 2;
                macro_rules! turn {
                    ($scores:ident, $after:ident) => {
                        let turn = zero.wrapping_add(tile);
                        let more = u32::from(tile + 1 < own_until);
                        if ahead {
                            $scores.wait::<2>();
                            memory.wait_full(turn + more, 0);
                            // Products replace them: the assembler must see no earlier value.
                            $after = undefined_sums();
                            memory.multiply_rows(&mut $after, group, 0, turn + more, 0);
                        } else {
                            memory.wait_full(turn, 0);
                            memory.wait_full(turn, 1);
                            memory.multiply_rows(&mut $scores, group, 0, turn, 0);
                            memory.multiply_rows(&mut gradients, group, 1, turn, 1);
                            // Also for the products of the turn before.
                            $scores.wait::<1>();
                            memory.set_free_if(tile > own_from, turn.wrapping_sub(1), 0);
                        }
                        hide(&mut $scores, mask, [first, tile * TILE], [GROUP_ROWS, TILE], false);
                        unroll_on_gpu!(n < TILES, at most 16 => {
                            unroll_on_gpu!(at < 4 => {
                                $scores[n][at] = exp2_weight($scores[n][at], factor, base[at / 2]);
                            });
                        });
                        // Measured: a tenth faster for heads of 64 columns. The wait would
                        // otherwise come before most exponentials.
                        hold($scores[TILES - 1][3] + $scores[TILES - 1][1]);
                        if ahead {
                            // Also for the products of the turn before.
                            gradients.wait::<1>();
                            memory.set_free_if(tile > own_from, turn.wrapping_sub(1), 0);
                        } else {
                            gradients.wait::<0>();
                        }
                        memory.set_free_if(true, turn, 1);
                        unroll_on_gpu!(n < TILES, at most 16 => {
                            unroll_on_gpu!(at < 4 => {
                                gradients[n][at] = $scores[n][at] * (gradients[n][at] - delta_here[at / 2]);
                            });
                        });
                        round(&gradients, &mut weights);
                        memory.multiply_weights(&mut sums, &weights, turn, 0);
                        if ahead {
                            memory.wait_full(turn + more, more);
                            gradients = undefined_sums();
                            memory.multiply_rows(&mut gradients, group, 1, turn + more, more);
                        }
                        tile += 1;
                        if tile == own_until {
                            sums.wait::<0>();
                            break;
                        }
                    };
                }
                // The assembler must see no zeros put in the accumulators while products are under
                // way. Nor may products be under way on one path only: the last turn also starts a
                // next one, of rows that are still there, and nothing reads its sums.
                sums.wait::<0>();
                if ahead {
                    let turn = zero.wrapping_add(tile);
                    memory.wait_full(turn, 0);
                    memory.multiply_rows(&mut scores, group, 0, turn, 0);
                    memory.wait_full(turn, 1);
                    memory.multiply_rows(&mut gradients, group, 1, turn, 1);
                    scores.wait::<1>();
                    loop {
                        turn!(scores, scores_after);
                        turn!(scores_after, scores);
                    }
                } else {
                    loop {
                        turn!(scores, scores_after);
                    }
                }
                memory.set_free_if(true, zero.wrapping_add(tile) - 1, 0);
            }
            memory.resident_free().arrive_if(from < until && lane_id() == 0);
            memory.skip(zero.wrapping_add(own_until), zero.wrapping_add(until));
            if from < until {
                (turns, parts) = (turns + until - from, parts + 1);
            }
            // Rows from `end` on belong to other items.
            let end = if end < problem.tokens { end } else { problem.tokens };
            let q = problem.rows(0, sample, head);
            let warp_row = first + thread::thread_idx_x() % WARPGROUP / LANES * 16;
            store(warp, &sums, problem.scale, q, [warp_row, mask.length, end, problem.width], dqkv);
        }
    }
}

/// Computes dk and dv of this block's tile of keys, or two if `in_pairs`. If `STORE`, it has one,
/// of a launch that begins at key head `before` of all samples' heads, and also stores ds.
///
/// # Safety
/// The requirements of [`queries`] hold. `stored` has the tiles of the launch's heads if `STORE`.
#[inline(always)]
pub(super) unsafe fn keys<
    const GROUPS: u32,
    const TILE: u32,
    const TILES: usize,
    const BLOCKS: usize,
    const PARTS: u32,
    const SLOTS: u32,
    const MADE: usize,
    const HELD: usize,
    const STORE: bool,
>(
    inputs: Inputs<'_>,
    lse: &[f32],
    delta: &[f32],
    dqkv: *mut bf16,
    in_pairs: bool,
    before: u32,
    stored: *mut bf16,
) where
    [[f32; 4]; TILES]: Accumulators,
    [[f32; 4]; MADE]: Accumulators,
{
    let problem = inputs.problem;
    // SAFETY: the argument in `queries` holds here too.
    unsafe {
        let memory = Memory::<GROUPS, TILE, PARTS, SLOTS>::new(2, 2);
        let rows = Memory::<GROUPS, TILE, PARTS, SLOTS>::RESIDENT;
        let tiles = problem.tokens.div_ceil(rows);
        // Found again wherever it is used: registers that hold it meanwhile would be too many.
        let place = || {
            if STORE {
                ResidentRows::in_part(&problem, launder_reg(rows), problem.kv_heads, before as usize, LAST_HEADS, false)
            } else {
                place_of_keys(&problem, launder_reg(rows), in_pairs)
            }
        };
        let ResidentRows { first: block_first, mask, .. } = place();
        // A second tile is as far from the end as the first from the start. Under a causal mask,
        // all pairs have the same work. If the second has queries, so has the first: both have
        // turns with resident rows, or only the first.
        let last = (tiles - 1) * rows;
        let first_of = |number: u32, first: u32| if number == 0 { first } else { last - first };
        let count = if !STORE && PARTS == 1 && in_pairs && 2 * block_first != last { 2 } else { 1 };
        let heads = heads_of_group(&problem);
        let (mut turns_before, mut number) = (0, 0);
        if copies() {
            leave_registers::<GROUPS, PARTS>();
            while number < count {
                let ResidentRows { sample, head: kv_head, first, mask } = place();
                let first = first_of(number, first);
                let [from, until] = mask.queries_of(first, rows, TILE);
                if from < until {
                    let (k, v) = (inputs.head(1, sample, kv_head), inputs.head(2, sample, kv_head));
                    memory.resident_free().wait((number + 1) % 2);
                    memory.fill_resident([k, v], first, [mask.length, problem.width]);
                    let (statistics, tiles) = ([lse, delta], [from, until]);
                    turns_before =
                        memory.fill_queries(&inputs, (sample, kv_head), statistics, tiles, mask.length, turns_before);
                }
                number += 1;
            }
            return;
        }
        let group = multiplying_group::<GROUPS, PARTS>();
        let warp = Converged::assume();
        let factor = problem.scale * LOG2_E;
        while number < count {
            let first = first_of(number, block_first);
            let [from, until] = mask.queries_of(first, rows, TILE);
            let turns = until - from;
            let first = first + group * GROUP_ROWS;
            let mut dk: [[f32; 4]; MADE] = core::mem::zeroed();
            let mut dv: [[f32; 4]; MADE] = core::mem::zeroed();
            let [own_from, own_until] =
                Memory::<GROUPS, TILE, PARTS, SLOTS>::own(mask.queries_of(first, GROUP_ROWS, TILE), until);
            let (mut k, mut v) = ([[[0; 4]; 4]; HELD], [[[0; 4]; 4]; HELD]);
            if from < until {
                memory.resident_full().wait(number % 2);
                (k, v) = (memory.hold::<HELD>(0, group), memory.hold::<HELD>(1, group));
                if HELD > 0 {
                    // All lanes have read theirs before the warp's arrival.
                    sync_warp(u32::MAX);
                    memory.resident_free().arrive_if(lane_id() == 0);
                }
            }
            // The number of the group's first head in this launch.
            let mut first_stored = 0;
            if STORE {
                let ResidentRows { sample, head: kv_head, .. } = place();
                first_stored = (sample as u32 * problem.kv_heads + kv_head - before) * heads;
            }
            let mut head = 0;
            while head < heads {
                let so_far = turns_before + head * turns;
                memory.skip(so_far, so_far + own_from - from);
                if own_from < own_until {
                    let mut scores: [[f32; 4]; TILES] = core::mem::zeroed();
                    let mut gradients: [[f32; 4]; TILES] = core::mem::zeroed();
                    let mut p: [[[u32; 4]; 4]; BLOCKS] = core::mem::zeroed();
                    let mut ds: [[[u32; 4]; 4]; BLOCKS] = core::mem::zeroed();
                    let mut tile = own_from;
                    while tile < own_until {
                        let turn = so_far + tile - from;
                        memory.wait_full(turn, 0);
                        // The waits are also for the last turn's products. Wide heads leave no
                        // registers for dp before that.
                        if HELD > 0 {
                            memory.multiply_held(&mut scores, &k, turn, 0);
                            memory.wait_full(turn, 1);
                            memory.multiply_held(&mut gradients, &v, turn, 1);
                            scores.wait::<1>();
                        } else {
                            memory.multiply_rows(&mut scores, group, 0, turn, 0);
                            scores.wait::<0>();
                            memory.wait_full(turn, 1);
                            memory.multiply_rows(&mut gradients, group, 1, turn, 1);
                        }
                        // All lanes have read the last turn's values.
                        sync_warp(u32::MAX);
                        memory.set_free_if(tile > own_from, turn.wrapping_sub(1), 0);
                        memory.set_free_if(tile > own_from, turn.wrapping_sub(1), 1);
                        hide(&mut scores, mask, [first, tile * TILE], [GROUP_ROWS, TILE], true);
                        let numbers = [memory.numbers(turn % SLOTS, 0), memory.numbers(turn % SLOTS, 1)];
                        let column = 2 * (lane_id() % 4);
                        unroll_on_gpu!(n < TILES, at most 16 => {
                            let base = numbers[0].get2(8 * n as u32 + column).map(|lse| lse * -LOG2_E);
                            unroll_on_gpu!(at < 4 => {
                                scores[n][at] = exp2_weight(scores[n][at], factor, base[at % 2]);
                            });
                        });
                        round(&scores, &mut p);
                        memory.multiply_weights(&mut dv, &p, turn, 1);
                        gradients.wait::<1>();
                        unroll_on_gpu!(n < TILES, at most 16 => {
                            let deltas = numbers[1].get2(8 * n as u32 + column);
                            unroll_on_gpu!(at < 4 => {
                                gradients[n][at] = scores[n][at] * (gradients[n][at] - deltas[at % 2]);
                            });
                        });
                        round(&gradients, &mut ds);
                        if STORE {
                            let place = [launder_reg(first) / GROUP_ROWS, tile];
                            let scores = StoredScores::new(&problem, first_stored + head);
                            scores.write(core::array::from_ref(&ds[0]), place, stored.cast());
                        }
                        memory.multiply_weights(&mut dk, &ds, turn, 0);
                        tile += 1;
                    }
                    dv.wait::<0>();
                    dk.wait::<0>();
                    // All lanes have read the last turn's values.
                    sync_warp(u32::MAX);
                    memory.set_free_if(true, so_far + tile - 1 - from, 0);
                    memory.set_free_if(true, so_far + tile - 1 - from, 1);
                }
                memory.skip(so_far + own_until - from, so_far + turns);
                head += 1;
            }
            memory.resident_free().arrive_if(HELD == 0 && from < until && lane_id() == 0);
            turns_before += heads * turns;
            let ResidentRows { sample, head: kv_head, first, mask } = place();
            let first = first_of(number, first) + group * GROUP_ROWS;
            number += 1;
            let (k, v) = (problem.rows(1, sample, kv_head), problem.rows(2, sample, kv_head));
            let warp_row = first + thread::thread_idx_x() % WARPGROUP / LANES * 16;
            let bounds = [warp_row, mask.length, problem.tokens, problem.width];
            store(warp, &dk, problem.scale, k, bounds, dqkv);
            store(warp, &dv, 1.0, v, bounds, dqkv);
        }
    }
}

/// Returns the place of this block's tile of keys, or of the first of its two if `in_pairs`.
///
/// # Safety
/// The contract has accepted the problem. The grid has a block for each tile or pair of each key
/// head.
#[inline(always)]
unsafe fn place_of_keys<'k>(problem: &Problem<'k, bf16>, rows: u32, in_pairs: bool) -> ResidentRows<'k> {
    let tiles = problem.tokens.div_ceil(rows);
    // SAFETY: the contract has checked that there are tokens and heads.
    unsafe {
        let (number, tile) = divide_short(thread::block_idx_x(), if in_pairs { tiles.div_ceil(2) } else { tiles });
        let (sample, head) = divide_short(number, problem.kv_heads);
        ResidentRows::of(problem, sample as usize, head, tile * rows)
    }
}
