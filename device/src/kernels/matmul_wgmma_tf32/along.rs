//! Copies of f32 operands to rows of k elements that begin on 16 bytes, which the copy engine needs
//! of an operand B.
//!
//! A block of 256 threads copies 128 rows of 32 k. Along k, a thread copies a chunk of each of four
//! rows. Across k, it transposes a square of 4 x 4, so that it reads and writes whole chunks, and
//! eight lanes write a row of 128 bytes.
//!
//! Invariant: an element is moved bit by bit. Past the end of a row are zeros.

use super::operand::DEPTH;
use crate::block::divide;
use crate::contract;
#[cfg(not(target_arch = "nvptx64"))]
use crate::matmul::checks::holds;
use crate::matmul::epilogue::part;
use crate::matmul_wgmma::aligned_stride;
use crate::mma::fragments::CHUNK_WORDS;
use crate::unroll_on_gpu;
use crate::vector::F4;
use crate::wgmma::CHUNKS;
#[cfg(not(target_arch = "nvptx64"))]
use cuda_std::launch::{PointerMut, Size, Slice, Violation};
use cuda_std::prelude::*;
use cuda_std::warpgroup_kernel;

const BLOCK: u32 = 256;
/// The rows that a block copies.
const ROWS: u32 = 128;
/// The bit of `across` of each operand.
const ACROSS_A: u32 = 1;
const ACROSS_B: u32 = 2;

/// Copies up to two operands. Each has `rows` x `k` elements in `batches` with stride `stride`.
/// Consecutive rows are `ld` elements apart or, if the operand's bit of `across` is set,
/// consecutive k. In `out` a row begins [`aligned_stride`](super::aligned_stride) after the one
/// before, and a batch after the last row of the one before.
#[warpgroup_kernel]
pub unsafe fn align_along_k(
    a: &[f32],
    a_out: *mut f32,
    a_rows: usize,
    a_k: usize,
    a_ld: usize,
    a_batches: usize,
    a_stride: usize,
    b: &[f32],
    b_out: *mut f32,
    b_rows: usize,
    b_k: usize,
    b_ld: usize,
    b_batches: usize,
    b_stride: usize,
    across: u32,
) {
    let work = |x, out, extents, ld, batches, stride| AlignmentWork { x, out, extents, ld, batches, stride };
    let a = work(a, a_out, [a_rows, a_k], a_ld, a_batches, a_stride);
    let b = work(b, b_out, [b_rows, b_k], b_ld, b_batches, b_stride);
    let part = thread::block_idx_x() as usize;
    let before_b = a.parts();
    let (work, part, is_across) = if part < before_b {
        (a, part, across & ACROSS_A != 0)
    } else if part < before_b + b.parts() {
        (b, part - before_b, across & ACROSS_B != 0)
    } else {
        return;
    };
    // SAFETY: the contract has accepted the operand, and the part is one of its own.
    unsafe { work.copy(part, is_across) };
}

// SAFETY: `check` has found every batch of an operand inside its argument, and the output holds
// exactly the rows. A block copies one part.
contract! { unsafe align_along_k { block: BLOCK } |p| {
    let a = check(["a", "a_out"], [p.a.len(), p.a_out.len()], [p.a_rows, p.a_k, p.a_ld], [p.a_batches, p.a_stride], p.across & ACROSS_A != 0)?;
    let b = check(["b", "b_out"], [p.b.len(), p.b_out.len()], [p.b_rows, p.b_k, p.b_ld], [p.b_batches, p.b_stride], p.across & ACROSS_B != 0)?;
    Grid::new(a.plus(b), 1, 1)
} }

/// Checks one operand for the contract. Returns its parts.
#[cfg(not(target_arch = "nvptx64"))]
fn check(
    [argument, out]: [&'static str; 2],
    [len, out_len]: [usize; 2],
    [rows, k, ld]: [usize; 3],
    [batches, stride]: [usize; 2],
    is_across: bool,
) -> Result<Size, Violation> {
    holds(argument, len, batches, stride, if is_across { [k, rows] } else { [rows, k] }, ld)?;
    let parts = Size::of(batches).times(rows.div_ceil(ROWS as usize)).times(k.div_ceil(DEPTH as usize));
    Violation::unless(parts.at_most((1 << 28) - 1), argument, "below 2^28 parts of 128 x 32", parts)?;
    Violation::unless_length(out, Size::of(batches).times(rows).times(k.div_ceil(F4::LEN)).times(F4::LEN), out_len)?;
    Ok(parts)
}

/// One operand of a launch of `align_along_k`.
#[cfg(not(target_arch = "nvptx64"))]
#[derive(Default)]
#[allow(missing_docs, reason = "named as the kernel's parameters")]
pub struct Alignment<'a> {
    pub values: Option<Slice<'a, f32>>,
    pub out: Option<PointerMut<'a, f32>>,
    pub rows: usize,
    pub k: usize,
    pub ld: usize,
    pub batches: usize,
    pub stride: usize,
    pub is_across: bool,
}

