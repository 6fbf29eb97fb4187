//! Gradients from stored scores. ds, and p if heads are wide, are rounded to BF16 and stored once,
//! so that no other kernel computes them again. The gradients are then plain products.
//!
//! ```text
//! stored: tiles of 64 keys x 64 queries, 4 x 4 squares of 16 x 16, queries first
//!   a causal head has the tiles on and right of the diagonal     a square: four matrices of 8 x 8
//!                 queries                                                    queries 0..7  8..15
//!     keys   | 0 | 1 | 2 |                                       keys  0..7       0          1
//!                | 3 | 4 |                                       keys  8..15      2          3
//!                    | 5 |                                       a matrix: a row for each key
//!
//! gradient   resident   streamed                       A operand: squares, as they are or transposed
//! dq         queries    rows of k                      ds transposed
//! dk         keys       rows of q of the group         ds
//! dv         keys       rows of dout of the group      p
//! ```
//! A lane stores the words that it has as the A operand of a product of keys, so a warp stores 128
//! contiguous bytes at once. A slot's first array has the tiles of a turn, one for each multiplying
//! warpgroup, and the second its rows. While the products of a turn run, the squares of the next
//! are read to registers, and transposed for dq.
//!
//! Invariant: a kernel uses only tiles that the mask does not hide entirely; the others may never
//! have been written. Each sum has the order of [`backward`](super::backward), and the same bits.

use super::heads::Inputs;
use super::rows::{
    LAST_HEADS, copies, heads_of_group, hide, kv_head_of, leave_registers, multiplying_group, round, store,
};
use super::shape::{GROUP_ROWS, WARPGROUP};
use super::tile::Memory;
use crate::block::launder_reg;
use crate::flash_attention::place::{Problem, ResidentRows};
use crate::flash_attention_mma::Gradient;
use crate::machine::warpgroup::{Accumulators, wait_products};
use crate::math::exp2_weight;
use crate::tile::SharedTile;
use crate::unroll_on_gpu;
use crate::vector;
use crate::warp::{Converged, LANES};
use core::f32::consts::LOG2_E;
use cuda_std::{thread, warp};
use half::bf16;

/// The tokens of a tile's side, and its squares.
const TOKENS: u32 = GROUP_ROWS;
const SIDE: u32 = TOKENS / 16;
/// The words of a square, of one of its matrices, and of a tile.
const SQUARE: u32 = 128;
const MATRIX: u32 = 32;
const WORDS: u32 = SIDE * SIDE * SQUARE;

/// Returns the stored elements of p, or of ds, for a head of `tokens` tokens. `causal` is true if
/// no query sees a later key.
pub const fn stored_scores(tokens: u32, causal: bool) -> usize {
    let tiles = tokens.div_ceil(TOKENS) as usize;
    let stored = if causal { tiles * (tiles + 1) / 2 } else { tiles * tiles };
    stored * (TOKENS * TOKENS) as usize
}

/// The most elements of an array of scores: kernels number its words in 32 bits.
#[cfg(not(target_arch = "nvptx64"))]
pub(super) const MOST_STORED: usize = 1 << 33;

/// The location of a query head's tiles.
#[derive(Clone, Copy)]
pub(super) struct StoredScores {
    /// The number of the first tile.
    start: u32,
    tiles: u32,
    causal: bool,
}

impl StoredScores {
    /// Returns the tiles of head number `head` of a launch.
    #[inline(always)]
    pub(super) fn new(problem: &Problem<'_, bf16>, head: u32) -> Self {
        let causal = problem.window != 0;
        let tiles = problem.tokens.div_ceil(TOKENS);
        let of_head = if causal { tiles * (tiles + 1) / 2 } else { tiles * tiles };
        Self { start: head * of_head, tiles, causal }
    }

    /// Returns the first word of a tile.
    #[inline(always)]
    fn word(self, key_tile: u32, query_tile: u32) -> u32 {
        // A causal row of tiles begins on the diagonal.
        let row =
            if self.causal { key_tile * (2 * self.tiles - key_tile + 1) / 2 - key_tile } else { key_tile * self.tiles };
        (self.start + row + query_tile) * WORDS
    }

