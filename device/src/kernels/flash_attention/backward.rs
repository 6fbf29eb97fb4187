//! The backward pass: the gradient of a block's queries, and the gradients of a block's keys and
//! values (Dao, 2023). Both kernels recompute scores and dp, so that each sum belongs to one block
//! and needs no atomics.
//!
//! Invariant: both kernels compute p from the score and `lse` in the same way.

use super::place::{Problem, ResidentRows, Rows};
use super::shape::{ACROSS, COLUMNS, PAIRS, Shape, TILE};
use super::tile::{Memory, Next, Pairs, Sums};
use crate::block::{divide_short, launder_reg};
use crate::for_each_vector;
use crate::math;
use crate::stored::Stored;
use crate::unroll_on_gpu;
use crate::vector::{F4, load, store};
use crate::warp::Row;
use cuda_std::warp;

/// Returns the weight p of a (query, key) pair. The exponent is never positive. The score has the
/// forward pass's bits, and the softmax's sum is at least 1. `lse` is therefore at least the
/// query's largest score.
#[inline(always)]
fn weight(dot: f32, scale: f32, lse: f32) -> f32 {
    math::exp_negative(dot * scale - lse)
}

/// Writes a thread's sums of the resident rows, times `factor`. Tokens that do not exist get 0.
///
/// # Safety
/// The rows lie inside `out`, up to token `tokens`.
#[inline(always)]
unsafe fn write<const EACH: usize, const CHUNKS: usize>(
    memory: &Memory<EACH, CHUNKS>,
    sums: &[Sums<EACH>; CHUNKS],
    factor: f32,
    rows: Rows<'_, f32>,
    [first, length, tokens, width]: [u32; 4],
    out: *mut f32,
) {
    unroll_on_gpu!(r < 4 => {
        if r < EACH {
            let token = first + memory.resident_row(r);
            if token < tokens {
                let start = rows.start + token as usize * rows.stride;
                unroll_on_gpu!(at < CHUNKS => {
                    let column = at as u32 * COLUMNS + memory.across * F4::LEN as u32;
                    if column < width {
                        let value = if token < length { sums[at][r] * F4::splat(factor) } else { F4::splat(0.0) };
                        // SAFETY: the row lies inside `out`, and the columns in the row.
                        unsafe { value.store(out, start + column as usize) };
                    }
                });
            }
        }
    });
}

/// Computes dq of this block's queries.
///
/// # Safety
/// The contract has accepted the problem. Its heads have up to `CHUNKS` chunks of columns. All
/// threads of the block call it together.
#[inline(always)]
pub(super) unsafe fn queries<const EACH: usize, const CHUNKS: usize>(
    problem: Problem<'_, f32>,
    lse: &[f32],
    delta: &[f32],
    dout: &[f32],
    dqkv: *mut f32,
) {
    let rows = Memory::<EACH, CHUNKS>::ROWS;
    let (width, used) = (problem.width, Shape::chunks_of(problem.width));
    // SAFETY: the contract has checked that the rows of every head lie inside the arguments. All
    // threads loop over the same tiles and chunks, so they reach every barrier.
    unsafe {
        let mut memory = Memory::<EACH, CHUNKS>::new(2);
        let ResidentRows { sample, head, first, mask } = ResidentRows::new(&problem, rows, problem.heads, true);
        let [from, until] = mask.keys_of(first, rows, TILE);
        let kv_head = head / problem.group();
        let q = problem.rows(0, sample, head);
        let (k, v) = (problem.rows(1, sample, kv_head), problem.rows(2, sample, kv_head));

        let (mut lses, mut deltas) = ([0.0; EACH], [0.0; EACH]);
        let statistics = problem.statistics(sample, head);
        unroll_on_gpu!(r < 4 => {
            if r < EACH {
                let token = first + memory.resident_row(r);
                if token < mask.length {
                    lses[r] = load(lse, statistics + token as usize);
                    deltas[r] = load(delta, statistics + token as usize);
                }
            }
        });
        let mut sums = [[F4::splat(0.0); EACH]; CHUNKS];
        if from < until {
            memory.copy_resident(0, q, first, mask.length, width);
            memory.copy_resident(1, problem.output_rows(dout, sample, head), first, mask.length, width);
            memory.begin(Next { rows: k, tile: from, chunk: 0 }, mask.length, width);
        }
        let mut tile = from;
        while tile < until {
            let (mut scores, mut pairs) = ([[0.0; PAIRS]; EACH], [[0.0; PAIRS]; EACH]);
            let mut chunk = 0;
            while chunk < used {
                let next = if chunk + 1 < used { (k, chunk + 1) } else { (v, 0) };
                let next = Next { rows: next.0, tile, chunk: next.1 };
                let keys = memory.turn(Some(next), mask.length, width);
                memory.qk_scores(&mut scores, 0, chunk, keys);
                chunk += 1;
            }
            chunk = 0;
            while chunk < used {
                let next = if chunk + 1 < used { (v, chunk + 1) } else { (k, 0) };
                let next = Next { rows: next.0, tile, chunk: next.1 };
                let values = memory.turn(Some(next), mask.length, width);
                memory.qk_scores(&mut pairs, 1, chunk, values);
                chunk += 1;
            }
            let seen = memory.seen(mask, first, tile * TILE, false);
            unroll_on_gpu!(r < 4 => {
                if r < EACH {
                    unroll_on_gpu!(k < PAIRS => {
                        let ds = weight(scores[r][k], problem.scale, lses[r]) * (pairs[r][k] - deltas[r]);
                        pairs[r][k] = if seen >> (PAIRS * r + k) & 1 == 0 { 0.0 } else { ds };
                    });
                }
            });
            // The barrier in `turn` precedes the reads of these pairs. A barrier also separates
            // this write from the previous reads.
            memory.set_pairs(&pairs);
            unroll_on_gpu!(at < CHUNKS => {
                let chunk = at as u32;
                if chunk < used {
                    let next = if chunk + 1 < used {
                        Some(Next { rows: k, tile, chunk: chunk + 1 })
                    } else if tile + 1 < until {
                        Some(Next { rows: k, tile: tile + 1, chunk: 0 })
                    } else {
                        None
                    };
                    let keys = memory.turn(next, mask.length, width);
                    memory.pv_accumulate(&mut sums[at], keys);
                }
            });
            tile += 1;
        }
        write(&memory, &sums, problem.scale, q, [first, mask.length, problem.tokens, width], dqkv);
    }
}

