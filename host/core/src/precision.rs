//! The precision of matrix multiplies.

#![forbid(unsafe_code)]

use crate::error::{Error, Result};
use std::fmt;
use std::str::FromStr;

/// The rounding of a matrix multiply's operands. Sums are f32 in every precision.
///
/// [`Precision::F32`] has the same bits on every device. The other precisions use the GPU's tensor
/// cores. They are many times as fast, and have the same bits in every run and for every tile on
/// one device, but not across devices. Let `u` be 2^-11 for TF32 and 2^-8 for BF16. An output of k
/// products is then within `(2 u + u^2 + k 2^-22) sum |a b|` of the exact one, if nothing overflows
/// or is subnormal. A separate launch rounds the operands, into memory that is freed after the
/// multiply, or after both multiplies of a backward pass.
///
/// [`attention`](crate::ops::attention) of f32 multiplies as TF32 in either precision below
/// [`Precision::F32`].
///
/// Multiplies of fewer than [`Precision::LEAST`] rows, columns or k always run in
/// [`Precision::F32`], unless they name a [`tensor_tile`](crate::ops::Gemm::tensor_tile), because a
/// tensor core would work on padding.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Precision {
    /// Operands unchanged: one chain of fused multiply-adds.
    #[default]
    F32,
    /// Operands of 11 bits of significand, rounded to nearest, ties away from zero, with the range
    /// of f32.
    Tf32,
    /// Operands of 8 bits of significand, rounded to nearest, ties to even, with the range of f32.
    Bf16,
}

impl Precision {
    /// Every precision, the most exact first.
    pub const ALL: [Self; 3] = [Self::F32, Self::Tf32, Self::Bf16];
    /// The fewest rows, columns and k of a multiply that runs in a precision below
    /// [`Precision::F32`] without naming a tile.
    pub const LEAST: usize = 16;
}

impl fmt::Display for Precision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::F32 => "ieee",
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
