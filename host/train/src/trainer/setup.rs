//! Defines the trainer and its settings: the train state, the checkpoint path and the stop flag.

#![forbid(unsafe_code)]

use super::batch::MicroBatch;
use super::host_batch::HostBatch;
use super::memory::{StepMemory, TrainerArena};
use super::model::{Model, TrainState};
use super::stage::Stage;
use crate::optim::{AdamW, UpdateRule};
use std::fmt;
use std::path::PathBuf;
use std::sync::atomic::AtomicBool;
use stepscope_core::internals::PinnedReadback;
use stepscope_core::ops::Cast;
use stepscope_core::{Arena, CaptureReport, GradientType, MemoryForecast, NonFinite, Result};

/// Trains a model, with update rule `R`.
///
/// ```
/// use stepscope::prelude::*;
///
/// struct Classifier(nn::Linear);
///
/// impl Model for Classifier {
///     fn forward<'s>(&self, tape: &Tape<'_, 's>, batch: &DeviceBatch<'s>) -> Result<Var<'s>> {
///         self.0.forward(tape, &tape.input(batch.input::<f32>(0)?))
///     }
/// }
///
/// # fn main() -> Result<()> {
/// let mut spec = ParameterSpec::builder();
/// let model = Classifier(nn::Linear::new(spec.at("head"), 2, 2));
/// let device = Device::open(DeviceKind::Emulated)?;
/// let config = AdamW { learning_rate: 0.1, ..AdamW::default() };
/// let state = TrainState::new(&device, model, &spec.build()?, 7, config)?;
///
/// let batch = || (vec![[1.0f32, 0.0], [0.0, 1.0]], vec![0u32, 1]); // two points, and their classes
/// let mut trainer = Trainer::captured(&device, state, &batch())?;
/// trainer.fit((0..50).map(|_| batch()))?;
/// let (loss, logits) = trainer.evaluate_with(&batch(), |step, logits| step.read(logits.value()))?;
/// assert!(loss < 0.1 && logits[0] > logits[1] && logits[2] < logits[3], "{loss}");
/// # Ok(())
/// # }
/// ```
pub struct Trainer<'a, M, R = AdamW> {
    // Graphs are dropped before the arena whose memory they use.
    pub(super) stage: Stage<M, R>,
    pub(super) arena: TrainerArena<'a>,
    /// Readbacks that are free for the next update.
    pub(super) readbacks: Vec<PinnedReadback>,
    pub(super) checkpoint: Option<PathBuf>,
    pub(super) every: Option<u64>,
    pub(super) stop: Option<&'a AtomicBool>,
    /// True if a rank of the group has its stop flag set.
    pub(super) stopped: bool,
    pub(super) non_finite: NonFinite,
    /// True if the gradients are those of a whole batch, for [`Trainer::apply`].
    pub(super) accumulated: bool,
    pub(super) updates_begun: u64,
    /// The most samples of an evaluation that the arena has room for, if the trainer made it.
    pub(super) evaluated: usize,
    /// The forecast, made before the second update. None on systems that do not report the figures.
    pub(super) forecast: Option<MemoryForecast>,
}

impl<M: fmt::Debug, R: fmt::Debug> fmt::Debug for Trainer<'_, M, R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Trainer").field("state", self.stage.state()).finish_non_exhaustive()
    }
}

impl<'a, M, R: UpdateRule> Trainer<'a, M, R> {
    /// Creates a trainer whose steps run eagerly, launch by launch, with the same bits as captured
    /// steps.
    pub fn eager(arena: &'a mut Arena, state: TrainState<M, R>) -> Self {
        Self::new(TrainerArena::Lent(arena), Stage::Eager(state))
    }

    /// Creates a trainer whose steps replay a graph, recorded once for each shape of micro-batch.
    /// `largest` is the largest micro-batch. Its values are not read. `memory` is a device, an
    /// [`ArenaBuilder`](stepscope_core::ArenaBuilder) or a `&mut` [`Arena`]; see [`StepMemory`].
    pub fn captured<S: Cast>(
        memory: impl Into<StepMemory<'a>>,
        mut state: TrainState<M, R>,
        largest: &impl HostBatch,
    ) -> Result<Self>
    where
        M: Model<S>,
    {
        let alone = !state.sync.is_group();
        // To add to a gradient in BF16, an op first converts it, which takes more memory.
        let first = state.parameters.spec().gradients() != GradientType::Bf16;
        let part = MicroBatch { samples: largest.len(), batch: largest.len(), first, last: alone, update: alone };
        let inputs = largest.inputs()?.variant(part.variant());
        let mut arena = memory.into().for_capture(&mut state, &inputs)?;
        let captured = arena.capture(state, &inputs, TrainState::record)?;
        Ok(Self::new(arena, Stage::Captured(captured)))
    }

    fn new(arena: TrainerArena<'a>, stage: Stage<M, R>) -> Self {
        Self {
            arena,
            stage,
            readbacks: Vec::new(),
            checkpoint: None,
            every: None,
            stop: None,
            stopped: false,
            non_finite: NonFinite::Reject,
            accumulated: false,
            updates_begun: 0,
            evaluated: 0,
            forecast: None,
        }
    }

    /// Sets the number of recordings that captured steps keep. There is one for each shape of
    /// micro-batch and its place in a batch (first, last, both or between). See
    /// [`Captured::keep`](stepscope_core::Captured::keep). It has no effect on eager steps.
    ///
    /// Batches of many shapes, such as texts of varying length, need fewer recordings if lengths
    /// are padded. Pad each to one of a few values, such as the powers of two. The loss must ignore
    /// the padding.
    #[must_use]
    pub fn recordings(mut self, kept: usize) -> Self {
        if let Stage::Captured(captured) = &mut self.stage {
            captured.set_kept(kept);
        }
        self
    }

    /// Sets the path that [`Trainer::save`] writes to, and the number of updates of an epoch
    /// between saves. If `every` is none, it saves only at a stop.
    #[must_use]
    pub fn checkpoint(mut self, path: impl Into<PathBuf>, every: Option<u64>) -> Self {
        (self.checkpoint, self.every) = (Some(path.into()), every);
        self
    }

    /// Sets a flag, for example one that a signal handler sets, that ends an epoch. The epoch then
    /// finishes the running update and writes a checkpoint.
    #[must_use]
    pub fn stop_when(mut self, flag: &'a AtomicBool) -> Self {
        self.stop = Some(flag);
        self
    }

    /// Sets the handling of non-finite numbers. The default, [`NonFinite::Reject`], ends training
    /// with [`Error::NotFinite`](stepscope_core::Error::NotFinite). It also applies to the numbers that
    /// [`Trainer::save`] writes and [`Trainer::restore`] reads.
    #[must_use]
    pub fn non_finite(mut self, non_finite: NonFinite) -> Self {
        self.non_finite = non_finite;
        self
    }

    /// Returns the model with its weights and optimizer. Host reads of it wait for all updates
    /// queued so far.
    pub fn state(&self) -> &TrainState<M, R> {
        self.stage.state()
    }

    /// Returns the arena that the steps run on.
    pub fn arena(&mut self) -> &mut Arena {
        &mut self.arena
    }

    /// Returns the most host memory that the run will take. None before the second update begins,
    /// and on systems that do not report the figures.
    pub fn memory_forecast(&self) -> Option<MemoryForecast> {
        self.forecast
    }

    /// Returns the report of captured steps, or none if steps are eager.
    pub fn capture_report(&self) -> Option<CaptureReport> {
        match &self.stage {
            Stage::Captured(captured) => Some(captured.report()),
            Stage::Eager(_) => None,
        }
    }
}
