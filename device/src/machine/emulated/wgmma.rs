//! Products of a warpgroup: each thread adds its own sums from shared memory, k ascending. In race
//! mode the operands are read when the products start, and again when a wait ends them. A write in
//! between is therefore a race.

use crate::machine::mma::add_products;
use crate::tile::SharedTile;
use crate::wgmma::{DEPTH, STEP, element, word_of_tf32};
use core::ops::Range;
use cuda_std::emulator::{lanes, meet, products};
use cuda_std::thread;

/// A warpgroup's products that are in flight: the operands of each group, the oldest first.
#[derive(Clone, Copy, Default)]
pub struct Products {
    groups: [Option<[SharedTile<u32>; 2]>; 2],
}

impl Products {
    /// Returns a state without products in flight.
    pub fn new() -> Self {
        Self { groups: [None; 2] }
    }

    /// Adds the products of 64 rows of A, from `first_row` of its stage on, with all columns of B.
    /// They are added to the sums, or replace them if `add` is false.
    ///
    /// # Safety
    /// See the GPU's version. A violation is a race, which race mode reports.
    #[track_caller]
    pub unsafe fn multiply<const A_ALONG: bool, const B_ALONG: bool, const TILES: usize>(
        &mut self,
        sums: &mut [[f32; 4]; TILES],
        a: SharedTile<u32>,
        first_row: u32,
        b: SharedTile<u32>,
        add: bool,
    ) {
        if !add {
            *sums = [[0.0; 4]; TILES];
        }
        multiply::<A_ALONG, B_ALONG, TILES>(sums, a, first_row, b, 0..DEPTH);
        self.start(a, b);
    }

    /// Makes the part of [`multiply`](Self::multiply) with 16 k, the `step`th of the stage.
    ///
    /// # Safety
    /// See the GPU's version. A violation is a race, which race mode reports.
    #[track_caller]
    pub unsafe fn multiply_step<const A_ALONG: bool, const B_ALONG: bool, const TILES: usize>(
        &mut self,
        sums: &mut [[f32; 4]; TILES],
        a: SharedTile<u32>,
        first_row: u32,
        b: SharedTile<u32>,
        step: u32,
        add: bool,
    ) {
        if !add {
            *sums = [[0.0; 4]; TILES];
        }
        multiply::<A_ALONG, B_ALONG, TILES>(sums, a, first_row, b, step * STEP..(step + 1) * STEP);
        self.start(a, b);
    }

    /// Adds the products of a warp's 16 rows of A, two instructions of TF32 in the registers of its
    /// lanes, with all columns of B over 16 k from `first_k` of its stage on. They are added to the
    /// sums, or replace them if `add` is false.
    ///
    /// # Safety
    /// See the GPU's version. A violation is a race, which race mode reports.
    #[track_caller]
    pub unsafe fn multiply_tf32<const TILES: usize>(
        &mut self,
        sums: &mut [[f32; 4]; TILES],
        a: [[u32; 4]; 2],
        b: SharedTile<u32>,
        first_k: u32,
        add: bool,
    ) {
        if !add {
            *sums = [[0.0; 4]; TILES];
        }
        let lanes = lanes(&a);
        let left = |row: u32, k: u32| {
            let (lane, word) = (row % 8 * 4 + k % 4, row / 8 + k % 8 / 4 * 2);
            // SAFETY: each lane's operand lives until `meet` below, which all lanes reach,
            // as they reached this.
            f32::from_bits(unsafe { (*lanes[lane as usize])[k as usize / 8][word as usize] })
        };
        let mut rows = [*sums];
        let right = |column, k| f32::from_bits(b.get(word_of_tf32(column, first_k + k)));
        products::begin();
        add_products(&mut rows, [0, 0], 0..16, left, right);
        products::end();
        *sums = rows[0];
        meet();
        self.start(b, b);
    }

    /// Records products that have started.
    fn start(&mut self, a: SharedTile<u32>, b: SharedTile<u32>) {
        assert!(self.groups[0].is_none(), "at most two groups are in flight");
        self.groups = [self.groups[1], Some([a, b])];
    }

    /// Waits until at most the `PENDING` newest groups of all lanes are in flight.
    #[track_caller]
    pub fn wait<const PENDING: u32>(&mut self) {
        let done = self.groups.len() - PENDING as usize;
        for group in &mut self.groups[..done] {
            let Some(operands) = group.take() else { continue };
            // Two threads of each warpgroup stand for all of its reads: one of them is not the
            // thread that has written too early.
            if thread::thread_idx_x() % 128 < 2 {
                products::begin();
                operands.iter().for_each(|operand| operand.reread());
                products::end();
            }
        }
        products::wait();
    }

    /// Waits for all products. Then the sums may be read.
    #[track_caller]
    pub fn finish<const TILES: usize>(&mut self, _: &mut [[f32; 4]; TILES]) {
        self.wait::<0>();
    }
}

/// Adds the products of a part of a stage.
#[track_caller]
fn multiply<const A_ALONG: bool, const B_ALONG: bool, const TILES: usize>(
    sums: &mut [[f32; 4]; TILES],
    a: SharedTile<u32>,
    first_row: u32,
    b: SharedTile<u32>,
    k: Range<u32>,
) {
    let mut rows = [*sums];
    let origin = [first_row + thread::thread_idx_x() / 32 % 4 * 16, 0];
    let left = |row, k| element(a, A_ALONG, row, k);
    let right = |column, k| element(b, B_ALONG, column, k);
    products::begin();
    add_products(&mut rows, origin, k, left, right);
    products::end();
    *sums = rows[0];
}

/// Returns zeros.
pub fn no_sums<const TILES: usize>() -> [[f32; 4]; TILES] {
    [[0.0; 4]; TILES]
}

/// Returns sums of any value, for products that replace them: NaN.
pub fn undefined_sums<const TILES: usize>() -> [[f32; 4]; TILES] {
    [[f32::NAN; 4]; TILES]
}

/// Does nothing: all accesses are synchronous.
pub fn fence_async() {}

/// Does nothing: the layout of a stage does not depend on addresses.
pub fn align_stages() {}
