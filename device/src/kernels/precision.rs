//! Rounding of whole matrices to BF16, for multiplies that take it.
//!
//! Invariant: an element is rounded to nearest, ties to even, whatever stands beside it.

use crate::contract;
use crate::format::round_bf16;
use crate::vector::{F4, Part};
use cuda_std::prelude::*;

#[cfg(not(target_arch = "nvptx64"))]
const BLOCK: u32 = 128;
/// Elements that a thread rounds: four words.
const ELEMENTS: usize = 8;

/// Rounds `batches` matrices of `rows` x `cols`, the elements of `x` at `z stride + i ld + j`, to pairs of BF16 in rows of
/// `cols` rounded up to eight, one after another: `out: [batches, rows, ceil(cols / 8) * 4]`, the first of a pair in the lower
/// half, zero beyond `cols`.
#[kernel]
pub unsafe fn round_to_bf16(
    x: &[f32],
    out: *mut u32,
    rows: usize,
    cols: usize,
    batches: usize,
    ld: usize,
    stride: usize,
) {
    let chunks = cols.div_ceil(ELEMENTS);
    let chunk = thread::index_1d() as usize;
    if chunk >= batches * rows * chunks {
        return;
    }
    let (row, column) = (chunk / chunks, chunk % chunks * ELEMENTS);
    let from = row / rows * stride + row % rows * ld + column;
    let four = |at: usize| {
        let left = cols.saturating_sub(column + at);
        let whole = left >= F4::LEN && (from + at).is_multiple_of(F4::LEN);
        let part = if whole { Part::Whole } else { Part::first(left) };
        // SAFETY: the part of these columns that exists lies inside `x`, as the contract has checked.
        unsafe { F4::load_part(x, from + at, part, 0.0) }
    };
    let ([a, b, c, d], [e, f, g, h]) = (four(0).0, four(F4::LEN).0);
    let words = [round_bf16(a, b), round_bf16(c, d), round_bf16(e, f), round_bf16(g, h)];
    // SAFETY: `out` has four words for each chunk, as the contract has checked; words are moved as they are.
    unsafe { F4(words.map(f32::from_bits)).store(out.cast(), 4 * chunk) };
}

contract! { round_to_bf16 { block: BLOCK } |p| {
    super::matmul::checks::holds("x", p.x.len(), p.batches, p.stride, [p.rows, p.cols], p.ld)?;
    let chunks = p.batches.saturating_mul(p.rows).saturating_mul(p.cols.div_ceil(ELEMENTS));
    Violation::unless_length("out", chunks.saturating_mul(4), p.out.len())?;
    Violation::unless(chunks <= u32::MAX as usize - BLOCK as usize, "x", "fewer than 2^35 elements", p.x.len())?;
    Grid::cover(chunks, BLOCK as usize)
}}
