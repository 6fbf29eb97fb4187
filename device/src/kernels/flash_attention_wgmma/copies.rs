//! The copies of rows to a block's shared memory, by its first warpgroup.
//!
//! ```text
//! all rows of a tile exist   boxes of 64 rows and 64 columns, by the copy engine (TMA)
//! some do not                16 bytes by a thread at a time (cp.async), and zeros
//! ```
//! Each warp arrives once for an array: with the boxes that it copies, or when the copies of its
//! lanes have ended.
//!
//! Invariant: everything past the rows or columns of a head is 0 in shared memory.

use super::heads::{Head, Inputs};
use super::rows::heads_of_group;
use super::shape::{GROUP_ROWS, PART, ROW, WARPGROUP};
use super::tile::Memory;
use crate::block::launder_reg;
use crate::flash_attention::place::Rows;
use crate::machine::hints::no_unroll;
use crate::machine::mbarrier::Barrier;
use crate::machine::shared::{commit_copies, wait_copies};
use crate::machine::wgmma::fence_async;
use crate::mma::fragments::CHUNK_WORDS;
use crate::tile::SharedTile;
use crate::unroll_on_gpu;
use crate::warp::LANES;
use cuda_std::{thread, warp};
use half::bf16;

/// The chunks of a row of a part.
const CHUNKS: u32 = ROW / CHUNK_WORDS;
/// The warps that copy.
const WARPS: u32 = WARPGROUP / LANES;

impl<const GROUPS: u32, const TILE: u32, const PARTS: u32, const SLOTS: u32> Memory<GROUPS, TILE, PARTS, SLOTS> {
    /// The rows that the copying warpgroup copies at once, without the copy engine.
    const PASS: u32 = WARPGROUP / (CHUNKS * PARTS);

