//! Rounding of matmul operands to TF32, plain or transposed, into packed fragments.
//!
//! A [`fragment`](crate::mma) has 32 rows of eight words of k. A warp packs the fragments of a
//! square of 32 x 32 elements. Lane `4 g + t` rounds words `2 t` and `2 t + 1` of four rows from
//! [`Side::first`] on. It writes them where lane `4 g + t` of a multiply reads them, 16 bytes at a
//! time.
//!
//! ```text
//! k of a square  0 .. 7    8 .. 15   16 .. 23   24 .. 31      k of a step that lane 4 g + t rounds
//!                step 0     step 1     step 2     step 3        t = 0     1      2       3
//! in rows r .. r + 3, where r = Side::first(g)                      0..1   2..3   4..5    6..7
//!
//! out, 256 words each  | rows 0..31: step 0 | step 1 | .. | rows 32..63: step 0 | .. | next batch
//! a fragment           | quad 0 of lane 0 | .. | of lane 31 | quad 1 of lane 0 | .. | of lane 31 |
//!                        rows r, r + 1                        rows r + 2, r + 3
//! ```
//! If both forms of a square are wanted, plain and transposed, two neighboring warps pack them, so
//! memory is read once.
//!
//! Invariant: an element is rounded as [`Format`] defines, independent of its neighbors. Fragments
//! are zero past the rows and k.

#[cfg(not(target_arch = "nvptx64"))]
mod host;

use crate::block::divide;
use crate::contract;
use crate::format::{Format, Tf32};
use crate::mma::{FRAGMENT, QUAD, ROWS, STEP, Side};
use crate::unroll_on_gpu;
use crate::vector::{F4, VectorPart, load_pair};
use crate::warp::LANES;
use cuda_std::prelude::*;
use cuda_std::warp;
#[cfg(not(target_arch = "nvptx64"))]
pub use host::Rounding;
#[cfg(not(target_arch = "nvptx64"))]
use host::grid;

const BLOCK: u32 = 256;
const WARPS: usize = (BLOCK / LANES) as usize;
/// The rows and columns of a square of elements.
const SQUARE: usize = ROWS as usize;

/// The plain form of fragments: k runs along the operand's rows.
const ALONG: usize = 0;
/// The transposed form: k runs across the operand's rows.
const ACROSS: usize = 1;
/// The value in `sides` of an operand's fragments of one form, in two bits: for A, for B, or 0 if
/// not wanted.
///
/// ```text
/// bits of sides    11 10    9 8     7 6    5 4     3 2    1 0
/// form            across  along  across  along  across  along
/// operand             c      c       b      b       a      a
/// ```
const LEFT: u32 = 1;

/// Returns the bits of one operand.
#[inline(always)]
const fn bits(sides: u32, operand: u32) -> u32 {
    sides >> (4 * operand) & 15
}
#[inline(always)]
const fn side(bits: u32, form: usize) -> u32 {
    bits >> (2 * form) & 3
}

