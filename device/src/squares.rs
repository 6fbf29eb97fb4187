//! Products of BF16 by matrix instructions: squares of 16 x 16, read from shared memory, that a warp multiplies.
//!
//! A warp reads a square of a factor by one `ldmatrix.x4`: four matrices of 8 x 8, of which lane `8 q + r` names row r of matrix q. Lane
//! `4 g + t` gets elements 2 t and 2 t + 1 of row g of each.
//!
//! ```text
//!            A: k 0..7   8..15        B: k 0..7   8..15         sums of 16 x 16:   columns 0..7    8..15
//! rows 0..7     q 0      q 2     columns 0..7   q 0    q 1          rows 0..7          tile 0    tile 1
//! rows 8..15    q 1      q 3     columns 8..15  q 2    q 3          rows 8..15         tile 0    tile 1
//!
//! a tile, as the instruction gives it:                  and after the lanes have exchanged, `quad`:
//!   lane 4 g + t: row g     columns 2 t, 2 t + 1          even t: row g,      columns 2 t .. 2 t + 3
//!                 row g + 8 columns 2 t, 2 t + 1          odd t:  row g + 8,  columns 2 t - 2 .. 2 t + 1
//! ```
//! Two tiles of sums side by side, rounded, lie as a square of A does: see [`left_of_sums`].
//!
//! Invariant: a sum's products are added by ascending k, sixteen at a time by a GPU, one by one by the emulator; see [`mma`](crate::mma).

use crate::block::opaque;
use crate::format::round_bf16;
use crate::tile::SharedTile;
use crate::vector::F4;
use cuda_std::warp;

/// The k of one instruction, and the extent of a square.
pub const STEP: u32 = 16;

/// A lane's sums: of `ROWS` x `TILES` tiles of 16 x 8 outputs.
pub type Sums<const ROWS: usize, const TILES: usize> = [[[f32; 4]; TILES]; ROWS];

/// Adds the products of `ROWS` squares of A, below each other, and of one square of B to the sums of tiles `2 square` and `2 square + 1`.
///
/// # Safety
/// All lanes of the warp make the call, [`together`](crate::warp::stay_together).
#[inline(always)]
#[track_caller]
pub unsafe fn multiply<const ROWS: usize, const TILES: usize>(
    sums: &mut Sums<ROWS, TILES>,
    square: usize,
    a: &[[u32; 4]; ROWS],
    b: [u32; 4],
) {
    use crate::format::{Bf16, Format};
    #[cfg(target_arch = "nvptx64")]
    {
        let [b0, b1, b2, b3] = b;
        crate::unroll!(row < ROWS => {
            // SAFETY: all lanes are here, together, as the caller promises.
            unsafe {
                sums[row][2 * square] = Bf16::mma(a[row], [b0, b1], sums[row][2 * square]);
                sums[row][2 * square + 1] = Bf16::mma(a[row], [b2, b3], sums[row][2 * square + 1]);
            }
        });
    }
    #[cfg(not(target_arch = "nvptx64"))]
    {
        let own = (*a, b);
        let factors = cuda_std::emulator::lanes(&own);
        let (g, t) = (warp::lane_id() as usize / 4, warp::lane_id() as usize % 4);
        // Element k of words `word` (k below 8) and `word + later` of the four lanes from `first` on.
        let chain = |first: usize, word: &dyn Fn(usize, usize) -> u32| -> [f32; STEP as usize] {
            core::array::from_fn(|k| Bf16::value(word(first + k % 8 / 2, k / 8), k as u32 % 2))
        };
        // SAFETY: each lane's factors live until the `sync_warp` below, where all lanes come, as they came here.
        let right = unsafe {
            let of = |tile: usize, column: usize| {
                chain(4 * (2 * t + column), &|lane, later| (*factors[lane]).1[2 * tile + later])
            };
            [of(0, 0), of(0, 1), of(1, 0), of(1, 1)]
        };
        for (row, sums) in sums.iter_mut().enumerate() {
            // SAFETY: as above.
            let left =
                unsafe { [0, 1].map(|half| chain(4 * g, &|lane, later| (*factors[lane]).0[row][half + 2 * later])) };
            let mut chains = [[0.0; 4]; 2];
            chains.copy_from_slice(&sums[2 * square..2 * square + 2]);
            // Eight sums side by side, which a CPU adds at once.
            for k in 0..STEP as usize {
                for (tile, chains) in chains.iter_mut().enumerate() {
                    for (at, sum) in chains.iter_mut().enumerate() {
                        *sum = cuda_std::GpuFloat::mul_add(left[at / 2][k], right[2 * tile + at % 2][k], *sum);
                    }
                }
            }
            sums[2 * square..2 * square + 2].copy_from_slice(&chains);
        }
        // SAFETY: all lanes are here together, as the caller promises.
        unsafe { warp::sync_warp(u32::MAX) };
    }
}

