//! Fits a model to batches, makes single updates, half updates and evaluations, and saves and
//! restores checkpoints.

#![forbid(unsafe_code)]

use super::batch::{CAPABILITY, DROPOUT_SEED, EpochProgress, PROGRESS, Update, first_input};
use super::host_batch::{HostBatch, IntoBatch};
use super::model::{LABELS, Model, TrainState};
use super::setup::Trainer;
use super::stage::Queued;
use crate::checkpoint::Checkpoint;
use crate::optim::{State, UpdateRule};
use cuda_std::float_mode;
use std::panic::Location;
use std::slice;
use std::sync::atomic::Ordering;
use stepscope_core::internals::is_finite;
use stepscope_core::ops::Cast;
use stepscope_core::{Arena, EagerStep, Error, MemoryShortage, Quantity, Result, Saved, Var, ops};

/// Receives callbacks while an epoch runs. The default functions do nothing.
pub trait Observer {
    /// Receives each finished update, while the next one may already be running. `_arena` is passed
    /// for its report.
    ///
    /// # Errors
    /// An error that this function returns ends the epoch, and `fit_with` returns it.
    fn updated(&mut self, _update: &Update, _progress: &EpochProgress, _arena: &Arena) -> Result<()> {
        Ok(())
    }

    /// Returns notes of the caller's own to store in each checkpoint.
    fn notes(&self) -> Vec<(&str, String)> {
        Vec::new()
    }
}

impl Observer for () {}

/// The way in which an epoch ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// All batches were trained on.
    Finished,
    /// The stop flag was set. The running update has finished, and the checkpoint is written if a
    /// path is set.
    Stopped,
}

