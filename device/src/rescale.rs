//! Normalization of rows whose squares overflow f32. From magnitudes of 2^64 on, the sum of squares
//! is infinite, and its inverse root would be 0.
//!
//! Such a row is summed again with its elements times 2^-96. A product with a power of two is
//! exact, so only the range changes:
//!
//! ```text
//! factor   largest number   its square   2^31 such squares  least number that led here  its square
//!   1         2^128           2^256          infinite
//! 2^-96       2^32            2^64           2^95               2^48 2^-96 = 2^-48         2^-96
//! ```
//! Invariant: a row whose sum of squares is finite has the factor 1, which changes no bit. A row
//! with an infinity or a NaN becomes NaN, never 0.

use crate::math::rsqrt;

/// The factor of a row whose squares overflow, 2^-96, and its inverse.
const SMALL: f32 = f32::from_bits((127 - 96) << 23);
const LARGE: f32 = f32::from_bits((127 + 96) << 23);

/// The factor of a row in its first pass.
pub const FIRST: f32 = 1.0;

/// Returns the factor of a row's second pass. Returns none if `sum` is finite, or if `factor` is
/// already that of the second pass.
#[inline(always)]
pub fn again(sum: f32, factor: f32) -> Option<f32> {
    if sum.abs() < f32::INFINITY || factor != FIRST { None } else { Some(SMALL) }
}

/// Returns `1 / sqrt(mean + epsilon)` of a row of `cols` elements, divided by `factor`. `sum` is
/// the sum of the squares of the elements, which were multiplied by `factor`.
///
/// The sum may be 0 with any factor, if the squares are of differences: then only `epsilon`
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
    // A sum that is infinite in the second pass stays infinite: the row has an infinity.
    root + sum * 0.0
}

/// Returns `number / factor`.
#[inline(always)]
pub fn restored(number: f32, factor: f32) -> f32 {
    if factor == FIRST { number } else { number * LARGE }
}

/// Returns a row's factor, and its inverse root divided by the factor, from its inverse root
/// `scale` and its `cols` columns. The backward pass uses it.
#[inline(always)]
pub fn of_scale(scale: f32, cols: usize) -> [f32; 2] {
    /// 2^64.
    const RANGE: f32 = f32::from_bits((127 + 64) << 23);
    // A row whose sum is finite has a mean square below 2^128 / cols. The share is more than
    // rounding changes.
    let place = scale * RANGE;
    if place * place < cols as f32 * (255.0 / 256.0) { [SMALL, scale * LARGE] } else { [FIRST, scale] }
}
