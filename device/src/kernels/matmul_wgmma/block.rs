//! A block's tiles of the output, one after another. A warpgroup copies the stages of A and B, and
//! the others multiply them and finish the sums.
//!
//! ```text
//! stage s:   wait until s is full
//!            start the products of s
//!            wait for the products of s - 1, and free that stage
//! ```
//! The copies run ahead across tiles, so the first stages of the next tile arrive while the
//! epilogue writes this one.
//!
//! Invariant: the products of an output are accumulated in the same order in every tile.

use super::columns::Chains;
use super::finish::finish;
use super::ring::{Ring, Turn};
use super::tile::{STAGING_LEN, Tile, WARPGROUP};
use crate::block::launder_reg;
use crate::machine::warpgroup::registers;
use crate::matmul::epilogue::Epilogue;
use crate::matmul_bf16::block::ColumnSums;
use crate::stored::Stored;
use crate::tile::SharedTile;
use crate::warp::{Converged, LANES};
use crate::wgmma::{self, DEPTH, GROUP_ROWS, Products, STEP};
use cuda_std::tensor_map::TensorMap;
use cuda_std::{thread, warp};
use half::bf16;

/// The registers of a thread that copies, and of one that multiplies.
const REGISTERS: [u32; 2] = [24, 240];

/// The operands of a product: A, then B.
#[derive(Clone, Copy)]
pub(crate) struct Operands<T> {
    pub(crate) maps: [TensorMap<T>; 2],
    /// The matrices from a batch to the next.
    pub(crate) steps: [u32; 2],
}

/// The destination of a matrix.
#[derive(Clone, Copy)]
pub(super) struct Outputs<'p, S> {
    pub(super) epilogue: Epilogue<'p, S>,
    pub(super) columns: ColumnSums,
}

/// Computes the tiles of this block: every `grid_dim_x`th of `count()`. For the number of a tile,
/// `matrix` returns that of its matrix, which is a split of a batch, and `place` its first row and
/// column. For the number of a matrix, `range` returns its batch and its k, and `outputs` its
/// destination.
///
/// # Safety
/// The contract has accepted the arguments. `TILES` is an eighth of the tile's columns.
/// All threads of the block call it together.
#[inline(always)]
pub(super) unsafe fn compute<'p, const A_ALONG: bool, const B_ALONG: bool, const TILES: usize, S: Stored>(
    count: impl Fn() -> u32,
    operands: Operands<bf16>,
    matrix: impl Fn(u32) -> u32,
    place: impl Fn(u32) -> [u32; 2],
    range: impl Fn(u32) -> (u32, [u32; 2]),
    outputs: impl Fn(u32) -> Outputs<'p, S>,
    tile: Tile,
) {
    // SAFETY: all threads of the block execute this. The first warpgroup copies and the others
    // multiply, and each warpgroup takes one branch. Their registers suit a multiprocessor.
    unsafe {
        let ring = Ring::new(tile);
        if thread::thread_idx_x() < WARPGROUP {
            registers::<{ REGISTERS[0] }, false>();
            if thread::thread_idx_x() == 0 {
                copy::<A_ALONG, B_ALONG>(ring, count, operands, matrix, place, range, tile);
            }
        } else {
            registers::<{ REGISTERS[1] }, true>();
            multiply::<A_ALONG, B_ALONG, TILES, S>(ring, count, matrix, place, range, outputs, tile);
        }
    }
}

/// Copies the stages of this block's tiles.
///
/// # Safety
/// See [`compute`]. One thread calls it.
#[inline(always)]
unsafe fn copy<const A_ALONG: bool, const B_ALONG: bool>(
    ring: Ring,
    count: impl Fn() -> u32,
    Operands { maps, steps }: Operands<bf16>,
    matrix: impl Fn(u32) -> u32,
    place: impl Fn(u32) -> [u32; 2],
    range: impl Fn(u32) -> (u32, [u32; 2]),
    tile: Tile,
) {
    let (mut turn, mut item) = (Turn::FIRST, thread::block_idx_x());
    while item < count() {
        let first = place(item);
        let (batch, [mut k, end]) = range(matrix(item));
        while k < end {
            // SAFETY: one thread executes this, turn by turn.
            unsafe { ring.fill::<A_ALONG, B_ALONG, bf16>(turn, maps, steps.map(|step| batch * step), first, k) };
            turn = turn.next(tile);
            k += DEPTH;
        }
        item += thread::grid_dim_x();
    }
}

