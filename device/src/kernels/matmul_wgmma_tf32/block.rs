//! A block's tiles of the output, one after another. A warpgroup copies the stages of A and B, and
//! the others multiply them and finish the sums.
//!
//! ```text
//! stage s:   wait until s is full
//!            read A, k 0..15, into registers, and start their products
//!            wait for the products of s - 1, and free that stage
//!            read A, k 16..31, and start their products
//!            wait for the products of k 0..15
//! ```
//! While a warpgroup reads one half of a stage of A into registers, its products of the other half
//! are in flight, and so are those of the other warpgroup. The copies run ahead across tiles, so
//! the first stages of the next tile arrive while the epilogue writes this one.
//!
//! Invariant: the products of an output are accumulated in the same order in every tile.

use super::finish::finish;
use super::operand::{DEPTH, fragments, rows_of};
use crate::block::launder_reg;
use crate::machine::hints::block_bounds;
use crate::machine::warpgroup::registers;
use crate::matmul::epilogue::Epilogue;
use crate::matmul_wgmma::block::Operands;
use crate::matmul_wgmma::ring::{Ring, Turn};
use crate::matmul_wgmma::tile::{Tile, WARPGROUP};
use crate::warp::{Converged, LANES};
use crate::wgmma::{self, Products};
use cuda_std::{thread, warp};

/// The registers of a thread that copies, and of one that multiplies.
const REGISTERS: [u32; 2] = [40, 232];

/// The location of a tile: its batch, its split, and its first row and column.
#[derive(Clone, Copy)]
pub(super) struct TileLocation {
    pub(super) batch: u32,
    pub(super) split: u32,
    pub(super) first: [u32; 2],
}

/// The destination of a tile, and its sums.
#[derive(Clone, Copy)]
pub(super) struct Problem<'p> {
    pub(super) epilogue: Epilogue<'p, f32>,
    /// The range of k that is summed: its first k, and one past its last.
    pub(super) k: [u32; 2],
}

/// Computes the tiles of this block: every `grid_dim_x`th of `count`. `place` returns a tile's
/// location by its number, and `problem` the problem at a location.
///
/// # Safety
/// The contract has accepted the arguments. `TILES` is an eighth of the tile's columns. All threads
/// of the block call it together.
#[inline(always)]
pub(super) unsafe fn compute<'p, const ALONG: bool, const TILES: usize>(
    count: u32,
    Operands { maps, steps }: Operands<f32>,
    place: impl Fn(u32) -> TileLocation,
    problem: impl Fn(TileLocation) -> Problem<'p>,
    tile: Tile,
    is_swapped: bool,
) {
    block_bounds::<384, 1>();
    // SAFETY: all threads of the block execute this.
    let ring = unsafe { Ring::new(tile) };
    let mut turn = Turn::FIRST;
    let mut item = thread::block_idx_x();
    if thread::thread_idx_x() < WARPGROUP {
        // SAFETY: the whole warpgroup executes this.
        unsafe { registers::<{ REGISTERS[0] }, false>() };
        if thread::thread_idx_x() == 0 {
            while item < count {
                let now = place(item);
                let Problem { k: [mut k, end], .. } = problem(now);
                while k < end {
                    // SAFETY: one thread executes this, turn by turn.
                    unsafe {
                        ring.fill::<ALONG, true, f32>(turn, maps, steps.map(|step| now.batch * step), now.first, k);
                    }
                    turn = turn.next(tile);
                    k += DEPTH;
                }
                item += thread::grid_dim_x();
            }
        }
        return;
    }
    // SAFETY: the whole warpgroup executes this.
    unsafe { registers::<{ REGISTERS[1] }, true>() };
    let number = (thread::thread_idx_x() - WARPGROUP) / LANES;
    // SAFETY: all lanes of the warp execute this.
    let warp = unsafe { Converged::assume() };
    let count = warp.uniform(count);
    let mut products = Products::new();
    while item < count {
        let now = place(launder_reg(item));
        let Problem { k: [first_k, end], .. } = problem(now);
        let mut sums = wgmma::undefined_sums();
        let stages = warp.uniform((end - first_k).div_ceil(DEPTH));
        let (mut stage, mut last) = (0, turn);
        while stage < stages {
            let [a, b] = ring.stage(turn);
            // SAFETY: the warpgroup executes this together, turn by turn. The stage is full, and is
            // freed after a wait for its products. A wait precedes each change of a fragment.
            unsafe {
                ring.wait_full(turn);
                let warp = Converged::assume();
                let lower = fragments::<ALONG>(warp, a, number, 0);
                products.multiply_tf32::<TILES>(&mut sums, lower, b, 0, stage > 0);
                products.wait::<1>();
                // All lanes have read their fragments of the stage before.
                warp::sync_warp(u32::MAX);
                ring.set_free_if(stage > 0, last);
                let upper = fragments::<ALONG>(warp, a, number, DEPTH / 2);
                products.multiply_tf32::<TILES>(&mut sums, upper, b, DEPTH / 2, true);
                products.wait::<1>();
            }
            (last, turn) = (turn, turn.next(tile));
            stage += 1;
        }
        products.finish(&mut sums);
        // SAFETY: all lanes of the warp execute this.
        unsafe {
            // All lanes have read their fragments of the last stage.
            warp::sync_warp(u32::MAX);
            ring.set_free_if(stages > 0, last);
        }
        if stages == 0 {
            sums = wgmma::no_sums();
        }
        let Problem { epilogue, .. } = problem(now);
        let [row, extent] = rows_of::<ALONG>(launder_reg(number));
        let first = [now.first[0] + row, now.first[1]];
        // SAFETY: all lanes of the warp execute this, and the contract has accepted the arguments.
        unsafe { finish::<ALONG, TILES>(Converged::assume(), epilogue, first, extent, sums, tile, number, is_swapped) };
        item += thread::grid_dim_x();
    }
}
