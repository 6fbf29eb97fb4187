//! Copies of operands whose rows do not begin on 16 bytes, to rows that do.
//!
//! ```text
//! rows of 11   | 0 .. 10 | 11 .. 21 | 22 .. 32 |
//! out          | 0 .. 7 | 8 9 10 0 0 0 0 0 | 11 .. 18 | 19 20 21 0 0 0 0 0 | ..
//! ```
//! A thread writes a chunk of eight elements. It reads words where it can: all four of an even
//! place, three of an odd one.
//!
//! Invariant: an element is moved bit by bit. Past the end of a row are zeros.

use crate::block::{BLOCK, divide};
use crate::contract;
#[cfg(not(target_arch = "nvptx64"))]
use crate::matmul::checks::holds;
use crate::unroll_on_gpu;
use crate::vector::{load, load_word, store_chunk};
#[cfg(not(target_arch = "nvptx64"))]
use cuda_std::launch::{PointerMut, Size, Slice, Violation};
use cuda_std::prelude::*;
use cuda_std::warpgroup_kernel;
use half::bf16;

/// The elements of 16 bytes.
const CHUNK: usize = 8;

/// Returns the elements from a row of `cols` to the next where rows begin on 16 bytes.
pub const fn aligned_stride<T>(cols: usize) -> usize {
    cols.next_multiple_of(16 / size_of::<T>())
}

/// Copies up to two operands. Each has `batches` matrices of `rows` x `cols`, with strides `stride`
/// and `ld`. In `out` a row begins [`aligned_stride`] after the one before, and a matrix after the
/// last row of the one before.
#[warpgroup_kernel]
pub unsafe fn align_rows(
    a: &[bf16],
    a_out: *mut bf16,
    a_rows: usize,
    a_cols: usize,
    a_ld: usize,
    a_batches: usize,
    a_stride: usize,
    b: &[bf16],
    b_out: *mut bf16,
    b_rows: usize,
    b_cols: usize,
    b_ld: usize,
    b_batches: usize,
    b_stride: usize,
) {
    let work = |x, out, rows, cols, ld, batches, stride| AligningWork { x, out, rows, cols, ld, batches, stride };
    let a = work(a, a_out, a_rows, a_cols, a_ld, a_batches, a_stride);
    let b = work(b, b_out, b_rows, b_cols, b_ld, b_batches, b_stride);
    let block = thread::block_idx_x() as usize;
    let before_b = a.chunks().div_ceil(BLOCK as usize);
    let (work, block) = if block < before_b { (a, block) } else { (b, block - before_b) };
    let chunk = block * BLOCK as usize + thread::thread_idx_x() as usize;
    if chunk < work.chunks() {
        // SAFETY: the contract has accepted the operand, which has this chunk.
        unsafe { work.copy(chunk) };
    }
}

// SAFETY: `check` has found every matrix of an operand inside its argument, and the output holds
// exactly the chunks. A thread writes one chunk.
contract! { unsafe align_rows { block: BLOCK } |p| {
    let a = check(["a", "a_out"], [p.a.len(), p.a_out.len()], [p.a_rows, p.a_cols, p.a_ld], [p.a_batches, p.a_stride])?;
    let b = check(["b", "b_out"], [p.b.len(), p.b_out.len()], [p.b_rows, p.b_cols, p.b_ld], [p.b_batches, p.b_stride])?;
    Grid::new(a.plus(b), 1, 1)
} }

