//! The permitted distance of a result from its float64 reference.
//!
//! Invariant: a tolerance follows only from the formula and the lengths, by the rules of [`Exact`],
//! and is tight. The worst error of a test is at least a quarter of the tolerance, or the test
//! fails. Results have the same bits on every device and in every run, so the worst error is always
//! the same.

use crate::reference::{error_ulps, ulps};
use std::fmt::Display;
use std::ops::{Add, Div, Mul, Sub};

/// The unit roundoff of f32, 2^-24: the largest relative error of one correctly rounded operation.
const U: f64 = 1.0 / (1 << 24) as f64;
/// Two of the smallest subnormals: the loss of a few roundings below the normal range.
const TINY: f64 = 1.0 / (1u64 << 49) as f64 / (1u64 << 49) as f64 / (1u64 << 50) as f64;

/// A reference: a float64 value, and the permitted distance of an f32 result from it, in units of
/// 2^-24.
///
/// References are computed like the kernels, in float64, and carry the error that f32 may have made
/// so far. Every tolerance follows from these rules:
///
/// | operation | its error |
/// |---|---|
/// | one rounded operation, result y | the operands' errors, by the operation's derivative, and \|y\| |
/// | a function of u units in the last place | the operand's error, by its derivative, and 2 u \|y\| |
/// | a sum of terms t in an order of depth d, products fused | sqrt(sum error(t)^2) + min(d, 1.25 sqrt(d)) sum \|t\| |
///
/// The depth is the number of sequential additions of a term. It follows from the sum's length n: n
/// for an ascending chain, and for trees the depth in [`crate::trees`]. The roundings of a sum have
/// either sign and grow like the square root of their number. See Higham and Mary, "A new approach
/// to probabilistic rounding error analysis", 2019. The errors of the terms grow likewise. A few
/// million sums stay within the factor 1.25.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Exact {
    pub(crate) value: f64,
    pub(crate) error: f64,
}

impl Exact {
    /// Returns an exact input.
    pub(crate) fn given(value: impl Into<f64>) -> Self {
        Self { value: value.into(), error: 0.0 }
    }

    /// Returns a product that is not rounded: the part of a fused multiply-add.
    pub(crate) fn times(self, other: Self) -> Self {
        let error = self.error * other.value.abs() + other.error * self.value.abs();
        Self { value: self.value * other.value, error }
    }

    /// Returns a sum in an order of this depth.
    pub(crate) fn sum(depth: usize, terms: impl IntoIterator<Item = Self>) -> Self {
        let (depth, mut value, mut size, mut squares) = (depth as f64, 0.0, 0.0, 0.0f64);
        for term in terms {
            value += term.value;
            size += term.value.abs();
            squares += term.error * term.error;
        }
        Self { value, error: squares.sqrt() + depth.min(1.25 * depth.sqrt()) * size }
    }

    /// Returns the exponential, by the kernels' function.
    pub(crate) fn exp(self) -> Self {
        self.function(self.value.exp(), self.value.exp(), ulps::EXP)
    }

    /// Returns the natural logarithm, by the kernels' function.
    pub(crate) fn ln(self) -> Self {
        self.function(self.value.ln(), 1.0 / self.value, ulps::LOG)
    }

    /// Returns the square root, rounded.
    pub(crate) fn sqrt(self) -> Self {
        let root = self.value.sqrt();
        self.function(root, 0.5 / root, 0.5)
    }

    fn function(self, value: f64, derivative: f64, ulps: f64) -> Self {
        Self {
            value,
            error: 2.0 * ulps * value.abs() + if self.error == 0.0 { 0.0 } else { self.error * derivative.abs() },
        }
    }

    fn rounded(self) -> Self {
        Self { error: self.error + self.value.abs(), ..self }
    }
}

impl Add for Exact {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self { value: self.value + other.value, error: self.error + other.error }.rounded()
    }
}

impl Sub for Exact {
    type Output = Self;

    fn sub(self, other: Self) -> Self {
        Self { value: self.value - other.value, error: self.error + other.error }.rounded()
    }
}

impl Mul for Exact {
    type Output = Self;

    fn mul(self, other: Self) -> Self {
        self.times(other).rounded()
    }
}

impl Div for Exact {
    type Output = Self;

    fn div(self, other: Self) -> Self {
        let inverse = Self { value: 1.0 / other.value, error: other.error / (other.value * other.value) };
        self.times(inverse).rounded()
    }
}

/// Compares results of one op with their references and keeps the worst error.
#[derive(Debug)]
pub(crate) struct Closeness {
    op: &'static str,
    worst: f64,
    place: String,
}

impl Closeness {
    pub(crate) fn new(op: &'static str) -> Self {
        Self { op, worst: 0.0, place: "nowhere".into() }
    }

    /// Checks that every element of `got` is within its reference's tolerance.
    #[track_caller]
    pub(crate) fn check(&mut self, shape: impl Display, got: &[f32], want: &[Exact]) {
        let ratios = got.iter().zip(want).map(|(&got, want)| distance(got, want.value) / (U * want.error + TINY));
        self.keep(shape, got, want, ratios);
    }

    /// Checks that every element of `got` is within `ulps` units in the last place of its
    /// reference.
    #[track_caller]
    pub(crate) fn check_ulps(&mut self, limit: f64, shape: impl Display, got: &[f32], want: &[f64]) {
        let errors = got.iter().zip(want).map(|(&got, &want)| error_ulps(got, want) / limit);
        self.keep(shape, got, want, errors);
    }

    #[track_caller]
    fn keep<W: std::fmt::Debug>(
        &mut self,
        shape: impl Display,
        got: &[f32],
        want: &[W],
        ratios: impl Iterator<Item = f64>,
    ) {
        assert_eq!(got.len(), want.len(), "{}, {shape}", self.op);
        for (at, ratio) in ratios.enumerate() {
            let (op, got, want) = (self.op, got[at], &want[at]);
            assert!(ratio <= 1.0, "{op}, {shape}: element {at} is {got:e}, {ratio:.3} of the bound from {want:?}");
            if ratio > self.worst {
                (self.worst, self.place) = (ratio, format!("{shape}, element {at}"));
            }
        }
    }

    /// Reports the worst error and asserts that the bound is not loose.
    #[track_caller]
    pub(crate) fn finish(self) {
        let Self { op, worst, place } = self;
        println!("{op}: worst error {worst:.3} of the bound, at {place}");
        assert!(worst >= 0.25, "{op}: the bound is loose: the worst error is only {worst:.3} of it, at {place}");
    }
}

/// Returns the distance, infinite if one is NaN or infinite and the other is not the same.
fn distance(got: f32, want: f64) -> f64 {
    let got = f64::from(got);
    if (got.is_nan() && want.is_nan()) || got == want {
        0.0
    } else if got.is_finite() && want.is_finite() {
        (got - want).abs()
    } else {
        f64::INFINITY
    }
}
