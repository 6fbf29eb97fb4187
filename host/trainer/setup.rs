//! A trainer, and how it is set up: what runs its steps, where checkpoints go, what stops it.

#![forbid(unsafe_code)]

use super::batch::{MicroBatch, Samples};
use super::model::{Learner, Model};
use super::stage::Stage;
use crate::capture::CaptureReport;
use crate::driver::Landing;
use crate::error::Result;
use crate::finite::Numbers;
use crate::memory::Arena;
use crate::optim::{AdamWConfig, UpdateRule};
use crate::shortage::MemoryForecast;
use std::fmt;
use std::path::PathBuf;
use std::sync::atomic::AtomicBool;

/// Trains a model on an arena, by updates of the rule `R`.
///
/// ```
/// use stepscope::nn::Linear;
/// use stepscope::*;
///
/// struct Classifier(Linear);
///
/// impl Model for Classifier {
///     fn forward<'s>(&self, tape: &Tape<'_, 's>, batch: &Batch<'s>) -> Result<Var<'s>> {
///         self.0.forward(tape, &tape.input(batch.input::<f32>(0)?))
///     }
/// }
///
/// struct Points(Vec<f32>, Vec<u32>);
///
/// impl Samples for Points {
///     fn len(&self) -> usize {
///         self.1.len()
///     }
///
///     fn inputs(&self) -> Result<Inputs<'_>> {
///         Inputs::new().with(&self.0, [self.1.len(), 2])?.with(&self.1, [self.1.len()])
///     }
/// }
///
/// # fn main() -> Result<()> {
/// let mut layout = Layout::builder();
/// let model = Classifier(Linear::new(layout.names().at("head"), 2, 2));
/// let device = Device::open(DeviceKind::Emulated)?;
/// let config = AdamWConfig { learning_rate: 0.1, ..AdamWConfig::default() };
/// let learner = Learner::new(&device, model, &layout.build()?, 7, config)?;
/// let mut arena = Arena::builder(&device).capacity(Capacity::mib(1)).build()?;
///
/// let batch = || Points(vec![1.0, 0.0, 0.0, 1.0], vec![0, 1]);
/// let mut trainer = Trainer::captured(&mut arena, learner, &batch())?;
/// let mut progress = EpochProgress::default();
/// trainer.epoch((0..50).map(|_| Ok(vec![batch()])), &mut progress, &mut ())?;
/// let (loss, logits) = trainer.evaluate(&batch(), |step, logits| step.read(logits.value()))?;
/// assert!(loss < 0.1 && logits[0] > logits[1] && logits[2] < logits[3], "{loss}");
/// # Ok(())
/// # }
/// ```
pub struct Trainer<'a, M, R = AdamWConfig> {
    pub(super) arena: &'a mut Arena,
    pub(super) stage: Stage<M, R>,
    /// Where results land, free for the next update.
    pub(super) landings: Vec<Landing>,
    pub(super) checkpoint: Option<PathBuf>,
    pub(super) every: Option<u64>,
    pub(super) stop: Option<&'a AtomicBool>,
    /// Whether a rank of the group has seen its flag.
    pub(super) stopped: bool,
    pub(super) numbers: Numbers,
    /// Whether the gradients are those of a whole batch, for [`Trainer::apply`].
    pub(super) accumulated: bool,
    pub(super) updates_begun: u64,
    /// Made before the second update; none where the system does not tell what it is made of.
    pub(super) forecast: Option<MemoryForecast>,
}

impl<M: fmt::Debug, R: fmt::Debug> fmt::Debug for Trainer<'_, M, R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Trainer").field("learner", self.stage.learner()).finish_non_exhaustive()
    }
}

impl<'a, M: Model, R: UpdateRule> Trainer<'a, M, R> {
    /// A trainer whose steps run launch by launch.
    pub fn eager(arena: &'a mut Arena, learner: Learner<M, R>) -> Self {
        Self::new(arena, Stage::Eager(learner))
    }

    /// A trainer whose steps are replays of a graph, recorded once for each shape of micro-batch; `largest` is the largest of them,
    /// and the values in it are not looked at.
    ///
    /// # Errors
    /// As for [`Arena::capture`].
    pub fn captured(arena: &'a mut Arena, learner: Learner<M, R>, largest: &impl Samples) -> Result<Self> {
        let alone = learner.shards.is_none();
        let part = MicroBatch { samples: largest.len(), first: true, last: alone, update: alone };
        let captured = arena.capture(learner, &largest.inputs()?.variant(part.variant()), Learner::record)?;
        Ok(Self::new(arena, Stage::Captured(captured)))
    }

    fn new(arena: &'a mut Arena, stage: Stage<M, R>) -> Self {
        Self {
            arena,
            stage,
            landings: Vec::new(),
            checkpoint: None,
            every: None,
            stop: None,
            stopped: false,
            numbers: Numbers::Finite,
            accumulated: false,
            updates_begun: 0,
            forecast: None,
        }
    }

    /// Sets the number of recordings that captured steps keep, one for each shape of micro-batch
    /// and its place in a batch (first, last, both or between): see
    /// [`Captured::keep`](crate::Captured::keep). Without effect where steps run launch by launch.
    ///
    /// Batches of many shapes, as texts of any length are, take fewer recordings if each length is
    /// padded up to one of a few, such as the powers of two, and the loss ignores the padding.
    #[must_use]
    pub fn recordings(mut self, kept: usize) -> Self {
        if let Stage::Captured(captured) = &mut self.stage {
            captured.set_kept(kept);
        }
        self
    }

    /// Where [`Trainer::save`] writes, and after how many updates of an epoch it is called; none: only at a stop.
    #[must_use]
    pub fn checkpoint(mut self, path: impl Into<PathBuf>, every: Option<u64>) -> Self {
        (self.checkpoint, self.every) = (Some(path.into()), every);
        self
    }

    /// A flag that ends an epoch behind the update that is running, with a checkpoint: what a signal handler may set.
    #[must_use]
    pub fn stop_when(mut self, flag: &'a AtomicBool) -> Self {
        self.stop = Some(flag);
        self
    }

    /// Whether training goes on with numbers that are not finite (default: [`Numbers::Finite`], it ends with [`Error::NotFinite`](crate::Error::NotFinite)); also
    /// what [`Trainer::save`] writes and [`Trainer::restore`] takes.
    #[must_use]
    pub fn numbers(mut self, numbers: Numbers) -> Self {
        self.numbers = numbers;
        self
    }

    /// The model with its weights and optimiser. What the host reads of it is read behind all updates so far.
    pub fn learner(&self) -> &Learner<M, R> {
        self.stage.learner()
    }

    /// The arena that the steps run on.
    pub fn arena(&mut self) -> &mut Arena {
        self.arena
    }

    /// How much of the host's memory the run will take at most. None before the second update begins, and where the host does not tell.
    pub fn memory_forecast(&self) -> Option<MemoryForecast> {
        self.forecast
    }

    /// What captured steps did; none when steps run launch by launch.
    pub fn capture_report(&self) -> Option<CaptureReport> {
        match &self.stage {
            Stage::Captured(captured) => Some(captured.report()),
            Stage::Eager(_) => None,
        }
    }
}
