//! The backward pass: the gradient of a block's queries, and the gradients of a block's keys and
//! values (Dao, 2023). Both kernels recompute scores and dp, so that each sum belongs to one block
//! and needs no atomics. For the widest heads see [`squares`](super::squares).
//!
//! Invariant: both kernels compute p from the score and `lse` in the same way.

use super::shape::LAST_HEADS;
use super::tile::Memory;
use crate::block::launder_reg;
use crate::flash_attention::place::{Problem, ResidentRows};
use crate::math::exp2_weight;
use crate::mma::element::MmaElement;
use crate::mma::fragments::Sums;
use crate::tile::{SharedTile, commit_copies, wait_copies};
use crate::unroll_on_gpu;
use crate::vector::load;
use crate::warp::Converged;
use core::f32::consts::LOG2_E;
use cuda_std::thread;

/// Computes dq of this block's queries.
///
/// # Safety
/// The contract has accepted the problem. Its heads have up to `CHUNKS` chunks, and `MADE` mma
/// tiles of columns. All threads of the block call it together.
#[inline(always)]
pub(super) unsafe fn queries<
    S: MmaElement,
    const M_TILES: usize,
    const TILES: usize,
    const CHUNKS: usize,
    const MADE: usize,
>(
    problem: Problem<'_, S>,
    lse: &[f32],
    delta: &[f32],
    dout: &[S],
    dqkv: *mut S,
) {
    // SAFETY: the contract has checked that the rows of every head lie inside the arguments. All
    // threads loop over the same tiles, so they reach every barrier. The lanes of a warp are
    // converged at every mma.
    unsafe {
        let warp = Converged::assume();
        let memory = Memory::<M_TILES, TILES, CHUNKS>::new(2);
        let (rows, of_tile) = (Memory::<M_TILES, TILES, CHUNKS>::RESIDENT, Memory::<M_TILES, TILES, CHUNKS>::TILE);
        let ResidentRows { sample, head, first, mask } =
            ResidentRows::in_part(&problem, rows, problem.heads, 0, LAST_HEADS, true);
        let [from, until] = mask.keys_of(first, rows, of_tile);
        let kv_head = head / problem.group();
        let q = problem.rows(0, sample, head);
        // Recomputed for each tile, as are the addresses that `copy` derives from them.
        let (k, v) =
            (|| problem.rows(1, sample, launder_reg(kv_head)), || problem.rows(2, sample, launder_reg(kv_head)));
        let bounds = [mask.length, problem.width];

        let mut sums: Sums<M_TILES, MADE> = [[[0.0; 4]; MADE]; M_TILES];
        if from < until {
            memory.copy(memory.resident(0), rows, q, first, bounds);
            memory.copy(memory.resident(1), rows, problem.output_rows(dout, sample, head), first, bounds);
            memory.copy(memory.slot(0, 0), of_tile, k(), from * of_tile, bounds);
            memory.copy(memory.slot(0, 1), of_tile, v(), from * of_tile, bounds);
            commit_copies();
            wait_copies::<0>();
            memory.round::<S>(memory.resident(0), rows);
            memory.round::<S>(memory.resident(1), rows);
        }
        let mut tile = from;
        while tile < until {
            let slot = (tile - from) % 2;
            wait_copies::<0>();
            memory.round::<S>(memory.slot(slot, 0), of_tile);
            memory.round::<S>(memory.slot(slot, 1), of_tile);
            thread::sync_threads();
            // Into the slot that all warps have finished reading.
            if tile + 1 < until {
                memory.copy(memory.slot(1 - slot, 0), of_tile, k(), (tile + 1) * of_tile, bounds);
                memory.copy(memory.slot(1 - slot, 1), of_tile, v(), (tile + 1) * of_tile, bounds);
                commit_copies();
            }
            let place = [first, tile * of_tile];
            tile += 1;
            if memory.none_seen(mask, place, false) {
                continue;
            }
            // Recomputed for each tile: the accumulators need the registers.
            let factor = f32::from_bits(launder_reg(problem.scale.to_bits())) * LOG2_E;
            let mut scores = memory.qk_scores::<S>(warp, 0, memory.slot(slot, 0));
            let mut gradients = memory.qk_scores::<S>(warp, 1, memory.slot(slot, 1));
            if !memory.all_seen(mask, place, false) {
                memory.apply_mask(&mut scores, mask, place, false, f32::NEG_INFINITY);
                memory.apply_mask(&mut gradients, mask, place, false, 0.0);
            }
            unroll_on_gpu!(m < 2 => {
                if m < M_TILES {
                    unroll_on_gpu!(half < 2 => {
                        // Reloaded for each tile, from the cache: the accumulators need the
                        // registers.
                        let (mut base, mut delta_here) = (0.0, 0.0);
                        let token = launder_reg(first + memory.resident_row(m, half));
                        if token < mask.length {
                            let at = problem.statistics(sample, head) + token as usize;
                            (base, delta_here) = (load(lse, at) * -LOG2_E, load(delta, at));
                        }
                        unroll_on_gpu!(n < TILES => {
                            unroll_on_gpu!(column < 2 => {
                                let at = 2 * half + column;
                                let p = exp2_weight(scores[m][n][at], factor, base);
                                gradients[m][n][at] = p * (gradients[m][n][at] - delta_here);
                            });
                        });
                    });
                }
            });
            memory.pv_accumulate::<S, MADE>(warp, &mut sums, &gradients, memory.slot(slot, 0), 0);
        }
        // Recomputed: keeping it live across the loop would take registers from the accumulators.
        let ResidentRows { sample, head, first, mask } =
            ResidentRows::in_part(&problem, launder_reg(rows), problem.heads, 0, LAST_HEADS, true);
        let q = problem.rows(0, sample, head);
        memory.store(warp, &sums, problem.scale, q, 0, [first, mask.length, problem.tokens, problem.width], dqkv);
    }
}

