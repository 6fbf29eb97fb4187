//! Tensor core products of squares of rows that a warp reads from shared memory. Memory holds BF16,
//! or f32 that is rounded to TF32 in shared memory ([`Multiplied`]).
//!
//! A chunk is 16 bytes of a row: eight BF16, or four f32. An mma instruction takes two chunks of
//! each operand: sixteen k of BF16, or eight of TF32. One `ldmatrix.x4` reads a square of an
//! operand, 16 rows of two chunks, as four matrices of eight rows and one chunk. Lane `8 q + r`
//! supplies the address of row r of matrix q. Lane `4 g + t` gets word t of row g of each matrix:
//! elements 2 t and 2 t + 1 of BF16, or element t of f32.
//!
//! ```text
//!            A: chunk 0   1         B: chunk 0    1        sums of 16 x 16:  columns 0..7    8..15
//! rows 0..7     q 0      q 2   columns 0..7   q 0    q 1       rows 0..7         tile 0    tile 1
//! rows 8..15    q 1      q 3   columns 8..15  q 2    q 3       rows 8..15        tile 0    tile 1
//!
//! a tile, as the instruction gives it:            and after the lanes have exchanged, `quad`:
//!   lane 4 g + t: row g     columns 2 t, 2 t + 1    even t: row g,      columns 2 t .. 2 t + 3
//!                 row g + 8 columns 2 t, 2 t + 1    odd t:  row g + 8,  columns 2 t - 2 .. 2 t + 1
//! ```
//! Accumulators become the A operand of a second product, whose k are the rows of a tile
//! ([`Multiplied::pv_accumulate`]). This needs no shuffle:
//!
//! ```text
//! BF16   two adjacent accumulator tiles, rounded,      `ldmatrix.trans` reads squares of B whose k
//!        have the layout of a square of A              are rows
//! f32    the mma's k t is column 2 t of a tile, and    a lane reads the chunks of rows 2 t and
//!        k t + 4 is column 2 t + 1, so a lane's        2 t + 1 that begin with column 4 g: B's
//!        accumulators are its words of A               columns g of four tiles
//! ```
//! Invariant: products are accumulated by ascending k of the mma instructions. A GPU adds the
//! products of one instruction at once, the emulator one by one; see [`mma`](crate::mma).

use crate::block::launder_reg;
use crate::format::{Bf16, Format, Tf32, round_bf16, round_tf32};
use crate::stored::Stored;
use crate::tile::SharedTile;
use crate::unroll_on_gpu;
use crate::vector::F4;
use crate::warp::converge_warp;
use cuda_std::warp;
use half::bf16;

/// A lane's accumulators of `ROWS` x `TILES` mma tiles of 16 x 8 outputs.
pub type Sums<const ROWS: usize, const TILES: usize> = [[[f32; 4]; TILES]; ROWS];

