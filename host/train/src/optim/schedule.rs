//! Learning rate schedules.

#![forbid(unsafe_code)]

use super::parameter_groups::ParameterGroup;
use super::range::expect;
use cuda_std::float_mode;
use stepscope_core::Result;

/// The change of the learning rate over the updates: a linear rise from zero, a constant rate, and
/// a fall. The default is a constant factor of one.
///
/// A run whose rate is constant before it falls can be extended from any checkpoint of that phase,
/// and its fall can begin at any of them (Hägele et al., 2024,
/// [arXiv 2405.18392](https://arxiv.org/abs/2405.18392)):
///
/// ```
/// use stepscope_train::{Decay, Schedule};
/// let short = Schedule { stable: 900, decay: Decay::OneMinusSqrt, ..Schedule::linear(100, 1_000, 0.0) };
/// let long = Schedule { stable: 9_000, total: 10_000, ..short };
/// assert!((1..=900).all(|update| short.factor(update) == long.factor(update)));
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Schedule {
    /// The number of updates over which the rate rises. The factor of the last of them is one.
    pub warmup: u64,
    /// The number of updates before the rate falls. It falls at once after the warm-up if they are
    /// fewer.
    pub stable: u64,
    /// The number of updates after which the fall is over. If they are not more than `warmup` and
    /// `stable`, the factor is `floor` from the next update on.
    pub total: u64,
    /// The shape of the fall.
    pub decay: Decay,
    /// The fraction of the rate that is left at the end, in `[0, 1]`.
    pub floor: f64,
}

/// The shape of a fall of the learning rate: the fraction that is left when the fraction d of the
/// fall is over.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Decay {
    /// No fall: `1`.
    #[default]
    Constant,
    /// `(1 + cos(pi d)) / 2`.
    Cosine,
    /// `1 - d`.
    Linear,
    /// `1 - sqrt(d)`.
    OneMinusSqrt,
}

impl Default for Schedule {
    fn default() -> Self {
        Self { warmup: 0, stable: 0, total: 0, decay: Decay::Constant, floor: 0.0 }
    }
}

impl Schedule {
    /// Rises over `warmup` updates, then falls along half a cosine to `floor` at update `total`.
    pub const fn cosine(warmup: u64, total: u64, floor: f64) -> Self {
        Self { warmup, stable: warmup, total, decay: Decay::Cosine, floor }
    }

    /// Rises over `warmup` updates, then falls along a straight line to `floor` at update `total`.
    pub const fn linear(warmup: u64, total: u64, floor: f64) -> Self {
        Self { decay: Decay::Linear, ..Self::cosine(warmup, total, floor) }
    }

    /// Returns an error for a floor out of range.
    pub(super) fn check(&self, op: &'static str) -> Result<()> {
        expect(op, "floor", self.floor, (0.0..=1.0).contains(&self.floor), "in [0, 1]")
    }

    /// Returns `rate` times the factors of update `number` and of its group.
    pub(super) fn rate(&self, rate: f32, number: u64, group: &ParameterGroup) -> f32 {
        float_mode::in_default(|| (f64::from(rate) * self.factor_at(number) * f64::from(group.rate)) as f32)
    }

    /// Returns the factor for update `number`, counted from 1. Number 0 is the time before the
    /// first update: the factor is then 0 with a warm-up and 1 without one.
    pub fn factor(&self, number: u64) -> f64 {
        float_mode::in_default(|| self.factor_at(number))
    }

    fn factor_at(&self, number: u64) -> f64 {
        let Self { warmup, total, floor, .. } = *self;
        if number <= warmup && warmup > 0 {
            return number as f64 / warmup as f64;
        }
        let start = self.stable.max(warmup);
        let done = number.saturating_sub(start) as f64 / total.saturating_sub(start).max(1) as f64;
        let done = done.min(1.0);
        let left = match self.decay {
            Decay::Constant => return 1.0,
            // libm's cosine has the same bits on every machine.
            Decay::Cosine => 0.5 * (1.0 + libm::cos(std::f64::consts::PI * done)),
            Decay::Linear => 1.0 - done,
            Decay::OneMinusSqrt => 1.0 - done.sqrt(),
        };
        floor + (1.0 - floor) * left
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn schedule_rises_and_falls_to_floor() {
        let schedule = Schedule::cosine(4, 12, 0.1);
        let factors: Vec<f64> = (1..=14).map(|number| schedule.factor(number)).collect();
        assert_eq!(factors[..4], [0.25, 0.5, 0.75, 1.0]);
        assert!(factors[3..12].windows(2).all(|pair| pair[0] > pair[1]));
        assert!((factors[7] - 0.55).abs() < 1e-12, "half of the decay: {}", factors[7]);
        assert!(factors[11..].iter().all(|factor| (factor - 0.1).abs() < 1e-12));
    }

    #[test]
    fn linear_schedule_falls_in_equal_steps() {
        let schedule = Schedule::linear(2, 6, 0.2);
        let factors: Vec<f64> = (0..=7).map(|number| schedule.factor(number)).collect();
        let expected = [0.0, 0.5, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2];
        assert!(factors.iter().zip(expected).all(|(factor, want)| (factor - want).abs() < 1e-12), "{factors:?}");
    }

    #[test]
    fn rate_is_constant_before_it_falls() {
        for (decay, half) in [(Decay::Linear, 0.5), (Decay::Cosine, 0.5), (Decay::OneMinusSqrt, 1.0 - 0.5_f64.sqrt())] {
            let schedule = Schedule { warmup: 2, stable: 6, total: 14, decay, floor: 0.0 };
            let factors: Vec<f64> = (1..=15).map(|number| schedule.factor(number)).collect();
            assert_eq!(factors[..6], [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]);
            assert!(factors[5..14].windows(2).all(|pair| pair[0] > pair[1]), "{decay:?}: {factors:?}");
            assert!((factors[9] - half).abs() < 1e-12, "{decay:?}: {factors:?}");
            assert_eq!(factors[13..], [0.0, 0.0], "{decay:?}");
        }
    }

    #[test]
    fn schedule_edges_are_defined() {
        let edges = [0, 1, 2, 4, u64::MAX - 1, u64::MAX];
        for warmup in edges {
            for total in edges {
                for number in edges {
                    for schedule in [
                        Schedule::cosine(warmup, total, 0.25),
                        Schedule { warmup: 2, stable: warmup, ..Schedule::linear(0, total, 0.25) },
                    ] {
                        let factor = schedule.factor(number);
                        assert!((0.0..=1.0).contains(&factor), "{schedule:?}, update {number}: {factor}");
                    }
                }
            }
        }
        let without = |total, number| Schedule::cosine(0, total, 0.25).factor(number);
        assert_eq!([without(8, 0), without(0, 0), without(0, 1), without(8, 8)], [1.0, 1.0, 0.25, 0.25]);
        let late = |number| Schedule::cosine(4, 2, 0.25).factor(number);
        assert_eq!([late(0), late(2), late(4), late(5), late(u64::MAX)], [0.0, 0.5, 1.0, 0.25, 0.25]);
        let whole = Schedule::cosine(u64::MAX, 0, 1.0);
        assert_eq!([whole.factor(0), whole.factor(u64::MAX)], [0.0, 1.0]);
    }
}
