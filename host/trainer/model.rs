//! What is trained, and the step that trains it: the same function runs launch by launch and captured.

use super::batch::MicroBatch;
use crate::autograd::{Tape, Var};
use crate::capture::{Batch, Output, Slots};
use crate::driver::Device;
use crate::error::Result;
use crate::ops::{self, Generator};
use crate::optim::{AdamWConfig, Groups, Optimizer, UpdateRule};
use crate::params::{Gradients, Layout, Parameter, Parameters};
use crate::precision::Precision;
use crate::step::Step;
use crate::tensor::{Saved, Tensor};

/// What a [`Trainer`](super::Trainer) trains: handles of parameters, and the way from a batch to a loss.
///
/// Both functions run on each step, or once for each capture: they do the same whenever they see batches of the same shapes. One model
/// trains and evaluates: [`Tape::dropout`] drops while it trains ([`Learner::with_dropout`]), and [`Tape::is_evaluating`] tells.
pub trait Model {
    /// What the model makes of a batch: of a classifier, logits `[samples, classes]`.
    ///
    /// # Errors
    /// Those of the ops.
    fn forward<'s>(&self, tape: &Tape<'_, 's>, batch: &Batch<'s>) -> Result<Var<'s>>;

    /// `weight` times the sum of the samples' losses, `[1]`; unless it is overridden, their cross-entropy with the labels that
    /// are the batch's input 1.
    ///
    /// # Errors
    /// Those of the ops.
    fn loss<'s>(&self, tape: &Tape<'_, 's>, output: &Var<'s>, batch: &Batch<'s>, weight: f32) -> Result<Var<'s>> {
        tape.cross_entropy(output, batch.input(1)?, weight)
    }

    /// A parameter whose gradient's norm is reported with each update.
    fn watched(&self) -> Option<Parameter> {
        None
    }
}

/// A model with its weights, gradients and optimiser: what steps of training change.
#[derive(Debug)]
pub struct Learner<M, R = AdamWConfig> {
    /// The handles.
    pub model: M,
    /// The weights.
    pub parameters: Parameters,
    /// The gradients of the batch that is being trained on.
    pub gradients: Gradients,
    /// The optimiser.
    pub optimizer: Optimizer<R>,
    /// How the multiplies of training round their factors; evaluation is always [`Precision::Ieee`].
    pub precision: Precision,
    /// Where training has dropout's numbers from; evaluation draws none.
    pub generator: Option<Generator>,
}

/// What a step measures: its share of the loss; when it updates the weights, the squared norm of all gradients; and when these are
/// complete, of the watched one.
pub(super) struct StepMetrics<Loss, Norm> {
    pub(super) loss: Loss,
    pub(super) gradients: Option<Norm>,
    pub(super) watched: Option<Norm>,
}

impl<M: Model, R: UpdateRule> Learner<M, R> {
    /// A model with the weights that its initialisers make from `seed`, and an optimiser of this rule that has made no update.
    ///
    /// # Errors
    /// [`Error::DeviceMemory`](crate::Error::DeviceMemory) when there is no room; [`Error::Misuse`](crate::Error::Misuse) for a setting out of range.
    pub fn new(device: &Device, model: M, layout: &Layout, seed: u64, rule: R) -> Result<Self> {
        let parameters = Parameters::new(device, layout, seed)?;
        let (gradients, optimizer) = (Gradients::zeros(&parameters)?, Optimizer::new(&parameters, rule)?);
        Ok(Self { model, parameters, gradients, optimizer, precision: Precision::default(), generator: None })
    }

    /// The same, for a model with dropout, whose numbers follow from `seed`, the number of the update and the part of the batch. A trainer's
    /// checkpoint has the seed.
    ///
    /// # Errors
    /// As for [`Generator::new`].
    pub fn with_dropout(self, seed: u64) -> Result<Self> {
        let generator = Generator::new(self.parameters.flat().device(), seed)?;
        Ok(Self { generator: Some(generator), ..self })
    }

    /// Sets the optimiser and the random numbers up for the next update, and returns its number.
    pub(super) fn advance(&mut self) -> Result<u64> {
        let number = self.optimizer.advance()?;
        if let Some(generator) = &mut self.generator {
            // Each part of the batch counts one up; an update that came to nothing leaves no trace.
            generator.set(generator.seed(), number.rotate_left(u32::BITS))?;
        }
        Ok(number)
    }

    /// The same, trained with this precision.
    #[must_use]
    pub fn with_precision(self, precision: Precision) -> Self {
        Self { precision, ..self }
    }

    /// The same, with rates and weight decay by group; see [`Optimizer::with_groups`].
    ///
    /// # Errors
    /// As for [`Optimizer::with_groups`].
    pub fn with_groups(self, groups: &Groups) -> Result<Self> {
        Ok(Self { optimizer: self.optimizer.with_groups(groups)?, ..self })
    }

    /// The same, with a BF16 copy of the weights; see [`Parameters::with_bf16_copy`].
    ///
    /// # Errors
    /// As for [`Parameters::with_bf16_copy`].
    pub fn with_bf16_copy(self) -> Result<Self> {
        Ok(Self { parameters: self.parameters.with_bf16_copy()?, ..self })
    }

    /// Forward, backward and, at the end of a batch, the update that [`Optimizer::advance`] has set up.
    #[track_caller]
    pub(super) fn learn<'s>(
        &mut self,
        step: &Step<'s>,
        batch: &Batch<'s>,
        part: MicroBatch,
    ) -> Result<StepMetrics<Saved<'s>, Tensor<'s>>> {
        let Self { model, parameters, gradients, optimizer, precision, generator } = self;
        step.set_precision(*precision);
        let tape = Tape::new(step, parameters);
        let tape = match generator {
            Some(generator) => tape.with_generator(generator),
            None => tape,
        };
        let output = model.forward(&tape, batch)?;
        let loss = model.loss(&tape, &output, batch, 1.0 / part.samples as f32)?;
        if part.first {
            tape.backward_afresh(&loss, gradients)?;
        } else {
            tape.backward(&loss, gradients)?;
        }
        let watched = match model.watched().filter(|_| part.last) {
            Some(parameter) => Some(ops::squared_norm(step, &gradients.lend_mut(step, parameter)?)?),
            None => None,
        };
        let squared = part.update.then(|| optimizer.apply(step, parameters, gradients)).transpose()?;
        Ok(StepMetrics { loss: *loss.value(), gradients: squared, watched })
    }

    /// [`Learner::learn`], to be captured.
    pub(super) fn record<'s>(
        step: &mut Step<'s>,
        learner: &mut Self,
        slots: &Slots<'s>,
    ) -> Result<StepMetrics<Output, Output>> {
        let metrics = learner.learn(step, slots.batch(), MicroBatch::of(slots.variant()))?;
        let output = |norm: Tensor<'s>| slots.output(&norm);
        let (gradients, watched) = (metrics.gradients.map(output), metrics.watched.map(output));
        Ok(StepMetrics { loss: slots.output(&metrics.loss), gradients, watched })
    }
}
