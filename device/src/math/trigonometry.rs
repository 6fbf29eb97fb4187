//! Sine and cosine of any f32.
//!
//! Invariant: that of [`math`](super). Products of integers are exact.

use super::{fma, select};

/// The bits of a quarter of 2 / pi after the point, in words, from the highest.
const TWO_OVER_PI: [u32; 6] = [0x28be_60db, 0x9391_054a, 0x7f09_d5f4, 0x7d4d_3770, 0x36d8_a566, 0x4f10_e410];

/// pi / 2 times 2^-62, as two floats.
const QUARTER: [f32; 2] = [f32::from_bits(0x20c9_0fdb), f32::from_bits(0x943b_bd2e)];

/// Returns x as n pi / 2 + r, |r| <= pi / 4, as (n modulo 4, r as the sum of two floats). x is
/// finite, and its sign is ignored.
///
/// The method is that of Payne and Hanek ("Radian reduction for trigonometric functions", 1983):
/// the 24 bits of x are multiplied by those 96 bits of 2 / pi that give the quotient modulo 4, and
/// 62 bits after the point.
#[inline(always)]
fn quarters(x: f32) -> (u32, [f32; 2]) {
    let bits = x.to_bits();
    let significand = ((bits & 0x007f_ffff) << 8) | 0x8000_0000;
    // The exponent of a number below 1/2 is not used.
    let exponent = ((bits >> 23) & 0xff).saturating_sub(126);
    let (word, shift) = (exponent >> 5, exponent & 31);
    let pick = |from: usize| {
        let [a, b, c, d] = [TWO_OVER_PI[from], TWO_OVER_PI[from + 1], TWO_OVER_PI[from + 2], TWO_OVER_PI[from + 3]];
        select(word == 0, a, select(word == 1, b, select(word == 2, c, d)))
    };
    let before = select(word == 1, TWO_OVER_PI[0], select(word == 2, TWO_OVER_PI[1], TWO_OVER_PI[2]));
    // The largest exponent, 128, begins with the fifth word and is not shifted.
    let last = exponent == 128;
    let words = [
        select(last, TWO_OVER_PI[3], select(word == 0, 0, before)),
        select(last, TWO_OVER_PI[4], pick(0)),
        select(last, TWO_OVER_PI[5], pick(1)),
        pick(2),
    ];
    let shifted = |high: u32, low: u32| ((((high as u64) << 32) | low as u64) >> (32 - shift)) as u32;
    let (high, middle, low) = (shifted(words[0], words[1]), shifted(words[1], words[2]), shifted(words[2], words[3]));
    let times = |word: u32| significand as u64 * word as u64;
    let product = times(middle).wrapping_add(times(low) >> 32).wrapping_add(times(high) << 32);
    // The integer part has two bits. The fraction is rounded to the nearest integer.
    let rest = (product << 2) as i64 >> 2;
    let quadrant = (product >> 62) as u32 + (rest < 0) as u32;
    let near = rest as f32;
    let far = rest.wrapping_sub(near as i64) as f32;
    let r = near * QUARTER[0];
    let low = fma(near, QUARTER[0], -r) + fma(near, QUARTER[1], far * QUARTER[0]);
    (quadrant & 3, [r, low])
}

/// Computes sin(r + low) for |r| <= pi / 4: r + r^3 P(r^2), P of degree 3.
#[inline(always)]
fn sin_near_0([r, low]: [f32; 2]) -> f32 {
    let square = r * r;
    let mut p = f32::from_bits(0x3640_5000);
    p = fma(p, square, f32::from_bits(0xb950_3486));
    p = fma(p, square, f32::from_bits(0x3c08_88c1));
    p = fma(p, square, f32::from_bits(0xbe2a_aaab));
    r + fma(p, r * square, fma(-0.5 * square, low, low))
}

/// Computes cos(r + low) for |r| <= pi / 4: 1 - r^2 / 2 + r^4 P(r^2), P of degree 2.
#[inline(always)]
fn cos_near_0([r, low]: [f32; 2]) -> f32 {
    let square = r * r;
    let mut p = f32::from_bits(0x37cd_4000);
    p = fma(p, square, f32::from_bits(0xbab6_077d));
    p = fma(p, square, f32::from_bits(0x3d2a_aaa8));
    let rest = fma(p, square * square, -r * low);
    // 1 - r^2 / 2 as the sum of two floats.
    let half = 0.5 * square;
    let near = 1.0 - half;
    near + (((1.0 - near) - half) + rest)
}

/// Computes the sine of x, or the cosine if `turn` is 1.
#[inline(always)]
fn wave(x: f32, turn: u32) -> f32 {
    let is_small = x.abs() <= core::f32::consts::FRAC_PI_4;
    let (quadrant, parts) = quarters(x);
    let is_negative = x.is_sign_negative();
    // The sine is odd: the parts have x's sign. The cosine is even.
    let (quadrant, parts) =
        (select(is_small, 0, quadrant), [select(is_small, x.abs(), parts[0]), select(is_small, 0.0, parts[1])]);
    let quadrant = quadrant + turn;
    let size = select(quadrant & 1 == 0, sin_near_0(parts), cos_near_0(parts));
    let minus = (quadrant & 2 != 0) != (is_negative && turn == 0);
    let y = select(minus, -size, size);
    select(x.abs() < f32::INFINITY, y, f32::NAN)
}

/// Computes sin(x). It is NaN for an infinite x.
#[inline(always)]
pub fn sin(x: f32) -> f32 {
    wave(x, 0)
}

/// Computes cos(x). It is NaN for an infinite x.
#[inline(always)]
pub fn cos(x: f32) -> f32 {
    wave(x, 1)
}
