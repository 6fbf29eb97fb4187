//! AdamW over one flat region, in one launch, with global-norm clipping and a learning-rate schedule.
//!
//! Invariant: what changes from step to step lies in a device slot that is written before the kernels are queued, so
//! the queued work is the same every time and can be recorded. Each update is set up once and made once.

#![forbid(unsafe_code)]

use crate::error::{Error, Result};
use crate::memory::{Buffer, Phase, Turns};
use crate::ops;
use crate::params::{Gradients, Layout, Parameters};
use crate::step::Step;
use crate::tensor::Tensor;
use kernels::adamw::slot;
use std::sync::Arc;

/// How the learning rate changes over the updates.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum Schedule {
    /// Always the same.
    Constant,
    /// Linear from zero over `warmup` updates, then half a cosine down to `floor` at update `total`.
    WarmupCosine {
        /// Updates of the rise.
        warmup: u64,
        /// Updates in all.
        total: u64,
        /// The share of the rate that is left at the end, in `[0, 1]`.
        floor: f64,
    },
}

impl Schedule {
    /// The factor for update `number`, counted from 1.
    pub fn factor(&self, number: u64) -> f64 {
        match *self {
            Self::Constant => 1.0,
            Self::WarmupCosine { warmup, .. } if number <= warmup => number as f64 / warmup as f64,
            Self::WarmupCosine { warmup, total, floor } => {
                let done = (number - warmup) as f64 / total.saturating_sub(warmup).max(1) as f64;
                // libm's cosine has the same bits on every machine.
                let fall = 0.5 * (1.0 + libm::cos(std::f64::consts::PI * done.min(1.0)));
                floor + (1.0 - floor) * fall
            }
        }
    }
}

/// Settings of [`AdamW`]; the defaults are PyTorch's.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamWConfig {
    /// The step size before the schedule.
    pub learning_rate: f32,
    /// Decay of the first moment.
    pub beta1: f32,
    /// Decay of the second moment.
    pub beta2: f32,
    /// Added to the root of the second moment.
    pub epsilon: f32,
    /// Decoupled weight decay.
    pub weight_decay: f32,
    /// The largest L2 norm of all gradients together; larger ones are scaled down to it.
    pub clip: Option<f32>,
    /// How the learning rate changes.
    pub schedule: Schedule,
}

impl Default for AdamWConfig {
    fn default() -> Self {
        Self {
            learning_rate: 1e-3,
            beta1: 0.9,
            beta2: 0.999,
            epsilon: 1e-8,
            weight_decay: 0.01,
            clip: None,
            schedule: Schedule::Constant,
        }
    }
}

impl AdamWConfig {
    fn check(&self) -> Result<()> {
        let open_unit = |value: f32| (0.0..1.0).contains(&value);
        let at_least_zero = |value: f32| value >= 0.0 && value.is_finite();
        let floor = match self.schedule {
            Schedule::Constant => 0.0,
            Schedule::WarmupCosine { floor, .. } => floor,
        };
        let rules: [(&str, f32, bool, &str); 7] = [
            ("learning_rate", self.learning_rate, at_least_zero(self.learning_rate), "finite and at least 0"),
            ("beta1", self.beta1, open_unit(self.beta1), "in [0, 1)"),
            ("beta2", self.beta2, open_unit(self.beta2), "in [0, 1)"),
            ("epsilon", self.epsilon, at_least_zero(self.epsilon), "finite and at least 0"),
            ("weight_decay", self.weight_decay, at_least_zero(self.weight_decay), "finite and at least 0"),
            ("clip", self.clip.unwrap_or(1.0), self.clip.is_none_or(|clip| clip > 0.0 && clip.is_finite()), "above 0"),
            ("floor", floor as f32, (0.0..=1.0).contains(&floor), "in [0, 1]"),
        ];
        match rules.into_iter().find(|(_, _, holds, _)| !holds) {
            Some((name, value, _, rule)) => Err(Error::misuse("adamw", format!("`{name}` {rule}"), value.to_string())),
            None => Ok(()),
        }
    }
}

/// Adam with decoupled weight decay (Loshchilov and Hutter, 2019), with its moments on the device.
#[derive(Debug)]
pub struct AdamW {
    config: AdamWConfig,
    layout: Layout,
    turns: Arc<Turns>,
    first: Buffer<f32>,
    second: Buffer<f32>,
    hyper: Buffer<f32>,
}

impl AdamW {
    /// An optimiser for `parameters` that has made no update.
    ///
    /// # Errors
    /// [`Error::Misuse`] for a setting out of range; [`Error::DeviceMemory`] when there is no room for the moments.
    pub fn new(parameters: &Parameters, config: AdamWConfig) -> Result<Self> {
        config.check()?;
        let (device, elements) = (parameters.flat().device(), parameters.layout().elements());
        let zeros = || Buffer::zeros(device, elements);
        Ok(Self {
            config,
            layout: parameters.layout().clone(),
            turns: Arc::default(),
            first: zeros()?,
            second: zeros()?,
            hyper: Buffer::zeros(device, slot::LEN)?,
        })
    }

    /// Updates made so far: those that were queued by [`AdamW::apply`] or by a replay.
    pub fn updates(&self) -> u64 {
        self.turns.made()
    }

