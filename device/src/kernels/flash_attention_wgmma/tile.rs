//! A block's shared memory: the warpgroup that fills it, and the barriers between that and the
//! warpgroups that multiply.
//!
//! ```text
//! warpgroup 0   waits until a slot is free -> copies a tile into it -> .. (cp.async)
//! the others    wait until a slot is full -> multiply -> free it -> ..
//! ```
//! A tile lies in parts of 64 columns. A row of a part is 128 bytes, whose 16-byte chunks are
//! [`swizzled`](crate::mma::fragments::swizzled) as wgmma requires.
//!
//! Invariant: everything past the rows or columns of a head is 0 in shared memory.

use super::shape::{BARRIERS, GROUP_ROWS, PART, ROW, WARPGROUP, registers_of};
use crate::block::{divide, launder_reg};
use crate::flash_attention::place::{MaskRange, Problem, Rows};
use crate::format::round_bf16;
use crate::machine::mbarrier::{BARRIER_BYTES, Barrier, fence_barriers};
use crate::machine::warpgroup::{Accumulators, Operand, begin_products, commit_products, registers};
use crate::machine::wgmma::{align_stages, fence_async};
use crate::mma::fragments::{CHUNK_WORDS, quad, quad_place};
use crate::tile::SharedTile;
use crate::unroll_on_gpu;
use crate::vector::F4;
use crate::warp::{Converged, LANES};
use cuda_std::{thread, warp};
use half::bf16;

/// The chunks of a row of a part.
const CHUNKS: u32 = ROW / CHUNK_WORDS;

/// The tiles of a block's shared memory: `GROUPS` warpgroups with 64 resident rows each, streamed
/// tiles of `TILE` rows, and `PARTS` parts of 64 columns.
#[derive(Clone, Copy)]
pub(super) struct Memory<const GROUPS: u32, const TILE: u32, const PARTS: u32> {
    arrays: u32,
    numbers: u32,
}

impl<const GROUPS: u32, const TILE: u32, const PARTS: u32> Memory<GROUPS, TILE, PARTS> {
    /// The resident rows of the block.
    pub(super) const RESIDENT: u32 = GROUP_ROWS * GROUPS;
    /// The rows that the copying warpgroup copies at once.
    const PASS: u32 = WARPGROUP / (CHUNKS * PARTS);

    /// Returns the memory of a block with resident rows of `arrays` arrays, and `numbers` values
    /// for each row of a tile. Initializes the barriers.
    ///
    /// # Safety
    /// The contract declares [`Shape::shared_bytes`](super::Shape::shared_bytes) for these. All
    /// threads of the block call it together.
    #[inline(always)]
    pub(super) unsafe fn new(arrays: u32, numbers: u32) -> Self {
        align_stages();
        let memory = Self { arrays, numbers };
        if thread::thread_idx_x() == 0 {
            let mut number = 0;
            while number < BARRIERS {
                let arrivals = if number < BARRIERS / 2 { WARPGROUP } else { GROUPS * WARPGROUP / LANES };
                // SAFETY: one thread initializes the barriers, which lie after the tiles.
                unsafe { memory.barrier(number).init(arrivals) };
                number += 1;
            }
            fence_barriers();
        }
        thread::sync_threads();
        memory
    }

    /// Returns the resident rows of an array.
    #[inline(always)]
    pub(super) fn resident(self, array: u32) -> SharedTile<u32> {
        let words = Self::RESIDENT * PARTS * ROW;
        // SAFETY: the arrays come first in the shared memory that the contract declares.
        unsafe { SharedTile::new(array * words * 4, words) }
    }

    /// Returns a slot's tile of the first streamed array (0) or the second (1).
    #[inline(always)]
    pub(super) fn slot(self, slot: u32, array: u32) -> SharedTile<u32> {
        let before = (self.arrays * Self::RESIDENT + (2 * slot + array) * TILE) * PARTS * ROW;
        // SAFETY: the slots come after the resident arrays, in the memory that the contract
        // declares.
        unsafe { SharedTile::new(before * 4, TILE * PARTS * ROW) }
    }

