//! The operands and the accumulators of mma instructions, in the registers of a warp's lanes. Every
//! kernel that multiplies rows from shared memory on tensor cores uses them.
//!
//! A chunk is 16 bytes of a row: eight BF16, or four f32. An mma instruction takes two chunks of
//! each operand: sixteen k of BF16, or eight of TF32. One `ldmatrix.x4` reads a square of an
//! operand, 16 rows of two chunks, as four matrices of eight rows and one chunk. Lane `8 q + r`
//! supplies the address of row r of matrix q ([`Squares`]). Lane `4 g + t` gets word t of row g of
//! each matrix: elements 2 t and 2 t + 1 of BF16, or element t of f32.
//!
//! ```text
//!            A: chunk 0   1         B: chunk 0    1        sums of 16 x 16:  columns 0..7    8..15
//! rows 0..7     q 0      q 2   columns 0..7   q 0    q 1       rows 0..7         tile 0    tile 1
//! rows 8..15    q 1      q 3   columns 8..15  q 2    q 3       rows 8..15        tile 0    tile 1
//! ```
//! If k is not contiguous in memory, the rows of shared memory are k. The matrices then lie
//! transposed, and `ldmatrix.trans` transposes them.
//!
//! An instruction gives lane `4 g + t` columns 2 t and 2 t + 1 of a tile, in row g and in row
//! g + 8. Before lanes store them, they exchange pairs, so that a lane has four neighboring
//! columns:
//!
//! ```text
//!                      one tile (`quad`)                     two tiles (`quads`)
//! even t   row g:      columns 2 t .. 2 t + 3       rows g and g + 8: columns 2 t .. 2 t + 3 of
//!                                                   tile 0
//! odd t    row g + 8:  columns 2 t - 2 .. 2 t + 1   rows g and g + 8: columns 2 t - 2 .. 2 t + 1 of
//!                                                   tile 1
//!                                                   so four lanes write 16 contiguous columns
//! ```
//! Invariant: products are accumulated by ascending k of the mma instructions. The products of one
//! instruction are added at once; see [`mma`](crate::mma).

use crate::block::launder_reg;
use crate::format::Format;
use crate::machine;
pub use crate::machine::mma::{quads, read_bias, read_words, write_quads};
use crate::tile::SharedTile;
use crate::vector::F4;
use crate::warp::Converged;
use cuda_std::warp;

/// A lane's accumulators of `ROWS` x `TILES` mma tiles of 16 x 8 outputs.
pub type Sums<const ROWS: usize, const TILES: usize> = [[[f32; 4]; TILES]; ROWS];

/// Two pairs of BF16: memory's content at a lane's accumulators of one tile.
pub type Words = [u32; 2];

/// The words of a chunk.
pub const CHUNK_WORDS: u32 = 4;

/// Returns the position of a chunk among rows of `chunks` chunks, 4 or a multiple of 8.
///
/// ```text
/// 8 chunks a row: chunk c of row r is at c xor (r mod 8)   4 chunks: at c xor (r / 2 mod 4)
///   row 0   | c 0 | c 1 | c 2 | ..                           row 0   | c 0 | c 1 | c 2 | c 3 |
///   row 1   | c 1 | c 0 | c 3 | ..                           row 1   | c 0 | c 1 | c 2 | c 3 |
///   row 2   | c 2 | c 3 | c 0 | ..                           row 2   | c 1 | c 0 | c 3 | c 2 |
/// ```
/// Either way, the eight rows of one chunk that one ldmatrix phase reads cover all 32 banks without
/// a conflict.
#[inline(always)]
pub fn swizzled(chunks: u32, row: u32, chunk: u32) -> u32 {
    row * chunks + (chunk ^ if chunks == 4 { row / 2 % 4 } else { row % 8 })
}

/// The location of a lane's squares in rows of shared memory whose chunks are [`swizzled`].
#[derive(Clone, Copy)]
pub struct Squares {
    /// The word at which the lane's row of the first square begins.
    word: u32,
    /// The words of a row.
    pitch: u32,
}