impl<M, R: UpdateRule> Trainer<'_, M, R> {
    /// Updates the weights once by a batch. Each part of the batch is a step, and the gradients of
    /// all parts are added up. Waits for the update.
    ///
    /// # Errors
    /// [`Error::Misuse`] for a batch or part without samples. [`Error::Label`] for a label that is
    /// not a class, with its sample's index in the batch. Any error of the steps. After these the
    /// weights are those of the previous update, unless the device is lost or only the readback of
    /// the loss failed.
    ///
    /// [`Error::NotFinite`] if the loss or the gradients' norm is not finite. The update has then
    /// been made, and the weights are worthless. All weights are also checked before every
    /// thousandth update, and before the first one if they were loaded unchecked. If that check
    /// fails, the update is not made.
    #[track_caller]
    pub fn update<S: Cast>(&mut self, batch: &[impl HostBatch]) -> Result<Update>
    where
        M: Model<S>,
    {
        let update = match self.queue(batch) {
            Ok(queued) => self.wait_for_update(queued, batch),
            Err(error) => Err(error),
        };
        self.share_error(update)
    }

    /// Trains on batches, one update each (see [`Trainer::update`]), and returns the number of
    /// updates and their mean loss. A batch is a [`HostBatch`], a `Vec` of them as the parts of one
    /// batch, or a `Result` of either. This is [`Trainer::fit_with`] from the start of an epoch,
    /// without an observer.
    ///
    /// # Errors
    /// The errors of [`Trainer::fit_with`].
    #[track_caller]
    pub fn fit<S: Cast, I: IntoBatch>(&mut self, batches: impl IntoIterator<Item = I>) -> Result<EpochProgress>
    where
        M: Model<S>,
    {
        let mut progress = EpochProgress::default();
        self.fit_with(batches, &mut progress, &mut ())?;
        Ok(progress)
    }

    /// Trains on batches like [`Trainer::fit`], starting from `progress`, and calls `observer`
    /// after each update. The caller must already have skipped the batches that `progress` counts.
    /// Returns after the last batch. If the stop flag is set, it first writes a checkpoint and then
    /// returns. Before it returns, it checks that all weights are finite.
    ///
    /// # Errors
    /// The first error of the batches, of [`Trainer::update`], of [`Trainer::save`] or of the
    /// observer. After [`Error::NotFinite`], the update that produced the non-finite value is not
    /// counted, and one more update may have been made. After [`Error::MemoryShortage`], the
    /// checkpoint has been written if a path is set.
    #[track_caller]
    pub fn fit_with<S: Cast, I: IntoBatch>(
        &mut self,
        batches: impl IntoIterator<Item = I>,
        progress: &mut EpochProgress,
        observer: &mut impl Observer,
    ) -> Result<Ended>
    where
        M: Model<S>,
    {
        let mut running = None;
        let ended = self.run(batches, &mut running, progress, observer);
        // After an error in a group, the other ranks may be in an update that this rank does not
        // make. They need the error, and would not take part in the report.
        let reports = match &ended {
            Ok(_) => true,
            Err(Error::NotFinite { .. }) => false,
            Err(_) => self.state().sync.ranks() == 1,
        };
        // Updates that were queued before an error are still reported.
        let reported = match running {
            Some(last) if reports => self.report(last, progress, observer),
            _ => Ok(()),
        };
        let ended = match (ended, reported) {
            (Ok(ended), Ok(())) => self.check_weights().map(|()| ended),
            (Err(error), _) | (_, Err(error)) => Err(error),
        };
        self.share_error(ended)
    }

    /// Queues each batch before it reports the previous one, and leaves the last one running. Each
    /// batch is kept until it is reported.
    #[track_caller]
    fn run<S: Cast, I: IntoBatch>(
        &mut self,
        batches: impl IntoIterator<Item = I>,
        running: &mut Option<(Queued, Vec<I::Part>)>,
        progress: &mut EpochProgress,
        observer: &mut impl Observer,
    ) -> Result<Ended>
    where
        M: Model<S>,
    {
        for batch in batches {
            let batch = batch.into_batch()?;
            let queued = match self.queue(&batch) {
                Err(Error::MemoryShortage(shortage)) => return self.end_short(shortage, running, progress, observer),
                queued => queued?,
            };
            if let Some(before) = running.replace((queued, batch)) {
                self.report(before, progress, observer)?;
            }
            let stop = self.stopped || self.stop.is_some_and(|flag| flag.load(Ordering::Relaxed)) && !self.is_shared();
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

    /// Writes a checkpoint and ends an epoch whose next update cannot begin. In a group, saving
    /// needs all ranks, so it saves only if all ranks received the shortage.
    #[track_caller]
    fn end_short<B: HostBatch>(
        &mut self,
        shortage: Box<MemoryShortage>,
        running: &mut Option<(Queued, Vec<B>)>,
        progress: &mut EpochProgress,
        observer: &mut impl Observer,
    ) -> Result<Ended> {
        if let Some(last) = running.take() {
            self.report(last, progress, observer)?;
        }
        if !self.is_shared() || shortage.rank.is_some() {
            self.save(progress, &observer.notes())?;
        }
        Err(Error::MemoryShortage(shortage))
    }

    /// Waits for an update, counts it and calls the observer.
    #[track_caller]
    fn report<B: HostBatch>(
        &mut self,
        (queued, batch): (Queued, Vec<B>),
        progress: &mut EpochProgress,
        observer: &mut impl Observer,
    ) -> Result<()> {
        let update = self.wait_for_update(queued, &batch)?;
        progress.add(&update);
        observer.updated(&update, progress, &self.arena)
    }

    /// Computes the gradients of a batch without updating the weights, in eager steps. It is for
    /// callers that inspect the gradients, or the memory of the steps. [`Trainer::apply`] must
    /// follow.
    #[track_caller]
    pub fn accumulate<S: Cast>(&mut self, batch: &[impl HostBatch]) -> Result<Update>
    where
        M: Model<S>,
    {
        let metrics = match self.queue_eager(batch, false) {
            Ok(queued) => self.wait_for_update(queued, batch),
            Err(error) => Err(error),
        };
        self.accumulated = metrics.is_ok();
        self.share_error(metrics)
    }

    /// Makes the update that [`Trainer::accumulate`] left out. Waits for it.
    ///
    /// # Errors
    /// [`Error::Misuse`] unless `accumulate` succeeded and no update followed it.
    /// [`Error::NotFinite`] if the gradients' norm is not finite.
    #[track_caller]
    pub fn apply(&mut self) -> Result<()> {
        if !self.accumulated {
            return Err(Error::misuse("apply", "a successful `accumulate`, and no update since", "none"));
        }
        let mut metrics = Vec::new();
        let state = self.stage.state_mut();
        let applied = state.optimizer.advance().and_then(|ticket| {
            state.update(&mut self.arena, ticket, &mut |step, metric| {
                metrics.push(step.read_scalar(metric)?);
                Ok(())
            })
        });
        self.share_error(applied)?;
        self.accumulated = false;
        let update = self.state().optimizer.updates();
        self.check(update, Quantity::GradientNorm, is_finite(metrics[0]), || Ok(None))
    }

    /// Returns `result` unchanged. In a group, it first sends an error to all ranks.
    fn share_error<T>(&self, result: Result<T>) -> Result<T> {
        result.map_err(|error| self.state().sync.on_error(error))
    }

    fn is_shared(&self) -> bool {
        self.state().sync.is_group()
    }

    /// Returns the mean loss of the samples, in a step without gradients. The step multiplies with
    /// [`TrainState::precision`], as in training.
    ///
    /// # Errors
    /// [`Error::NotFinite`] if the loss is not finite. [`Error::Label`] for a label that is not a
    /// class.
    #[track_caller]
    pub fn evaluate<S: Cast>(&mut self, samples: &impl HostBatch) -> Result<f64>
    where
        M: Model<S>,
    {
        Ok(self.evaluate_with(samples, |_, _| Ok(()))?.0)
    }

    /// Evaluates like [`Trainer::evaluate`], and also returns the figures of
    /// [`Model::loss_with_figures`].
    ///
    /// # Errors
    /// The errors of [`Trainer::evaluate`].
    #[track_caller]
    pub fn evaluate_with_figures<S: Cast>(&mut self, samples: &impl HostBatch) -> Result<(f64, Vec<f64>)>
    where
        M: Model<S>,
    {
        self.evaluated(samples, |step, _, figures| {
            figures.iter().map(|figure| Ok(f64::from(step.read_scalar(figure)?))).collect()
        })
    }

    /// Evaluates like [`Trainer::evaluate`], and also returns the value that `read` makes of the
    /// model's output. Products in `read` have the precision of training, too.
    ///
    /// # Errors
    /// The errors of [`Trainer::evaluate`] and of `read`.
    #[track_caller]
    pub fn evaluate_with<S: Cast, T>(
        &mut self,
        samples: &impl HostBatch,
        read: impl for<'s> FnOnce(&EagerStep<'s>, &Var<'s, S>) -> Result<T>,
    ) -> Result<(f64, T)>
    where
        M: Model<S>,
    {
        self.evaluated(samples, |step, output, _| read(step, output))
    }

    /// Evaluates like [`Trainer::evaluate_with`]. `read` also gets the model's figures.
    #[track_caller]
    fn evaluated<S: Cast, T>(
        &mut self,
        samples: &impl HostBatch,
        read: impl for<'s> FnOnce(&EagerStep<'s>, &Var<'s, S>, &[Saved<'s>]) -> Result<T>,
    ) -> Result<(f64, T)>
    where
        M: Model<S>,
    {
        let (state, inputs) = (self.stage.state(), samples.inputs()?);
        if samples.len() > self.evaluated {
            self.arena.make_room(|arena| arena.measure(|step| state.evaluate(step, &inputs).map(drop)))?;
            self.evaluated = samples.len();
        }
        let (loss, made) = self.arena.step(|step| {
            let (output, loss, figures) = state.evaluate(step, &inputs)?;
            Ok((f64::from(step.read_scalar(loss.value())?), read(step, &output, &figures)?))
        })?;
        let update = self.state().optimizer.updates();
        let finite = float_mode::in_default(|| loss.is_finite());
        self.check(update, Quantity::EvaluationLoss, finite, || first_input(slice::from_ref(samples), 0..1))?;
        Ok((loss, made))
    }

    /// Evaluates a classifier: returns the mean loss of the samples and the number of samples that
    /// are classified correctly. The model's output is `[samples, classes]`, and the labels are the
    /// batch's input 1. A sample is correct if the largest value of its row is in its label's
    /// column. Among equal values the first one counts.
    ///
    /// # Errors
    /// [`Error::Misuse`] unless there is one label and one output row per sample.
    #[track_caller]
    pub fn evaluate_classes<S: Cast>(&mut self, samples: &impl HostBatch) -> Result<(f64, usize)>
    where
        M: Model<S>,
    {
        let labels = samples.inputs()?.indices(LABELS)?;
        let (loss, guesses) = self.evaluate_with(samples, |step, output| {
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

    /// Writes the weights, optimizer, dropout seed, compute capability, progress and notes to the
    /// checkpoint path, or does nothing without a path. In a group all ranks must call it, each
    /// with a path set, and rank 0 writes the file. Waits for the device.
    #[track_caller]
    pub fn save(&self, progress: &EpochProgress, notes: &[(&str, String)]) -> Result<()> {
        let Some(path) = &self.checkpoint else { return Ok(()) };
        let TrainState { parameters, optimizer, generator, sync, .. } = self.state();
        let mut notes = [&[(PROGRESS, progress.to_string())], notes].concat();
        notes.extend(generator.iter().map(|generator| (DROPOUT_SEED, generator.seed().to_string())));
        notes.extend(self.state().deciding_capability().map(|capability| (CAPABILITY, capability.to_string())));
        let write =
            |state: &[State]| Checkpoint::save_whole(path, parameters, Some(optimizer), state, &notes, self.non_finite);
        let saved = match self.agree() {
            Ok(()) => sync.save(parameters, optimizer, &write, Location::caller()),
            Err(error) => Err(error),
        };
        self.share_error(saved)
    }

    /// Restores the weights, optimizer and dropout seed, and returns the epoch's progress. In a
    /// group every rank reads the same file. Any number of ranks may have written that file.
    ///
    /// # Errors
    /// [`Error::File`] if the train state has dropout and the file has no seed.
    #[track_caller]
    pub fn restore(&mut self, checkpoint: &Checkpoint) -> Result<EpochProgress> {
        let restored = self.stage.state_mut().restore(checkpoint, self.non_finite, Location::caller());
        self.share_error(restored)
    }
}
