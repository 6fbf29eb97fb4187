//! The gradients of keys and values by pairs of warps, for heads of 128 columns.
//!
//! A warp of [`keys`](super::backward) has 16 keys and all columns, so each square of a tile that it
//! reads from shared memory feeds two mma instructions. Shared memory is then busier than the
//! tensor cores. Here two warps share 32 keys: each computes the scores of half of a tile's
//! queries, and then accumulates half of the columns over all of them. A square feeds four mma
//! instructions.
//!
//! ```text
//! warp of a pair     scores and dp                      dv and dk
//!   first            32 keys x queries  0..31           32 keys x columns  0.. 63, all queries
//!   second           32 keys x queries 32..63           32 keys x columns 64..127, all queries
//!                          |                                  ^
//!                          +-- p, ds in BF16: shared memory --+
//! ```
//! Shared memory has two slots for q, and one for dout: it is copied again when all warps have
//! accumulated dv. A kernel may also store ds, from which [`squares`](super::squares) computes dq.
//!
//! Invariant: each sum has the order of [`keys`](super::backward), and the same bits.

use super::backward::copy_numbers;
use super::shape::{COLUMNS, LAST_HEADS};
use super::squares::StoredScores;
use super::tile::Memory;
use crate::block::launder_reg;
use crate::flash_attention::place::{MaskRange, Problem, ResidentRows, Rows};
use crate::format::round_bf16;
use crate::math::exp2_weight;
use crate::mma::element::MmaElement;
use crate::mma::fragments::{CHUNK_WORDS, Squares, Sums, multiply};
use crate::tile::{SharedTile, commit_copies, wait_copies};
use crate::unroll_on_gpu;
use crate::vector::F4;
use crate::warp::{Converged, LANES};
use core::f32::consts::LOG2_E;
use cuda_std::{thread, warp};

/// The keys of a block, the queries of a tile, and the half of either that is a warp's.
const KEYS: u32 = 64;
const TILE: u32 = 64;
const HALF: u32 = 32;
/// The squares of p, or of ds, that a pair has for a tile: of 16 keys and 16 queries.
const SQUARES: u32 = HALF * TILE / 256;
/// The words of a square.
const WORDS: u32 = LANES * CHUNK_WORDS;
/// The mma tiles of columns in half of a head.
const MADE: usize = 8;

/// The bytes in which pairs exchange p and ds.
pub(super) const EXCHANGE_BYTES: u32 = 2 * KEYS / HALF * SQUARES * WORDS * 4;

/// A warp's scores, or dp: 32 keys by 32 queries.
type Scores = Sums<2, 4>;

