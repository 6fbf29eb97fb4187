//! How exactly matrices are multiplied.

#![forbid(unsafe_code)]

use crate::error::{Error, Result};
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
/// [`attention`](crate::ops::attention) of f32 multiplies as TF32 in either precision below [`Precision::Ieee`].
///
/// Multiplies of fewer than [`Precision::LEAST`] rows, columns or k are done in [`Precision::Ieee`] whatever is asked for,
/// unless they name a [`tensor_tile`](crate::ops::Gemm::tensor_tile): a matrix instruction would work on padding.
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
