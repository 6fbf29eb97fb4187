//! The scalar functions in float64, as a reference for the float32 ones.
//!
//! Invariant: each reference is within 1e-5 of a float32 unit in the last place (ulp). Float64 has
//! 29 more bits than float32, and the `libm` crate, which is the same code on every machine, is
//! accurate to one ulp of float64. Only cancellation could spoil a reference, and each states how
//! it avoids that. `tests/kernels/scalars.rs` checks them at their worst inputs against values of
//! 60 digits.

use kernels::{math, scalars};

/// A function of `device/src/math.rs`.
pub(crate) struct Function {
    pub(crate) name: &'static str,
    /// Its number in the kernel `scalars`.
    pub(crate) number: u32,
    /// The function itself, compiled for this CPU.
    pub(crate) cpu: fn(f32) -> f32,
    pub(crate) reference: fn(f64) -> f64,
    /// The largest error in ulp that `math.rs` states, over all inputs.
    pub(crate) stated_ulps: f64,
}

pub(crate) const FUNCTIONS: [Function; 15] = [
    Function { name: "exp", number: scalars::EXP, cpu: math::exp, reference: libm::exp, stated_ulps: ulps::EXP },
    Function { name: "log", number: scalars::LOG, cpu: math::log, reference: libm::log, stated_ulps: ulps::LOG },
    Function { name: "tanh", number: scalars::TANH, cpu: math::tanh, reference: libm::tanh, stated_ulps: ulps::TANH },
    Function { name: "gelu", number: scalars::GELU, cpu: math::gelu, reference: gelu, stated_ulps: ulps::GELU },
    Function {
        name: "gelu_derivative",
        number: scalars::GELU_DERIVATIVE,
        cpu: math::gelu_derivative,
        reference: gelu_derivative,
        stated_ulps: ulps::GELU_DERIVATIVE,
    },
    Function { name: "rsqrt", number: scalars::RSQRT, cpu: math::rsqrt, reference: rsqrt, stated_ulps: ulps::RSQRT },
    Function {
        name: "sigmoid",
        number: scalars::SIGMOID,
        cpu: math::sigmoid,
        reference: sigmoid,
        stated_ulps: ulps::SIGMOID,
    },
    Function { name: "silu", number: scalars::SILU, cpu: math::silu, reference: silu, stated_ulps: ulps::SILU },
    Function {
        name: "gelu_exact",
        number: scalars::GELU_EXACT,
        cpu: math::gelu_exact,
        reference: gelu_exact,
        stated_ulps: ulps::GELU_EXACT,
    },
    Function {
        name: "ex2",
        number: scalars::EX2,
        cpu: |x| math::exp2_weight(x, 1.0, 0.0),
        reference: ex2,
        stated_ulps: ulps::EX2,
    },
    Function { name: "sin", number: scalars::SIN, cpu: math::sin, reference: libm::sin, stated_ulps: ulps::SIN },
    Function { name: "cos", number: scalars::COS, cpu: math::cos, reference: libm::cos, stated_ulps: ulps::COS },
    Function {
        name: "log1p",
        number: scalars::LOG1P,
        cpu: math::log1p,
        reference: libm::log1p,
        stated_ulps: ulps::LOG1P,
    },
    Function { name: "erf", number: scalars::ERF, cpu: math::erf, reference: libm::erf, stated_ulps: ulps::ERF },
    Function {
        name: "erf_derivative",
        number: scalars::ERF_DERIVATIVE,
        cpu: math::erf_derivative,
        reference: erf_derivative,
        stated_ulps: ulps::ERF_DERIVATIVE,
    },
];

/// The largest errors that `device/src/math.rs` states, for any input.
pub(crate) mod ulps {
    pub(crate) const EXP: f64 = 1.009;
    pub(crate) const LOG: f64 = 0.938;
    pub(crate) const TANH: f64 = 1.405;
    pub(crate) const GELU: f64 = 1.833;
    pub(crate) const GELU_DERIVATIVE: f64 = 1.950;
    pub(crate) const RSQRT: f64 = 1.491;
    pub(crate) const SIGMOID: f64 = 1.374;
    pub(crate) const SILU: f64 = 1.424;
    pub(crate) const GELU_EXACT: f64 = 2.225;
    pub(crate) const EX2: f64 = 2.1;
    pub(crate) const SIN: f64 = 0.825;
    pub(crate) const COS: f64 = 0.814;
    pub(crate) const LOG1P: f64 = 1.438;
    pub(crate) const ERF: f64 = 1.035;
    pub(crate) const ERF_DERIVATIVE: f64 = 2.782;
}

