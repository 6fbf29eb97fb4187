//! The GPU's side of [`fragment`](super): fragments are read by `ldmatrix` and multiplied by mma
//! instructions, and lanes exchange accumulators by shuffles.
//!
//! Invariant: the functions that `emulated.rs` has too give a lane the same elements.

use super::super::operand::place;
use super::super::tile::{CHUNK, CHUNK_WORDS, DEPTH};
use super::{STEP, Sums, Words, quads_place};
use crate::format::{Bf16, Format};
use crate::tile::SharedTile;
use crate::unroll;
use crate::vector::{F4, load_pair, load_word, store_words};
use cuda_std::warp;
use half::bf16;

/// The location of a lane's operand squares in a stage. `ALONG_K` is true if the operand is
/// contiguous along k.
#[derive(Clone, Copy)]
pub(in super::super) struct Source<const ALONG_K: bool> {
    /// The word at which the lane's row of the first square of the first step begins.
    word: u32,
    /// The number of rows in the stage.
    width: u32,
}

impl<const ALONG_K: bool> Source<ALONG_K> {
    /// Returns the source of A's squares of 16 rows from `first_row` on, in a stage of `width`
    /// rows.
    #[inline(always)]
    pub(in super::super) fn left(width: u32, first_row: u32) -> Self {
        let (q, r) = (warp::lane_id() / 8, warp::lane_id() % 8);
        Self::new(width, first_row, [q % 2, q / 2], r)
    }

    /// Returns the source of B's squares of 16 columns from `first_col` on.
    #[inline(always)]
    pub(in super::super) fn right(width: u32, first_col: u32) -> Self {
        let (q, r) = (warp::lane_id() / 8, warp::lane_id() % 8);
        Self::new(width, first_col, [q / 2, q % 2], r)
    }

    /// Returns the source for row `r` of the matrix that lies `across` groups of eight rows and
    /// `along` groups of eight k further.
    #[inline(always)]
    fn new(width: u32, first: u32, [across, along]: [u32; 2], r: u32) -> Self {
        let word = if ALONG_K {
            place(true, width, first + 8 * across + r, along)
        } else {
            place(false, width, 8 * along + r, first / CHUNK + across)
        };
        Self { word: word * CHUNK_WORDS, width }
    }

    /// Reads the lane's words of a square.
    ///
    /// # Safety
    /// All lanes of the warp make the call, [converged](crate::warp::converge_warp).
    #[inline(always)]
    pub(in super::super) unsafe fn read(self, part: SharedTile<u32>, square: u32, step: u32) -> [u32; 4] {
        // The swizzle is an xor. The next two chunks therefore differ in the second bit of a
        // chunk's number and the bits above it.
        let next = 2 * CHUNK_WORDS;
        let word = if ALONG_K {
            (self.word ^ (step * next)) + square * 16 * (DEPTH / 2)
        } else {
            (self.word ^ (square * next)) + step * STEP * (self.width / 2)
        };
        // SAFETY: the row lies inside the stage on a 16-byte boundary; the caller guarantees that
        // all lanes execute this, converged.
        unsafe { part.matrices(word, !ALONG_K) }
    }
}

/// Accumulates a step's products in `ROWS` x `TILES` mma tiles.
///
/// # Safety
/// All lanes of the warp make the call, [converged](crate::warp::converge_warp).
#[inline(always)]
pub(in super::super) unsafe fn multiply<const ROWS: usize, const COLS: usize, const TILES: usize>(
    sums: &mut Sums<ROWS, TILES>,
    a: &[[u32; 4]; ROWS],
    b: &[[u32; 4]; COLS],
) {
    unroll!(row < ROWS => {
        unroll!(tile < TILES => {
            let [b0, b1, b2, b3] = b[tile / 2];
            let pair = if tile % 2 == 0 { [b0, b1] } else { [b2, b3] };
            // SAFETY: all lanes of the warp execute this, converged, as the caller guarantees.
            sums[row][tile] = unsafe { Bf16::mma(a[row], pair, sums[row][tile]) };
        });
    });
}

/// Adds a step's four elements of each column to a lane's column sums, k ascending. `half` selects
/// the first or the second half of the columns, which has as many tiles of 8 columns as there are
/// squares.
#[inline(always)]
pub(in super::super) fn add_columns<const COLS: usize>(columns: &mut [f32; COLS], b: &[[u32; 4]; COLS], half: u32) {
    unroll!(tile < COLS => {
        let second = b[tile / 2 + COLS / 2];
        let [near, far] = [0, 1].map(|at| {
            let at = tile % 2 * 2 + at;
            if half == 0 { b[tile / 2][at] } else { second[at] }
        });
        let two = |sum: f32, word: u32| sum + f32::from_bits(word << 16) + f32::from_bits(word & 0xffff_0000);
        columns[tile] = two(two(columns[tile], near), far);
    });
}