    /// Returns a slot's values for the rows of its tile: `lse` (0) or `delta` (1).
    #[inline(always)]
    pub(super) fn numbers(self, slot: u32, which: u32) -> SharedTile<f32> {
        let before = (self.arrays * Self::RESIDENT + 4 * TILE) * PARTS * ROW + (2 * slot + which) * TILE;
        // SAFETY: the values come after the slots, in the memory that the contract declares.
        unsafe { SharedTile::new(before * 4, TILE) }
    }

    /// Returns a warpgroup's tiles, a part of the block's. If it has none, they end with the
    /// block's.
    #[inline(always)]
    pub(super) fn own([from, until]: [u32; 2], end: u32) -> [u32; 2] {
        if from < until { [from, until] } else { [end, end] }
    }

    #[inline(always)]
    fn barrier(self, number: u32) -> Barrier {
        let tiles = (self.arrays * Self::RESIDENT + 4 * TILE) * PARTS * ROW * 4;
        Barrier::new(tiles + 2 * self.numbers * TILE * 4 + number * BARRIER_BYTES)
    }

    /// Returns the barrier at which the resident rows are complete.
    #[inline(always)]
    pub(super) fn resident_full(self) -> Barrier {
        self.barrier(0)
    }

    /// Returns the barrier at which the resident rows are free.
    #[inline(always)]
    pub(super) fn resident_free(self) -> Barrier {
        self.barrier(BARRIERS / 2)
    }

    /// Returns the barrier at which a slot's array is complete.
    #[inline(always)]
    fn full(self, slot: u32, array: u32) -> Barrier {
        self.barrier(1 + 2 * slot + array)
    }

    /// Returns the barrier at which a slot's array is free.
    #[inline(always)]
    fn free(self, slot: u32, array: u32) -> Barrier {
        self.barrier(BARRIERS / 2 + 1 + 2 * slot + array)
    }

    /// Waits until the array of a turn is complete. Turns use the slots alternately.
    ///
    /// # Safety
    /// All lanes of the warp call it together, for ascending turns.
    #[inline(always)]
    pub(super) unsafe fn wait_full(self, turn: u32, array: u32) {
        // SAFETY: `new` has initialized the barrier.
        unsafe { self.full(turn % 2, array).wait(turn / 2 % 2) };
        fence_async();
    }

    /// Frees the array of a turn if `condition` is true, once for each warp.
    ///
    /// # Safety
    /// All lanes of the warp call it together, for ascending turns.
    #[inline(always)]
    pub(super) unsafe fn set_free_if(self, condition: bool, turn: u32, array: u32) {
        // SAFETY: `new` has initialized the barrier.
        unsafe { self.free(turn % 2, array).arrive_if(condition && warp::lane_id() == 0) };
    }

    /// Frees the turns from `from` to `until` without a use of them.
    ///
    /// # Safety
    /// All lanes of the warp call it together, for ascending turns.
    #[inline(always)]
    pub(super) unsafe fn skip(self, from: u32, until: u32) {
        let mut turn = from;
        while turn < until {
            // SAFETY: all lanes of the warp execute this, in the order of turns.
            unsafe {
                self.wait_full(turn, 0);
                self.set_free_if(true, turn, 0);
                self.wait_full(turn, 1);
                self.set_free_if(true, turn, 1);
            }
            turn += 1;
        }
    }

