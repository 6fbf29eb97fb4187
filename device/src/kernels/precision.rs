//! Rounding of the operands of a multiply to TF32 or BF16, as they lie or transposed.
//!
//! Invariant: an element is rounded as [`Format`] says, whatever stands beside it. Rounded rows lie along k and are as long as a
//! multiple of eight elements, with zero beyond k.

use super::matmul::{TRANSPOSE_A, TRANSPOSE_B};
use crate::block::divide;
use crate::contract;
use crate::format::{Bf16, Format, Tf32};
use crate::tile::SharedTile;
use crate::unroll_on_gpu;
use crate::vector::{F4, Part, load};
use cuda_std::prelude::*;

const BLOCK: u32 = 256;
/// Elements that a thread rounds.
const ELEMENTS: usize = 8;
/// K and rows of a block's part of an operand that is transposed: a thread has eight elements along k.
const DEPTH: usize = 64;
const ROWS: usize = BLOCK as usize * ELEMENTS / DEPTH;
/// Floats from one k to the next in shared memory: those of a row lie in several banks.
const PITCH: u32 = ROWS as u32 + 1;

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
            let left = Operand { x: a, out: a_out, rows: m, k, batches: batches_a, ld: lda, stride: stride_a };
            let right = Operand { x: b, out: b_out, rows: n, k, batches: batches_b, ld: ldb, stride: stride_b };
            let (block, before) = (thread::block_idx_x() as usize, left.blocks(transpose_a));
            // SAFETY: by the contract.
            unsafe {
                if block < before {
                    left.round::<$format>(block, transpose_a);
                } else {
                    right.round::<$format>(block - before, transpose_b);
                }
            }
        }
    )*};
}

entries! {
    /// Rounds A and B of `batches` products to TF32: of `[m, k]` (stored `[k, m]` with `TRANSPOSE_A`) to
    /// `a_out: [batches_a, m, ceil(k / 8) * 8]`, of `[k, n]` (stored `[n, k]` with `TRANSPOSE_B`) to
    /// `b_out: [batches_b, n, ceil(k / 8) * 8]`. Parameters are those of [`matmul`](super::matmul).
    round_to_tf32: Tf32;
    /// The same to pairs of BF16, the first in the lower half: rows of `ceil(k / 8) * 4` words.
    round_to_bf16: Bf16;
}

/// One operand: `batches` of `rows` of `k` elements, `stride` elements apart.
#[derive(Clone, Copy)]
struct Operand<'p> {
    x: &'p [f32],
    out: *mut u32,
    rows: usize,
    k: usize,
    batches: usize,
    ld: usize,
    stride: usize,
}