/// Converts the accumulators of two adjacent mma tiles to four neighboring columns in row g and
/// four in row g + 8 of one tile. [`quads_place`] returns their location.
///
/// # Safety
/// All lanes of the warp make the call, with the sums of the same tiles.
#[inline(always)]
pub(in super::super) unsafe fn quads(tiles: [[f32; 4]; 2]) -> [F4; 2] {
    let [left, right] = tiles.map(|tile| tile.map(f32::to_bits));
    [0, 2].map(|at| {
        // SAFETY: all lanes of the warp execute this, as the caller guarantees.
        let [near, far] = unsafe { exchanged([left[at], left[at + 1]], [right[at], right[at + 1]]) };
        F4([near[0], near[1], far[0], far[1]].map(f32::from_bits))
    })
}

/// Exchanges words between neighboring lanes. A lane brings two columns of a row in the left tile
/// and two in the right. It gets four neighboring columns of one tile. An odd lane gives its
/// columns of the left tile for its neighbor's of the right tile.
///
/// # Safety
/// All lanes of the warp make the call, with words of the same row.
#[inline(always)]
unsafe fn exchanged<const WORDS: usize>(left: [u32; WORDS], right: [u32; WORDS]) -> [[u32; WORDS]; 2] {
    // Selected by masks: a condition would become a branch and diverge the warp.
    let odd = (warp::lane_id() % 2).wrapping_neg();
    let choose = |if_odd: [u32; WORDS], if_even: [u32; WORDS]| -> [u32; WORDS] {
        core::array::from_fn(|at| if_even[at] ^ (if_odd[at] ^ if_even[at]) & odd)
    };
    let own = choose(right, left);
    // SAFETY: all lanes of the warp execute this, as the caller guarantees.
    let given = unsafe { crate::warp::shfl_xor(u32::MAX, choose(left, right), 1) };
    [choose(given, own), choose(own, given)]
}

/// Rounds the [`quads`] and writes them to `out`, in the rows whose 16 columns begin at these
/// indices.
///
/// # Safety
/// The caller meets the requirements of [`quads`]. The columns may be written, and begin on a
/// boundary of four elements.
#[inline(always)]
pub(in super::super) unsafe fn write_quads(tiles: [[f32; 4]; 2], out: *mut bf16, at: [usize; 2]) {
    let at = at.map(|at| at + quads_place()[1] as usize);
    // Rounded first: a word then holds two columns, so lanes exchange half as many words.
    let [left, right] = tiles.map(Bf16::words);
    unroll!(row < 2 => {
        // SAFETY: all lanes of the warp execute this, and the columns may be written, as the caller
        // guarantees.
        unsafe {
            let [[near], [far]] = exchanged([left[row]], [right[row]]);
            store_words(out, at[row], [near, far]);
        }
    });
}

/// Reads `c` at a lane's accumulators of two adjacent tiles, in the rows whose 16 columns begin at
/// these indices.
///
/// # Safety
/// The columns may be read, and begin on a boundary of four elements.
#[inline(always)]
pub(in super::super) unsafe fn read_words(c: *const bf16, at: [usize; 2]) -> [Words; 2] {
    let pair = 2 * (warp::lane_id() % 4) as usize;
    // SAFETY: the caller guarantees that the columns may be read and begin on such a boundary.
    [0, 8].map(|tile| at.map(|at| unsafe { load_word(c, at + tile + pair) }))
}

/// Reads the bias of a lane's accumulators of two adjacent tiles, whose 16 columns begin at this
/// index.
///
/// # Safety
/// The columns lie inside `bias`, and begin on a boundary of four elements.
#[inline(always)]
pub(in super::super) unsafe fn read_bias(bias: &[f32], at: usize) -> [[f32; 4]; 2] {
    let pair = 2 * (warp::lane_id() % 4) as usize;
    [0, 8].map(|tile| {
        // SAFETY: the caller guarantees that the columns lie inside `bias`, on such a boundary.
        let [near, far] = unsafe { load_pair(bias, at + tile + pair) };
        // Both rows have the same bias.
        [near, far, near, far]
    })
}
