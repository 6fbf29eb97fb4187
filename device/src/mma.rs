//! Matrix instructions: a warp multiplies 32 rows by 32 columns over eight words of k.
//!
//! Lane `4 g + t` brings a [`Factor`] of each side: of rows `4 g` to `4 g + 3` of A, and of as many columns of B, the words
//! `t` and `t + 4`; it gets the [`Sums`] of rows `4 g` to `4 g + 3` and columns `8 t` to `8 t + 7`. So what a lane reads and
//! writes lies side by side. Which eight words of k these are is the caller's choice, the same on both sides.
//!
//! Products are exact. On the emulator they are added to the f32 sum one by one, words ascending, the lower half of a word
//! first, each sum rounded to nearest. A GPU aligns the products of an instruction, at most 16, and the old sum to the largest
//! of them, and cuts off what is below the last place: each addend loses at most 2^-23 of the largest (Fasi, Higham, Mikaitis
//! and Pranesh, "Numerical behavior of NVIDIA tensor cores", 2021). So bits may differ, and a sum of k products is within
//! k 2^-22 of the sum of their sizes.

use crate::format::Format;
#[cfg(not(target_arch = "nvptx64"))]
use cuda_std::{GpuFloat, emulator, warp};

/// Four rows or columns, of each two words.
pub type Factor = [[u32; 2]; 4];

/// Four rows of eight columns.
pub type Sums = [[f32; 8]; 4];

/// Adds the products of the warp's factors to `sums`.
///
/// # Safety
/// All lanes of the warp make the call.
#[inline(always)]
#[track_caller]
pub unsafe fn multiply<F: Format>(sums: &mut Sums, a: Factor, b: Factor) {
    #[cfg(target_arch = "nvptx64")]
    crate::unroll_on_gpu!(pair < 2 => {
        // The instruction's rows g and g + 8 are two neighbours here, its columns 2 t and 2 t + 1 two that are four apart.
        let [upper, lower] = [2 * pair, 2 * pair + 1];
        crate::unroll_on_gpu!(column < 4 => {
            let rows = [a[upper][0], a[lower][0], a[upper][1], a[lower][1]];
            let old = [sums[upper][column], sums[upper][column + 4], sums[lower][column], sums[lower][column + 4]];
            // SAFETY: the caller's promise.
            let new = unsafe { F::mma(rows, b[column], old) };
            [sums[upper][column], sums[upper][column + 4], sums[lower][column], sums[lower][column + 4]] = new;
        });
    });
    #[cfg(not(target_arch = "nvptx64"))]
    {
        let own = [a, b];
        let lanes = emulator::lanes(&own);
        let (g, t) = ((warp::lane_id() / 4) as usize, (warp::lane_id() % 4) as usize);
        for word in 0..8 {
            // SAFETY: each lane keeps its factors until all have met below.
            let [rows, left, right] = unsafe {
                let of = |lane: usize| *lanes[lane * 4 + word % 4];
                [of(g)[0], of(2 * t)[1], of(2 * t + 1)[1]]
            };
            for part in 0..F::PER_WORD {
                let mut columns = [0.0; 8];
                for column in 0..4 {
                    columns[column] = F::value(left[column][word / 4], part);
                    columns[column + 4] = F::value(right[column][word / 4], part);
                }
                for row in 0..4 {
                    let factor = F::value(rows[row][word / 4], part);
                    for column in 0..8 {
                        sums[row][column] = GpuFloat::mul_add(factor, columns[column], sums[row][column]);
                    }
                }
            }
        }
        // SAFETY: the caller's promise.
        unsafe { warp::sync_warp(u32::MAX) };
    }
}