/// Accumulates the products of `ROWS` squares of A, stacked vertically, with one square of B in
/// tiles `2 square` and `2 square + 1`.
///
/// # Safety
/// All lanes of the warp make the call, [converged](crate::warp::converge_warp).
#[inline(always)]
#[track_caller]
pub unsafe fn multiply<F: Format, const ROWS: usize, const TILES: usize>(
    sums: &mut Sums<ROWS, TILES>,
    square: usize,
    a: &[[u32; 4]; ROWS],
    b: [u32; 4],
) {
    #[cfg(target_arch = "nvptx64")]
    {
        let [b0, b1, b2, b3] = b;
        crate::unroll!(row < ROWS => {
            // SAFETY: all lanes of the warp execute this, converged, as the caller guarantees.
            unsafe {
                sums[row][2 * square] = F::mma(a[row], [b0, b1], sums[row][2 * square]);
                sums[row][2 * square + 1] = F::mma(a[row], [b2, b3], sums[row][2 * square + 1]);
            }
        });
    }
    #[cfg(not(target_arch = "nvptx64"))]
    {
        /// The maximum k of one instruction: that of BF16.
        const MOST: usize = Bf16::PER_STEP as usize;
        let own = (*a, b);
        let factors = cuda_std::emulator::lanes(&own);
        let (g, t) = (warp::lane_id() as usize / 4, warp::lane_id() as usize % 4);
        // The k of the first chunk, then of the second, of four lanes from `first` on.
        let chain = |first: usize, word: &dyn Fn(usize, usize) -> u32| -> [f32; MOST] {
            let (per_word, per_chunk) = (F::PER_WORD as usize, F::PER_STEP as usize / 2);
            let mut chain = [0.0; MOST];
            for (k, value) in chain[..F::PER_STEP as usize].iter_mut().enumerate() {
                *value = F::value(word(first + k % per_chunk / per_word, k / per_chunk), (k % per_word) as u32);
            }
            chain
        };
        // SAFETY: each lane's operands live until the `sync_warp` below, which all lanes reach, as
        // they reached this.
        let right = unsafe {
            let of = |tile: usize, column: usize| {
                chain(4 * (2 * t + column), &|lane, chunk| (*factors[lane]).1[2 * tile + chunk])
            };
            [of(0, 0), of(0, 1), of(1, 0), of(1, 1)]
        };
        for (row, sums) in sums.iter_mut().enumerate() {
            // SAFETY: each lane's operands live until the `sync_warp` below.
            let left =
                unsafe { [0, 1].map(|half| chain(4 * g, &|lane, chunk| (*factors[lane]).0[row][half + 2 * chunk])) };
            let mut chains = [[0.0; 4]; 2];
            chains.copy_from_slice(&sums[2 * square..2 * square + 2]);
            // Eight independent sums, which a CPU adds as a vector.
            for k in 0..F::PER_STEP as usize {
                for (tile, chains) in chains.iter_mut().enumerate() {
                    for (at, sum) in chains.iter_mut().enumerate() {
                        *sum = cuda_std::GpuFloat::mul_add(left[at / 2][k], right[2 * tile + at % 2][k], *sum);
                    }
                }
            }
            sums[2 * square..2 * square + 2].copy_from_slice(&chains);
        }
        // SAFETY: all lanes of the warp execute this, converged, as the caller guarantees.
        unsafe { warp::sync_warp(u32::MAX) };
    }
}

/// Returns the row and the first column of a lane's four neighbors in a tile of 16 x 8. See
/// [`quad`].
#[inline(always)]
fn quad_place() -> [u32; 2] {
    let (g, t) = (warp::lane_id() / 4, warp::lane_id() % 4);
    [g + 8 * (t % 2), t / 2 * 4]
}

/// Converts an accumulator tile to four neighboring columns of one row per lane. Lanes exchange
/// values in pairs.
///
/// # Safety
/// All lanes of the warp make the call, with the sums of the same tile.
#[inline(always)]
#[track_caller]
unsafe fn quad(sums: [f32; 4]) -> F4 {
    // Selected by masks: a condition would become a branch and diverge the warp.
    let odd = (warp::lane_id() % 2).wrapping_neg();
    let choose = |if_odd: u32, if_even: u32| if_odd & odd | if_even & !odd;
    let [a, b, c, d] = sums.map(f32::to_bits);
    // SAFETY: all lanes of the warp execute this, as the caller guarantees.
    let [x, y] = unsafe { crate::warp::shfl_xor(u32::MAX, [choose(a, c), choose(b, d)], 1) };
    F4([choose(x, a), choose(y, b), choose(c, x), choose(d, y)].map(f32::from_bits))
}

/// The location of a lane's squares in a tile of rows in shared memory, with `CHUNKS` chunks a row,
/// a multiple of eight.
///
/// ```text
///   row 0   | c 0 | c 1 | c 2 | ..   chunks of 16 bytes
///   row 1   | c 1 | c 0 | c 3 | ..   chunk c of row r is at c xor (r mod 8): the eight rows of one
///   row 2   | c 2 | c 3 | c 0 | ..   chunk that one ldmatrix phase reads cover 32 banks
/// ```
#[derive(Clone, Copy)]
pub struct Fragments<const CHUNKS: usize> {
    /// The words of the lane's row in the first square: if the second matrix lies below the first,
    /// and if it lies to its right.
    down: u32,
    across: u32,
}

/// The words of a chunk.
pub const CHUNK_WORDS: u32 = 4;

