//! From batches to weights: the steps of training and validation, and checkpoints.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use stepscope::{
    AdamWConfig, Arena, ArenaReport, Capacity, Captured, Checkpoint, Device, Error, Layout, Output, Overflow, Result,
    Schedule, Tape, ops, replace_file,
};

use crate::cli::{Args, Switch};
use crate::dataset::{Dataset, Fold};
use crate::learner::{Learner, MicroBatch, Part, Told};
use crate::model::Model;
use crate::report::{BatchResult, CaptureUse, EpochResult};
use crate::screen::Progress;
use crate::trace::Trace;

/// The checkpoint's note with [`Position`].
const POSITION: &str = "crossasset.position";
/// The checkpoint's note with [`settings`].
const SETTINGS: &str = "crossasset.settings";
/// The learning rate at the end of a fold, as a share of `--learning-rate`.
const FLOOR: f64 = 0.1;
/// Events of the memory that are kept, at most: a batch of 256 steps of one sample has some 50,000.
const EVENTS: usize = 100_000;
/// Updates over which the learning rate rises, at most.
const WARMUP: u64 = 16;

/// What a run has done: enough to go on with the same bits and the same report.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Position {
    /// Epochs done, in the order of training.
    pub(crate) epochs: Vec<EpochResult>,
    /// The first batches of the run.
    pub(crate) batches: Vec<BatchResult>,
}

/// A model in training.
pub(crate) struct Trainer<'r> {
    args: &'r Args,
    dataset: &'r Dataset,
    layout: Layout,
    arena: Arena,
    /// None before the first fold.
    learner: Option<Stage>,
    /// What captures that are over did.
    captured: Option<CaptureUse>,
    /// The first fold's trace, until it is complete.
    trace: Option<Trace>,
    /// Whether the memory of a batch is still to be written.
    memory: Option<&'r PathBuf>,
}

/// How the learner's steps run.
enum Stage {
    /// Launch by launch.
    Eager(Learner),
    /// As one graph.
    Captured(Captured<Learner, Told<Output, Output>>),
}

impl<'r> Trainer<'r> {
    /// A trainer whose model gets its weights with the first fold.
    ///
    /// # Errors
    /// When the device has no room.
    pub(crate) fn new(device: &Device, args: &'r Args, dataset: &'r Dataset) -> Result<Self> {
        let (_, layout) = Model::new()?;
        let overflow = match args.overflow_mib {
            0 => Overflow::Refuse,
            mebibytes => Overflow::pool(mebibytes << 20),
        };
        Ok(Self {
            args,
            dataset,
            layout,
            arena: Arena::builder(device).capacity(Capacity::mib(args.arena_mib)).overflow(overflow).build()?,
            learner: None,
            captured: None,
            trace: None,
            memory: args.memory.as_ref(),
        })
    }

    /// Weights and optimiser as they stand before a fold, and with `--capture on` the graph of its steps.
    pub(crate) fn start_fold(&mut self, fold: &Fold) -> Result<()> {
        let Args { batch, epochs, seed, learning_rate, weight_decay, clip, precision, .. } = *self.args;
        let updates = (epochs * fold.train.len().div_ceil(batch)) as u64;
        let config = AdamWConfig {
            learning_rate,
            weight_decay,
            clip: Some(clip),
            schedule: Schedule::WarmupCosine { warmup: WARMUP.min(updates / 10), total: updates, floor: FLOOR },
            ..AdamWConfig::default()
        };
        let traced = self.args.trace.as_ref().filter(|_| fold.index == 0);
        self.trace = traced.map(|path| Trace::new(path.clone(), &config));
        self.captured = self.capture();
        // The last fold's graphs give their part of the arena back.
        self.learner = None;
        let learner = Learner::new(self.arena.device(), seed, config, precision)?;
        self.learner = Some(match self.args.capture {
            Switch::Off => Stage::Eager(learner),
            Switch::On => {
                let batch = batch.min(fold.train.len());
                let largest = MicroBatch::zeros(batch.min(self.args.micro_batch()));
                let last = batch <= self.args.micro_batch();
                let part = Part { batch, first: true, last, update: last };
                Stage::Captured(self.arena.capture(learner, &largest.inputs(part)?, Learner::record)?)
            }
        });
        Ok(())
    }

    fn learner(&self) -> &Learner {
        match self.learner.as_ref().expect("a fold was started") {
            Stage::Eager(learner) => learner,
            Stage::Captured(captured) => captured.state(),
        }
    }

    fn learner_mut(&mut self) -> &mut Learner {
        learner_of(&mut self.learner)
    }

