//! Rounding of an operand B to TF32 into images of stages: the bytes that
//! [`wgmma`](crate::wgmma) reads from shared memory.
//!
//! ```text
//! image of rows R .. R + 127, k K .. K + 31     | row R: 8 chunks of 4 k, swizzled | row R + 1 | ..
//! out    | rows 0..127: k 0..31 | k 32..63 | .. | rows 128..255: k 0..31 | .. | next batch |
//! ```
//! A block of 256 threads packs an image. Along k, a thread rounds a chunk of each of four rows.
//! Across k, it rounds a square of 4 x 4, so that it reads and writes whole chunks, and eight lanes
//! write a row of 128 bytes.
//!
//! Invariant: an element is rounded as [`Format`](crate::format::Format) defines. Images are zero
//! past the rows and k.

use super::tile::{DEPTH, IMAGE, IMAGE_ROWS};
use crate::block::divide;
use crate::contract;
use crate::format::round_tf32;
#[cfg(not(target_arch = "nvptx64"))]
use crate::matmul::checks::holds;
use crate::matmul::epilogue::part;
use crate::mma::fragments::{CHUNK_WORDS, swizzled};
use crate::unroll_on_gpu;
use crate::vector::F4;
use crate::wgmma::{CHUNKS, ROW_WORDS};
#[cfg(not(target_arch = "nvptx64"))]
use cuda_std::launch::{PointerMut, Size, Slice, Violation};
use cuda_std::prelude::*;
use cuda_std::warpgroup_kernel;

const BLOCK: u32 = 256;
/// The bit of `across` of each operand.
const ACROSS_A: u32 = 1;
const ACROSS_B: u32 = 2;

/// Returns the words of the images of `rows` rows of `k` elements.
#[inline(always)]
pub fn stage_words([rows, k]: [usize; 2]) -> usize {
    let images = rows.div_ceil(IMAGE_ROWS as usize).saturating_mul(k.div_ceil(DEPTH as usize));
    images.saturating_mul(IMAGE as usize)
}

/// Rounds up to two operands to TF32, into images of stages. Each has `rows` x `k` elements in
/// `batches` with stride `stride`. Consecutive rows are `ld` elements apart or, if the operand's
/// bit of `across` is set, consecutive k. `out` has [`stage_words`] words a batch.
#[warpgroup_kernel]
pub unsafe fn pack_tf32_stages(
    a: &[f32],
    a_out: *mut u32,
    a_rows: usize,
    a_k: usize,
    a_ld: usize,
    a_batches: usize,
    a_stride: usize,
    b: &[f32],
    b_out: *mut u32,
    b_rows: usize,
    b_k: usize,
    b_ld: usize,
    b_batches: usize,
    b_stride: usize,
    across: u32,
) {
    let work = |x, out, extents, ld, batches, stride| PackingWork { x, out, extents, ld, batches, stride };
    let a = work(a, a_out, [a_rows, a_k], a_ld, a_batches, a_stride);
    let b = work(b, b_out, [b_rows, b_k], b_ld, b_batches, b_stride);
    let image = thread::block_idx_x() as usize;
    let before_b = a.images();
    let (work, image, is_across) = if image < before_b {
        (a, image, across & ACROSS_A != 0)
    } else if image < before_b + b.images() {
        (b, image - before_b, across & ACROSS_B != 0)
    } else {
        return;
    };
    // SAFETY: the contract has accepted the operand, and the image is one of its own.
    unsafe { work.pack(image, is_across) };
}

// SAFETY: `check` has found every batch of an operand inside its argument, and the output holds
// exactly the images. A block packs one image.
contract! { unsafe pack_tf32_stages { block: BLOCK } |p| {
    let a = check(["a", "a_out"], [p.a.len(), p.a_out.len()], [p.a_rows, p.a_k, p.a_ld], [p.a_batches, p.a_stride], p.across & ACROSS_A != 0)?;
    let b = check(["b", "b_out"], [p.b.len(), p.b_out.len()], [p.b_rows, p.b_k, p.b_ld], [p.b_batches, p.b_stride], p.across & ACROSS_B != 0)?;
    Grid::new(a.plus(b), 1, 1)
} }

