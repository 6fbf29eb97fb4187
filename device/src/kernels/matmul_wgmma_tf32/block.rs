//! A block's tiles of the output, one after another. The first warpgroup copies stages to a ring in
//! shared memory, and the others multiply them and finish the sums, each at its own pace.
//!
//! ```text
//! copies                              stage s, multiplies
//!   wait until its slot is free         wait until it is full
//!   thread 0: images of B, in bulk      read and round A, k 0..15, start their products
//!   all: chunks of A                    wait for the products of s - 1, and free their slot
//!   it is full when all have come       read and round A, k 16..31, start their products
//!                                       wait for the products of k 0..15
//! ```
//! While a warpgroup reads one half of a stage of A into registers, its products of the other half
//! are in flight, and so are those of the other warpgroup. The copies run ahead across tiles, so
//! the first stages of the next tile arrive while the epilogue writes this one.
//!
//! Invariant: the products of an output are accumulated in the same order in every tile.

use super::finish::finish;
use super::operand::{PackedOperand, StreamedOperand, fragments};
use super::tile::{DEPTH, REGISTERS, THREADS, Tile, WARPGROUP};
use crate::block::launder_reg;
use crate::machine::hints::block_bounds;
use crate::machine::mbarrier::{Barrier, fence_barriers};
use crate::machine::warpgroup::registers;
use crate::matmul::epilogue::Epilogue;
use crate::tile::SharedTile;
use crate::warp::Converged;
use crate::wgmma::{self, GROUP_ROWS, Products, ROW_WORDS};
use cuda_std::{thread, warp};

/// The location of a tile: its batch, its split, and its first row and column.
#[derive(Clone, Copy)]
pub(super) struct Place {
    pub(super) batch: u32,
    pub(super) split: u32,
    pub(super) first: [u32; 2],
}

/// One matrix multiply, from the point of view of one thread.
#[derive(Clone, Copy)]
pub(super) struct Problem<'p> {
    pub(super) a: StreamedOperand<'p>,
    pub(super) b: PackedOperand<'p>,
    pub(super) epilogue: Epilogue<'p, f32>,
    /// The range of k that is summed: its first k, and one past its last.
    pub(super) k: [u32; 2],
}

/// The place in the ring of stages: a slot, and the parity of the number of rounds before.
#[derive(Clone, Copy)]
struct Slot {
    number: u32,
    parity: u32,
}

impl Slot {
    /// Returns the next slot of a tile's ring.
    #[inline(always)]
    fn next(self, tile: Tile) -> Self {
        let Self { number, parity } = self;
        if number + 1 == tile.stages() {
            Self { number: 0, parity: parity ^ 1 }
        } else {
            Self { number: number + 1, parity }
        }
    }

    /// Returns the places of A and of B.
    #[inline(always)]
    fn stage(self, tile: Tile) -> [SharedTile<u32>; 2] {
        let offset = self.number * tile.stage_len() * 4;
        // SAFETY: the parts follow each other in the shared memory that the contract declares.
        unsafe {
            [
                SharedTile::new(offset, tile.left_len()),
                SharedTile::new(offset + tile.left_len() * 4, tile.cols() * ROW_WORDS),
            ]
        }
    }

    /// Returns the byte of the barrier at which the slot is full.
    #[inline(always)]
    fn full(self, tile: Tile) -> u32 {
        tile.barrier(self.number)
    }

    /// Returns the barrier at which the slot is free.
    #[inline(always)]
    fn free(self, tile: Tile) -> Barrier {
        Barrier::new(tile.barrier(tile.stages() + self.number))
    }
}

