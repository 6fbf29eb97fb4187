//! The scalar functions of `device/src/math.rs`, over all magnitudes and densely where they bend.
//!
//! Invariant: each stays within the error that its file states, in units in the last place, and at the ends of its
//! domain gives what its docs say. Here they run on the CPU; `activation.rs`, `softmax.rs`, `loss.rs` and `norm.rs` run
//! them inside kernels on each device.

use crate::support::Random;
use crate::tolerance::Closeness;
use crate::trial::canonical;
use kernels::math;

/// 2 sqrt(2/pi) and the cubic's factor.
const GELU: [f64; 2] = [1.595_769_121_605_730_6, 0.044_715];

/// The tanh form of GELU, as x times a sigmoid, which loses nothing for negative x.
pub(crate) fn gelu(x: f64) -> f64 {
    if x == f64::NEG_INFINITY { 0.0 } else { x * sigmoid(gelu_argument(x)) }
}

/// Its derivative.
pub(crate) fn gelu_derivative(x: f64) -> f64 {
    /// The root, its low part, and the series about it: where the two terms of the formula cancel.
    const ROOT: [f64; 2] = [-0.752_461_422_071_016_2, -3.6e-17];
    const SERIES: [f64; 5] = [
        0.430_400_091_024_858_5,
        0.387_518_446_135_788_93,
        -0.015_782_853_521_848_03,
        -0.113_944_483_080_958_99,
        -0.016_619_328_343_052_563,
    ];
    if x.abs() > 15.0 {
        return if x > 0.0 { 1.0 } else { 0.0 };
    }
    let distance = (x - ROOT[0]) - ROOT[1];
    if distance.abs() < 1e-3 {
        return distance * SERIES.iter().rev().fold(0.0, |sum, factor| sum * distance + factor);
    }
    let z = gelu_argument(x);
    sigmoid(z) * (1.0 + x * sigmoid(-z) * GELU[0] * (1.0 + 3.0 * GELU[1] * x * x))
}

fn gelu_argument(x: f64) -> f64 {
    GELU[0] * (x + GELU[1] * x * x * x)
}

fn sigmoid(z: f64) -> f64 {
    let exp = (-z.abs()).exp();
    if z < 0.0 { exp / (1.0 + exp) } else { 1.0 / (1.0 + exp) }
}

/// Numbers at the ends of f32 and of the functions' domains.
pub(crate) const SPECIAL: [f32; 20] = [
    0.0,
    -0.0,
    f32::from_bits(1),
    -f32::from_bits(1),
    f32::from_bits(0x007f_ffff),
    f32::MIN_POSITIVE,
    -f32::MIN_POSITIVE,
    f32::MAX,
    f32::MIN,
    f32::INFINITY,
    f32::NEG_INFINITY,
    f32::NAN,
    1.0,
    -1.0,
    0.625,
    -104.0,
    89.0,
    88.722_84,
    12.0,
    -12.0,
];

/// Every magnitude of either sign alike, infinities and NaNs among them; then the range `from..to` densely; then
/// [`SPECIAL`].
pub(crate) fn sample(seed: u64, from: f32, to: f32) -> Vec<f32> {
    let mut random = Random::new(seed);
    let stratum = 1 << 14;
    let mut values: Vec<f32> =
        (0..1u32 << 18).map(|high| f32::from_bits(high * stratum + random.below(stratum))).collect();
    values.extend(random.uniforms(1 << 18, from, to));
    values.extend(SPECIAL);
    values
}

/// The largest errors that `device/src/math.rs` states, for any input.
pub(crate) mod ulps {
    pub(crate) const EXP: f64 = 1.009;
    pub(crate) const LOG: f64 = 0.938;
    pub(crate) const TANH: f64 = 1.333;
    pub(crate) const GELU: f64 = 1.122;
    pub(crate) const GELU_DERIVATIVE: f64 = 1.653;
    pub(crate) const RSQRT: f64 = 1.491;
}

fn check(name: &'static str, limit: f64, function: fn(f32) -> f32, reference: fn(f64) -> f64, [from, to]: [f32; 2]) {
    let x = sample(11, from, to);
    let got: Vec<f32> = x.iter().map(|&x| function(x)).collect();
    let want: Vec<f64> = x.iter().map(|&x| reference(f64::from(x))).collect();
    let mut closeness = Closeness::new(name);
    closeness.check_ulps(limit, format_args!("{from}..{to} and all magnitudes"), &got, &want);
    closeness.finish();
}

#[test]
fn exp() {
    check("exp", ulps::EXP, math::exp, f64::exp, [-104.0, 89.0]);
    exactly(math::exp, &[(0.0, 1.0), (-0.0, 1.0), (f32::INFINITY, f32::INFINITY), (f32::NEG_INFINITY, 0.0)]);
}

#[test]
fn log() {
    check("log", ulps::LOG, math::log, f64::ln, [0.25, 4.0]);
    let ends = [(1.0, 0.0), (0.0, f32::NEG_INFINITY), (-0.0, f32::NEG_INFINITY), (f32::INFINITY, f32::INFINITY)];
    exactly(math::log, &ends);
    exactly(math::log, &[(-1.0, f32::NAN), (-f32::from_bits(1), f32::NAN), (f32::NEG_INFINITY, f32::NAN)]);
}

#[test]
fn tanh() {
    check("tanh", ulps::TANH, math::tanh, f64::tanh, [-10.0, 10.0]);
    exactly(math::tanh, &[(0.0, 0.0), (-0.0, -0.0), (f32::INFINITY, 1.0), (f32::NEG_INFINITY, -1.0)]);
}

#[test]
fn gelu_of_the_tanh_form() {
    check("gelu", ulps::GELU, math::gelu, gelu, [-12.5, 6.0]);
    let infinite = f32::INFINITY;
    exactly(math::gelu, &[(0.0, 0.0), (-0.0, -0.0), (infinite, infinite), (-infinite, -0.0), (3e38, 3e38)]);
}

#[test]
fn derivative_of_gelu() {
    check("gelu derivative", ulps::GELU_DERIVATIVE, math::gelu_derivative, gelu_derivative, [-12.5, 6.0]);
    exactly(math::gelu_derivative, &[(0.0, 0.5), (-0.0, 0.5), (f32::INFINITY, 1.0), (13.0, 1.0)]);
}

#[test]
fn rsqrt() {
    check("rsqrt", ulps::RSQRT, math::rsqrt, |x| 1.0 / x.sqrt(), [0.25, 16.0]);
    let ends = [(4.0, 0.5), (0.0, f32::INFINITY), (-0.0, f32::NEG_INFINITY), (f32::INFINITY, 0.0), (-1.0, f32::NAN)];
    exactly(math::rsqrt, &ends);
}

/// These bits; and a NaN for a NaN.
fn exactly(function: fn(f32) -> f32, pairs: &[(f32, f32)]) {
    for &(x, want) in pairs {
        assert_eq!(canonical(function(x)), canonical(want), "f({x:e}) is {:e}, not {want:e}", function(x));
    }
    assert!(function(f32::NAN).is_nan() && function(-f32::NAN).is_nan());
}
