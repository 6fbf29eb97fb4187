//! Scalar functions in f32, with the same bits on every CPU and GPU.
//!
//! Invariant: only `+`, `-`, `*`, `/`, fused multiply-add, square root, comparisons and bit operations are used, each
//! rounded to nearest as IEEE 754 says, in the order written. There is no libm, libdevice or approximate instruction
//! and no branch: both sides of a choice are computed and one is selected, so a warp never diverges and a CPU loop
//! vectorises.
//!
//! Accuracy, over all 2^32 inputs, against the exact value (an f64 computation), in units in the last place:
//!
//! | function | largest error |
//! |---|---|
//! | `exp` | 1.009 |
//! | `log` | 0.938 |
//! | `tanh` | 1.333 |
//! | `gelu` | 1.122 |
//! | `gelu_derivative` | 1.653 |
//! | `rsqrt` | 1.491 |
//!
//! `cargo run --release --example scalars` measures them, and compares the bits of a device with the CPU's.
//! Subnormal inputs and results are exact to the same bounds; a NaN gives a NaN, whose sign and payload are not fixed.
//! The polynomials are minimax for the relative error of the result (Remez exchange at 200 bits, then rounded to
//! f32); each states its interval.

use cuda_std::GpuFloat;

const LOG2_E: f32 = core::f32::consts::LOG2_E;
/// The leading 15 bits of ln 2, so that a product with an integer below 2^9 is exact, and the rest.
const LN2_HI: f32 = f32::from_bits(0x3f31_7200);
const LN2_LO: f32 = f32::from_bits(0x35bf_be8e);
/// 1.5 * 2^23: adding it rounds a float of magnitude below 2^22 to an integer, kept in the low bits of the sum.
const ROUND: f32 = 12_582_912.0;

/// `a * b + c`, rounded once.
#[inline(always)]
fn fma(a: f32, b: f32, c: f32) -> f32 {
    GpuFloat::mul_add(a, b, c)
}

/// 2^n for `n` in -126..=127.
#[inline(always)]
fn pow2(n: i32) -> f32 {
    f32::from_bits((n.wrapping_add(127) as u32) << 23)
}

/// `value * 2^n` for `n` in -252..=254, rounded at most once.
#[inline(always)]
fn scale(value: f32, n: i32) -> f32 {
    let half = n >> 1;
    value * pow2(half) * pow2(n.wrapping_sub(half))
}

/// exp(hi + lo) = (1 + t) * 2^n, as (`t`, `n`), for |hi| <= 252 ln 2 and |lo| far below |hi|.
///
/// Cody and Waite's reduction to |r| <= ln(2)/2, then e^r - 1 = r + r^2 Q(r) with Q minimax of degree 4 (error of e^r
/// 2^-28.0).
#[inline(always)]
fn exp_parts(hi: f32, lo: f32) -> (f32, i32) {
    let rounded = fma(hi, LOG2_E, ROUND);
    let n = rounded - ROUND;
    let r = fma(n, -LN2_HI, hi) + fma(n, -LN2_LO, lo);
    let mut q = f32::from_bits(0x3ab5_121d);
    q = fma(q, r, f32::from_bits(0x3c09_1cf2));
    q = fma(q, r, f32::from_bits(0x3d2a_ac79));
    q = fma(q, r, f32::from_bits(0x3e2a_aa49));
    q = fma(q, r, f32::from_bits(0x3eff_fffe));
    let exponent = rounded.to_bits().wrapping_sub(ROUND.to_bits()) as i32;
    (fma(r * r, q, r), exponent)
}

/// e^x. `exp(-inf)` is 0, `exp(inf)` is infinity.
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    // Beyond these the result is 0 or infinity; a NaN fails both comparisons and stays.
    let x = if x < -104.0 { -104.0 } else { x };
    let x = if x > 89.0 { 89.0 } else { x };
    let (t, n) = exp_parts(x, 0.0);
    scale(1.0 + t, n)
}