/// Computes dk and dv of this block's keys, in a launch that begins at key head `before` of all
/// samples' heads. If `STORE`, it also stores ds.
///
/// # Safety
/// The contract has accepted the problem. Its heads have up to `CHUNKS` chunks, twice `MADE` mma
/// tiles of columns. All threads of the block call it together. If `STORE`, `ds` has the squares of
/// the launch's heads.
#[inline(always)]
pub(super) unsafe fn pairs<S: MmaElement, const CHUNKS: usize, const STORE: bool>(
    problem: Problem<'_, S>,
    lse: &[f32],
    delta: &[f32],
    dout: &[S],
    dqkv: *mut S,
    before: usize,
    ds: *mut S,
) {
    // SAFETY: the argument in `backward::queries` holds here too. The tiles lie one after another
    // in the memory that the contract declares.
    unsafe {
        let converged = Converged::assume();
        let memory = Memory::<1, 8, CHUNKS>::new(0);
        let row_words = Memory::<1, 8, CHUNKS>::ROW;
        let rows_at = |row: u32| SharedTile::<u32>::new(row * row_words * 4, TILE * row_words);
        let (k_rows, v_rows, dout_rows) = (rows_at(0), rows_at(KEYS), rows_at(2 * KEYS + 2 * TILE));
        let q_slot = |slot: u32| rows_at(2 * KEYS + slot * TILE);
        let end = (2 * KEYS + 3 * TILE) * row_words * 4;
        let numbers = |which: u32| SharedTile::<f32>::new(end + which * TILE * 4, TILE);
        let exchange = SharedTile::<u32>::new(end + 2 * TILE * 4, EXCHANGE_BYTES / 4);

        // Recomputed for each use, as are the places that follow from it: the accumulators need the
        // registers.
        let pair_and_half = || {
            let warp_number = launder_reg(thread::thread_idx_x()) / LANES;
            (warp_number / 2, warp_number % 2)
        };
        let (pair, half) = pair_and_half();
        let half_chunks = CHUNKS as u32 / 2;
        // The pair's keys, the warp's queries, and its columns of rows that are k.
        let of_keys = Squares::down(CHUNKS as u32, pair * HALF, 0);
        let of_queries = Squares::across(CHUNKS as u32, half * HALF, 0);
        let of_columns = Squares::down(CHUNKS as u32, 0, half * half_chunks);
        // This lane's words of the pair's first square.
        let of_lane = |pair: u32| pair * 2 * SQUARES * WORDS + launder_reg(warp::lane_id()) * CHUNK_WORDS;

        let ResidentRows { sample, head: kv_head, first, mask } =
            ResidentRows::in_part(&problem, KEYS, problem.kv_heads, before, LAST_HEADS, false);
        let [from, until] = mask.queries_of(first, KEYS, TILE);
        let bounds = [mask.length, problem.width];
        let copy_q = |slot: u32, head: u32, tile: u32| {
            memory.copy(q_slot(slot), TILE, problem.rows(0, sample, head), tile * TILE, bounds);
            commit_copies();
        };
        let copy_dout = |head: u32, tile: u32| {
            memory.copy(dout_rows, TILE, problem.output_rows(dout, sample, head), tile * TILE, bounds);
            let start = problem.statistics(sample, head);
            copy_numbers(numbers(0), TILE, lse, start, tile * TILE, mask.length);
            copy_numbers(numbers(1), TILE, delta, start, tile * TILE, mask.length);
            commit_copies();
        };

        let mut dk: Sums<2, MADE> = [[[0.0; 4]; MADE]; 2];
        let mut dv: Sums<2, MADE> = [[[0.0; 4]; MADE]; 2];
        let (mut head, head_end) = (kv_head * problem.group(), (kv_head + 1) * problem.group());
        let (mut tile, mut slot) = (from, 0);
        if from < until {
            memory.copy(k_rows, KEYS, problem.rows(1, sample, kv_head), first, bounds);
            memory.copy(v_rows, KEYS, problem.rows(2, sample, kv_head), first, bounds);
            copy_q(0, head, from);
            copy_dout(head, from);
        } else {
            head = head_end;
        }
        while head < head_end {
            let (next_head, next_tile) = if tile + 1 < until { (head, tile + 1) } else { (head + 1, from) };
            wait_copies::<0>();
            thread::sync_threads();
            // Into the slot that all warps have finished reading.
            if next_head < head_end {
                copy_q(1 - slot, next_head, next_tile);
            }
            let of_head = head;
            let (pair, half) = pair_and_half();
            let (q_rows, place) = (q_slot(slot), [first + pair * HALF, tile * TILE + half * HALF]);
            (head, tile, slot) = (next_head, next_tile, 1 - slot);
            let mut scores = products::<S, CHUNKS>(converged, [of_keys, of_queries], [k_rows, q_rows]);
            let mut gradients = products::<S, CHUNKS>(converged, [of_keys, of_queries], [v_rows, dout_rows]);
            if !mask.all_seen([place[1], HALF], [place[0], HALF]) {
                apply_mask(&mut scores, mask, place, f32::NEG_INFINITY);
                apply_mask(&mut gradients, mask, place, 0.0);
            }
            // Recomputed for each tile: the accumulators need the registers.
            let factor = f32::from_bits(launder_reg(problem.scale.to_bits())) * LOG2_E;
            let query = half * HALF + 2 * (warp::lane_id() % 4);
            unroll_on_gpu!(n < 4 => {
                let (lses, deltas) = (numbers(0).get2(query + 8 * n as u32), numbers(1).get2(query + 8 * n as u32));
                unroll_on_gpu!(m < 2 => {
                    unroll_on_gpu!(at < 4 => {
                        scores[m][n][at] = exp2_weight(scores[m][n][at], factor, lses[at % 2] * -LOG2_E);
                        gradients[m][n][at] = scores[m][n][at] * (gradients[m][n][at] - deltas[at % 2]);
                    });
                });
            });
            if STORE {
                let stored = StoredScores::new(&problem, before, launder_reg(sample as u32) as usize, of_head);
                let [key, query] = place.map(launder_reg);
                unroll_on_gpu!(m < 2 => { stored.write_row::<4>(&gradients[m], [key + 16 * m as u32, query], ds.cast()); });
            }
            // In the order of the queries, and of the keys for each sixteen.
            let (pair, half) = pair_and_half();
            let own = of_lane(pair) + half * SQUARES / 2 * WORDS;
            unroll_on_gpu!(step < 2 => {
                unroll_on_gpu!(m < 2 => {
                    let at = own + (2 * step + m) as u32 * WORDS;
                    exchange.set_chunk(at, rounded(&scores[m], step));
                    exchange.set_chunk(at + SQUARES * WORDS, rounded(&gradients[m], step));
                });
            });
            thread::sync_threads();
            let all = of_lane(pair_and_half().0);
            accumulate::<S>(converged, &mut dv, exchange, all, of_columns, dout_rows);
            thread::sync_threads();
            if head < head_end {
                copy_dout(head, tile);
            }
            accumulate::<S>(converged, &mut dk, exchange, all + SQUARES * WORDS, of_columns, q_rows);
        }
        // Recomputed, as in `backward::queries`.
        let ResidentRows { sample, head, first, mask } =
            ResidentRows::in_part(&problem, launder_reg(KEYS), problem.kv_heads, before, LAST_HEADS, false);
        let (k, v) = (problem.rows(1, sample, head), problem.rows(2, sample, head));
        let (pair, half) = pair_and_half();
        let place = [first + pair * HALF, half * half_chunks * COLUMNS];
        let bounds = [mask.length, problem.tokens, problem.width];
        store(converged, &dk, problem.scale, k, place, bounds, dqkv);
        store(converged, &dv, 1.0, v, place, bounds, dqkv);
    }
}