/// Computes dk and dv of this block's keys.
///
/// # Safety
/// The caller meets the requirements of [`queries`].
#[inline(always)]
pub(super) unsafe fn keys<const EACH: usize, const CHUNKS: usize>(
    problem: Problem<'_, f32>,
    lse: &[f32],
    delta: &[f32],
    dout: &[f32],
    dqkv: *mut f32,
) {
    let rows = Memory::<EACH, CHUNKS>::ROWS;
    let (width, used) = (problem.width, Shape::chunks_of(problem.width));
    // SAFETY: the argument in `queries` holds here too.
    unsafe {
        let mut memory = Memory::<EACH, CHUNKS>::new(2);
        let ResidentRows { sample, head: kv_head, first, mask } =
            ResidentRows::new(&problem, rows, problem.kv_heads, false);
        let [from, until] = mask.queries_of(first, rows, TILE);
        let (k, v) =
            (|| problem.rows(1, sample, launder_reg(kv_head)), || problem.rows(2, sample, launder_reg(kv_head)));
        let (first_head, heads) = (kv_head * problem.group(), problem.group());

        let mut dk = [[F4::splat(0.0); EACH]; CHUNKS];
        let mut dv = [[F4::splat(0.0); EACH]; CHUNKS];
        if from < until {
            memory.copy_resident(0, k(), first, mask.length, width);
            memory.copy_resident(1, v(), first, mask.length, width);
            let q = problem.rows(0, sample, first_head);
            memory.begin(Next { rows: q, tile: from, chunk: 0 }, mask.length, width);
        }
        let mut head = first_head;
        while head < first_head + heads {
            // Recomputed for each chunk, as are the addresses that `copy` derives from them.
            let q = || problem.rows(0, sample, launder_reg(head));
            let gradients = || problem.output_rows(dout, sample, launder_reg(head));
            let statistics = problem.statistics(sample, head);
            let mut tile = from;
            while tile < until {
                let (mut p, mut ds) = ([[0.0; PAIRS]; EACH], [[0.0; PAIRS]; EACH]);
                let mut chunk = 0;
                while chunk < used {
                    let next = if chunk + 1 < used { (q(), chunk + 1) } else { (gradients(), 0) };
                    let next = Next { rows: next.0, tile, chunk: next.1 };
                    let queries = memory.turn(Some(next), mask.length, width);
                    memory.qk_scores(&mut p, 0, chunk, queries);
                    chunk += 1;
                }
                chunk = 0;
                while chunk < used {
                    let next = Next { rows: gradients(), tile, chunk: if chunk + 1 < used { chunk + 1 } else { 0 } };
                    let chunk_of_dout = memory.turn(Some(next), mask.length, width);
                    memory.qk_scores(&mut ds, 1, chunk, chunk_of_dout);
                    chunk += 1;
                }
                let seen = memory.seen(mask, first, tile * TILE, true);
                unroll_on_gpu!(k < PAIRS => {
                    let token = tile * TILE + memory.across + ACROSS * k as u32;
                    let (mut lse_here, mut delta_here) = (0.0, 0.0);
                    if token < mask.length {
                        lse_here = load(lse, statistics + token as usize);
                        delta_here = load(delta, statistics + token as usize);
                    }
                    unroll_on_gpu!(r < 4 => {
                        if r < EACH {
                            let weight = weight(p[r][k], problem.scale, lse_here);
                            let gradient = weight * (ds[r][k] - delta_here);
                            let is_seen = seen >> (PAIRS * r + k) & 1 != 0;
                            (p[r][k], ds[r][k]) = if is_seen { (weight, gradient) } else { (0.0, 0.0) };
                        }
                    });
                });
                memory.set_pairs(&p);
                unroll_on_gpu!(at < CHUNKS => {
                    let chunk = at as u32;
                    if chunk < used {
                        let next = if chunk + 1 < used { (gradients(), chunk + 1) } else { (q(), 0) };
                        let next = Next { rows: next.0, tile, chunk: next.1 };
                        let chunk_of_dout = memory.turn(Some(next), mask.length, width);
                        memory.pv_accumulate(&mut dv[at], chunk_of_dout);
                    }
                });
                replace_pairs(&memory, &ds);
                unroll_on_gpu!(at < CHUNKS => {
                    let chunk = at as u32;
                    if chunk < used {
                        let next = if chunk + 1 < used {
                            Some(Next { rows: q(), tile, chunk: chunk + 1 })
                        } else if tile + 1 < until {
                            Some(Next { rows: q(), tile: tile + 1, chunk: 0 })
                        } else if head + 1 < first_head + heads {
                            Some(Next { rows: problem.rows(0, sample, head + 1), tile: from, chunk: 0 })
                        } else {
                            None
                        };
                        let queries = memory.turn(next, mask.length, width);
                        memory.pv_accumulate(&mut dk[at], queries);
                    }
                });
                tile += 1;
            }
            head += 1;
        }
        let bounds = [first, mask.length, problem.tokens, width];
        write(&memory, &dk, problem.scale, k(), bounds, dqkv);
        write(&memory, &dv, 1.0, v(), bounds, dqkv);
    }
}