#[cfg(not(target_arch = "nvptx64"))]
impl<'a> align_along_k<'a> {
    /// Returns the launch that copies these operands.
    pub fn of([a, b]: [Alignment<'a>; 2]) -> Self {
        Self {
            a: a.values.unwrap_or_else(Slice::empty),
            a_out: a.out.unwrap_or_else(PointerMut::empty),
            a_rows: a.rows,
            a_k: a.k,
            a_ld: a.ld,
            a_batches: a.batches,
            a_stride: a.stride,
            b: b.values.unwrap_or_else(Slice::empty),
            b_out: b.out.unwrap_or_else(PointerMut::empty),
            b_rows: b.rows,
            b_k: b.k,
            b_ld: b.ld,
            b_batches: b.batches,
            b_stride: b.stride,
            across: if a.is_across { ACROSS_A } else { 0 } | if b.is_across { ACROSS_B } else { 0 },
        }
    }
}

/// One operand, from the point of view of one thread.
#[derive(Clone, Copy)]
struct AlignmentWork<'p> {
    x: &'p [f32],
    out: *mut f32,
    /// The rows and k.
    extents: [usize; 2],
    ld: usize,
    batches: usize,
    stride: usize,
}

impl AlignmentWork<'_> {
    /// Returns the parts of the operand. If one factor is 0, the others may be of any size.
    #[inline(always)]
    fn parts(&self) -> usize {
        let [rows, k] = self.extents;
        let stages = k.div_ceil(DEPTH as usize);
        self.batches.wrapping_mul(rows.div_ceil(ROWS as usize)).wrapping_mul(stages)
    }

    /// Copies this thread's share of a part.
    ///
    /// # Safety
    /// The contract has accepted the operand, and the part is one of its own.
    #[inline(always)]
    unsafe fn copy(&self, number: usize, is_across: bool) {
        let [rows, k] = self.extents;
        // SAFETY: an operand that has parts has rows and k, so neither divisor is 0.
        let (batch, block, stage) = unsafe {
            let (above, stage) = divide(number, k.div_ceil(DEPTH as usize));
            let (batch, block) = divide(above, rows.div_ceil(ROWS as usize));
            (batch, block, stage)
        };
        let first = [block * ROWS as usize, stage * DEPTH as usize];
        let start = batch * self.stride;
        let is_whole = first[0] + ROWS as usize <= rows
            && first[1] + DEPTH as usize <= k
            && (start | self.ld).is_multiple_of(F4::LEN);
        // This thread's chunk along k, its first row, and the distance to its next.
        let (own, chunk) = (thread::thread_idx_x() / CHUNKS, thread::thread_idx_x() % CHUNKS);
        let [row, apart] = if is_across { [4 * own, 1] } else { [own, BLOCK / CHUNKS] };
        let at = [first[0] + row as usize, first[1] + (CHUNK_WORDS * chunk) as usize];
        // All reads first: the compiler moves no read before a write.
        // SAFETY: the contract has accepted the operand.
        let vectors = unsafe {
            match (is_across, is_whole) {
                (true, true) => self.load::<true>(start, [at[1], at[0]], [k, rows], 1),
                (true, false) => self.load::<false>(start, [at[1], at[0]], [k, rows], 1),
                (false, true) => self.load::<true>(start, at, [rows, k], apart),
                (false, false) => self.load::<false>(start, at, [rows, k], apart),
            }
        };
        let words = vectors.map(|vector| vector.0);
        unroll_on_gpu!(i < 4 => {
            let chunk = if is_across { [words[0][i], words[1][i], words[2][i], words[3][i]] } else { words[i] };
            let row = at[0] + i * apart as usize;
            if is_whole || (row < rows && at[1] < k) {
                let to = (batch * rows + row) * aligned_stride::<f32>(k) + at[1];
                // SAFETY: the contract has checked that `out` has room for the chunks of each row.
                unsafe { F4(chunk).store(self.out, to) };
            }
        });
    }

    /// Reads four vectors, from a line and a place within it on, in lines that are `apart`. There
    /// are `lines` of `width` elements. `WHOLE`: the vectors exist and are aligned.
    ///
    /// # Safety
    /// The contract has accepted the operand.
    #[inline(always)]
    unsafe fn load<const WHOLE: bool>(
        &self,
        start: usize,
        [line, within]: [usize; 2],
        [lines, width]: [usize; 2],
        apart: u32,
    ) -> [F4; 4] {
        let mut vectors = [F4::splat(0.0); 4];
        unroll_on_gpu!(i < 4 => {
            let line = line + i * apart as usize;
            if WHOLE || (line < lines && within < width) {
                let from = start + line * self.ld + within;
                // SAFETY: the contract has checked that the existing part of the line lies inside
                // `x`.
                unsafe {
                    vectors[i] = if WHOLE {
                        F4::load(self.x, from)
                    } else {
                        F4::load_part(self.x, from, part(from, width - within), 0.0)
                    };
                }
            }
        });
        vectors
    }
}

const _: () = assert!(DEPTH * ROWS == 4 * BLOCK * CHUNK_WORDS, "a thread copies four chunks");
