//! Scalar functions in f32, with the same bits on every CPU and GPU.
//!
//! Invariant: only `+`, `-`, `*`, `/`, fused multiply-add, square root, comparisons and bit
//! operations are used, in the order written. Each is rounded to nearest, as IEEE 754 defines.
//! There is no libm, no libdevice and, except in [`exp2_weight`], no approximate instruction.
//! Choices are selects: both sides are computed. A warp therefore never diverges, and a CPU loop
//! vectorizes.
//!
//! Accuracy, over all 2^32 inputs, against the exact value (an f64 computation), in units in the
//! last place:
//!
//! | function | largest error |
//! |---|---|
//! | `exp` | 1.009 |
//! | `log` | 0.938 |
//! | `tanh` | 1.405 |
//! | `gelu` | 1.833 |
//! | `gelu_derivative` | 1.950 |
//! | `rsqrt` | 1.491 |
//! | `sigmoid` | 1.374 |
//! | `silu` | 1.424 |
//! | `gelu_exact` | 2.225 |
//! | `sin` | 0.825 |
//! | `cos` | 0.814 |
//! | `log1p` | 1.438 |
//! | `erf` | 1.035 |
//! | `erf_derivative` | 2.782 |
//!
//! `pow` is within 2 ulp on 200 million random pairs.
//!
//! `cargo run --release --example scalars` measures these errors, and compares the bits of a device
//! with the CPU's. The same bounds hold for subnormal inputs and results. A NaN gives a NaN, whose
//! sign and payload are unspecified. The polynomials are minimax for the relative error of the
//! result (Remez exchange at 200 bits, then rounded to f32). Each states its interval.
//!
//! `exp2_negative` is for results that are rounded to BF16: within 2^-18, in half the operations.
//! The [`activations`](crate::activations) use its polynomial. `exp2_weight` is a GPU's instruction,
//! whose bits `ex2.rs` computes.

mod erf;
#[cfg(not(target_arch = "nvptx64"))]
pub(crate) mod ex2;
mod gelu_exact;
mod power;
mod trigonometry;

pub(crate) use crate::machine::float::{by_sign, larger_of_minus};
pub use crate::machine::float::{exp2_weight, larger_or_nan};
use cuda_std::GpuFloat;
pub use erf::{erf, erf_derivative};
pub use gelu_exact::{gelu_exact, gelu_exact_derivative};
pub use power::pow;
pub use trigonometry::{cos, sin};

pub(crate) const LOG2_E: f32 = core::f32::consts::LOG2_E;
/// ln 2 in two parts: its leading 15 bits, so that a product with an integer below 2^9 is exact,
/// and the rest.
const LN2_HI: f32 = f32::from_bits(0x3f31_7200);
const LN2_LO: f32 = f32::from_bits(0x35bf_be8e);
/// 1.5 * 2^23. Adding it rounds a float of magnitude below 2^22 to an integer, which is in the low
/// bits of the sum.
const ROUND: f32 = 12_582_912.0;

/// 2^n for n down to -246 is kept 2^LIFT times too large. A product with LOWER undoes that, in one
/// rounding.
const LIFT: i32 = 120;
const LOWER: f32 = f32::from_bits((127 - LIFT as u32) << 23);

/// Returns `a * b + c`, rounded once.
#[inline(always)]
pub(crate) fn fma(a: f32, b: f32, c: f32) -> f32 {
    GpuFloat::mul_add(a, b, c)
}

/// Selects one of two computed values. The compiler may turn an `if` into a branch around one of
/// them.
#[inline(always)]
pub(crate) fn select<T>(condition: bool, yes: T, no: T) -> T {
    core::hint::select_unpredictable(condition, yes, no)
}

/// Returns 2^n for `n` in -126..=127.
#[inline(always)]
fn pow2(n: i32) -> f32 {
    f32::from_bits((n.wrapping_add(127) as u32) << 23)
}

/// Returns `value * 2^n` for `n` in -252..=254, rounded at most once.
#[inline(always)]
fn scale(value: f32, n: i32) -> f32 {
    let half = n >> 1;
    value * pow2(half) * pow2(n.wrapping_sub(half))
}