    /// Copies the block's resident rows of each array, from token `first` on. The barrier
    /// [`resident_full`](Self::resident_full) counts them.
    ///
    /// # Safety
    /// The copying warpgroup calls it when the resident rows are free. See [`copy`](Self::copy) for
    /// the rows.
    #[inline(always)]
    pub(super) unsafe fn fill_resident<const ARRAYS: usize>(
        self,
        heads: [Head<'_>; ARRAYS],
        first: u32,
        bounds: [u32; 2],
    ) {
        let full = self.resident_full();
        let all_exist = first + Self::RESIDENT <= bounds[0];
        // SAFETY: `new` has initialized the barriers; the caller guarantees the rest.
        unsafe {
            if all_exist && warp::lane_id() == 0 {
                full.arrive_expecting(ARRAYS as u32 * Self::own_bytes(Self::RESIDENT));
            }
            unroll_on_gpu!(array < 2 => {
                if array < ARRAYS {
                    if all_exist {
                        let at = self.resident_start(array as u32);
                        Self::copy_boxes(at, Self::RESIDENT, full, heads[array], first);
                    } else {
                        let to = self.resident(array as u32);
                        Self::copy(to, Self::RESIDENT, heads[array].rows(), first, bounds);
                    }
                }
            });
            if !all_exist {
                arrive_after_copies(full);
            }
        }
    }

    /// Copies the array of a turn when its slot is free: `TILE` rows from token `first` on.
    ///
    /// # Safety
    /// The copying warpgroup calls it, for ascending turns. See [`copy`](Self::copy) for the rows.
    #[inline(always)]
    pub(super) unsafe fn fill(self, turn: u32, array: u32, head: Head<'_>, first: u32, bounds: [u32; 2]) {
        let full = self.full(turn % SLOTS, array);
        // SAFETY: `new` has initialized the barriers; the caller guarantees the rest.
        unsafe {
            self.free(turn % SLOTS, array).wait((turn / SLOTS + 1) % 2);
            if first + TILE <= bounds[0] {
                if warp::lane_id() == 0 {
                    full.arrive_expecting(Self::own_bytes(TILE));
                }
                Self::copy_boxes(self.slot_start(turn % SLOTS, array), TILE, full, head, first);
            } else {
                Self::copy(self.slot(turn % SLOTS, array), TILE, head.rows(), first, bounds);
                arrive_after_copies(full);
            }
        }
    }

    /// Copies a part of array 0 of a turn for each multiplying warpgroup, if `exists` is true for
    /// it, when its slot is free: `words` words of `values`, from the element `start` on, a
    /// multiple of eight.
    ///
    /// # Safety
    /// The copying warpgroup calls it, for ascending turns. The words lie inside `values`, and the
    /// parts in the array.
    #[inline(always)]
    pub(super) unsafe fn fill_parts(
        self,
        turn: u32,
        words: u32,
        values: &[bf16],
        start: impl Fn(u32) -> usize,
        exists: impl Fn(u32) -> bool,
    ) {
        const { assert!(GROUPS <= WARPS) };
        let (group, full) = (thread::thread_idx_x() / LANES, self.full(turn % SLOTS, 0));
        // SAFETY: `new` has initialized the barriers; the caller guarantees the rest.
        unsafe {
            self.free(turn % SLOTS, 0).wait((turn / SLOTS + 1) % 2);
            if warp::lane_id() == 0 {
                let copies = group < GROUPS && exists(group);
                full.arrive_expecting(if copies { words * 4 } else { 0 });
                if copies {
                    let to = SharedTile::new((self.slot_start(turn % SLOTS, 0) + group * words) * 4, words);
                    full.copy_words(to, words, values, start(group));
                }
            }
        }
    }

    /// Copies q, dout and both of `values` of the query heads of a key head, one tile a turn: the
    /// tiles in `tiles` of each head's tokens below `limit`, from turn `turn` on. Q is array 0, and
    /// dout array 1. Returns the turn after them.
    ///
    /// # Safety
    /// The copying warpgroup calls it, once. The contract has checked that all heads lie inside the
    /// inputs and `values`.
    #[inline(always)]
    pub(super) unsafe fn fill_queries(
        self,
        inputs: &Inputs<'_>,
        (sample, kv_head): (usize, u32),
        values: [&[f32]; 2],
        [from, until]: [u32; 2],
        limit: u32,
        mut turn: u32,
    ) -> u32 {
        let problem = &inputs.problem;
        let bounds = [limit, problem.width];
        // SAFETY: the contract has checked that there are key heads, and that the heads lie inside
        // the arguments.
        unsafe {
            let heads = heads_of_group(problem);
            let mut head = kv_head * heads;
            let end = head + heads;
            while head < end {
                let (q, dout) = (inputs.head(0, sample, head), inputs.output_head(sample, head));
                let mut tile = from;
                while tile < until {
                    let start = problem.statistics(launder_reg(sample as u32) as usize, launder_reg(head));
                    self.fill_numbers(turn, values, start, tile * TILE, limit);
                    self.fill(turn, 0, q, tile * TILE, bounds);
                    self.fill(turn, 1, dout, tile * TILE, bounds);
                    (turn, tile) = (turn + 1, tile + 1);
                }
                head += 1;
            }
        }
        turn
    }

    /// Copies the values of a turn's rows when array 0 of its slot is free, with 0 for tokens that
    /// do not exist. The barrier of array 0 waits for them.
    ///
    /// # Safety
    /// The copying warpgroup calls it, before [`fill`](Self::fill) of array 0. The values of the
    /// tokens below `limit` lie inside `values`.
    #[inline(always)]
    unsafe fn fill_numbers(self, turn: u32, values: [&[f32]; 2], start: usize, first: u32, limit: u32) {
        const { assert!(TILE.is_multiple_of(LANES)) };
        let row = thread::thread_idx_x();
        // SAFETY: `new` has initialized the barriers. Whole warps have rows.
        unsafe {
            self.free(turn % SLOTS, 0).wait((turn / SLOTS + 1) % 2);
            if row < TILE {
                let token = first + row;
                let there = token < limit;
                unroll_on_gpu!(which < 2 => {
                    let to = self.numbers(turn % SLOTS, which as u32);
                    // SAFETY: the caller guarantees that the token has a value if `there` is true.
                    to.copy_or_zero(row, values[which], start + token as usize, there);
                });
                self.full(turn % SLOTS, 0).await_copies();
                // Before the warp's arrival.
                warp::sync_warp(u32::MAX);
            }
        }
    }

    /// Returns the bytes of the boxes that this warp copies, of `count` rows.
    #[inline(always)]
    fn own_bytes(count: u32) -> u32 {
        let boxes = count / GROUP_ROWS * PARTS;
        (boxes + WARPS - 1 - thread::thread_idx_x() / LANES) / WARPS * GROUP_ROWS * ROW * 4
    }

    /// Starts to copy `count` rows from token `first` on, to the words of shared memory from `at`
    /// on. The first lane of each warp copies every fourth box.
    ///
    /// # Safety
    /// The copying warpgroup calls it. The rows exist, the words are free, and an arrival of each
    /// warp at `full` expects [`own_bytes`](Self::own_bytes).
    #[inline(always)]
    unsafe fn copy_boxes(at: u32, count: u32, full: Barrier, head: Head<'_>, first: u32) {
        let (of_part, (map, head_row, matrix)) = (count / GROUP_ROWS, head.place());
        let mut number = thread::thread_idx_x() / LANES;
        if warp::lane_id() == 0 {
            while number < of_part * PARTS {
                let (part, row) = (number / of_part, number % of_part * GROUP_ROWS);
                // SAFETY: the box lies inside the rows' place, on 1024 bytes.
                unsafe {
                    let to = SharedTile::new((at + (part * count + row) * ROW) * 4, GROUP_ROWS * ROW);
                    full.copy_box(to, map, [part * PART, head_row + first + row, matrix]);
                }
                number += WARPS;
            }
        }
    }

    /// Starts to copy `count` rows from token `first` on. Rows from `limit` on, and columns from
    /// `width` on, become 0.
    ///
    /// # Safety
    /// The copying warpgroup calls it. The rows below `limit` lie inside `rows.values`, with
    /// `width` columns each, on 16-byte boundaries. The tile has `count` rows.
    #[inline(always)]
    unsafe fn copy(to: SharedTile<u32>, count: u32, rows: Rows<'_, bf16>, first: u32, [limit, width]: [u32; 2]) {
        // The assembler computes nothing of this ahead, where registers would hold it meanwhile.
        // SAFETY: the lanes of the warp are converged.
        let thread = unsafe { warp::warp_shuffle_idx(u32::MAX, thread::thread_idx_x(), warp::lane_id(), LANES).0 };
        let (row, chunk) = (thread / (CHUNKS * PARTS), thread % (CHUNKS * PARTS));
        let place = (chunk / CHUNKS * count + row) * ROW + ((chunk % CHUNKS) ^ (row % 8)) * CHUNK_WORDS;
        // Steps of four rows alternate between the halves of the swizzle.
        let below = |down: u32| (place ^ (down % 8 * CHUNK_WORDS)) + down * ROW;
        let mut from = rows.start + (first + row) as usize * rows.stride + (chunk * 8) as usize;
        let apart = Self::PASS as usize * rows.stride;
        let mut down = 0;
        while down < count {
            no_unroll();
            let there = first + row + down < limit && chunk * 8 < width;
            // SAFETY: the caller guarantees that the chunk lies inside the rows if `there` is true.
            unsafe { to.copy_chunk_or_zero(below(down), rows.values, from, there) };
            // A loop: its addresses at once would take more registers than there are.
            (down, from) = (launder_reg(down + Self::PASS), from + apart);
        }
    }
}

/// Waits for the copies of this warp's lanes, and arrives for the warp. Wgmma sees the rows: boxes
/// need no fence, so the fence is here and not before the products.
///
/// # Safety
/// All lanes of the warp call it together. The barrier is initialized.
#[inline(always)]
unsafe fn arrive_after_copies(full: Barrier) {
    commit_copies();
    wait_copies::<0>();
    fence_async();
    // SAFETY: the function's contract.
    unsafe {
        warp::sync_warp(u32::MAX);
        full.arrive_if(warp::lane_id() == 0);
    }
}