impl Squares {
    /// Returns the squares from `row` and `chunk` on whose second matrix lies below the first, in
    /// rows of `chunks` chunks: those of A if rows are along k, and those of B if rows are k.
    #[inline(always)]
    pub fn down(chunks: u32, row: u32, chunk: u32) -> Self {
        let (q, r) = (warp::lane_id() / 8, warp::lane_id() % 8);
        Self::new(chunks, row + 8 * (q % 2) + r, chunk + q / 2)
    }

    /// Returns the squares from `row` and `chunk` on whose second matrix lies to the right of the
    /// first: those of B if rows are along k, and those of A if rows are k.
    #[inline(always)]
    pub fn across(chunks: u32, row: u32, chunk: u32) -> Self {
        let (q, r) = (warp::lane_id() / 8, warp::lane_id() % 8);
        Self::new(chunks, row + 8 * (q / 2) + r, chunk + q % 2)
    }

    #[inline(always)]
    fn new(chunks: u32, row: u32, chunk: u32) -> Self {
        Self { word: swizzled(chunks, row, chunk) * CHUNK_WORDS, pitch: chunks * CHUNK_WORDS }
    }

    /// Returns the squares with a laundered register. The compiler then keeps no derived address
    /// across loop iterations, which would take a register for each step.
    #[inline(always)]
    pub fn anew(self) -> Self {
        Self { word: launder_reg(self.word), ..self }
    }

    /// Reads the square that begins `row` rows, a multiple of eight, and `2 step` chunks further.
    /// If `transposed`, a constant, its rows are k.
    #[inline(always)]
    #[track_caller]
    pub fn read(self, warp: Converged, tile: SharedTile<u32>, row: u32, step: u32, transposed: bool) -> [u32; 4] {
        // The swizzle is an xor. The next two chunks therefore differ in the second bit of a
        // chunk's number and the bits above it.
        tile.matrices(warp, (self.word ^ (step * 2 * CHUNK_WORDS)) + row * self.pitch, transposed)
    }
}

/// Accumulates the products of `ROWS` squares of A, stacked vertically, with `COLS` squares of B,
/// in two tiles for each square of B, from those of square `first` on.
#[inline(always)]
#[track_caller]
pub fn multiply<F: Format, const ROWS: usize, const COLS: usize, const TILES: usize>(
    warp: Converged,
    sums: &mut Sums<ROWS, TILES>,
    first: usize,
    a: &[[u32; 4]; ROWS],
    b: &[[u32; 4]; COLS],
) {
    machine::mma::multiply::<F, ROWS, COLS, TILES>(warp, sums, first, a, b);
}

/// Returns the row and the first column of a lane's four neighbors in a tile of 16 x 8. See
/// [`quad`].
#[inline(always)]
pub fn quad_place() -> [u32; 2] {
    let (g, t) = (warp::lane_id() / 4, warp::lane_id() % 4);
    [g + 8 * (t % 2), t / 2 * 4]
}

/// Converts an accumulator tile to four neighboring columns of one row per lane. Lanes exchange
/// values in pairs.
#[inline(always)]
#[track_caller]
pub fn quad(converged: Converged, sums: [f32; 4]) -> F4 {
    // Selected by masks: a condition would become a branch and diverge the warp.
    let odd = (warp::lane_id() % 2).wrapping_neg();
    let choose = |if_odd: u32, if_even: u32| if_odd & odd | if_even & !odd;
    let [a, b, c, d] = sums.map(f32::to_bits);
    let [x, y] = converged.shfl_xor([choose(a, c), choose(b, d)], 1);
    F4([choose(x, a), choose(y, b), choose(c, x), choose(d, y)].map(f32::from_bits))
}

/// Returns the first row and the first column of a lane's [`quads`] in two adjacent tiles of 16 x
/// 8. The other row is eight further down.
#[inline(always)]
pub fn quads_place() -> [u32; 2] {
    let (g, t) = (warp::lane_id() / 4, warp::lane_id() % 4);
    [g, 8 * (t % 2) + 4 * (t / 2)]
}

/// Returns the sum over all k of a lane's column. The four lanes of a group each hold a partial
/// sum.
#[inline(always)]
pub fn total_of_column(warp: Converged, sum: f32) -> f32 {
    let pair = sum + warp.shfl_xor(sum, 1);
    pair + warp.shfl_xor(pair, 2)
}