/// Checks one operand for the contract. Returns its blocks.
#[cfg(not(target_arch = "nvptx64"))]
fn check(
    [argument, out]: [&'static str; 2],
    [len, out_len]: [usize; 2],
    [rows, cols, ld]: [usize; 3],
    [batches, stride]: [usize; 2],
) -> Result<Size, Violation> {
    holds(argument, len, batches, stride, [rows, cols], ld)?;
    let chunks = Size::of(batches).times(rows).times(cols.div_ceil(CHUNK));
    Violation::unless(chunks.at_most((1 << 38) - 1), argument, "below 2^38 chunks of 16 bytes", chunks)?;
    Violation::unless_length(out, chunks.times(CHUNK), out_len)?;
    Ok(chunks.div_ceil(BLOCK))
}

/// One operand of a launch of `align_rows`.
#[cfg(not(target_arch = "nvptx64"))]
#[derive(Default)]
#[allow(missing_docs, reason = "named as the kernel's parameters")]
pub struct Aligning<'a> {
    pub values: Option<Slice<'a, bf16>>,
    pub out: Option<PointerMut<'a, bf16>>,
    pub rows: usize,
    pub cols: usize,
    pub ld: usize,
    pub batches: usize,
    pub stride: usize,
}

#[cfg(not(target_arch = "nvptx64"))]
impl<'a> align_rows<'a> {
    /// Returns the launch that copies these operands.
    pub fn of([a, b]: [Aligning<'a>; 2]) -> Self {
        Self {
            a: a.values.unwrap_or_else(Slice::empty),
            a_out: a.out.unwrap_or_else(PointerMut::empty),
            a_rows: a.rows,
            a_cols: a.cols,
            a_ld: a.ld,
            a_batches: a.batches,
            a_stride: a.stride,
            b: b.values.unwrap_or_else(Slice::empty),
            b_out: b.out.unwrap_or_else(PointerMut::empty),
            b_rows: b.rows,
            b_cols: b.cols,
            b_ld: b.ld,
            b_batches: b.batches,
            b_stride: b.stride,
        }
    }
}

/// One operand.
#[derive(Clone, Copy)]
struct AligningWork<'p> {
    x: &'p [bf16],
    out: *mut bf16,
    rows: usize,
    cols: usize,
    ld: usize,
    batches: usize,
    stride: usize,
}

impl AligningWork<'_> {
    /// Returns the chunks of the copy. If one factor is 0, the others may be of any size.
    #[inline(always)]
    fn chunks(&self) -> usize {
        self.batches.wrapping_mul(self.rows).wrapping_mul(self.cols.div_ceil(CHUNK))
    }

    /// Copies a chunk.
    ///
    /// # Safety
    /// The contract has accepted the operand, which has this chunk.
    #[inline(always)]
    unsafe fn copy(&self, chunk: usize) {
        // SAFETY: an operand that has chunks has rows and columns, so neither divisor is 0. The
        // elements of the row lie inside `x`, whose first element lies on 16 bytes, and `out` has
        // room for the chunk.
        unsafe {
            let (line, across) = divide(chunk, self.cols.div_ceil(CHUNK));
            let (batch, row) = if self.batches == 1 { (0, line) } else { divide(line, self.rows) };
            let from = batch * self.stride + row * self.ld + CHUNK * across;
            let count = self.cols - CHUNK * across;
            let half = |at: usize| if at < count { u32::from(load(self.x, from + at).to_bits()) } else { 0 };
            let mut words = [0; CHUNK / 2];
            if count < CHUNK {
                unroll_on_gpu!(word < CHUNK / 2 => { words[word] = half(2 * word) | half(2 * word + 1) << 16; });
            } else if from.is_multiple_of(2) {
                unroll_on_gpu!(word < CHUNK / 2 => { words[word] = load_word(self.x, from + 2 * word); });
            } else {
                let mut shifted = [0; CHUNK / 2 + 1];
                shifted[0] = half(0) << 16;
                unroll_on_gpu!(word < CHUNK / 2 - 1 => {
                    shifted[word + 1] = load_word(self.x, from + 2 * word + 1);
                });
                shifted[CHUNK / 2] = half(CHUNK - 1);
                unroll_on_gpu!(word < CHUNK / 2 => { words[word] = shifted[word] >> 16 | shifted[word + 1] << 16; });
            }
            store_chunk(self.out, CHUNK * chunk, words);
        }
    }
}