    /// Starts the products of a warpgroup's rows of resident array `array` with a turn's rows of
    /// array `array`, as one group.
    ///
    /// # Safety
    /// All threads of the warpgroup call it together. Both arrays are full.
    #[inline(always)]
    pub(super) unsafe fn multiply_rows<const TILES: usize>(
        self,
        sums: &mut [[f32; 4]; TILES],
        group: u32,
        turn: u32,
        array: u32,
    ) where
        [[f32; 4]; TILES]: Accumulators,
    {
        let (resident, streamed) = (self.resident(array), self.slot(turn % 2, array));
        let operands = |part: u32| {
            let rows = Operand::along(resident, Self::RESIDENT, part, group * GROUP_ROWS);
            (rows, Operand::along(streamed, TILE, part, 0))
        };
        // SAFETY: the whole warpgroup executes this, and the operands lie inside the block's
        // memory.
        unsafe {
            begin_products();
            let (a, b) = operands(0);
            sums.multiply_shared::<false>(a, b);
            unroll_on_gpu!(part < 4 => {
                if part > 0 && part < PARTS as usize {
                    let (a, b) = operands(part as u32);
                    sums.multiply_shared::<true>(a, b);
                }
            });
            commit_products();
        }
    }

    /// Starts to add the products of rounded weights of a turn's rows with these rows of array
    /// `array`, as one group.
    ///
    /// # Safety
    /// All threads of the warpgroup call it together. The array is full.
    #[inline(always)]
    pub(super) unsafe fn multiply_weights<const MADE: usize, const BLOCKS: usize>(
        self,
        sums: &mut [[f32; 4]; MADE],
        weights: &[[[u32; 4]; 4]; BLOCKS],
        turn: u32,
        array: u32,
    ) where
        [[f32; 4]; MADE]: Accumulators,
    {
        let streamed = self.slot(turn % 2, array);
        // SAFETY: as above.
        unsafe {
            begin_products();
            unroll_on_gpu!(block < BLOCKS => {
                sums.multiply_registers(&weights[block], Operand::across(streamed, TILE, 64 * block as u32));
            });
            commit_products();
        }
    }

    /// Copies the array of a turn when its slot is free: `TILE` rows from token `first` on.
    ///
    /// # Safety
    /// The copying warpgroup calls it, for ascending turns. See [`copy`](Self::copy) for the rows.
    #[inline(always)]
    pub(super) unsafe fn fill(self, turn: u32, array: u32, rows: Rows<'_, bf16>, first: u32, bounds: [u32; 2]) {
        // SAFETY: `new` has initialized the barriers; the caller guarantees the rest.
        unsafe {
            self.free(turn % 2, array).wait((turn / 2 + 1) % 2);
            Self::copy(self.slot(turn % 2, array), TILE, rows, first, bounds);
            self.full(turn % 2, array).arrive_after_copies();
        }
    }

    /// Copies the values of a turn's rows when slot 0's array is free, with 0 for tokens that do
    /// not exist. The barrier of array 0 also counts them.
    ///
    /// # Safety
    /// The copying warpgroup calls it, before [`fill`](Self::fill) of array 0. The values of the
    /// tokens below `limit` lie inside `values`.
    #[inline(always)]
    pub(super) unsafe fn fill_numbers(self, turn: u32, values: [&[f32]; 2], start: usize, first: u32, limit: u32) {
        let row = thread::thread_idx_x();
        // SAFETY: `new` has initialized the barrier.
        unsafe { self.free(turn % 2, 0).wait((turn / 2 + 1) % 2) };
        if row < TILE {
            let token = first + row;
            let there = token < limit;
            unroll_on_gpu!(which < 2 => {
                let to = self.numbers(turn % 2, which as u32);
                // SAFETY: the caller guarantees that the token has a value if `there` is true.
                unsafe { to.copy_or_zero(row, values[which], start + token as usize, there) };
            });
        }
    }

