//! The emulator's side of [`fragment`](super). Its lanes accumulate directly in the layout of
//! [`quads`], one product after another, so they exchange nothing.
//!
//! Invariant: the functions that `gpu.rs` has too give a lane the same elements.

use super::super::operand::place;
use super::super::tile::{CHUNK, CHUNK_WORDS};
use super::{STEP, Sums, Words, quads_place};
use crate::format::{Bf16, Format};
use crate::tile::SharedTile;
use crate::vector::{F4, load_word, store_words};
use cuda_std::{GpuFloat, warp};
use half::bf16;

/// Converts the accumulators of two adjacent mma tiles to four neighboring columns in row g and
/// four in row g + 8 of one tile. [`quads_place`] returns their location.
///
/// # Safety
/// All lanes of the warp make the call, with the sums of the same tiles.
#[inline(always)]
pub(in super::super) unsafe fn quads(tiles: [[f32; 4]; 2]) -> [F4; 2] {
    // The emulator's lanes already accumulate in this layout.
    tiles.map(F4)
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
    for (words, at) in tiles.map(Bf16::words).into_iter().zip(at) {
        // SAFETY: the columns may be written, as the caller guarantees.
        unsafe { store_words(out, at, words) };
    }
}

/// Reads `c` at a lane's accumulators of two adjacent tiles, in the rows whose 16 columns begin at
/// these indices.
///
/// # Safety
/// The columns may be read, and begin on a boundary of four elements.
#[inline(always)]
pub(in super::super) unsafe fn read_words(c: *const bf16, at: [usize; 2]) -> [Words; 2] {
    // SAFETY: the caller guarantees that the columns may be read and begin on such a boundary.
    at.map(|at| [0, 2].map(|pair| unsafe { load_word(c, at + quads_place()[1] as usize + pair) }))
}

/// Reads the bias of a lane's accumulators of two adjacent tiles, whose 16 columns begin at this
/// index.
///
/// # Safety
/// The columns lie inside `bias`, and begin on a boundary of four elements.
#[inline(always)]
pub(in super::super) unsafe fn read_bias(bias: &[f32], at: usize) -> [[f32; 4]; 2] {
    // SAFETY: the caller guarantees that the columns lie inside `bias`, on such a boundary.
    unsafe { [F4::load(bias, at + quads_place()[1] as usize).0; 2] }
}

/// Accumulates the products of a stage's step in a lane's [`quads`], one by one, k ascending. The
/// emulator uses it in place of the GPU's `multiply`.
#[inline(always)]
pub(in super::super) fn multiply_one_by_one<const ROWS: usize, const TILES: usize>(
    sums: &mut Sums<ROWS, TILES>,
    [a, b]: [SharedTile<u32>; 2],
    [along_a, along_b]: [bool; 2],
    [rows, cols]: [u32; 2],
    [first_row, first_col]: [u32; 2],
    step: u32,
) {
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

/// Implements the GPU's `add_columns`: B's columns from `first_col` on in a stage of
/// `cols` columns.
#[inline(always)]
pub(in super::super) fn add_columns_one_by_one<const COLS: usize>(
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
#[inline(always)]
fn element(part: SharedTile<u32>, along_k: bool, width: u32, row: u32, k: u32) -> f32 {
    let (down, along) = if along_k { (row, k) } else { (k, row) };
    let word = place(along_k, width, down, along / CHUNK) * CHUNK_WORDS + along % CHUNK / 2;
    f32::from_bits(if along % 2 == 0 { part.get(word) << 16 } else { part.get(word) & 0xffff_0000 })
}
