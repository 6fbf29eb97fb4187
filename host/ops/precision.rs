//! How exactly matrices are multiplied, and the rounding that a precision asks for.

use crate::error::{Error, Result};
use crate::launch::{Source, Target};
use crate::step::Step;
use crate::tensor::Tensor;
use kernels::precision::round_to_bf16;
use std::fmt;
use std::str::FromStr;

/// How the factors of a matrix multiply are rounded. Sums are f32 in each.
///
/// [`Precision::Ieee`] has the same bits on every device. The others use the GPU's matrix instructions: many times as fast, the
/// same bits in every run and for every tile on one device, but not on another. With `u` = 2^-11 for TF32 and 2^-8 for BF16, an
/// output of k products is within `(2 u + u^2 + k 2^-22) sum |a b|` of the exact one, where nothing overflows
/// or is subnormal.
/// Multiplies of fewer than 16 rows or columns are done in [`Precision::Ieee`] whatever is asked for: a matrix instruction would
/// work on padding.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Precision {
    /// Factors as they are: one chain of fused multiply-adds.
    #[default]
    Ieee,
    /// Factors of 11 bits of significand, rounded to nearest, ties away from zero; the range of f32.
    Tf32,
    /// Factors of 8 bits of significand, rounded to nearest, ties to even; the range of f32. f32 operands are rounded by a
    /// launch of their own, into memory of the step.
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

/// `x` rounded to nearest BF16, ties to even, two to a word, the first in the lower half; `x`: `[.., cols]`, result:
/// `[rows, ceil(cols / 8) * 4]`, zero beyond `cols`. Queued, does not wait; a NaN stays a NaN.
///
/// # Errors
/// [`Error::ArenaFull`].
#[track_caller]
pub fn round_bf16<'s>(step: &Step<'s>, x: &impl Source<'s, f32>) -> Result<Tensor<'s, u32>> {
    let [rows, cols] = x.shape().as_rows();
    Stored { rows, cols, ld: cols, batches: 1, stride: 0 }.round(step, x)
}

/// Matrices as they lie in memory.
#[derive(Clone, Copy, Debug)]
pub(super) struct Stored {
    pub(super) rows: usize,
    pub(super) cols: usize,
    pub(super) ld: usize,
    pub(super) batches: usize,
    pub(super) stride: usize,
}

impl Stored {
    /// How the matrices lie after [`Stored::round`]: packed, one for all batches where there was one.
    pub(super) fn rounded(self) -> Self {
        let ld = self.cols.next_multiple_of(8);
        let batches = if self.stride == 0 { self.batches.min(1) } else { self.batches };
        let stride = if self.stride == 0 { 0 } else { self.rows * ld };
        Self { ld, batches, stride, ..self }
    }

    /// The matrices of `x` as pairs of BF16.
    #[track_caller]
    pub(super) fn round<'s>(self, step: &Step<'s>, x: &impl Source<'s, f32>) -> Result<Tensor<'s, u32>> {
        let Self { batches, ld: packed, .. } = self.rounded();
        let mut out = step.empty([batches * self.rows, packed / 2])?;
        step.launch(round_to_bf16 {
            x: x.slice(),
            out: out.out(),
            rows: self.rows,
            cols: self.cols,
            batches,
            ld: self.ld,
            stride: self.stride,
        })?;
        Ok(out)
    }
}
