//! Seeded numbers for the cases and for tests, and numbers at which kernels tend to fail.
//!
//! Invariant: a seed determines one stream of numbers. It is computed only with integers and IEEE
//! 754 additions and multiplications, so it is the same on every machine.

#![forbid(unsafe_code)]

use stepscope_core::SplitMix64;

/// A stream of numbers from the library's generator.
#[derive(Clone, Debug)]
pub struct Random {
    bits: SplitMix64,
}

impl Random {
    /// Starts the stream of a seed.
    pub fn new(seed: u64) -> Self {
        Self { bits: SplitMix64::new(seed) }
    }

    /// Returns 64 random bits.
    pub fn next_u64(&mut self) -> u64 {
        self.bits.next_u64()
    }

    /// Returns a number in `0..bound`, with `bound` above zero.
    pub fn below(&mut self, bound: u32) -> u32 {
        ((u64::from(bound) * (self.next_u64() >> 32)) >> 32) as u32
    }

    /// Returns a number in `from..=to`.
    pub fn extent(&mut self, from: usize, to: usize) -> usize {
        from + self.below((to - from + 1) as u32) as usize
    }

    /// Returns a multiple of 2^-24 in `[0, 1)`.
    pub fn unit(&mut self) -> f32 {
        self.bits.unit()
    }

    /// Returns a number in `[low, high)`.
    pub fn uniform(&mut self, low: f32, high: f32) -> f32 {
        low + (high - low) * self.unit()
    }

    /// Returns a number with mean 0 and variance 1, within 6 of zero. It is the sum of twelve
    /// uniform numbers minus 6, computed only by additions, so its bits are the same everywhere.
    pub fn normal(&mut self) -> f32 {
        (0..12).map(|_| self.unit()).sum::<f32>() - 6.0
    }

    /// Returns `len` numbers of [`Random::uniform`].
    pub fn uniforms(&mut self, len: usize, low: f32, high: f32) -> Vec<f32> {
        (0..len).map(|_| self.uniform(low, high)).collect()
    }

    /// Returns `len` numbers of [`Random::normal`].
    pub fn normals(&mut self, len: usize) -> Vec<f32> {
        (0..len).map(|_| self.normal()).collect()
    }

    /// Returns `len` numbers of [`Random::below`].
    pub fn belows(&mut self, len: usize, bound: u32) -> Vec<u32> {
        (0..len).map(|_| self.below(bound)).collect()
    }
}

/// Numbers at the limits of f32 and of the functions' domains.
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

/// Returns numbers of every magnitude and both signs, including infinities and NaNs, then the range
/// `from..to` densely, then [`SPECIAL`].
pub fn sample(seed: u64, from: f32, to: f32) -> Vec<f32> {
    sample_of([18, 18], seed, from, to)
}

/// Returns numbers of every magnitude and both signs, including infinities and NaNs, then the range
/// `from..to` densely, then [`SPECIAL`]. The first two parts have 2^`log2` numbers each.
pub(super) fn sample_of(log2: [u32; 2], seed: u64, from: f32, to: f32) -> Vec<f32> {
    let mut random = Random::new(seed);
    let [count, dense] = log2.map(|log2| 1u32 << log2);
    let stratum = 1 << (32 - log2[0]);
    let mut values: Vec<f32> = (0..count).map(|high| f32::from_bits(high * stratum + random.below(stratum))).collect();
    values.extend(random.uniforms(dense as usize, from, to));
    values.extend(SPECIAL);
    values
}