/// Multiplies the stages of this block's tiles, and finishes the sums.
///
/// # Safety
/// See [`compute`]. The warpgroups that multiply call it together.
#[inline(always)]
unsafe fn multiply<'p, const A_ALONG: bool, const B_ALONG: bool, const TILES: usize, S: Stored>(
    ring: Ring,
    count: impl Fn() -> u32,
    matrix: impl Fn(u32) -> u32,
    place: impl Fn(u32) -> [u32; 2],
    range: impl Fn(u32) -> (u32, [u32; 2]),
    outputs: impl Fn(u32) -> Outputs<'p, S>,
    tile: Tile,
) {
    let own = thread::thread_idx_x() - WARPGROUP;
    // SAFETY: all lanes of the warp execute this.
    let warp = unsafe { Converged::assume() };
    // What the loops and the places of stages depend on is uniform: 3 to 4 % faster on an H200.
    let group = warp.uniform(own / WARPGROUP);
    let count = warp.uniform(count());
    // Computed again for each tile, as are the rows of the outputs: the compiler would keep either
    // in registers throughout the products.
    let staging = |half: u32| {
        let first = tile.staging(launder_reg(own / LANES)) + half * STAGING_LEN;
        // SAFETY: the warps' parts follow the stages in the shared memory that the contract
        // declares.
        unsafe { SharedTile::<u32>::new(first * 4, STAGING_LEN) }
    };
    let mut products = Products::new();
    let mut turn = Turn::FIRST;
    // Only a copy of the number is computed with, so that the number itself stays in a uniform
    // register.
    let mut item = thread::block_idx_x();
    let mut next = place(launder_reg(item));
    while item < count {
        let now = next;
        // The first row of tiles covers all columns. Other kernels have no code for the sums of
        // columns.
        let summed = const { !A_ALONG && !B_ALONG && size_of::<S>() == size_of::<f32>() }
            && outputs(0).columns.wanted
            && now[0] == 0;
        let mut chains = Chains::new();
        let mut sums = wgmma::undefined_sums();
        let (_, [first_k, end]) = range(matrix(launder_reg(item)));
        // The last stage may have fewer steps.
        let steps = warp.uniform((end - first_k).div_ceil(STEP));
        let (stages, rest) = (steps / (DEPTH / STEP), steps % (DEPTH / STEP));
        let mut last = turn;
        let mut stage = 0;
        while stage < stages {
            let [a, b] = ring.stage(turn);
            // SAFETY: the warpgroup executes this together, turn by turn. The stage is full, and is
            // freed after a wait for its products.
            unsafe {
                ring.wait_full(turn);
                products.multiply::<A_ALONG, B_ALONG, TILES>(&mut sums, a, group * GROUP_ROWS, b, stage > 0);
                if summed {
                    chains.add(b, own, tile.cols(), DEPTH / STEP);
                }
                products.wait::<1>();
                if summed {
                    // All lanes have read the last stage.
                    warp::sync_warp(u32::MAX);
                }
                ring.set_free_if(stage > 0, last);
            }
            (last, turn) = (turn, turn.next(tile));
            stage += 1;
        }
        if rest > 0 {
            let [a, b] = ring.stage(turn);
            // SAFETY: as above.
            unsafe {
                ring.wait_full(turn);
                let mut step = 0;
                while step < rest {
                    let add = stages + step > 0;
                    products.multiply_step::<A_ALONG, B_ALONG, TILES>(&mut sums, a, group * GROUP_ROWS, b, step, add);
                    products.wait::<1>();
                    step += 1;
                }
                if summed {
                    chains.add(b, own, tile.cols(), rest);
                }
            }
        }
        item += thread::grid_dim_x();
        // Computed while products are in flight.
        if item < count {
            next = place(launder_reg(item));
        }
        products.finish(&mut sums);
        // SAFETY: all lanes of the warp execute this, and the contract has accepted the arguments.
        unsafe {
            let converged = Converged::assume();
            if summed {
                // All lanes have read the stages.
                warp::sync_warp(u32::MAX);
            }
            ring.set_free_if(stages > 0, last);
            if rest > 0 {
                ring.set_free_if(true, turn);
                turn = turn.next(tile);
            }
            if steps == 0 {
                sums = wgmma::no_sums();
            }
            let Outputs { epilogue, columns } = outputs(matrix(launder_reg(item) - thread::grid_dim_x()));
            if summed {
                chains.finish(converged, columns, own, tile.cols(), now[1], epilogue.n);
            }
            let first = [launder_reg(now[0] + own / LANES * 16), now[1]];
            finish::<TILES, S>(converged, epilogue, first, sums, [staging(0), staging(1)]);
        }
    }
}
