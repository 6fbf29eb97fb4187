//! The forward pass of a block's queries: online softmax and its product with v in one pass over
//! the keys (Dao, "FlashAttention-2", 2023).
//!
//! Invariant: the four lanes of a row have the same maximum, bit for bit. Until the end, each lane
//! has the sum of its own keys.

use super::tile::Memory;
use crate::block::launder_reg;
use crate::flash_attention::place::{Problem, ResidentRows};
use crate::math::{self, exp2_negative, exp2_weight, larger_or_nan};
use crate::mma::element::MmaElement;
use crate::mma::fragments::Sums;
use crate::tile::{commit_copies, wait_copies};
use crate::unroll_on_gpu;
use crate::vector::store;
use crate::warp::{Converged, add};
use core::f32::consts::LOG2_E;
use cuda_std::{GpuFloat, thread, warp::lane_id};

/// The lanes that share a row of scores.
const ACROSS: u32 = 4;
/// The rescaling threshold, as a power of 2: the sums are rescaled only if a score exceeds the
/// running maximum by more than this. Until then a weight may be up to 2^8.
const MOST_GROWTH: f32 = 8.0;

/// True if a row's running maximum `largest` may stay although the tile's maximum is `most`. False
/// before the first key, and for a NaN. The same maximum always may, so that another row's scores
/// change no bit of this one.
#[inline(always)]
pub(crate) fn within_growth(most: f32, factor: f32, largest: f32) -> bool {
    (most - largest) * factor <= MOST_GROWTH
}

/// True if a row's weights are known: its largest scaled score is finite, or it has seen no key.
#[inline(always)]
pub(crate) fn is_known(largest: f32, factor: f32) -> bool {
    let scaled = largest * factor;
    (f32::NEG_INFINITY < scaled && scaled < f32::INFINITY) | (largest == f32::NEG_INFINITY)
}

/// Computes the output of this block's queries. With one slot, a tile of v is copied while scores
/// are computed, and the next tile of k during the rest of the turn.
///
/// # Safety
/// The contract has accepted the problem. Its heads have up to `CHUNKS` chunks, and `MADE` mma
/// tiles of columns. All threads of the block call it together.
#[inline(always)]
pub(super) unsafe fn forward<
    S: MmaElement,
    const M_TILES: usize,
    const TILES: usize,
    const CHUNKS: usize,
    const MADE: usize,
    const SLOTS: u32,