/// Overwrites the pairs that the lanes of the warp have just read.
///
/// # Safety
/// All lanes of the warp call it together.
#[inline(always)]
unsafe fn replace_pairs<const EACH: usize, const CHUNKS: usize>(memory: &Memory<EACH, CHUNKS>, pairs: &Pairs<EACH>) {
    // SAFETY: the caller guarantees that all lanes of the warp execute this. No other warp reads
    // the pairs of this warp's rows.
    unsafe { warp::sync_warp(u32::MAX) };
    memory.set_pairs(pairs);
}

/// The rows of delta that a row's lanes compute. All their loads come before the first sum.
pub(super) const ROWS_OF_DELTA: usize = 2;

/// Computes the elements of delta of [`ROWS_OF_DELTA`] rows, from `first` on. Rows past the end
/// are left out.
///
/// # Safety
/// The rows lie inside `out` and `dout` as far as `out` reaches, which is at least the first, and
/// their elements inside `delta`. The row's lanes call it together.
#[inline(always)]
pub(super) unsafe fn delta<S: Stored>(
    first: Row,
    out: &[S],
    dout: &[S],
    [tokens, heads, width]: [u32; 3],
    to: *mut f32,
) {
    // SAFETY: the caller guarantees that a row lies inside if it begins inside.
    unsafe {
        let cols = width as usize;
        let mut sums = [F4::splat(0.0); ROWS_OF_DELTA];
        for_each_vector!(first, cols, |column, part| {
            unroll_on_gpu!(r < ROWS_OF_DELTA => {
                let row = first.later(r, cols);
                // No branch, which would part the loads.
                let start = if row.start < out.len() { row.start } else { first.start };
                let (out, dout) = (F4::load_part(out, start + column, part, 0.0), F4::load_part(dout, start + column, part, 0.0));
                sums[r] = sums[r].fma(out, dout);
            });
        });
        // The contract has checked that 32 bits suffice.
        let (token, head) = divide_short(first.number as u32, heads);
        let (sample, token) = divide_short(token, tokens);
        let [mut sample, mut token, mut head] = [sample, token, head].map(|number| number as usize);
        unroll_on_gpu!(r < ROWS_OF_DELTA => {
            let sum = first.sum(sums[r]);
            if first.is_first_lane() && first.later(r, cols).start < out.len() {
                store(to, (sample * heads as usize + head) * tokens as usize + token, sum);
            }
            head += 1;
            if head == heads as usize {
                (head, token) = (0, token + 1);
                if token == tokens as usize {
                    (token, sample) = (0, sample + 1);
                }
            }
        });
    }
}
