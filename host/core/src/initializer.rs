//! Initial values of parameters.
//!
//! Invariant: a value depends only on the seed and on the number of random numbers drawn for the
//! elements before it. Any part of a region can thus be filled on its own, with the same bits on
//! every machine.

#![forbid(unsafe_code)]

use crate::random::SplitMix64;
use crate::tensor::is_finite;
use cuda_std::float_mode;

/// The distribution of a parameter's initial values.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum Initializer {
    /// All elements have this value.
    Constant(f32),
    /// Uniform over `[-bound, bound)`.
    Uniform {
        /// The largest magnitude.
        bound: f32,
    },
    /// Normal with mean zero (Box and Muller, 1958).
    Normal {
        /// The standard deviation.
        deviation: f32,
    },
}

impl Initializer {
    /// All elements are zero.
    pub const ZERO: Self = Self::Constant(0.0);
    /// All elements are one.
    pub const ONE: Self = Self::Constant(1.0);

    /// Uniform over `1 / sqrt(fan_in)` to either side of zero, as PyTorch initializes a linear
    /// layer.
    ///
    /// For a `fan_in` of 0 the bound is infinite, which
    /// [`ParameterSpecBuilder::build`](crate::ParameterSpecBuilder::build) rejects.
    pub fn fan_in(fan_in: usize) -> Self {
        float_mode::in_default(|| Self::Uniform { bound: (1.0 / (fan_in as f64).sqrt()) as f32 })
    }

    /// Uniform over `sqrt(6 / (fan_in + fan_out))` to either side of zero (Glorot and Bengio,
    /// 2010).
    ///
    /// If both are 0 the bound is infinite, which
    /// [`ParameterSpecBuilder::build`](crate::ParameterSpecBuilder::build) rejects.
    pub fn glorot(fan_in: usize, fan_out: usize) -> Self {
        let sum = fan_in as u128 + fan_out as u128;
        float_mode::in_default(|| Self::Uniform { bound: (6.0 / sum as f64).sqrt() as f32 })
    }

    /// Normal with deviation `sqrt(2 / fan_in)`, for layers before a rectifier (He et al., 2015).
    ///
    /// For a `fan_in` of 0 the deviation is infinite, which
    /// [`ParameterSpecBuilder::build`](crate::ParameterSpecBuilder::build) rejects.
    pub fn he(fan_in: usize) -> Self {
        float_mode::in_default(|| Self::Normal { deviation: (2.0 / fan_in as f64).sqrt() as f32 })
    }

    /// The requirement that the initializer breaks, if any: every value that it draws must be
    /// finite.
    pub(crate) fn flaw(self) -> Option<&'static str> {
        let within = |value: f32, most: f32| (0.0..=most).contains(&value);
        match self {
            Self::Constant(constant) if !is_finite(constant) => Some("a finite constant"),
            Self::Uniform { bound } if !within(bound, f32::MAX) => Some("a bound that is finite and at least 0"),
            // The largest random number is 5.8 deviations from zero: sqrt(-2 log(2^-24)).
            Self::Normal { deviation } if !within(deviation, f32::MAX / 8.0) => {
                Some("a deviation of at least 0 and at most an eighth of the largest f32")
            }
            _ => None,
        }
    }

    /// The number of random numbers drawn for each element.
    pub(crate) fn draws(self) -> u64 {
        match self {
            Self::Constant(_) => 0,
            Self::Uniform { .. } => 1,
            Self::Normal { .. } => 2,
        }
    }

    /// Draws the next element.
    pub(crate) fn draw(self, random: &mut SplitMix64) -> f32 {
        match self {
            Self::Constant(constant) => constant,
            Self::Uniform { bound } => bound * (2.0 * random.unit() - 1.0),
            Self::Normal { deviation } => {
                // libm's functions have the same bits on every machine, and 1 - unit is above zero.
                let radius = (-2.0 * libm::log(1.0 - f64::from(random.unit()))).sqrt();
                let angle = 2.0 * std::f64::consts::PI * f64::from(random.unit());
                (f64::from(deviation) * radius * libm::cos(angle)) as f32
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn moments(initializer: Initializer) -> (f64, f64) {
        let (mut random, count) = (SplitMix64::new(3), 100_000);
        let values: Vec<f64> = (0..count).map(|_| f64::from(initializer.draw(&mut random))).collect();
        let mean = values.iter().sum::<f64>() / f64::from(count);
        (mean, (values.iter().map(|value| (value - mean).powi(2)).sum::<f64>() / f64::from(count)).sqrt())
    }

    #[test]
    fn deviations_match_their_settings() {
        for (initializer, expected) in [
            (Initializer::fan_in(12), (1.0_f64 / 12.0 / 3.0).sqrt()),
            (Initializer::glorot(2, 4), (1.0_f64 / 3.0).sqrt()),
            (Initializer::he(8), 0.5),
            (Initializer::ONE, 0.0),
        ] {
            let (mean, deviation) = moments(initializer);
            let center = if initializer == Initializer::ONE { 1.0 } else { 0.0 };
            // Five standard errors of 100,000 numbers.
            assert!((mean - center).abs() <= 5.0 * expected / 316.0, "{initializer:?}: mean {mean}");
            assert!((deviation - expected).abs() <= 0.016 * expected, "{initializer:?}: deviation {deviation}");
        }
    }

    #[test]
    fn non_finite_initializers_are_flawed() {
        let not_finite = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY];
        for value in not_finite {
            for flawed in [
                Initializer::Constant(value),
                Initializer::Uniform { bound: value },
                Initializer::Normal { deviation: value },
            ] {
                assert!(flawed.flaw().is_some(), "{flawed:?}");
            }
        }
        let flawed = [
            Initializer::fan_in(0),
            Initializer::glorot(0, 0),
            Initializer::he(0),
            Initializer::Uniform { bound: -1.0 },
            Initializer::Normal { deviation: -1.0 },
            Initializer::Normal { deviation: f32::MAX },
        ];
        assert!(flawed.into_iter().all(|flawed| flawed.flaw().is_some()));
        let largest = [
            Initializer::Constant(-f32::MAX),
            Initializer::Uniform { bound: f32::MAX },
            Initializer::Normal { deviation: f32::MAX / 8.0 },
            Initializer::glorot(usize::MAX, usize::MAX),
        ];
        for sound in largest {
            assert_eq!(sound.flaw(), None);
            let mut random = SplitMix64::new(1);
            assert!((0..1000).all(|_| sound.draw(&mut random).is_finite()), "{sound:?}");
        }
    }

    #[test]
    fn elements_draw_their_declared_count() {
        for initializer in [Initializer::ZERO, Initializer::fan_in(3), Initializer::he(3)] {
            let mut random = SplitMix64::new(5);
            for _ in 0..7 {
                initializer.draw(&mut random);
            }
            assert_eq!(random, SplitMix64::after(5, 7 * initializer.draws()), "{initializer:?}");
        }
    }
}
