//! The error function.
//!
//! Invariant: that of [`math`](super).

use super::{exp, exp_negative, fma, select};

/// The |x| from which on erf is computed by its distance from 1.
const NEAR_1: f32 = 0.927_734_4;

/// Computes erf(x), 2 / sqrt(pi) times the integral of e^-t^2 over t from 0 to x.
///
/// Below 0.93 it is x + x P(x^2), P of degree 5. From there on it is 1 - e^(-|x| + |x| Q(|x|)), Q
/// of degree 6. Both polynomials are N. Juffa's (2016).
#[inline(always)]
pub fn erf(x: f32) -> f32 {
    let size = x.abs();
    let size = if size > 4.0 { 4.0 } else { size };
    let square = size * size;
    let mut q = fma(f32::from_bits(0xb791_0000), size, f32::from_bits(0x39c8_e7d9));
    q = fma(q, square, fma(f32::from_bits(0xbb7e_8a1c), size, f32::from_bits(0x3cc6_b1a1)));
    q = fma(q, size, f32::from_bits(0xbdda_ae5c));
    q = fma(q, size, f32::from_bits(0xbf22_8550));
    q = fma(q, size, f32::from_bits(0xbe03_ce86));
    let far = 1.0 - exp_negative(fma(q, size, -size));

    let mut p = f32::from_bits(0xba1c_7000);
    p = fma(p, square, f32::from_bits(0x3ba3_8d2c));
    p = fma(p, square, f32::from_bits(0xbcdb_48d9));
    p = fma(p, square, f32::from_bits(0x3de7_0e22));
    p = fma(p, square, f32::from_bits(0xbec0_9380));
    p = fma(p, square, f32::from_bits(0x3e03_75d4));
    let near = fma(p, size, size);

    let y = select(size > NEAR_1, far, near);
    let y = select(x.is_nan(), x, y);
    f32::from_bits(y.to_bits() | (x.to_bits() & 0x8000_0000))
}

/// Computes the derivative of [`erf`], 2 / sqrt(pi) e^-x^2. The rounding error of x^2 becomes a
/// relative error of the result, so it is added to the exponent's result.
#[inline(always)]
pub fn erf_derivative(x: f32) -> f32 {
    const SLOPE: f32 = core::f32::consts::FRAC_2_SQRT_PI;
    let square = x * x;
    let lost = fma(x, x, -square);
    let power = exp(-square);
    // Where x^2 is infinite the power is 0, and the error is not a number.
    SLOPE * select(square < 104.0, fma(-lost, power, power), power)
}
