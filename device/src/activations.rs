//! Activations with the accuracy of the stored type: for f32 those of [`math`], for BF16 within
//! 2^-15 in half the operations.
//!
//! BF16 rounds off up to 2^-8 of a result, so the last bits of an f32 would be wasted work.
//! Computing them takes longer than moving the bytes. All functions except tanh use one exponential
//! and one reciprocal, of z >= 0:
//!
//! ```text
//! e = 2^-z          within 2^-18, see `math::exp2_negative`
//! i = 1 / (1 + e)   within 2^-18: a cubic and one step of Newton's iteration
//! sigmoid           i at +z, e i at -z
//! ```
//! Invariant: as in [`math`], only exactly rounded operations are used in the order written, with
//! the same bits on every CPU and GPU. A NaN gives a NaN. Each derivative is computed at -|x|, and
//! is 1 less that at |x|.

use crate::math::{
    self, LOG2_E, by_sign, exp2_less_1, exp2_minus, fma, larger_of_minus, larger_or_nan, newton, select,
};
use half::bf16;

/// Activations and their derivatives, as accurate as the stored type can represent.
pub trait Activations {
    /// Computes tanh. The name differs because on a CPU f32 has a method `tanh`, which is the
    /// system's.
    fn hyperbolic_tangent(x: f32) -> f32;

    /// Computes the tanh form of GELU: 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))).
    fn gelu(x: f32) -> f32;

    /// Computes the derivative of [`gelu`](Self::gelu). Near its root at -0.7525 the BF16 version
    /// has an absolute error of 2^-18, not a relative one.
    fn gelu_derivative(x: f32) -> f32;

    /// Computes 1 / (1 + e^-x).
    fn sigmoid(x: f32) -> f32;

    /// Computes x / (1 + e^-x).
    fn silu(x: f32) -> f32;

    /// Computes the derivative of [`silu`](Self::silu). Near its root at -1.2785 the BF16 version
    /// has an absolute error of 2^-18, not a relative one.
    fn silu_derivative(x: f32) -> f32;

    /// Returns [`silu`](Self::silu) and its [derivative](Self::silu_derivative).
    #[inline(always)]
    fn silu_and_derivative(x: f32) -> [f32; 2] {
        [Self::silu(x), Self::silu_derivative(x)]
    }
}

impl Activations for f32 {
    #[inline(always)]
    fn hyperbolic_tangent(x: f32) -> f32 {
        math::tanh(x)
    }

    #[inline(always)]
    fn gelu(x: f32) -> f32 {
        math::gelu(x)
    }

    #[inline(always)]
    fn gelu_derivative(x: f32) -> f32 {
        math::gelu_derivative(x)
    }

    #[inline(always)]
    fn sigmoid(x: f32) -> f32 {
        math::sigmoid(x)
    }

    #[inline(always)]
    fn silu(x: f32) -> f32 {
        math::silu(x)
    }

    #[inline(always)]
    fn silu_derivative(x: f32) -> f32 {
        math::silu_derivative(x)
    }
}

/// The constants of GELU as x sigmoid(x (`GELU_1` + `GELU_3` x^2)): 2 sqrt(2/pi), and this times
/// 0.044715.
const GELU_1: f32 = 1.595_769;
const GELU_3: f32 = 0.071_354_82;
/// The |x| from which on e is 0: for GELU, and for SiLU.
const GELU_END: f32 = 12.0;
const SILU_END: f32 = 128.0;

impl Activations for bf16 {
    /// Computes (1 - e) / (1 + e), with e of 2 |x|. The rounding error of 1 - e is avoided, because
    /// e - 1 is known too. A NaN makes t a NaN, and so the result.
    #[inline(always)]
    fn hyperbolic_tangent(x: f32) -> f32 {
        let (t, power) = exp2_less_1(-2.0 * LOG2_E * x.abs());
        let above = fma(-power, t, 1.0 - power);
        let y = above * inverse(2.0 - above);
        f32::from_bits(y.to_bits() | (x.to_bits() & 0x8000_0000))
    }

    #[inline(always)]
    fn gelu(x: f32) -> f32 {
        let x = larger_or_nan(x, -GELU_END);
        let logistic = Logistic::new(x * fma(x * x, GELU_3 * LOG2_E, GELU_1 * LOG2_E));
        x * logistic.at(x)
    }

    #[inline(always)]
    fn gelu_derivative(x: f32) -> f32 {
        let below = larger_of_minus(x, -GELU_END);
        let square = below * below;
        let logistic = Logistic::new(below * fma(square, GELU_3 * LOG2_E, GELU_1 * LOG2_E));
        logistic.derivative(x, below * fma(square, 3.0 * GELU_3, GELU_1))
    }

    #[inline(always)]
    fn sigmoid(x: f32) -> f32 {
        select(x.is_nan(), x, Logistic::new(x * LOG2_E).at(x))
    }

    #[inline(always)]
    fn silu(x: f32) -> f32 {
        let x = larger_or_nan(x, -SILU_END);
        x * Logistic::new(x * LOG2_E).at(x)
    }

    #[inline(always)]
    fn silu_derivative(x: f32) -> f32 {
        let below = larger_of_minus(x, -SILU_END);
        Logistic::new(below * LOG2_E).derivative(x, below)
    }

    /// Computes both from one exponential. Its argument is `-|x| log2(e)`, and any below -127 gives
    /// the same.
    #[inline(always)]
    fn silu_and_derivative(x: f32) -> [f32; 2] {
        let below = larger_of_minus(x, -SILU_END);
        let logistic = Logistic::new(below * LOG2_E);
        [larger_or_nan(x, -SILU_END) * logistic.at(x), logistic.derivative(x, below)]
    }
}

/// The terms e and i of |z|.
#[derive(Clone, Copy)]
struct Logistic {
    e: f32,
    inverse: f32,
}

impl Logistic {
    #[inline(always)]
    fn new(z: f32) -> Self {
        let e = exp2_minus(z);
        Self { e, inverse: inverse(1.0 + e) }
    }

    /// Returns sigmoid(z), where z has the sign of `x`.
    #[inline(always)]
    fn at(self, x: f32) -> f32 {
        self.inverse * by_sign(x, self.e, 1.0)
    }

    /// Returns the derivative of x sigmoid(z) at `x`, where `growth` is x times the derivative of
    /// z, both at -|x|.
    #[inline(always)]
    fn derivative(self, x: f32, growth: f32) -> f32 {
        let below = self.e * self.inverse * fma(growth, self.inverse, 1.0);
        by_sign(x, below, 1.0 - below)
    }
}

/// Computes 1 / s for s in `[1, 2]`: a cubic, and one step of Newton's iteration, which squares its
/// error. The cubic has the least relative error, a multiple of Chebyshev's T4 (1 / 577).
#[inline(always)]
fn inverse(s: f32) -> f32 {
    let cubic = fma(fma(fma(-128.0 / 577.0, s, 768.0 / 577.0), s, -1696.0 / 577.0), s, 1632.0 / 577.0);
    newton(cubic, s)
}
