//! Seeded random numbers from integer arithmetic only: the same on every machine and in every
//! version.
//!
//! Invariant: a seed names one sequence forever. Weights and the order of samples depend on it.

#![forbid(unsafe_code)]

/// SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014).
///
/// ```
/// // The reference C program's first output for this seed.
/// assert_eq!(stepscope::data::SplitMix64::new(1_234_567).next_u64(), 6_457_827_717_110_365_317);
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SplitMix64 {
    state: u64,
}

impl SplitMix64 {
    const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

    /// Starts the sequence of `seed`.
    pub fn new(seed: u64) -> Self {
        Self { state: seed }
    }

    /// Starts the sequence of `seed` after its first `count` numbers, at no cost.
    pub fn after(seed: u64, count: u64) -> Self {
        Self { state: seed.wrapping_add(count.wrapping_mul(Self::STEP)) }
    }

    /// Returns 64 random bits.
    pub fn next_u64(&mut self) -> u64 {
        self.state = self.state.wrapping_add(Self::STEP);
        Self::mix(self.state)
    }

    /// Returns a number in `[0, 1)`, a multiple of 2^-24.
    pub fn unit(&mut self) -> f32 {
        (self.next_u64() >> 40) as f32 / (1u32 << 24) as f32
    }

    /// The output function: a bijection that spreads every bit of a word over the whole word.
    pub fn mix(mut word: u64) -> u64 {
        word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        word ^ (word >> 31)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equals_the_published_sequence() {
        // The reference C program's first outputs for seed 1234567.
        let expected = [6_457_827_717_110_365_317, 3_203_168_211_198_807_973, 9_817_491_932_198_370_423_u64];
        let mut random = SplitMix64::new(1_234_567);
        assert_eq!(expected.map(|_| random.next_u64()), expected);
        assert_eq!(SplitMix64::after(1_234_567, 2).next_u64(), expected[2]);
    }

    #[test]
    fn units_are_uniform() {
        let mut random = SplitMix64::new(1);
        let mut tenths = [0; 10];
        for _ in 0..100_000 {
            tenths[(10.0 * random.unit()) as usize] += 1;
        }
        // Five standard deviations to either side.
        assert!(tenths.iter().all(|&count| (9_525..10_475).contains(&count)), "{tenths:?}");
    }
}
