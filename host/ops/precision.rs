//! How exactly matrices are multiplied, and the rounding that a precision asks for.

use crate::error::{Error, Result};
use crate::launch::Target;
use crate::step::Step;
use crate::tensor::Tensor;
use cuda_std::launch::Slice;
use kernels::format::{Bf16, Tf32};
use kernels::matmul::{TRANSPOSE_A, TRANSPOSE_B};
use kernels::mma::fragments;
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

/// Both operands of a multiply, rounded: fragments ([`kernels::precision`]), those of each matrix one row.
#[track_caller]
pub(super) fn round_both<'s>(
    step: &Step<'s>,
    precision: Precision,
    [a, b]: [Slice<'_, f32>; 2],
    [left, right]: [Matrices; 2],
) -> Result<[Tensor<'s, u32>; 2]> {
    let words = |stored: Matrices| step.empty([stored.distinct(), stored.words(precision)]);
    let (mut rounded_a, mut rounded_b) = (words(left)?, words(right)?);
    let (a_out, b_out) = (rounded_a.out(), rounded_b.out());
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
                batches_a: left.distinct(),
                batches_b: right.distinct(),
                stride_a: left.stride,
                stride_b: right.stride,
                flags,
            })
        };
    }
    match precision {
        Precision::Tf32 => launch!(round_to_tf32)?,
        Precision::Bf16 => launch!(round_to_bf16)?,
        Precision::Ieee => return Err(Error::misuse("matmul", "tf32 or bf16", "ieee")),
    }
    Ok([rounded_a, rounded_b])
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
    /// How many are stored: one for all batches where none lies beside another.
    pub(super) fn distinct(self) -> usize {
        if self.stride == 0 { self.batches.min(1) } else { self.batches }
    }

    /// Words from one batch's fragments to the next.
    pub(super) fn stride(self, precision: Precision) -> usize {
        if self.stride == 0 { 0 } else { self.words(precision) }
    }

    /// Words of the fragments of one.
    fn words(self, precision: Precision) -> usize {
        let extents = [self.rows, self.cols];
        if precision == Precision::Bf16 { fragments::<Bf16>(extents) } else { fragments::<Tf32>(extents) }
    }
}