    /// Trains on the fold's samples once, validates, and tells how it went.
    ///
    /// # Errors
    /// Those of the device and the arena.
    pub(crate) fn epoch(&mut self, fold: &Fold, epoch: usize, batches: &mut Vec<BatchResult>) -> Result<EpochResult> {
        let order = fold.epoch_order(self.args.seed, epoch);
        let mut progress = Progress::new(&format!("fold {}, epoch {epoch}", fold.index), order.len());
        for samples in order.chunks(self.args.batch) {
            let result = self.batch(fold, samples)?;
            progress.advance(samples.len(), result.loss);
            if batches.len() < crate::report::BATCHES_KEPT {
                batches.push(result);
            }
        }
        let (train_loss, seconds, samples_per_second) = progress.finish();
        let (valid_loss, valid_accuracy) = self.validate(fold)?;
        Ok(EpochResult {
            fold: fold.index,
            epoch,
            train_loss,
            valid_loss,
            valid_accuracy,
            baseline_accuracy: fold.baseline_accuracy,
            seconds,
            samples_per_second,
        })
    }

    /// One update: a step for each micro-batch, the last of which also updates the weights.
    fn batch(&mut self, fold: &Fold, samples: &[usize]) -> Result<BatchResult> {
        // A batch that is looked at runs eagerly: its memory shows, and its update waits for the trace.
        let looked_at = self.trace.is_some() || self.memory.is_some();
        if self.memory.is_some() {
            self.arena.record(EVENTS);
        }
        self.learner_mut().optimizer.advance()?;
        let (mut loss, mut head_gradient_l2) = (0.0, 0.0);
        let micro_batches = samples.len().div_ceil(self.args.micro_batch());
        for (number, micro_batch) in samples.chunks(self.args.micro_batch()).enumerate() {
            let last = number + 1 == micro_batches;
            let update = last && self.trace.is_none();
            let part = Part { batch: samples.len(), first: number == 0, last, update };
            let micro_batch = self.on_host(fold, micro_batch);
            let told = match &mut self.learner {
                Some(Stage::Captured(captured)) if !looked_at => replay(captured, &micro_batch, part)?,
                _ => self.eager(&micro_batch, part)?,
            };
            loss += f64::from(told.loss);
            head_gradient_l2 = told.head_squared.map_or(0.0, |squared| f64::from(squared).sqrt());
        }
        if let Some(mut trace) = self.trace.take() {
            trace.before_update(&self.on_host(fold, samples), loss as f32, self.learner())?;
            let Learner { parameters, gradients, optimizer, .. } = learner_of(&mut self.learner);
            self.arena.step(|step| optimizer.apply(step, parameters, gradients).map(drop))?;
            let complete = trace.after_update(self.learner())?;
            self.trace = (!complete).then_some(trace);
        }
        if let (Some(path), Some(recording)) = (self.memory.take(), self.arena.recording()) {
            replace_file(path, &recording.pickle())?;
            replace_file(path.with_extension("svg"), recording.timeline_svg().as_bytes())?;
            self.arena.record(0);
        }
        Ok(BatchResult { loss, head_gradient_l2 })
    }

    /// A step, launch by launch.
    fn eager(&mut self, batch: &MicroBatch, part: Part) -> Result<Told<f32, f32>> {
        let learner = learner_of(&mut self.learner);
        self.arena.step(|step| {
            let x = step.upload(&batch.x, batch.shape())?.save();
            let labels = step.upload(&batch.labels, [batch.labels.len()])?.save();
            let Told { loss, head_squared } = learner.learn(step, x, labels, part)?;
            let head_squared = head_squared.map(|squared| step.read_scalar(&squared)).transpose()?;
            Ok(Told { loss: step.read_scalar(&loss)?, head_squared })
        })
    }

    /// Mean loss and accuracy over the fold's validation samples.
    fn validate(&mut self, fold: &Fold) -> Result<(f64, f64)> {
        let samples: Vec<usize> = fold.valid.clone().collect();
        let (mut loss, mut right) = (0.0, 0);
        for batch in samples.chunks(self.args.batch) {
            let batch = self.on_host(fold, batch);
            let Learner { model, parameters, .. } = learner_of(&mut self.learner);
            let (sum, guesses) = self.arena.step(|step| {
                let tape = Tape::new(step, parameters);
                let logits = model.forward(&tape, &tape.input(step.upload(&batch.x, batch.shape())?))?;
                let labels = step.upload(&batch.labels, [batch.labels.len()])?.save();
                let sum = tape.cross_entropy(&logits, labels, 1.0)?;
                let guesses = ops::argmax_columns(step, logits.value())?;
                Ok((step.read_scalar(sum.value())?, step.read(&guesses)?))
            })?;
            loss += f64::from(sum);
            right += guesses.iter().zip(&batch.labels).filter(|(guess, label)| guess == label).count();
        }
        Ok((loss / samples.len() as f64, right as f64 / samples.len() as f64))
    }

