//! Runs the steps of an update, reads their metrics back, and reports updates that failed.

use super::batch::{MicroBatch, Update, first_input, place};
use super::host_batch::HostBatch;
use super::model::{GatheredSums, MOST_FIGURES, Model, StepMetrics, TrainState};
use super::setup::Trainer;
use super::stage::{Queued, Results, Stage};
use super::sync::{Ending, OwnParts};
use crate::optim::{UpdateRule, UpdateTicket};
use cuda_std::float_mode;
use std::ops::Range;
use std::panic::Location;
use std::sync::atomic::Ordering;
use stepscope_core::internals::{PinnedReadback, is_finite};
use stepscope_core::ops::Cast;
use stepscope_core::{Error, NonFinite, Quantity, Result};

/// The number of updates between two checks of all weights. Reading the weights of GPT-2 takes as
/// long as one update.
const CHECK_EVERY: u64 = 1000;

/// The parts of a batch that run on this rank.
struct Plan {
    number: u64,
    samples: usize,
    /// This rank's own parts in the order of the batch, one range per shard.
    shards: Vec<Range<usize>>,
    /// True in a group. There, no step updates the weights, and the gradients of each shard start
    /// from zero.
    is_shared: bool,
    /// True if the weights are updated.
    updates: bool,
    /// The ticket of the update, until it is used.
    ticket: Option<UpdateTicket>,
}

impl Plan {
    /// Returns the parts that run here, which are contiguous.
    fn parts(&self) -> Range<usize> {
        self.shards[0].start..self.shards[self.shards.len() - 1].end
    }

    /// Returns the micro-batch settings of part `at` of a shard, which has this many samples.
    fn part(&self, shard: &Range<usize>, at: usize, samples: usize) -> MicroBatch {
        let last = at + 1 == shard.end && !self.is_shared;
        MicroBatch { samples, batch: self.samples, first: at == shard.start, last, update: last && self.updates }
    }

    fn queued(&self, values: usize, metrics: Results) -> Queued {
        Queued {
            number: self.number,
            samples: self.samples,
            parts: self.parts(),
            values,
            updates: self.updates,
            metrics,
        }
    }
}

