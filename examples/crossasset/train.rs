//! Training: folds, epochs, traces of the first batches, validation, and checkpoints.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use serde::{Deserialize, Serialize};
use stepscope::check::MemoryRecorder;
use stepscope::files::replace_file;
use stepscope::group::Group;
use stepscope::ops::Activation;
use stepscope::optim::Schedule;
use stepscope::train::{Ended, Observer, ProgressBar, Update};
use stepscope::{AdamW, Arena, Checkpoint, EpochProgress, Error, HostBatch, Result, TrainState, Trainer, bf16};

use crate::bars::shown;
use crate::cli::{Args, Switch};
use crate::dataset::{Dataset, Fold};
use crate::model::Model;
use crate::report::{BATCHES_KEPT, BatchResult, EpochResult};
use crate::samples::{self, Cut, MicroBatch};
use crate::trace::Trace;
use stepscope_cli::program::log::Log;
use stepscope_cli::program::ranks::Rank;
use stepscope_cli::program::settings::{self as shared_settings, Settings};
use stepscope_cli::program::signals;
use stepscope_cli::program::stored_as::StoredAs;
use stepscope_cli::program::usage::{CaptureUse, MemoryUse};

/// The name of the checkpoint's note that holds [`Position`].
const POSITION: &str = "crossasset.position";
/// The name of the checkpoint's note that holds [`settings`].
const SETTINGS: &str = "crossasset.settings";
/// The most characters of a note that a message shows.
const SHOWN: usize = 1000;
/// The learning rate at the end of a fold, as a share of `--learning-rate`.
const FLOOR: f64 = 0.1;
/// The most memory events that are recorded. A batch of 256 steps of one sample has about 50,000.
const EVENTS: usize = 100_000;
/// The most updates over which the learning rate rises.
const WARMUP: u64 = 16;

/// The progress of a run. Together with the progress of its epoch, it suffices to resume with the
/// same bits and the same report.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Position {
    /// Finished epochs, in the order of training.
    pub(crate) epochs: Vec<EpochResult>,
    /// The first batches of the run.
    pub(crate) batches: Vec<BatchResult>,
}

/// A run over all folds.
pub(crate) struct Run<'r> {
    args: &'r Args,
    dataset: &'r Arc<Dataset>,
    rank: &'r Rank,
    group: Option<&'r Group>,
    stop: &'r AtomicBool,
    /// The path of the checkpoint.
    checkpoint: &'r Path,
    pub(crate) position: Position,
    /// Use of captured steps.
    pub(crate) captured: Option<CaptureUse>,
    pub(crate) memory_use: MemoryUse,
    /// The file for the memory events of a batch, until it is written.
    memory: Option<&'r PathBuf>,
}

/// The observer that shows an epoch and collects the report's figures.
struct Watch<'w> {
    bar: ProgressBar,
    settings: String,
    position: &'w mut Position,
}

impl Observer for Watch<'_> {
    fn updated(&mut self, update: &Update, progress: &EpochProgress, arena: &Arena) -> Result<()> {
        signals::update_is_made();
        if self.position.batches.len() < BATCHES_KEPT {
            let head_gradient_l2 = update.monitored_l2.unwrap_or(0.0);
            self.position.batches.push(BatchResult { loss: update.loss, head_gradient_l2 });
        }
        self.bar.updated(update, progress, arena)
    }

    fn notes(&self) -> Vec<(&str, String)> {
        let position = serde_json::to_string(&self.position).expect("plain numbers and lists have a JSON form");
        vec![(POSITION, position), (SETTINGS, self.settings.clone())]
    }
}