    /// Features and labels of some samples, on the host.
    fn on_host(&self, fold: &Fold, samples: &[usize]) -> MicroBatch {
        let mut batch = MicroBatch::zeros(samples.len());
        self.dataset.batch_features(samples, &mut batch.x);
        self.dataset.batch_labels(fold, samples, &mut batch.labels);
        batch
    }

    /// Writes weights, optimiser and position.
    ///
    /// # Errors
    /// When the file cannot be written; an older one is untouched then.
    pub(crate) fn save(&self, path: &Path, position: &Position) -> Result<()> {
        let position = serde_json::to_string(position).expect("plain numbers and lists have a JSON form");
        let notes = [(POSITION, position), (SETTINGS, settings(self.args, self.dataset))];
        let Learner { parameters, optimizer, .. } = self.learner();
        Checkpoint::save(path, parameters, Some(optimizer), &notes)
    }

    /// Weights and optimiser as a checkpoint left them; call it within the fold that the position is in.
    ///
    /// # Errors
    /// When the checkpoint is another model's.
    pub(crate) fn restore(&mut self, checkpoint: &Checkpoint) -> Result<()> {
        let Learner { parameters, optimizer, .. } = self.learner_mut();
        checkpoint.restore(parameters, Some(optimizer))
    }

    /// Names, shapes and places of the weights.
    pub(crate) fn layout(&self) -> &Layout {
        &self.layout
    }

    /// The digest of the weights.
    ///
    /// # Errors
    /// When the device does not answer.
    pub(crate) fn weights_sha256(&self) -> Result<String> {
        self.learner().parameters.sha256()
    }

    /// What captured steps did over the whole run; none without any.
    pub(crate) fn capture(&self) -> Option<CaptureUse> {
        match &self.learner {
            Some(Stage::Captured(captured)) => Some(CaptureUse::after(self.captured, captured.report())),
            Some(Stage::Eager(_)) | None => self.captured,
        }
    }

    /// What the arena did.
    pub(crate) fn arena(&self) -> ArenaReport {
        self.arena.report()
    }
}

/// The learner alone, so that the arena can run a step of it.
fn learner_of(stage: &mut Option<Stage>) -> &mut Learner {
    match stage.as_mut().expect("a fold was started") {
        Stage::Eager(learner) => learner,
        Stage::Captured(captured) => captured.state_mut(),
    }
}

/// A step as one graph.
fn replay(
    captured: &mut Captured<Learner, Told<Output, Output>>,
    batch: &MicroBatch,
    part: Part,
) -> Result<Told<f32, f32>> {
    let replay = captured.replay(&batch.inputs(part)?)?;
    let Told { loss, head_squared } = replay.outputs();
    let head_squared = head_squared.map(|squared| replay.read_scalar(squared)).transpose()?;
    Ok(Told { loss: replay.read_scalar(*loss)?, head_squared })
}

/// Where a checkpoint stopped.
///
/// # Errors
/// When it was made with other settings, which would not give the same weights.
pub(crate) fn position(checkpoint: &Checkpoint, path: &Path, args: &Args, dataset: &Dataset) -> Result<Position> {
    let (theirs, ours) = (checkpoint.note(SETTINGS)?, settings(args, dataset));
    if theirs != ours {
        let reason = format!(
            "was made with other settings, so going on would mix two runs:\n  there: {theirs}\n  here:  {ours}"
        );
        return Err(Error::File { path: path.into(), reason });
    }
    let unreadable = |reason| Error::File { path: path.into(), reason: format!("`{POSITION}`: {reason}") };
    serde_json::from_str(checkpoint.note(POSITION)?).map_err(unreadable)
}

/// What decides the weights besides the data's content.
fn settings(args: &Args, dataset: &Dataset) -> String {
    format!(
        "seed {} epochs {} folds {} batch {} micro-batch {} learning-rate {:e} weight-decay {:e} clip {:e} precision {} horizon {} \
         bars {} samples {}",
        args.seed,
        args.epochs,
        args.folds,
        args.batch,
        args.micro_batch(),
        args.learning_rate,
        args.weight_decay,
        args.clip,
        args.precision,
        args.horizon,
        dataset.bars(),
        dataset.samples().len()
    )
}