    /// Starts to copy `count` rows from token `first` on. Rows from `limit` on, and columns from
    /// `width` on, become 0.
    ///
    /// # Safety
    /// The copying warpgroup calls it. The rows below `limit` lie inside `rows.values`, with
    /// `width` columns each, on 16-byte boundaries. The tile has `count` rows.
    #[inline(always)]
    pub(super) unsafe fn copy(
        to: SharedTile<u32>,
        count: u32,
        rows: Rows<'_, bf16>,
        first: u32,
        [limit, width]: [u32; 2],
    ) {
        let thread = thread::thread_idx_x();
        let (row, chunk) = (thread / (CHUNKS * PARTS), thread % (CHUNKS * PARTS));
        let place = (chunk / CHUNKS * count + row) * ROW + ((chunk % CHUNKS) ^ (row % 8)) * CHUNK_WORDS;
        // Steps of four rows alternate between the halves of the swizzle.
        let below = |down: u32| (place ^ (down % 8 * CHUNK_WORDS)) + down * ROW;
        let mut from = rows.start + (first + row) as usize * rows.stride + (chunk * 8) as usize;
        let apart = Self::PASS as usize * rows.stride;
        let mut down = 0;
        if first + count <= limit && width == PARTS * PART {
            while down < count {
                // SAFETY: all rows and columns exist.
                unsafe { to.copy_chunk(below(down), rows.values, from) };
                (down, from) = (launder_reg(down + Self::PASS), from + apart);
            }
            return;
        }
        while down < count {
            let there = first + row + down < limit && chunk * 8 < width;
            // SAFETY: the caller guarantees that the chunk lies inside the rows if `there` is true.
            unsafe { to.copy_chunk_or_zero(below(down), rows.values, from, there) };
            // A loop: its addresses at once would take more registers than there are.
            (down, from) = (launder_reg(down + Self::PASS), from + apart);
        }
    }
}

/// Returns the number of query heads of a key head.
///
/// # Safety
/// The contract has accepted the problem.
#[inline(always)]
pub(super) unsafe fn heads_of_group(problem: &Problem<'_, bf16>) -> u32 {
    // SAFETY: the contract has checked that there are key heads.
    unsafe { divide(problem.heads as usize, problem.kv_heads as usize).0 as u32 }
}

/// Returns the key head of a query head.
///
/// # Safety
/// The contract has accepted the problem.
#[inline(always)]
pub(super) unsafe fn kv_head_of(problem: &Problem<'_, bf16>, head: u32) -> u32 {
    // SAFETY: a key head has query heads.
    unsafe { divide(head as usize, heads_of_group(problem) as usize).0 as u32 }
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
pub(super) unsafe fn leave_registers<const GROUPS: u32>() {
    // SAFETY: the whole warpgroup executes this: the function's contract.
    unsafe {
        if GROUPS == 2 {
            registers::<{ registers_of(2)[0] }, false>();
        } else {
            registers::<{ registers_of(3)[0] }, false>();
        }
    }
}

/// Gives this multiplying warpgroup its registers, and returns its number among those that
/// multiply.
///
/// # Safety
/// All threads of the warpgroup call it together, and those of the copying one [`leave_registers`].
#[inline(always)]
pub(super) unsafe fn multiplying_group<const GROUPS: u32>() -> u32 {
    const { assert!(GROUPS == 2 || GROUPS == 3) };
    // SAFETY: the whole warpgroup executes this: the function's contract.
    unsafe {
        if GROUPS == 2 {
            registers::<{ registers_of(2)[1] }, true>();
        } else {
            registers::<{ registers_of(3)[1] }, true>();
        }
        // The assembler knows that a shuffle from one lane gives all the same.
        warp::warp_shuffle_idx(u32::MAX, thread::thread_idx_x() / WARPGROUP - 1, 0, LANES).0
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
    unroll_on_gpu!(n < MADE, at most 32 => {
        let value = quad(warp, sums[n]);
        let column = 8 * n as u32 + column;
        if token < tokens && column < width {
            let value = if token < length { value * F4::splat(factor) } else { F4::splat(0.0) };
            let at = rows.start + token as usize * rows.stride + column as usize;
            // SAFETY: the row lies inside `out`, and the columns in the row.
            unsafe { value.store(out, at) };
        }
    });
}
