//! The model, and the training step. The same step function runs eagerly and captured.

use super::agreement::{self, WeightSettings};
use super::batch::{EpochProgress, MicroBatch, compare_capabilities, dropout_seed};
use super::sync::{CallSite, GradientSync, Metric, Updated};
use crate::checkpoint::Checkpoint;
use crate::optim::{AdamW, Optimizer, ParameterGroups, UpdateRule, UpdateTicket};
use stepscope_core::ops::{Cast, Generator, Precision};
use stepscope_core::{
    Arena, CaptureInputs, Device, DeviceBatch, EagerStep, Element, Error, GradientType, Gradients, HostInputs,
    NonFinite, Output, Parameter, ParameterEntry, ParameterSpec, Parameters, Result, Saved, Step, Tape, Tensor,
    Transfer, Var, bf16,
};

/// A model that a [`Trainer`](super::Trainer) can train: parameter handles, and the computation
/// from a batch to a loss.
///
/// Its output, and usually its activations, are stored as `S`: f32, or [`bf16`](half::bf16) in
/// `impl Model<bf16> for ..`.
///
/// Its functions run at each step, or once per capture, and must do the same for all batches of the
/// same shapes. One model serves training and evaluation. [`Tape::dropout`] drops values only in
/// training (see [`TrainState::with_dropout`]), and [`Tape::is_evaluating`] returns which of the
/// two is running.
pub trait Model<S: Cast = f32> {
    /// Computes the model's output for a batch. For a classifier, these are logits
    /// `[samples, classes]`.
    fn forward<'s>(&self, tape: &Tape<'_, 's>, batch: &DeviceBatch<'s>) -> Result<Var<'s, S>>;

    /// Computes the mean loss of the samples, `[1]`. The default is the cross-entropy with the
    /// labels in the batch's input 1. If a batch has several parts, the trainer weights each part's
    /// mean by its number of samples.
    fn loss<'s>(&self, tape: &Tape<'_, 's>, output: &Var<'s, S>, batch: &DeviceBatch<'s>) -> Result<Var<'s>> {
        let labels = batch.indices(LABELS).map_err(|error| {
            let expected = "labels as the batch's input 1, which the default of `Model::loss` reads";
            Error::misuse("loss", expected, format!("`{error}`"))
        })?;
        tape.cross_entropy(&tape.to_f32(output)?, labels)
    }

    /// Computes the loss whose gradients train the model, `[1]`. The default is [`Model::loss`] of
    /// [`Model::forward`]. A model whose training loss has more terms, such as the balance of
    /// experts, adds them here. Evaluation does not include them.
    fn training_loss<'s>(&self, tape: &Tape<'_, 's>, batch: &DeviceBatch<'s>) -> Result<Var<'s>> {
        self.loss(tape, &self.forward(tape, batch)?, batch)
    }

    /// Computes [`Model::loss`] and further figures of the same samples, such as an accuracy. Each
    /// is `[1]` and a mean, like the loss. There are at most [`MOST_FIGURES`], and all batches have
    /// the same number. The default has none.
    fn loss_with_figures<'s>(
        &self,
        tape: &Tape<'_, 's>,
        output: &Var<'s, S>,
        batch: &DeviceBatch<'s>,
    ) -> Result<(Var<'s>, Vec<Saved<'s>>)> {
        Ok((self.loss(tape, output, batch)?, Vec::new()))
    }

    /// Computes [`Model::training_loss`] and figures like [`Model::loss_with_figures`], which each
    /// [`Update`](super::Update) reports. The default has none.
    fn training_loss_with_figures<'s>(
        &self,
        tape: &Tape<'_, 's>,
        batch: &DeviceBatch<'s>,
    ) -> Result<(Var<'s>, Vec<Saved<'s>>)> {
        Ok((self.training_loss(tape, batch)?, Vec::new()))
    }
}

/// The most figures that a [`Model`] reports in addition to its loss.
pub const MOST_FIGURES: usize = 8;