/// Rounds up to three matmul operands to TF32. Each has `rows` x `cols` elements, with row stride
/// `ld`, in batches with stride `stride`.
///
/// `along`: fragments whose k runs along the rows, `ceil(rows / 32) ceil(cols / 8)` a batch.
/// `across`: those of the transposed operand, `ceil(cols / 32) ceil(rows / 8)`. `sides`: which
/// fragments are wanted, and for which side of a product.
#[kernel]
pub unsafe fn round_to_tf32(
    a: &[f32],
    a_along: *mut u32,
    a_across: *mut u32,
    a_rows: usize,
    a_cols: usize,
    a_ld: usize,
    a_batches: usize,
    a_stride: usize,
    b: &[f32],
    b_along: *mut u32,
    b_across: *mut u32,
    b_rows: usize,
    b_cols: usize,
    b_ld: usize,
    b_batches: usize,
    b_stride: usize,
    c: &[f32],
    c_along: *mut u32,
    c_across: *mut u32,
    c_rows: usize,
    c_cols: usize,
    c_ld: usize,
    c_batches: usize,
    c_stride: usize,
    sides: u32,
) {
    let work =
        |x, out, extents, ld, batches, stride, sides| RoundingWork { x, out, extents, ld, batches, stride, sides };
    let a = work(a, [a_along, a_across], [a_rows, a_cols], a_ld, a_batches, a_stride, bits(sides, 0));
    let b = work(b, [b_along, b_across], [b_rows, b_cols], b_ld, b_batches, b_stride, bits(sides, 1));
    let c = work(c, [c_along, c_across], [c_rows, c_cols], c_ld, c_batches, c_stride, bits(sides, 2));
    let turn = thread::block_idx_x() as usize * WARPS + (thread::thread_idx_x() / LANES) as usize;
    let before_b = a.turns();
    let before_c = before_b + b.turns();
    let (work, turn) = if turn < before_b {
        (a, turn)
    } else if turn < before_c {
        (b, turn - before_b)
    } else if turn < before_c + c.turns() {
        (c, turn - before_c)
    } else {
        return;
    };
    // SAFETY: the contract has accepted the operand, and the turn is one of its own.
    unsafe { work.round(turn) };
}

// SAFETY: `check` has found every batch of an operand inside its argument. For each form that
// `sides` names, the output holds exactly the fragments. A warp past the last turn returns.
contract! { unsafe round_to_tf32 { block: BLOCK } |p| grid(p) }

/// One operand, from the point of view of one thread: batches of rows and columns.
#[derive(Clone, Copy)]
struct RoundingWork<'p> {
    x: &'p [f32],
    out: [*mut u32; 2],
    extents: [usize; 2],
    ld: usize,
    batches: usize,
    stride: usize,
    /// The operand's bits of `sides`.
    sides: u32,
}

/// The k steps in a square.
const STEPS: usize = SQUARE / STEP as usize;

/// A lane's elements of a square: two words of four rows, in each step.
type SquareElements = [[[f32; 4]; 4]; 4];

