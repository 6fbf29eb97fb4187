//! A block's tiles of the output, one after another: stages arrive in shared memory, warpgroups
//! multiply them, and the epilogue finishes the sums.
//!
//! ```text
//! stage s:   wait for own copies of s, fence, barrier     all threads have waited for the products of s - 2
//!            start to copy s + 2                          into the slot of s - 2
//!            start the products of s
//!            wait for the products of s - 1
//! ```
//! The copies run two stages ahead across tiles, so the first stages of the next tile arrive while
//! the epilogue writes this one.
//!
//! A product whose tiles are all whole has a loop of its own, without checks of rows: `WHOLE`.
//!
//! Invariant: the products of an output are accumulated in the same order in every tile.

use super::columns::Chains;
use super::finish::{finish, finish_inside};
use super::operand::Part;
use super::tile::{AHEAD, STAGES, STAGING_LEN, Tile};
use crate::block::launder_reg;
use crate::matmul::epilogue::Epilogue;
use crate::matmul_bf16::block::Problem;
use crate::stored::Stored;
use crate::tile::{SharedTile, commit_copies, wait_copies};
use crate::warp::Converged;
use crate::wgmma::{self, DEPTH, GROUP_ROWS, Products, ROW_WORDS};
use cuda_std::thread;

/// The location of a tile: its batch, its split, and its first row and column.
#[derive(Clone, Copy)]
pub(super) struct Place {
    pub(super) batch: u32,
    pub(super) split: u32,
    pub(super) first: [u32; 2],
}

/// The copies of a tile's stages.
struct Feed<'p, const A_ALONG: bool, const B_ALONG: bool, const LINES: u32> {
    left: Part<'p, A_ALONG, LINES>,
    right: Part<'p, B_ALONG, LINES>,
    /// The next stage's first k, and one past the last k.
    k: [u32; 2],
    /// True if no copy needs a check of rows, and k ends with a chunk.
    is_whole: bool,
}

impl<'p, const A_ALONG: bool, const B_ALONG: bool, const LINES: u32> Feed<'p, A_ALONG, B_ALONG, LINES> {
    #[inline(always)]
    fn new<S>(problem: Problem<'p, S>, first: [u32; 2], tile: Tile) -> Self {
        let Problem { a, b, k, .. } = problem;
        let (left, right) = (Part::new(a, first[0], k[0]), Part::new(b, first[1], k[0]));
        let is_whole = left.has(tile.rows()) && right.has(tile.lines()) && (k[1] - k[0]).is_multiple_of(8);
        Self { left, right, k, is_whole }
    }
}

/// Computes the tiles of this block: every `grid_dim_x`th of `count`. `place` returns a tile's
/// location by its number, and `problem` the problem at a location.
///
/// # Safety
/// The contract has accepted the problems, and the const parameters are those of `tile`: `TILES`
/// mma tiles of eight columns, its passes, and the `LINES` of a [`Part`]. If `WHOLE` is true,
/// [`Tile::fits`] is, and rows of the output begin on 16 bytes. All threads of the block call it
/// together.
#[inline(always)]
pub(super) unsafe fn compute<
    'p,
    const A_ALONG: bool,
    const B_ALONG: bool,
    const TILES: usize,
    const A_PASSES: usize,
    const B_PASSES: usize,
    const LINES: u32,
    const WHOLE: bool,
    S: Stored,
