//! Our side of the bench: the training step of CrossAsset on random inputs, eager and captured.
//!
//! Invariant: [`train`] is the one definition of the step's work, whether it is recorded or not.

use stepscope::{
    AdamW, AdamWConfig, Arena, Capacity, Device, Eager, Gradients, Parameters, Result, Saved, Step, Tape, Tensor,
};

use crate::dataset::CLASSES;
use crate::features::{FEATURES, SCALES};
use crate::harness::{self, Samples};
use crate::model::Model;
use crate::{Line, Measure, Plan};

const SEED: u64 = 7;

/// What outlives the steps.
struct State {
    model: Model,
    parameters: Parameters,
    gradients: Gradients,
    optimizer: AdamW,
}

/// A batch on the host.
struct Batch {
    x: Vec<f32>,
    labels: Vec<u32>,
}

/// Our contenders for one batch size.
pub(crate) struct Ours {
    device: Device,
    plan: Plan,
    batch: Batch,
}

/// The step's work on the device: zero gradients, forward, loss, backward, clipping, AdamW. Returns the loss, `[1]`.
/// `x`: `[batch, 12, 193]`, `labels`: `[batch]`.
fn train<'s>(step: &Step<'s>, state: &mut State, x: Tensor<'s>, labels: Tensor<'s, u32>) -> Result<Saved<'s>> {
    let State { model, parameters, gradients, optimizer } = state;
    let weight = 1.0 / labels.shape().elements() as f32;
    gradients.zero(step)?;
    let tape = Tape::new(step, parameters);
    let logits = model.forward(&tape, &tape.input(x))?;
    let loss = tape.cross_entropy(&logits, labels.save(), weight)?;
    tape.backward(&loss, gradients)?;
    optimizer.apply(step, parameters, gradients)?;
    Ok(*loss.value())
}

impl State {
    fn new(device: &Device) -> Result<Self> {
        let (model, layout) = Model::new()?;
        let parameters = Parameters::new(device, &layout, SEED)?;
        let config = AdamWConfig { clip: Some(1.0), ..AdamWConfig::default() };
        let (gradients, optimizer) = (Gradients::zeros(&parameters)?, AdamW::new(&parameters, config)?);
        Ok(Self { model, parameters, gradients, optimizer })
    }
}

impl Batch {
    /// Inputs spread evenly over `[-1, 1)` (multiples of the golden ratio, less their whole part), and every class in turn.
    fn new(len: usize) -> Self {
        let unit = |at: u32| (at.wrapping_mul(0x9e37_79b9) >> 8) as f32 / (1 << 24) as f32;
        let x = (0..(len * SCALES.len() * FEATURES) as u32).map(|at| 2.0 * unit(at) - 1.0).collect();
        let labels = (0..len).map(|at| (at % CLASSES) as u32).collect();
        Self { x, labels }
    }

    fn upload<'s>(&self, step: &Eager<'s>) -> Result<(Tensor<'s>, Tensor<'s, u32>)> {
        let len = self.labels.len();
        Ok((step.upload(&self.x, [len, SCALES.len(), FEATURES])?, step.upload(&self.labels, [len])?))
    }
}

impl Ours {
    /// Contenders that train on a random batch on `device`.
    pub(crate) fn new(device: &Device, plan: Plan) -> Self {
        Self { device: device.clone(), plan, batch: Batch::new(plan.batch) }
    }

    /// The lines of all our contenders.
    ///
    /// # Errors
    /// Those of the steps.
    pub(crate) fn measure(&self) -> Result<Vec<Line>> {
        self.eager()
    }

    /// Steps that launch their kernels one by one. An eager step's inputs are its own, so it always uploads.
    fn eager(&self) -> Result<Vec<Line>> {
        let mut state = State::new(&self.device)?;
        let sized = Arena::builder(&self.device).capacity(Capacity::mib(1)).build()?;
        let need = sized.measure(|step| {
            let (x, labels) = self.batch.upload(step)?;
            train(step, &mut state, x, labels).map(drop)
        })?;
        let mut arena = Arena::builder(&self.device).capacity(Capacity::Measured(need)).build()?;
        self.times("stepscope eager", &[Measure::RoundTrip, Measure::Queued], |measure| {
            state.optimizer.advance()?;
            arena.step(|step| {
                let (x, labels) = self.batch.upload(step)?;
                let loss = train(step, &mut state, x, labels)?;
                (measure == Measure::RoundTrip).then(|| step.read_scalar(&loss)).transpose()
            })
        })
    }

    /// Lines of a contender whose `step` runs a step for a measure, and reads the loss where the measure has it.
    fn times(
        &self,
        contender: &str,
        measures: &[Measure],
        mut step: impl FnMut(Measure) -> Result<Option<f32>>,
    ) -> Result<Vec<Line>> {
        let Plan { batch, samples, row } = self.plan;
        let mut line = |&measure: &Measure| {
            let each = if measure == Measure::RoundTrip { 1 } else { row };
            let work = || {
                let loss = step(measure)?;
                assert!(loss.is_none_or(f32::is_finite), "{contender} no longer trains: its loss is {loss:?}");
                Ok(())
            };
            let settle = || self.device.synchronize(self.device.deadline());
            let nanoseconds = Samples::collect(samples, each, work, settle)?;
            Ok(Line::Measured { batch, contender: contender.into(), measure, nanoseconds })
        };
        measures.iter().map(&mut line).collect()
    }
}

/// Compares the peer's model with ours.
///
/// # Errors
/// When it has another number of tensors or weights: the table would compare different work.
pub(crate) fn check_model(tensors: usize, weights: usize) -> harness::Result<()> {
    let (_, layout) = Model::new()?;
    let ours = (layout.entries().len(), layout.entries().iter().map(|entry| entry.shape().elements()).sum::<usize>());
    if ours == (tensors, weights) {
        return Ok(());
    }
    let (our_tensors, our_weights) = ours;
    Err(format!(
        "PyTorch's model has {tensors} tensors with {weights} weights, ours {our_tensors} with {our_weights}: not the same work"
    )
    .into())
}