impl RoundingWork<'_> {
    /// True if the fragments of a form are wanted.
    #[inline(always)]
    fn wants(&self, form: usize) -> bool {
        side(self.sides, form) != 0
    }

    /// Returns the warps that the operand needs: one for each square and form.
    #[inline(always)]
    fn turns(&self) -> usize {
        let forms = usize::from(self.wants(ALONG)) + usize::from(self.wants(ACROSS));
        let [down, along] = self.extents.map(|extent| extent.div_ceil(SQUARE));
        self.batches * down * along * forms
    }

    /// Packs one form of one square's fragments: the work of the `turn`th warp. There are fewer
    /// than 2^32 turns.
    ///
    /// # Safety
    /// The contract has accepted the operand.
    #[inline(always)]
    unsafe fn round(&self, turn: usize) {
        let squares = self.extents.map(|extent| extent.div_ceil(SQUARE));
        let both = self.wants(ALONG) && self.wants(ACROSS);
        let is_along = if both { turn.is_multiple_of(2) } else { self.wants(ALONG) };
        // SAFETY: an operand that has turns has squares, so neither divisor is 0.
        let (down, along, batch) = unsafe {
            let (above, along) = divide(if both { turn / 2 } else { turn }, squares[1]);
            let (batch, down) = divide(above, squares[0]);
            (down, along, batch)
        };
        let [height, width] = self.extents;
        let (form, out, [rows, k], [block, before]) = if is_along {
            (ALONG, self.out[ALONG], [height, width], [down, along])
        } else {
            (ACROSS, self.out[ACROSS], [width, height], [along, down])
        };
        let side = if side(self.sides, form) == LEFT { Side::Left } else { Side::Right };
        let (g, t) = (warp::lane_id() / 4, (warp::lane_id() % 4) as usize);
        let row = block * SQUARE + side.first(g) as usize;
        let first = before * STEPS;
        let p = first * STEP as usize + 2 * t;
        let is_whole = (down + 1) * SQUARE <= height
            && (along + 1) * SQUARE <= width
            && self.ld.is_multiple_of(F4::LEN)
            && self.stride.is_multiple_of(F4::LEN);
        // All reads first: the compiler moves no read before a write.
        // SAFETY: the contract has accepted the operand, and this square is one of its squares.
        let elements = unsafe {
            match (is_along, is_whole) {
                (true, true) => self.along::<true>(batch, row, p),
                (true, false) => self.along::<false>(batch, row, p),
                (false, true) => self.across::<true>(batch, row, p),
                (false, false) => self.across::<false>(batch, row, p),
            }
        };
        let steps = k.div_ceil(STEP as usize);
        let fragment = (batch * rows.div_ceil(SQUARE) + block) * steps + first;
        let at = fragment * FRAGMENT as usize + (warp::lane_id() * QUAD) as usize;
        unroll_on_gpu!(step < 4 => {
            // At the edge of k a square has fewer steps.
            if first + step < steps {
                let [upper, lower] = side.quads(elements[step].map(Tf32::words));
                let at = at + step * FRAGMENT as usize;
                // SAFETY: the contract has checked that `out` has room for the fragment. Words are
                // moved bit by bit.
                unsafe {
                    F4(upper.map(f32::from_bits)).store(out.cast::<f32>(), at);
                    F4(lower.map(f32::from_bits)).store(out.cast::<f32>(), at + FRAGMENT as usize / 2);
                }
            }
        });
    }

    /// Reads the elements of two words, from `p` on in each step of a square, of four rows from
    /// `row` on. The elements of a row are contiguous. `WHOLE`: the square lies inside the operand,
    /// and its vectors are aligned.
    ///
    /// # Safety
    /// The contract has accepted the operand.
    #[inline(always)]
    unsafe fn along<const WHOLE: bool>(&self, batch: usize, row: usize, p: usize) -> SquareElements {
        let [end, k] = self.extents;
        let mut elements = [[[0.0; 4]; 4]; 4];
        unroll_on_gpu!(step < 4 => {
            unroll_on_gpu!(i < 4 => {
                let p = p + step * STEP as usize;
                if WHOLE || (row + i < end && p < k) {
                    let from = batch * self.stride + (row + i) * self.ld + p;
                    let count = if WHOLE || k - p >= 2 { 2 } else { k - p };
                    // SAFETY: the contract has checked that the existing part of the row lies
                    // inside `x`.
                    unsafe {
                        if count == 2 && (WHOLE || from.is_multiple_of(2)) {
                            let [first, second] = load_pair(self.x, from);
                            elements[step][i] = [first, second, 0.0, 0.0];
                        } else {
                            elements[step][i] = F4::load_part(self.x, from, VectorPart::First(count), 0.0).0;
                        }
                    }
                }
            });
        });
        elements
    }

    /// Reads the elements of two words like [`along`](Self::along), if the elements of a column are
    /// contiguous.
    ///
    /// # Safety
    /// The contract has accepted the operand.
    #[inline(always)]
    unsafe fn across<const WHOLE: bool>(&self, batch: usize, row: usize, p: usize) -> SquareElements {
        let [k, end] = self.extents;
        let mut elements = [[[0.0; 4]; 4]; 4];
        unroll_on_gpu!(step < 4 => {
            unroll_on_gpu!(i < 2 => {
                let p = p + step * STEP as usize + i;
                                if WHOLE || (p < k && row < end) {
                    let from = batch * self.stride + p * self.ld + row;
                    let whole = WHOLE || (end - row >= F4::LEN && from.is_multiple_of(F4::LEN));
                    let part = if whole { VectorPart::Whole } else { VectorPart::first(end - row) };
                    // SAFETY: the contract has checked that the existing part of the row lies
                    // inside `x`.
                    let four = unsafe { F4::load_part(self.x, from, part, 0.0) };
                    unroll_on_gpu!(of < 4 => { elements[step][of][i] = four.0[of]; });
                }
            });
        });
        elements
    }
}
