//! The scalar functions of `device/src/math.rs`, over all magnitudes and densely where they bend.
//!
//! Invariant: each stays within the error that its file states, in units in the last place. At the
//! ends of its domain it gives the documented values. Here they run on the CPU; `scalars.rs` runs
//! them on each device, over all bit patterns.

use crate::reference::{self, gelu, gelu_derivative, ulps};
use crate::support::{Random, sample};
use crate::tolerance::Closeness;
use crate::trial::canonical;
use kernels::activations::Activations as _;
use kernels::math;
use kernels::stored::Stored as _;
use stepscope::bf16;

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
    check("exp", ulps::EXP, math::exp, libm::exp, [-104.0, 89.0]);
    exactly(math::exp, &[(0.0, 1.0), (-0.0, 1.0), (f32::INFINITY, f32::INFINITY), (f32::NEG_INFINITY, 0.0)]);
}

#[test]
fn log() {
    check("log", ulps::LOG, math::log, libm::log, [0.25, 4.0]);
    let ends = [(1.0, 0.0), (0.0, f32::NEG_INFINITY), (-0.0, f32::NEG_INFINITY), (f32::INFINITY, f32::INFINITY)];
    exactly(math::log, &ends);
    exactly(math::log, &[(-1.0, f32::NAN), (-f32::from_bits(1), f32::NAN), (f32::NEG_INFINITY, f32::NAN)]);
}

#[test]
fn tanh() {
    check("tanh", ulps::TANH, math::tanh, libm::tanh, [-10.0, 10.0]);
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
    check("rsqrt", ulps::RSQRT, math::rsqrt, reference::rsqrt, [0.25, 16.0]);
    let ends = [(4.0, 0.5), (0.0, f32::INFINITY), (-0.0, f32::NEG_INFINITY), (f32::INFINITY, 0.0), (-1.0, f32::NAN)];
    exactly(math::rsqrt, &ends);
}

#[test]
fn sigmoid() {
    check("sigmoid", ulps::SIGMOID, math::sigmoid, reference::sigmoid, [-105.0, 20.0]);
    exactly(math::sigmoid, &[(0.0, 0.5), (-0.0, 0.5), (f32::INFINITY, 1.0), (f32::NEG_INFINITY, 0.0), (-3e38, 0.0)]);
}

#[test]
fn silu() {
    check("silu", ulps::SILU, math::silu, reference::silu, [-110.0, 20.0]);
    let infinite = f32::INFINITY;
    exactly(math::silu, &[(0.0, 0.0), (-0.0, -0.0), (infinite, infinite), (-infinite, -0.0), (3e38, 3e38)]);
}

#[test]
fn gelu_of_the_exact_form() {
    check("gelu_exact", ulps::GELU_EXACT, math::gelu_exact, reference::gelu_exact, [-14.5, 6.0]);
    let infinite = f32::INFINITY;
    exactly(math::gelu_exact, &[(0.0, 0.0), (-0.0, -0.0), (infinite, infinite), (-infinite, -0.0), (3e38, 3e38)]);
}

#[test]
fn log_and_1() {
    let inputs: Vec<f32> = sample(11, 0.0, 1.0).into_iter().filter(|q| (0.0..=1.0).contains(q)).collect();
    let mut closeness = Closeness::new("log and 1");
    let got: Vec<f32> = inputs.iter().map(|&q| math::log_and_1(q)).collect();
    let want: Vec<f64> = inputs.iter().map(|&q| libm::log1p(f64::from(q))).collect();
    closeness.check_ulps(1.7, "0..1", &got, &want);
    closeness.finish();
}

#[test]
fn sin() {
    check("sin", ulps::SIN, math::sin, libm::sin, [-10.0, 10.0]);
    exactly(math::sin, &[(0.0, 0.0), (-0.0, -0.0), (f32::INFINITY, f32::NAN), (f32::NEG_INFINITY, f32::NAN)]);
}

#[test]
fn cos() {
    check("cos", ulps::COS, math::cos, libm::cos, [-10.0, 10.0]);
    exactly(math::cos, &[(0.0, 1.0), (-0.0, 1.0), (f32::INFINITY, f32::NAN), (f32::NEG_INFINITY, f32::NAN)]);
}

#[test]
fn log1p() {
    check("log1p", ulps::LOG1P, math::log1p, libm::log1p, [-1.0, 2.0]);
    let infinite = f32::INFINITY;
    exactly(math::log1p, &[(0.0, 0.0), (-0.0, -0.0), (-1.0, -infinite), (infinite, infinite), (-1.5, f32::NAN)]);
}

#[test]
fn erf() {
    check("erf", ulps::ERF, math::erf, libm::erf, [-4.0, 4.0]);
    exactly(math::erf, &[(0.0, 0.0), (-0.0, -0.0), (f32::INFINITY, 1.0), (f32::NEG_INFINITY, -1.0), (4.0, 1.0)]);
}

#[test]
fn derivative_of_erf() {
    let name = "derivative of erf";
    check(name, ulps::ERF_DERIVATIVE, math::erf_derivative, reference::erf_derivative, [-10.0, 10.0]);
    exactly(math::erf_derivative, &[(f32::INFINITY, 0.0), (f32::NEG_INFINITY, 0.0), (3e38, 0.0)]);
}