impl<const CHUNKS: usize> Fragments<CHUNKS> {
    /// The words of a row.
    pub const ROW: u32 = CHUNKS as u32 * CHUNK_WORDS;

    /// Returns the first word of a chunk.
    #[inline(always)]
    pub fn place(row: u32, chunk: u32) -> u32 {
        row * Self::ROW + (chunk ^ (row % 8)) * CHUNK_WORDS
    }

    /// Returns this lane's squares.
    #[inline(always)]
    pub fn of_lane() -> Self {
        let (q, r) = (warp::lane_id() / 8, warp::lane_id() % 8);
        Self { down: Self::place(8 * (q % 2) + r, q / 2), across: Self::place(8 * (q / 2) + r, q % 2) }
    }

    /// Returns the squares with laundered registers. The compiler then keeps no derived address
    /// across loop iterations, which would take a register for each step.
    #[inline(always)]
    pub fn anew(self) -> Self {
        Self { down: launder_reg(self.down), across: launder_reg(self.across) }
    }

    /// Reads a square of A: rows of the tile from `row` on, k from chunk `2 step` on.
    ///
    /// # Safety
    /// All lanes of the warp make the call, [converged](crate::warp::converge_warp). `row` is a
    /// multiple of eight.
    #[inline(always)]
    #[track_caller]
    pub unsafe fn left(self, tile: SharedTile<u32>, row: u32, step: usize) -> [u32; 4] {
        // The swizzle is an xor. The next two chunks therefore differ in the second bit of a
        // chunk's number and the bits above it.
        // SAFETY: the lane's row lies inside the tile, on a
        // 16-byte boundary; the caller guarantees that all lanes execute this.
        unsafe { tile.matrices((self.down ^ (step as u32 * 2 * CHUNK_WORDS)) + row * Self::ROW, false) }
    }

    /// Reads a square of B whose columns are rows of the tile, from `row` on; k from chunk `2 step`
    /// on.
    ///
    /// # Safety
    /// The caller meets the requirements of [`Fragments::left`].
    #[inline(always)]
    #[track_caller]
    pub unsafe fn right(self, tile: SharedTile<u32>, row: u32, step: usize) -> [u32; 4] {
        // SAFETY: the argument in `left` holds here too.
        unsafe { tile.matrices((self.across ^ (step as u32 * 2 * CHUNK_WORDS)) + row * Self::ROW, false) }
    }

    /// Reads a square of B whose k are BF16 rows of the tile, from `row` on; columns from chunk `2
    /// square` on.
    ///
    /// # Safety
    /// The caller meets the requirements of [`Fragments::left`].
    #[inline(always)]
    #[track_caller]
    unsafe fn right_down(self, tile: SharedTile<u32>, row: u32, square: usize) -> [u32; 4] {
        // SAFETY: the argument in `left` holds here too.
        unsafe { tile.matrices((self.down ^ (square as u32 * 2 * CHUNK_WORDS)) + row * Self::ROW, true) }
    }
}

/// An element type in memory that tensor cores multiply: BF16 as it is, f32 rounded to TF32.
pub trait Multiplied: Stored {
    /// The format of the mma operands.
    type Factors: Format;
    /// The elements of a chunk.
    const CHUNK: u32 = 16 / size_of::<Self>() as u32;

    /// Rounds a chunk in shared memory to the mma operand format, if memory holds another. `index`
    /// is a multiple of four.
    fn round(tile: SharedTile<u32>, index: u32);

    /// Rounds `weights`, multiplies them with the rows of a rounded tile, and accumulates in `MADE`
    /// mma tiles of eight columns, from tile `first` on.
    ///
    /// # Safety
    /// All lanes of the warp make the call, [converged](crate::warp::converge_warp). `first` is a
    /// multiple of `MADE`.
    unsafe fn pv_accumulate<const ROWS: usize, const TILES: usize, const CHUNKS: usize, const MADE: usize>(
        sums: &mut Sums<ROWS, MADE>,
        weights: &Sums<ROWS, TILES>,
        fragments: Fragments<CHUNKS>,
        rows: SharedTile<u32>,
        first: usize,
    );

