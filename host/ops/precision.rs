//! How exactly matrices are multiplied, and the rounding that a precision asks for.

use crate::error::{Error, Result};
use crate::launch::{Source, Target};
use crate::step::Step;
use crate::tensor::Tensor;
use kernels::precision::{round_to_bf16, round_to_tf32, transpose_to_bf16, transpose_to_tf32};
use std::fmt;
use std::str::FromStr;

/// How the factors of a matrix multiply are rounded. Sums are f32 in each.
///
/// [`Precision::Ieee`] has the same bits on every device. The others use the GPU's matrix instructions: many times as fast, the
/// same bits in every run and for every tile on one device, but not on another. With `u` = 2^-11 for TF32 and 2^-8 for BF16, an
/// output of k products is within `(2 u + u^2 + k 2^-22) sum |a b|` of the exact one, where nothing overflows
/// or is subnormal. Operands are rounded by launches of their own, into memory that ends with the multiply.
///
/// Multiplies of fewer than 16 rows or columns are done in [`Precision::Ieee`] whatever is asked for: a matrix instruction would
/// work on padding.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Precision {
    /// Factors as they are: one chain of fused multiply-adds.
    #[default]
    Ieee,
    /// Factors of 11 bits of significand, rounded to nearest, ties away from zero; the range of f32.
    Tf32,
    /// Factors of 8 bits of significand, rounded to nearest, ties to even; the range of f32.
    Bf16,
}

impl Precision {
    /// Every precision, the most exact first.
    pub const ALL: [Self; 3] = [Self::Ieee, Self::Tf32, Self::Bf16];
}

impl fmt::Display for Precision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Ieee => "ieee",
            Self::Tf32 => "tf32",
            Self::Bf16 => "bf16",
        })
    }
}

impl FromStr for Precision {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let found = Self::ALL.into_iter().find(|precision| precision.to_string() == text);
        found.ok_or_else(|| Error::misuse("precision", "ieee, tf32 or bf16", format!("`{text}`")))
    }
}

/// `x` in words of TF32 or pairs of BF16, the first in the lower half; `x`: `[.., cols]`, result: `[rows, words]`, as many as
/// `cols` rounded up to eight takes, zero beyond `cols`. Queued, does not wait; a NaN stays a NaN, but for the payload that TF32
/// cuts off.
///
/// # Errors
/// [`Error::Misuse`] for [`Precision::Ieee`]; [`Error::ArenaFull`].
#[track_caller]
pub fn round_to<'s>(step: &Step<'s>, x: &impl Source<'s, f32>, precision: Precision) -> Result<Tensor<'s, u32>> {
    let [rows, cols] = x.shape().as_rows();
    Matrices { rows, cols, ld: cols, batches: 1, stride: 0, transposed: false }.round(step, precision, x)
}

/// As [`round_to`], and transposes; result: `[cols, words]`, as many as the rows rounded up to eight take.
///
/// # Errors
/// As for [`round_to`].
#[track_caller]
pub fn transpose_to<'s>(step: &Step<'s>, x: &impl Source<'s, f32>, precision: Precision) -> Result<Tensor<'s, u32>> {
    let [rows, cols] = x.shape().as_rows();
    Matrices { rows: cols, cols: rows, ld: cols, batches: 1, stride: 0, transposed: true }.round(step, precision, x)
}

/// Matrices of `rows` x `cols`, and how they lie in memory: row by row, or (`transposed`) column by column.
#[derive(Clone, Copy, Debug)]
pub(super) struct Matrices {
    pub(super) rows: usize,
    pub(super) cols: usize,
    pub(super) ld: usize,
    pub(super) batches: usize,
    pub(super) stride: usize,
    pub(super) transposed: bool,
}

impl Matrices {
    /// How they lie after [`Matrices::round`]: row by row, packed, one for all batches where there was one.
    pub(super) fn rounded(self) -> Self {
        let ld = self.cols.next_multiple_of(8);
        let batches = if self.stride == 0 { self.batches.min(1) } else { self.batches };
        let stride = if self.stride == 0 { 0 } else { self.rows * ld };
        Self { ld, batches, stride, transposed: false, ..self }
    }

    /// The matrices of `x`, rounded.
    #[track_caller]
    pub(super) fn round<'s, 'x>(
        self,
        step: &Step<'s>,
        precision: Precision,
        x: &impl Source<'x, f32>,
    ) -> Result<Tensor<'s, u32>> {
        let Self { ld, stride, transposed, .. } = self;
        let Self { batches, ld: packed, .. } = self.rounded();
        let [rows, cols] = if transposed { [self.cols, self.rows] } else { [self.rows, self.cols] };
        let per_word = if precision == Precision::Bf16 { 2 } else { 1 };
        let mut rounded = step.empty([batches * self.rows, packed / per_word])?;
        let (x, out) = (x.slice(), rounded.out());
        match (precision, transposed) {
            (Precision::Tf32, false) => step.launch(round_to_tf32 { x, out, rows, cols, batches, ld, stride }),
            (Precision::Tf32, true) => step.launch(transpose_to_tf32 { x, out, rows, cols, batches, ld, stride }),
            (Precision::Bf16, false) => step.launch(round_to_bf16 { x, out, rows, cols, batches, ld, stride }),
            (Precision::Bf16, true) => step.launch(transpose_to_bf16 { x, out, rows, cols, batches, ld, stride }),
            (Precision::Ieee, _) => Err(Error::misuse("round_to", "tf32 or bf16", "ieee")),
        }?;
        Ok(rounded)
    }
}
