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
//! `fragment/gpu.rs` and `fragment/emulated.rs` have the functions that differ between a GPU and
//! the emulator.
//!
//! Invariant: the products of an output are accumulated by ascending k, sixteen at a time.

#[cfg(not(target_arch = "nvptx64"))]
#[path = "fragment/emulated.rs"]
mod machine;
#[cfg(target_arch = "nvptx64")]
#[path = "fragment/gpu.rs"]
mod machine;

use cuda_std::warp;
#[cfg(target_arch = "nvptx64")]
pub(super) use machine::{Source, add_columns, multiply};
#[cfg(not(target_arch = "nvptx64"))]
pub(super) use machine::{add_columns_one_by_one, multiply_one_by_one};
pub(super) use machine::{quads, read_bias, read_words, write_quads};

/// The k of one mma instruction.
pub(super) const STEP: u32 = 16;

/// A lane's accumulators of `ROWS` x `TILES` mma tiles of 16 x 8 outputs.
pub(super) type Sums<const ROWS: usize, const TILES: usize> = [[[f32; 4]; TILES]; ROWS];

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

/// Two pairs of BF16: memory's content at a lane's accumulators of one tile.
pub(super) type Words = [u32; 2];

/// Returns the first row and the first column of a lane's [`quads`] in two adjacent tiles of 16 x
/// 8. The other row is eight further down.
#[inline(always)]
pub(super) fn quads_place() -> [u32; 2] {
    let (g, t) = (warp::lane_id() / 4, warp::lane_id() % 4);
    [g, 8 * (t % 2) + 4 * (t / 2)]
}
