//! The forward pass of a block's queries: online softmax and its product with v in one pass over
//! the keys (Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018; Dao, 2023).
//!
//! Invariant: the lanes of a row have the same maximum and sum, bit for bit.

use super::place::{Problem, ResidentRows};
use super::shape::{ACROSS, COLUMNS, PAIRS, Shape, TILE};
use super::tile::{Memory, Next};
use crate::math;
use crate::unroll_on_gpu;
use crate::vector::{F4, store};
use crate::warp::{add, combine_lanes, larger};
use cuda_std::GpuFloat;

/// Computes the output of this block's queries.
///
/// # Safety
/// The contract has accepted the problem. Its heads have up to `CHUNKS` chunks of columns. All
/// threads of the block call it together.
#[inline(always)]
pub(super) unsafe fn forward<const EACH: usize, const CHUNKS: usize>(
    problem: Problem<'_, f32>,
    out: *mut f32,
    lse: *mut f32,
) {
    let rows = Memory::<EACH, CHUNKS>::ROWS;
    let (width, used) = (problem.width, Shape::chunks_of(problem.width));
    // SAFETY: the contract has checked that the rows of every head lie inside the arguments. All
    // threads loop over the same tiles and chunks, so they reach every barrier. The lanes of a row
    // are converged at every shuffle.
    unsafe {
        let mut memory = Memory::<EACH, CHUNKS>::new(1);
        let ResidentRows { sample, head, first, mask } = ResidentRows::new(&problem, rows, problem.heads, true);
        let [from, until] = mask.keys_of(first, rows, TILE);
        let kv_head = head / problem.group();
        let (k, v) = (problem.rows(1, sample, kv_head), problem.rows(2, sample, kv_head));

        let mut sums = [[F4::splat(0.0); EACH]; CHUNKS];
        let (mut largest, mut total) = ([f32::NEG_INFINITY; EACH], [0.0; EACH]);
        if from < until {
            memory.copy_resident(0, problem.rows(0, sample, head), first, mask.length, width);
            memory.begin(Next { rows: k, tile: from, chunk: 0 }, mask.length, width);
        }
        let mut tile = from;
        while tile < until {
            let mut pairs = [[0.0; PAIRS]; EACH];
            let mut chunk = 0;
            while chunk < used {
                let next = if chunk + 1 < used {
                    Next { rows: k, tile, chunk: chunk + 1 }
                } else {
                    Next { rows: v, tile, chunk: 0 }
                };
                let keys = memory.turn(Some(next), mask.length, width);
                memory.qk_scores(&mut pairs, 0, chunk, keys);
                chunk += 1;
            }

            let seen = memory.seen(mask, first, tile * TILE, false);
            unroll_on_gpu!(r < 4 => {
                if r < EACH {
                    let mut most = f32::NEG_INFINITY;
                    unroll_on_gpu!(k < PAIRS => {
                        let score = pairs[r][k] * problem.scale;
                        pairs[r][k] = if seen >> (PAIRS * r + k) & 1 == 0 { f32::NEG_INFINITY } else { score };
                        // `larger` may drop a NaN. The sum propagates it.
                        most = larger(most, pairs[r][k]);
                    });
                    most = larger(largest[r], combine_lanes(memory.mask(), ACROSS, most, larger));
                    // The base is 0 for a query that has seen no key yet.
                    let base = if most == f32::NEG_INFINITY { 0.0 } else { most };
                    let factor = math::exp_negative(largest[r] - base);
                    let mut sum = 0.0;
                    unroll_on_gpu!(k < PAIRS => {
                        pairs[r][k] = math::exp_negative(pairs[r][k] - base);
                        sum += pairs[r][k];
                    });
                    sum = combine_lanes(memory.mask(), ACROSS, sum, add);
                    (largest[r], total[r]) = (most, GpuFloat::mul_add(total[r], factor, sum));
                    unroll_on_gpu!(at < CHUNKS => { sums[at][r] = sums[at][r] * F4::splat(factor) });
                }
            });
            // The barrier in `turn` precedes the reads of these pairs. A barrier also separates
            // this write from the previous reads.
            memory.set_pairs(&pairs);

            unroll_on_gpu!(at < CHUNKS => {
                let chunk = at as u32;
                if chunk < used {
                    let next = if chunk + 1 < used {
                        Some(Next { rows: v, tile, chunk: chunk + 1 })
                    } else if tile + 1 < until {
                        Some(Next { rows: k, tile: tile + 1, chunk: 0 })
                    } else {
                        None
                    };
                    let values = memory.turn(next, mask.length, width);
                    memory.pv_accumulate(&mut sums[at], values);
                }
            });
            tile += 1;
        }

        let rows = problem.output_rows(&[], sample, head);
        let statistics = problem.statistics(sample, head);
        unroll_on_gpu!(r < 4 => {
            if r < EACH {
                let token = first + memory.resident_row(r);
                let exists = token < mask.length;
                if token < problem.tokens {
                    let inverse = F4::splat(1.0 / total[r]);
                    let start = rows.start + token as usize * rows.stride;
                    unroll_on_gpu!(at < CHUNKS => {
                        let column = at as u32 * COLUMNS + memory.across * F4::LEN as u32;
                        if column < width {
                            let value = if exists { sums[at][r] * inverse } else { F4::splat(0.0) };
                            value.store(out, start + column as usize);
                        }
                    });
                    if memory.across == 0 {
                        let value = if exists { largest[r] + math::log(total[r]) } else { f32::NEG_INFINITY };
                        store(lse, statistics + token as usize, value);
                    }
                }
            }
        });
    }
}
