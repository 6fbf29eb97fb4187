//! A lane's operand fragments and accumulators of the mma instructions.
//!
//! A warp reads squares of 16 rows x 16 k of A, and of 16 columns x 16 k of B. One `ldmatrix.x4`
//! reads a square as four matrices of 8 x 8. Lane `8 q + r` supplies the address of row r of matrix
//! q. Lane `4 g + t` gets elements 2 t and 2 t + 1 of row g of each matrix.
//!
//! ```text
//!            A: k 0..7   8..15       B: k 0..7   8..15     sums of 16 x 16:  columns 0..7    8..15
//! rows 0..7     q 0      q 2    columns 0..7   q 0    q 1      rows 0..7         tile 0    tile 1
//! rows 8..15    q 1      q 3    columns 8..15  q 2    q 3      rows 8..15        tile 0    tile 1
//!
//! two tiles, as the mma gives them:                and after two lanes have exchanged:
//!   lane 4 g + t: row g     columns 2 t, 2 t + 1    even t: columns 2 t .. 2 t + 3 of tile 0,
//!                 row g + 8 columns 2 t, 2 t + 1            row g and row g + 8
//!                 of both                           odd t:  columns 2 t - 2 .. 2 t + 1 of tile 1
//!                                                 so four lanes write 16 contiguous columns
//! ```
//! If k is not contiguous in memory, the matrices lie transposed in shared memory, and
//! `ldmatrix.trans` transposes them.
//!
//! Invariant: the products of an output are accumulated by ascending k, sixteen at a time.

use super::operand::place;
#[cfg(target_arch = "nvptx64")]
use super::tile::DEPTH;
use super::tile::{CHUNK, CHUNK_WORDS};
use crate::format::{Bf16, Format};
use crate::tile::SharedTile;
#[cfg(target_arch = "nvptx64")]
use crate::unroll;
use crate::unroll_on_gpu;
#[cfg(target_arch = "nvptx64")]
use crate::vector::load_pair;
use crate::vector::{F4, load_word, store_words};
use cuda_std::warp;
use half::bf16;

/// The k of one mma instruction.
pub(super) const STEP: u32 = 16;

/// A lane's accumulators of `ROWS` x `TILES` mma tiles of 16 x 8 outputs.
pub(super) type Sums<const ROWS: usize, const TILES: usize> = [[[f32; 4]; TILES]; ROWS];

/// The location of a lane's operand squares in a stage. `ALONG_K` is true if the operand is
/// contiguous along k.
#[cfg(target_arch = "nvptx64")]
#[derive(Clone, Copy)]
pub(super) struct Source<const ALONG_K: bool> {
    /// The word at which the lane's row of the first square of the first step begins.
    word: u32,
    /// The number of rows in the stage.
    width: u32,
}

#[cfg(target_arch = "nvptx64")]
impl<const ALONG_K: bool> Source<ALONG_K> {
    /// Returns the source of A's squares of 16 rows from `first_row` on, in a stage of `width`
    /// rows.
    #[inline(always)]
    pub(super) fn left(width: u32, first_row: u32) -> Self {
        let (q, r) = (warp::lane_id() / 8, warp::lane_id() % 8);
        Self::new(width, first_row, [q % 2, q / 2], r)
    }

