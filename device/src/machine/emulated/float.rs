//! The instructions of `gpu/float.rs` in integer and float arithmetic.

use crate::math::ex2::ex2;
use crate::math::select;
use cuda_std::GpuFloat;

/// Returns the larger of two, or NaN if either is NaN. 0 is larger than -0.
#[inline(always)]
pub fn larger_or_nan(a: f32, b: f32) -> f32 {
    // Two zeros: the one with fewer bits. Other equal numbers: either.
    let equal = f32::from_bits(a.to_bits() & b.to_bits());
    let larger = if b > a { b } else { a };
    let larger = if a == b { equal } else { larger };
    if b.is_nan() { b } else { larger }
}

/// Returns the larger of `-|a|` and `b`, or NaN if either is NaN.
#[inline(always)]
pub fn larger_of_minus(a: f32, b: f32) -> f32 {
    larger_or_nan(-a.abs(), b)
}

/// Returns `negative` if the sign bit of `x` is set, else `positive`.
#[inline(always)]
pub fn by_sign(x: f32, negative: f32, positive: f32) -> f32 {
    select(x.is_sign_negative(), negative, positive)
}

/// Returns 2^(`score` `factor` + `base`), within 2^-17 of itself up to 2^8, for attention. Below
/// 2^-126 it is 0. A NaN gives NaN.
#[inline(always)]
pub fn exp2_weight(score: f32, factor: f32, base: f32) -> f32 {
    ex2(GpuFloat::mul_add(score, factor, base))
}

/// Rounds `x` to the nearest TF32, ties to even, and returns its f32 bits.
#[inline(always)]
pub fn round_tf32(x: f32) -> u32 {
    let bits = x.to_bits();
    // Adds just less than half a unit, or half a unit if the last kept bit is odd.
    if x.is_nan() { 0x7fff_e000 } else { (bits + 0xfff + (bits >> 13 & 1)) & !0x1fff }
}

/// Rounds two numbers to the nearest BF16, ties to even, and packs them in one word: `low` in the
/// lower half.
#[inline(always)]
pub fn round_bf16(low: f32, high: f32) -> u32 {
    let round = |x: f32| {
        let bits = x.to_bits();
        // Adds just less than half a unit, or half a unit if the last kept bit is odd.
        if x.is_nan() { 0x7fff } else { (bits + 0x7fff + (bits >> 16 & 1)) >> 16 }
    };
    round(low) | round(high) << 16
}
