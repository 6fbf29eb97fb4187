//! The exact form of GELU, with the normal distribution instead of its approximation by tanh.
//!
//! Invariant: that of [`math`](super).

use super::{LIFT, LOWER, Pair, exp_parts, fma, pow2, select};

/// The x from which on x times the normal distribution's mass below -x is less than the smallest
/// subnormal.
const NORMAL_END: f32 = 14.5;

/// The common terms of the exact GELU and its derivative, for `size` in 0..=14.5. The normal
/// distribution's mass below -size is e^(-size^2 / 2) P / sum, where sum is size + 3. P is minimax
/// of degree 10 in (size - 3) / (size + 3) (error 2^-30.0). The exponential is (1 + r + rest) lift
/// 2^-LIFT.
struct NormalTail {
    p: Pair,
    sum: Pair,
    /// 1 / sum.
    inverse: f32,
    r: f32,
    rest: f32,
    lift: f32,
}

/// Computes the [`NormalTail`]. size^2 is kept as two floats: its absolute error becomes the
/// relative error of the exponential.
#[inline(always)]
fn normal_tail(size: f32) -> NormalTail {
    let half = 0.5 * size;
    let square = half * size;
    let (r, q, n) = exp_parts(-square, -fma(half, size, -square));
    let sum = size + 3.0;
    let sum_low = select(size < 3.0, size - (sum - 3.0), 3.0 - (sum - size));
    let inverse = 1.0 / sum;
    let remainder = fma(-sum, inverse, 1.0) - sum_low * inverse;
    let u = fma(-6.0 * inverse, remainder, fma(-6.0, inverse, 1.0));
    let mut p = f32::from_bits(0x3864_6684);
    p = fma(p, u, f32::from_bits(0x3909_a11c));
    p = fma(p, u, f32::from_bits(0xb980_5269));
    p = fma(p, u, f32::from_bits(0xba87_55c0));
    p = fma(p, u, f32::from_bits(0x3a86_520d));
    p = fma(p, u, f32::from_bits(0x3be4_5ebe));
    p = fma(p, u, f32::from_bits(0xbc2b_6afe));
    p = fma(p, u, f32::from_bits(0xbd41_9685));
    p = fma(p, u, f32::from_bits(0x3e6b_89c3));
    p = fma(p, u, f32::from_bits(0xbf02_6395));
    let first: Pair = (f32::from_bits(0x3f3a_a53b), f32::from_bits(0xb2e6_7cea));
    let all = fma(p, u, first.0);
    let p = (all, fma(p, u, first.0 - all) + first.1);
    NormalTail { p, sum: (sum, sum_low), inverse, r, rest: r * r * q, lift: pow2(n.wrapping_add(LIFT)) }
}

/// Computes the exact form of GELU: x times the normal distribution's mass below x, 0.5 x (1 +
/// erf(x / sqrt(2))). It is -0 at -infinity.
///
/// A remainder corrects the quotient, as in [`gelu`](super::gelu).
#[inline(always)]
pub fn gelu_exact(x: f32) -> f32 {
    let size = x.abs();
    let size = if size > NORMAL_END { NORMAL_END } else { size };
    let NormalTail { p, sum, inverse, r, rest, lift } = normal_tail(size);
    let product = size * p.0;
    let product_low = fma(size, p.1, fma(size, p.0, -product));
    let quotient = product * inverse;
    let low = (fma(-quotient, sum.1, fma(-quotient, sum.0, product)) + product_low) * inverse;
    // Multiplied by the exponential.
    let low = fma(quotient, r, fma(quotient, rest, low));
    let lost = fma(quotient, lift, low * lift) * LOWER;
    let y = select(x.is_sign_negative(), -lost, size - lost);
    select(x > NORMAL_END, x, y)
}

/// Computes the derivative of [`gelu_exact`]: the mass below x, plus x times the density. Near its
/// root at -0.7518 the two cancel: there it is accurate to 2^-23 of either.
#[inline(always)]
pub fn gelu_exact_derivative(x: f32) -> f32 {
    const INVERSE_ROOT_2_PI: f32 = 0.398_942_3;
    let size = x.abs();
    let size = if size > NORMAL_END { NORMAL_END } else { size };
    let NormalTail { p, inverse, r, rest, lift, .. } = normal_tail(size);
    let factor = fma(-INVERSE_ROOT_2_PI, size, p.0 * inverse);
    let negative = fma(factor * (r + rest), lift, factor * lift) * LOWER;
    select(x.is_sign_negative(), negative, 1.0 - negative)
}
