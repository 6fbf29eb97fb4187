//! The backward pass: the gradient of a block's queries, and the gradients of a block's keys and
//! values. Both kernels recompute scores and dp, so that each sum belongs to one block and needs no
//! atomics. A turn's last products run while the next turn's scores and dp are computed.
//!
//! ```text
//! queries  start s, dp -> wait for s -> p -> wait for dp -> ds -> start dq += ds k
//! keys     start s, dp -> wait for s -> p -> start dv += p dout -> wait for dp -> ds -> start dk += ds q
//! ```
//! Invariant: both kernels compute p from the score and `lse` in the same way.

use super::shape::{GROUP_ROWS, WARPGROUP};
use super::tile::{
    Memory, copies, heads_of_group, hide, kv_head_of, leave_registers, multiplying_group, resident_row, round, store,
};
use crate::flash_attention::place::{Place, Problem};
use crate::machine::warpgroup::Accumulators;
use crate::machine::wgmma::fence_async;
use crate::math::exp2_weight;
use crate::unroll_on_gpu;
use crate::vector::load;
use crate::warp::{Converged, LANES};
use core::f32::consts::LOG2_E;
use cuda_std::{thread, warp::lane_id};
use half::bf16;

/// Computes dq of this block's queries.
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
    const MADE: usize,
>(
    problem: Problem<'_, bf16>,
    lse: &[f32],
    delta: &[f32],
    dout: &[bf16],
    dqkv: *mut bf16,
) where
    [[f32; 4]; TILES]: Accumulators,
    [[f32; 4]; MADE]: Accumulators,
{
    // SAFETY: the contract has checked that the rows of every head lie inside the arguments. Each
    // warpgroup loops over the same tiles and reaches every barrier of its role. The lanes of a
    // warp are converged at every product.
    unsafe {
        let memory = Memory::<GROUPS, TILE, PARTS>::new(2, 0);
        let rows = Memory::<GROUPS, TILE, PARTS>::RESIDENT;
        let Place { sample, head, first, mask } = Place::new(&problem, rows, problem.heads, true);
        let [from, until] = mask.keys_of(first, rows, TILE);
        let bounds = [mask.length, problem.width];
        if copies() {
            leave_registers::<GROUPS>();
            if from < until {
                let kv_head = kv_head_of(&problem, head);
                let (k, v) = (problem.rows(1, sample, kv_head), problem.rows(2, sample, kv_head));
                let (q, dout) = (problem.rows(0, sample, head), problem.output_rows(dout, sample, head));
                Memory::<GROUPS, TILE, PARTS>::copy(memory.resident(0), rows, q, first, bounds);
                Memory::<GROUPS, TILE, PARTS>::copy(memory.resident(1), rows, dout, first, bounds);
                memory.resident_full().arrive_after_copies();
                let mut tile = from;
                while tile < until {
                    memory.fill(tile - from, 0, k, tile * TILE, bounds);
                    memory.fill(tile - from, 1, v, tile * TILE, bounds);
                    tile += 1;
                }
            }
            return;
        }
        let group = multiplying_group::<GROUPS>();
        let warp = Converged::assume();
        let first = first + group * GROUP_ROWS;
        let factor = problem.scale * LOG2_E;
        let mut sums: [[f32; 4]; MADE] = core::mem::zeroed();
        let [own_from, own_until] = Memory::<GROUPS, TILE, PARTS>::own(mask.keys_of(first, GROUP_ROWS, TILE), until);
        memory.skip(0, own_from - from);
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
            let mut gradients: [[f32; 4]; TILES] = core::mem::zeroed();
            let mut weights: [[[u32; 4]; 4]; BLOCKS] = core::mem::zeroed();
            memory.resident_full().wait(0);
            fence_async();
            let mut tile = own_from;
            while tile < own_until {
                let turn = tile - from;
                memory.wait_full(turn, 0);
                memory.multiply_rows(&mut scores, group, turn, 0);
                memory.wait_full(turn, 1);
                memory.multiply_rows(&mut gradients, group, turn, 1);
                // Also for the last turn's products.
                scores.wait::<1>();
                memory.set_free_if(tile > own_from, turn.wrapping_sub(1), 0);
                hide(&mut scores, mask, [first, tile * TILE], [GROUP_ROWS, TILE], false);
                unroll_on_gpu!(n < TILES, at most 16 => {
                    unroll_on_gpu!(at < 4 => {
                        scores[n][at] = exp2_weight(scores[n][at], factor, base[at / 2]);
                    });
                });
                gradients.wait::<0>();
                memory.set_free_if(true, turn, 1);
                unroll_on_gpu!(n < TILES, at most 16 => {
                    unroll_on_gpu!(at < 4 => {
                        gradients[n][at] = scores[n][at] * (gradients[n][at] - delta_here[at / 2]);
                    });
                });
                round(&gradients, &mut weights);
                memory.multiply_weights(&mut sums, &weights, turn, 0);
                tile += 1;
            }
            sums.wait::<0>();
            memory.set_free_if(true, tile - 1 - from, 0);
        }
        memory.skip(own_until - from, until - from);
        let q = problem.rows(0, sample, head);
        let warp_row = first + thread::thread_idx_x() % WARPGROUP / LANES * 16;
        store(warp, &sums, problem.scale, q, [warp_row, mask.length, problem.tokens, problem.width], dqkv);
    }
}

