//! Powers.
//!
//! Invariant: that of [`math`](super).

use super::{LN2_HI, LN2_LO, Pair, exp_less_1, fma, scale, select};

/// Computes the natural logarithm of a positive, finite number as the sum of two floats, within
/// 2^-30 of itself.
///
/// x = 2^e m with m in [0.707, 1.414), q = (m - 1) / (m + 1), and
/// log(m) = 2 atanh(q) = 2 (q + q^3 P(q^2)). P is minimax of degree 3 on |q| <= 0.172, with an
/// error of 2^-31. q is a sum of two floats.
#[inline(always)]
fn log_pair(x: f32) -> Pair {
    let subnormal = x < f32::MIN_POSITIVE;
    let scaled = if subnormal { x * 8_388_608.0 } else { x };
    let bits = scaled.to_bits();
    let e = bits.wrapping_sub(0x3f35_04f3) as i32 & 0xff80_0000_u32 as i32;
    let m = f32::from_bits(bits.wrapping_sub(e as u32));
    let e = (e >> 23) as f32 - if subnormal { 23.0 } else { 0.0 };

    let (above, f) = (m + 1.0, m - 1.0);
    let inverse = 1.0 / above;
    let q = inverse * f;
    let q_low = inverse * fma(q, -f, fma(q, -2.0, f));
    let square = q * q;
    let square_low = fma(q, q_low + q_low, fma(q, q, -square));
    let cube = square * q;
    let cube_low = fma(square, q_low, fma(square_low, q, fma(square, q, -cube)));
    let mut p = f32::from_bits(0x3df1_7c7e);
    p = fma(p, square, f32::from_bits(0x3e12_1c64));
    p = fma(p, square, f32::from_bits(0x3e4c_cd3d));
    p = fma(p, square, f32::from_bits(0x3eaa_aaaa));
    let low = fma(p, cube, fma(p, cube_low, q_low));

    // log(m) = 2 q + 2 low, and e ln 2 = e LN2_HI + e LN2_LO, of which the first is exact.
    let twice = 2.0 * q;
    let high = fma(e, LN2_HI, twice);
    let lost = twice - fma(-e, LN2_HI, high);
    let rest = fma(e, LN2_LO, fma(2.0, low, lost));
    let sum = high + rest;
    (sum, (high - sum) + rest)
}

/// Computes `base` to the power `exponent`, with the special values of C's `pow`: 1 for an exponent
/// of 0 and for a base of 1, whatever the other is, and NaN for a finite negative base and an
/// exponent that is not an integer.
#[inline(always)]
pub fn pow(base: f32, exponent: f32) -> f32 {
    let size = base.abs();
    let is_ordinary = size > 0.0 && size < f32::INFINITY;
    let (log, log_low) = log_pair(select(is_ordinary, size, 1.0));
    // An infinite logarithm, of 0 or infinity, has an infinite product.
    let log = select(is_ordinary, log, select(size > 1.0, f32::INFINITY, f32::NEG_INFINITY));
    let product = log * exponent;
    let bounded = if product < -104.0 { -104.0 } else { product };
    let bounded = if bounded > 89.0 { 89.0 } else { bounded };
    let low = fma(log_low, exponent, fma(log, exponent, -product));
    let (t, n) = exp_less_1(bounded, select(bounded == product, low, 0.0));
    let y = scale(1.0 + t, n);

    // A float from 2^24 on is an even integer.
    let is_large = exponent.abs() >= 16_777_216.0;
    let whole = select(is_large, 0.0, exponent) as i32;
    let is_integer = is_large || whole as f32 == exponent;
    let is_odd = whole & 1 == 1 && is_integer;
    let y = select(base.is_sign_negative() && is_odd, -y, y);
    let y = select(base < 0.0 && size < f32::INFINITY && !is_integer, f32::NAN, y);
    let y = select(base.is_nan() || exponent.is_nan(), f32::NAN, y);
    // -1 to an infinite power is 1 too.
    let is_1 = base == 1.0 || exponent == 0.0 || (base == -1.0 && exponent.abs() == f32::INFINITY);
    select(is_1, 1.0, y)
}
