//! The model, and the training step. The same step function runs eagerly and captured.

use super::agreement;
use super::batch::MicroBatch;
use super::shards::{Metric, Shards, Wanted};
use crate::optim::{AdamW, Optimizer, ParameterGroups, UpdateRule};
use cuda_std::float_mode;
use stepscope_core::arena::Arena;
use stepscope_core::capture::{CaptureInputs, DeviceBatch, Output};
use stepscope_core::device::Device;
use stepscope_core::error::Result;
use stepscope_core::ops::{self, Generator};
use stepscope_core::params::{Gradients, Parameter, ParameterEntry, ParameterSpec, Parameters};
use stepscope_core::precision::Precision;
use stepscope_core::step::Step;
use stepscope_core::tape::{Tape, Var};
use stepscope_core::tensor::{Saved, Tensor};
use stepscope_group::Group;
use stepscope_group::agreement::Settings;

/// A model that a [`Trainer`](super::Trainer) can train: parameter handles, and the computation
/// from a batch to a loss.
///
/// Its functions run at each step, or once per capture, and must do the same for all batches of the
/// same shapes. One model serves training and evaluation. [`Tape::dropout`] drops values only in
/// training (see [`TrainState::with_dropout`]), and [`Tape::is_evaluating`] returns which of the
/// two is running.
pub trait Model {
    /// Computes the model's output for a batch. For a classifier, these are logits
    /// `[samples, classes]`.
    fn forward<'s>(&self, tape: &Tape<'_, 's>, batch: &DeviceBatch<'s>) -> Result<Var<'s>>;

    /// Computes `weight` times the sum of the samples' losses, `[1]`. The default is the
    /// cross-entropy with the labels in the batch's input 1.
    fn loss<'s>(&self, tape: &Tape<'_, 's>, output: &Var<'s>, batch: &DeviceBatch<'s>, weight: f32) -> Result<Var<'s>> {
        tape.cross_entropy(output, batch.indices(1)?, weight)
    }

    /// Computes the loss to differentiate, directly from a batch. It must give the same numbers as
    /// [`Model::loss`] of [`Model::forward`], which is the default. A model with BF16 output
    /// overrides it to avoid a round trip, because `forward` must widen to f32 and `loss` must
    /// narrow again.
    fn loss_of_batch<'s>(&self, tape: &Tape<'_, 's>, batch: &DeviceBatch<'s>, weight: f32) -> Result<Var<'s>> {
        self.loss(tape, &self.forward(tape, batch)?, batch, weight)
    }

    /// Returns a parameter whose gradient norm is reported with each update.
    fn monitored(&self) -> Option<Parameter> {
        None
    }
}

/// A model with its weights, gradients and optimizer: everything that training steps change.
#[derive(Debug)]
pub struct TrainState<M, R = AdamW> {
    /// The parameter handles.
    pub model: M,
    /// The weights.
    pub parameters: Parameters,
    /// The gradients of the batch that is being trained on.
    pub gradients: Gradients,
    /// The optimizer.
    pub optimizer: Optimizer<R>,
    /// The rounding of matmul operands, in training and in evaluation.
    pub precision: Precision,
    /// The generator of dropout's random numbers in training. Evaluation draws none.
    pub generator: Option<Generator>,
    /// This rank's share of a group's work, set by [`TrainState::in_group`].
    pub shards: Option<Shards>,
}

/// The metrics of a step: its share of the loss and up to two squared norms. `gradients` is that of
/// all gradients, if the step updates the weights. `monitored` is that of the monitored gradient,
/// if the gradients are complete.
pub(super) struct StepMetrics<Loss, Norm> {
    pub(super) loss: Loss,
    pub(super) gradients: Option<Norm>,
    pub(super) monitored: Option<Norm>,
}

impl<M: Model, R: UpdateRule> TrainState<M, R> {
    /// Creates a model whose initializers draw the weights from `seed`, and an optimizer with this
    /// rule and no updates yet.
    ///
    /// # Errors
    /// [`Error::DeviceMemory`](stepscope_core::Error::DeviceMemory) if memory runs out.
    /// [`Error::Misuse`](stepscope_core::Error::Misuse) for a setting that is out of range.
    pub fn new(device: &Device, model: M, layout: &ParameterSpec, seed: u64, rule: R) -> Result<Self> {
        let parameters = Parameters::new(device, layout, seed)?;
        let (gradients, optimizer) = (Gradients::zeros(&parameters)?, Optimizer::new(&parameters, rule)?);
        Ok(Self {
            model,
            parameters,
            gradients,
            optimizer,
            precision: Precision::default(),
            generator: None,
            shards: None,
        })
    }

