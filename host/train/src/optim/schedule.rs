//! Learning rate schedules.

#![forbid(unsafe_code)]

use super::parameter_groups::ParameterGroup;
use super::range::expect;
use cuda_std::float_mode;
use stepscope_core::Result;

/// The change of the learning rate over the updates.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum Schedule {
    /// A constant factor of one.
    Constant,
    /// Linear from zero over `warmup` updates, then half a cosine down to `floor` at update
    /// `total`. If `total` is not above `warmup`, the factor is `floor` from the first update after
    /// the warm-up on.
    WarmupCosine {
        /// The number of warm-up updates.
        warmup: u64,
        /// The total number of updates.
        total: u64,
        /// The fraction of the rate that is left at the end, in `[0, 1]`.
        floor: f64,
    },
    /// Like [`Schedule::WarmupCosine`], with a straight line instead of the cosine.
    WarmupLinear {
        /// The number of warm-up updates.
        warmup: u64,
        /// The total number of updates.
        total: u64,
        /// The fraction of the rate that is left at the end, in `[0, 1]`.
        floor: f64,
    },
}

impl Schedule {
    /// Returns an error for a floor out of range.
    pub(super) fn check(&self, op: &'static str) -> Result<()> {
        let floor = match *self {
            Self::Constant => 0.0,
            Self::WarmupCosine { floor, .. } | Self::WarmupLinear { floor, .. } => floor,
        };
        expect(op, "floor", floor, (0.0..=1.0).contains(&floor), "in [0, 1]")
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
        let (warmup, total, floor) = match *self {
            Self::Constant => return 1.0,
            Self::WarmupCosine { warmup, total, floor } | Self::WarmupLinear { warmup, total, floor } => {
                (warmup, total, floor)
            }
        };
        if number <= warmup && warmup > 0 {
            return number as f64 / warmup as f64;
        }
        let done = ((number - warmup) as f64 / total.saturating_sub(warmup).max(1) as f64).min(1.0);
        let left = match self {
            Self::WarmupLinear { .. } => 1.0 - done,
            // libm's cosine has the same bits on every machine.
            _ => 0.5 * (1.0 + libm::cos(std::f64::consts::PI * done)),
        };
        floor + (1.0 - floor) * left
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn schedule_rises_and_falls_to_floor() {
        let schedule = Schedule::WarmupCosine { warmup: 4, total: 12, floor: 0.1 };
        let factors: Vec<f64> = (1..=14).map(|number| schedule.factor(number)).collect();
        assert_eq!(factors[..4], [0.25, 0.5, 0.75, 1.0]);
        assert!(factors[3..12].windows(2).all(|pair| pair[0] > pair[1]));
        assert!((factors[7] - 0.55).abs() < 1e-12, "half of the decay: {}", factors[7]);
        assert!(factors[11..].iter().all(|factor| (factor - 0.1).abs() < 1e-12));
    }

    #[test]
    fn linear_schedule_falls_in_equal_steps() {
        let schedule = Schedule::WarmupLinear { warmup: 2, total: 6, floor: 0.2 };
        let factors: Vec<f64> = (0..=7).map(|number| schedule.factor(number)).collect();
        let expected = [0.0, 0.5, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2];
        assert!(factors.iter().zip(expected).all(|(factor, want)| (factor - want).abs() < 1e-12), "{factors:?}");
    }

    #[test]
    fn schedule_edges_are_defined() {
        let edges = [0, 1, 2, 4, u64::MAX - 1, u64::MAX];
        for warmup in edges {
            for total in edges {
                for number in edges {
                    let factor = Schedule::WarmupCosine { warmup, total, floor: 0.25 }.factor(number);
                    assert!((0.0..=1.0).contains(&factor), "warmup {warmup}, total {total}, update {number}: {factor}");
                }
            }
        }
        let without = |total, number| Schedule::WarmupCosine { warmup: 0, total, floor: 0.25 }.factor(number);
        assert_eq!([without(8, 0), without(0, 0), without(0, 1), without(8, 8)], [1.0, 1.0, 0.25, 0.25]);
        let late = |number| Schedule::WarmupCosine { warmup: 4, total: 2, floor: 0.25 }.factor(number);
        assert_eq!([late(0), late(2), late(4), late(5), late(u64::MAX)], [0.0, 0.5, 1.0, 0.25, 0.25]);
        let whole = Schedule::WarmupCosine { warmup: u64::MAX, total: 0, floor: 1.0 };
        assert_eq!([whole.factor(0), whole.factor(u64::MAX)], [0.0, 1.0]);
    }
}