/// The input that has the labels of a classifier.
pub(super) const LABELS: usize = 1;

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
    /// The parameter whose gradient norm is reported with each update.
    pub monitored: Option<Parameter>,
    /// The ranks that train the model.
    pub(super) sync: Box<dyn GradientSync<R>>,
}

/// The elements whose gradient sums every rank receives, in addition to its own slices.
#[derive(Clone, Copy, Debug)]
pub(super) enum GatheredSums {
    /// The elements of the monitored parameter.
    Monitored,
    /// All elements.
    All,
}

/// The metrics of a step: its mean loss, the model's figures and up to two squared norms.
/// `gradients` is the norm of all gradients, if the step updates the weights. `monitored` is the
/// norm of the monitored gradient, if the gradients are complete.
pub(super) struct StepMetrics<Loss, Norm> {
    pub(super) loss: Loss,
    pub(super) figures: Vec<Loss>,
    pub(super) gradients: Option<Norm>,
    pub(super) monitored: Option<Norm>,
}

impl<M, R: UpdateRule> TrainState<M, R> {
    /// Creates a model whose initializers draw the weights from `seed`, and an optimizer with this
    /// rule and no updates yet. If the model's output is BF16, the weights have a BF16 copy.
    ///
    /// # Errors
    /// [`Error::DeviceMemory`](stepscope_core::Error::DeviceMemory) if memory runs out.
    /// [`Error::Misuse`](stepscope_core::Error::Misuse) for a setting that is out of range.
    pub fn new<S: Cast>(device: &Device, model: M, spec: &ParameterSpec, seed: u64, rule: R) -> Result<Self>
    where
        M: Model<S>,
    {
        let parameters = Parameters::new(device, spec, seed)?;
        let parameters = if <S as Element>::NAME == bf16::NAME { parameters.with_bf16_copy()? } else { parameters };
        let (gradients, optimizer) = (Gradients::zeros(&parameters)?, Optimizer::new(&parameters, rule)?);
        Ok(Self {
            model,
            parameters,
            gradients,
            optimizer,
            precision: Precision::default(),
            generator: None,
            monitored: None,
            sync: Box::new(()),
        })
    }

    /// Adds a dropout generator. Its numbers follow from `seed`, the number of the update and the
    /// part of the batch. A trainer's checkpoint stores the seed.
    pub fn with_dropout(self, seed: u64) -> Result<Self> {
        let generator = Generator::new(self.parameters.device(), seed)?;
        Ok(Self { generator: Some(generator), ..self })
    }

    /// Reports the gradient norm of this parameter with each update, in [`Update::monitored_l2`](super::Update::monitored_l2).
    #[must_use]
    pub fn with_monitored(self, parameter: Parameter) -> Self {
        Self { monitored: Some(parameter), ..self }
    }

    /// Returns everything that decides the weights in a train state of a group of several ranks.
    /// Waits for the device.
    pub(super) fn settings(&self, shards: usize) -> Result<WeightSettings> {
        let Self { parameters, optimizer, precision, generator, monitored, .. } = self;
        let mut settings = agreement::of_optimizer(shards, parameters, optimizer)?;
        settings.add("weights", parameters.sha256()?);
        settings.add_option("frozen weights", parameters.frozen_sha256()?);
        settings.add("precision", precision.to_string());
        if let Some(capability) = self.deciding_capability() {
            settings.add("compute capability", capability.to_string());
        }
        settings.add_option("dropout's seed", generator.as_ref().map(|generator| generator.seed()));
        let monitored = monitored.map(|monitored| parameters.spec().trained_entry(monitored)).transpose()?;
        settings.add_option("monitored parameter", monitored.map(ParameterEntry::name));
        Ok(settings)
    }

    /// Prepares the optimizer and the random numbers for the next update. Returns its number and
    /// its ticket. `first` is the first part of the batch that runs on this device.
    pub(super) fn advance(&mut self, first: usize) -> Result<(u64, UpdateTicket)> {
        let ticket = self.optimizer.advance()?;
        let number = self.optimizer.updates() + 1;
        if let Some(generator) = &mut self.generator {
            // Each part of the batch adds one. An update that failed leaves no trace.
            generator.set(generator.seed(), number.rotate_left(u32::BITS) + first as u64)?;
        }
        Ok((number, ticket))
    }