    /// Adds a dropout generator. Its numbers follow from `seed`, the number of the update and the
    /// part of the batch. A trainer's checkpoint stores the seed.
    ///
    /// # Errors
    /// The errors of [`Generator::new`].
    pub fn with_dropout(self, seed: u64) -> Result<Self> {
        let generator = Generator::new(self.parameters.flat().device(), seed)?;
        Ok(Self { generator: Some(generator), ..self })
    }

    /// Distributes training over all ranks of a group. Each rank gets the same number of the
    /// `shards`, adjacent in the batch. It also gets the optimizer state for one slice of each
    /// bucket of the weights. Call it last. The weights after an update depend on the number of
    /// shards but not on the number of ranks, and are equal on all ranks.
    ///
    /// Every rank is given the whole batch, in at least as many parts as there are shards. It reads
    /// the values only of its own parts (see [`Group::own_parts`]). Shard s starts at part
    /// `s * parts / shards`. Each shard's gradients are computed separately and accumulated over
    /// its parts as without a group. One binary tree then sums the shards.
    ///
    /// The optimizer's rule sees only this rank's slices, one after another, so it must update each
    /// weight from only its own gradient and state. [`TrainState::gradients`] holds the sums in
    /// this rank's slices, and unspecified values elsewhere unless
    /// [`Trainer::accumulate`](super::Trainer::accumulate) computed them. After an error on any
    /// rank, all ranks end. Resume from a checkpoint, with any number of ranks.
    ///
    /// Memory: one buffer the size of the gradients, plus one more for each doubling of the shards
    /// per rank.
    ///
    /// All ranks must have the same parameters, weights, optimizer and shards. They compare these
    /// here. Before the first update they compare them again, together with the precision, the
    /// dropout seed and everything else that decides the weights. Only the program can access some
    /// properties, such as the data. Compare those with [`Group::agree_on`].
    ///
    /// # Errors
    /// [`Error::Misuse`](stepscope_core::Error::Misuse) if the number of shards is not a power of two or not
    /// a multiple of the number of ranks. The same if the rule returns no
    /// [`UpdateRule::configuration`]. [`Error::Disagreement`](stepscope_core::Error::Disagreement) if ranks
    /// differ. [`Error::Rank`](stepscope_core::Error::Rank) if a rank does not arrive.
    /// [`Error::DeviceMemory`](stepscope_core::Error::DeviceMemory) if memory runs out.
    #[track_caller]
    pub fn in_group(mut self, group: &Group, shards: usize) -> Result<Self> {
        self.shards = Some(Shards::new(group.clone(), shards, &self.parameters, &mut self.optimizer)?);
        Ok(self)
    }

    /// Returns everything that decides the weights in a train state of a group of several ranks.
    /// Waits for the device.
    pub(super) fn settings(&self, shards: &Shards) -> Result<Settings> {
        let Self { model, parameters, optimizer, precision, generator, .. } = self;
        let mut settings = agreement::of_weights(shards.count(), parameters, optimizer)?;
        settings.add("precision", precision.to_string());
        if *precision != Precision::F32 {
            // Tensor cores of other GPUs round their sums differently.
            let description = parameters.flat().device().description();
            settings.add_option("compute capability", description.capability);
        }
        settings.add_option("dropout's seed", generator.as_ref().map(|generator| generator.seed()));
        let monitored = model.monitored().map(|monitored| parameters.layout().entry(monitored)).transpose()?;
        settings.add_option("monitored parameter", monitored.map(ParameterEntry::name));
        Ok(settings)
    }

    /// Prepares the optimizer and the random numbers for the next update, and returns its number.
    /// `first` is the first part of the batch that runs on this device.
    pub(super) fn advance(&mut self, first: usize) -> Result<u64> {
        let number = self.optimizer.advance()?;
        if let Some(generator) = &mut self.generator {
            // Each part of the batch adds one. An update that failed leaves no trace.
            generator.set(generator.seed(), number.rotate_left(u32::BITS) + first as u64)?;
        }
        Ok(number)
    }

    /// Replaces the model with the one that `wrap` makes of it, with the same parameters.
    pub fn map_model<N: Model>(self, wrap: impl FnOnce(M) -> N) -> TrainState<N, R> {
        let Self { model, parameters, gradients, optimizer, precision, generator, shards } = self;
        TrainState { model: wrap(model), parameters, gradients, optimizer, precision, generator, shards }
    }

    /// Sets the precision for training and evaluation.
    #[must_use]
    pub fn with_precision(self, precision: Precision) -> Self {
        Self { precision, ..self }
    }

    /// Sets rates and weight decay per parameter group. See [`Optimizer::with_parameter_groups`].
    ///
    /// # Errors
    /// The errors of [`Optimizer::with_parameter_groups`].
    pub fn with_parameter_groups(self, groups: &ParameterGroups) -> Result<Self> {
        Ok(Self { optimizer: self.optimizer.with_parameter_groups(groups)?, ..self })
    }

