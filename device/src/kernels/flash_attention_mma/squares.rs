//! Gradients from stored scores. p and ds are rounded to BF16 and stored once, so that no other
//! kernel computes them again. The gradients are then plain products. For heads of 128 columns the
//! kernel of [`pairs`](super::pairs) computes dk and dv itself, and stores ds for dq.
//!
//! ```text
//! stored: blocks of 128 keys x 128 queries, 8 x 8 squares of 16 x 16, queries first
//!   a causal head has the blocks on and right of the diagonal    a square: four matrices of 8 x 8
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
//! contiguous bytes at once. `ldmatrix` reads the matrices, and transposes them for dq.
//!
//! Invariant: a kernel uses only squares that the mask does not hide entirely; the others may never
//! have been written. Each sum has the order of [`backward`](super::backward), and the same bits.

use super::backward::copy_numbers;
use super::shape::{BLOCK, LAST_HEADS};
use super::tile::Memory;
use crate::block::launder_reg;
use crate::flash_attention::place::{Problem, ResidentRows};
use crate::format::round_bf16;
use crate::math::exp2_weight;
use crate::mma::element::MmaElement;
use crate::mma::fragments::{Sums, multiply};
use crate::tile::{SharedTile, commit_copies, wait_copies};
use crate::unroll_on_gpu;
use crate::vector::store;
use crate::warp::{Converged, LANES};
use core::f32::consts::LOG2_E;
use cuda_std::{thread, warp};

/// The tokens of a block's side, and the squares.
const TOKENS: u32 = 128;
const SIDE: u32 = TOKENS / 16;
/// The words of a square, and of one of its matrices.
const WORDS: usize = 128;
const MATRIX: u32 = 32;

/// Returns the stored elements of p, or of ds, for a head of `tokens` tokens. `causal` is true if
/// no query sees a later key.
pub const fn stored_scores(tokens: u32, causal: bool) -> usize {
    let blocks = tokens.div_ceil(TOKENS) as usize;
    let stored = if causal { blocks * (blocks + 1) / 2 } else { blocks * blocks };
    stored * (TOKENS * TOKENS) as usize
}

/// The location of a query head's squares.
#[derive(Clone, Copy)]
pub(super) struct StoredScores {
    /// The word of the first.
    start: usize,
    blocks: usize,
    causal: bool,
}

impl StoredScores {
    /// Returns the squares of a head in a launch that begins at key head `before` of all samples'
    /// heads.
    #[inline(always)]
    pub(super) fn new<S: Copy>(problem: &Problem<'_, S>, before: usize, sample: usize, head: u32) -> Self {
        let number = sample * problem.heads as usize + head as usize - before * problem.group() as usize;
        let causal = problem.window != 0;
        let start = number * stored_scores(problem.tokens, causal) / 2;
        Self { start, blocks: problem.tokens.div_ceil(TOKENS) as usize, causal }
    }

    /// Returns the first word of the square of these tokens, multiples of 16.
    #[inline(always)]
    fn word(self, key: u32, query: u32) -> usize {
        let (down, along) = ((key / TOKENS) as usize, (query / TOKENS) as usize);
        // A causal row of blocks begins on the diagonal.
        let row = if self.causal { down * (2 * self.blocks - down + 1) / 2 - down } else { down * self.blocks };
        let square = key % TOKENS / 16 * SIDE + query % TOKENS / 16;
        self.start + ((row + along) * (SIDE * SIDE) as usize + square as usize) * WORDS
    }

    /// Stores the rounded values of this warp's keys and a tile's queries. `place` has the block's
    /// first key, and the first query.
    ///
    /// # Safety
    /// The squares lie inside `to`.
    #[inline(always)]
    unsafe fn write<const M_TILES: usize, const TILES: usize, const CHUNKS: usize>(
        self,
        memory: &Memory<M_TILES, TILES, CHUNKS>,
        values: &Sums<M_TILES, TILES>,
        place: [u32; 2],
        to: *mut u32,
    ) {
        unroll_on_gpu!(m < 2 => {
            if m < M_TILES {
                let key = launder_reg(place[0]) + memory.first_row() + 16 * m as u32;
                // SAFETY: the squares lie inside `to`.
                unsafe { self.write_row(&values[m], [key, place[1]], to) };
            }
        });
    }