impl<M, R: UpdateRule> Trainer<'_, M, R> {
    /// Queues an update if steps are captured, or makes it if they are eager.
    #[track_caller]
    pub(super) fn queue<S: Cast>(&mut self, batch: &[impl HostBatch]) -> Result<Queued>
    where
        M: Model<S>,
    {
        self.check_weights_at_times()?;
        if matches!(self.stage, Stage::Eager(_)) {
            return self.queue_eager(batch, true);
        }
        let mut plan = self.advance(batch, true)?;
        let Self { arena, stage: Stage::Captured(captured), readbacks, .. } = self else {
            unreachable!("checked above")
        };
        let (words, mut values) = (plan.parts().len() * (1 + MOST_FIGURES) + 2, 1);
        let free = readbacks.pop().filter(|readback| readback.words() >= words);
        let mut readback = match free {
            Some(readback) => readback,
            None => PinnedReadback::new(arena.device(), words)?,
        };
        // In a group, an eager step makes the update after the replays.
        if let Some(ticket) = plan.ticket.take_if(|_| !plan.is_shared) {
            ticket.leave_to_replay();
        }
        for (number, shard) in plan.shards.iter().enumerate() {
            for at in shard.clone() {
                let inputs = batch[at].inputs()?.variant(plan.part(shard, at, batch[at].len()).variant());
                let is_last = number + 1 == plan.shards.len() && at + 1 == shard.end;
                let replay = match is_last {
                    true => captured.replay_telling(&inputs, &mut |state, complete| {
                        state.sync.buckets_ready(arena, &mut state.gradients, complete)
                    }),
                    false => captured.replay(&inputs),
                };
                let replay = replay.map_err(|error| behind(&batch[..at], error))?;
                let StepMetrics { loss, figures, gradients, monitored } = replay.outputs();
                values = 1 + figures.len();
                let norms = [*gradients, *monitored].into_iter().flatten();
                let mut outputs = [*loss].into_iter().chain(figures.iter().copied()).chain(norms);
                outputs.try_for_each(|output| replay.queue_readback(output, &mut readback))?;
            }
            let TrainState { sync, gradients, .. } = captured.state_mut();
            sync.shard_ready(arena, gradients, number, shard.is_empty())?;
        }
        if plan.is_shared {
            let state = captured.state_mut();
            state.sum_gradients(arena, GatheredSums::Monitored)?;
            if let Some(ticket) = plan.ticket.take() {
                state.update(arena, ticket, &mut |_, metric| readback.queue_copy(metric))?;
            }
        }
        readback.seal()?;
        Ok(plan.queued(values, Results::Queued(readback)))
    }

    /// Runs an update eagerly, with the optimizer's part only if `update` is set.
    #[track_caller]
    pub(super) fn queue_eager<S: Cast>(&mut self, batch: &[impl HostBatch], update: bool) -> Result<Queued>
    where
        M: Model<S>,
    {
        let mut plan = self.advance(batch, update)?;
        let Self { arena, stage, .. } = self;
        let state = stage.state_mut();
        let (mut known, mut values) = (Vec::new(), 1);
        for (number, shard) in plan.shards.iter().enumerate() {
            for at in shard.clone() {
                let part = plan.part(shard, at, batch[at].len());
                let ticket = plan.ticket.take_if(|_| part.update);
                let (own, norms) = arena
                    .step(|step| {
                        let inputs = step.upload_inputs(&batch[at].inputs()?)?;
                        let StepMetrics { loss, figures, gradients, monitored } =
                            state.learn(step, &inputs, part, ticket)?;
                        let [gradients, monitored] =
                            [gradients, monitored].map(|norm| norm.map(|norm| step.read_scalar(&norm)).transpose());
                        let own = std::iter::once(&loss).chain(&figures).map(|value| step.read_scalar(value));
                        Ok((own.collect::<Result<Vec<_>>>()?, [gradients?, monitored?]))
                    })
                    .map_err(|error| behind(&batch[..at], error))?;
                values = own.len();
                known.extend(own.into_iter().chain(norms.into_iter().flatten()));
            }
            state.sync.shard_ready(arena, &mut state.gradients, number, shard.is_empty())?;
        }
        if plan.is_shared {
            state.sum_gradients(arena, if update { GatheredSums::Monitored } else { GatheredSums::All })?;
            if let Some(ticket) = plan.ticket.take() {
                state.update(arena, ticket, &mut |step, metric| {
                    known.push(step.read_scalar(metric)?);
                    Ok(())
                })?;
            }
        }
        Ok(plan.queued(values, Results::Known(known)))
    }

    /// Waits for the metrics of an update by `batch`.
    #[track_caller]
    pub(super) fn wait_for_update<B: HostBatch>(&mut self, queued: Queued, batch: &[B]) -> Result<Update> {
        let Queued { number, samples, parts, values, updates, metrics } = queued;
        let metrics = match metrics {
            Results::Known(metrics) => metrics,
            Results::Queued(mut readback) => {
                let metrics = readback.wait(self.arena.deadline())?;
                self.readbacks.push(readback);
                metrics
            }
        };
        let (own, norms) = metrics.split_at(values * parts.len());
        let (gradients, monitored) = norms.split_at(usize::from(updates));
        let all = self.state().sync.losses(own, norms, Location::caller())?;
        let share = |part: &B| part.len() as f64 / samples as f64;
        let values = all.len() / batch.len();
        let mean = |at: usize| {
            let each = all.chunks_exact(values).zip(batch);
            float_mode::in_default(|| each.map(|(values, part)| f64::from(values[at]) * share(part)).sum())
        };
        let (loss, figures): (f64, Vec<f64>) = (mean(0), (1..values).map(mean).collect());
        let finite = [
            (Quantity::Loss, float_mode::in_default(|| loss.is_finite())),
            (Quantity::GradientNorm, gradients.iter().all(|&squared| is_finite(squared))),
        ];
        finite
            .into_iter()
            .try_for_each(|(what, finite)| self.check(number, what, finite, || first_input(batch, parts.clone())))?;
        let [gradient_l2, monitored_l2] = [gradients, monitored]
            .map(|squared| squared.first().map(|&squared| float_mode::in_default(|| f64::from(squared).sqrt())));
        Ok(Update { number, samples, loss, figures, gradient_l2, monitored_l2 })
    }

    /// Returns an error if a metric of an update, or of the evaluation after it, must be finite and
    /// is not. The error names the first non-finite tensor that can still be inspected, in the
    /// order batch inputs, gradients, weights.
    pub(super) fn check(
        &self,
        update: u64,
        what: Quantity,
        finite: bool,
        first_input: impl FnOnce() -> Result<Option<String>>,
    ) -> Result<()> {
        if finite || self.non_finite == NonFinite::Allow {
            return Ok(());
        }
        let tensor = first_input()?.map_or_else(|| self.first_of_model(update, what), Ok)?;
        Err(Error::NotFinite { update: Some(update), what, tensor })
    }

    /// Finds the first non-finite gradient or weight. These may belong to a later update that was
    /// queued meanwhile. An evaluation checks no gradients, because those of the last update did
    /// not enter its loss.
    fn first_of_model(&self, update: u64, what: Quantity) -> Result<String> {
        let TrainState { parameters, gradients, optimizer, .. } = self.state();
        let made = optimizer.updates();
        let seen = match made > update {
            true => format!(", found after update {made}, which has overwritten those of update {update}"),
            false => String::new(),
        };
        parameters.first_not_finite((what != Quantity::EvaluationLoss).then_some(gradients), &seen)
    }

    /// Calls [`Trainer::check_weights`] before every [`CHECK_EVERY`]th update, and before the first
    /// one if the caller loaded unchecked weights. A non-finite weight that does not affect the
    /// loss shows nowhere else.
    pub(super) fn check_weights_at_times(&self) -> Result<()> {
        match self.updates_begun {
            0 if !self.state().parameters.are_unchecked() => Ok(()),
            begun if begun.is_multiple_of(CHECK_EVERY) => self.check_weights(),
            _ => Ok(()),
        }
    }

    /// Returns an error if the weights must be finite and are not. Waits for the device.
    pub(super) fn check_weights(&self) -> Result<()> {
        let TrainState { parameters, optimizer, .. } = self.state();
        if self.non_finite == NonFinite::Allow {
            return Ok(());
        }
        parameters.check_finite(optimizer.updates())
    }

    /// Compares everything that decides the weights with the other ranks of the group, once.
    #[track_caller]
    pub(super) fn agree(&self) -> Result<()> {
        let state = self.state();
        let settings = |shards| {
            let mut settings = state.settings(shards)?;
            settings.add("non-finite values", format!("{:?}", self.non_finite));
            Ok(settings)
        };
        state.sync.agree_on_settings(&state.parameters, &state.optimizer, &settings, Location::caller())
    }

    /// Agrees on the update with all ranks, prepares the optimizer for it, and returns the parts of
    /// the batch to run here.
    #[track_caller]
    fn advance<B: HostBatch>(&mut self, batch: &[B], update: bool) -> Result<Plan> {
        let lens: Vec<usize> = batch.iter().map(HostBatch::len).collect();
        let samples = lens.iter().try_fold(0usize, |sum, &len| if len == 0 { None } else { sum.checked_add(len) });
        let Some(samples) = samples.filter(|samples| (1..=MicroBatch::MOST).contains(samples)) else {
            let expected = format!("samples in each part of a batch, at most {} in all", MicroBatch::MOST);
            return Err(Error::misuse("update", expected, format!("{lens:?}")));
        };
        self.accumulated = false;
        self.agree()?;
        let stop = self.stop.is_some_and(|flag| flag.load(Ordering::Relaxed));
        let ending = Ending { stop, short: self.shortage()? };
        let state = self.stage.state_mut();
        let own = state.sync.own_parts(&state.optimizer, &lens, ending, Location::caller())?;
        let OwnParts { shards, stop } = own;
        self.stopped = stop;
        self.updates_begun += 1;
        let ((number, ticket), is_shared) = (state.advance(shards[0].start)?, state.sync.is_group());
        Ok(Plan { number, samples, shards, is_shared, updates: update, ticket: update.then_some(ticket) })
    }
}

/// Corrects the sample index of an error from a part of a batch to its index in the whole batch.
/// `before` are the earlier parts.
fn behind<B: HostBatch>(before: &[B], error: Error) -> Error {
    match error {
        Error::Label { sample, label, classes } => Error::Label { sample: place(before, sample), label, classes },
        other => other,
    }
}
