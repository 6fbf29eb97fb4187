//! Normalisation of rows whose squares overflow f32: from magnitudes of 2^64 on their sum is
//! infinite, and its inverse root would be 0.
//!
//! Such a row is summed again with its numbers times 2^-96. A product with a power of two is exact,
//! so nothing but the range changes:
//!
//! ```text
//! factor   largest number   its square   2^31 such squares   least number that led here   its square
//!   1         2^128           2^256          infinite
//! 2^-96       2^32            2^64           2^95                2^48 2^-96 = 2^-48          2^-96
//! ```
//! Invariant: a row whose sum of squares is finite has the factor 1, which changes no bit. A row
//! with an infinity or a NaN becomes NaN, never 0.

use crate::math::rsqrt;

/// The factor of a row whose squares overflow: 2^-96, and its inverse.
const SMALL: f32 = f32::from_bits((127 - 96) << 23);
const LARGE: f32 = f32::from_bits((127 + 96) << 23);

/// The factor of a row that is summed for the first time.
pub const FIRST: f32 = 1.0;

/// The factor with which a row must be summed again: none if `sum` is finite, or `factor` is
/// already the last.
#[inline(always)]
pub fn again(sum: f32, factor: f32) -> Option<f32> {
    if sum.abs() < f32::INFINITY || factor != FIRST { None } else { Some(SMALL) }
}

/// `1 / sqrt(mean + epsilon)` of a row of `cols` numbers that were multiplied by `factor`, divided
/// by `factor`: `sum` is that of the squares.
///
/// The sum may be 0 with any factor, where the squares are of differences: then `epsilon` alone
/// remains.
#[inline(always)]
pub fn inverse_root(sum: f32, cols: usize, epsilon: f32, factor: f32) -> f32 {
    let root = rsqrt(sum / cols as f32 + epsilon * factor * factor);
    if factor == FIRST {
        return root;
    }
    // `epsilon * factor * factor` is 0 in f32.
    let most = rsqrt(epsilon) * LARGE;
    let root = if most < root { most } else { root };
    // An infinite sum stays one with any factor: the row has an infinity.
    root + sum * 0.0
}

/// `number / factor`.
#[inline(always)]
pub fn restored(number: f32, factor: f32) -> f32 {
    if factor == FIRST { number } else { number * LARGE }
}

/// The factor of a row of `cols` numbers by `scale`, its inverse root, and that root divided by the
/// factor: for a backward pass.
#[inline(always)]
pub fn of_scale(scale: f32, cols: usize) -> [f32; 2] {
    /// 2^64.
    const RANGE: f32 = f32::from_bits((127 + 64) << 23);
    // Whose sum is finite has a mean square below 2^128 / cols. The share is more than rounding
    // changes.
    let place = scale * RANGE;
    if place * place < cols as f32 * (255.0 / 256.0) { [SMALL, scale * LARGE] } else { [FIRST, scale] }
}