    /// Stores the rounded values of a warp's 16 keys and some queries, from these on.
    ///
    /// # Safety
    /// The squares lie inside `to`.
    #[inline(always)]
    pub(super) unsafe fn write_row<const TILES: usize>(
        self,
        values: &[[f32; 4]; TILES],
        place: [u32; 2],
        to: *mut u32,
    ) {
        let at = self.word(place[0], place[1]) + warp::lane_id() as usize;
        unroll_on_gpu!(square < TILES / 2 => {
            let ([a, b, c, d], [e, f, g, h]) = (values[2 * square], values[2 * square + 1]);
            let words = [round_bf16(a, b), round_bf16(e, f), round_bf16(c, d), round_bf16(g, h)];
            unroll_on_gpu!(matrix < 4 => {
                // SAFETY: the square lies inside `to`.
                unsafe { store(to, at + square * WORDS + matrix * MATRIX as usize, words[matrix]) };
            });
        });
    }
}

/// Computes and stores p and ds of this block's keys, in a launch that begins at key head `before`
/// of all samples' heads. Registers hold the rows of k and v.
///
/// # Safety
/// The contract has accepted the problem. Its heads have up to `CHUNKS` chunks, twice `STEPS`. All
/// threads of the block call it together. `p` and `ds` have the squares of the launch's heads.
#[inline(always)]
pub(super) unsafe fn scores<
    S: MmaElement,
    const M_TILES: usize,
    const TILES: usize,
    const CHUNKS: usize,
    const STEPS: usize,
>(
    problem: Problem<'_, S>,
    before: usize,
    lse: &[f32],
    delta: &[f32],
    dout: &[S],
    p: *mut S,
    ds: *mut S,
) {
    const { assert!(Memory::<M_TILES, TILES, CHUNKS>::RESIDENT <= 4 * Memory::<M_TILES, TILES, CHUNKS>::TILE) };
    // SAFETY: the argument in `backward::queries` holds here too. Resident rows fit in the slots.
    unsafe {
        let warp = Converged::assume();
        let memory = Memory::<M_TILES, TILES, CHUNKS>::new(0);
        let (rows, of_tile) = (Memory::<M_TILES, TILES, CHUNKS>::RESIDENT, Memory::<M_TILES, TILES, CHUNKS>::TILE);
        let ResidentRows { sample, head: kv_head, first, mask } =
            ResidentRows::in_part(&problem, rows, problem.kv_heads, before, LAST_HEADS, false);
        let [from, until] = mask.queries_of(first, rows, of_tile);
        if from >= until {
            return;
        }
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
        // k and v pass through the slots, one after the other.
        let resident = SharedTile::new(0, rows * Memory::<M_TILES, TILES, CHUNKS>::ROW);
        macro_rules! hold {
            ($part:literal) => {{
                memory.copy(resident, rows, problem.rows($part, sample, kv_head), first, bounds);
                commit_copies();
                wait_copies::<0>();
                thread::sync_threads();
                let held = memory.operands::<STEPS>(warp, resident);
                thread::sync_threads();
                held
            }};
        }
        let (k, v) = (hold!(1), hold!(2));

        let (mut head, head_end) = (kv_head * problem.group(), (kv_head + 1) * problem.group());
        let (mut tile, mut slot) = (from, 0);
        copy(0, head, from);
        while head < head_end {
            let (next_head, next_tile) = if tile + 1 < until { (head, tile + 1) } else { (head + 1, from) };
            wait_copies::<0>();
            thread::sync_threads();
            // Into the slot that all warps have finished reading.
            if next_head < head_end {
                copy(1 - slot, next_head, next_tile);
            }
            let (place, here, of_head) = ([first, tile * of_tile], slot, head);
            (head, tile, slot) = (next_head, next_tile, 1 - slot);
            if memory.none_seen(mask, place, true) {
                continue;
            }
            let mut scores = memory.held_scores::<S, STEPS>(warp, &k, memory.slot(here, 0));
            let mut gradients = memory.held_scores::<S, STEPS>(warp, &v, memory.slot(here, 1));
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
                            scores[m][n][at] = exp2_weight(scores[m][n][at], factor, lses[at % 2] * -LOG2_E);
                            gradients[m][n][at] = scores[m][n][at] * (gradients[m][n][at] - deltas[at % 2]);
                        });
                    }
                });
            });
            let stored = StoredScores::new(&problem, before, sample, of_head);
            stored.write(&memory, &scores, place, p.cast());
            stored.write(&memory, &gradients, place, ds.cast());
        }
    }
}

