//! How the steps of an update run, how their metrics come back, and what is said of an update that came to nothing.

use super::agreement;
use super::batch::{MicroBatch, Samples, Update, first_input, place};
use super::model::{Learner, Model, StepMetrics};
use super::setup::Trainer;
use super::shards::Wanted;
use super::stage::{Queued, Results, Stage};
use crate::driver::Landing;
use crate::error::{Error, Quantity, Result};
use crate::finite::{Numbers, is_finite};
use crate::optim::UpdateRule;
use crate::tensor::Source;
use cuda_std::float_mode;
use std::ops::Range;
use std::sync::atomic::Ordering;

/// Updates between two checks of all weights. To read the weights of GPT-2 takes as long as one
/// update.
const CHECK_EVERY: u64 = 1000;

/// What of a batch runs here.
struct Plan {
    number: u64,
    samples: usize,
    /// The own parts in the order of the batch, shard by shard.
    shards: Vec<Range<usize>>,
    /// Whether this is a learner of a group: no step updates the weights, and the gradients of each shard start from zero.
    sharded: bool,
    /// Whether the weights are updated.
    updates: bool,
}

impl Plan {
    /// The parts that run here: neighbours.
    fn parts(&self) -> Range<usize> {
        self.shards[0].start..self.shards[self.shards.len() - 1].end
    }

    /// What is special about part `at` of a shard.
    fn part(&self, shard: &Range<usize>, at: usize) -> MicroBatch {
        let last = at + 1 == shard.end && !self.sharded;
        MicroBatch { samples: self.samples, first: at == shard.start, last, update: last && self.updates }
    }

    fn queued(&self, metrics: Results) -> Queued {
        Queued { number: self.number, samples: self.samples, parts: self.parts(), updates: self.updates, metrics }
    }
}

