//! A block's tiles of the output, one after another: stages arrive in shared memory, warpgroups
//! multiply them, and the epilogue finishes the sums.
//!
//! ```text
//! stage s:   wait for own copies of s, fence, barrier     all threads have waited for the products of s - 2
//!            start the products of s, first part
//!            start to copy s + 2                          into the slot of s - 2
//!            start the products of s, second part
//!            wait for the products of s - 1
//! ```
//! The copies run two stages ahead across tiles, so the first stages of the next tile arrive while
//! the epilogue writes this one.
//!
//! Invariant: the products of an output are accumulated in the same order in every tile.

use super::columns::Chains;
use super::finish::finish;
use super::operand::Part;
use super::tile::{AHEAD, STAGES, STAGING_LEN, Tile};
use crate::block::launder_reg;
use crate::matmul_bf16::block::Problem;
use crate::stored::Stored;
use crate::tile::{SharedTile, commit_copies, wait_copies};
use crate::warp::Converged;
use crate::wgmma::{self, DEPTH, GROUP_ROWS, Products, ROW_WORDS};
use cuda_std::thread;

/// The copies of a tile's stages.
struct Feed<'p, const A_ALONG: bool, const B_ALONG: bool, const LINES: u32> {
    left: Part<'p, A_ALONG, LINES>,
    right: Part<'p, B_ALONG, LINES>,
    /// The first k of the first stage, and one past the last k.
    k: [u32; 2],
    /// The number of stages.
    stages: u32,
    /// The number of stages that both operands fill completely: their copies need no bounds checks.
    whole: u32,
}

impl<'p, const A_ALONG: bool, const B_ALONG: bool, const LINES: u32> Feed<'p, A_ALONG, B_ALONG, LINES> {
    #[inline(always)]
    fn new<S>((problem, first): (Problem<'p, S>, [u32; 2]), tile: Tile) -> Self {
        let Problem { a, b, k, .. } = problem;
        let (left, right) = (Part::new(a, first[0], k[0]), Part::new(b, first[1], k[0]));
        let whole = if left.has(tile.rows()) && right.has(tile.lines()) { (k[1] - k[0]) / DEPTH } else { 0 };
        Self { left, right, k, stages: (k[1] - k[0]).div_ceil(DEPTH), whole }
    }
}

/// Computes the tiles of this block: every `grid_dim_x`th of `count`. `problem` returns the problem
/// of a tile by its number, and the tile's first row and column.
///
/// # Safety
/// The contract has accepted the problems, and the const parameters are those of `tile`: `TILES`
/// mma tiles of eight columns, its passes, and the `LINES` of a [`Part`]. All threads of the block
/// call it together.
#[inline(always)]
pub(super) unsafe fn compute<
    'p,
    const A_ALONG: bool,
    const B_ALONG: bool,
    const TILES: usize,
    const A_PASSES: usize,
    const B_PASSES: usize,
    const LINES: u32,
    S: Stored,
>(
    count: u32,
    problem: impl Fn(u32) -> (Problem<'p, S>, [u32; 2]),
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
    let after = |slot: u32| (slot + 1) % STAGES;
    let mut feed = Feed::<A_ALONG, B_ALONG, LINES>::new(problem(thread::block_idx_x()), tile);
    // The tile and the stage that are copied next. Without k there is nothing to copy.
    let mut copied = if feed.stages == 0 { count } else { thread::block_idx_x() };
    let mut ahead = 0;
    macro_rules! fetch {
        ($to:expr) => {
            if copied < count {
                let [a, b] = slot($to);
                // SAFETY: the contract has accepted the operands, and a whole stage exists.
                unsafe {
                    if ahead < feed.whole {
                        feed.left.copy_whole::<A_PASSES>(a);
                        feed.right.copy_whole::<B_PASSES>(b);
                    } else {
                        let k = [feed.k[0] + ahead * DEPTH, feed.k[1]];
                        feed.left.copy_existing::<A_PASSES>(a, k);
                        feed.right.copy_existing::<B_PASSES>(b, k);
                    }
                }
                ahead += 1;
                if ahead == feed.stages {
                    ahead = 0;
                    copied += thread::grid_dim_x();
                    if copied < count {
                        feed = Feed::new(problem(copied), tile);
                    }
                }
            }
            commit_copies();
        };
    }
    for stage in 0..AHEAD {
        fetch!(stage);
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
        let (Problem { b: right, epilogue, columns, k: [first_k, end], .. }, first) = problem(launder_reg(item));
        // The first row of tiles covers all columns. Other kernels have no code for the sums of
        // columns.
        let summed =
            const { !A_ALONG && !B_ALONG && size_of::<S>() == size_of::<f32>() } && columns.wanted && first[0] == 0;
        let mut chains = Chains::new();
        let mut sums = wgmma::undefined_sums();
        let mut k = first_k;
        while k < end {
            wait_copies::<{ AHEAD - 1 }>();
            wgmma::fence_async();
            thread::sync_threads();
            let [a, b] = slot(from);
            // SAFETY: this thread and, by the barrier, all threads have copied the stage. Its slot
            // is filled again after the next barrier but one, and all have waited for these
            // products before that.
            unsafe { products.start::<A_ALONG, B_ALONG, TILES>(&mut sums, a, group * GROUP_ROWS, b, k > first_k) };
            fetch!((from + AHEAD) % STAGES);
            // SAFETY: as above.
            unsafe { products.complete::<A_ALONG, B_ALONG, TILES>(&mut sums, a, group * GROUP_ROWS, b) };
            if summed {
                chains.add(b, tile.cols());
            }
            products.wait::<1>();
            from = after(from);
            k += DEPTH;
        }
        products.finish(&mut sums);
        if first_k >= end {
            sums = wgmma::no_sums();
        }
        // SAFETY: all lanes of the warp execute this, and the contract has accepted the problem.
        unsafe {
            let converged = Converged::assume();
            if summed {
                chains.finish(converged, columns, tile.cols(), first[1], right.rows);
            }
            let first = [first[0] + group * GROUP_ROWS + 16 * warp, first[1]];
            finish::<TILES, S>(converged, epilogue, first, sums, staging);
        }
        item += thread::grid_dim_x();
    }
}