/// Computes exp(hi + lo) = (1 + r + r^2 q) 2^n, as (`r`, `q`, `n`), for |hi| <= 252 ln 2 and |lo|
/// far below |hi|.
///
/// It uses Cody and Waite's reduction to |r| <= ln(2)/2. q is minimax of degree 4 (error of e^r
/// 2^-28.0).
#[inline(always)]
fn exp_parts(hi: f32, lo: f32) -> (f32, f32, i32) {
    let rounded = fma(hi, LOG2_E, ROUND);
    let n = rounded - ROUND;
    let r = fma(n, -LN2_HI, hi) + fma(n, -LN2_LO, lo);
    let mut q = f32::from_bits(0x3ab5_121d);
    q = fma(q, r, f32::from_bits(0x3c09_1cf2));
    q = fma(q, r, f32::from_bits(0x3d2a_ac79));
    q = fma(q, r, f32::from_bits(0x3e2a_aa49));
    q = fma(q, r, f32::from_bits(0x3eff_fffe));
    (r, q, rounded.to_bits().wrapping_sub(ROUND.to_bits()) as i32)
}

/// Computes exp(hi + lo) = (1 + t) 2^n, as (`t`, `n`). See [`exp_parts`].
#[inline(always)]
fn exp_less_1(hi: f32, lo: f32) -> (f32, i32) {
    let (r, q, n) = exp_parts(hi, lo);
    (fma(r * r, q, r), n)
}

/// Computes e^x. `exp(-inf)` is 0, `exp(inf)` is infinity.
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    // Past these bounds the result is 0 or infinity. A NaN fails both comparisons and is kept.
    let x = if x < -104.0 { -104.0 } else { x };
    let x = if x > 89.0 { 89.0 } else { x };
    let (t, n) = exp_less_1(x, 0.0);
    scale(1.0 + t, n)
}

/// Computes e^x for an x up to 0, or a NaN. It gives the bits of [`exp`] with fewer operations.
#[inline(always)]
pub fn exp_negative(x: f32) -> f32 {
    let x = if x < -104.0 { -104.0 } else { x };
    let (t, n) = exp_less_1(x, 0.0);
    let lift = pow2(n.wrapping_add(LIFT));
    fma(t, lift, lift) * LOWER
}

/// Computes 2^x for an x up to 0, in few operations, within 2^-18, for results that are rounded to
/// BF16. Below 2^-126 the error is less than 2^-126. -infinity gives 0, and an integer is exact. A
/// NaN gives a number above 2^127.
#[inline(always)]
pub fn exp2_negative(x: f32) -> f32 {
    exp2_from(larger_or_nan(x, EXP2_LEAST))
}

/// Computes 2^-|x|, as [`exp2_negative`] does.
#[inline(always)]
pub(crate) fn exp2_minus(x: f32) -> f32 {
    exp2_from(larger_of_minus(x, EXP2_LEAST))
}

/// The argument whose power of 2 has the bits of 0 in [`exp2_from`]: those of 1, with 127
/// subtracted from the exponent.
const EXP2_LEAST: f32 = -127.0;

/// Computes 2^x for an x of [`EXP2_LEAST`] to 0.
///
/// x is an integer plus f, and 2^f = 1 + f P(f), with P minimax of degree 3 on [-1/2, 1/2] (error
/// 2^-18.4).
#[inline(always)]
fn exp2_from(x: f32) -> f32 {
    let rounded = x + ROUND;
    let f = x - (rounded - ROUND);
    let mut p = f32::from_bits(0x3c1c_f9d3);
    p = fma(p, f, f32::from_bits(0x3d64_fda9));
    p = fma(p, f, f32::from_bits(0x3e76_01db));
    p = fma(p, f, f32::from_bits(0x3f31_7099));
    p = fma(p, f, 1.0);
    f32::from_bits(p.to_bits().wrapping_add(rounded.to_bits() << 23))
}