/// The natural logarithm. `log(+-0)` is -infinity, `log(inf)` infinity, of a negative number NaN.
///
/// x = 2^e m with m in [2/3, 4/3), f = m - 1, log(1 + f) = f - f^2/2 + f^3 P(f) with P minimax of degree 7 on
/// [-1/3, 1/3] (error 2^-27.4).
#[inline(always)]
pub fn log(x: f32) -> f32 {
    let subnormal = x < f32::MIN_POSITIVE;
    let scaled = if subnormal { x * 8_388_608.0 } else { x };
    let bits = scaled.to_bits();
    let e = bits.wrapping_sub(0x3f2a_aaab) as i32 & 0xff80_0000_u32 as i32;
    let f = f32::from_bits(bits.wrapping_sub(e as u32)) - 1.0;
    let e = (e >> 23) as f32 - if subnormal { 23.0 } else { 0.0 };
    let mut p = f32::from_bits(0xbe04_0355);
    p = fma(p, f, f32::from_bits(0x3e0f_3356));
    p = fma(p, f, f32::from_bits(0xbdf9_885b));
    p = fma(p, f, f32::from_bits(0x3e0f_6b90));
    p = fma(p, f, f32::from_bits(0xbe2a_cee8));
    p = fma(p, f, f32::from_bits(0x3e4c_e814));
    p = fma(p, f, f32::from_bits(0xbe7f_ff78));
    p = fma(p, f, f32::from_bits(0x3eaa_aa83));
    let tail = f * f * fma(p, f, -0.5);
    let high = fma(e, LN2_HI, f);
    // What the sum above lost: e * LN2_HI is exact and not below |f| unless e = 0, and then nothing is lost.
    let lost = f - (high - e * LN2_HI);
    let y = high + (fma(e, LN2_LO, tail) + lost);
    let y = if x == f32::INFINITY { x } else { y };
    let y = if x < 0.0 { f32::NAN } else { y };
    let y = if x == 0.0 { f32::NEG_INFINITY } else { y };
    if x.is_nan() { x } else { y }
}

/// The hyperbolic tangent.
///
/// |x| < 0.625: x + x^3 P(x^2) with P minimax of degree 4 (error 2^-26.6); otherwise 1 - 2 / (e^2|x| + 1), which
/// rounds to 1 from 9.02 on. The sign is put back at the end.
#[inline(always)]
pub fn tanh(x: f32) -> f32 {
    let size = x.abs();
    let square = size * size;
    let mut p = f32::from_bits(0xbbba_f1be);
    p = fma(p, square, f32::from_bits(0x3ca9_1390));
    p = fma(p, square, f32::from_bits(0xbd5c_1e3b));
    p = fma(p, square, f32::from_bits(0x3e08_8394));
    p = fma(p, square, f32::from_bits(0xbeaa_aa99));
    let small = fma(size * square, p, size);

    let clamped = if size > 10.0 { 10.0 } else { size };
    let (t, n) = exp_parts(2.0 * clamped, 0.0);
    let power = pow2(n);
    let large = 1.0 - 2.0 / (fma(t, power, power) + 1.0);

    let y = if size < 0.625 { small } else { large };
    f32::from_bits(y.to_bits() | (x.to_bits() & 0x8000_0000))
}

/// 2 sqrt(2/pi) and 2 sqrt(2/pi) * 0.044715 as sums of two floats.
const GELU_1: (f32, f32) = (f32::from_bits(0x3fcc_422a), f32::from_bits(0xb342_bc9b));
const GELU_3: (f32, f32) = (f32::from_bits(0x3d92_2279), f32::from_bits(0x3124_d8b5));
/// From here on gelu(-x) and its derivative are below the smallest subnormal.
const GELU_END: f32 = 12.0;

/// The parts of GELU at `-size`, for `size` in 0..=12; pairs are sums of two floats.
struct GeluParts {
    /// 2 sqrt(2/pi) * 0.044715 * size^2.
    cubic: (f32, f32),
    /// e^-z lies in [0.7, 1.5) * 2^n, z = 2 sqrt(2/pi) (size + 0.044715 size^3).
    n: i32,
    /// 1 / (1 + e^-z).
    inverse: (f32, f32),
    /// The sigmoid of -z, over 2^n.
    sigmoid: (f32, f32),
}

/// Computes [`GeluParts`]. e^-z has the relative error of z's absolute one, so z (up to 200) carries two floats.
#[inline(always)]
fn gelu_parts(size: f32) -> GeluParts {
    let square = size * size;
    let square_low = fma(size, size, -square);
    let cubic = GELU_3.0 * square;
    let cubic_low = fma(GELU_3.0, square, -cubic) + fma(GELU_3.1, square, GELU_3.0 * square_low);
    let (sum, lost) = two_sum(GELU_1.0, cubic);
    let sum_low = lost + (cubic_low + GELU_1.1);
    let z = size * sum;
    let z_low = fma(size, sum, -z) + size * sum_low;

    let (t, n) = exp_parts(-z, -z_low);
    let p = 1.0 + t;
    let p_low = t - (p - 1.0);
    let power = scale(p, n);
    let s = 1.0 + power;
    // For n = 0 the power still carries p's own low part.
    let s_low = (power - (s - 1.0)) + scale(p_low, n);
    let inverse = 1.0 / s;
    let inverse_low = inverse * fma(-s_low, inverse, fma(-s, inverse, 1.0));
    let sigmoid = p * inverse;
    let sigmoid_low = fma(p, inverse, -sigmoid) + fma(p, inverse_low, p_low * inverse);
    GeluParts { cubic: (cubic, cubic_low), n, inverse: (inverse, inverse_low), sigmoid: (sigmoid, sigmoid_low) }
}