/// The constants 2 sqrt(2/pi) and the cubic's factor.
const GELU: [f64; 2] = [1.595_769_121_605_730_6, 0.044_715];

/// The limit beyond which, at -x, gelu and its derivative round to zero in float32, and at x they
/// are within 2^-53 of x and 1.
const GELU_END: f64 = 15.0;

/// Computes the tanh form of GELU as x times a sigmoid, which is exact for negative x too.
pub(crate) fn gelu(x: f64) -> f64 {
    if x.abs() > GELU_END {
        return if x > 0.0 { x } else { -0.0 };
    }
    x * sigmoid(gelu_argument(x))
}

/// Computes the derivative sigmoid(z) (1 + x z' sigmoid(-z)). Its two terms cancel at the root, so
/// near the root a series replaces it, with the distance to the root in two parts. Where the two
/// meet, the series omits 2^-54 of the value and the formula has lost 12 bits.
pub(crate) fn gelu_derivative(x: f64) -> f64 {
    /// The root, and its rounding error in float64.
    const ROOT: [f64; 2] = [-0.752_461_422_071_016_3, 3.635_560_509e-17];
    const SERIES: [f64; 5] = [
        0.430_400_091_024_858_5,
        0.387_518_446_135_788_94,
        -0.015_782_853_521_848_03,
        -0.113_944_483_080_958_99,
        -0.016_619_328_343_052_563,
    ];
    if x.abs() > GELU_END {
        return if x > 0.0 { 1.0 } else { 0.0 };
    }
    let distance = (x - ROOT[0]) - ROOT[1];
    if distance.abs() < 1e-3 {
        return distance * SERIES.iter().rev().fold(0.0, |sum, factor| sum * distance + factor);
    }
    let z = gelu_argument(x);
    sigmoid(z) * (1.0 + x * sigmoid(-z) * GELU[0] * (1.0 + 3.0 * GELU[1] * x * x))
}

/// Computes z = 2 sqrt(2/pi) (x + 0.044715 x^3), a sum of terms of equal sign.
fn gelu_argument(x: f64) -> f64 {
    GELU[0] * (x + GELU[1] * x * x * x)
}

/// Computes x / (1 + e^-x), or -0 where that underflows float32.
pub(crate) fn silu(x: f64) -> f64 {
    if x < -150.0 { -0.0 } else { x * sigmoid(x) }
}

/// Computes x times the normal distribution function, or -0 where that underflows float32.
pub(crate) fn gelu_exact(x: f64) -> f64 {
    if x < -GELU_END { -0.0 } else { 0.5 * x * libm::erfc(-x / 2f64.sqrt()) }
}

/// Computes 1 / (1 + e^-z) from e^-|z|, which cannot overflow.
pub(crate) fn sigmoid(z: f64) -> f64 {
    let exp = libm::exp(-z.abs());
    if z < 0.0 { exp / (1.0 + exp) } else { 1.0 / (1.0 + exp) }
}

/// Computes 2^x, or 0 where that is below float32's normal numbers.
pub(crate) fn ex2(x: f64) -> f64 {
    let power = libm::exp2(x);
    if power < f64::from(f32::MIN_POSITIVE) { 0.0 } else { power }
}

/// Computes 2 / sqrt(pi) e^-x^2. The square of a float32 is exact in float64.
pub(crate) fn erf_derivative(x: f64) -> f64 {
    core::f64::consts::FRAC_2_SQRT_PI * libm::exp(-x * x)
}

pub(crate) fn rsqrt(x: f64) -> f64 {
    1.0 / x.sqrt()
}

/// Returns the distance in float32 ulps of `want`. It is infinite if one value is NaN or infinite
/// and the other is not the same.
pub(crate) fn error_ulps(got: f32, want: f64) -> f64 {
    /// The value 2^128, which stands for infinity.
    const END: f64 = (1u128 << 127) as f64 * 2.0;
    let got = if got.is_infinite() && want.abs() >= f64::from(f32::MAX) && want.is_finite() {
        END.copysign(f64::from(got))
    } else {
        f64::from(got)
    };
    let error = match (got.is_finite(), want.is_finite()) {
        (true, true) => (got - want.clamp(-END, END)).abs(),
        _ if (got.is_nan() && want.is_nan()) || got == want => 0.0,
        _ => f64::INFINITY,
    };
    // The exponent of `want`, clamped to normal floats; an ulp is 2^-23 of it.
    let exponent = ((want.to_bits() >> 52) & 0x7ff).clamp(1023 - 126, 1023 + 127);
    error / f64::from_bits((exponent - 23) << 52)
}
