//! The formats of mma operands: how f32 is rounded to them, and their layout in 32-bit words.
//!
//! ```text
//! bits of a word  | 31   | 30 .. 23 | 22 .. 16 | 15 .. 13 | 12 .. 0 |  significand  ties
//! f32             | sign | exponent |           fraction            |  24 bits
//! TF32, 1 a word  | sign | exponent |      fraction       |    0    |  11 bits      to even
//! BF16, 2 a word  | upper half of f32: k + 1 | upper half of f32: k |   8 bits      to even
//! (significand: with its implied bit)
//! ```
//! Infinities are preserved. A value that rounds past the largest number becomes an infinity. A NaN
//! stays a NaN, and loses its sign and its payload, as on the GPU.
//!
//! Invariant: every device gives the same bits, except for NaNs.

pub use crate::machine::float::{round_bf16, round_tf32};
use crate::machine::mma::Instruction;

/// The words along k that an mma instruction multiplies.
pub const STEP: u32 = 8;

/// A format of mma operands.
pub trait Format: Instruction {
    /// The elements in a word, along k.
    const PER_WORD: u32;
    /// The elements along k that a warp multiplies at once.
    const PER_STEP: u32 = STEP * Self::PER_WORD;

    /// Rounds elements that are neighbors along k to two words. TF32 takes the first two elements,
    /// BF16 all four.
    fn words(elements: [f32; 4]) -> [u32; 2];

    /// Returns the `part`th element of a word, as f32.
    fn value(word: u32, part: u32) -> f32;
}

/// The TF32 format: f32 values, rounded to 11 bits of significand.
#[derive(Clone, Copy, Debug)]
pub struct Tf32;

/// The BF16 format, in pairs.
#[derive(Clone, Copy, Debug)]
pub struct Bf16;

impl Format for Tf32 {
    const PER_WORD: u32 = 1;

    #[inline(always)]
    fn words([a, b, _, _]: [f32; 4]) -> [u32; 2] {
        [round_tf32(a), round_tf32(b)]
    }

    #[inline(always)]
    fn value(word: u32, _: u32) -> f32 {
        f32::from_bits(word)
    }
}

impl Format for Bf16 {
    const PER_WORD: u32 = 2;

    #[inline(always)]
    fn words([a, b, c, d]: [f32; 4]) -> [u32; 2] {
        [round_bf16(a, b), round_bf16(c, d)]
    }

    #[inline(always)]
    fn value(word: u32, part: u32) -> f32 {
        f32::from_bits(if part == 0 { word << 16 } else { word & 0xffff_0000 })
    }
}