/// `a + b` and what its rounding lost (Knuth).
#[inline(always)]
fn two_sum(a: f32, b: f32) -> (f32, f32) {
    let sum = a + b;
    let b_part = sum - a;
    let a_part = sum - b_part;
    (sum, (a - a_part) + (b - b_part))
}

/// The tanh form of GELU: 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))) (Hendrycks and Gimpel, 2016), -0 at
/// -infinity.
///
/// Computed as x times a sigmoid for -|x|; for positive x by gelu(x) = x + gelu(-x).
#[inline(always)]
pub fn gelu(x: f32) -> f32 {
    let size = x.abs();
    let size = if size > GELU_END { GELU_END } else { size };
    let parts = gelu_parts(size);
    let negative = -scale(fma(size, parts.sigmoid.0, size * parts.sigmoid.1), parts.n);
    if x.to_bits() >> 31 == 0 { x + negative } else { negative }
}

/// The derivative of [`gelu`]'s root and value there: gelu'(x) = (x - ROOT) (SLOPE + (x - ROOT) P(x - ROOT)).
const ROOT: (f32, f32) = (f32::from_bits(0xbf40_a150), f32::from_bits(0x3242_d036));
const SLOPE: (f32, f32) = (f32::from_bits(0x3edc_5d67), f32::from_bits(0xb253_6947));

/// The derivative of [`gelu`].
///
/// At -|x|, from 1 on: sigmoid(-z) (1 - |x| z' / (1 + e^-z)), two floats each. Within 1, where that cancels: the
/// distance to the root times a polynomial, minimax of degree 9 (error 2^-26.1). At positive x, 1 - gelu'(-x).
#[inline(always)]
pub fn gelu_derivative(x: f32) -> f32 {
    let size = x.abs();
    let size = if size > GELU_END { GELU_END } else { size };
    let parts = gelu_parts(size);
    // size * z' = size * (GELU_1 + 3 cubic).
    let (sum, lost) = two_sum(GELU_1.0, 3.0 * parts.cubic.0);
    let triple_lost = fma(3.0, parts.cubic.0, -(3.0 * parts.cubic.0));
    let sum_low = lost + (triple_lost + fma(3.0, parts.cubic.1, GELU_1.1));
    let growth = size * sum;
    let growth_low = fma(size, sum, -growth) + size * sum_low;
    let (inverse, inverse_low) = parts.inverse;
    let share = growth * inverse;
    let share_low = fma(growth, inverse, -share) + fma(growth, inverse_low, growth_low * inverse);
    let factor = 1.0 - share;
    let factor_low = (1.0 - (factor + share)) - share_low;
    let (sigmoid, sigmoid_low) = parts.sigmoid;
    let far = fma(sigmoid, factor, fma(sigmoid, factor_low, sigmoid_low * factor));
    let far = scale(far, parts.n);

    let distance = -size - ROOT.0;
    let distance_low = (-size - (distance + ROOT.0)) - ROOT.1;
    let mut p = f32::from_bits(0x39cd_ee27);
    p = fma(p, distance, f32::from_bits(0xba80_93c3));
    p = fma(p, distance, f32::from_bits(0xbb1e_b892));
    p = fma(p, distance, f32::from_bits(0x3bac_9925));
    p = fma(p, distance, f32::from_bits(0x3ca1_39db));
    p = fma(p, distance, f32::from_bits(0xbc88_2594));
    p = fma(p, distance, f32::from_bits(0xbde9_5bb1));
    p = fma(p, distance, f32::from_bits(0xbc81_4b0b));
    p = fma(p, distance, f32::from_bits(0x3ec6_68d1));
    let near = fma(distance, SLOPE.0, fma(distance, fma(distance, p, SLOPE.1), distance_low * SLOPE.0));

    let negative = if size < 1.0 { near } else { far };
    if x.to_bits() >> 31 == 0 { 1.0 - negative } else { negative }
}

/// 1 / sqrt(x), both correctly rounded: `rsqrt(+-0)` is an infinity of that sign, of a negative number NaN.
#[inline(always)]
pub fn rsqrt(x: f32) -> f32 {
    1.0 / GpuFloat::sqrt(x)
}
