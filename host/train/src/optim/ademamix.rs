//! AdEMAMix: AdamW with a second, slower momentum.

#![forbid(unsafe_code)]

use super::adamw::AdamW;
use super::parameter_groups::ParameterGroup;
use super::range::{at_least_zero, expect};
use super::rule::{UpdateArguments, UpdateRule, expect_state};
use cuda_std::float_mode;
use kernels::ademamix::slot;
use stepscope_core::{Result, Step, ops};

/// AdEMAMix (Pagliardini, Ablin and Grangier, 2024,
/// [arXiv 2409.03137](https://arxiv.org/abs/2409.03137)). An [`Optimizer`](crate::Optimizer)
/// applies it.
///
/// It is AdamW with another average of the gradients, of which a weighted part is added to the
/// first moment. That average forgets so slowly that gradients of thousands of updates ago count.
/// It has no bias correction.
///
/// ```text
/// slow = beta3 slow + (1 - beta3) g
/// w = w - rate ((first / (1 - beta1^t) + alpha slow) / (sqrt(second / (1 - beta2^t)) + epsilon) + decay w)
/// ```
/// Alpha rises from 0 to its value over `warmup` updates. Beta3 rises from beta1 over the same
/// updates, so that the number of updates after which half of a gradient is forgotten rises by
/// equal steps.
///
/// Split masters and state in 8 bits are refused.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdEmaMix {
    /// The rate, the decay of the other moments, the weight decay, the clipping and the schedules.
    pub adamw: AdamW,
    /// The decay of the slow average.
    pub beta3: f32,
    /// The weight of the slow average next to the first moment.
    pub alpha: f32,
    /// The updates over which alpha and beta3 rise; usually all of a run.
    pub warmup: u64,
}

impl Default for AdEmaMix {
    fn default() -> Self {
        Self { adamw: AdamW::default(), beta3: 0.9999, alpha: 5.0, warmup: 0 }
    }
}

impl AdEmaMix {
    /// Returns alpha and beta3 of an update.
    fn slow(&self, number: u64) -> [f32; 2] {
        if number >= self.warmup {
            return [self.alpha, self.beta3];
        }
        // libm's functions have the same bits on every machine.
        float_mode::in_default(|| {
            let done = number as f64 / self.warmup as f64;
            let [first, last] = [self.adamw.beta1, self.beta3].map(|beta| libm::log(f64::from(beta)));
            let beta3 = libm::exp(first * last / ((1.0 - done) * last + done * first));
            [(f64::from(self.alpha) * done) as f32, (beta3 as f32).min(self.beta3)]
        })
    }
}

impl UpdateRule for AdEmaMix {
    fn name(&self) -> &'static str {
        "ademamix"
    }

    fn check(&self) -> Result<()> {
        let Self { adamw, beta3, alpha, warmup } = *self;
        adamw.check()?;
        expect("ademamix", "beta3", beta3, (0.0..1.0).contains(&beta3), "in [0, 1)")?;
        at_least_zero("ademamix", "alpha", alpha)?;
        let rises = adamw.beta1 > 0.0 && adamw.beta1 <= beta3;
        expect("ademamix", "beta3", beta3, rises || warmup == 0, "at least `beta1`, which is above 0, with `warmup`")
    }

    fn state(&self) -> &'static [&'static str] {
        &["first", "slow", "second"]
    }

    fn has_groups(&self) -> bool {
        true
    }

    fn writes_copy(&self) -> bool {
        true
    }

    fn configuration(&self) -> Option<Vec<(&'static str, String)>> {
        // Destructures every field, so that a new field does not compile until it is listed here.
        let Self { adamw, beta3, alpha, warmup } = self;
        let mut all = adamw.configuration()?;
        all.extend([
            ("beta3", format!("{beta3:?}")),
            ("alpha", format!("{alpha:?}")),
            ("warmup", format!("{warmup:?}")),
        ]);
        Some(all)
    }

    fn settings(&self, number: u64, group: &ParameterGroup) -> Vec<f32> {
        let mut hyper = self.adamw.settings(number, group);
        hyper.resize(slot::LEN, 0.0);
        [hyper[slot::ALPHA], hyper[slot::BETA3]] = self.slow(number);
        hyper
    }

    fn queue<'s>(&self, step: &Step<'s>, arguments: UpdateArguments<'_, 's>) -> Result<()> {
        let UpdateArguments { mut weights, mut copy, gradients, state, settings, groups, squared_norm, .. } = arguments;
        let mut moments: [_; 3] = expect_state("ademamix", self.state(), state)?;
        let moments = moments.each_mut();
        ops::ademamix(step, &mut weights, copy.as_mut(), &gradients, moments, &settings, groups.as_ref(), squared_norm)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// In the middle of the warm-up, half of a gradient is forgotten after the mean of the updates
    /// at its ends.
    #[test]
    fn memory_rises_by_equal_steps() {
        let rule = AdEmaMix { warmup: 8, ..AdEmaMix::default() };
        let half = |beta: f32| libm::log(0.5) / libm::log(f64::from(beta));
        let [first, last] = [half(rule.adamw.beta1), half(rule.beta3)];
        for number in 0..12 {
            let [alpha, beta3] = rule.slow(number);
            let done = (number as f64 / 8.0).min(1.0);
            assert!((f64::from(alpha) - 5.0 * done).abs() < 1e-6, "{number}: {alpha}");
            let want = first + (last - first) * done;
            // An ulp of beta3 is this share of the updates.
            assert!((half(beta3) / want - 1.0).abs() < 1e-3, "{number}: {beta3}, {} and {want}", half(beta3));
        }
        assert_eq!(AdEmaMix::default().slow(1), [5.0, 0.9999]);
    }
}