/// Computes 2^x as power (1 + t), given as (`t`, `power`), for an x up to 0. Below -126 power is 0.
///
/// x is an integer plus f, and t = f Q(f), with Q minimax of degree 3 on [-1/2, 1/2] (error of t
/// 2^-16.0).
#[inline(always)]
pub(crate) fn exp2_less_1(x: f32) -> (f32, f32) {
    let x = larger_or_nan(x, -127.0);
    let rounded = x + ROUND;
    let f = x - (rounded - ROUND);
    let mut q = f32::from_bits(0x3c1d_9548);
    q = fma(q, f, f32::from_bits(0x3d64_b5a4));
    q = fma(q, f, f32::from_bits(0x3e75_ff84));
    q = fma(q, f, f32::from_bits(0x3f31_716b));
    (q * f, f32::from_bits(0x3f80_0000_u32.wrapping_add(rounded.to_bits() << 23)))
}

/// Computes the natural logarithm. `log(+-0)` is -infinity, `log(inf)` is infinity, and the
/// logarithm of a negative number is NaN.
///
/// x = 2^e m with m in [2/3, 4/3), f = m - 1, log(1 + f) = f - f^2/2 + f^3 P(f) with P minimax of
/// degree 7 on [-1/3, 1/3] (error 2^-27.4).
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
    // The rounding error of the sum above. e * LN2_HI is exact and not below |f|, unless e = 0;
    // then the error is 0.
    let lost = f - (high - e * LN2_HI);
    let y = high + (fma(e, LN2_LO, tail) + lost);
    let y = if x == f32::INFINITY { x } else { y };
    let y = if x < 0.0 { f32::NAN } else { y };
    let y = if x == 0.0 { f32::NEG_INFINITY } else { y };
    if x.is_nan() { x } else { y }
}

/// Computes log(1 + x): the logarithm of the rounded sum, plus the rounding error of the sum times
/// the logarithm's slope. `log1p(-1)` is -infinity, and `log1p` of less is NaN.
#[inline(always)]
pub fn log1p(x: f32) -> f32 {
    let sum = 1.0 + x;
    let lost = select(x < 1.0, x - (sum - 1.0), 1.0 - (sum - x));
    // Without an error there is nothing to add: x is infinite or a NaN, or the sum is 0.
    let correction = if lost.abs() > 0.0 { lost / sum } else { 0.0 };
    select(sum == 1.0, x, log(sum) + correction)
}

/// Computes the hyperbolic tangent.
///
/// |x| < 0.625: x + x^3 P(x^2) with P minimax of degree 4 (error 2^-26.6). Otherwise 1 - 2 q / (1 +
/// q) with q = e^-2|x|, which rounds to 1 from 9.02 on. 1 / s for s in `[1, 1.2874]` is computed by
/// a cubic and one step of Newton's iteration. The cubic has the least relative error, a multiple
/// of Chebyshev's T4 (2^-15.6). A division would be a branch on the GPU. The sign is restored at
/// the end.
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
    let (t, n) = exp_less_1(-2.0 * clamped, 0.0);
    let power = pow2(n);
    let q = fma(t, power, power);
    let s = 1.0 + q;
    let mut inverse = f32::from_bits(0xbf18_0406);
    inverse = fma(inverse, s, f32::from_bits(0x402d_dc41));
    inverse = fma(inverse, s, f32::from_bits(0xc094_bd9e));
    inverse = fma(inverse, s, f32::from_bits(0x4061_9f78));
    inverse = newton(inverse, s);
    let large = fma(-2.0 * q, inverse, 1.0);

    let y = select(size < 0.625, small, large);
    f32::from_bits(y.to_bits() | (x.to_bits() & 0x8000_0000))
}

/// Makes a step of Newton's iteration from `inverse` towards 1 / s. It squares the relative error.
#[inline(always)]
pub(crate) fn newton(inverse: f32, s: f32) -> f32 {
    fma(inverse, fma(-s, inverse, 1.0), inverse)
}

/// A number as the sum of two floats, the second far below the first.
type Pair = (f32, f32);

/// Three constants: 2 sqrt(2/pi) with a first part of 21 bits, this times 0.044715, and three times
/// the latter.
const GELU_1: Pair = (f32::from_bits(0x3fcc_4228), f32::from_bits(0x344f_50d9));
const GELU_3: Pair = (f32::from_bits(0x3d92_2279), f32::from_bits(0x3124_d8b5));
const GELU_9: Pair = (f32::from_bits(0x3e5b_33b6), f32::from_bits(0xaf8b_af0f));
/// The x from which on gelu(-x) and its derivative are below the smallest subnormal.
const GELU_END: f32 = 12.0;

