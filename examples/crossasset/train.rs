//! From batches to weights: the steps of training and validation, checkpoints, and the trace of the first batch.

use std::path::{Path, PathBuf};

use bytemuck::{bytes_of, cast_slice};
use safetensors::tensor::{Dtype, SafeTensorError, TensorView};
use serde::{Deserialize, Serialize};
use stepscope::{
    AdamW, AdamWConfig, Arena, ArenaReport, Capacity, Checkpoint, Device, Error, Gradients, Layout, Overflow,
    Parameters, Result, Schedule, Shape, Tape, ops, replace_file,
};

use crate::cli::Args;
use crate::dataset::{Dataset, Fold};
use crate::features::{FEATURES, SAMPLE_LEN, SCALES};
use crate::model::Model;
use crate::report::{BatchResult, EpochResult};
use crate::screen::Progress;

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
    model: Model,
    arena: Arena,
    parameters: Parameters,
    gradients: Gradients,
    optimizer: AdamW,
    /// Whether the trace is still to be written.
    trace: Option<&'r PathBuf>,
    /// Whether the memory of a batch is still to be written.
    memory: Option<&'r PathBuf>,
}

impl<'r> Trainer<'r> {
    /// A model with fresh weights on `device`.
    ///
    /// # Errors
    /// When the device has no room.
    pub(crate) fn new(device: &Device, args: &'r Args, dataset: &'r Dataset) -> Result<Self> {
        let (model, layout) = Model::new()?;
        let parameters = Parameters::new(device, &layout, args.seed)?;
        let optimizer = AdamW::new(&parameters, AdamWConfig::default())?;
        let overflow = match args.overflow_mib {
            0 => Overflow::Refuse,
            mebibytes => Overflow::pool(mebibytes << 20),
        };
        Ok(Self {
            args,
            dataset,
            model,
            arena: Arena::builder(device).capacity(Capacity::mib(args.arena_mib)).overflow(overflow).build()?,
            gradients: Gradients::zeros(&parameters)?,
            parameters,
            optimizer,
            trace: args.trace.as_ref(),
            memory: args.memory.as_ref(),
        })
    }