    /// Returns the source of B's squares of 16 columns from `first_col` on.
    #[inline(always)]
    pub(super) fn right(width: u32, first_col: u32) -> Self {
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
    pub(super) unsafe fn read(self, part: SharedTile<u32>, square: u32, step: u32) -> [u32; 4] {
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
#[cfg(target_arch = "nvptx64")]
#[inline(always)]
pub(super) unsafe fn multiply<const ROWS: usize, const COLS: usize, const TILES: usize>(
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
#[cfg(target_arch = "nvptx64")]
#[inline(always)]
pub(super) fn add_columns<const COLS: usize>(columns: &mut [f32; COLS], b: &[[u32; 4]; COLS], half: u32) {
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

/// Returns the sum over all k of a lane's column. The four lanes of a group each hold a partial
/// sum.
///
/// # Safety
/// All lanes of the warp make the call, with sums of the same tile.
#[inline(always)]
pub(super) unsafe fn total_of_column(sum: f32) -> f32 {
    // SAFETY: all lanes of the warp execute this, as the caller guarantees.
    unsafe {
        let pair = sum + crate::warp::shfl_xor(u32::MAX, sum, 1);
        pair + crate::warp::shfl_xor(u32::MAX, pair, 2)
    }
}

/// Converts the accumulators of two adjacent mma tiles to four neighboring columns in row g and
/// four in row g + 8 of one tile. [`quads_place`] returns their location.
///
/// # Safety
/// All lanes of the warp make the call, with the sums of the same tiles.
#[inline(always)]
pub(super) unsafe fn quads(tiles: [[f32; 4]; 2]) -> [F4; 2] {
    #[cfg(target_arch = "nvptx64")]
    {
        let [left, right] = tiles.map(|tile| tile.map(f32::to_bits));
        [0, 2].map(|at| {
            // SAFETY: all lanes of the warp execute this, as the caller guarantees.
            let [near, far] = unsafe { exchanged([left[at], left[at + 1]], [right[at], right[at + 1]]) };
            F4([near[0], near[1], far[0], far[1]].map(f32::from_bits))
        })
    }
    // The emulator's lanes already accumulate in this layout.
    #[cfg(not(target_arch = "nvptx64"))]
    tiles.map(F4)
}

/// Exchanges words between neighboring lanes. A lane brings two columns of a row in the left tile
/// and two in the right. It gets four neighboring columns of one tile. An odd lane gives its
/// columns of the left tile for its neighbor's of the right tile.
///
/// # Safety
/// All lanes of the warp make the call, with words of the same row.
#[cfg(target_arch = "nvptx64")]
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
pub(super) unsafe fn write_quads(tiles: [[f32; 4]; 2], out: *mut bf16, at: [usize; 2]) {
    let at = at.map(|at| at + quads_place()[1] as usize);
    // Rounded first: a word then holds two columns, so lanes exchange half as many words.
    let [left, right] = tiles.map(Bf16::words);
    unroll_on_gpu!(row < 2 => {
        // SAFETY: all lanes of the warp execute this, and the columns may be written, as the caller
        // guarantees.
        unsafe {
            #[cfg(target_arch = "nvptx64")]
            let [[near], [far]] = exchanged([left[row]], [right[row]]);
            // The emulator's lanes already accumulate in this layout.
            #[cfg(not(target_arch = "nvptx64"))]
            let [near, far] = [left, right][row];
            store_words(out, at[row], [near, far]);
        }
    });
}

/// Two pairs of BF16: memory's content at a lane's accumulators of one tile.
pub(super) type Words = [u32; 2];

/// Reads `c` at a lane's accumulators of two adjacent tiles, in the rows whose 16 columns begin at
/// these indices.
///
/// # Safety
/// The columns may be read, and begin on a boundary of four elements.
#[inline(always)]
pub(super) unsafe fn read_words(c: *const bf16, at: [usize; 2]) -> [Words; 2] {
    // SAFETY: the caller guarantees that the columns may be read and begin on such a boundary.
    unsafe {
        #[cfg(target_arch = "nvptx64")]
        {
            let pair = 2 * (warp::lane_id() % 4) as usize;
            [0, 8].map(|tile| at.map(|at| load_word(c, at + tile + pair)))
        }
        #[cfg(not(target_arch = "nvptx64"))]
        at.map(|at| [0, 2].map(|pair| load_word(c, at + quads_place()[1] as usize + pair)))
    }
}

/// Reads the bias of a lane's accumulators of two adjacent tiles, whose 16 columns begin at this
/// index.
///
/// # Safety
/// The columns lie inside `bias`, and begin on a boundary of four elements.
#[inline(always)]
pub(super) unsafe fn read_bias(bias: &[f32], at: usize) -> [[f32; 4]; 2] {
    // SAFETY: the caller guarantees that the columns lie inside `bias`, on such a boundary.
    unsafe {
        #[cfg(target_arch = "nvptx64")]
        {
            let pair = 2 * (warp::lane_id() % 4) as usize;
            [0, 8].map(|tile| {
                let [near, far] = load_pair(bias, at + tile + pair);
                // Both rows have the same bias.
                [near, far, near, far]
            })
        }
        #[cfg(not(target_arch = "nvptx64"))]
        [F4::load(bias, at + quads_place()[1] as usize).0; 2]
    }
}

/// Returns the first row and the first column of a lane's [`quads`] in two adjacent tiles of 16 x
/// 8. The other row is eight further down.
#[inline(always)]
pub(super) fn quads_place() -> [u32; 2] {
    let (g, t) = (warp::lane_id() / 4, warp::lane_id() % 4);
    [g, 8 * (t % 2) + 4 * (t / 2)]
}

/// Accumulates the products of a stage's step in a lane's [`quads`], one by one, k ascending. The
/// emulator uses it in place of [`multiply`].
#[cfg(not(target_arch = "nvptx64"))]
#[inline(always)]
pub(super) fn multiply_one_by_one<const ROWS: usize, const TILES: usize>(
    sums: &mut Sums<ROWS, TILES>,
    [a, b]: [SharedTile<u32>; 2],
    [along_a, along_b]: [bool; 2],
    [rows, cols]: [u32; 2],
    [first_row, first_col]: [u32; 2],
    step: u32,
) {
    use cuda_std::GpuFloat;
    let [line, column] = quads_place();
    for k in STEP * step..STEP * (step + 1) {
        let mut left = [[0.0; 2]; ROWS];
        for (row, left) in left.iter_mut().enumerate() {
            *left = [0, 8].map(|below| element(a, along_a, rows, first_row + 16 * row as u32 + line + below, k));
        }
        // Both rows of two tiles have the same columns.
        let mut right = [0.0; 4];
        for tile in 0..TILES {
            if tile % 2 == 0 {
                let first = first_col + 8 * tile as u32 + column;
                right = [0, 1, 2, 3].map(|at| element(b, along_b, cols, first + at, k));
            }
            for (sums, left) in sums.iter_mut().zip(left) {
                for (sum, right) in sums[tile].iter_mut().zip(right) {
                    *sum = GpuFloat::mul_add(left[tile % 2], right, *sum);
                }
            }
        }
    }
}

/// Implements [`add_columns`] for the emulator: B's columns from `first_col` on in a stage of
/// `cols` columns.
#[cfg(not(target_arch = "nvptx64"))]
#[inline(always)]
pub(super) fn add_columns_one_by_one<const COLS: usize>(
    columns: &mut [f32; COLS],
    b: SharedTile<u32>,
    along_k: bool,
    cols: u32,
    first_col: u32,
    step: u32,
) {
    let (g, t) = (warp::lane_id() / 4, warp::lane_id() % 4);
    for (tile, sum) in columns.iter_mut().enumerate() {
        for k in [2 * t, 2 * t + 1, 2 * t + 8, 2 * t + 9] {
            *sum += element(b, along_k, cols, first_col + 8 * tile as u32 + g, STEP * step + k);
        }
    }
}

/// Returns an element of a stage of `width` rows.
#[cfg(not(target_arch = "nvptx64"))]
#[inline(always)]
fn element(part: SharedTile<u32>, along_k: bool, width: u32, row: u32, k: u32) -> f32 {
    let (down, along) = if along_k { (row, k) } else { (k, row) };
    let word = place(along_k, width, down, along / CHUNK) * CHUNK_WORDS + along % CHUNK / 2;
    f32::from_bits(if along % 2 == 0 { part.get(word) << 16 } else { part.get(word) & 0xffff_0000 })
}
