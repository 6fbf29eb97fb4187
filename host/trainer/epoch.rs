//! What a trainer does: an epoch of updates, one update, its halves, an evaluation, a checkpoint.

#![forbid(unsafe_code)]

use super::batch::{DROPOUT_SEED, EpochProgress, PROGRESS, Samples, Update, dropout_seed, first_input};
use super::model::{Learner, Model};
use super::setup::Trainer;
use super::stage::Queued;
use crate::autograd::{Tape, Var};
use crate::checkpoint::Checkpoint;
use crate::error::{Error, Quantity, Result};
use crate::finite::is_finite;
use crate::group::agreement::Settings;
use crate::memory::Arena;
use crate::ops;
use crate::optim::UpdateRule;
use crate::shortage::MemoryShortage;
use crate::step::Eager;
use crate::upload::Transfer;
use cuda_std::float_mode;
use std::panic::Location;
use std::slice;
use std::sync::atomic::Ordering;

/// Hears of an epoch while it runs. Every function has a default that does nothing.
pub trait Observer {
    /// An update is done; the next one may be running. The arena is there for its report.
    ///
    /// # Errors
    /// Its error ends the epoch and is the epoch's.
    fn updated(&mut self, _update: &Update, _progress: &EpochProgress, _arena: &Arena) -> Result<()> {
        Ok(())
    }

    /// What the caller wants to find in a checkpoint again.
    fn notes(&self) -> Vec<(&str, String)> {
        Vec::new()
    }
}

impl Observer for () {}

/// How an epoch ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// All batches were trained on.
    Finished,
    /// The stop flag was set; the update that was running is done, and the checkpoint is written if there is a path for one.
    Stopped,
}

