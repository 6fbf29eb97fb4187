//! What is trained, and the step that trains it: the same function runs launch by launch and captured.

use super::agreement;
use super::batch::MicroBatch;
use super::shards::{Metric, Shards, Wanted};
use crate::autograd::{Tape, Var};
use crate::capture::{Batch, Output, Slots};
use crate::driver::Device;
use crate::error::Result;
use crate::group::Group;
use crate::group::agreement::Settings;
use crate::memory::Arena;
use crate::ops::{self, Generator};
use crate::optim::{AdamWConfig, Optimizer, ParameterGroups, UpdateRule};
use crate::params::{Gradients, Layout, LayoutEntry, Parameter, Parameters};
use crate::precision::Precision;
use crate::step::Step;
use crate::tensor::{Saved, Tensor};
use cuda_std::float_mode;

/// What a [`Trainer`](super::Trainer) trains: handles of parameters, and the way from a batch to a loss.
///
/// Its functions run on each step, or once for each capture: they do the same whenever they see batches of the same shapes. One model
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

    /// What training takes the gradients of, straight from a batch: the same numbers as [`Model::loss`] of [`Model::forward`], which it is
    /// unless it is overridden. A model overrides it that has its output in BF16: `forward` must widen that to f32, and `loss` narrow it again.
    ///
    /// # Errors
    /// Those of the ops.
    fn loss_of_batch<'s>(&self, tape: &Tape<'_, 's>, batch: &Batch<'s>, weight: f32) -> Result<Var<'s>> {
        self.loss(tape, &self.forward(tape, batch)?, batch, weight)
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
    /// How multiplies round their factors, in training and in evaluation.
    pub precision: Precision,
    /// Where training has dropout's numbers from; evaluation draws none.
    pub generator: Option<Generator>,
    /// Its part of a group's work, which [`Learner::in_group`] makes.
    pub shards: Option<Shards>,
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

    /// The same, for a model with dropout, whose numbers follow from `seed`, the number of the update and the part of the batch. A trainer's
    /// checkpoint has the seed.
    ///
    /// # Errors
    /// As for [`Generator::new`].
    pub fn with_dropout(self, seed: u64) -> Result<Self> {
        let generator = Generator::new(self.parameters.flat().device(), seed)?;
        Ok(Self { generator: Some(generator), ..self })
    }

    /// The same, trained by all ranks of a group: each has the same number of `shards`, neighbours in the batch, and the optimiser's state of a
    /// slice of each bucket of the weights. Call it last. The weights after an update depend on the number of shards and not on that of ranks, and all
    /// ranks have the same.
    ///
    /// Every rank is given the whole batch, in at least as many parts as there are shards, and asks its own parts alone for their values: those of [`Group::own_parts`]. Shard s
    /// has the parts from `s * parts / shards` on. The gradients of a shard are made alone, added up over its parts as without a group, and summed with the other shards' in one binary tree.
    /// The optimiser's rule sees this rank's slices alone, one after the other, so it must be one that changes each weight by its own gradient and state. [`Learner::gradients`] are the sums
    /// in this rank's slices, and something else beside them, unless [`Trainer::accumulate`](super::Trainer::accumulate) has made them. Behind
    /// an error on any rank all ranks end: go on from a checkpoint, with as many ranks as you like.
    ///
    /// Memory: a region like the gradients, and one more for each doubling of the shards of a rank.
    ///
    /// All ranks must have the same parameters, weights, optimiser and shards, which they compare
    /// here; and before the first update again, with precision, dropout's seed and all else that
    /// decides the weights. What only the program knows, such as the data, it compares by
    /// [`Group::agree_on`].
    ///
    /// # Errors
    /// [`Error::Misuse`](crate::Error::Misuse) for shards that are no power of two or that the
    /// ranks do not divide, and for a rule that does not give its settings
    /// ([`UpdateRule::configuration`]); [`Error::Disagreement`](crate::Error::Disagreement) when
    /// ranks differ; [`Error::Rank`](crate::Error::Rank) when one does not come;
    /// [`Error::DeviceMemory`](crate::Error::DeviceMemory) when there is no room.
    #[track_caller]
    pub fn in_group(mut self, group: &Group, shards: usize) -> Result<Self> {
        self.shards = Some(Shards::new(group.clone(), shards, &self.parameters, &mut self.optimizer)?);
        Ok(self)
    }

    /// All that a learner of a group of several ranks has that decides the weights. Waits.
    pub(super) fn settings(&self, shards: &Shards) -> Result<Settings> {
        let Self { model, parameters, optimizer, precision, generator, .. } = self;
        let mut settings = agreement::of_weights(shards.count(), parameters, optimizer)?;
        settings.add("precision", precision.to_string());
        if *precision != Precision::Ieee {
            // Matrix instructions of other GPUs round their sums otherwise.
            let description = parameters.flat().device().description();
            settings.add_option("compute capability", description.capability);
        }
        settings.add_option("dropout's seed", generator.as_ref().map(|generator| generator.seed()));
        let watched = model.watched().map(|watched| parameters.layout().entry(watched)).transpose()?;
        settings.add_option("watched parameter", watched.map(LayoutEntry::name));
        Ok(settings)
    }

    /// Sets the optimiser and the random numbers up for the next update, of which this device has the parts from `first` on, and returns its
    /// number.
    pub(super) fn advance(&mut self, first: usize) -> Result<u64> {
        let number = self.optimizer.advance()?;
        if let Some(generator) = &mut self.generator {
            // Each part of the batch counts one up; an update that came to nothing leaves no trace.
            generator.set(generator.seed(), number.rotate_left(u32::BITS) + first as u64)?;
        }
        Ok(number)
    }

    /// The same for a model that `wrap` makes of this one, with the same parameters.
    pub fn map_model<N: Model>(self, wrap: impl FnOnce(M) -> N) -> Learner<N, R> {
        let Self { model, parameters, gradients, optimizer, precision, generator, shards } = self;
        Learner { model: wrap(model), parameters, gradients, optimizer, precision, generator, shards }
    }

    /// The same, trained and evaluated with this precision.
    #[must_use]
    pub fn with_precision(self, precision: Precision) -> Self {
        Self { precision, ..self }
    }

    /// The same, with rates and weight decay by group; see [`Optimizer::with_parameter_groups`].
    ///
    /// # Errors
    /// As for [`Optimizer::with_parameter_groups`].
    pub fn with_parameter_groups(self, groups: &ParameterGroups) -> Result<Self> {
        Ok(Self { optimizer: self.optimizer.with_parameter_groups(groups)?, ..self })
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
        let Self { model, parameters, gradients, optimizer, precision, generator, .. } = self;
        step.set_precision(*precision);
        let tape = Tape::new(step, parameters);
        let tape = match generator {
            Some(generator) => tape.with_generator(generator),
            None => tape,
        };
        let loss = model.loss_of_batch(&tape, batch, 1.0 / part.samples as f32)?;
        if part.first {
            tape.backward_afresh(&loss, gradients)?;
        } else {
            tape.backward(&loss, gradients)?;
        }
        let watched = match model.watched().filter(|_| part.last) {
            Some(parameter) => Some(ops::squared_norm(step, &gradients.lend_mut(step, parameter)?)?),
            None => None,
        };
        let squared = part.update.then(|| optimizer.apply_with_norm(step, parameters, gradients)).transpose()?;
        Ok(StepMetrics { loss: *loss.value(), gradients: squared, watched })
    }

    /// In a group: adds the gradients of one of this rank's shards to its neighbours'; see [`Shards::fold`].
    pub(super) fn fold(&mut self, arena: &mut Arena, shard: (usize, bool)) -> Result<()> {
        self.shards.as_mut().map_or(Ok(()), |shards| shards.fold(arena, &mut self.gradients, shard))
    }

    /// In a group: has the gradients of the last shard travel that are complete; see [`Shards::travel`].
    pub(super) fn travel(&mut self, arena: &mut Arena, complete: usize) -> Result<()> {
        self.shards.as_mut().map_or(Ok(()), |shards| shards.travel(arena, &mut self.gradients, complete))
    }

    /// In a group: sums the gradients of all shards.
    pub(super) fn sum(&mut self, arena: &mut Arena, wanted: Wanted) -> Result<()> {
        let Some(shards) = &mut self.shards else { return Ok(()) };
        let layout = self.parameters.layout();
        let wanted = match wanted {
            Wanted::All => Some(0..layout.elements()),
            Wanted::Watched => {
                let watched = self.model.watched().map(|watched| layout.entry(watched)).transpose()?;
                watched.map(LayoutEntry::range)
            }
        };
        shards.sum(arena, &mut self.gradients, wanted)
    }

    /// In a group: makes the update that is set up, and gives its metrics.
    #[track_caller]
    pub(super) fn update(&mut self, arena: &mut Arena, metric: &mut Metric<'_>) -> Result<()> {
        let Some(shards) = &self.shards else { return Ok(()) };
        let watched = self.model.watched();
        shards.update(arena, (&mut self.parameters, &mut self.gradients), &mut self.optimizer, watched, metric)
    }

    /// The sum of the losses of all parts of a batch, of which these are the own ones; `norms` are what all ranks must have alike.
    #[track_caller]
    pub(super) fn loss_of_all(&self, losses: &[f32], norms: &[f32]) -> Result<f64> {
        let sum = |losses: &[f32]| float_mode::in_default(|| losses.iter().map(|&loss| f64::from(loss)).sum());
        match &self.shards {
            None => Ok(sum(losses)),
            Some(shards) => Ok(sum(&shards.losses_of_all(losses, norms)?)),
        }
    }

    /// [`Learner::learn`], to be captured.
    pub(super) fn record<'s>(
        step: &mut Step<'s>,
        learner: &mut Self,
        slots: &Slots<'s>,
    ) -> Result<StepMetrics<Output, Output>> {
        let metrics = learner.learn(step, slots.batch(), MicroBatch::of(slots.variant()))?;
        for bucket in learner.shards.iter().flat_map(Shards::buckets) {
            slots.announce(learner.gradients.flat().memory().part(bucket.start, bucket.len()));
        }
        let output = |norm: Tensor<'s>| slots.output(&norm);
        let (gradients, watched) = (metrics.gradients.map(output), metrics.watched.map(output));
        Ok(StepMetrics { loss: slots.output(&metrics.loss), gradients, watched })
    }
}