/// Starts to copy one value for each row of a tile, with 0 for tokens that do not exist.
///
/// # Safety
/// The values of the tokens below `limit` lie inside `values`. `to` has an element for each row.
#[inline(always)]
pub(super) unsafe fn copy_numbers(
    to: SharedTile<f32>,
    count: u32,
    values: &[f32],
    start: usize,
    first: u32,
    limit: u32,
) {
    let row = thread::thread_idx_x();
    if row < count {
        let token = first + row;
        if token < limit {
            // SAFETY: the caller guarantees that the token has a value.
            unsafe { to.copy(row, values, start + token as usize) };
        } else {
            to.set(row, 0.0);
        }
    }
}

/// Computes dk and dv of this block's keys, for `MADE` mma tiles of columns. block_idx_y selects
/// the part of the columns.
///
/// # Safety
/// The contract has accepted the problem. Its heads have up to `CHUNKS` chunks. All threads of the
/// block call it together.
#[inline(always)]
pub(super) unsafe fn keys<
    S: MmaElement,
    const M_TILES: usize,
    const TILES: usize,
    const CHUNKS: usize,
    const MADE: usize,
>(
    problem: Problem<'_, S>,
    lse: &[f32],
    delta: &[f32],
    dout: &[S],
    dqkv: *mut S,
) {
    // SAFETY: the argument in `queries` holds here too.
    unsafe {
        let warp = Converged::assume();
        let memory = Memory::<M_TILES, TILES, CHUNKS>::new(2);
        let (rows, of_tile) = (Memory::<M_TILES, TILES, CHUNKS>::RESIDENT, Memory::<M_TILES, TILES, CHUNKS>::TILE);
        let ResidentRows { sample, head: kv_head, first, mask } =
            ResidentRows::in_part(&problem, rows, problem.kv_heads, 0, LAST_HEADS, false);
        let [from, until] = mask.queries_of(first, rows, of_tile);
        let made = thread::block_idx_y() as usize * MADE;
        let bounds = [mask.length, problem.width];
        let factor = problem.scale * LOG2_E;
        let copy = |slot: u32, head: u32, tile: u32| {
            let first = tile * of_tile;
            memory.copy(memory.slot(slot, 0), of_tile, problem.rows(0, sample, head), first, bounds);
            memory.copy(memory.slot(slot, 1), of_tile, problem.output_rows(dout, sample, head), first, bounds);
            let start = problem.statistics(sample, head);
            copy_numbers(memory.numbers(slot, 0), of_tile, lse, start, first, mask.length);
            copy_numbers(memory.numbers(slot, 1), of_tile, delta, start, first, mask.length);
            commit_copies();
        };

        let mut dk: Sums<M_TILES, MADE> = [[[0.0; 4]; MADE]; M_TILES];
        let mut dv: Sums<M_TILES, MADE> = [[[0.0; 4]; MADE]; M_TILES];
        let (mut head, head_end) = (kv_head * problem.group(), (kv_head + 1) * problem.group());
        let (mut tile, mut slot) = (from, 0);
        if from < until {
            memory.copy(memory.resident(0), rows, problem.rows(1, sample, kv_head), first, bounds);
            memory.copy(memory.resident(1), rows, problem.rows(2, sample, kv_head), first, bounds);
            copy(0, head, from);
            wait_copies::<0>();
            memory.round::<S>(memory.resident(0), rows);
            memory.round::<S>(memory.resident(1), rows);
        } else {
            head = head_end;
        }
        while head < head_end {
            let (next_head, next_tile) = if tile + 1 < until { (head, tile + 1) } else { (head + 1, from) };
            wait_copies::<0>();
            memory.round::<S>(memory.slot(slot, 0), of_tile);
            memory.round::<S>(memory.slot(slot, 1), of_tile);
            thread::sync_threads();
            // Into the slot that all warps have finished reading.
            if next_head < head_end {
                copy(1 - slot, next_head, next_tile);
            }
            let (place, here) = ([first, tile * of_tile], slot);
            (head, tile, slot) = (next_head, next_tile, 1 - slot);
            if memory.none_seen(mask, place, true) {
                continue;
            }
            let mut scores = memory.qk_scores::<S>(warp, 0, memory.slot(here, 0));
            let mut gradients = memory.qk_scores::<S>(warp, 1, memory.slot(here, 1));
            if !memory.all_seen(mask, place, true) {
                memory.apply_mask(&mut scores, mask, place, true, f32::NEG_INFINITY);
                memory.apply_mask(&mut gradients, mask, place, true, 0.0);
            }
            unroll_on_gpu!(n < TILES => {
                let lses = memory.numbers(here, 0).get2(memory.streamed_row(n));
                let deltas = memory.numbers(here, 1).get2(memory.streamed_row(n));
                unroll_on_gpu!(m < 2 => {
                    if m < M_TILES {
                        unroll_on_gpu!(at < 4 => {
                            let base = lses[at % 2] * -LOG2_E;
                            scores[m][n][at] = exp2_weight(scores[m][n][at], factor, base);
                            gradients[m][n][at] = scores[m][n][at] * (gradients[m][n][at] - deltas[at % 2]);
                        });
                    }
                });
            });
            memory.pv_accumulate::<S, MADE>(warp, &mut dv, &scores, memory.slot(here, 1), made);
            memory.pv_accumulate::<S, MADE>(warp, &mut dk, &gradients, memory.slot(here, 0), made);
        }
        // Recomputed, as in `queries`.
        let ResidentRows { sample, head, first, mask } =
            ResidentRows::in_part(&problem, launder_reg(rows), problem.kv_heads, 0, LAST_HEADS, false);
        let (k, v) = (problem.rows(1, sample, head), problem.rows(2, sample, head));
        let bounds = [first, mask.length, problem.tokens, problem.width];
        memory.store(warp, &dk, problem.scale, k, made, bounds, dqkv);
        memory.store(warp, &dv, 1.0, v, made, bounds, dqkv);
    }
}
