//! How the steps of an update run, how their metrics come back, and what is said of an update that came to nothing.

use super::batch::{MicroBatch, Samples, Update, first_input, place};
use super::model::{Learner, Model, StepMetrics};
use super::setup::Trainer;
use super::stage::{Queued, Results, Stage};
use crate::driver::Landing;
use crate::error::{Error, Quantity, Result};
use crate::finite::Numbers;
use crate::optim::UpdateRule;

impl<M: Model, R: UpdateRule> Trainer<'_, M, R> {
    /// Queues an update, or makes it where steps run launch by launch.
    #[track_caller]
    pub(super) fn queue<S: Samples>(&mut self, batch: &[S]) -> Result<Queued> {
        if matches!(self.stage, Stage::Eager(_)) {
            return self.queue_eager(batch, true);
        }
        let (number, parts) = self.advance(batch, true)?;
        let Stage::Captured(captured) = &mut self.stage else { unreachable!("looked at above") };
        let words = batch.len() + 2;
        let free = self.landings.pop().filter(|landing| landing.words() >= words);
        let mut landing = match free {
            Some(landing) => landing,
            None => Landing::new(self.arena.device(), words)?,
        };
        landing.clear();
        for (at, (part, samples)) in parts.iter().zip(batch).enumerate() {
            let replay = captured.replay(&samples.inputs()?.variant(part.variant()));
            let replay = replay.map_err(|error| behind(&batch[..at], error))?;
            let StepMetrics { loss, gradients, watched } = replay.outputs();
            let mut outputs = [Some(*loss), *gradients, *watched].into_iter().flatten();
            outputs.try_for_each(|output| replay.land(output, &mut landing))?;
        }
        landing.seal()?;
        Ok(Queued {
            number,
            samples: parts[0].samples,
            parts: parts.len(),
            updates: true,
            metrics: Results::Landing(landing),
        })
    }

    /// Makes an update, or all of it but the optimiser's part, launch by launch.
    #[track_caller]
    pub(super) fn queue_eager<S: Samples>(&mut self, batch: &[S], update: bool) -> Result<Queued> {
        let (number, parts) = self.advance(batch, update)?;
        let learner = self.stage.learner_mut();
        let mut known = Vec::new();
        for (at, (part, samples)) in parts.iter().zip(batch).enumerate() {
            let values = self.arena.step(|step| {
                let batch = step.upload_inputs(&samples.inputs()?)?;
                let StepMetrics { loss, gradients, watched } = learner.learn(step, &batch, *part)?;
                let [gradients, watched] =
                    [gradients, watched].map(|norm| norm.map(|norm| step.read_scalar(&norm)).transpose());
                Ok([Some(step.read_scalar(&loss)?), gradients?, watched?])
            });
            known.extend(values.map_err(|error| behind(&batch[..at], error))?.into_iter().flatten());
        }
        Ok(Queued {
            number,
            samples: parts[0].samples,
            parts: parts.len(),
            updates: update,
            metrics: Results::Known(known),
        })
    }

    /// Waits for the metrics of an update by `batch`.
    pub(super) fn wait_for_update<S: Samples>(&mut self, queued: Queued, batch: &[S]) -> Result<Update> {
        let Queued { number, samples, parts, updates, metrics } = queued;
        let metrics = match metrics {
            Results::Known(metrics) => metrics,
            Results::Landing(landing) => {
                let metrics = landing.wait(self.arena.deadline())?;
                self.landings.push(landing);
                metrics
            }
        };
        let (losses, norms) = metrics.split_at(parts);
        let (gradients, watched) = norms.split_at(usize::from(updates));
        let loss: f64 = losses.iter().map(|&loss| f64::from(loss)).sum();
        let finite = [
            (Quantity::Loss, loss.is_finite()),
            (Quantity::GradientNorm, gradients.iter().all(|squared| squared.is_finite())),
        ];
        finite.into_iter().try_for_each(|(what, finite)| self.check(number, what, finite, || first_input(batch)))?;
        let watched_l2 = watched.first().map(|&squared| f64::from(squared).sqrt());
        Ok(Update { number, samples, loss, watched_l2 })
    }

    /// An error for a metric of an update, or of the evaluation behind it, if it is not finite and should be. It names the first tensor of
    /// those that can still be looked at: the batch's inputs, then gradients, then weights.
    pub(super) fn check(
        &self,
        update: u64,
        what: Quantity,
        finite: bool,
        first_input: impl FnOnce() -> Result<Option<String>>,
    ) -> Result<()> {
        if finite || self.numbers == Numbers::Any {
            return Ok(());
        }
        let tensor = first_input()?.map_or_else(|| self.first_of_model(update), Ok)?;
        Err(Error::NotFinite { update: Some(update), what, tensor })
    }

    /// The first of gradients and weights, which may be those of a later update that was queued meanwhile.
    fn first_of_model(&self, update: u64) -> Result<String> {
        let Learner { parameters, gradients, optimizer, .. } = self.learner();
        let made = optimizer.updates();
        let seen = if made > update { format!(", seen behind update {made}") } else { String::new() };
        parameters.first_not_finite(gradients, &seen)
    }

    /// An error for the weights, if they are not finite and should be. Waits.
    pub(super) fn check_weights(&self) -> Result<()> {
        let Learner { parameters, optimizer, .. } = self.learner();
        if self.numbers == Numbers::Any {
            return Ok(());
        }
        let weights = parameters.flat().read()?;
        self.numbers.check((Some(optimizer.updates()), Quantity::Weight), parameters.layout().finite("", &weights))
    }

    /// The parts of a batch, once the optimiser is set up for its update, and the number of that.
    fn advance<S: Samples>(&mut self, batch: &[S], update: bool) -> Result<(u64, Vec<MicroBatch>)> {
        let lens = batch.iter().map(Samples::len);
        let samples = lens.clone().try_fold(0usize, |sum, len| if len == 0 { None } else { sum.checked_add(len) });
        let Some(samples) = samples.filter(|samples| (1..=MicroBatch::MOST).contains(samples)) else {
            let expected = format!("samples in each part of a batch, at most {} in all", MicroBatch::MOST);
            return Err(Error::misuse("update", expected, format!("{:?}", lens.collect::<Vec<_>>())));
        };
        self.accumulated = false;
        let number = self.stage.learner_mut().advance()?;
        let part = |number| {
            let last = number + 1 == batch.len();
            MicroBatch { samples, first: number == 0, last, update: last && update }
        };
        Ok((number, (0..batch.len()).map(part).collect()))
    }
}

/// An error of a part of a batch, with the sample's place in the batch: `before` are the parts before.
fn behind<S: Samples>(before: &[S], error: Error) -> Error {
    match error {
        Error::Label { sample, label, classes } => Error::Label { sample: place(before, sample), label, classes },
        other => other,
    }
}