    /// Replaces the model with the one that `wrap` makes of it, with the same parameters.
    pub fn map_model<N>(self, wrap: impl FnOnce(M) -> N) -> TrainState<N, R> {
        let Self { model, parameters, gradients, optimizer, precision, generator, monitored, sync } = self;
        TrainState { model: wrap(model), parameters, gradients, optimizer, precision, generator, monitored, sync }
    }

    /// Sets the precision for training and evaluation.
    #[must_use]
    pub fn with_precision(self, precision: Precision) -> Self {
        Self { precision, ..self }
    }

    /// Sets rates and weight decay per parameter group. See [`Optimizer::with_parameter_groups`].
    pub fn with_parameter_groups(self, groups: &ParameterGroups) -> Result<Self> {
        Ok(Self { optimizer: self.optimizer.with_parameter_groups(groups)?, ..self })
    }

    /// Adds a BF16 copy of the weights, for a model whose output is f32 but which computes in BF16.
    /// See [`Parameters::with_bf16_copy`].
    pub fn with_bf16_copy(self) -> Result<Self> {
        Ok(Self { parameters: self.parameters.with_bf16_copy()?, ..self })
    }

    /// Runs forward and backward and, with a `ticket`, the update.
    #[track_caller]
    pub(super) fn learn<'s, S: Cast>(
        &mut self,
        step: &Step<'s>,
        batch: &DeviceBatch<'s>,
        part: MicroBatch,
        ticket: Option<UpdateTicket>,
    ) -> Result<StepMetrics<Saved<'s>, Tensor<'s>>>
    where
        M: Model<S>,
    {
        let Self { model, parameters, gradients, optimizer, precision, generator, monitored, .. } = self;
        step.set_precision(*precision);
        let tape = Tape::new(step, parameters).of_part(part.samples, part.batch);
        let tape = match generator {
            Some(generator) => tape.with_generator(generator),
            None => tape,
        };
        let (loss, figures) = model.training_loss_with_figures(&tape, batch)?;
        if figures.len() > MOST_FIGURES {
            let expected = format!("at most {MOST_FIGURES} figures of a model");
            return Err(Error::misuse("update", expected, figures.len().to_string()));
        }
        if parameters.spec().gradients() == GradientType::Released {
            let (MicroBatch { first: true, last: true, .. }, Some(ticket), None) = (&part, ticket, &*monitored) else {
                let expected = "one step for each update and no monitored parameter, because gradients are released";
                return Err(Error::misuse("update", expected, "several steps, or a monitored parameter"));
            };
            let squared = optimizer.apply_in_backward(ticket, tape, &loss)?;
            return Ok(StepMetrics { loss: *loss.value(), figures, gradients: Some(squared), monitored: None });
        }
        if part.first {
            tape.backward_overwrite(&loss, gradients)?;
        } else {
            tape.backward(&loss, gradients)?;
        }
        let monitored = match monitored.filter(|_| part.last) {
            Some(parameter) => Some(gradients.squared_norm(step, Some(parameter))?),
            None => None,
        };
        let update = |ticket| optimizer.apply_with_norm(ticket, step, parameters, gradients);
        let squared = ticket.map(update).transpose()?;
        Ok(StepMetrics { loss: *loss.value(), figures, gradients: squared, monitored })
    }

    /// Runs forward and the loss of a batch, without gradients. Returns the model's output, the
    /// mean of the samples' losses, and the model's figures.
    #[track_caller]
    pub(super) fn evaluate<'s, S: Cast>(
        &self,
        step: &EagerStep<'s>,
        inputs: &HostInputs<'_>,
    ) -> Result<(Var<'s, S>, Var<'s>, Vec<Saved<'s>>)>
    where
        M: Model<S>,
    {
        step.set_precision(self.precision);
        let batch = step.upload_inputs(inputs)?;
        let tape = Tape::new(step, &self.parameters).evaluating();
        let output = self.model.forward(&tape, &batch)?;
        let (loss, figures) = self.model.loss_with_figures(&tape, &output, &batch)?;
        Ok((output, loss, figures))
    }

    /// Sums the gradients of all shards of a group.
    pub(super) fn sum_gradients(&mut self, arena: &mut Arena, wanted: GatheredSums) -> Result<()> {
        let spec = self.parameters.spec();
        let wanted = match wanted {
            GatheredSums::All => Some(0..spec.elements()),
            GatheredSums::Monitored => {
                let monitored = self.monitored.map(|monitored| spec.trained_entry(monitored)).transpose()?;
                monitored.map(ParameterEntry::range)
            }
        };
        self.sync.finish(arena, &mut self.gradients, wanted)
    }

    /// Makes the update of `ticket` after all steps of a batch, and passes its metrics to `metric`.
    #[track_caller]
    pub(super) fn update(&mut self, arena: &mut Arena, ticket: UpdateTicket, metric: &mut Metric<'_>) -> Result<()> {
        let Self { parameters, gradients, optimizer, .. } = self;
        let of = Updated { parameters, gradients, optimizer };
        self.sync.update(arena, ticket, of, self.monitored, metric)
    }

    /// Restores the weights, optimizer and dropout seed, and returns the epoch's progress.
    pub(super) fn restore(
        &mut self,
        checkpoint: &Checkpoint,
        non_finite: NonFinite,
        site: CallSite,
    ) -> Result<EpochProgress> {
        let progress = EpochProgress::of(checkpoint)?;
        compare_capabilities(checkpoint, self.deciding_capability());
        let Self { parameters, optimizer, generator, sync, .. } = self;
        let seed = generator.as_ref().map(|_| dropout_seed(checkpoint)).transpose()?;
        sync.restore(checkpoint, site)?;
        // Checkpoints are not sliced.
        let slices = optimizer.slices().to_vec();
        optimizer.keep(std::iter::once(0..parameters.spec().elements()).collect())?;
        let restored = checkpoint.restore_with(parameters, Some(optimizer), Transfer::new().non_finite(non_finite));
        optimizer.keep(slices)?;
        restored?;
        if let (Some(generator), Some(seed)) = (generator, seed) {
            // The next update sets the step.
            generator.set(seed, 0)?;
        }
        Ok(progress)
    }

    /// Returns ten times the compute capability, if it decides bits of the weights by the rule of
    /// its matrix instructions: only f32 multiplies have the same bits with each. The emulator has
    /// the rule of 9.0.
    pub(super) fn deciding_capability(&self) -> Option<u32> {
        let device = self.parameters.device();
        let decides = self.precision != Precision::F32 || self.parameters.bf16_copy().is_some();
        decides.then(|| device.description().capability.unwrap_or(90))
    }

    /// Records [`TrainState::learn`] for a capture.
    pub(super) fn record<'s, S: Cast>(
        step: &mut Step<'s>,
        state: &mut Self,
        slots: &CaptureInputs<'s>,
    ) -> Result<StepMetrics<Output, Output>>
    where
        M: Model<S>,
    {
        let part = MicroBatch::of(slots.variant());
        let ticket = part.update.then(|| UpdateTicket::each_replay(slots));
        let metrics = state.learn(step, slots.batch(), part, ticket)?;
        for bucket in state.sync.buckets() {
            slots.announce(state.gradients.region()?.words_of(bucket.clone()));
        }
        let output = |norm: Tensor<'s>| slots.output(&norm);
        let (gradients, monitored) = (metrics.gradients.map(output), metrics.monitored.map(output));
        let figures = metrics.figures.iter().map(|figure| slots.output(figure)).collect();
        Ok(StepMetrics { loss: slots.output(&metrics.loss), figures, gradients, monitored })
    }
}
