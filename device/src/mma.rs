//! Tensor core products. [`fragments`](mod@fragments) has the operands of kernels that read rows
//! from shared memory, and [`element`] the element types of attention. This file has the operands
//! of [`matmul_mma`](crate::matmul_mma), which are packed in TF32 beforehand: a warp multiplies 32
//! rows by 32 columns over eight words of k.
//!
//! Lane `4 g + t` brings a [`Factor`] of each operand. It holds words `2 t` and `2 t + 1` of four
//! rows of A and of four columns of B, from [`Side::first`] on. It gets [`Sums`], the accumulators
//! of four rows and of twice four columns.
//!
//! ```text
//! lane that brings ..  words of k:                                       lane 4 g + t accumulates
//!   of A         0..1 2..3 4..5 6..7  of B            0..1 2..3 4..5 6..7  rows 4 g .. 4 g + 3,
//!   rows  0..3    0    1    2    3    columns  0..3    0    1    2    3    columns 4 t .. 4 t + 3
//!   rows  4..7    4    5    6    7    columns 16..19   4    5    6    7      and 16 further on
//!   rows  8..11   8    9   10   11    columns  4..7    8    9   10   11
//!   ..                                columns 20..23  12   13   14   15  4 lanes write 64
//!   rows 28..31  28   29   30   31    ..                                 contiguous bytes
//!                                     columns 28..31  28   29   30   31
//! ```
//! The GPU issues eight mma instructions of 16 x 8 outputs. Instruction (pair, column) has rows `2
//! pair` and `2 pair + 1` and column `column` of each lane's four: the instruction's own rows g and
//! g + 8, and its own column g.
//!
//! Products are exact. An instruction aligns its products, 8 of TF32 or 16 of BF16, and the old sum
//! to the largest of them, and cuts below the last place. The emulator computes the same bits by
//! `rule.rs`. Each addend loses at most 2^-25 of the largest power of two, and the sum less than a
//! unit in its last place. A sum of k products is therefore within k 2^-22 of the sum of their
//! magnitudes.

pub mod element;
pub mod fragments;
#[cfg(not(target_arch = "nvptx64"))]
pub mod rule;

pub use crate::format::STEP;
use crate::machine;
use crate::warp::Converged;

/// The rows of A, or columns of B, that a warp multiplies at once.
pub const ROWS: u32 = 32;
/// The words of a packed fragment: one operand of a warp's product. A quad has two rows and two
/// words. The quads of all lanes' first two rows come before those of their other two.
pub const FRAGMENT: u32 = ROWS * STEP;
/// The words of a quad.
pub const QUAD: u32 = 4;

/// Returns the words of the fragments of `rows` rows of `k` elements.
#[inline(always)]
pub fn fragments([rows, k]: [usize; 2]) -> usize {
    let steps = k.div_ceil(STEP as usize);
    rows.div_ceil(ROWS as usize).saturating_mul(steps).saturating_mul(FRAGMENT as usize)
}

/// A lane's register fragment: two words of each of four rows (of A) or columns (of B).
pub type Factor = [[u32; 2]; 4];

/// The operand of a product that a fragment belongs to. It determines the order of words in a quad,
/// which is the instruction's register order.
///
/// ```text
/// rows r, r + 1 of words w = 2 t, w + 1:  Left:  | r w | r+1 w | r w+1 | r+1 w+1 |
///                                         Right: | r w | r w+1 | r+1 w | r+1 w+1 |
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// The operand A: the first word of both rows, then the second.
    Left,
    /// The operand B: both words of one row, then of the other.
    Right,
}

impl Side {
    /// Returns the first row of A, or column of B, of lane `4 g + t`.
    #[inline(always)]
    pub fn first(self, g: u32) -> u32 {
        match self {
            Self::Left => 4 * g,
            Self::Right => 16 * (g % 2) + 4 * (g / 2),
        }
    }

    /// Returns the register fragment that two quads hold.
    #[inline(always)]
    pub fn factor(self, [[a, b, c, d], [e, f, g, h]]: [[u32; 4]; 2]) -> Factor {
        match self {
            Self::Left => [[a, c], [b, d], [e, g], [f, h]],
            Self::Right => [[a, b], [c, d], [e, f], [g, h]],
        }
    }

    /// Returns the quads of a register fragment.
    #[inline(always)]
    pub fn quads(self, [[a, b], [c, d], [e, f], [g, h]]: Factor) -> [[u32; 4]; 2] {
        match self {
            Self::Left => [[a, c, b, d], [e, g, f, h]],
            Self::Right => [[a, b, c, d], [e, f, g, h]],
        }
    }
}

/// A lane's accumulators: four rows of twice four columns.
pub type Sums = [[f32; 8]; 4];

/// Accumulates the products of the warp's fragments in `sums`.
#[inline(always)]
#[track_caller]
pub fn multiply(warp: Converged, sums: &mut Sums, a: Factor, b: Factor) {
    machine::mma::multiply_packed(warp, sums, a, b);
}