/// A gradient of attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gradient {
    /// dq, from ds and k.
    Queries,
    /// dk, from ds and q.
    Keys,
    /// dv, from p and dout.
    Values,
}

impl Gradient {
    pub(crate) const ALL: [Self; 3] = [Self::Queries, Self::Keys, Self::Values];
}

/// Computes the gradient with the number `OF` of this block's rows from the squares of a launch
/// that begins at key head `before` of all samples' heads.
///
/// # Safety
/// The contract has accepted the problem. Its heads have up to `CHUNKS` chunks, and `MADE` mma
/// tiles of columns. All threads of the block call it together.
#[inline(always)]
pub(super) unsafe fn from_scores<
    S: MmaElement,
    const M_TILES: usize,
    const TILES: usize,
    const CHUNKS: usize,
    const MADE: usize,
    const OF: usize,
>(
    problem: Problem<'_, S>,
    before: usize,
    scores: &[S],
    dout: &[S],
    dqkv: *mut S,
) {
    // A kernel that stores scores skips no part of these squares without the others.
    const { assert!(M_TILES == 1 || matches!(Gradient::ALL[OF], Gradient::Queries)) };
    let of_queries = matches!(Gradient::ALL[OF], Gradient::Queries);
    // SAFETY: the argument in `backward::queries` holds here too. The tiles of rows and of squares
    // lie one after another in the memory that the contract declares.
    unsafe {
        let warp = Converged::assume();
        let memory = Memory::<M_TILES, TILES, CHUNKS>::new(0);
        let (rows, of_tile) = (Memory::<M_TILES, TILES, CHUNKS>::RESIDENT, Memory::<M_TILES, TILES, CHUNKS>::TILE);
        let (row, words) = (Memory::<M_TILES, TILES, CHUNKS>::ROW, rows * of_tile / 2);
        // Recomputed at the end, as in `queries`.
        macro_rules! place {
            ($rows:expr) => {
                if of_queries {
                    ResidentRows::in_part(
                        &problem,
                        $rows,
                        problem.heads,
                        before * problem.group() as usize,
                        LAST_HEADS,
                        true,
                    )
                } else {
                    ResidentRows::in_part(&problem, $rows, problem.kv_heads, before, LAST_HEADS, false)
                }
            };
        }
        let ResidentRows { sample, head: own, first, mask } = place!(rows);
        let [from, until] =
            if of_queries { mask.keys_of(first, rows, of_tile) } else { mask.queries_of(first, rows, of_tile) };
        let bounds = [mask.length, problem.width];
        // The squares of a tile along the queries.
        let along = if of_queries { rows / 16 } else { of_tile / 16 };
        macro_rules! rows_of {
            ($slot:expr) => {
                SharedTile::<u32>::new($slot * of_tile * row * 4, of_tile * row)
            };
        }
        macro_rules! squares_of {
            ($slot:expr) => {
                SharedTile::<u32>::new((2 * of_tile * row + $slot * words) * 4, words)
            };
        }
        macro_rules! copy {
            ($slot:expr, $head:expr, $tile:expr) => {{
                let (slot, head, streamed) = ($slot, launder_reg($head), $tile * of_tile);
                let streamed_rows = match Gradient::ALL[OF] {
                    Gradient::Queries => problem.rows(1, sample, head / problem.group()),
                    Gradient::Keys => problem.rows(0, sample, head),
                    Gradient::Values => problem.output_rows(dout, sample, head),
                };
                memory.copy(rows_of!(slot), of_tile, streamed_rows, streamed, bounds);
                let (key, query) = if of_queries { (streamed, first) } else { (first, streamed) };
                let stored = StoredScores::new(&problem, before, sample, head);
                let (to, thread) = (squares_of!(slot), launder_reg(thread::thread_idx_x()));
                // Squares along the queries are contiguous, with a chunk for each of 32 threads.
                unroll_on_gpu!(n < TILES * M_TILES / 2 => {
                    let chunk = n as u32 * BLOCK + thread;
                    let (down, next) = (chunk / (along * LANES), chunk % (along * LANES));
                    let from = 2 * stored.word(key + 16 * down, query) + 8 * next as usize;
                    to.copy_chunk(4 * chunk, scores, from);
                });
                commit_copies();
            }};
        }

        let mut sums: Sums<M_TILES, MADE> = [[[0.0; 4]; MADE]; M_TILES];
        let group = problem.group();
        let (mut head, head_end) = if of_queries { (own, own + 1) } else { (own * group, (own + 1) * group) };
        let (mut tile, mut slot) = (from, 0);
        if from < until {
            copy!(0, head, from);
        } else {
            head = head_end;
        }
        while head < head_end {
            let (next_head, next_tile) = if tile + 1 < until { (head, tile + 1) } else { (head + 1, from) };
            wait_copies::<0>();
            thread::sync_threads();
            // Into the slot that all warps have finished reading.
            if next_head < head_end {
                copy!(1 - slot, next_head, next_tile);
            }
            let (place, here) = ([first, tile * of_tile], slot);
            (head, tile, slot) = (next_head, next_tile, 1 - slot);
            if memory.none_seen(mask, place, !of_queries) {
                continue;
            }
            let (streamed, squares, down) = (rows_of!(here), squares_of!(here), memory.down.anew());
            // The lane's row of the stored matrix that is matrix `lane / 8` of the operand.
            let lane = launder_reg(warp::lane_id());
            let matrix = if of_queries { lane / 8 } else { lane / 16 + lane / 8 % 2 * 2 };
            let square = memory.first_row() / 16 * if of_queries { 1 } else { along };
            let at = square * WORDS as u32 + matrix * MATRIX + lane % 8 * 4;
            let own = [first + memory.first_row(), 16 * M_TILES as u32];
            // Before the warp converges: the mask's conditions may be branches.
            let mut used = [0; TILES];
            unroll_on_gpu!(step < TILES / 2 => {
                let other = [place[1] + 16 * step as u32, 16];
                let none = if of_queries { mask.none_seen(own, other) } else { mask.none_seen(other, own) };
                used[step] = if none { 0 } else { u32::MAX };
            });
            let warp = warp.again();
            unroll_on_gpu!(step < TILES / 2 => {
                let mut left = [[0; 4]; M_TILES];
                unroll_on_gpu!(m < 2 => {
                    if m < M_TILES {
                        let next = if of_queries { step as u32 * along + m as u32 } else { step as u32 };
                        let words = squares.matrices(warp, at + next * WORDS as u32, of_queries);
                        left[m] = words.map(|word| word & used[step]);
                    }
                });
                unroll_on_gpu!(square < MADE / 2, at most 16 => {
                    let right = down.read(warp, streamed, 16 * step as u32, square as u32, true);
                    multiply::<S::Factors, M_TILES, 1, MADE>(warp, &mut sums, square, &left, &[right]);
                });
            });
        }
        let ResidentRows { sample, head, first, mask } = place!(launder_reg(rows));
        let (part, factor) = match Gradient::ALL[OF] {
            Gradient::Queries => (0, problem.scale),
            Gradient::Keys => (1, problem.scale),
            Gradient::Values => (2, 1.0),
        };
        let bounds = [first, mask.length, problem.tokens, problem.width];
        memory.store(warp, &sums, factor, problem.rows(part, sample, head), 0, bounds, dqkv);
    }
}