/// Computes the tiles of this block: every `grid_dim_x`th of `count`. `place` returns a tile's
/// location by its number, and `problem` the problem at a location.
///
/// # Safety
/// The contract has accepted the problems, and the const parameters are those of `tile`: `TILES`
/// mma tiles of eight columns, and the `IMAGES` of B in a stage. All threads of the block call it
/// together.
#[inline(always)]
pub(super) unsafe fn compute<'p, const ALONG: bool, const TILES: usize, const IMAGES: usize>(
    count: u32,
    place: impl Fn(u32) -> Place,
    problem: impl Fn(Place) -> Problem<'p>,
    tile: Tile,
    is_swapped: bool,
) {
    block_bounds::<THREADS, 1>();
    wgmma::align_stages();
    if thread::thread_idx_x() == 0 {
        let mut number = 0;
        while number < 2 * tile.stages() {
            // Full: each copying thread, and one for the bulk copies. Free: a lane of each warp.
            let arrivals = if number < tile.stages() { WARPGROUP + 1 } else { tile.warps() };
            // SAFETY: one thread initializes the barriers, which lie after the staged outputs.
            unsafe { Barrier::new(tile.barrier(number)).init(arrivals) };
            number += 1;
        }
        fence_barriers();
    }
    thread::sync_threads();
    let mut slot = Slot { number: 0, parity: 0 };
    let mut item = thread::block_idx_x();
    if thread::thread_idx_x() < WARPGROUP {
        // SAFETY: the whole warpgroup executes this.
        unsafe { registers::<{ REGISTERS[0] }, false>() };
        while item < count {
            let now = place(item);
            let Problem { a: left, b: right, k: [mut k, end], .. } = problem(now);
            while k < end {
                let [a, b] = slot.stage(tile);
                // SAFETY: the contract has accepted the operands, and the tile's first row, first
                // column and this k exist. The barriers are initialized. All warps have waited for
                // the products of the stage that was in the slot.
                unsafe {
                    slot.free(tile).wait(slot.parity ^ 1);
                    right.copy::<IMAGES>(b, slot.full(tile), now.first[1], k);
                    left.copy::<ALONG>(a, now.first[0], [k, end]);
                    Barrier::new(slot.full(tile)).arrive_after_copies();
                }
                slot = slot.next(tile);
                k += DEPTH;
            }
            item += thread::grid_dim_x();
        }
        return;
    }
    // SAFETY: the whole warpgroup executes this.
    unsafe { registers::<{ REGISTERS[1] }, true>() };
    let number = (thread::thread_idx_x() - WARPGROUP) / 32;
    let row = number / 4 * GROUP_ROWS + number % 4 * 16;
    let mut products = Products::new();
    while item < count {
        let now = place(launder_reg(item));
        let Problem { k: [first_k, end], .. } = problem(now);
        let mut sums = wgmma::undefined_sums();
        let stages = (end - first_k).div_ceil(DEPTH);
        let (mut stage, mut before) = (0, slot);
        while stage < stages {
            let [a, b] = slot.stage(tile);
            // SAFETY: the barriers are initialized. The stage is full, and is written again only
            // after all warps have waited for its products. All lanes of the warpgroup execute
            // this, and a wait precedes each change of a fragment.
            unsafe {
                Barrier::new(slot.full(tile)).wait(slot.parity);
                let warp = Converged::assume();
                let lower = fragments::<ALONG>(warp, a, row, 0);
                products.multiply_tf32::<TILES>(&mut sums, lower, b, 0, stage > 0);
                products.wait::<1>();
                // All lanes have read their fragments of the stage before.
                warp::sync_warp(u32::MAX);
                before.free(tile).arrive_if(stage > 0 && warp::lane_id() == 0);
                let upper = fragments::<ALONG>(warp, a, row, DEPTH / 2);
                products.multiply_tf32::<TILES>(&mut sums, upper, b, DEPTH / 2, true);
                products.wait::<1>();
            }
            before = slot;
            slot = slot.next(tile);
            stage += 1;
        }
        products.finish(&mut sums);
        // SAFETY: the barriers are initialized. All lanes of the warp execute this.
        unsafe {
            // All lanes have read their fragments of the last stage.
            warp::sync_warp(u32::MAX);
            before.free(tile).arrive_if(stages > 0 && warp::lane_id() == 0);
        }
        if stages == 0 {
            sums = wgmma::no_sums();
        }
        let Problem { epilogue, .. } = problem(now);
        let first = [now.first[0] + row, now.first[1]];
        // SAFETY: all lanes of the warp execute this, and the contract has accepted the problem.
        unsafe { finish::<ALONG, TILES>(Converged::assume(), epilogue, first, sums, tile, number, is_swapped) };
        item += thread::grid_dim_x();
    }
}