impl<'r> Run<'r> {
    /// Starts a new run, or continues what `resumed` holds. `stop` ends it after the current
    /// update.
    ///
    /// # Errors
    /// When the checkpoint was made with other settings, which would give other weights.
    pub(crate) fn new(
        args: &'r Args,
        dataset: &'r Arc<Dataset>,
        rank: &'r Rank,
        group: Option<&'r Group>,
        checkpoint: &'r Path,
        resumed: Option<&Checkpoint>,
        stop: &'r AtomicBool,
    ) -> Result<Self> {
        let position = |resumed| position(resumed, args, dataset, rank.shards());
        let position = resumed.map(position).transpose()?.unwrap_or_default();
        Ok(Self {
            args,
            dataset,
            rank,
            group,
            stop,
            checkpoint,
            position,
            captured: None,
            memory_use: MemoryUse::default(),
            memory: args.memory.as_ref(),
        })
    }

    /// Trains on the rest of the folds. Returns the digest of the weights, or none if it was
    /// stopped.
    ///
    /// # Errors
    /// When the device or the arena fails.
    pub(crate) fn train(&mut self, arena: &mut Arena, resumed: Option<Checkpoint>) -> Result<Option<String>> {
        match self.args.stored {
            StoredAs::F32 => self.train_folds::<f32>(arena, resumed),
            StoredAs::Bf16 => self.train_folds::<bf16>(arena, resumed),
        }
    }

    fn train_folds<S: Activation>(
        &mut self,
        arena: &mut Arena,
        mut resumed: Option<Checkpoint>,
    ) -> Result<Option<String>> {
        let (folds, epochs) = (self.args.folds, self.args.epochs);
        let mut sha256 = None;
        for (number, fold) in self.dataset.folds().iter().enumerate() {
            let (before, last) = (number * epochs, number + 1 == folds);
            let done = self.position.epochs.len();
            if done >= before + epochs && !last {
                continue;
            }
            let mut trainer = self.trainer::<S>(arena, fold)?;
            let mut progress = EpochProgress::default();
            // The checkpoint is within this fold, or at the end of the last one.
            if let Some(checkpoint) = resumed.take()
                && (done > before || EpochProgress::of(&checkpoint)?.updates > 0)
            {
                progress = trainer.restore(&checkpoint)?;
                self.check(&trainer, fold, done - before, progress)?;
            }
            for epoch in done.saturating_sub(before)..epochs {
                if self.epoch(&mut trainer, fold, epoch, progress)? == Ended::Stopped {
                    return Ok(None);
                }
                progress = EpochProgress::default();
            }
            if let Some(report) = trainer.capture_report() {
                self.captured = Some(CaptureUse::after(self.captured, report));
            }
            self.memory_use = MemoryUse::of(trainer.memory_forecast());
            sha256 = Some(trainer.state().parameters.sha256()?);
        }
        Ok(sha256)
    }

    /// Returns an error unless a run can have this progress and this many updates after this many
    /// epochs of a fold.
    fn check<S: Activation>(
        &self,
        trainer: &Trainer<'_, Model<S>>,
        fold: &Fold,
        epochs: usize,
        progress: EpochProgress,
    ) -> Result<()> {
        let (samples, batch) = (fold.train.len() as u64, self.args.batch as u64);
        let EpochProgress { updates, samples: done, .. } = progress;
        let counted = trainer.state().optimizer.updates();
        let expected = updates.checked_add(epochs as u64 * samples.div_ceil(batch));
        if updates <= samples.div_ceil(batch) && done == samples.min(updates * batch) && expected == Some(counted) {
            return Ok(());
        }
        let path = self.args.resume.clone().unwrap_or_default();
        let reason = format!(
            "damaged: {updates} updates with {done} samples of {samples} in batches of {batch}, after {epochs} epochs, should be \
             {counted} updates"
        );
        Err(Error::File { path, reason })
    }

