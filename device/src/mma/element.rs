//! The element types whose products attention makes on tensor cores.
//!
//! Accumulators become the A operand of a second product, whose k are the rows of a tile
//! ([`MmaElement::pv_accumulate`]). This needs no shuffle:
//!
//! ```text
//! BF16   two adjacent accumulator tiles, rounded,      `ldmatrix.trans` reads squares of B whose k
//!        have the layout of a square of A              are rows
//! f32    the mma's k t is column 2 t of a tile, and    a lane reads the chunks of rows 2 t and
//!        k t + 4 is column 2 t + 1, so a lane's        2 t + 1 that begin with column 4 g: B's
//!        accumulators are its words of A               columns g of four tiles
//! ```
//! Invariant: a product rounds the same numbers to the same bits on every device.

use super::fragments::{CHUNK_WORDS, Squares, Sums, multiply, quad, quad_place, swizzled};
use crate::block::launder_reg;
use crate::format::{Bf16, Format, Tf32, round_bf16, round_tf32};
use crate::stored::Stored;
use crate::tile::SharedTile;
use crate::unroll_on_gpu;
use crate::vector::F4;
use crate::warp::Converged;
use cuda_std::warp;
use half::bf16;

/// An element type in memory that tensor cores multiply: BF16 as it is, f32 rounded to TF32.
pub trait MmaElement: Stored {
    /// The format of the mma operands.
    type Factors: Format;
    /// The elements of a chunk.
    const CHUNK: u32 = 16 / size_of::<Self>() as u32;

    /// Rounds a chunk in shared memory to the mma operand format, if memory holds another. `index`
    /// is a multiple of four.
    fn round(tile: SharedTile<u32>, index: u32);

    /// Rounds `weights`, multiplies them with the rows of a rounded tile of `CHUNKS` chunks a row,
    /// and accumulates in `MADE` mma tiles of eight columns, from tile `first`, a multiple of
    /// `MADE`, on. `down` has the squares of the tile.
    fn pv_accumulate<const ROWS: usize, const TILES: usize, const CHUNKS: usize, const MADE: usize>(
        warp: Converged,
        sums: &mut Sums<ROWS, MADE>,
        weights: &Sums<ROWS, TILES>,
        down: Squares,
        rows: SharedTile<u32>,
        first: usize,
    );

    /// Returns the `n`th of a lane's `MADE` groups of four neighboring columns in a row of squares
    /// that [`pv_accumulate`](Self::pv_accumulate) has accumulated: the row among the sixteen, the
    /// first column, and the four values.
    fn neighbours<const MADE: usize>(warp: Converged, sums: &[[f32; 4]; MADE], n: usize) -> ([u32; 2], F4);
}

impl MmaElement for bf16 {
    type Factors = Bf16;

    #[inline(always)]
    fn round(_: SharedTile<u32>, _: u32) {}

    #[inline(always)]
    #[track_caller]
    fn pv_accumulate<const ROWS: usize, const TILES: usize, const CHUNKS: usize, const MADE: usize>(
        warp: Converged,
        sums: &mut Sums<ROWS, MADE>,
        weights: &Sums<ROWS, TILES>,
        down: Squares,
        rows: SharedTile<u32>,
        first: usize,
    ) {
        unroll_on_gpu!(step < TILES / 2 => {
            let mut left = [[0; 4]; ROWS];
            unroll_on_gpu!(m < 2 => {
                if m < ROWS {
                    let ([a, b, c, d], [e, f, g, h]) = (weights[m][2 * step], weights[m][2 * step + 1]);
                    left[m] = [round_bf16(a, b), round_bf16(c, d), round_bf16(e, f), round_bf16(g, h)];
                }
            });
            unroll_on_gpu!(square < MADE / 2, at most 16 => {
                let right = down.read(warp, rows, 16 * step as u32, (first / 2 + square) as u32, true);
                multiply::<Bf16, ROWS, 1, MADE>(warp, sums, square, &left, &[right]);
            });
        });
    }

    #[inline(always)]
    #[track_caller]
    fn neighbours<const MADE: usize>(warp: Converged, sums: &[[f32; 4]; MADE], n: usize) -> ([u32; 2], F4) {
        let [row, column] = quad_place();
        ([row, 8 * n as u32 + column], quad(warp, sums[n]))
    }
}

impl MmaElement for f32 {
    type Factors = Tf32;

    #[inline(always)]
    #[track_caller]
    fn round(tile: SharedTile<u32>, index: u32) {
        tile.set_chunk(index, tile.chunk(index).map(|word| round_tf32(f32::from_bits(word))));
    }

    #[inline(always)]
    #[track_caller]
    fn pv_accumulate<const ROWS: usize, const TILES: usize, const CHUNKS: usize, const MADE: usize>(
        converged: Converged,
        sums: &mut Sums<ROWS, MADE>,
        weights: &Sums<ROWS, TILES>,
        _: Squares,
        rows: SharedTile<u32>,
        first: usize,
    ) {
        const { assert!(MADE.is_multiple_of(4), "a lane reads chunks of four tiles") };
        let pitch = CHUNKS as u32 * CHUNK_WORDS;
        let (g, t) = (warp::lane_id() / 4, warp::lane_id() % 4);
        // Row 2 t, and the next one. Laundered, so that the compiler keeps neither for other tiles:
        // the accumulators need the registers.
        let even = launder_reg(swizzled(CHUNKS as u32, 2 * t, g) * CHUNK_WORDS);
        let places = [even, (even ^ CHUNK_WORDS) + pitch];
        unroll_on_gpu!(tile < TILES => {
            let mut left = [[0; 4]; ROWS];
            unroll_on_gpu!(m < 2 => {
                if m < ROWS {
                    let [a, b, c, d] = weights[m][tile];
                    left[m] = [a, c, b, d].map(round_tf32);
                }
            });
            // Four mma tiles of columns: one chunk has a lane's element of each.
            unroll_on_gpu!(four < MADE / 4 => {
                let at = 8 * tile as u32 * pitch + 8 * (first / 4 + four) as u32 * CHUNK_WORDS;
                let [even, odd] = places.map(|place| rows.chunk(place + at));
                let warp = converged.again();
                multiply::<Tf32, ROWS, 1, MADE>(warp, sums, 2 * four, &left, &[[even[0], odd[0], even[1], odd[1]]]);
                multiply::<Tf32, ROWS, 1, MADE>(warp, sums, 2 * four + 1, &left, &[[even[2], odd[2], even[3], odd[3]]]);
            });
        });
    }

    /// A group of four tiles has the lane's columns `8 t` to `8 t + 7` of 32, for two rows.
    #[inline(always)]
    fn neighbours<const MADE: usize>(_: Converged, sums: &[[f32; 4]; MADE], n: usize) -> ([u32; 2], F4) {
        let (g, t) = (warp::lane_id() / 4, warp::lane_id() % 4);
        let (four, at) = (n / 4 * 4, n % 4);
        let column = 8 * four as u32 + 8 * t + 4 * (at as u32 % 2);
        let of_tile = |tile: usize| sums[four + tile][at];
        ([g + 8 * (at as u32 / 2), column], F4([of_tile(0), of_tile(1), of_tile(2), of_tile(3)]))
    }
}
