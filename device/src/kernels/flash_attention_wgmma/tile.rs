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

use super::rows::{heads_of_group, resident_row};
use super::shape::{GROUP_ROWS, PART, ROW, WARPGROUP, barriers_of};
use crate::block::launder_reg;
use crate::flash_attention::place::{Problem, Rows};
use crate::machine::mbarrier::{BARRIER_BYTES, Barrier, fence_barriers};
use crate::machine::warpgroup::{Accumulators, Operand, begin_products, commit_products};
use crate::machine::wgmma::{align_stages, fence_async, undefined_sums};
use crate::mma::fragments::CHUNK_WORDS;
use crate::tile::SharedTile;
use crate::unroll_on_gpu;
use crate::warp::LANES;
use cuda_std::{thread, warp};
use half::bf16;

/// The chunks of a row of a part.
const CHUNKS: u32 = ROW / CHUNK_WORDS;

/// The tiles of a block's shared memory: `GROUPS` warpgroups with 64 resident rows each, streamed
/// tiles of `TILE` rows in `SLOTS` slots, and `PARTS` parts of 64 columns.
#[derive(Clone, Copy)]
pub(super) struct Memory<const GROUPS: u32, const TILE: u32, const PARTS: u32, const SLOTS: u32> {
    arrays: u32,
    numbers: u32,
}

impl<const GROUPS: u32, const TILE: u32, const PARTS: u32, const SLOTS: u32> Memory<GROUPS, TILE, PARTS, SLOTS> {
    /// The barriers of the block.
    const BARRIERS: u32 = barriers_of(SLOTS);
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
            while number < Self::BARRIERS {
                let arrivals = if number < Self::BARRIERS / 2 { WARPGROUP } else { GROUPS * WARPGROUP / LANES };
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
        let before = (self.arrays * Self::RESIDENT + 2 * SLOTS * TILE) * PARTS * ROW + (2 * slot + which) * TILE;
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
        let tiles = (self.arrays * Self::RESIDENT + 2 * SLOTS * TILE) * PARTS * ROW * 4;
        Barrier::new(tiles + SLOTS * self.numbers * TILE * 4 + number * BARRIER_BYTES)
    }

    /// Returns the barrier at which the resident rows are complete.
    #[inline(always)]
    pub(super) fn resident_full(self) -> Barrier {
        self.barrier(0)
    }

    /// Returns the barrier at which the resident rows are free.
    #[inline(always)]
    pub(super) fn resident_free(self) -> Barrier {
        self.barrier(Self::BARRIERS / 2)
    }

    /// Returns the barrier at which a slot's array is complete.
    #[inline(always)]
    fn full(self, slot: u32, array: u32) -> Barrier {
        self.barrier(1 + 2 * slot + array)
    }

    /// Returns the barrier at which a slot's array is free.
    #[inline(always)]
    fn free(self, slot: u32, array: u32) -> Barrier {
        self.barrier(Self::BARRIERS / 2 + 1 + 2 * slot + array)
    }

    /// Waits until the array of a turn is complete. Turns use the slots in a cycle.
    ///
    /// # Safety
    /// All lanes of the warp call it together, for ascending turns.
    #[inline(always)]
    pub(super) unsafe fn wait_full(self, turn: u32, array: u32) {
        // SAFETY: this function's contract is that of `wait_unfenced`.
        unsafe { self.wait_unfenced(turn, array) };
        fence_async();
    }

    /// Waits until the array of a turn is complete, before a [`wait_full`](Self::wait_full) of the
    /// other array, whose fence is for both.
    ///
    /// # Safety
    /// The requirements of [`wait_full`](Self::wait_full) hold.
    #[inline(always)]
    pub(super) unsafe fn wait_unfenced(self, turn: u32, array: u32) {
        // SAFETY: `new` has initialized the barrier.
        unsafe { self.full(turn % SLOTS, array).wait(turn / SLOTS % 2) };
    }