/// Returns the products of 32 rows of the first tile with 32 rows of the second, over all columns.
#[inline(always)]
#[track_caller]
fn products<S: MmaElement, const CHUNKS: usize>(
    warp: Converged,
    [down, across]: [Squares; 2],
    [left, right]: [SharedTile<u32>; 2],
) -> Scores {
    let mut sums = [[[0.0; 4]; 4]; 2];
    let (down, across, warp) = (down.anew(), across.anew(), warp.again());
    unroll_on_gpu!(step < CHUNKS / 2, at most 16 => {
        let a = [0, 16].map(|row| down.read(warp, left, row, step as u32, false));
        let b = [0, 16].map(|row| across.read(warp, right, row, step as u32, false));
        multiply::<S::Factors, 2, 2, 4>(warp, &mut sums, 0, &a, &b);
    });
    sums
}

/// Returns the lane's words of the `step`th sixteen queries, rounded, as an A operand.
#[inline(always)]
fn rounded(weights: &[[f32; 4]; 4], step: usize) -> [u32; 4] {
    let ([a, b, c, d], [e, f, g, h]) = (weights[2 * step], weights[2 * step + 1]);
    [round_bf16(a, b), round_bf16(c, d), round_bf16(e, f), round_bf16(g, h)]
}

/// Accumulates the products of the pair's exchanged squares, from word `from` on, with the warp's
/// columns of a tile's rows.
#[inline(always)]
#[track_caller]
fn accumulate<S: MmaElement>(
    warp: Converged,
    sums: &mut Sums<2, MADE>,
    exchange: SharedTile<u32>,
    from: u32,
    columns: Squares,
    rows: SharedTile<u32>,
) {
    let (columns, warp) = (columns.anew(), warp.again());
    unroll_on_gpu!(step < 4 => {
        let a = [0, 1].map(|m| exchange.chunk(from + (2 * step as u32 + m) * WORDS));
        unroll_on_gpu!(square < MADE / 2 => {
            let b = columns.read(warp, rows, 16 * step as u32, square as u32, true);
            multiply::<S::Factors, 2, 1, MADE>(warp, sums, square, &a, &[b]);
        });
    });
}

/// Replaces each masked score by `hidden`, for the keys from `key` and the queries from `query`.
#[inline(always)]
fn apply_mask(scores: &mut Scores, mask: MaskRange<'_>, [key, query]: [u32; 2], hidden: f32) {
    let (key, query) = (launder_reg(key) + warp::lane_id() / 4, launder_reg(query) + 2 * (warp::lane_id() % 4));
    unroll_on_gpu!(m < 2 => {
        unroll_on_gpu!(half < 2 => {
            let key = key + (16 * m + 8 * half) as u32;
            let [from, until] = mask.queries_seeing(key);
            unroll_on_gpu!(n < 4 => {
                unroll_on_gpu!(column < 2 => {
                    if query.wrapping_sub(from).wrapping_add((8 * n + column) as u32) >= until - from {
                        scores[m][n][2 * half + column] = hidden;
                    }
                });
            });
            if mask.has_documents() {
                let document = mask.document(key);
                unroll_on_gpu!(n < 4 => {
                    unroll_on_gpu!(column < 2 => {
                        if mask.document(query + (8 * n + column) as u32) != document {
                            scores[m][n][2 * half + column] = hidden;
                        }
                    });
                });
            }
        });
    });
}

/// Writes a lane's accumulators, times `factor`. `place` has the warp's first key and column, and
/// `bounds` the tokens that exist, all tokens, and the columns. Tokens that do not exist get 0.
///
/// # Safety
/// The rows lie inside `out`, up to the last token.
#[inline(always)]
unsafe fn store<S: MmaElement>(
    warp: Converged,
    sums: &Sums<2, MADE>,
    factor: f32,
    rows: Rows<'_, S>,
    place: [u32; 2],
    [length, tokens, width]: [u32; 3],
    out: *mut S,
) {
    unroll_on_gpu!(m < 2 => {
        let key = launder_reg(place[0]) + 16 * m as u32;
        let warp = warp.again();
        unroll_on_gpu!(n < MADE => {
            let ([row, column], value) = S::neighbours(warp, &sums[m], n);
            let (token, column) = (key + row, place[1] + column);
            if token < tokens && column < width {
                let value = if token < length { value * F4::splat(factor) } else { F4::splat(0.0) };
                let at = rows.start + token as usize * rows.stride + column as usize;
                // SAFETY: the row lies inside `out`, and the columns in the row.
                unsafe { value.store(out, at) };
            }
        });
    });
}
