//! The sums of B's columns, from the stages in shared memory.
//!
//! A thread has two adjacent columns and two of the four chains that
//! [`matmul_bf16`](crate::matmul_bf16) defines. Lanes 0 to 15 have chains 0 and 1, lanes 16 to 31 have
//! chains 2 and 3, of the same 32 columns:
//!
//! ```text
//! warp w: columns 32 w .. 32 w + 31      lane l < 16:  columns 32 w + 2 l, + 1, chains 0 and 1
//!                                        lane l + 16:  the same columns,        chains 2 and 3
//! ```

use crate::matmul_bf16::block::ColumnSums;
use crate::tile::SharedTile;
use crate::unroll_on_gpu;
use crate::vector::put;
use crate::warp::Converged;
use crate::wgmma::word_of;
use cuda_std::warp;

/// A thread's sums of two columns, of two chains each.
#[derive(Clone, Copy)]
pub(super) struct Chains([[f32; 2]; 2]);

impl Chains {
    #[inline(always)]
    pub(super) fn new() -> Self {
        Self([[0.0; 2]; 2])
    }

    /// Adds the first `steps` steps of 16 k of a stage of B, which is stored across k, in a tile of
    /// `cols` columns. `own` is the thread's number among those that multiply.
    #[inline(always)]
    pub(super) fn add(&mut self, b: SharedTile<u32>, own: u32, cols: u32, steps: u32) {
        let (column, half) = (own_column(own) % cols, warp::lane_id() / 16);
        unroll_on_gpu!(step < 4 => {
            if step as u32 >= steps {
                return;
            }
            unroll_on_gpu!(chain < 2 => {
                unroll_on_gpu!(at < 4 => {
                    let k = 16 * step as u32 + 4 * half + [0, 1, 8, 9][at] + 2 * chain as u32;
                    let word = b.get(word_of(false, column, k));
                    self.0[chain][0] += f32::from_bits(word << 16);
                    self.0[chain][1] += f32::from_bits(word & 0xffff_0000);
                });
            });
        });
    }

    /// Writes the sums of the columns up to `count`. The tile of `cols` columns begins with column
    /// `first`.
    ///
    /// # Safety
    /// The contract has accepted the problem.
    #[inline(always)]
    pub(super) unsafe fn finish(
        self,
        warp: Converged,
        columns: ColumnSums,
        own: u32,
        cols: u32,
        first: u32,
        count: u32,
    ) {
        let [[a, b], [c, d]] = self.0;
        let half_sums = [a + c, b + d];
        let other = warp.shfl_xor(half_sums.map(f32::to_bits), 16).map(f32::from_bits);
        let half = warp::lane_id() / 16;
        let total = if half == 0 { half_sums[0] + other[0] } else { half_sums[1] + other[1] };
        let column = first + own_column(own) + half;
        if own_column(own) < cols && column < count {
            // SAFETY: the column exists, so the contract has checked that it has an element.
            unsafe { put(columns.sums, columns.start + column as usize, total, columns.accumulate) };
        }
    }
}

/// Returns the first of a thread's two columns in the tile. Threads past the last column repeat the
/// first ones.
#[inline(always)]
fn own_column(own: u32) -> u32 {
    own / 32 * 32 + warp::lane_id() % 16 * 2
}