    /// Frees the array of a turn if `condition` is true, once for each warp.
    ///
    /// The first lane arrives for the warp, which orders only its own accesses before the next
    /// copies. After reads by other lanes, as opposed to those of products that have ended, a
    /// [`sync_warp`](warp::sync_warp) must come first: neither `ldmatrix` nor a wait for products
    /// orders the memory accesses of lanes.
    ///
    /// # Safety
    /// All lanes of the warp call it together, for ascending turns.
    #[inline(always)]
    pub(super) unsafe fn set_free_if(self, condition: bool, turn: u32, array: u32) {
        // SAFETY: `new` has initialized the barrier.
        unsafe { self.free(turn % SLOTS, array).arrive_if(condition && warp::lane_id() == 0) };
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

    /// Starts the products of a warpgroup's rows of resident array `resident` with a turn's rows of
    /// array `array`, as one group.
    ///
    /// # Safety
    /// All threads of the warpgroup call it together. Both arrays are full.
    #[inline(always)]
    pub(super) unsafe fn multiply_rows<const TILES: usize>(
        self,
        sums: &mut [[f32; 4]; TILES],
        group: u32,
        resident: u32,
        turn: u32,
        array: u32,
    ) where
        [[f32; 4]; TILES]: Accumulators,
    {
        let (resident, streamed) = (self.resident(resident), self.slot(turn % SLOTS, array));
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

    /// Returns a warpgroup's rows of the first `HELD` parts of a resident array, as the operand A.
    ///
    /// # Safety
    /// All lanes of the warp call it together. The array is full.
    #[inline(always)]
    pub(super) unsafe fn hold<const HELD: usize>(self, array: u32, group: u32) -> [[[u32; 4]; 4]; HELD] {
        let tile = self.resident(array);
        let mut held = [[[0; 4]; 4]; HELD];
        unroll_on_gpu!(part < 4 => {
            if part < HELD {
                unroll_on_gpu!(square < 4 => {
                    unroll_on_gpu!(at < 4 => {
                        let row = group * GROUP_ROWS + resident_row(at % 2);
                        let chunk = (2 * square + at / 2) as u32 ^ (row % 8);
                        let place = (part as u32 * Self::RESIDENT + row) * ROW + chunk * CHUNK_WORDS;
                        held[part][square][at] = tile.get(place + warp::lane_id() % 4);
                    });
                });
            }
        });
        held
    }

    /// Starts the products of rows that registers hold with a turn's rows of array `array`, as one
    /// group.
    ///
    /// # Safety
    /// All threads of the warpgroup call it together. The array is full.
    #[inline(always)]
    pub(super) unsafe fn multiply_held<const HELD: usize, const TILES: usize>(
        self,
        sums: &mut [[f32; 4]; TILES],
        held: &[[[u32; 4]; 4]; HELD],
        turn: u32,
        array: u32,
    ) where
        [[f32; 4]; TILES]: Accumulators,
    {
        let streamed = self.slot(turn % SLOTS, array);
        *sums = undefined_sums();
        // SAFETY: as above.
        unsafe {
            begin_products();
            sums.multiply_registers::<false, false>(&held[0], Operand::along(streamed, TILE, 0, 0));
            unroll_on_gpu!(part < 4 => {
                if part > 0 && part < HELD {
                    sums.multiply_registers::<true, false>(&held[part], Operand::along(streamed, TILE, part as u32, 0));
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
        let streamed = self.slot(turn % SLOTS, array);
        // SAFETY: as above.
        unsafe {
            begin_products();
            unroll_on_gpu!(block < BLOCKS => {
                sums.multiply_registers::<true, true>(&weights[block], Operand::across(streamed, TILE, 64 * block as u32));
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
            self.free(turn % SLOTS, array).wait((turn / SLOTS + 1) % 2);
            Self::copy(self.slot(turn % SLOTS, array), TILE, rows, first, bounds);
            self.full(turn % SLOTS, array).arrive_after_copies();
        }
    }

    /// Calls `copy` with the array of a turn when its slot is free. The array is full when the
    /// copies that `copy` starts have ended.
    ///
    /// # Safety
    /// The copying warpgroup calls it, for ascending turns.
    #[inline(always)]
    pub(super) unsafe fn fill_by(self, turn: u32, array: u32, copy: impl FnOnce(SharedTile<u32>)) {
        // SAFETY: `new` has initialized the barriers.
        unsafe {
            self.free(turn % SLOTS, array).wait((turn / SLOTS + 1) % 2);
            copy(self.slot(turn % SLOTS, array));
            self.full(turn % SLOTS, array).arrive_after_copies();
        }
    }

    /// Copies q, `dout` and both of `values` of the query heads of a key head, one tile a turn: the
    /// tiles in `tiles` of each head's tokens below `limit`. Q is array 0, and dout array 1.
    ///
    /// # Safety
    /// The copying warpgroup calls it, once. The contract has checked that all heads lie inside
    /// `problem`, `dout` and `values`.
    #[inline(always)]
    pub(super) unsafe fn fill_queries(
        self,
        problem: &Problem<'_, bf16>,
        (sample, kv_head): (usize, u32),
        dout: &[bf16],
        values: [&[f32]; 2],
        [from, until]: [u32; 2],
        limit: u32,
    ) {
        let bounds = [limit, problem.width];
        // SAFETY: the contract has checked that there are key heads, and that the heads lie inside
        // the arguments.
        unsafe {
            let (heads, turns) = (heads_of_group(problem), until - from);
            let mut head = 0;
            while head < heads {
                let query_head = kv_head * heads + head;
                let q = problem.rows(0, sample, query_head);
                let dout = problem.output_rows(dout, sample, query_head);
                let start = problem.statistics(sample, query_head);
                let mut tile = from;
                while tile < until {
                    let turn = head * turns + tile - from;
                    self.fill_numbers(turn, values, start, tile * TILE, limit);
                    self.fill(turn, 0, q, tile * TILE, bounds);
                    self.fill(turn, 1, dout, tile * TILE, bounds);
                    tile += 1;
                }
                head += 1;
            }
        }
    }

    /// Copies the values of a turn's rows when array 0 of its slot is free, with 0 for tokens that
    /// do not exist. The barrier of array 0 also counts them.
    ///
    /// # Safety
    /// The copying warpgroup calls it, before [`fill`](Self::fill) of array 0. The values of the
    /// tokens below `limit` lie inside `values`.
    #[inline(always)]
    unsafe fn fill_numbers(self, turn: u32, values: [&[f32]; 2], start: usize, first: u32, limit: u32) {
        let row = thread::thread_idx_x();
        // SAFETY: `new` has initialized the barrier.
        unsafe { self.free(turn % SLOTS, 0).wait((turn / SLOTS + 1) % 2) };
        if row < TILE {
            let token = first + row;
            let there = token < limit;
            unroll_on_gpu!(which < 2 => {
                let to = self.numbers(turn % SLOTS, which as u32);
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
