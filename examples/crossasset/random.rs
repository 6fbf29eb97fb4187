//! The example's random numbers, from the library's generator: the same on every platform and in
//! every version.
//!
//! Nothing here calls the platform's math library, so a seed determines every bit.

use stepscope::data::SplitMix64;

/// A stream of random numbers.
#[derive(Clone, Debug)]
pub(crate) struct Random {
    bits: SplitMix64,
}

impl Random {
    /// Returns the stream of `seed`.
    pub(crate) fn new(seed: u64) -> Self {
        Self { bits: SplitMix64::new(seed) }
    }

    /// Returns a separate stream for `seed` and a path such as `[fold, epoch]`. Different paths
    /// give unrelated streams.
    pub(crate) fn stream(seed: u64, path: &[u64]) -> Self {
        let step = |state: u64, &step: &u64| Self::new(state ^ SplitMix64::mix(step.wrapping_add(1))).next_u64();
        Self::new(path.iter().fold(seed, step))
    }

    /// Returns 64 random bits.
    pub(crate) fn next_u64(&mut self) -> u64 {
        self.bits.next_u64()
    }

    /// Returns a uniform number in `0..bound` (multiplication with rejection; Lemire, 2019).
    ///
    /// # Panics
    /// When `bound` is zero.
    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        assert!(bound > 0, "a random number below zero was asked for");
        let smallest_fair = bound.wrapping_neg() % bound;
        loop {
            let product = u128::from(self.next_u64()) * u128::from(bound);
            if product as u64 >= smallest_fair {
                return (product >> 64) as u64;
            }
        }
    }

    /// Returns a uniform number in `[0, 1)`, a multiple of 2^-53.
    pub(crate) fn uniform(&mut self) -> f64 {
        (self.next_u64() >> 11) as f64 / (1_u64 << 53) as f64
    }

    /// Returns a number of the standard normal distribution (Marsaglia's polar method).
    pub(crate) fn normal(&mut self) -> f64 {
        loop {
            let (x, y) = (2.0 * self.uniform() - 1.0, 2.0 * self.uniform() - 1.0);
            let square = x * x + y * y;
            if square > 0.0 && square < 1.0 {
                return x * (-2.0 * libm::log(square) / square).sqrt();
            }
        }
    }

    /// Shuffles `items`, with every order equally likely (Fisher-Yates).
    pub(crate) fn shuffle<T>(&mut self, items: &mut [T]) {
        for last in (1..items.len()).rev() {
            let chosen = self.below(last as u64 + 1) as usize;
            items.swap(last, chosen);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Random;

    #[test]
    fn bounded_numbers_cover_their_range() {
        let mut random = Random::new(1);
        let mut seen = [0_u32; 7];
        for _ in 0..7_000 {
            seen[random.below(7) as usize] += 1;
        }
        assert!(seen.iter().all(|&count| (850..1150).contains(&count)), "{seen:?}");
    }

    #[test]
    fn normal_numbers_have_their_moments() {
        let mut random = Random::new(2);
        let numbers: Vec<f64> = (0..100_000).map(|_| random.normal()).collect();
        let mean = numbers.iter().sum::<f64>() / numbers.len() as f64;
        let variance = numbers.iter().map(|x| (x - mean) * (x - mean)).sum::<f64>() / numbers.len() as f64;
        assert!(mean.abs() < 0.015 && (variance - 1.0).abs() < 0.02, "mean {mean}, variance {variance}");
    }

    #[test]
    fn shuffles_are_permutations() {
        let shuffled = |path: &[u64]| {
            let mut items: Vec<u32> = (0..100).collect();
            Random::stream(7, path).shuffle(&mut items);
            items
        };
        let mut sorted = shuffled(&[0, 0]);
        sorted.sort_unstable();
        assert_eq!(sorted, (0..100).collect::<Vec<u32>>());
        assert_eq!(shuffled(&[0, 1]), shuffled(&[0, 1]));
        assert_ne!(shuffled(&[0, 1]), shuffled(&[1, 0]));
        assert_ne!(shuffled(&[0, 0]), shuffled(&[0]));
    }
}