    /// Stores the rounded weights of this warp's 16 keys, of a warpgroup's tile.
    ///
    /// # Safety
    /// The tile lies inside `to`.
    #[inline(always)]
    pub(super) unsafe fn write(self, rounded: &[[[u32; 4]; 4]; 1], [key_tile, query_tile]: [u32; 2], to: *mut u32) {
        let thread = thread::thread_idx_x() % WARPGROUP;
        let at = self.word(key_tile, query_tile) + thread / LANES * SIDE * SQUARE + thread % LANES;
        unroll_on_gpu!(square < 4 => {
            unroll_on_gpu!(matrix < 4 => {
                // The operand has the first columns of both halves of the rows before the last.
                let word = rounded[0][square][matrix / 2 + matrix % 2 * 2];
                let place = at as usize + square * SQUARE as usize + matrix * MATRIX as usize;
                // SAFETY: the square lies inside `to`.
                unsafe { vector::store(to, place, word) };
            });
        });
    }
}

/// Computes and stores p and ds of this block's keys, in a launch that begins at key head `before`
/// of all samples' heads. Registers hold the rows of k and v, which pass through one place.
///
/// # Safety
/// The contract has accepted the problem. Its heads have up to `PARTS` parts of 64 columns. All
/// threads of the block call it together. `p` and `ds` have the tiles of the launch's heads.
#[inline(always)]
pub(super) unsafe fn scores<
    const GROUPS: u32,
    const TILE: u32,
    const TILES: usize,
    const PARTS: u32,
    const SLOTS: u32,
    const HELD: usize,
>(
    inputs: Inputs<'_>,
    before: u32,
    lse: &[f32],
    delta: &[f32],
    p: *mut bf16,
    ds: *mut bf16,
) where
    [[f32; 4]; TILES]: Accumulators,
{
    const { assert!(TILE == TOKENS && HELD == PARTS as usize) };
    let problem = inputs.problem;
    // SAFETY: the argument in `backward::queries` holds here. The tiles lie inside `p` and `ds`.
    unsafe {
        let memory = Memory::<GROUPS, TILE, PARTS, SLOTS>::new(1, 2);
        let rows = Memory::<GROUPS, TILE, PARTS, SLOTS>::RESIDENT;
        let ResidentRows { sample, head: kv_head, first, mask } =
            ResidentRows::in_part(&problem, rows, problem.kv_heads, before as usize, LAST_HEADS, false);
        let [from, until] = mask.queries_of(first, rows, TILE);
        let bounds = [mask.length, problem.width];
        let (heads, turns) = (heads_of_group(&problem), until - from);
        if from >= until {
            return;
        }
        if copies() {
            leave_registers::<GROUPS, PARTS>();
            let (k, v) = (inputs.head(1, sample, kv_head), inputs.head(2, sample, kv_head));
            memory.fill_resident([k], first, bounds);
            memory.resident_free().wait(0);
            memory.fill_resident([v], first, bounds);
            memory.fill_queries(&inputs, (sample, kv_head), [lse, delta], [from, until], mask.length, 0);
            return;
        }
        let group = multiplying_group::<GROUPS, PARTS>();
        let first = first + group * GROUP_ROWS;
        let factor = problem.scale * LOG2_E;
        memory.resident_full().wait(0);
        let k = memory.hold::<HELD>(0, group);
        // All lanes have read theirs before the warp's arrival.
        warp::sync_warp(u32::MAX);
        memory.resident_free().arrive_if(warp::lane_id() == 0);
        memory.resident_full().wait(1);
        let v = memory.hold::<HELD>(0, group);
        let own = mask.queries_of(first, GROUP_ROWS, TILE);
        let [own_from, own_until] = Memory::<GROUPS, TILE, PARTS, SLOTS>::own(own, until);
        let first_stored = (sample as u32 * problem.kv_heads + kv_head - before) * heads;
        let mut head = 0;
        while head < heads {
            let so_far = head * turns;
            memory.skip(so_far, so_far + own_from - from);
            let mut tile = own_from;
            while tile < own_until {
                let turn = so_far + tile - from;
                let mut scores: [[f32; 4]; TILES] = core::mem::zeroed();
                let mut gradients: [[f32; 4]; TILES] = core::mem::zeroed();
                let mut rounded: [[[u32; 4]; 4]; 1] = core::mem::zeroed();
                memory.wait_full(turn, 0);
                memory.multiply_held(&mut scores, &k, turn, 0);
                memory.wait_full(turn, 1);
                memory.multiply_held(&mut gradients, &v, turn, 1);
                scores.wait::<1>();
                hide(&mut scores, mask, [first, tile * TILE], [GROUP_ROWS, TILE], true);
                let numbers = [memory.numbers(turn % SLOTS, 0), memory.numbers(turn % SLOTS, 1)];
                let column = 2 * (warp::lane_id() % 4);
                unroll_on_gpu!(n < TILES, at most 16 => {
                    let base = numbers[0].get2(8 * n as u32 + column).map(|lse| lse * -LOG2_E);
                    unroll_on_gpu!(at < 4 => {
                        scores[n][at] = exp2_weight(scores[n][at], factor, base[at % 2]);
                    });
                });
                let stored = StoredScores::new(&problem, first_stored + head);
                let place = [launder_reg(first) / TOKENS, tile];
                round(&scores, &mut rounded);
                stored.write(&rounded, place, p.cast());
                gradients.wait::<0>();
                unroll_on_gpu!(n < TILES, at most 16 => {
                    let deltas = numbers[1].get2(8 * n as u32 + column);
                    unroll_on_gpu!(at < 4 => {
                        gradients[n][at] = scores[n][at] * (gradients[n][at] - deltas[at % 2]);
                    });
                });
                // All lanes have read the deltas.
                warp::sync_warp(u32::MAX);
                memory.set_free_if(true, turn, 0);
                memory.set_free_if(true, turn, 1);
                round(&gradients, &mut rounded);
                stored.write(&rounded, place, ds.cast());
                tile += 1;
            }
            memory.skip(so_far + own_until - from, so_far + turns);
            head += 1;
        }
    }
}

