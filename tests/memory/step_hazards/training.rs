//! A transformer layer with a head in training: every kind of saved tensor, eager or captured.

#[path = "../../../examples/crossasset/layers.rs"]
#[allow(dead_code, reason = "only one of its ops runs here")]
mod layers;

use self::layers::norm_project;
use crate::step_hazards::run::Run;
use crate::support::Random;
use std::ops::Range;
use stepscope::capture::{CaptureInputs, Output};
use stepscope::nn::RmsNorm;
use stepscope::optim::UpdateTicket;
use stepscope::parameters::{Initializer, StackedParameters};
use stepscope::tensor::{Indices, Saved};
use stepscope::{
    AdamW, Arena, Capacity, Device, EagerStep, Gradients, HostInputs, Optimizer, Parameter, ParameterSpec, Parameters,
    Result, Step, Tape,
};

/// The batches of a run.
pub(crate) const BATCHES: usize = 4;
/// The samples of a batch, unless a test uses more.
pub(crate) const ROWS: usize = 6;
pub(crate) const TOKENS: usize = 5;
const WIDTH: usize = 64;
const HIDDEN: usize = 96;
const CLASSES: usize = 3;

/// Samples and their labels.
pub(crate) struct Batch {
    x: Vec<f32>,
    labels: Vec<u32>,
}

impl Batch {
    /// Returns the inputs of a captured step.
    pub(crate) fn inputs(&self) -> HostInputs<'_> {
        let rows = self.labels.len();
        HostInputs::new().with(&self.x, [rows, TOKENS, WIDTH]).unwrap().with(&self.labels, [rows]).unwrap()
    }

    /// Uploads samples `rows` to the device.
    pub(crate) fn upload<'s>(&self, step: &EagerStep<'s>, rows: Range<usize>) -> Result<(Saved<'s>, Indices<'s>)> {
        let (sample, len) = (TOKENS * WIDTH, rows.len());
        let x = step.upload(&self.x[rows.start * sample..rows.end * sample], [len, TOKENS, WIDTH])?.save();
        Ok((x, step.upload_indices(&self.labels[rows], [len])?))
    }
}

/// Returns the batches of a run, each of `rows` samples.
pub(crate) fn batches(rows: usize) -> Vec<Batch> {
    let mut random = Random::new(11);
    let mut batch = || Batch { x: random.normals(rows * TOKENS * WIDTH), labels: random.belows(rows, CLASSES as u32) };
    (0..BATCHES).map(|_| batch()).collect()
}

/// The handles of the model's parameters.
pub(crate) struct Model {
    norm: Parameter,
    qkv: StackedParameters,
    qk_norm: StackedParameters,
    out: Parameter,
    inner: [Parameter; 2],
    outer: [Parameter; 2],
    head: [Parameter; 2],
}

impl Model {
    fn new() -> (Self, ParameterSpec) {
        let mut spec = ParameterSpec::builder();
        let qkv = spec.add_stack(3, |at| ["q", "k", "v"][at].into(), [WIDTH, WIDTH], Initializer::fan_in(WIDTH));
        let qk_norm = spec.add_stack(2, |at| format!("qk_norm{at}"), [64], Initializer::Constant(1.0));
        let mut matrix = |name: &str, rows, cols| spec.add(name, [rows, cols], Initializer::fan_in(rows));
        let out = matrix("out", WIDTH, WIDTH);
        let (inner, outer) = (matrix("inner", WIDTH, HIDDEN), matrix("outer", HIDDEN, WIDTH));
        let head = matrix("head", WIDTH, CLASSES);
        let mut vector = |name: &str, len, start| spec.add(name, [len], Initializer::Constant(start));
        let model = Self {
            norm: vector("norm", WIDTH, 1.0),
            qkv,
            qk_norm,
            out,
            inner: [inner, vector("inner.bias", HIDDEN, 0.0)],
            outer: [outer, vector("outer.bias", WIDTH, 0.0)],
            head: [head, vector("head.bias", CLASSES, 0.0)],
        };
        (model, spec.build().unwrap())
    }

    /// Computes the loss on a tape, where each sample weighs `weight`.
    pub(crate) fn loss<'s>(
        &self,
        tape: &Tape<'_, 's>,
        (x, labels): (Saved<'s>, Indices<'s>),
        weight: f32,
    ) -> Result<stepscope::Var<'s>> {
        let x = tape.input(x);
        let qkv = norm_project(tape, &x, RmsNorm { gain: self.norm, epsilon: 1e-6 }, &self.qkv)?;
        let mixed = tape.attention(&qkv, Some((&self.qk_norm, 1e-6)), &stepscope::ops::AttentionConfig::new(1))?;
        let h = tape.linear_residual(&mixed, self.out, None, &x)?;
        let inner = tape.linear_gelu(&h, self.inner[0], Some(self.inner[1]))?;
        let h = tape.linear_residual(&inner.tanh()?, self.outer[0], Some(self.outer[1]), &h)?;
        let logits = tape.linear(&tape.mean_tokens(&h)?, self.head[0], Some(self.head[1]))?;
        tape.cross_entropy_by(&logits, labels, stepscope::ops::LabelRules::default().weighted(weight))
    }
}