    /// Creates the trainer with the initial weights and optimizer of a fold, and with `--capture
    /// on` the graph of its steps.
    fn trainer<'a, S: Activation>(&self, arena: &'a mut Arena, fold: &Fold) -> Result<Trainer<'a, Model<S>>>
    where
        'r: 'a,
    {
        let Args { seed, checkpoint_every, capture, precision, .. } = *self.args;
        let (model, spec) = Model::<S>::new()?;
        // The report records the gradient norm of the head's weight.
        let head = model.head.weight;
        let state = TrainState::new(arena.device(), model, &spec, seed, self.config(fold))?.with_monitored(head);
        let state = state.with_precision(precision);
        let state = self.rank.in_group(self.group, state)?;
        let trainer = match capture {
            Switch::Off => Trainer::eager(arena, state),
            Switch::On => {
                let largest = self.cut().largest(fold.train.len());
                let largest = MicroBatch::zeros(arena.device(), largest)?;
                Trainer::captured(arena, state, &largest)?
            }
        };
        Ok(trainer.checkpoint(self.checkpoint, checkpoint_every).stop_when(self.stop))
    }

    fn cut(&self) -> Cut {
        Cut { batch: self.args.batch, shards: self.rank.shards(), micro_batch: self.args.micro_batch() }
    }

    /// Returns this rank's log format.
    fn log(&self) -> Log {
        if self.rank.leads() { self.args.log } else { Log::Quiet }
    }

    fn config(&self, fold: &Fold) -> AdamW {
        let Args { batch, epochs, learning_rate, weight_decay, clip, .. } = *self.args;
        let total = (epochs * fold.train.len().div_ceil(batch)) as u64;
        AdamW {
            learning_rate,
            weight_decay,
            clip: Some(clip),
            schedule: Schedule::cosine(WARMUP.min(total / 10), total, FLOOR),
            ..AdamW::default()
        }
    }

    /// Trains on the rest of the fold's samples, validates, and writes the checkpoint.
    fn epoch<S: Activation>(
        &mut self,
        trainer: &mut Trainer<'_, Model<S>>,
        fold: &Fold,
        epoch: usize,
        mut progress: EpochProgress,
    ) -> Result<Ended> {
        let order = fold.epoch_order(self.args.seed, epoch).split_off(progress.samples as usize);
        let samples = order.len();
        let bar = self.log().shows(ProgressBar::new(format!("fold {}, epoch {epoch}", fold.index), samples));
        let device = trainer.arena().device().clone();
        let mut batches = samples::batches(&device, self.dataset, fold, order, self.cut(), self.group)?;
        let mut position = std::mem::take(&mut self.position);
        let settings = shared_settings::to_note(&settings(self.args, self.dataset, self.rank.shards()));
        let mut watch = Watch { bar, settings, position: &mut position };
        if fold.index == 0 && epoch == 0 {
            self.trace(trainer, fold, &mut batches, &mut progress, &mut watch)?;
        }
        let ended = trainer.fit_with(batches, &mut progress, &mut watch)?;
        if ended == Ended::Finished {
            let seconds = watch.bar.finish(&progress).as_secs_f64();
            let (valid_loss, valid_accuracy) = self.validate(trainer, fold)?;
            watch.position.epochs.push(EpochResult {
                fold: fold.index,
                epoch,
                train_loss: progress.mean_loss(),
                valid_loss,
                valid_accuracy,
                baseline_accuracy: fold.baseline_accuracy,
                seconds,
                samples_per_second: samples as f64 / seconds,
            });
            trainer.save(&EpochProgress::default(), &watch.notes())?;
        }
        self.position = position;
        Ok(ended)
    }

    /// Trains on the run's first batches while they are traced. Each of these updates is waited
    /// for.
    fn trace<S: Activation>(
        &mut self,
        trainer: &mut Trainer<'_, Model<S>>,
        fold: &Fold,
        batches: &mut impl Iterator<Item = Result<Vec<MicroBatch>>>,
        progress: &mut EpochProgress,
        watch: &mut Watch<'_>,
    ) -> Result<()> {
        let mut trace = self.args.trace.as_ref().map(|path| Trace::new(path.clone(), &self.config(fold)));
        while trace.is_some() || self.memory.is_some() {
            let Some(batch) = batches.next().transpose()? else { return Ok(()) };
            let recorder = self.memory.map(|_| MemoryRecorder::start(trainer.arena(), EVENTS));
            let update = trainer.accumulate(&batch)?;
            if let Some(trace) = &mut trace {
                trace.before_update(&batch, update.loss as f32, trainer.state())?;
            }
            trainer.apply()?;
            if let Some(traced) = &mut trace
                && traced.after_update(trainer.state())?
            {
                trace = None;
            }
            if let (Some(path), Some(recorder)) = (self.memory.take(), recorder) {
                replace_file(path, &recorder.recording().pickle())?;
            }
            progress.add(&update);
            watch.updated(&update, progress, trainer.arena())?;
        }
        Ok(())
    }

    /// Returns the mean loss and the accuracy over the fold's validation samples.
    fn validate<S: Activation>(&self, trainer: &mut Trainer<'_, Model<S>>, fold: &Fold) -> Result<(f64, f64)> {
        let samples: Vec<usize> = fold.valid.clone().collect();
        let (mut loss, mut right, all) = (0.0, 0, samples.len() as f64);
        let cut = Cut { batch: self.args.batch, shards: 1, micro_batch: self.args.batch };
        let device = trainer.arena().device().clone();
        for batch in samples::batches(&device, self.dataset, fold, samples, cut, None)? {
            for batch in batch? {
                let (mean, correct) = trainer.evaluate_classes(&batch)?;
                (loss, right) = (loss + mean * batch.len() as f64, right + correct);
            }
        }
        Ok((loss / all, right as f64 / all))
    }
}