>(
    count: u32,
    place: impl Fn(u32) -> Place,
    problem: impl Fn(Place) -> Problem<'p, S>,
    tile: Tile,
) {
    wgmma::align_stages();
    let slot = |number: u32| {
        let offset = number * tile.stage_len() * 4;
        // SAFETY: the parts follow each other in the shared memory that the contract declares.
        unsafe {
            [
                SharedTile::<u32>::new(offset, tile.rows() * ROW_WORDS),
                SharedTile::<u32>::new(offset + tile.rows() * ROW_WORDS * 4, tile.lines() * ROW_WORDS),
            ]
        }
    };
    let after = |slot: u32| if slot + 1 == STAGES { 0 } else { slot + 1 };
    // The first row and column that the products of a tile cover. The last tiles are moved back.
    let covered = |Place { first: [row, col], .. }: Place, Epilogue { m, n, .. }: Epilogue<'p, S>| {
        if WHOLE { [row.min(m - tile.rows()), col.min(n - tile.cols())] } else { [row, col] }
    };
    let start = |place: Place| {
        let problem = problem(place);
        Feed::<A_ALONG, B_ALONG, LINES>::new(problem, covered(place, problem.epilogue), tile)
    };
    // The tile that is copied. Without k there is nothing to copy.
    let mut next = place(thread::block_idx_x());
    let mut feed = start(next);
    let mut copied = if feed.k[0] == feed.k[1] { count } else { thread::block_idx_x() };
    let mut to = 0;
    macro_rules! fetch {
        () => {
            if copied < count {
                let [a, b] = slot(to);
                // SAFETY: the contract has accepted the operands. All rows exist if `WHOLE` or
                // `is_whole` is true, and then k ends with a chunk.
                unsafe {
                    if WHOLE || feed.is_whole {
                        feed.left.copy_rows::<A_PASSES>(a, feed.k[1] - feed.k[0]);
                        feed.right.copy_rows::<B_PASSES>(b, feed.k[1] - feed.k[0]);
                    } else {
                        feed.left.copy_existing::<A_PASSES>(a, feed.k);
                        feed.right.copy_existing::<B_PASSES>(b, feed.k);
                    }
                }
                to = after(to);
                if feed.k[1] - feed.k[0] > DEPTH {
                    feed.k[0] += DEPTH;
                } else {
                    copied += thread::grid_dim_x();
                    if copied < count {
                        next = place(copied);
                        feed = start(next);
                    }
                }
            }
            commit_copies();
        };
    }
    for _ in 0..AHEAD {
        fetch!();
    }
    let (group, warp) = (thread::thread_idx_x() / 128, thread::thread_idx_x() / 32 % 4);
    // SAFETY: the warps' parts follow the stages in the shared memory that the contract declares.
    let staging = unsafe { SharedTile::<u32>::new(tile.staging(thread::thread_idx_x() / 32) * 4, STAGING_LEN) };
    let mut products = Products::new();
    let mut from = 0;
    // Only a copy of the number is computed with, so that the number itself stays in a uniform
    // register.
    let mut item = thread::block_idx_x();
    while item < count {
        // Each whole tile has more than `AHEAD` stages, so this tile is still the one being copied.
        let now = if WHOLE { next } else { place(launder_reg(item)) };
        let Problem { columns, k: [first_k, end], .. } = problem(now);
        // The first row of tiles covers all columns. Other kernels have no code for the sums of
        // columns.
        let summed =
            const { !A_ALONG && !B_ALONG && size_of::<S>() == size_of::<f32>() } && columns.wanted && now.first[0] == 0;
        let mut chains = Chains::new();
        let mut sums = wgmma::undefined_sums();
        let stages = (end - first_k).div_ceil(DEPTH);
        let mut stage = 0;
        while stage < stages {
            wait_copies::<{ AHEAD - 1 }>();
            wgmma::fence_async();
            thread::sync_threads();
            fetch!();
            let [a, b] = slot(from);
            // SAFETY: this thread and, by the barrier, all threads have copied the stage. Its slot
            // is filled again after the next barrier but one, and all have waited for these
            // products before that.
            unsafe { products.multiply::<A_ALONG, B_ALONG, TILES>(&mut sums, a, group * GROUP_ROWS, b, stage > 0) };
            if summed {
                chains.add(b, tile.cols());
            }
            products.wait::<1>();
            from = after(from);
            stage += 1;
        }
        products.finish(&mut sums);
        if !WHOLE && stages == 0 {
            sums = wgmma::no_sums();
        }
        let Problem { b: right, epilogue, columns, .. } = problem(now);
        let first = covered(now, epilogue);
        // SAFETY: all lanes of the warp execute this, and the contract has accepted the problem.
        unsafe {
            let converged = Converged::assume();
            if summed {
                chains.finish(converged, columns, tile.cols(), first[1], [now.first[1], right.rows]);
            }
            let first = [first[0] + group * GROUP_ROWS + 16 * warp, first[1]];
            if WHOLE {
                finish_inside::<TILES, S>(converged, epilogue, first, now.first, sums, staging);
            } else {
                finish::<TILES, S>(converged, epilogue, first, sums, staging);
            }
        }
        item += thread::grid_dim_x();
    }
}