/// A model in training, and its results so far.
pub(crate) struct Trainer {
    pub(crate) model: Model,
    pub(crate) parameters: Parameters,
    pub(crate) gradients: Gradients,
    optimizer: Optimizer<AdamW>,
    /// The weight of each sample: one over the samples of a batch.
    pub(crate) weight: f32,
    pub(crate) run: Run,
}

impl Trainer {
    /// Returns fresh weights, for batches of `rows` samples.
    pub(crate) fn new(device: &Device, rows: usize) -> Self {
        let (model, spec) = Model::new();
        let parameters = Parameters::new(device, &spec, 3).unwrap();
        let gradients = Gradients::zeros(&parameters).unwrap();
        let config = AdamW { learning_rate: 1e-2, clip: Some(1.0), ..AdamW::default() };
        let optimizer = Optimizer::new(&parameters, config).unwrap();
        Self { model, parameters, gradients, optimizer, weight: 1.0 / rows as f32, run: Run::default() }
    }

    /// Runs forward, backward and update within `step`, in micro-batches of `rows`.
    pub(crate) fn train(&mut self, step: &EagerStep<'_>, batch: &Batch, rows: usize) -> Result<()> {
        self.gradients.zero(step)?;
        let (mut loss, samples) = (0.0, batch.labels.len());
        for start in (0..samples).step_by(rows) {
            loss += self.accumulate(step, batch, start..samples.min(start + rows))?;
        }
        self.update(step, loss)
    }

    /// Runs forward and backward of some samples, and returns their part of the loss.
    pub(crate) fn accumulate(&mut self, step: &EagerStep<'_>, batch: &Batch, rows: Range<usize>) -> Result<f32> {
        let loss = self.learn(step, batch.upload(step, rows)?)?;
        step.read_scalar(&loss)
    }

    /// Makes the update that ends a batch.
    pub(crate) fn update(&mut self, step: &Step<'_>, loss: f32) -> Result<()> {
        let ticket = self.optimizer.advance()?;
        self.optimizer.apply(ticket, step, &mut self.parameters, &self.gradients)?;
        self.note(loss);
        Ok(())
    }

    /// Adds a batch's loss, gradients and weights to the run.
    pub(crate) fn note(&mut self, loss: f32) {
        let (gradients, weights) = (self.gradients.read_flat().unwrap(), self.parameters.read_flat().unwrap());
        self.run.push(loss, gradients, weights, &self.gradients.read(self.model.head[0]).unwrap());
    }

    fn learn<'s>(&mut self, step: &Step<'s>, samples: (Saved<'s>, Indices<'s>)) -> Result<Saved<'s>> {
        let tape = Tape::new(step, &self.parameters);
        let loss = self.model.loss(&tape, samples, self.weight)?;
        tape.backward(&loss, &mut self.gradients)?;
        Ok(*loss.value())
    }

    /// Records a batch for a capture.
    fn record<'s>(step: &mut Step<'s>, trainer: &mut Self, slots: &CaptureInputs<'s>) -> Result<Output> {
        trainer.gradients.zero(step)?;
        let loss = trainer.learn(step, (slots.input(0)?, slots.indices(1)?))?;
        trainer.optimizer.apply(UpdateTicket::each_replay(slots), step, &mut trainer.parameters, &trainer.gradients)?;
        Ok(slots.output(&loss))
    }
}

pub(crate) fn arena(device: &Device) -> Arena {
    Arena::builder(device).capacity(Capacity::mib(8)).build().unwrap()
}

/// Trains with a reset between batches, and calls `before` with the arena before each.
pub(crate) fn eagerly(mut arena: Arena, mut before: impl FnMut(&mut Arena)) -> Run {
    let mut trainer = Trainer::new(arena.device(), ROWS);
    for batch in batches(ROWS) {
        before(&mut arena);
        arena.step(|step| trainer.train(step, &batch, ROWS)).unwrap();
    }
    trainer.run
}

/// Trains by replays of one captured step, and calls `before` with the arena before each.
pub(crate) fn captured(mut arena: Arena, mut before: impl FnMut(&mut Arena)) -> Run {
    let (batches, trainer) = (batches(ROWS), Trainer::new(arena.device(), ROWS));
    let mut captured = arena.capture(trainer, &batches[0].inputs(), Trainer::record).unwrap();
    for batch in &batches {
        before(&mut arena);
        captured.state_mut().optimizer.advance().unwrap().leave_to_replay();
        let replay = captured.replay(&batch.inputs()).unwrap();
        let loss = replay.read_scalar(*replay.outputs()).unwrap();
        captured.state_mut().note(loss);
    }
    assert_eq!(captured.report().replays, BATCHES as u64);
    captured.into_state().run
}
