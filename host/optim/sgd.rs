//! SGD with momentum, its velocity on the device.

#![forbid(unsafe_code)]

use super::optimizer::Optimizer;
use super::parameter_groups::ParameterGroup;
use super::range::{at_least_zero, expect, expect_clip};
use super::rule::{UpdateArguments, UpdateRule, expect_state};
use super::schedule::Schedule;
use crate::error::Result;
use crate::ops;
use crate::step::Step;
use kernels::sgd::slot;

/// Gradient descent with momentum (Sutskever et al., 2013), as PyTorch's `torch.optim.SGD` computes it with a dampening of 0:
/// `g` is the clipped gradient plus the weight decay times the weight, `velocity = momentum velocity + g`, and the weight goes by
/// `-rate velocity`, or `-rate (g + momentum velocity)` with Nesterov's momentum.
pub type Sgd = Optimizer<SgdConfig>;

/// Settings of [`Sgd`]; the defaults are PyTorch's. The velocity has its memory also where the momentum is 0.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SgdConfig {
    /// The step size before the schedule.
    pub learning_rate: f32,
    /// What is left of the velocity from update to update.
    pub momentum: f32,
    /// Whether the step looks ahead along the velocity (Nesterov's momentum), which takes a momentum.
    pub nesterov: bool,
    /// Weight decay, where a group has none of its own. It is coupled: a part of the gradient, added behind the clipping, that the
    /// velocity gathers too. [`AdamWConfig`](crate::AdamWConfig)'s is not.
    pub weight_decay: f32,
    /// The largest L2 norm of all gradients together; larger ones are scaled down to it.
    pub clip: Option<f32>,
    /// How the learning rate changes.
    pub schedule: Schedule,
}

impl Default for SgdConfig {
    fn default() -> Self {
        Self {
            learning_rate: 1e-3,
            momentum: 0.0,
            nesterov: false,
            weight_decay: 0.0,
            clip: None,
            schedule: Schedule::Constant,
        }
    }
}

impl UpdateRule for SgdConfig {
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
        // Each field by name: a new one does not compile before it is here.
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
        let UpdateArguments { mut weights, mut copy, gradients, state, settings, groups, squared_norm } = arguments;
        let [mut velocity] = expect_state("sgd", self.state(), state)?;
        let velocity = &mut velocity;
        match groups {
            None => ops::sgd(step, &mut weights, copy.as_mut(), &gradients, velocity, &settings, squared_norm),
            Some(groups) => ops::sgd_groups(
                step,
                &mut weights,
                copy.as_mut(),
                &gradients,
                velocity,
                &settings,
                &groups,
                squared_norm,
            ),
        }
    }
}