/// Computes size (2 sqrt(2/pi) + factor size^2), for `size` in 0..=12.
#[inline(always)]
fn gelu_cubic(size: f32, square: Pair, factor: Pair) -> Pair {
    let sum = fma(factor.0, square.0, GELU_1.0);
    // The difference is exact: GELU_1.0 has no bit below the last bit of a sum below 16.
    let lost = fma(factor.0, square.0, -(sum - GELU_1.0));
    let sum_low = fma(factor.0, square.1, fma(factor.1, square.0, GELU_1.1)) + lost;
    let product = size * sum;
    (product, fma(size, sum_low, fma(size, sum, -product)))
}

/// The common terms of GELU and its derivative, for `size` in 0..=12: size^2, and e^-z = (1 + r +
/// rest) lift 2^-LIFT, where z = 2 sqrt(2/pi) (size + 0.044715 size^3). The absolute error of z
/// becomes the relative error of e^-z, so z, up to 142, is kept as two floats.
struct GeluExp {
    square: Pair,
    r: f32,
    rest: f32,
    lift: f32,
}

#[inline(always)]
fn gelu_exp(size: f32) -> GeluExp {
    let square = size * size;
    let square = (square, fma(size, size, -square));
    let (z, z_low) = gelu_cubic(size, square, GELU_3);
    let (r, q, n) = exp_parts(-z, -z_low);
    GeluExp { square, r, rest: r * r * q, lift: pow2(n.wrapping_add(LIFT)) }
}

/// Computes the tanh form of GELU: 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))) (Hendrycks and
/// Gimpel, 2016). It is -0 at -infinity.
///
/// q = e^-z, with z of |x|. The result is x / (1 + q) for positive x, and x q / (1 + q) for
/// negative x.
#[inline(always)]
pub fn gelu(x: f32) -> f32 {
    let size = x.abs();
    let size = if size > GELU_END { GELU_END } else { size };
    let GeluExp { r, rest, lift, .. } = gelu_exp(size);
    let y = logistic(x.is_sign_negative(), size, r + rest, lift);
    select(x > GELU_END, x, y)
}

/// Computes `size / (1 + q)`; if `negative`, `-size q / (1 + q)`. q = (1 + t) lift 2^-LIFT is at
/// most 1.
///
/// The remainder corrects the quotient, so 1 / (1 + q) need not be exact. It is a parabola over
/// `[1, 2]` and one step of Newton's iteration. The parabola has the least relative error, a
/// multiple of Chebyshev's T3 (1 / 99).
#[inline(always)]
fn logistic(negative: bool, size: f32, t: f32, lift: f32) -> f32 {
    let power = lift * LOWER;
    let power_and_1 = 1.0 + power;
    let s = fma(t, power, power_and_1);
    let s_low = fma(t, power, power_and_1 - s);
    let inverse = newton(fma(fma(32.0 / 99.0, s, -144.0 / 99.0), s, 210.0 / 99.0), s);

    // The dividend is base (1 + t).
    let (base, t) = (select(negative, size * lift, size), select(negative, t, 0.0));
    let quotient = fma(t, base, base) * inverse;
    let remainder = fma(-quotient, s_low, fma(base, t, fma(-quotient, s, base)));
    let y = fma(remainder, inverse, quotient);
    y * select(negative, -LOWER, 1.0)
}

/// The x from which on sigmoid(-x), and silu(-x) for the second constant, are below the smallest
/// subnormal.
const SIGMOID_END: f32 = 105.0;
const SILU_END: f32 = 110.0;

/// Computes 1 / (1 + e^-x).
#[inline(always)]
pub fn sigmoid(x: f32) -> f32 {
    let size = x.abs();
    let size = if size > SIGMOID_END { SIGMOID_END } else { size };
    let (t, n) = exp_less_1(-size, 0.0);
    logistic(x.is_sign_negative(), 1.0, t, pow2(n.wrapping_add(LIFT))).abs()
}