    /// Adds a BF16 copy of the weights. See [`Parameters::with_bf16_copy`].
    ///
    /// # Errors
    /// The errors of [`Parameters::with_bf16_copy`].
    pub fn with_bf16_copy(self) -> Result<Self> {
        Ok(Self { parameters: self.parameters.with_bf16_copy()?, ..self })
    }

    /// Runs forward and backward and, at the end of a batch, the update that [`Optimizer::advance`]
    /// prepared.
    #[track_caller]
    pub(super) fn learn<'s>(
        &mut self,
        step: &Step<'s>,
        batch: &DeviceBatch<'s>,
        part: MicroBatch,
    ) -> Result<StepMetrics<Saved<'s>, Tensor<'s>>> {
        let Self { model, parameters, gradients, optimizer, precision, generator, .. } = self;
        step.set_precision(*precision);
        let tape = Tape::new(step, parameters);
        let tape = match generator {
            Some(generator) => tape.with_generator(generator),
            None => tape,
        };
        let loss = model.loss_of_batch(&tape, batch, 1.0 / part.samples as f32)?;
        if part.first {
            tape.backward_overwrite(&loss, gradients)?;
        } else {
            tape.backward(&loss, gradients)?;
        }
        let monitored = match model.monitored().filter(|_| part.last) {
            Some(parameter) => Some(ops::squared_norm(step, &gradients.lend_mut(step, parameter)?)?),
            None => None,
        };
        let squared = part.update.then(|| optimizer.apply_with_norm(step, parameters, gradients)).transpose()?;
        Ok(StepMetrics { loss: *loss.value(), gradients: squared, monitored })
    }

    /// Adds the gradients of one of this rank's shards to those of its neighbors, in a group. See
    /// [`Shards::fold`].
    pub(super) fn fold(&mut self, arena: &mut Arena, shard: (usize, bool)) -> Result<()> {
        self.shards.as_mut().map_or(Ok(()), |shards| shards.fold(arena, &mut self.gradients, shard))
    }

    /// Starts the exchange of the last shard's complete gradients, in a group. See
    /// [`Shards::travel`].
    pub(super) fn travel(&mut self, arena: &mut Arena, complete: usize) -> Result<()> {
        self.shards.as_mut().map_or(Ok(()), |shards| shards.travel(arena, &mut self.gradients, complete))
    }

    /// Sums the gradients of all shards, in a group.
    pub(super) fn sum(&mut self, arena: &mut Arena, wanted: Wanted) -> Result<()> {
        let Some(shards) = &mut self.shards else { return Ok(()) };
        let layout = self.parameters.layout();
        let wanted = match wanted {
            Wanted::All => Some(0..layout.elements()),
            Wanted::Watched => {
                let monitored = self.model.monitored().map(|monitored| layout.entry(monitored)).transpose()?;
                monitored.map(ParameterEntry::range)
            }
        };
        shards.sum(arena, &mut self.gradients, wanted)
    }

    /// Makes the prepared update and passes its metrics to `metric`, in a group.
    #[track_caller]
    pub(super) fn update(&mut self, arena: &mut Arena, metric: &mut Metric<'_>) -> Result<()> {
        let Some(shards) = &self.shards else { return Ok(()) };
        let monitored = self.model.monitored();
        shards.update(arena, (&mut self.parameters, &mut self.gradients), &mut self.optimizer, monitored, metric)
    }

    /// Returns the sum of the losses of all parts of a batch. `losses` are this rank's own parts.
    /// `norms` must be equal on all ranks.
    #[track_caller]
    pub(super) fn loss_of_all(&self, losses: &[f32], norms: &[f32]) -> Result<f64> {
        let sum = |losses: &[f32]| float_mode::in_default(|| losses.iter().map(|&loss| f64::from(loss)).sum());
        match &self.shards {
            None => Ok(sum(losses)),
            Some(shards) => Ok(sum(&shards.losses_of_all(losses, norms)?)),
        }
    }

    /// Records [`TrainState::learn`] for a capture.
    pub(super) fn record<'s>(
        step: &mut Step<'s>,
        learner: &mut Self,
        slots: &CaptureInputs<'s>,
    ) -> Result<StepMetrics<Output, Output>> {
        let metrics = learner.learn(step, slots.batch(), MicroBatch::of(slots.variant()))?;
        for bucket in learner.shards.iter().flat_map(Shards::buckets) {
            slots.announce(learner.gradients.flat().memory().part(bucket.start, bucket.len()));
        }
        let output = |norm: Tensor<'s>| slots.output(&norm);
        let (gradients, monitored) = (metrics.gradients.map(output), metrics.monitored.map(output));
        Ok(StepMetrics { loss: slots.output(&metrics.loss), gradients, monitored })
    }
}
