//! A warpgroup's rows: the place of a block's rows, the roles of its warpgroups, the masks of
//! scores, and the stores of sums.
//!
//! Invariant: each row of a head belongs to one block, and to one warpgroup of it.

use super::shape::{WARPGROUP, registers_of};
use crate::block::{divide_short, launder_reg};
use crate::flash_attention::place::{MaskRange, Problem, Rows};
use crate::format::round_bf16;
use crate::machine::warpgroup::registers;
use crate::mma::fragments::{quad, quad_place};
use crate::unroll_on_gpu;
use crate::vector::F4;
use crate::warp::{Converged, LANES};
use cuda_std::{thread, warp};
use half::bf16;

/// The least number of the last heads of a launch, for
/// [`ResidentRows::in_part`](crate::flash_attention::place::ResidentRows::in_part).
pub(super) const LAST_HEADS: u32 = 8;

/// Returns the number of query heads of a key head.
///
/// # Safety
/// The contract has accepted the problem.
#[inline(always)]
pub(super) unsafe fn heads_of_group(problem: &Problem<'_, bf16>) -> u32 {
    // SAFETY: the contract has checked that there are key heads.
    unsafe { divide_short(problem.heads, problem.kv_heads).0 }
}

/// Returns the key head of a query head.
///
/// # Safety
/// The contract has accepted the problem.
#[inline(always)]
pub(super) unsafe fn kv_head_of(problem: &Problem<'_, bf16>, head: u32) -> u32 {
    // SAFETY: a key head has query heads.
    unsafe { divide_short(head, heads_of_group(problem)).0 }
}

/// True for the warpgroup that copies.
#[inline(always)]
pub(super) fn copies() -> bool {
    thread::thread_idx_x() < WARPGROUP
}

/// Leaves the copying warpgroup few registers.
///
/// # Safety
/// All threads of the copying warpgroup call it together, and those of the others
/// [`multiplying_group`].
#[inline(always)]
pub(super) unsafe fn leave_registers<const GROUPS: u32, const PARTS: u32>() {
    // SAFETY: the whole warpgroup executes this: the function's contract.
    unsafe {
        if GROUPS == 3 {
            registers::<{ registers_of(3, 1)[0] }, false>();
        } else if PARTS == 1 {
            registers::<{ registers_of(2, 1)[0] }, false>();
        } else {
            registers::<{ registers_of(2, 2)[0] }, false>();
        }
    }
}

/// Gives this multiplying warpgroup its registers, and returns its number among those that
/// multiply.
///
/// # Safety
/// All threads of the warpgroup call it together, and those of the copying one [`leave_registers`].
#[inline(always)]
pub(super) unsafe fn multiplying_group<const GROUPS: u32, const PARTS: u32>() -> u32 {
    const { assert!(GROUPS == 2 || GROUPS == 3) };
    // SAFETY: the whole warpgroup executes this: the function's contract.
    unsafe {
        if GROUPS == 3 {
            registers::<{ registers_of(3, 1)[1] }, true>();
        } else if PARTS == 1 {
            registers::<{ registers_of(2, 1)[1] }, true>();
        } else {
            registers::<{ registers_of(2, 2)[1] }, true>();
        }
        Converged::assume().uniform(thread::thread_idx_x() / WARPGROUP - 1)
    }
}

/// Rounds weights to the squares of A of the second product.
#[inline(always)]
pub(super) fn round<const TILES: usize, const BLOCKS: usize>(
    weights: &[[f32; 4]; TILES],
    rounded: &mut [[[u32; 4]; 4]; BLOCKS],
) {
    unroll_on_gpu!(block < BLOCKS => {
        unroll_on_gpu!(square < 4 => {
            let at = 8 * block + 2 * square;
            let ([a, b, c, d], [e, f, g, h]) = (weights[at], weights[at + 1]);
            rounded[block][square] = [round_bf16(a, b), round_bf16(c, d), round_bf16(e, f), round_bf16(g, h)];
        });
    });
}

/// Returns the index in the warpgroup's rows of this lane's row `half`.
#[inline(always)]
pub(super) fn resident_row(half: usize) -> u32 {
    thread::thread_idx_x() % WARPGROUP / LANES * 16 + 8 * half as u32 + warp::lane_id() / 4
}