/// Reads the position from a checkpoint.
fn position(checkpoint: &Checkpoint, args: &Args, dataset: &Dataset, shards: usize) -> Result<Position> {
    let refused = |reason| Error::File { path: args.resume.clone().unwrap_or_default(), reason };
    let theirs = shared_settings::note(checkpoint, SETTINGS).map_err(refused)?;
    shared_settings::compare(theirs, &settings(args, dataset, shards)).map_err(|reason| {
        refused(format!(
            "{reason}\nTo continue this run, use the checkpoint's settings, and the same bars in the same order. For more \
             epochs, other bars or other settings, start a new run without --resume and with another --out"
        ))
    })?;
    let position: Position = serde_json::from_str(checkpoint.note(POSITION)?)
        .map_err(|reason| refused(format!("`{POSITION}`: {}", shown(&reason.to_string(), SHOWN))))?;
    let Position { epochs, batches } = &position;
    let in_order =
        epochs.iter().enumerate().all(|(at, it)| (it.fold, it.epoch) == (at / args.epochs, at % args.epochs));
    if epochs.len() > args.folds * args.epochs || batches.len() > BATCHES_KEPT || !in_order {
        let (epochs, batches) = (epochs.len(), batches.len());
        return Err(refused(format!("`{POSITION}`: no run has {epochs} finished epochs and {batches} batches")));
    }
    Ok(position)
}

/// Returns all settings that decide the weights. The bars are last, as a digest.
pub(crate) fn settings(args: &Args, dataset: &Dataset, shards: usize) -> Settings {
    vec![
        ("seed", args.seed.to_string()),
        ("epochs", args.epochs.to_string()),
        ("folds", args.folds.to_string()),
        ("batch", args.batch.to_string()),
        ("micro-batch", args.micro_batch().to_string()),
        ("learning-rate", format!("{:e}", args.learning_rate)),
        ("weight-decay", format!("{:e}", args.weight_decay)),
        ("clip", format!("{:e}", args.clip)),
        ("precision", args.precision.to_string()),
        ("stored", args.stored.to_string()),
        ("horizon", args.horizon.to_string()),
        ("limit", args.sample_limit().map_or("none".into(), |limit| limit.to_string())),
        ("shards", shards.to_string()),
        ("bars", dataset.sha256().to_owned()),
    ]
}
