//! The stages of a block, and the barriers at which warpgroups pass them to each other.
//!
//! ```text
//! warpgroup 0   waits until a stage is free -> starts its copies, which the barrier counts -> ..
//! the others    wait until a stage is full -> multiply -> free it -> ..
//! ```
//! A stage has boxes of rows of 128 bytes ([`box_rows`]): the panels of A, then those of B, in the
//! layout that [`wgmma`](crate::wgmma) reads. The copy engine writes zeros past the end of the rows
//! and of k.
//!
//! Invariant: the warpgroups use the same stages in the same order.

use super::tile::Tile;
use crate::machine::mbarrier::{Barrier, fence_barriers};
use crate::tile::SharedTile;
use crate::wgmma::{self, BoxElement, ROW_WORDS, box_rows};
use cuda_std::tensor_map::TensorMap;
use cuda_std::{thread, warp};

/// The stages of a block.
#[derive(Clone, Copy)]
pub(crate) struct Ring {
    tile: Tile,
}

/// A turn of a warpgroup: the stage that it uses, and the parity of the stage's use.
#[derive(Clone, Copy)]
pub(crate) struct Turn {
    stage: u32,
    parity: u32,
}

impl Turn {
    pub(crate) const FIRST: Self = Self { stage: 0, parity: 0 };

    /// Returns the turn after this one.
    #[inline(always)]
    pub(crate) fn next(self, tile: Tile) -> Self {
        let Self { stage, parity } = self;
        if stage + 1 == tile.stages() {
            Self { stage: 0, parity: parity ^ 1 }
        } else {
            Self { stage: stage + 1, parity }
        }
    }
}

impl Ring {
    /// Returns the stages of a block, with initialized barriers.
    ///
    /// # Safety
    /// The contract declares [`Tile::shared_bytes`]. All threads of the block call it together.
    #[inline(always)]
    pub(crate) unsafe fn new(tile: Tile) -> Self {
        wgmma::align_stages();
        let ring = Self { tile };
        if thread::thread_idx_x() == 0 {
            let mut stage = 0;
            while stage < tile.stages() {
                // SAFETY: one thread initializes the barriers, which lie after the other memory.
                unsafe {
                    ring.full(stage).init(1);
                    ring.free(stage).init(tile.warps());
                }
                stage += 1;
            }
            fence_barriers();
        }
        thread::sync_threads();
        ring
    }

    #[inline(always)]
    fn full(self, stage: u32) -> Barrier {
        Barrier::new(self.tile.barrier(stage))
    }

    #[inline(always)]
    fn free(self, stage: u32) -> Barrier {
        Barrier::new(self.tile.barrier(self.tile.stages() + stage))
    }

    /// Returns rows of 128 bytes of a stage.
    #[inline(always)]
    fn rows(self, stage: u32, first: u32, count: u32) -> SharedTile<u32> {
        let word = stage * self.tile.stage_len() + first * ROW_WORDS;
        // SAFETY: the stages come first in the shared memory that the contract declares.
        unsafe { SharedTile::new(word * 4, count * ROW_WORDS) }
    }

    /// Returns A's and B's part of a turn's stage.
    #[inline(always)]
    pub(crate) fn stage(self, turn: Turn) -> [SharedTile<u32>; 2] {
        let Tile { columns, .. } = self.tile;
        let rows = self.tile.rows();
        [self.rows(turn.stage, 0, rows), self.rows(turn.stage, rows, columns)]
    }

    /// Starts the copies of a turn's stage when it is free: rows of A, and columns of B, from
    /// `first` on, of the k from `first_k` on.
    ///
    /// # Safety
    /// One thread calls it, for ascending turns. The maps are those of the kernel's operands, in
    /// these layouts.
    #[inline(always)]
    pub(crate) unsafe fn fill<const A_ALONG: bool, const B_ALONG: bool, T: BoxElement>(
        self,
        turn: Turn,
        maps: [TensorMap<T>; 2],
        matrices: [u32; 2],
        first: [u32; 2],
        first_k: u32,
    ) {
        let full = self.full(turn.stage);
        // SAFETY: `new` has initialized the barriers.
        unsafe {
            self.free(turn.stage).wait(turn.parity ^ 1);
            full.arrive_expecting(4 * self.tile.stage_len());
        }
        let place =
            |is_along, across, matrix| if is_along { [first_k, across, matrix] } else { [across, first_k, matrix] };
        // Two loops, which the compiler unrolls: one for both operands stays a loop where their
        // boxes differ, and takes 1.3 times as long.
        let mut row = 0;
        while row < self.tile.rows() {
            let to = self.rows(turn.stage, row, box_rows::<T>(A_ALONG));
            // SAFETY: the stage is free, and lies on 1024 bytes.
            unsafe { full.copy_box(to, maps[0], place(A_ALONG, first[0] + row, matrices[0])) };
            row += box_rows::<T>(A_ALONG);
        }
        let mut column = 0;
        while column < self.tile.columns {
            let to = self.rows(turn.stage, self.tile.rows() + column, box_rows::<T>(B_ALONG));
            // SAFETY: as before.
            unsafe { full.copy_box(to, maps[1], place(B_ALONG, first[1] + column, matrices[1])) };
            column += box_rows::<T>(B_ALONG);
        }
    }

    /// Waits until a turn's stage is full.
    ///
    /// # Safety
    /// All lanes of the warp call it together, for ascending turns.
    #[inline(always)]
    pub(crate) unsafe fn wait_full(self, turn: Turn) {
        // SAFETY: `new` has initialized the barrier.
        unsafe { self.full(turn.stage).wait(turn.parity) };
    }

    /// Frees a turn's stage if `condition` is true, once for each warp.
    ///
    /// # Safety
    /// All lanes of a warp that multiplies call it together, once for each turn. They have waited
    /// for their products. If the lanes themselves have read the stage, a
    /// [`sync_warp`](warp::sync_warp) has ordered these reads before.
    #[inline(always)]
    pub(crate) unsafe fn set_free_if(self, condition: bool, turn: Turn) {
        // SAFETY: `new` has initialized the barrier.
        unsafe { self.free(turn.stage).arrive_if(condition && warp::lane_id() == 0) };
    }
}
