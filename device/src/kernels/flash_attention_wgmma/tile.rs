//! A block's shared memory, and the barriers between the warpgroup that fills it
//! ([`copies`](super::copies)) and the warpgroups that multiply.
//!
//! ```text
//! warpgroup 0   waits until a slot is free -> copies a tile into it -> ..
//! the others    wait until a slot is full -> multiply -> free it -> ..
//! ```
//! A tile lies in parts of 64 columns. A row of a part is 128 bytes, whose 16-byte chunks are
//! [`swizzled`](crate::mma::fragments::swizzled) as wgmma requires.
//!
//! Invariant: everything past the rows or columns of a head is 0 in shared memory.

use super::rows::resident_row;
use super::shape::{GROUP_ROWS, ROW, WARPGROUP, barriers_of};
use crate::format::Bf16;
use crate::machine::mbarrier::{BARRIER_BYTES, Barrier, fence_barriers};
use crate::machine::warpgroup::{Accumulators, Operand, begin_products, commit_products};
use crate::machine::wgmma::{align_stages, undefined_sums};
use crate::mma::fragments::{CHUNK_WORDS, Squares, multiply};
use crate::tile::SharedTile;
use crate::unroll_on_gpu;
use crate::warp::{Converged, LANES};
use cuda_std::{thread, warp};

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
                let warps = if number < Self::BARRIERS / 2 { 1 } else { GROUPS } * (WARPGROUP / LANES);
                // SAFETY: one thread initializes the barriers, which lie after the tiles.
                unsafe { memory.barrier(number).init(warps) };
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
        // SAFETY: the arrays come first in the shared memory that the contract declares.
        unsafe { SharedTile::new(self.resident_start(array) * 4, Self::RESIDENT * PARTS * ROW) }
    }

    /// Returns the first word of the resident rows of an array.
    #[inline(always)]
    pub(super) fn resident_start(self, array: u32) -> u32 {
        array * Self::RESIDENT * PARTS * ROW
    }

    /// Returns a slot's tile of the first streamed array (0) or the second (1).
    #[inline(always)]
    pub(super) fn slot(self, slot: u32, array: u32) -> SharedTile<u32> {
        // SAFETY: the slots come after the resident arrays, in the memory that the contract
        // declares.
        unsafe { SharedTile::new(self.slot_start(slot, array) * 4, TILE * PARTS * ROW) }
    }

    /// Returns the first word of a slot's tile.
    #[inline(always)]
    pub(super) fn slot_start(self, slot: u32, array: u32) -> u32 {
        (self.arrays * Self::RESIDENT + (2 * slot + array) * TILE) * PARTS * ROW
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
    pub(super) fn full(self, slot: u32, array: u32) -> Barrier {
        self.barrier(1 + 2 * slot + array)
    }

    /// Returns the barrier at which a slot's array is free.
    #[inline(always)]
    pub(super) fn free(self, slot: u32, array: u32) -> Barrier {
        self.barrier(Self::BARRIERS / 2 + 1 + 2 * slot + array)
    }

    /// Waits until the array of a turn is complete. Turns use the slots in a cycle.
    ///
    /// # Safety
    /// All lanes of the warp call it together, for ascending turns.
    #[inline(always)]
    pub(super) unsafe fn wait_full(self, turn: u32, array: u32) {
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

    /// Adds the products of a warp's rounded weights of a turn's first 64 rows with these rows of
    /// array `array` to the warp's sums, by `mma.sync`. It gives the bits of
    /// [`multiply_weights`](Self::multiply_weights).
    ///
    /// # Safety
    /// All lanes of the warp call it together. The array is full, and no products of the sums are
    /// in flight.
    #[inline(always)]
    pub(super) unsafe fn multiply_in_warp<const MADE: usize>(
        self,
        converged: Converged,
        sums: &mut [[f32; 4]; MADE],
        weights: &[[u32; 4]; 4],
        turn: u32,
        array: u32,
    ) {
        let (streamed, sums) = (self.slot(turn % SLOTS, array), core::array::from_mut(sums));
        let squares = Squares::down(CHUNKS, 0, 0);
        unroll_on_gpu!(step < 4 => {
            unroll_on_gpu!(square < MADE / 2, at most 16 => {
                let row = square as u32 / 4 * TILE + 16 * step as u32;
                let right = squares.read(converged, streamed, row, square as u32 % 4, true);
                multiply::<Bf16, 1, 1, MADE>(converged, sums, square, &[weights[step]], &[right]);
            });
        });
        // All lanes have read their rows, before one of them frees the array.
        // SAFETY: all lanes of the warp execute this: the function's contract.
        unsafe { warp::sync_warp(u32::MAX) };
    }
}
