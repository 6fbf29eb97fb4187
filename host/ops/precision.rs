//! How exactly matrices are multiplied, and the rounding that a precision asks for.

use crate::error::{Error, Result};
use crate::launch::Target;
use crate::step::Step;
use crate::tensor::Tensor;
use cuda_std::launch::Slice;
use kernels::format::Reduced;
use kernels::mma::Side;
use kernels::precision::{self, Rounding};
use std::fmt;
use std::str::FromStr;

/// How the factors of a matrix multiply are rounded. Sums are f32 in each.
///
/// [`Precision::Ieee`] has the same bits on every device. The others use the GPU's matrix instructions: many times as fast, the
/// same bits in every run and for every tile on one device, but not on another. With `u` = 2^-11 for TF32 and 2^-8 for BF16, an
/// output of k products is within `(2 u + u^2 + k 2^-22) sum |a b|` of the exact one, where nothing overflows
/// or is subnormal. Operands are rounded by a launch of their own, into memory that ends with the multiply, or with both
/// multiplies of a backward pass.
///
/// Multiplies of fewer than [`Precision::LEAST`] rows, columns or k are done in [`Precision::Ieee`] whatever is asked for,
/// unless they name a [`tensor_tile`](super::Gemm::tensor_tile): a matrix instruction would work on padding.
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
    /// The fewest rows, columns and k of a multiply that is done in another than [`Precision::Ieee`] without naming a tile.
    pub const LEAST: usize = 16;

    /// The format of factors that are rounded.
    pub(super) fn reduced(self) -> Result<Reduced> {
        match self {
            Self::Ieee => Err(Error::misuse("matmul", "tf32 or bf16", "ieee")),
            Self::Tf32 => Ok(Reduced::Tf32),
            Self::Bf16 => Ok(Reduced::Bf16),
        }
    }
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

/// Matrices as they are stored, row by row: `batches` of them, `stride` elements apart.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Matrices {
    pub(super) rows: usize,
    pub(super) cols: usize,
    pub(super) ld: usize,
    pub(super) batches: usize,
    pub(super) stride: usize,
}

impl Matrices {
    /// How many are stored: one for all batches where none lies beside another.
    fn distinct(self) -> usize {
        if self.stride == 0 { self.batches.min(1) } else { self.batches }
    }
}

/// What is to be rounded, and the sides of the multiplies in which it stands: with k along its rows, and across them.
#[derive(Clone, Copy, Default)]
pub(super) struct Operand<'a> {
    pub(super) values: Option<Slice<'a, f32>>,
    pub(super) matrices: Matrices,
    pub(super) along: Option<Side>,
    pub(super) across: Option<Side>,
}

impl Operand<'_> {
    /// Room for the fragments that are wanted; one row for each matrix.
    fn room<'s>(&self, step: &Step<'s>, format: Reduced) -> Result<Fragments<'s>> {
        let Matrices { rows, cols, .. } = self.matrices;
        let room = |side: Option<Side>, extents| {
            step.empty([side.map_or(0, |_| self.matrices.distinct()), format.fragments(extents)])
        };
        Ok(Fragments { along: room(self.along, [rows, cols])?, across: room(self.across, [cols, rows])? })
    }
}

/// An operand's fragments ([`kernels::precision`]), as it lies and transposed; empty where they are not wanted.
pub(super) struct Fragments<'s> {
    pub(super) along: Tensor<'s, u32>,
    pub(super) across: Tensor<'s, u32>,
}

/// Rounds operands of multiplies, in one launch.
#[track_caller]
pub(super) fn round<'s>(
    step: &Step<'s>,
    precision: Precision,
    operands: [Operand<'_>; 3],
) -> Result<[Fragments<'s>; 3]> {
    let [a, b, c] = &operands;
    let format = precision.reduced()?;
    let mut rounded = [a.room(step, format)?, b.room(step, format)?, c.room(step, format)?];
    let mut outputs = rounded.iter_mut();
    let roundings = operands.map(|Operand { values, matrices, along, across }| {
        let out = outputs.next().expect("as many as operands");
        let Matrices { rows, cols, ld, stride, .. } = matrices;
        let along = along.map(|side| (side, out.along.out()));
        let across = across.map(|side| (side, out.across.out()));
        Rounding { values, rows, cols, ld, batches: matrices.distinct(), stride, along, across }
    });
    step.launch(precision::round::of(format, roundings))?;
    Ok(rounded)
}