/// Bases of all magnitudes, with exponents that give results of all magnitudes, and the special
/// values of C's `pow`.
#[test]
fn pow() {
    let mut random = Random::new(5);
    let mut worst = 0.0;
    for base in sample(11, -4.0, 4.0) {
        let log = f64::from(base.abs()).ln() as f32;
        let wide = random.uniform(-110.0, 110.0) / log;
        for exponent in [wide, random.uniform(-4.0, 4.0), random.uniform(-20.0, 20.0).round()] {
            let want = libm::pow(f64::from(base), f64::from(exponent));
            let error = reference::error_ulps(math::pow(base, exponent), want);
            assert!(error <= 2.0, "{base:e} to {exponent:e}: {error} ulp");
            worst = f64::max(worst, error);
        }
    }
    println!("pow: {worst:.3} ulp");
    let infinite = f32::INFINITY;
    let numbers =
        [0.0, -0.0, 1.0, -1.0, 2.0, -2.0, 0.5, -0.5, 3.0, -3.0, 1e-40, 16_777_217.0, infinite, -infinite, f32::NAN];
    for base in numbers {
        for exponent in numbers {
            let (got, want) = (math::pow(base, exponent), libm::pow(f64::from(base), f64::from(exponent)));
            let same_sign = got.is_nan() || got.is_sign_negative() == want.is_sign_negative();
            assert!(
                reference::error_ulps(got, want) <= 2.0 && same_sign,
                "{base:e} to {exponent:e}: {got:e}, not {want:e}"
            );
        }
    }
}

/// Checks exact bits, and that a NaN gives a NaN.
fn exactly(function: fn(f32) -> f32, pairs: &[(f32, f32)]) {
    for &(x, want) in pairs {
        assert_eq!(canonical(function(x)), canonical(want), "f({x:e}) is {:e}, not {want:e}", function(x));
    }
    assert!(function(f32::NAN).is_nan() && function(-f32::NAN).is_nan());
}

/// Checks functions whose results are stored as BF16: within a relative 2^-15, plus 2^-120 for tiny
/// results, or `near` for a derivative, which has a root. Runs over all BF16 values and many
/// others, such as sums of products.
fn check_bf16(name: &str, near: f64, function: fn(f32) -> f32, reference: fn(f64) -> f64) {
    let all = (0..=u16::MAX).map(|bits| bf16::from_bits(bits).widen());
    let mut worst = 0.0f64;
    for x in all.chain(sample(13, -20.0, 20.0)).filter(|x| !x.is_nan()) {
        let (got, want) = (f64::from(function(x)), reference(f64::from(x)));
        if want.is_infinite() {
            assert_eq!(got, want, "{name}({x:e})");
            continue;
        }
        let error = (got - want).abs();
        assert!(error <= (2f64.powi(-15) * want.abs()).max(near), "{name}({x:e}) is {got:e}, not {want:e}");
        if want.abs() > 2f64.powi(-110) {
            worst = worst.max(if near > 2f64.powi(-100) { error } else { error / want.abs() });
        }
    }
    println!("{name}: within 2^{:.1}", worst.log2());
    assert!(function(f32::NAN).is_nan() && function(-f32::NAN).is_nan());
}

#[test]
fn activations_of_bf16() {
    let (below, root) = (2f64.powi(-120), 2f64.powi(-18));
    check_bf16("tanh", below, bf16::hyperbolic_tangent, libm::tanh);
    check_bf16("gelu", below, bf16::gelu, gelu);
    check_bf16("sigmoid", below, bf16::sigmoid, reference::sigmoid);
    check_bf16("silu", below, bf16::silu, reference::silu);
    check_bf16("derivative of gelu", root, bf16::gelu_derivative, gelu_derivative);
    check_bf16("derivative of silu", root, bf16::silu_derivative, |x| {
        let x = x.clamp(-900.0, 900.0);
        reference::sigmoid(x) * (1.0 + x * reference::sigmoid(-x))
    });
    exactly(
        |x| bf16::narrow(bf16::hyperbolic_tangent(x)).widen(),
        &[(0.0, 0.0), (-0.0, -0.0), (f32::INFINITY, 1.0), (-9e9, -1.0)],
    );
    let others = sample(14, -200.0, 200.0);
    for x in (0..=u16::MAX).map(|bits| bf16::from_bits(bits).widen()).chain(others) {
        let [value, slope] = bf16::silu_and_derivative(x);
        let bits = [canonical(value), canonical(slope)];
        assert_eq!(bits, [canonical(bf16::silu(x)), canonical(bf16::silu_derivative(x))], "silu({x:e})");
    }
    for function in [bf16::gelu, bf16::silu] {
        exactly(function, &[(0.0, 0.0), (-0.0, -0.0), (f32::INFINITY, f32::INFINITY), (f32::NEG_INFINITY, -0.0)]);
    }
    exactly(bf16::sigmoid, &[(f32::NEG_INFINITY, 0.0), (-3e38, 0.0)]);
}
