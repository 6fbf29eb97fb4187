//! SGD with momentum, and its velocity on the device.

#![forbid(unsafe_code)]

use super::parameter_groups::ParameterGroup;
use super::range::{at_least_zero, expect, expect_clip};
use super::rule::{SmallUpdateArguments, UpdateArguments, UpdateRule, expect_state};
use super::schedule::Schedule;
use kernels::sgd::slot;
use stepscope_core::{Result, Step, ops};

/// Gradient descent with momentum (Sutskever et al., 2013), as `torch.optim.SGD` computes it with a
/// dampening of 0. `g` is the clipped gradient plus the weight decay times the weight, and
/// `velocity = momentum velocity + g`. The weight changes by `-rate velocity`, or by
/// `-rate (g + momentum velocity)` with Nesterov's momentum.
///
/// The defaults are PyTorch's. The velocity is allocated even if the momentum is 0. An
/// [`Optimizer`](crate::Optimizer) applies it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sgd {
    /// The step size before the schedule.
    pub learning_rate: f32,
    /// The fraction of the velocity that is kept from update to update.
    pub momentum: f32,
    /// True for Nesterov's momentum, a step ahead along the velocity. It requires a momentum above
    /// 0.
    pub nesterov: bool,
    /// The weight decay, for groups that do not set their own. It is coupled: it is added to the
    /// gradient after clipping, and so enters the velocity too. The decay of
    /// [`AdamW`](crate::AdamW) is decoupled.
    pub weight_decay: f32,
    /// The largest L2 norm of all gradients together. Gradients with a larger norm are scaled down
    /// to it.
    pub clip: Option<f32>,
    /// The schedule of the learning rate.
    pub schedule: Schedule,
}

impl Default for Sgd {
    fn default() -> Self {
        Self {
            learning_rate: 1e-3,
            momentum: 0.0,
            nesterov: false,
            weight_decay: 0.0,
            clip: None,
            schedule: Schedule::default(),
        }
    }
}

impl UpdateRule for Sgd {
    fn name(&self) -> &'static str {
        "sgd"
    }

    fn check(&self) -> Result<()> {
        let Self { learning_rate, momentum, nesterov, weight_decay, clip, schedule } = *self;
        at_least_zero("sgd", "learning_rate", learning_rate)?;
        at_least_zero("sgd", "momentum", momentum)?;
        expect("sgd", "momentum", momentum, momentum > 0.0 || !nesterov, "above 0 with `nesterov`")?;
        at_least_zero("sgd", "weight_decay", weight_decay)?;
        expect_clip("sgd", clip)?;
        schedule.check("sgd")
    }

    fn state(&self) -> &'static [&'static str] {
        &["velocity"]
    }

    fn has_groups(&self) -> bool {
        true
    }

    fn writes_copy(&self) -> bool {
        true
    }

    fn configuration(&self) -> Option<Vec<(&'static str, String)>> {
        // Destructures every field, so that a new field does not compile until it is listed here.
        let Self { learning_rate, momentum, nesterov, weight_decay, clip, schedule } = self;
        Some(vec![
            ("learning_rate", format!("{learning_rate:?}")),
            ("momentum", format!("{momentum:?}")),
            ("nesterov", format!("{nesterov:?}")),
            ("weight_decay", format!("{weight_decay:?}")),
            ("clip", format!("{clip:?}")),
            ("schedule", format!("{schedule:?}")),
        ])
    }

    fn settings(&self, number: u64, group: &ParameterGroup) -> Vec<f32> {
        let mut hyper = vec![0.0; slot::LEN];
        hyper[slot::LEARNING_RATE] = self.schedule.rate(self.learning_rate, number, group);
        hyper[slot::MOMENTUM] = self.momentum;
        hyper[slot::WEIGHT_DECAY] = group.weight_decay.unwrap_or(self.weight_decay);
        hyper[slot::MAX_NORM] = self.clip.unwrap_or(0.0);
        hyper[slot::NESTEROV] = f32::from(u8::from(self.nesterov));
        hyper
    }

    fn queue<'s>(&self, step: &Step<'s>, arguments: UpdateArguments<'_, 's>) -> Result<()> {
        let UpdateArguments { mut weights, mut copy, gradients, state, settings, groups, squared_norm, .. } = arguments;
        let [mut velocity] = expect_state("sgd", self.state(), state)?;
        let velocity = &mut velocity;
        ops::sgd(step, &mut weights, copy.as_mut(), &gradients, velocity, &settings, groups.as_ref(), squared_norm)
    }

    fn queue_small<'s>(&self, step: &Step<'s>, arguments: SmallUpdateArguments<'_, 's>) -> Result<()> {
        let SmallUpdateArguments { weights, gradients, state, settings, groups, squared_norm, .. } = arguments;
        let [velocity] = expect_state("sgd", self.state(), state)?;
        ops::sgd_small(step, weights, &gradients, velocity, &settings, groups.as_ref(), squared_norm)
    }
}
