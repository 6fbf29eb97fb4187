//! The precision of matrix multiplies.

#![forbid(unsafe_code)]

use crate::error::{Error, Result};
use std::fmt;
use std::str::FromStr;

/// The rounding of a matrix multiply's operands. Sums are f32 in every precision.
///
/// It applies to f32 tensors. BF16 tensors are multiplied as they are, which is faster than to
/// round f32 tensors.
///
/// [`Precision::F32`] has the same bits on every device. [`Precision::Tf32`] uses the GPU's tensor
/// cores. It is many times as fast, and has the same bits in every run, for every tile, and on
/// every device whose matrix instructions follow the emulator's rule, as those of compute
/// capability 9.0 do. An output of k products is within
/// `(2 u + u^2 + k 2^-22) sum |a b|` of the exact one, where `u` is 2^-11, if nothing overflows or
/// is subnormal. A separate launch rounds the operands, into memory that is freed after the
/// multiply, or after both multiplies of a backward pass.
///
/// Multiplies of fewer than [`Precision::LEAST`] rows, columns or k always run in
/// [`Precision::F32`], unless they name a [`mma_tile`](crate::ops::Gemm::mma_tile), because a
/// tensor core would work on padding.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Precision {
    /// Operands unchanged: one chain of fused multiply-adds.
    #[default]
    F32,
    /// Operands of 11 bits of significand, rounded to nearest, ties to even, with the range of f32.
    Tf32,
}

impl Precision {
    /// Every precision, the most exact first.
    pub const ALL: [Self; 2] = [Self::F32, Self::Tf32];
    /// The fewest rows, columns and k of a multiply that runs in TF32 without naming a tile.
    pub const LEAST: usize = 16;
}

impl fmt::Display for Precision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::F32 => "f32",
            Self::Tf32 => "tf32",
        })
    }
}

impl FromStr for Precision {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let found = Self::ALL.into_iter().find(|precision| precision.to_string() == text);
        found.ok_or_else(|| Error::misuse("precision", "f32 or tf32", format!("`{text}`")))
    }
}
