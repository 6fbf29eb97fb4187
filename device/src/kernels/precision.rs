//! Rounding of the operands of a multiply to TF32 or BF16, as they lie or transposed, into fragments.
//!
//! A warp makes a [`fragment`](crate::mma): 32 rows of eight words of k. Lane `4 g + t` rounds of rows `4 g` to `4 g + 3` the words
//! `2 t` and `2 t + 1`, and writes them where lane `4 g + t` of a multiply reads them, 16 bytes at a time. Fragments follow each
//! other along k, then along the rows, then by batches.
//!
//! Invariant: an element is rounded as [`Format`] says, whatever stands beside it; beyond the rows and k there is zero.

use super::matmul::{TRANSPOSE_A, TRANSPOSE_B};
use crate::block::divide;
use crate::contract;
use crate::format::{Bf16, Format, Tf32};
#[cfg(not(target_arch = "nvptx64"))]
use crate::mma::fragments;
use crate::mma::{FRAGMENT, QUAD, ROWS, STEP, Side};
use crate::unroll_on_gpu;
use crate::vector::{F4, Part, load_pair};
use crate::warp::LANES;
use cuda_std::prelude::*;
use cuda_std::warp;

const BLOCK: u32 = 256;
/// Fragments of a block, one for each warp.
const WARPS: usize = (BLOCK / LANES) as usize;

/// The entry points: the same parameters, another format.
macro_rules! entries {
    ($($(#[$doc:meta])* $name:ident: $format:ident;)*) => {$(
        $(#[$doc])*
        #[kernel]
        pub unsafe fn $name(
            a: &[f32],
            b: &[f32],
            a_out: *mut u32,
            b_out: *mut u32,
            m: usize,
            n: usize,
            k: usize,
            lda: usize,
            ldb: usize,
            batches_a: usize,
            batches_b: usize,
            stride_a: usize,
            stride_b: usize,
            flags: u32,
        ) {
            let (transpose_a, transpose_b) = (flags & TRANSPOSE_A != 0, flags & TRANSPOSE_B == 0);
            let left = Operand { x: a, out: a_out, side: Side::Left, rows: m, k, ld: lda, stride: stride_a };
            let right = Operand { x: b, out: b_out, side: Side::Right, rows: n, k, ld: ldb, stride: stride_b };
            let fragment = thread::block_idx_x() as usize * WARPS + (thread::thread_idx_x() / LANES) as usize;
            let before = batches_a * left.fragments::<$format>();
            // SAFETY: by the contract.
            unsafe {
                if fragment < before {
                    left.round::<$format>(fragment, transpose_a);
                } else if fragment - before < batches_b * right.fragments::<$format>() {
                    right.round::<$format>(fragment - before, transpose_b);
                }
            }
        }
    )*};
}

entries! {
    /// Rounds A and B of products to TF32. A: `[m, k]` (stored `[k, m]` with `TRANSPOSE_A`), `a_out`: `ceil(m / 32) ceil(k / 8)`
    /// fragments a batch; B: `[k, n]` (stored `[n, k]` with `TRANSPOSE_B`), `b_out`: `ceil(n / 32) ceil(k / 8)`. Other parameters
    /// are those of [`matmul`](super::matmul), for each operand its own number of batches.
    round_to_tf32: Tf32;
    /// The same to pairs of BF16, the first in the lower half; a fragment has 16 elements along k.
    round_to_bf16: Bf16;
}

/// One operand: batches of `rows` of `k` elements, `stride` elements apart.
#[derive(Clone, Copy)]
struct Operand<'p> {
    x: &'p [f32],
    out: *mut u32,
    side: Side,
    rows: usize,
    k: usize,
    ld: usize,
    stride: usize,
}

impl Operand<'_> {
    /// Fragments along k.
    #[inline(always)]
    fn steps<F: Format>(&self) -> usize {
        self.k.div_ceil(F::PER_STEP as usize)
    }

    /// Fragments of a batch.
    #[inline(always)]
    fn fragments<F: Format>(&self) -> usize {
        self.rows.div_ceil(ROWS as usize) * self.steps::<F>()
    }

    /// Makes the `fragment`th, there are fewer than 2^32.
    ///
    /// # Safety
    /// The contract has accepted the operand.
    #[inline(always)]
    unsafe fn round<F: Format>(&self, fragment: usize, transpose: bool) {
        let (g, t) = ((warp::lane_id() / 4) as usize, (warp::lane_id() % 4) as usize);
        // SAFETY: without rows or k there are no fragments.
        let (step, (block, batch)) = unsafe {
            let (above, step) = divide(fragment, self.steps::<F>());
            let (batch, block) = divide(above, self.rows.div_ceil(ROWS as usize));
            (step, (block, batch))
        };
        let (row, p) = (block * ROWS as usize + 4 * g, (step * STEP as usize + 2 * t) * F::PER_WORD as usize);
        // SAFETY: the caller's promise.
        let rows = unsafe { if transpose { self.across::<F>(batch, row, p) } else { self.along::<F>(batch, row, p) } };
        let [first, second] = self.side.quads(rows.map(F::words));
        let at = fragment * FRAGMENT as usize + (warp::lane_id() * QUAD) as usize;
        // SAFETY: `out` has room for the fragment, as the contract has checked; words are moved as they are.
        unsafe {
            F4(first.map(f32::from_bits)).store(self.out.cast(), at);
            F4(second.map(f32::from_bits)).store(self.out.cast(), at + FRAGMENT as usize / 2);
        }
    }

    /// The elements of two words from `p` on, of four rows from `row` on, where a row's lie side by side.
    ///
    /// # Safety
    /// As above.
    #[inline(always)]
    unsafe fn along<F: Format>(&self, batch: usize, row: usize, p: usize) -> [[f32; 4]; 4] {
        let mut rows = [[0.0; 4]; 4];
        unroll_on_gpu!(i < 4 => {
            if row + i < self.rows && p < self.k {
                let (from, left) = (batch * self.stride + (row + i) * self.ld + p, self.k - p);
                // SAFETY: the part of the row that exists lies inside `x`, as the contract has checked.
                unsafe {
                    if F::PER_WORD == 1 && left > 1 && from.is_multiple_of(2) {
                        let [first, second] = load_pair(self.x, from);
                        rows[i] = [first, second, 0.0, 0.0];
                    } else {
                        let wanted = if left < 2 * F::PER_WORD as usize { left } else { 2 * F::PER_WORD as usize };
                        let whole = wanted == F4::LEN && from.is_multiple_of(F4::LEN);
                        rows[i] = F4::load_part(self.x, from, if whole { Part::Whole } else { Part::First(wanted) }, 0.0).0;
                    }
                }
            }
        });
        rows
    }

    /// The same where rows lie side by side.
    ///
    /// # Safety
    /// As above.
    #[inline(always)]
    unsafe fn across<F: Format>(&self, batch: usize, row: usize, p: usize) -> [[f32; 4]; 4] {
        let mut rows = [[0.0; 4]; 4];
        unroll_on_gpu!(i < 4 => {
            if i < 2 * F::PER_WORD as usize && p + i < self.k && row < self.rows {
                let (from, left) = (batch * self.stride + (p + i) * self.ld + row, self.rows - row);
                let whole = left >= F4::LEN && from.is_multiple_of(F4::LEN);
                // SAFETY: as above.
                let four = unsafe { F4::load_part(self.x, from, if whole { Part::Whole } else { Part::first(left) }, 0.0) };
                unroll_on_gpu!(of < 4 => { rows[of][i] = four.0[of]; });
            }
        });
        rows
    }
}

