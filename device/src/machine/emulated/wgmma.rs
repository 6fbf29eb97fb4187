//! Products of a warpgroup: each thread adds its own sums from shared memory by the rule of an
//! instruction, [`rule`]. In race mode the operands are read when the products start, and again
//! when a wait ends them. A write in between is therefore a race.

use crate::format::{Bf16, Format};
use crate::mma::fragments::quads_place;
use crate::mma::rule;
use crate::tile::SharedTile;
use crate::wgmma::{DEPTH, STEP, word_of, word_of_tf32};
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
        let line = quads_place()[0];
        let lanes = lanes(&a);
        products::begin();
        for (step, first_k) in [first_k, first_k + 8].into_iter().enumerate() {
            let row = |row: u32| -> [f32; 8] {
                core::array::from_fn(|k| {
                    let (lane, word) = (row as usize % 8 * 4 + k % 4, row as usize / 8 + k / 4 * 2);
                    // SAFETY: each lane's operand lives until `meet` below, which all lanes
                    // reach, as they reached this.
                    f32::from_bits(unsafe { (&*lanes[lane])[step][word] })
                })
            };
            add_columns(sums, [row(line), row(line + 8)], |first| {
                [0, 1, 2, 3].map(|column| {
                    let chunks = [0, 4].map(|k| b.chunk(word_of_tf32(first + column, first_k + k)));
                    core::array::from_fn(|k| f32::from_bits(chunks[k / 4][k % 4]))
                })
            });
        }
        products::end();
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

/// The values of a row or a column for one instruction of BF16.
type Values = [f32; STEP as usize];

/// Adds the products of a part of a stage.
#[track_caller]
fn multiply<const A_ALONG: bool, const B_ALONG: bool, const TILES: usize>(
    sums: &mut [[f32; 4]; TILES],
    a: SharedTile<u32>,
    first_row: u32,
    b: SharedTile<u32>,
    k: Range<u32>,
) {
    let row = first_row + thread::thread_idx_x() / 32 % 4 * 16 + quads_place()[0];
    products::begin();
    for first_k in k.step_by(STEP as usize) {
        let rows = [row, row + 8].map(|row| match A_ALONG {
            true => along_k(a, row, first_k),
            false => core::array::from_fn(|k| Bf16::value(a.get(word_of(false, row, first_k + k as u32)), row % 2)),
        });
        add_columns(sums, rows, |column| match B_ALONG {
            true => [0, 1, 2, 3].map(|next| along_k(b, column + next, first_k)),
            false => across_k(b, column, first_k),
        });
    }
    products::end();
}

/// Returns the values of a row that is stored along k.
#[track_caller]
fn along_k(stage: SharedTile<u32>, row: u32, first_k: u32) -> Values {
    let chunks = [0, 8].map(|k| stage.chunk(word_of(true, row, first_k + k)));
    core::array::from_fn(|k| Bf16::value(chunks[k / 8][k % 8 / 2], k as u32 % 2))
}

/// Returns the values of four neighboring columns that are stored across k.
#[track_caller]
fn across_k(stage: SharedTile<u32>, column: u32, first_k: u32) -> [Values; 4] {
    let mut columns = [[0.0; _]; 4];
    for k in 0..STEP {
        let words = stage.pair(word_of(false, column, first_k + k));
        for (at, column) in columns.iter_mut().enumerate() {
            column[k as usize] = Bf16::value(words[at / 2], at as u32 % 2);
        }
    }
    columns
}

/// Adds the products of a lane's two rows with all its columns, as one instruction does. `columns`
/// returns four neighbors.
#[track_caller]
fn add_columns<const TILES: usize, const K: usize>(
    sums: &mut [[f32; 4]; TILES],
    rows: [[f32; K]; 2],
    columns: impl Fn(u32) -> [[f32; K]; 4],
) {
    const { assert!(TILES.is_multiple_of(4)) };
    let first = quads_place()[1];
    // A lane has four columns of each pair of tiles: of one tile in its first row, and of the other
    // tile in its second.
    for (group, sums) in (0..).zip(sums.chunks_exact_mut(4)) {
        let columns = [columns(first + 32 * group), columns(first + 32 * group + 16)];
        let columns: [[f32; 8]; K] = core::array::from_fn(|k| core::array::from_fn(|at| columns[at / 4][at % 4][k]));
        let mut both = [0, 1].map(|row| core::array::from_fn(|at| sums[at / 4 * 2 + row][at % 4]));
        rule::add(&mut both, rows.each_ref(), &columns);
        for (row, both) in both.iter().enumerate() {
            (0..8).for_each(|at| sums[at / 4 * 2 + row][at % 4] = both[at]);
        }
    }
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