/// Makes each masked score of a warpgroup's rows and a tile's rows -infinity. `first` and `counts`
/// are the first token and the number of both. If `resident_keys`, the warpgroup's rows are keys;
/// otherwise queries.
#[inline(always)]
pub(super) fn hide<const TILES: usize>(
    scores: &mut [[f32; 4]; TILES],
    mask: MaskRange<'_>,
    first: [u32; 2],
    counts: [u32; 2],
    resident_keys: bool,
) {
    let [resident, streamed] = [[first[0], counts[0]], [first[1], counts[1]]];
    let all_seen = if resident_keys { mask.all_seen(streamed, resident) } else { mask.all_seen(resident, streamed) };
    if !all_seen {
        let place = [launder_reg(first[0]) + resident_row(0), launder_reg(first[1]) + 2 * (warp::lane_id() % 4)];
        apply_mask(scores, mask, place, resident_keys);
    }
}

/// Makes each masked score -infinity. `resident` is the token of this lane's first row, and
/// `streamed` that of its first column. If `resident_keys`, the rows are keys; otherwise queries.
#[inline(always)]
fn apply_mask<const TILES: usize>(
    scores: &mut [[f32; 4]; TILES],
    mask: MaskRange<'_>,
    [resident, streamed]: [u32; 2],
    resident_keys: bool,
) {
    unroll_on_gpu!(half < 2 => {
        let resident = resident + 8 * half as u32;
        let [from, until] = if resident_keys { mask.queries_seeing(resident) } else { mask.keys_seen(resident) };
        let from_here = streamed.wrapping_sub(from);
        unroll_on_gpu!(n < TILES, at most 16 => {
            unroll_on_gpu!(column < 2 => {
                if from_here.wrapping_add((8 * n + column) as u32) >= until - from {
                    scores[n][2 * half + column] = f32::NEG_INFINITY;
                }
            });
        });
        if mask.has_documents() {
            let other = other_documents::<TILES>(mask, resident, streamed);
            unroll_on_gpu!(n < TILES, at most 16 => {
                unroll_on_gpu!(column < 2 => {
                    if other >> (2 * n + column) & 1 != 0 {
                        scores[n][2 * half + column] = f32::NEG_INFINITY;
                    }
                });
            });
        }
    });
}

/// Returns the columns of a lane whose tokens are of another document than `resident`, one bit
/// each. The loop stays a loop: its loads would take registers from the accumulators.
#[inline(always)]
fn other_documents<const TILES: usize>(mask: MaskRange<'_>, resident: u32, streamed: u32) -> u32 {
    let document = mask.document(resident);
    let (mut n, mut other) = (0, 0);
    while n < 2 * TILES as u32 {
        let column = streamed + 4 * n;
        let pair = [column, column + 1].map(|column| u32::from(mask.document(column) != document));
        other |= (pair[0] | pair[1] << 1) << n;
        n = launder_reg(n + 2);
    }
    other
}

/// Writes a lane's accumulators of its warp's 16 rows. Tokens that do not exist get 0. `bounds`
/// holds the warp's first token, the tokens that exist, all tokens, and the columns.
///
/// # Safety
/// The rows lie inside `out`, up to the last token.
#[inline(always)]
pub(super) unsafe fn store<const MADE: usize>(
    warp: Converged,
    sums: &[[f32; 4]; MADE],
    factor: f32,
    rows: Rows<'_, bf16>,
    [first, length, tokens, width]: [u32; 4],
    out: *mut bf16,
) {
    let warp = warp.again();
    let [row, column] = quad_place();
    let token = first + row;
    let mut values = [F4::splat(0.0); MADE];
    unroll_on_gpu!(n < MADE, at most 32 => {
        let value = quad(warp, sums[n]) * F4::splat(factor);
        values[n] = if token < length { value } else { F4::splat(0.0) };
    });
    if token < tokens {
        let at = rows.start + token as usize * rows.stride + column as usize;
        unroll_on_gpu!(n < MADE, at most 32 => {
            if 8 * n as u32 + column < width {
                // SAFETY: the row lies inside `out`, and the columns in the row.
                unsafe { values[n].store(out, at + 8 * n) };
            }
        });
    }
}
