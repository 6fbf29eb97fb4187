//! AdamW: Adam with decoupled weight decay, and moments on the device.

#![forbid(unsafe_code)]

use super::parameter_groups::ParameterGroup;
use super::range::{at_least_zero, expect, expect_clip};
use super::rule::{SmallUpdateArguments, UpdateArguments, UpdateRule, expect_state};
use super::schedule::Schedule;
use cuda_std::float_mode;
use kernels::adamw::slot;
use stepscope_core::{Result, Step, ops};

/// Adam with decoupled weight decay (Loshchilov and Hutter, 2019), as PyTorch computes it. The
/// defaults are PyTorch's. An [`Optimizer`](crate::Optimizer) applies it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamW {
    /// The step size before the schedule.
    pub learning_rate: f32,
    /// The decay of the first moment.
    pub beta1: f32,
    /// The decay of the second moment.
    pub beta2: f32,
    /// The term added to the root of the second moment. It must be above 0.
    pub epsilon: f32,
    /// The decoupled weight decay, for groups that do not set their own.
    pub weight_decay: f32,
    /// The largest L2 norm of all gradients together. Gradients with a larger norm are scaled down
    /// to it.
    pub clip: Option<f32>,
    /// The schedule of the learning rate.
    pub schedule: Schedule,
}

impl Default for AdamW {
    fn default() -> Self {
        Self {
            learning_rate: 1e-3,
            beta1: 0.9,
            beta2: 0.999,
            epsilon: 1e-8,
            weight_decay: 0.01,
            clip: None,
            schedule: Schedule::default(),
        }
    }
}

impl UpdateRule for AdamW {
    fn name(&self) -> &'static str {
        "adamw"
    }

    fn check(&self) -> Result<()> {
        let Self { learning_rate, beta1, beta2, epsilon, weight_decay, clip, schedule } = *self;
        at_least_zero("adamw", "learning_rate", learning_rate)?;
        for (name, beta) in [("beta1", beta1), ("beta2", beta2)] {
            expect("adamw", name, beta, (0.0..1.0).contains(&beta), "in [0, 1)")?;
        }
        // If epsilon were 0, the update of a weight whose gradients were all zero would be 0 / 0.
        expect("adamw", "epsilon", epsilon, epsilon > 0.0 && epsilon.is_finite(), "finite and above 0")?;
        at_least_zero("adamw", "weight_decay", weight_decay)?;
        expect_clip("adamw", clip)?;
        schedule.check("adamw")
    }

    fn state(&self) -> &'static [&'static str] {
        &["first", "second"]
    }

    fn has_groups(&self) -> bool {
        true
    }

    fn writes_copy(&self) -> bool {
        true
    }

    fn configuration(&self) -> Option<Vec<(&'static str, String)>> {
        // Destructures every field, so that a new field does not compile until it is listed here.
        let Self { learning_rate, beta1, beta2, epsilon, weight_decay, clip, schedule } = self;
        Some(vec![
            ("learning_rate", format!("{learning_rate:?}")),
            ("beta1", format!("{beta1:?}")),
            ("beta2", format!("{beta2:?}")),
            ("epsilon", format!("{epsilon:?}")),
            ("weight_decay", format!("{weight_decay:?}")),
            ("clip", format!("{clip:?}")),
            ("schedule", format!("{schedule:?}")),
        ])
    }

    fn settings(&self, number: u64, group: &ParameterGroup) -> Vec<f32> {
        let correction = |beta: f32| float_mode::in_default(|| (1.0 - power(f64::from(beta), number)) as f32);
        let mut hyper = vec![0.0; slot::LEN];
        hyper[slot::LEARNING_RATE] = self.schedule.rate(self.learning_rate, number, group);
        hyper[slot::BETA1] = self.beta1;
        hyper[slot::BETA2] = self.beta2;
        hyper[slot::EPSILON] = self.epsilon;
        hyper[slot::WEIGHT_DECAY] = group.weight_decay.unwrap_or(self.weight_decay);
        hyper[slot::BIAS_CORRECTION1] = correction(self.beta1);
        hyper[slot::BIAS_CORRECTION2] = correction(self.beta2);
        hyper[slot::MAX_NORM] = self.clip.unwrap_or(0.0);
        hyper
    }

    fn queue<'s>(&self, step: &Step<'s>, arguments: UpdateArguments<'_, 's>) -> Result<()> {
        let UpdateArguments { mut weights, mut copy, gradients, state, settings, groups, squared_norm, .. } = arguments;
        let [mut first, mut second] = expect_state("adamw", self.state(), state)?;
        let (first, second) = (&mut first, &mut second);
        ops::adamw(
            step,
            &mut weights,
            copy.as_mut(),
            &gradients,
            first,
            second,
            &settings,
            groups.as_ref(),
            squared_norm,
        )
    }

    fn queue_small<'s>(&self, step: &Step<'s>, arguments: SmallUpdateArguments<'_, 's>) -> Result<()> {
        let SmallUpdateArguments { weights, gradients, state, settings, groups, squared_norm, .. } = arguments;
        let moments = expect_state("adamw", self.state(), state)?;
        ops::adamw_small(step, weights, &gradients, moments, &settings, groups.as_ref(), squared_norm)
    }
}

/// Computes `base^exponent` by squaring. It only multiplies, so it has the same bits on every
/// machine.
fn power(base: f64, exponent: u64) -> f64 {
    let (mut result, mut square, mut left) = (1.0, base, exponent);
    while left > 0 {
        if left & 1 == 1 {
            result *= square;
        }
        square *= square;
        left >>= 1;
    }
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn powers_match_repeated_multiplication() {
        let mut product = 1.0;
        for exponent in 0..200 {
            assert!((power(0.999, exponent) / product - 1.0).abs() < 1e-13);
            product *= 0.999;
        }
    }
}
