//! Seeded numbers for the cases and for tests, and the numbers at which kernels go wrong.
//!
//! Invariant: a seed names one stream of numbers, made by integers and IEEE 754 additions and multiplications alone, so that it is
//! the same on every machine.

#![forbid(unsafe_code)]

use crate::random::SplitMix64;

/// Numbers from the library's generator.
#[derive(Clone, Debug)]
pub struct Random {
    bits: SplitMix64,
}

impl Random {
    /// The stream of a seed.
    pub fn new(seed: u64) -> Self {
        Self { bits: SplitMix64::new(seed) }
    }

    /// 64 random bits.
    pub fn next_u64(&mut self) -> u64 {
        self.bits.next_u64()
    }

    /// In `0..bound`, `bound` above zero.
    pub fn below(&mut self, bound: u32) -> u32 {
        ((u64::from(bound) * (self.next_u64() >> 32)) >> 32) as u32
    }

    /// In `from..=to`.
    pub fn extent(&mut self, from: usize, to: usize) -> usize {
        from + self.below((to - from + 1) as u32) as usize
    }

    /// In `[0, 1)`, a multiple of 2^-24.
    pub fn unit(&mut self) -> f32 {
        self.bits.unit()
    }

    /// In `[low, high)`.
    pub fn uniform(&mut self, low: f32, high: f32) -> f32 {
        low + (high - low) * self.unit()
    }

    /// Mean 0, variance 1, within 6 of zero: the sum of twelve uniform numbers, less 6 (additions alone, so the same
    /// bits everywhere).
    pub fn normal(&mut self) -> f32 {
        (0..12).map(|_| self.unit()).sum::<f32>() - 6.0
    }

    /// `len` of [`Random::uniform`].
    pub fn uniforms(&mut self, len: usize, low: f32, high: f32) -> Vec<f32> {
        (0..len).map(|_| self.uniform(low, high)).collect()
    }

    /// `len` of [`Random::normal`].
    pub fn normals(&mut self, len: usize) -> Vec<f32> {
        (0..len).map(|_| self.normal()).collect()
    }

    /// `len` of [`Random::below`].
    pub fn belows(&mut self, len: usize, bound: u32) -> Vec<u32> {
        (0..len).map(|_| self.below(bound)).collect()
    }
}

/// Numbers at the ends of f32 and of the functions' domains.
pub const SPECIAL: [f32; 20] = [
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

/// Every magnitude of either sign alike, infinities and NaNs among them; then the range `from..to` densely; then [`SPECIAL`].
pub fn sample(seed: u64, from: f32, to: f32) -> Vec<f32> {
    sample_of([18, 18], seed, from, to)
}

/// Every magnitude of either sign alike, infinities and NaNs among them; then the range `from..to` densely; then [`SPECIAL`]. The first
/// two are 2^`log2` numbers each.
pub(super) fn sample_of(log2: [u32; 2], seed: u64, from: f32, to: f32) -> Vec<f32> {
    let mut random = Random::new(seed);
    let [count, dense] = log2.map(|log2| 1u32 << log2);
    let stratum = 1 << (32 - log2[0]);
    let mut values: Vec<f32> = (0..count).map(|high| f32::from_bits(high * stratum + random.below(stratum))).collect();
    values.extend(random.uniforms(dense as usize, from, to));
    values.extend(SPECIAL);
    values
}