    /// Returns the `n`th of a lane's `MADE` groups of four neighboring columns in a row of squares
    /// that [`pv_accumulate`](Self::pv_accumulate) has accumulated: the row among the sixteen, the first column, and
    /// the four values.
    ///
    /// # Safety
    /// All lanes of the warp make the call.
    unsafe fn neighbours<const MADE: usize>(sums: &[[f32; 4]; MADE], n: usize) -> ([u32; 2], F4);
}

impl Multiplied for bf16 {
    type Factors = Bf16;

    #[inline(always)]
    fn round(_: SharedTile<u32>, _: u32) {}

    #[inline(always)]
    #[track_caller]
    unsafe fn pv_accumulate<const ROWS: usize, const TILES: usize, const CHUNKS: usize, const MADE: usize>(
        sums: &mut Sums<ROWS, MADE>,
        weights: &Sums<ROWS, TILES>,
        fragments: Fragments<CHUNKS>,
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
                // SAFETY: all lanes of the warp execute this, converged, as the caller guarantees,
                // and the rows lie inside the tile.
                unsafe {
                    let right = fragments.right_down(rows, 16 * step as u32, first / 2 + square);
                    multiply::<Bf16, ROWS, MADE>(sums, square, &left, right);
                }
            });
        });
    }

    #[inline(always)]
    #[track_caller]
    unsafe fn neighbours<const MADE: usize>(sums: &[[f32; 4]; MADE], n: usize) -> ([u32; 2], F4) {
        let [row, column] = quad_place();
        // SAFETY: all lanes of the warp execute this, as the caller guarantees.
        ([row, 8 * n as u32 + column], unsafe { quad(sums[n]) })
    }
}

impl Multiplied for f32 {
    type Factors = Tf32;

    #[inline(always)]
    #[track_caller]
    fn round(tile: SharedTile<u32>, index: u32) {
        tile.set_chunk(index, tile.chunk(index).map(|word| round_tf32(f32::from_bits(word))));
    }

    #[inline(always)]
    #[track_caller]
    unsafe fn pv_accumulate<const ROWS: usize, const TILES: usize, const CHUNKS: usize, const MADE: usize>(
        sums: &mut Sums<ROWS, MADE>,
        weights: &Sums<ROWS, TILES>,
        _: Fragments<CHUNKS>,
        rows: SharedTile<u32>,
        first: usize,
    ) {
        const { assert!(MADE.is_multiple_of(4), "a lane reads chunks of four tiles") };
        let (g, t) = (warp::lane_id() / 4, warp::lane_id() % 4);
        // Row 2 t, and the next one. Laundered, so that the compiler keeps neither for other tiles:
        // the accumulators need the registers.
        let even = launder_reg(Fragments::<CHUNKS>::place(2 * t, g));
        let places = [even, (even ^ CHUNK_WORDS) + Fragments::<CHUNKS>::ROW];
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
                let at = 8 * tile as u32 * Fragments::<CHUNKS>::ROW + 8 * (first / 4 + four) as u32 * CHUNK_WORDS;
                let [even, odd] = places.map(|place| rows.chunk(place + at));
                // SAFETY: all lanes of the warp execute this, converged, as the caller guarantees.
                unsafe {
                    converge_warp();
                    multiply::<Tf32, ROWS, MADE>(sums, 2 * four, &left, [even[0], odd[0], even[1], odd[1]]);
                    multiply::<Tf32, ROWS, MADE>(sums, 2 * four + 1, &left, [even[2], odd[2], even[3], odd[3]]);
                }
            });
        });
    }

    /// A group of four tiles has the lane's columns `8 t` to `8 t + 7` of 32, for two rows.
    #[inline(always)]
    unsafe fn neighbours<const MADE: usize>(sums: &[[f32; 4]; MADE], n: usize) -> ([u32; 2], F4) {
        let (g, t) = (warp::lane_id() / 4, warp::lane_id() % 4);
        let (four, at) = (n / 4 * 4, n % 4);
        let column = 8 * four as u32 + 8 * t + 4 * (at as u32 % 2);
        let of_tile = |tile: usize| sums[four + tile][at];
        ([g + 8 * (at as u32 / 2), column], F4([of_tile(0), of_tile(1), of_tile(2), of_tile(3)]))
    }
}