/// Two tiles of sums side by side, rounded to BF16, as a square of A.
#[inline(always)]
pub fn left_of_sums([a, b, c, d]: [f32; 4], [e, f, g, h]: [f32; 4]) -> [u32; 4] {
    [round_bf16(a, b), round_bf16(c, d), round_bf16(e, f), round_bf16(g, h)]
}

/// The row and the first column of a lane's four neighbours in a tile of 16 x 8, see [`quad`].
#[inline(always)]
pub fn quad_place() -> [u32; 2] {
    let (g, t) = (warp::lane_id() / 4, warp::lane_id() % 4);
    [g + 8 * (t % 2), t / 2 * 4]
}

/// The sums of a tile as four neighbours of one row each: what the lanes exchange two by two.
///
/// # Safety
/// All lanes of the warp make the call, with the sums of the same tile.
#[inline(always)]
#[track_caller]
pub unsafe fn quad(sums: [f32; 4]) -> F4 {
    // By masks: a condition would become a branch, and part the lanes.
    let odd = (warp::lane_id() % 2).wrapping_neg();
    let choose = |if_odd: u32, if_even: u32| if_odd & odd | if_even & !odd;
    let [a, b, c, d] = sums.map(f32::to_bits);
    // SAFETY: all lanes are here, as the caller promises.
    let [x, y] = unsafe { crate::warp::of_other_lane(u32::MAX, [choose(a, c), choose(b, d)], 1) };
    F4([choose(x, a), choose(y, b), choose(c, x), choose(d, y)].map(f32::from_bits))
}

/// Where a lane reads squares of a tile of BF16 rows in shared memory, `8 CHUNKS` columns each; `CHUNKS` is a multiple of eight.
///
/// ```text
///   row 0   | c 0 | c 1 | c 2 | ..        chunks of eight columns (16 bytes)
///   row 1   | c 1 | c 0 | c 3 | ..        chunk c of row r stands at c xor (r mod 8): eight rows of one chunk, which a matrix
///   row 2   | c 2 | c 3 | c 0 | ..        instruction reads together, lie in 32 banks
/// ```
#[derive(Clone, Copy)]
pub struct Squares<const CHUNKS: usize> {
    /// The word of the lane's row in the first square, where the second matrix is the lower one, and where it is that at the right.
    down: u32,
    across: u32,
}

/// Words of a chunk.
pub const CHUNK_WORDS: u32 = 4;

impl<const CHUNKS: usize> Squares<CHUNKS> {
    /// Words of a row.
    pub const ROW: u32 = CHUNKS as u32 * CHUNK_WORDS;

    /// The word of a chunk.
    #[inline(always)]
    pub fn place(row: u32, chunk: u32) -> u32 {
        row * Self::ROW + (chunk ^ (row % 8)) * CHUNK_WORDS
    }

    /// This lane's.
    #[inline(always)]
    pub fn of_lane() -> Self {
        let (q, r) = (warp::lane_id() / 8, warp::lane_id() % 8);
        Self { down: Self::place(8 * (q % 2) + r, q / 2), across: Self::place(8 * (q / 2) + r, q % 2) }
    }

    /// The same, of which the compiler keeps nothing between two turns of a loop: it would take a register for each step.
    #[inline(always)]
    pub fn anew(self) -> Self {
        Self { down: opaque(self.down), across: opaque(self.across) }
    }

    /// A square of A: rows of the tile from `row` on, k from column `16 step` on.
    ///
    /// # Safety
    /// All lanes of the warp make the call, [`together`](crate::warp::stay_together). `row` is a multiple of eight.
    #[inline(always)]
    #[track_caller]
    pub unsafe fn left(self, tile: SharedTile<u32>, row: u32, step: usize) -> [u32; 4] {
        // The next two chunks, within what is swizzled: they flip the second bit of a chunk's number and those above it.
        // SAFETY: the lane's row lies inside the tile, on 16 bytes; all lanes are here, as the caller promises.
        unsafe { tile.matrices((self.down ^ (step as u32 * 2 * CHUNK_WORDS)) + row * Self::ROW, false) }
    }

    /// A square of B whose columns are rows of the tile, from `row` on; k from column `16 step` on.
    ///
    /// # Safety
    /// As for [`Squares::left`].
    #[inline(always)]
    #[track_caller]
    pub unsafe fn right(self, tile: SharedTile<u32>, row: u32, step: usize) -> [u32; 4] {
        // SAFETY: as in `left`.
        unsafe { tile.matrices((self.across ^ (step as u32 * 2 * CHUNK_WORDS)) + row * Self::ROW, false) }
    }

    /// A square of B whose k are rows of the tile, from `row` on; columns from column `16 square` on.
    ///
    /// # Safety
    /// As for [`Squares::left`].
    #[inline(always)]
    #[track_caller]
    pub unsafe fn right_down(self, tile: SharedTile<u32>, row: u32, square: usize) -> [u32; 4] {
        // SAFETY: as in `left`.
        unsafe { tile.matrices((self.down ^ (square as u32 * 2 * CHUNK_WORDS)) + row * Self::ROW, true) }
    }
}