    /// Weights and optimiser as they stand before a fold.
    pub(crate) fn start_fold(&mut self, fold: &Fold) -> Result<()> {
        let device = self.arena.device().clone();
        self.parameters = Parameters::new(&device, self.parameters.layout(), self.args.seed)?;
        self.gradients = Gradients::zeros(&self.parameters)?;
        let updates = (self.args.epochs * fold.train.len().div_ceil(self.args.batch)) as u64;
        let config = AdamWConfig {
            learning_rate: self.args.learning_rate,
            weight_decay: self.args.weight_decay,
            clip: Some(self.args.clip),
            schedule: Schedule::WarmupCosine { warmup: WARMUP.min(updates / 10), total: updates, floor: FLOOR },
            ..AdamWConfig::default()
        };
        self.optimizer = AdamW::new(&self.parameters, config)?;
        Ok(())
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

    /// One update: a step scope for each micro-batch, the last of which also updates the weights.
    fn batch(&mut self, fold: &Fold, samples: &[usize]) -> Result<BatchResult> {
        if self.memory.is_some() {
            self.arena.record(EVENTS);
        }
        self.optimizer.advance()?;
        let weight = 1.0 / samples.len() as f32;
        let (mut loss, mut head_gradient_l2) = (0.0, 0.0);
        let micro_batches = samples.len().div_ceil(self.args.micro_batch());
        for (number, micro_batch) in samples.chunks(self.args.micro_batch()).enumerate() {
            let (x, labels) = self.batch_on_host(fold, micro_batch);
            let Self { model, arena, parameters, gradients, optimizer, trace, .. } = self;
            let last = number + 1 == micro_batches;
            arena.step(|step| {
                if number == 0 {
                    gradients.zero(step)?;
                }
                let labels = step.upload(&labels, [micro_batch.len()])?.save();
                let tape = Tape::new(step, parameters);
                let x = tape.input(step.upload(&x, [micro_batch.len(), SCALES.len(), FEATURES])?);
                let mean = tape.cross_entropy(&model.forward(&tape, &x)?, labels, weight)?;
                tape.backward(&mean, gradients)?;
                loss += f64::from(step.read_scalar(mean.value())?);
                if last {
                    let head = gradients.lend_mut(step, model.head_weight())?;
                    head_gradient_l2 = f64::from(step.read_scalar(&ops::squared_norm(step, &head)?)?).sqrt();
                    if trace.is_none() {
                        optimizer.apply(step, parameters, gradients)?;
                    }
                }
                Ok(())
            })?;
        }
        if let Some(path) = self.trace.take() {
            self.write_trace(path, fold, samples, loss as f32)?;
            let Self { arena, parameters, gradients, optimizer, .. } = self;
            arena.step(|step| optimizer.apply(step, parameters, gradients).map(drop))?;
        }
        if let (Some(path), Some(recording)) = (self.memory.take(), self.arena.recording()) {
            replace_file(path, &recording.pickle())?;
            replace_file(path.with_extension("svg"), recording.timeline_svg().as_bytes())?;
            self.arena.record(0);
        }
        Ok(BatchResult { loss, head_gradient_l2 })
    }

    /// Mean loss and accuracy over the fold's validation samples.
    fn validate(&mut self, fold: &Fold) -> Result<(f64, f64)> {
        let samples: Vec<usize> = fold.valid.clone().collect();
        let (mut loss, mut right) = (0.0, 0);
        for batch in samples.chunks(self.args.batch) {
            let (x, labels) = self.batch_on_host(fold, batch);
            let Self { model, arena, parameters, .. } = self;
            let (sum, guesses) = arena.step(|step| {
                let tape = Tape::new(step, parameters);
                let x = tape.input(step.upload(&x, [batch.len(), SCALES.len(), FEATURES])?);
                let logits = model.forward(&tape, &x)?;
                let sum = tape.cross_entropy(&logits, step.upload(&labels, [batch.len()])?.save(), 1.0)?;
                let guesses = ops::argmax_columns(step, logits.value())?;
                Ok((step.read_scalar(sum.value())?, step.read(&guesses)?))
            })?;
            loss += f64::from(sum);
            right += guesses.iter().zip(&labels).filter(|(guess, label)| guess == label).count();
        }
        Ok((loss / samples.len() as f64, right as f64 / samples.len() as f64))
    }

    /// Features and labels of some samples, on the host.
    fn batch_on_host(&self, fold: &Fold, samples: &[usize]) -> (Vec<f32>, Vec<u32>) {
        let (mut x, mut labels) = (vec![0.0; samples.len() * SAMPLE_LEN], vec![0; samples.len()]);
        self.dataset.batch_features(samples, &mut x);
        self.dataset.batch_labels(fold, samples, &mut labels);
        (x, labels)
    }

    /// Writes input, labels, loss, weights and gradients of a batch, before its update.
    fn write_trace(&self, path: &Path, fold: &Fold, samples: &[usize], loss: f32) -> Result<()> {
        let (x, labels) = self.batch_on_host(fold, samples);
        let mut tensors = vec![
            ("input".to_owned(), Dtype::F32, Shape::from([samples.len(), SCALES.len(), FEATURES]), cast_slice(&x)),
            ("label".to_owned(), Dtype::U32, Shape::from([samples.len()]), cast_slice(&labels)),
            ("loss".to_owned(), Dtype::F32, Shape::from([1]), bytes_of(&loss)),
        ];
        let (weights, gradients) = (self.parameters.flat().read()?, self.gradients.flat().read()?);
        for entry in self.parameters.layout().entries() {
            for (kind, values) in [("weight", &weights), ("gradient", &gradients)] {
                let name = format!("{kind}.{}", entry.name());
                tensors.push((name, Dtype::F32, entry.shape(), cast_slice(&values[entry.range()])));
            }
        }
        let refused = |reason: SafeTensorError| Error::File { path: path.into(), reason: reason.to_string() };
        let views = tensors
            .iter()
            .map(|(name, dtype, shape, bytes)| Ok((name, TensorView::new(*dtype, shape.extents().to_vec(), bytes)?)))
            .collect::<std::result::Result<Vec<_>, _>>()
            .map_err(refused)?;
        replace_file(path, &safetensors::serialize(views, None).map_err(refused)?)
    }

    /// Writes weights, optimiser and position.
    ///
    /// # Errors
    /// When the file cannot be written; an older one is untouched then.
    pub(crate) fn save(&self, path: &Path, position: &Position) -> Result<()> {
        let position = serde_json::to_string(position).expect("plain numbers and lists have a JSON form");
        let notes = [(POSITION, position), (SETTINGS, settings(self.args, self.dataset))];
        Checkpoint::save(path, &self.parameters, Some(&self.optimizer), &notes)
    }

    /// Weights and optimiser as a checkpoint left them; call it within the fold that the position is in.
    ///
    /// # Errors
    /// When the checkpoint is another model's.
    pub(crate) fn restore(&mut self, checkpoint: &Checkpoint) -> Result<()> {
        checkpoint.restore(&mut self.parameters, Some(&mut self.optimizer))
    }

    /// Names, shapes and places of the weights.
    pub(crate) fn layout(&self) -> &Layout {
        self.parameters.layout()
    }

    /// The digest of the weights.
    ///
    /// # Errors
    /// When the device does not answer.
    pub(crate) fn weights_sha256(&self) -> Result<String> {
        self.parameters.sha256()
    }

    /// What the arena did.
    pub(crate) fn arena(&self) -> ArenaReport {
        self.arena.report()
    }
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
        "seed {} epochs {} folds {} batch {} micro-batch {} learning-rate {:e} weight-decay {:e} clip {:e} horizon {} bars {} \
         samples {}",
        args.seed,
        args.epochs,
        args.folds,
        args.batch,
        args.micro_batch(),
        args.learning_rate,
        args.weight_decay,
        args.clip,
        args.horizon,
        dataset.bars(),
        dataset.samples().len()
    )
}