impl<M: Model, R: UpdateRule> Trainer<'_, M, R> {
    /// One update of the weights by a batch, which is given in parts: each is a step, and their gradients are added up. Waits.
    ///
    /// # Errors
    /// [`Error::Misuse`] for no samples; [`Error::Label`] for a label that is no class, by its place in the batch; those of the steps: the
    /// weights are then those of the update before, unless the device is lost or only the loss did not come back. [`Error::NotFinite`]
    /// when the loss or the gradients' norm is not finite: the update is made, and the weights are
    /// worthless. All weights are checked before every thousandth update, and before the first one
    /// if they were given unchecked: no update is made then.
    #[track_caller]
    pub fn update(&mut self, batch: &[impl Samples]) -> Result<Update> {
        let update = self.update_by(batch);
        self.told(update)
    }

    #[track_caller]
    fn update_by(&mut self, batch: &[impl Samples]) -> Result<Update> {
        self.check_weights_at_times()?;
        let queued = self.queue(batch)?;
        self.wait_for_update(queued, batch)
    }

    /// Trains on batches, each an update (see [`Trainer::update`]), from where `progress` is: the caller has skipped the batches that
    /// it counts. Returns behind the last batch or, behind a checkpoint, when the stop flag is set; looks at all weights then.
    ///
    /// # Errors
    /// The first of: an error among the batches; those of [`Trainer::update`] and [`Trainer::save`]; the observer's. With
    /// [`Error::NotFinite`] the update that made such a number is not counted, and one more may have been made behind it. Behind
    /// [`Error::MemoryShortage`] the checkpoint is written, if there is a path for one.
    #[track_caller]
    pub fn epoch<S: Samples>(
        &mut self,
        batches: impl IntoIterator<Item = Result<Vec<S>>>,
        progress: &mut EpochProgress,
        observer: &mut impl Observer,
    ) -> Result<Ended> {
        let ended = self.epoch_of(batches, progress, observer);
        self.told(ended)
    }

    #[track_caller]
    fn epoch_of<S: Samples>(
        &mut self,
        batches: impl IntoIterator<Item = Result<Vec<S>>>,
        progress: &mut EpochProgress,
        observer: &mut impl Observer,
    ) -> Result<Ended> {
        let mut running = None;
        let ended = self.run(batches, &mut running, progress, observer);
        if matches!(ended, Err(Error::NotFinite { .. })) {
            // What is queued behind it is not worth reporting.
            return ended;
        }
        if ended.is_err() && self.has_company() {
            // The others may be in an update that this rank does not make: they must hear of the error, and would not come to the report.
            return ended;
        }
        // What was queued before an error is done all the same.
        let reported = match running {
            Some(last) => self.report(last, progress, observer),
            None => Ok(()),
        };
        let ended = ended.and_then(|ended| reported.map(|()| ended))?;
        self.check_weights().map(|()| ended)
    }

    /// Queues each batch before it reports the one before; the last is left running. Batches are kept until they are reported.
    #[track_caller]
    fn run<S: Samples>(
        &mut self,
        batches: impl IntoIterator<Item = Result<Vec<S>>>,
        running: &mut Option<(Queued, Vec<S>)>,
        progress: &mut EpochProgress,
        observer: &mut impl Observer,
    ) -> Result<Ended> {
        for batch in batches {
            let batch = batch?;
            self.check_weights_at_times()?;
            let queued = match self.queue(&batch) {
                Err(Error::MemoryShortage(shortage)) => return self.end_short(shortage, running, progress, observer),
                queued => queued?,
            };
            if let Some(before) = running.replace((queued, batch)) {
                self.report(before, progress, observer)?;
            }
            let stop = self.stopped || self.stop.is_some_and(|flag| flag.load(Ordering::Relaxed)) && self.is_alone();
            let made = progress.updates + 1;
            if stop || self.every.is_some_and(|every| made.is_multiple_of(every)) {
                if let Some(last) = running.take() {
                    self.report(last, progress, observer)?;
                }
                self.save(progress, &observer.notes())?;
            }
            if stop {
                return Ok(Ended::Stopped);
            }
        }
        Ok(Ended::Finished)
    }

    /// Ends an epoch whose next update cannot begin, with a checkpoint. In a group that needs all ranks: they have it where all were told of
    /// the shortage.
    #[track_caller]
    fn end_short<S: Samples>(
        &mut self,
        shortage: Box<MemoryShortage>,
        running: &mut Option<(Queued, Vec<S>)>,
        progress: &mut EpochProgress,
        observer: &mut impl Observer,
    ) -> Result<Ended> {
        if let Some(last) = running.take() {
            self.report(last, progress, observer)?;
        }
        if self.is_alone() || shortage.rank.is_some() {
            self.save(progress, &observer.notes())?;
        }
        Err(Error::MemoryShortage(shortage))
    }

    /// Waits for an update, counts it and lets the observer hear of it.
    #[track_caller]
    fn report<S: Samples>(
        &mut self,
        (queued, batch): (Queued, Vec<S>),
        progress: &mut EpochProgress,
        observer: &mut impl Observer,
    ) -> Result<()> {
        let update = self.wait_for_update(queued, &batch)?;
        progress.add(&update);
        observer.updated(&update, progress, self.arena)
    }

    /// The gradients of a batch without the update, by steps that run launch by launch: for callers that look at them, or at the
    /// memory of the steps. [`Trainer::apply`] must follow.
    ///
    /// # Errors
    /// As for [`Trainer::update`].
    #[track_caller]
    pub fn accumulate(&mut self, batch: &[impl Samples]) -> Result<Update> {
        let metrics = self.accumulate_of(batch);
        self.accumulated = metrics.is_ok();
        self.told(metrics)
    }

    #[track_caller]
    fn accumulate_of(&mut self, batch: &[impl Samples]) -> Result<Update> {
        let queued = self.queue_eager(batch, false)?;
        self.wait_for_update(queued, batch)
    }

    /// The update that [`Trainer::accumulate`] has left out. Waits.
    ///
    /// # Errors
    /// [`Error::Misuse`] when it has not been called, or is made already; [`Error::NotFinite`] as for [`Trainer::update`]; those of the step.
    #[track_caller]
    pub fn apply(&mut self) -> Result<()> {
        if !self.accumulated {
            return Err(Error::misuse("apply", "an `accumulate` that has succeeded, and no update since", "none"));
        }
        let applied = self.apply_accumulated();
        let squared = self.told(applied)?;
        self.accumulated = false;
        let update = self.learner().optimizer.updates();
        self.check(update, Quantity::GradientNorm, is_finite(squared), || Ok(None))
    }

    /// Makes the update, and returns the squared norm of all gradients.
    #[track_caller]
    fn apply_accumulated(&mut self) -> Result<f32> {
        let Self { arena, stage, .. } = self;
        let learner = stage.learner_mut();
        if learner.shards.is_some() {
            let mut metrics = Vec::new();
            learner.update(arena, &mut |step, metric| {
                metrics.push(step.read_scalar(metric)?);
                Ok(())
            })?;
            return Ok(metrics[0]);
        }
        let Learner { parameters, gradients, optimizer, .. } = learner;
        arena.step(|step| step.read_scalar(&optimizer.apply_with_norm(step, parameters, gradients)?))
    }

    /// The same result. In a group an error is told to all ranks.
    fn told<T>(&self, result: Result<T>) -> Result<T> {
        match (&self.learner().shards, &result) {
            // All ranks end with it.
            (Some(_), Err(Error::MemoryShortage(shortage))) if shortage.rank.is_some() => result,
            (Some(shards), _) => shards.group().told(result),
            (None, _) => result,
        }
    }

    fn is_alone(&self) -> bool {
        self.learner().shards.is_none()
    }

    fn has_company(&self) -> bool {
        self.learner().shards.as_ref().is_some_and(|shards| shards.group().ranks() > 1)
    }

    /// The sum of the samples' losses, and what `read` makes of the model's output, in a step without gradients. Multiplies are those
    /// of training: [`Learner::precision`] holds for them, and for what `read` multiplies.
    ///
    /// # Errors
    /// [`Error::NotFinite`] when the sum is not finite; [`Error::Label`] for a label that is no class; those of the step.
    #[track_caller]
    pub fn evaluate<T>(
        &mut self,
        samples: &impl Samples,
        read: impl for<'s> FnOnce(&Eager<'s>, &Var<'s>) -> Result<T>,
    ) -> Result<(f64, T)> {
        let Learner { model, parameters, precision, .. } = self.stage.learner();
        let (loss, made) = self.arena.step(|step| {
            step.set_precision(*precision);
            let batch = step.upload_inputs(&samples.inputs()?)?;
            let tape = Tape::new(step, parameters).evaluating();
            let output = model.forward(&tape, &batch)?;
            let loss = model.loss(&tape, &output, &batch, 1.0)?;
            Ok((f64::from(step.read_scalar(loss.value())?), read(step, &output)?))
        })?;
        let update = self.learner().optimizer.updates();
        let finite = float_mode::in_default(|| loss.is_finite());
        self.check(update, Quantity::EvaluationLoss, finite, || first_input(slice::from_ref(samples), 0..1))?;
        Ok((loss, made))
    }

    /// [`Trainer::evaluate`] of a classifier: the sum of the samples' losses, and how many samples are told right. The model's output is
    /// `[samples, classes]`; a sample is right if the largest of its row, of equal ones the first, is in the column of its label.
    ///
    /// # Errors
    /// As for [`Trainer::evaluate`]; [`Error::Misuse`] unless there is a label for each sample, and a row.
    #[track_caller]
    pub fn evaluate_classes(&mut self, samples: &impl Samples, labels: &[u32]) -> Result<(f64, usize)> {
        let (loss, guesses) = self.evaluate(samples, |step, output| {
            let guesses = ops::argmax_columns(step, output.value())?;
            let (count, rows) = (samples.len(), guesses.shape().elements());
            if (count, count) != (labels.len(), rows) {
                let expected = format!("a label and a row of the output for each of {count} samples");
                return Err(Error::misuse("evaluate", expected, format!("{} labels and {rows} rows", labels.len())));
            }
            step.read(&guesses)
        })?;
        Ok((loss, guesses.iter().zip(labels).filter(|(guess, label)| guess == label).count()))
    }

    /// Writes weights, optimiser, dropout's seed, progress and notes to the checkpoint's path; does nothing without one. In a group all ranks
    /// call it, each with a path, and rank 0 writes. Waits.
    ///
    /// # Errors
    /// As for [`Checkpoint::save`].
    #[track_caller]
    pub fn save(&self, progress: &EpochProgress, notes: &[(&str, String)]) -> Result<()> {
        let Some(path) = &self.checkpoint else { return Ok(()) };
        let Learner { parameters, optimizer, generator, shards, .. } = self.learner();
        let mut notes = [&[(PROGRESS, progress.to_string())], notes].concat();
        notes.extend(generator.iter().map(|generator| (DROPOUT_SEED, generator.seed().to_string())));
        match shards {
            None => Checkpoint::save_with(path, parameters, Some(optimizer), &notes, self.numbers),
            Some(shards) => {
                let agreed = self.agree();
                self.told(agreed)?;
                self.told(shards.save(optimizer, |state| {
                    Checkpoint::save_whole(path, parameters, (Some(optimizer), state), &notes, self.numbers)
                }))
            }
        }
    }

    /// Puts weights, optimiser and dropout's seed back, and returns how far the epoch was. In a group every rank reads the same file, which
    /// any number of ranks may have written.
    ///
    /// # Errors
    /// As for [`Checkpoint::restore`]; [`Error::File`] when the learner has dropout and the file has no seed.
    #[track_caller]
    pub fn restore(&mut self, checkpoint: &Checkpoint) -> Result<EpochProgress> {
        let restored = self.restore_from(checkpoint);
        self.told(restored)
    }

    #[track_caller]
    fn restore_from(&mut self, checkpoint: &Checkpoint) -> Result<EpochProgress> {
        let progress = EpochProgress::of(checkpoint)?;
        let Learner { parameters, optimizer, generator, shards, .. } = self.stage.learner_mut();
        let seed = generator.as_ref().map(|_| dropout_seed(checkpoint)).transpose()?;
        if let Some(shards) = shards {
            let mut settings = Settings::default();
            settings.add("checkpoint", checkpoint.digest()?);
            shards.group().compare("restore", &settings, Location::caller())?;
            shards.restored();
        }
        // A checkpoint does not know of slices.
        let slices = optimizer.slices().to_vec();
        optimizer.keep(std::iter::once(0..parameters.layout().elements()).collect())?;
        let restored = checkpoint.restore_with(parameters, Some(optimizer), Transfer::new().numbers(self.numbers));
        optimizer.keep(slices)?;
        restored?;
        if let (Some(generator), Some(seed)) = (generator, seed) {
            // The next update sets the step.
            generator.set(seed, 0)?;
        }
        Ok(progress)
    }
}