/// Computes x / (1 + e^-x) (Elfwing, Uchibe and Doya, 2017). It is -0 at -infinity.
#[inline(always)]
pub fn silu(x: f32) -> f32 {
    let size = x.abs();
    let size = if size > SILU_END { SILU_END } else { size };
    let (t, n) = exp_less_1(-size, 0.0);
    let y = logistic(x.is_sign_negative(), size, t, pow2(n.wrapping_add(LIFT)));
    select(x > SILU_END, x, y)
}

/// Computes the derivative of [`silu`]: s + x s (1 - s), s the sigmoid of x. An x far from 0 is
/// clamped to a value at which s is 0 or 1.
#[inline(always)]
pub fn silu_derivative(x: f32) -> f32 {
    let x = if x > SILU_END { SILU_END } else { x };
    let x = if x < -SILU_END { -SILU_END } else { x };
    let s = sigmoid(x);
    fma(x * s, sigmoid(-x), s)
}

/// Computes max(x, 0). A NaN stays NaN.
#[inline(always)]
pub fn rectified(x: f32) -> f32 {
    if x <= 0.0 { 0.0 } else { x }
}

/// Computes log(1 + e^-|x|).
#[inline(always)]
pub fn log_and_1_of_exp(x: f32) -> f32 {
    log_and_1(exp_negative(-x.abs()))
}

/// Computes log(1 + q) for `q` in 0..=1, within 1.7 ulp: the rounding error of 1 + q is added to
/// the logarithm.
#[inline(always)]
pub fn log_and_1(q: f32) -> f32 {
    let sum = 1.0 + q;
    log(sum) + (q - (sum - 1.0))
}

/// The root of [`gelu`]'s derivative, and the derivative's slope there: gelu'(x) = (x - ROOT)
/// (SLOPE + (x - ROOT) P(x - ROOT)).
const ROOT: Pair = (f32::from_bits(0xbf40_a150), f32::from_bits(0x3242_d036));
const SLOPE: Pair = (f32::from_bits(0x3edc_5d67), f32::from_bits(0xb253_6947));

/// Computes the derivative of [`gelu`].
///
/// It is computed at -|x|. From |x| = 1 on, it is -q (|x| z' - 1 - q) / (1 + q)^2 with q = e^-z.
/// There 1 / (1 + q)^2 = 1 + q V(q), V minimax of degree 5 on `[0, 0.19]` (error 2^-27.5). Below 1
/// that would cancel, so it is the distance to the root times a polynomial, minimax of degree 9
/// (error 2^-26.1). At positive x the result is 1 - gelu'(-x).
#[inline(always)]
pub fn gelu_derivative(x: f32) -> f32 {
    let size = x.abs();
    let size = if size > GELU_END { GELU_END } else { size };
    let GeluExp { square, r, rest, lift } = gelu_exp(size);
    let t = r + rest;
    let q = fma(t, lift, lift) * LOWER;
    let (growth, growth_low) = gelu_cubic(size, square, GELU_9);
    let less = growth - 1.0;
    let factor = less - q;
    let factor_low = ((less - factor) - q) + growth_low;
    let mut v = f32::from_bits(0x405d_c4a5);
    v = fma(v, q, f32::from_bits(0xc0a6_c80b));
    v = fma(v, q, f32::from_bits(0x409d_0397));
    v = fma(v, q, f32::from_bits(0xc07f_a15f));
    v = fma(v, q, f32::from_bits(0x403f_fd41));
    v = fma(v, q, f32::from_bits(0xbfff_fff2));
    v *= q;
    // (1 + t) (1 + v) = 1 + r + rest. r is kept separate, so that the rounding of t does not enter.
    let rest = rest + fma(t, v, v);
    let (high, low) = (lift * factor, lift * factor_low);
    let low = fma(low, r + rest, low);
    let far = (high + fma(high, r, fma(high, rest, low))) * -LOWER;

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

    let negative = select(size < 1.0, near, far);
    select(x.to_bits() >> 31 == 0, 1.0 - negative, negative)
}

/// Computes 1 / sqrt(x), where root and quotient are each correctly rounded. `rsqrt(+-0)` is an
/// infinity of that sign, and `rsqrt` of a negative number is NaN.
#[inline(always)]
pub fn rsqrt(x: f32) -> f32 {
    1.0 / GpuFloat::sqrt(x)
}
