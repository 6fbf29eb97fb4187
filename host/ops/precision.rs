//! How exactly matrices are multiplied, and the rounding that a precision asks for.

use crate::error::{Error, Result};
use crate::launch::{Source, Target};
use crate::step::Step;
use crate::tensor::Tensor;
use cuda_std::launch::{PointerMut, Slice};
use kernels::matmul::{TRANSPOSE_A, TRANSPOSE_B};
use kernels::precision::{round_to_bf16, round_to_tf32};
use std::fmt;
use std::str::FromStr;

/// How the factors of a matrix multiply are rounded. Sums are f32 in each.
///
/// [`Precision::Ieee`] has the same bits on every device. The others use the GPU's matrix instructions: many times as fast, the
/// same bits in every run and for every tile on one device, but not on another. With `u` = 2^-11 for TF32 and 2^-8 for BF16, an
/// output of k products is within `(2 u + u^2 + k 2^-22) sum |a b|` of the exact one, where nothing overflows
/// or is subnormal. Operands are rounded by a launch of their own, into memory that ends with the multiply.
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
    round_one(step, x, precision, Matrices { rows, cols, ld: cols, batches: 1, stride: 0, transposed: false })
}

/// As [`round_to`], and transposes; result: `[cols, words]`, as many as the rows rounded up to eight take.
///
/// # Errors
/// As for [`round_to`].
#[track_caller]
pub fn transpose_to<'s>(step: &Step<'s>, x: &impl Source<'s, f32>, precision: Precision) -> Result<Tensor<'s, u32>> {
    let [rows, cols] = x.shape().as_rows();
    let stored = Matrices { rows: cols, cols: rows, ld: cols, batches: 1, stride: 0, transposed: true };
    round_one(step, x, precision, stored)
}

#[track_caller]
fn round_one<'s>(
    step: &Step<'s>,
    x: &impl Source<'s, f32>,
    precision: Precision,
    stored: Matrices,
) -> Result<Tensor<'s, u32>> {
    let mut out = step.empty(stored.rounded().words(precision))?;
    launch(step, precision, [x.slice(), Slice::empty()], [stored, Matrices::NONE], [out.out(), PointerMut::empty()])?;
    Ok(out)
}

/// Both operands of a multiply, rounded.
#[track_caller]
pub(super) fn round_both<'s, 'x>(
    step: &Step<'s>,
    precision: Precision,
    operands: [Slice<'x, f32>; 2],
    stored: [Matrices; 2],
) -> Result<[Tensor<'s, u32>; 2]> {
    let [left, right] = stored.map(|stored| stored.rounded().words(precision));
    let (mut left, mut right) = (step.empty(left)?, step.empty(right)?);
    launch(step, precision, operands, stored, [left.out(), right.out()])?;
    Ok([left, right])
}

#[track_caller]
fn launch(
    step: &Step<'_>,
    precision: Precision,
    [a, b]: [Slice<'_, f32>; 2],
    [left, right]: [Matrices; 2],
    [a_out, b_out]: [PointerMut<'_, u32>; 2],
) -> Result<()> {
    // Of a multiply, B is transposed by itself.
    let flags = if left.transposed { TRANSPOSE_A } else { 0 } | if right.transposed { 0 } else { TRANSPOSE_B };
    macro_rules! launch {
        ($kernel:ident) => {
            step.launch($kernel {
                a,
                b,
                a_out,
                b_out,
                m: left.rows,
                n: right.rows,
                k: left.cols,
                lda: left.ld,
                ldb: right.ld,
                batches_a: left.rounded().batches,
                batches_b: right.rounded().batches,
                stride_a: left.stride,
                stride_b: right.stride,
                flags,
            })
        };
    }
    match precision {
        Precision::Tf32 => launch!(round_to_tf32),
        Precision::Bf16 => launch!(round_to_bf16),
        Precision::Ieee => Err(Error::misuse("round_to", "tf32 or bf16", "ieee")),
    }
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
    const NONE: Self = Self { rows: 0, cols: 0, ld: 0, batches: 0, stride: 0, transposed: false };

    /// How they lie when they are rounded: row by row, packed, one for all batches where there was one.
    pub(super) fn rounded(self) -> Self {
        let ld = self.cols.next_multiple_of(8);
        let batches = if self.stride == 0 { self.batches.min(1) } else { self.batches };
        let stride = if self.stride == 0 { 0 } else { self.rows * ld };
        Self { ld, batches, stride, transposed: false, ..self }
    }

    /// The shape of rounded ones.
    fn words(self, precision: Precision) -> [usize; 2] {
        let per_word = if precision == Precision::Bf16 { 2 } else { 1 };
        [self.batches * self.rows, self.ld / per_word]
    }
}