/// What the contracts check of one operand; the fragments that it has.
#[cfg(not(target_arch = "nvptx64"))]
fn check<F: Format>(
    [argument, output]: [&'static str; 2],
    [len, out_len]: [usize; 2],
    [rows, k]: [usize; 2],
    [batches, stride, ld]: [usize; 3],
    transpose: bool,
) -> Result<usize, cuda_std::launch::Violation> {
    use cuda_std::launch::Violation;

    super::matmul::checks::holds(argument, len, batches, stride, if transpose { [k, rows] } else { [rows, k] }, ld)?;
    let words = batches.saturating_mul(fragments::<F>([rows, k]));
    Violation::unless(words <= u32::MAX as usize * FRAGMENT as usize, argument, "below 2^32 fragments", len)?;
    Violation::unless_length(output, words, out_len)?;
    Ok(words / FRAGMENT as usize)
}

#[cfg(not(target_arch = "nvptx64"))]
macro_rules! grid {
    ($p:ident, $format:ident) => {{
        let (transpose_a, transpose_b) = ($p.flags & TRANSPOSE_A != 0, $p.flags & TRANSPOSE_B == 0);
        let [a, b] = [[$p.a.len(), $p.a_out.len()], [$p.b.len(), $p.b_out.len()]];
        let [lie_a, lie_b] = [[$p.batches_a, $p.stride_a, $p.lda], [$p.batches_b, $p.stride_b, $p.ldb]];
        let left = check::<$format>(["a", "a_out"], a, [$p.m, $p.k], lie_a, transpose_a)?;
        let right = check::<$format>(["b", "b_out"], b, [$p.n, $p.k], lie_b, transpose_b)?;
        Grid::new((left + right).div_ceil(WARPS), 1, 1)
    }};
}

contract!(round_to_tf32 { block: BLOCK, shared: 0 } | p | grid!(p, Tf32));
contract!(round_to_bf16 { block: BLOCK, shared: 0 } | p | grid!(p, Bf16));