/// Checks one operand for the contract. Returns its images.
#[cfg(not(target_arch = "nvptx64"))]
fn check(
    [argument, out]: [&'static str; 2],
    [len, out_len]: [usize; 2],
    [rows, k, ld]: [usize; 3],
    [batches, stride]: [usize; 2],
    is_across: bool,
) -> Result<Size, Violation> {
    holds(argument, len, batches, stride, if is_across { [k, rows] } else { [rows, k] }, ld)?;
    let images = Size::of(batches).times(rows.div_ceil(IMAGE_ROWS as usize)).times(k.div_ceil(DEPTH as usize));
    Violation::unless(images.at_most((1 << 28) - 1), argument, "below 2^28 images of 128 x 32", images)?;
    Violation::unless_length(out, images.times(IMAGE), out_len)?;
    Ok(images)
}

/// One operand of a launch of `pack_tf32_stages`.
#[cfg(not(target_arch = "nvptx64"))]
#[derive(Default)]
#[allow(missing_docs, reason = "named as the kernel's parameters")]
pub struct Packing<'a> {
    pub values: Option<Slice<'a, f32>>,
    pub out: Option<PointerMut<'a, u32>>,
    pub rows: usize,
    pub k: usize,
    pub ld: usize,
    pub batches: usize,
    pub stride: usize,
    pub is_across: bool,
}

#[cfg(not(target_arch = "nvptx64"))]
impl<'a> pack_tf32_stages<'a> {
    /// Returns the launch that packs these operands.
    pub fn of([a, b]: [Packing<'a>; 2]) -> Self {
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
struct PackingWork<'p> {
    x: &'p [f32],
    out: *mut u32,
    /// The rows and k.
    extents: [usize; 2],
    ld: usize,
    batches: usize,
    stride: usize,
}

impl PackingWork<'_> {
    /// Returns the images of the operand. If one factor is 0, the others may be of any size.
    #[inline(always)]
    fn images(&self) -> usize {
        let [rows, k] = self.extents;
        let stages = k.div_ceil(DEPTH as usize);
        self.batches.wrapping_mul(rows.div_ceil(IMAGE_ROWS as usize)).wrapping_mul(stages)
    }

    /// Packs this thread's part of an image.
    ///
    /// # Safety
    /// The contract has accepted the operand, and the image is one of its own.
    #[inline(always)]
    unsafe fn pack(&self, image: usize, is_across: bool) {
        let [rows, k] = self.extents;
        // SAFETY: an operand that has images has rows and k, so neither divisor is 0.
        let (batch, block, stage) = unsafe {
            let (above, stage) = divide(image, k.div_ceil(DEPTH as usize));
            let (batch, block) = divide(above, rows.div_ceil(IMAGE_ROWS as usize));
            (batch, block, stage)
        };
        let first = [block * IMAGE_ROWS as usize, stage * DEPTH as usize];
        let start = batch * self.stride;
        let is_whole = first[0] + IMAGE_ROWS as usize <= rows
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
        let words = vectors.map(|vector| vector.0.map(round_tf32));
        unroll_on_gpu!(i < 4 => {
            let chunk_words = if is_across { [words[0][i], words[1][i], words[2][i], words[3][i]] } else { words[i] };
            let place = swizzled(CHUNKS, row + i as u32 * apart, chunk) * CHUNK_WORDS;
            let at = image * IMAGE as usize + place as usize;
            // SAFETY: the contract has checked that `out` has room for the image. Words are moved
            // bit by bit.
            unsafe { F4(chunk_words.map(f32::from_bits)).store(self.out.cast::<f32>(), at) };
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

const _: () = assert!(ROW_WORDS * IMAGE_ROWS == 4 * BLOCK * CHUNK_WORDS, "a thread packs four chunks");