    /// Sets up the next update: its rate and corrections go to the device. Returns its number, counted from 1. Call it before each
    /// [`AdamW::apply`] and before each replay of one; called again before that, it sets up the same update again.
    ///
    /// # Errors
    /// [`Error::Misuse`] after 2^64 - 1 updates; those of the driver.
    pub fn advance(&mut self) -> Result<u64> {
        let made = self.updates();
        let Some(number) = made.checked_add(1) else {
            return Err(Error::misuse("adamw", "an update whose number fits 64 bits", format!("one after {made}")));
        };
        // If the slot is not written, nothing is set up.
        self.turns.reset(made);
        let AdamWConfig { learning_rate, beta1, beta2, epsilon, weight_decay, clip, schedule } = self.config;
        let correction = |beta: f32| (1.0 - power(f64::from(beta), number)) as f32;
        let mut hyper = [0.0; slot::LEN];
        hyper[slot::LEARNING_RATE] = (f64::from(learning_rate) * schedule.factor(number)) as f32;
        hyper[slot::BETA1] = beta1;
        hyper[slot::BETA2] = beta2;
        hyper[slot::EPSILON] = epsilon;
        hyper[slot::WEIGHT_DECAY] = weight_decay;
        hyper[slot::BIAS_CORRECTION1] = correction(beta1);
        hyper[slot::BIAS_CORRECTION2] = correction(beta2);
        hyper[slot::MAX_NORM] = clip.unwrap_or(0.0);
        self.hyper.write(0, &hyper)?;
        self.turns.set_up();
        Ok(number)
    }

    /// Queues the update that [`AdamW::advance`] has set up: the squared norm of all gradients, then one launch over
    /// all weights. Returns the squared norm, `[1]`, before clipping. In a step that is captured, each replay makes the update that was
    /// set up before it.
    ///
    /// A norm that is not finite is not looked at here: the weights are worthless then. A [`Trainer`](crate::Trainer) looks.
    ///
    /// # Errors
    /// [`Error::Misuse`] when parameters, gradients and moments do not belong together, and when no update is set up: then the replay's
    /// error, where this is captured.
    #[track_caller]
    pub fn apply<'s>(
        &mut self,
        step: &Step<'s>,
        parameters: &mut Parameters,
        gradients: &Gradients,
    ) -> Result<Tensor<'s>> {
        self.check_layout(parameters.layout())?;
        self.check_layout(gradients.layout())?;
        let turns = Arc::clone(&self.turns);
        let made = step.makes(&turns)?;
        Turns::take(made)?;
        let queued = self.queue(step, parameters, gradients);
        Turns::end(made, queued.is_ok());
        queued
    }

    #[track_caller]
    fn queue<'s>(&mut self, step: &Step<'s>, parameters: &mut Parameters, gradients: &Gradients) -> Result<Tensor<'s>> {
        let elements = parameters.layout().elements();
        let gradients = step.lend(gradients.flat(), [elements])?;
        let mut weights = parameters.lend_flat_mut(step)?;
        let (first, second) = (&mut self.first, &mut self.second);
        let (mut first, mut second) = (step.lend_mut(first, [elements])?, step.lend_mut(second, [elements])?);
        let hyper = step.lend(&self.hyper, [slot::LEN])?;
        let _phase = step.enter(Phase::Optimizer);
        let squared_norm = ops::squared_norm(step, &gradients)?;
        ops::adamw(step, &mut weights, &gradients, &mut first, &mut second, &hyper, &squared_norm)?;
        Ok(squared_norm)
    }

    /// The first and second moments, flat, in the parameters' layout.
    pub fn moments(&self) -> [&Buffer<f32>; 2] {
        [&self.first, &self.second]
    }

    /// An error unless the moments are those of parameters of `layout`.
    pub(crate) fn check_layout(&self, layout: &Layout) -> Result<()> {
        if self.layout.same(layout) {
            return Ok(());
        }
        Err(Error::misuse("adamw", "parameters, gradients and moments of one layout", "another layout's"))
    }

    /// The moments, to be overwritten by those of `updates` updates.
    pub(crate) fn restore(&mut self, updates: u64) -> [&mut Buffer<f32>; 2] {
        self.turns.reset(updates);
        [&mut self.first, &mut self.second]
    }
}

/// `base^exponent` by squaring: multiplications alone, so the same bits on every machine.
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
    fn the_schedule_rises_falls_and_ends_at_its_floor() {
        let schedule = Schedule::WarmupCosine { warmup: 4, total: 12, floor: 0.1 };
        let factors: Vec<f64> = (1..=14).map(|number| schedule.factor(number)).collect();
        assert_eq!(factors[..4], [0.25, 0.5, 0.75, 1.0]);
        assert!(factors[3..12].windows(2).all(|pair| pair[0] > pair[1]));
        assert!((factors[7] - 0.55).abs() < 1e-12, "half way down: {}", factors[7]);
        assert!(factors[11..].iter().all(|factor| (factor - 0.1).abs() < 1e-12));
    }

    #[test]
    fn powers_match_repeated_multiplication() {
        let mut product = 1.0;
        for exponent in 0..200 {
            assert!((power(0.999, exponent) / product - 1.0).abs() < 1e-13);
            product *= 0.999;
        }
    }
}