impl Operand<'_> {
    /// Blocks that round it.
    #[inline(always)]
    fn blocks(&self, transpose: bool) -> usize {
        blocks([self.rows, self.k], self.batches, transpose)
    }

    /// Rounds what the `block`th of its blocks has of it.
    ///
    /// # Safety
    /// The contract has accepted the operand.
    #[inline(always)]
    unsafe fn round<F: Format>(&self, block: usize, transpose: bool) {
        // SAFETY: the caller's promise.
        unsafe { if transpose { self.transpose::<F>(block) } else { self.straight::<F>(block) } }
    }

    /// Eight neighbours of a row for each thread.
    ///
    /// # Safety
    /// As above.
    #[inline(always)]
    unsafe fn straight<F: Format>(&self, block: usize) {
        let Self { x, out, rows, k, batches, ld, stride } = *self;
        let chunks = k.div_ceil(ELEMENTS);
        let chunk = block * BLOCK as usize + thread::thread_idx_x() as usize;
        if chunk >= batches * rows * chunks {
            return;
        }
        // SAFETY: without rows or k there are no chunks.
        let (p, (batch, row)) = unsafe {
            let (row, chunk) = divide(chunk, chunks);
            (chunk * ELEMENTS, divide(row, rows))
        };
        let from = batch * stride + row * ld + p;
        let four = |at: usize| {
            let left = k.saturating_sub(p + at);
            let whole = left >= F4::LEN && (from + at).is_multiple_of(F4::LEN);
            let part = if whole { Part::Whole } else { Part::first(left) };
            // SAFETY: the part of the row that exists lies inside `x`, as the contract has checked.
            unsafe { F4::load_part(x, from + at, part, 0.0) }
        };
        let (first, second) = (four(0), four(F4::LEN));
        // SAFETY: `out` has room for each chunk, as the contract has checked.
        unsafe { F::store(first, second, out, chunk) };
    }

    /// Rows that lie across: a part of them for each block, through shared memory. Warps read along rows and write along k.
    ///
    /// # Safety
    /// As above.
    #[inline(always)]
    unsafe fn transpose<F: Format>(&self, block: usize) {
        let Self { x, out, rows, k, ld, stride, .. } = *self;
        let thread = thread::thread_idx_x() as usize;
        // SAFETY: without rows or k there are no blocks.
        let (first_row, (batch, first_k)) = unsafe {
            let (above, across) = divide(block, rows.div_ceil(ROWS));
            let (batch, along) = divide(above, k.div_ceil(DEPTH));
            (across * ROWS, (batch, along * DEPTH))
        };
        // SAFETY: as declared in the contract.
        let tile = unsafe { SharedTile::<f32>::new(0, DEPTH as u32 * PITCH) };

        let (p, row) = (thread / ROWS, thread % ROWS);
        unroll_on_gpu!(pass < ELEMENTS => {
            let p = p + pass * (DEPTH / ELEMENTS);
            let mut value = 0.0;
            if first_k + p < k && first_row + row < rows {
                // SAFETY: an element of the operand, which lies inside `x`, as the contract has checked.
                value = unsafe { load(x, batch * stride + (first_k + p) * ld + first_row + row) };
            }
            tile.set(p as u32 * PITCH + row as u32, value);
        });
        thread::sync_threads();

        let (row, chunk) = (thread / (DEPTH / ELEMENTS), thread % (DEPTH / ELEMENTS));
        let (chunks, own) = (k.div_ceil(ELEMENTS), first_k / ELEMENTS + chunk);
        if first_row + row >= rows || own >= chunks {
            return;
        }
        let four = |p: usize| {
            let at = |p: usize| tile.get(p as u32 * PITCH + row as u32);
            F4([at(p), at(p + 1), at(p + 2), at(p + 3)])
        };
        let (first, second) = (four(chunk * ELEMENTS), four(chunk * ELEMENTS + F4::LEN));
        // SAFETY: `out` has room for each chunk, as the contract has checked.
        unsafe { F::store(first, second, out, (batch * rows + first_row + row) * chunks + own) };
    }
}

/// Blocks that round `batches` of `rows` of `k` elements.
#[inline(always)]
fn blocks([rows, k]: [usize; 2], batches: usize, transpose: bool) -> usize {
    if transpose {
        batches * rows.div_ceil(ROWS) * k.div_ceil(DEPTH)
    } else {
        (batches * rows * k.div_ceil(ELEMENTS)).div_ceil(BLOCK as usize)
    }
}

/// What the contracts check of one operand; the blocks that round it.
#[cfg(not(target_arch = "nvptx64"))]
fn check(
    [argument, output]: [&'static str; 2],
    [len, out_len, per_word]: [usize; 3],
    [rows, k]: [usize; 2],
    [batches, stride, ld]: [usize; 3],
    transpose: bool,
) -> Result<usize, cuda_std::launch::Violation> {
    use cuda_std::launch::Violation;

    super::matmul::checks::holds(argument, len, batches, stride, if transpose { [k, rows] } else { [rows, k] }, ld)?;
    let chunks = batches.saturating_mul(rows).saturating_mul(k.div_ceil(ELEMENTS));
    Violation::unless(chunks <= u32::MAX as usize, argument, "at most 2^35 elements", len)?;
    Violation::unless_length(output, chunks * ELEMENTS / per_word, out_len)?;
    Ok(blocks([rows, k], batches, transpose))
}

#[cfg(not(target_arch = "nvptx64"))]
macro_rules! grid {
    ($p:ident, $format:ident) => {{
        let (transpose_a, transpose_b) = ($p.flags & TRANSPOSE_A != 0, $p.flags & TRANSPOSE_B == 0);
        let per_word = $format::PER_WORD as usize;
        let lengths = [[$p.a.len(), $p.a_out.len(), per_word], [$p.b.len(), $p.b_out.len(), per_word]];
        let left = check(["a", "a_out"], lengths[0], [$p.m, $p.k], [$p.batches_a, $p.stride_a, $p.lda], transpose_a)?;
        let right = check(["b", "b_out"], lengths[1], [$p.n, $p.k], [$p.batches_b, $p.stride_b, $p.ldb], transpose_b)?;
        Grid::new(left + right, 1, 1)
    }};
}

contract!(round_to_tf32 { block: BLOCK, shared: 4 * DEPTH as u32 * PITCH } | p | grid!(p, Tf32));
contract!(round_to_bf16 { block: BLOCK, shared: 4 * DEPTH as u32 * PITCH } | p | grid!(p, Bf16));