impl<M: Model, R: UpdateRule> Trainer<'_, M, R> {
    /// Queues an update, or makes it where steps run launch by launch.
    #[track_caller]
    pub(super) fn queue<S: Samples>(&mut self, batch: &[S]) -> Result<Queued> {
        if matches!(self.stage, Stage::Eager(_)) {
            return self.queue_eager(batch, true);
        }
        let plan = self.advance(batch, true)?;
        let Self { arena, stage: Stage::Captured(captured), landings, .. } = self else {
            unreachable!("looked at above")
        };
        let words = plan.parts().len() + 2;
        let free = landings.pop().filter(|landing| landing.words() >= words);
        let mut landing = match free {
            Some(landing) => landing,
            None => Landing::new(arena.device(), words)?,
        };
        landing.clear();
        for (number, shard) in plan.shards.iter().enumerate() {
            for at in shard.clone() {
                let inputs = batch[at].inputs()?.variant(plan.part(shard, at).variant());
                let is_last = number + 1 == plan.shards.len() && at + 1 == shard.end;
                let replay = match is_last {
                    true => captured.replay_telling(&inputs, &mut |learner, complete| learner.travel(arena, complete)),
                    false => captured.replay(&inputs),
                };
                let replay = replay.map_err(|error| behind(&batch[..at], error))?;
                let StepMetrics { loss, gradients, watched } = replay.outputs();
                let mut outputs = [Some(*loss), *gradients, *watched].into_iter().flatten();
                outputs.try_for_each(|output| replay.land(output, &mut landing))?;
            }
            captured.state_mut().fold(arena, (number, shard.is_empty()))?;
        }
        let learner = captured.state_mut();
        learner.sum(arena, Wanted::Watched)?;
        learner.update(arena, &mut |_, metric| metric.memory().land(&mut landing))?;
        landing.seal()?;
        Ok(plan.queued(Results::Landing(landing)))
    }

    /// Makes an update, or all of it but the optimiser's part, launch by launch.
    #[track_caller]
    pub(super) fn queue_eager<S: Samples>(&mut self, batch: &[S], update: bool) -> Result<Queued> {
        let plan = self.advance(batch, update)?;
        let Self { arena, stage, .. } = self;
        let learner = stage.learner_mut();
        let mut known = Vec::new();
        for (number, shard) in plan.shards.iter().enumerate() {
            for at in shard.clone() {
                let values = arena.step(|step| {
                    let inputs = step.upload_inputs(&batch[at].inputs()?)?;
                    let StepMetrics { loss, gradients, watched } =
                        learner.learn(step, &inputs, plan.part(shard, at))?;
                    let [gradients, watched] =
                        [gradients, watched].map(|norm| norm.map(|norm| step.read_scalar(&norm)).transpose());
                    Ok([Some(step.read_scalar(&loss)?), gradients?, watched?])
                });
                known.extend(values.map_err(|error| behind(&batch[..at], error))?.into_iter().flatten());
            }
            learner.fold(arena, (number, shard.is_empty()))?;
        }
        learner.sum(arena, if update { Wanted::Watched } else { Wanted::All })?;
        if update {
            learner.update(arena, &mut |step, metric| {
                known.push(step.read_scalar(metric)?);
                Ok(())
            })?;
        }
        Ok(plan.queued(Results::Known(known)))
    }

    /// Waits for the metrics of an update by `batch`.
    #[track_caller]
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
        let (losses, norms) = metrics.split_at(parts.len());
        let (gradients, watched) = norms.split_at(usize::from(updates));
        let loss = self.learner().loss_of_all(losses, norms)?;
        let finite = [
            (Quantity::Loss, float_mode::in_default(|| loss.is_finite())),
            (Quantity::GradientNorm, gradients.iter().all(|&squared| is_finite(squared))),
        ];
        finite
            .into_iter()
            .try_for_each(|(what, finite)| self.check(number, what, finite, || first_input(batch, parts.clone())))?;
        let watched_l2 = watched.first().map(|&squared| float_mode::in_default(|| f64::from(squared).sqrt()));
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
        let tensor = first_input()?.map_or_else(|| self.first_of_model(update, what), Ok)?;
        Err(Error::NotFinite { update: Some(update), what, tensor })
    }

    /// The first of gradients and weights, which may be those of a later update that was queued
    /// meanwhile. An evaluation has no gradients: those of the last update did not go into its
    /// loss.
    fn first_of_model(&self, update: u64, what: Quantity) -> Result<String> {
        let Learner { parameters, gradients, optimizer, .. } = self.learner();
        let made = optimizer.updates();
        let seen = match made > update {
            true => format!(", seen behind update {made}, which has overwritten those of update {update}"),
            false => String::new(),
        };
        parameters.first_not_finite((what != Quantity::EvaluationLoss).then_some(gradients), &seen)
    }

    /// [`Trainer::check_weights`] before the first update if the caller has given weights that
    /// nobody has checked, and before every [`CHECK_EVERY`]th update: a weight on which no loss
    /// depends shows nowhere else.
    pub(super) fn check_weights_at_times(&self) -> Result<()> {
        match self.updates_begun {
            0 if !self.learner().parameters.are_unchecked() => Ok(()),
            begun if begun.is_multiple_of(CHECK_EVERY) => self.check_weights(),
            _ => Ok(()),
        }
    }

    /// An error for the weights, if they are not finite and should be. Waits.
    pub(super) fn check_weights(&self) -> Result<()> {
        let Learner { parameters, optimizer, .. } = self.learner();
        if self.numbers == Numbers::Any {
            return Ok(());
        }
        parameters.check_finite(optimizer.updates())
    }

    /// Compares, once, all that decides the weights with the other ranks of the group.
    #[track_caller]
    pub(super) fn agree(&self) -> Result<()> {
        let learner = self.learner();
        let Some(shards) = &learner.shards else { return Ok(()) };
        shards.check(&learner.parameters, &learner.optimizer)?;
        shards.agree(|| {
            let mut settings = learner.settings(shards)?;
            settings.add("numbers that are not finite", format!("{:?}", self.numbers));
            Ok(settings)
        })
    }

    /// What of a batch runs here, once all ranks have agreed on the update and the optimiser is set up for it.
    #[track_caller]
    fn advance<S: Samples>(&mut self, batch: &[S], update: bool) -> Result<Plan> {
        let lens = batch.iter().map(Samples::len);
        let samples = lens.clone().try_fold(0usize, |sum, len| if len == 0 { None } else { sum.checked_add(len) });
        let Some(samples) = samples.filter(|samples| (1..=MicroBatch::MOST).contains(samples)) else {
            let expected = format!("samples in each part of a batch, at most {} in all", MicroBatch::MOST);
            return Err(Error::misuse("update", expected, format!("{:?}", lens.collect::<Vec<_>>())));
        };
        self.accumulated = false;
        self.agree()?;
        let short = self.shortage()?;
        let stop = self.stop.is_some_and(|flag| flag.load(Ordering::Relaxed));
        let learner = self.stage.learner_mut();
        let shards = match &mut learner.shards {
            None => match short {
                Some(shortage) => return Err(Error::MemoryShortage(Box::new(shortage))),
                None => std::iter::once(0..batch.len()).collect(),
            },
            Some(shards) => {
                let lens: Vec<usize> = batch.iter().map(Samples::len).collect();
                let own = shards.own(&lens)?;
                let settings = agreement::of_update(&learner.optimizer, &lens)?;
                self.stopped = shards.agree_on_update(samples, settings, (stop, short))?;
                own
            }
        };
        self.updates_begun += 1;
        let (number, sharded) = (learner.advance(shards[0].start)?, learner.shards.is_some());
        Ok(Plan { number, samples, shards, sharded, updates: update })
    }
}

/// An error of a part of a batch, with the sample's place in the batch: `before` are the parts before.
fn behind<S: Samples>(before: &[S], error: Error) -> Error {
    match error {
        Error::Label { sample, label, classes } => Error::Label { sample: place(before, sample), label, classes },
        other => other,
    }
}