/// Computes the gradient with the number `OF` of this block's rows from the squares of a launch
/// that begins at key head `before` of all samples' heads.
///
/// # Safety
/// The contract has accepted the problem. Its heads have up to `PARTS` parts of 64 columns. All
/// threads of the block call it together. `scores` has the squares of the launch's heads.
#[inline(always)]
pub(super) unsafe fn from_scores<
    const GROUPS: u32,
    const TILE: u32,
    const PARTS: u32,
    const SLOTS: u32,
    const MADE: usize,
    const OF: usize,
>(
    inputs: Inputs<'_>,
    before: u32,
    scores: &[bf16],
    dqkv: *mut bf16,
) where
    [[f32; 4]; MADE]: Accumulators,
{
    // The squares of a tile fill its array.
    const { assert!(TILE == GROUP_ROWS && GROUP_ROWS * GROUPS * TILE <= TILE * PARTS * 64) };
    let of_queries = matches!(Gradient::ALL[OF], Gradient::Queries);
    let problem = inputs.problem;
    // SAFETY: the argument in `backward::queries` holds here too. The squares lie inside `scores`.
    unsafe {
        let memory = Memory::<GROUPS, TILE, PARTS, SLOTS>::new(0, 0);
        let rows = Memory::<GROUPS, TILE, PARTS, SLOTS>::RESIDENT;
        let heads_of_group = heads_of_group(&problem);
        let ResidentRows { sample, head: own_head, first, mask } = if of_queries {
            ResidentRows::in_part(&problem, rows, problem.heads, (before * heads_of_group) as usize, LAST_HEADS, true)
        } else {
            ResidentRows::in_part(&problem, rows, problem.kv_heads, before as usize, LAST_HEADS, false)
        };
        let tiles_of = |first: u32, rows: u32| {
            if of_queries { mask.keys_of(first, rows, TILE) } else { mask.queries_of(first, rows, TILE) }
        };
        let [from, until] = tiles_of(first, rows);
        let bounds = [mask.length, problem.width];
        let turns = until - from;
        let (first_head, heads) = if of_queries { (own_head, 1) } else { (own_head * heads_of_group, heads_of_group) };
        let of_launch = |head: u32| sample as u32 * problem.heads + head - before * heads_of_group;
        if copies() {
            leave_registers::<GROUPS, PARTS>();
            let mut number = 0;
            while number < heads && from < until {
                let head = first_head + number;
                let streamed = match Gradient::ALL[OF] {
                    Gradient::Queries => inputs.head(1, sample, kv_head_of(&problem, head)),
                    Gradient::Keys => inputs.head(0, sample, head),
                    Gradient::Values => inputs.output_head(sample, head),
                };
                let stored = StoredScores::new(&problem, of_launch(head));
                let mut tile = from;
                while tile < until {
                    let turn = number * turns + tile - from;
                    let start = |group: u32| {
                        let resident = first / TOKENS + group;
                        let [key, query] = if of_queries { [tile, resident] } else { [resident, tile] };
                        2 * stored.word(key, query) as usize
                    };
                    let exists = |group: u32| first / TOKENS + group < stored.tiles;
                    memory.fill_parts(turn, WORDS, scores, start, exists);
                    memory.fill(turn, 1, streamed, tile * TILE, bounds);
                    tile += 1;
                }
                number += 1;
            }
            return;
        }
        let group = multiplying_group::<GROUPS, PARTS>();
        let warp = Converged::assume();
        let own_first = first + group * GROUP_ROWS;
        let mut sums: [[f32; 4]; MADE] = core::mem::zeroed();
        let [own_from, own_until] = Memory::<GROUPS, TILE, PARTS, SLOTS>::own(tiles_of(own_first, GROUP_ROWS), until);
        // The lane's row of the stored matrix that is matrix `lane / 8` of the operand.
        let lane = warp::lane_id();
        let matrix = if of_queries { lane / 8 } else { lane / 16 + lane / 8 % 2 * 2 };
        let down = thread::thread_idx_x() % WARPGROUP / LANES * if of_queries { 1 } else { SIDE };
        let at = group * WORDS + down * SQUARE + matrix * MATRIX + lane % 8 * 4;
        let mut number = 0;
        while number < heads {
            let so_far = number * turns;
            memory.skip(so_far, so_far + own_from - from);
            if own_from < own_until {
                let mut even: [[[u32; 4]; 4]; 1] = core::mem::zeroed();
                let mut odd: [[[u32; 4]; 4]; 1] = core::mem::zeroed();
                let mut tile = own_from;
                sums.wait::<0>();
                macro_rules! turn {
                    ($left:ident) => {
                        let turn = so_far + tile - from;
                        memory.wait_full(turn, 0);
                        let squares: SharedTile<u32> = memory.slot(turn % SLOTS, 0);
                        let warp = warp.again();
                        unroll_on_gpu!(step < 4 => {
                            let next = step as u32 * if of_queries { SIDE } else { 1 };
                            $left[0][step] = squares.matrices(warp, at + next * SQUARE, of_queries);
                        });
                        // All lanes have read their rows.
                        warp::sync_warp(u32::MAX);
                        memory.set_free_if(true, turn, 0);
                        memory.wait_full(turn, 1);
                        memory.multiply_weights(&mut sums, &$left, turn, 1);
                        wait_products::<1>();
                        memory.set_free_if(tile > own_from, turn.wrapping_sub(1), 1);
                        tile += 1;
                        if tile == own_until {
                            sums.wait::<0>();
                            break;
                        }
                    };
                }
                loop {
                    turn!(even);
                    turn!(odd);
                }
                memory.set_free_if(true, so_far + tile - 1 - from, 1);
            }
            memory.skip(so_far + own_until - from, so_far + turns);
            number += 1;
        }
        let (part, factor) = match Gradient::ALL[OF] {
            Gradient::Queries => (0, problem.scale),
            Gradient::Keys => (1, problem.scale),
            Gradient::Values => (2, 1.0),
        };
        let warp_row = own_first + thread::thread_idx_x() % WARPGROUP / LANES * 16;
        let bounds = [warp_row, mask.length, problem.tokens, problem.width];
        store(warp, &sums, factor, problem.rows(part, sample, own_head), bounds, dqkv);
    }
}