>(
    problem: Problem<'_, S>,
    out: *mut S,
    lse: *mut f32,
) {
    // SAFETY: the contract has checked that the rows of every head lie inside the arguments. All
    // threads loop over the same tiles, so they reach every barrier. The lanes of a warp are
    // converged at every mma and shuffle.
    unsafe {
        let warp = Converged::assume();
        let memory = Memory::<M_TILES, TILES, CHUNKS>::new(1);
        let (rows, of_tile) = (Memory::<M_TILES, TILES, CHUNKS>::RESIDENT, Memory::<M_TILES, TILES, CHUNKS>::TILE);
        let ResidentRows { sample, head, first, mask } = ResidentRows::new(&problem, rows, problem.heads, true);
        let [from, until] = mask.keys_of(first, rows, of_tile);
        let kv_head = head / problem.group();
        // Recomputed for each tile, as are the addresses that `copy` derives from them.
        let (k, v) =
            (|| problem.rows(1, sample, launder_reg(kv_head)), || problem.rows(2, sample, launder_reg(kv_head)));
        let bounds = [mask.length, problem.width];
        // A score's weight is 2^(score factor - maximum factor).
        let factor = problem.scale * LOG2_E;

        let mut sums: Sums<M_TILES, MADE> = [[[0.0; 4]; MADE]; M_TILES];
        let (mut largest, mut totals) = ([[f32::NEG_INFINITY; 2]; M_TILES], [[0.0; 2]; M_TILES]);
        if from < until {
            memory.copy(memory.resident(0), rows, problem.rows(0, sample, head), first, bounds);
            memory.copy(memory.slot(0, 0), of_tile, k(), from * of_tile, bounds);
            if SLOTS == 2 {
                memory.copy(memory.slot(0, 1), of_tile, v(), from * of_tile, bounds);
            }
            commit_copies();
            wait_copies::<0>();
            memory.round::<S>(memory.resident(0), rows);
        }
        let mut tile = from;
        while tile < until {
            let slot = (tile - from) % SLOTS;
            wait_copies::<0>();
            memory.round::<S>(memory.slot(slot, 0), of_tile);
            if SLOTS == 2 {
                memory.round::<S>(memory.slot(slot, 1), of_tile);
            }
            thread::sync_threads();
            // Into the slot that all warps have finished reading.
            if SLOTS == 1 {
                memory.copy(memory.slot(0, 1), of_tile, v(), tile * of_tile, bounds);
                commit_copies();
            } else if tile + 1 < until {
                memory.copy(memory.slot(1 - slot, 0), of_tile, k(), (tile + 1) * of_tile, bounds);
                memory.copy(memory.slot(1 - slot, 1), of_tile, v(), (tile + 1) * of_tile, bounds);
                commit_copies();
            }
            let place = [first, tile * of_tile];
            tile += 1;
            // With one slot all warps meet again in the turn.
            if SLOTS == 2 && memory.none_seen(mask, place, false) {
                continue;
            }
            let mut scores = memory.qk_scores::<S>(warp, 0, memory.slot(slot, 0));
            if SLOTS == 1 {
                wait_copies::<0>();
                memory.round::<S>(memory.slot(0, 1), of_tile);
                thread::sync_threads();
                if tile < until {
                    memory.copy(memory.slot(0, 0), of_tile, k(), tile * of_tile, bounds);
                    commit_copies();
                }
            }
            if !memory.all_seen(mask, place, false) {
                memory.apply_mask(&mut scores, mask, place, false, f32::NEG_INFINITY);
            }
            // The row loops are innermost, so that one row's latency is hidden by the others' work.
            let mut most = [[f32::NEG_INFINITY; 2]; M_TILES];
            unroll_on_gpu!(n < TILES => {
                unroll_on_gpu!(m < 2 => {
                    if m < M_TILES {
                        unroll_on_gpu!(half < 2 => {
                            let larger = larger_or_nan(scores[m][n][2 * half], scores[m][n][2 * half + 1]);
                            most[m][half] = larger_or_nan(most[m][half], larger);
                        });
                    }
                });
            });
            let mut within = true;
            unroll_on_gpu!(m < 2 => {
                if m < M_TILES {
                    unroll_on_gpu!(half < 2 => {
                        within &= within_growth(most[m][half], factor, largest[m][half]);
                    });
                }
            });
            if !warp.again().all(within) {
                let warp = warp.again();
                unroll_on_gpu!(m < 2 => {
                    if m < M_TILES {
                        unroll_on_gpu!(half < 2 => {
                            let of_lane = larger_or_nan(largest[m][half], most[m][half]);
                            most[m][half] = warp.combine(ACROSS, of_lane, larger_or_nan);
                        });
                    }
                });
                unroll_on_gpu!(m < 2 => {
                    if m < M_TILES {
                        unroll_on_gpu!(half < 2 => {
                            // Decided per row: another row's scores must not change a bit of this
                            // one.
                            if !within_growth(most[m][half], factor, largest[m][half]) {
                                let none = most[m][half] == f32::NEG_INFINITY;
                                let base = if none { 0.0 } else { most[m][half] * -factor };
                                let shrink = exp2_negative(GpuFloat::mul_add(largest[m][half], factor, base));
                                totals[m][half] *= shrink;
                                unroll_on_gpu!(n < MADE, at most 32 => {
                                    sums[m][n][2 * half] *= shrink;
                                    sums[m][n][2 * half + 1] *= shrink;
                                });
                                largest[m][half] = most[m][half];
                            }
                        });
                    }
                });
            }
            let mut bases = [[0.0; 2]; M_TILES];
            unroll_on_gpu!(m < 2 => {
                if m < M_TILES {
                    unroll_on_gpu!(half < 2 => {
                        // If a row has seen no key, all its scores are -infinity.
                        let none = largest[m][half] == f32::NEG_INFINITY;
                        bases[m][half] = if none { 0.0 } else { largest[m][half] * -factor };
                    });
                }
            });
            unroll_on_gpu!(n < TILES => {
                unroll_on_gpu!(m < 2 => {
                    if m < M_TILES {
                        unroll_on_gpu!(at < 4 => {
                            scores[m][n][at] = exp2_weight(scores[m][n][at], factor, bases[m][at / 2]);
                            totals[m][at / 2] += scores[m][n][at];
                        });
                    }
                });
            });
            memory.pv_accumulate::<S, MADE>(warp, &mut sums, &scores, memory.slot(slot, 1), 0);
        }

        // Recomputed: keeping it live across the loop would take registers from the accumulators.
        let ResidentRows { sample, head, first, mask } =
            ResidentRows::new(&problem, launder_reg(rows), problem.heads, true);
        let statistics = problem.statistics(sample, head);
        unroll_on_gpu!(m < 2 => {
            if m < M_TILES {
                let mut inverse = [0.0; 2];
                let warp = warp.again();
                unroll_on_gpu!(half < 2 => {
                    let total = warp.combine(ACROSS, totals[m][half], add);
                    let most = largest[m][half];
                    // Otherwise the row's whole output becomes NaN.
                    let known = is_known(most, factor);
                    inverse[half] = if known { 1.0 / total } else { f32::NAN };
                    let token = first + memory.resident_row(m, half);
                    if lane_id().is_multiple_of(ACROSS) && token < problem.tokens {
                        let value = if known { GpuFloat::mul_add(most, problem.scale, math::log(total)) } else { f32::NAN };
                        let value = if token < mask.length { value } else { f32::NEG_INFINITY };
                        store(lse, statistics + token as usize, value);
                    }
                });
                unroll_on_gpu!(n < MADE, at most 32 => {
                    unroll_on_gpu!(at < 4 => { sums[m][n][at] *= inverse[at / 2]; });
                });
            }
        });
        let rows = problem.output_rows(&[], sample, head);
        memory.store(warp, &sums, 1.0, rows, 0, [first, mask.length, problem.tokens, problem.width], out);
    }
}