/// Computes dk and dv of this block's keys.
///
/// # Safety
/// The requirements of [`queries`] hold.
#[inline(always)]
pub(super) unsafe fn keys<
    const GROUPS: u32,
    const TILE: u32,
    const TILES: usize,
    const BLOCKS: usize,
    const PARTS: u32,
    const MADE: usize,
>(
    problem: Problem<'_, bf16>,
    lse: &[f32],
    delta: &[f32],
    dout: &[bf16],
    dqkv: *mut bf16,
) where
    [[f32; 4]; TILES]: Accumulators,
    [[f32; 4]; MADE]: Accumulators,
{
    // SAFETY: the argument in `queries` holds here too.
    unsafe {
        let memory = Memory::<GROUPS, TILE, PARTS>::new(2, 2);
        let rows = Memory::<GROUPS, TILE, PARTS>::RESIDENT;
        let Place { sample, head: kv_head, first, mask } = Place::new(&problem, rows, problem.kv_heads, false);
        let [from, until] = mask.queries_of(first, rows, TILE);
        let bounds = [mask.length, problem.width];
        let (heads, turns) = (heads_of_group(&problem), until - from);
        if copies() {
            leave_registers::<GROUPS>();
            if from < until {
                let (k, v) = (problem.rows(1, sample, kv_head), problem.rows(2, sample, kv_head));
                Memory::<GROUPS, TILE, PARTS>::copy(memory.resident(0), rows, k, first, bounds);
                Memory::<GROUPS, TILE, PARTS>::copy(memory.resident(1), rows, v, first, bounds);
                memory.resident_full().arrive_after_copies();
                let mut head = 0;
                while head < heads {
                    let query_head = kv_head * heads + head;
                    let q = problem.rows(0, sample, query_head);
                    let dout = problem.output_rows(dout, sample, query_head);
                    let start = problem.statistics(sample, query_head);
                    let mut tile = from;
                    while tile < until {
                        let turn = head * turns + tile - from;
                        memory.fill_numbers(turn, [lse, delta], start, tile * TILE, mask.length);
                        memory.fill(turn, 0, q, tile * TILE, bounds);
                        memory.fill(turn, 1, dout, tile * TILE, bounds);
                        tile += 1;
                    }
                    head += 1;
                }
            }
            return;
        }
        let group = multiplying_group::<GROUPS>();
        let warp = Converged::assume();
        let first = first + group * GROUP_ROWS;
        let factor = problem.scale * LOG2_E;
        let mut dk: [[f32; 4]; MADE] = core::mem::zeroed();
        let mut dv: [[f32; 4]; MADE] = core::mem::zeroed();
        let [own_from, own_until] = Memory::<GROUPS, TILE, PARTS>::own(mask.queries_of(first, GROUP_ROWS, TILE), until);
        let mut head = 0;
        while head < heads {
            let before = head * turns;
            memory.skip(before, before + own_from - from);
            if own_from < own_until {
                let mut scores: [[f32; 4]; TILES] = core::mem::zeroed();
                let mut gradients: [[f32; 4]; TILES] = core::mem::zeroed();
                let mut p: [[[u32; 4]; 4]; BLOCKS] = core::mem::zeroed();
                let mut ds: [[[u32; 4]; 4]; BLOCKS] = core::mem::zeroed();
                memory.resident_full().wait(0);
                fence_async();
                let mut tile = own_from;
                while tile < own_until {
                    let turn = before + tile - from;
                    memory.wait_full(turn, 0);
                    memory.multiply_rows(&mut scores, group, turn, 0);
                    // The waits are also for the last turn's products. Wide heads leave no
                    // registers for dp before that.
                    if PARTS == 1 {
                        memory.wait_full(turn, 1);
                        memory.multiply_rows(&mut gradients, group, turn, 1);
                        scores.wait::<1>();
                    } else {
                        scores.wait::<0>();
                        memory.wait_full(turn, 1);
                        memory.multiply_rows(&mut gradients, group, turn, 1);
                    }
                    memory.set_free_if(tile > own_from, turn.wrapping_sub(1), 0);
                    memory.set_free_if(tile > own_from, turn.wrapping_sub(1), 1);
                    hide(&mut scores, mask, [first, tile * TILE], [GROUP_ROWS, TILE], true);
                    let numbers = [memory.numbers(turn % 2, 0), memory.numbers(turn % 2, 1)];
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
                    memory.multiply_weights(&mut dk, &ds, turn, 0);
                    tile += 1;
                }
                dv.wait::<0>();
                dk.wait::<0>();
                memory.set_free_if(true, before + tile - 1 - from, 0);
                memory.set_free_if(true, before + tile - 1 - from, 1);
            }
            memory.skip(before + own_until - from, before + turns);
            head += 1;
        }
        let (k, v) = (problem.rows(1, sample, kv_head), problem.rows(2, sample, kv_head));
        let warp_row = first + thread::thread_idx_x() % WARPGROUP / LANES * 16;
        let bounds = [warp_row, mask.length, problem.tokens, problem.width];
        store(warp, &dk, problem.scale, k, bounds, dqkv);
        store(warp, &dv, 1.0, v, bounds, dqkv);
    }
}
