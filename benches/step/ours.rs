//! Our side of the bench: the training step of CrossAsset on random inputs, eager and captured.
//!
//! Invariant: [`train`] is the only definition of the step's work, recorded or not.

use std::ops::Deref;

use stepscope::capture::{CaptureInputs, Output};
use stepscope::memory::{Measured, PageLocked};
use stepscope::ops::{Activation, Precision};
use stepscope::optim::UpdateTicket;
use stepscope::tensor::{Indices, Saved};
use stepscope::{
    AdamW, Arena, Capacity, Device, DeviceKind, EagerStep, Gradients, HostInputs, Optimizer, Parameters, Result, Step,
    Tape,
};

use crate::harness::values::uniform;
use crate::harness::{self, Samples};
use crate::model::Model;
use crate::sizes::{CLASSES, FEATURES, SCALES};
use crate::{Line, Measure, Plan};

const SEED: u64 = 7;
/// So small that after hundreds of steps on one batch, different contenders still have
/// distinguishable losses. peers/step.py has the same value.
const LEARNING_RATE: f32 = 1e-5;

/// A batch for [`train`]: `[batch, 12, 193]` and `[batch]`.
type Inside<'s> = (Saved<'s>, Indices<'s>);

/// The state that persists across steps; activations are of type `S`.
struct State<S> {
    model: Model<S>,
    parameters: Parameters,
    gradients: Gradients,
    optimizer: Optimizer<AdamW>,
    precision: Precision,
}

/// A batch on the host, in pageable or pinned memory.
struct Batch<X, L> {
    x: X,
    labels: L,
}

/// Our contenders for one batch size.
pub(crate) struct Ours {
    device: Device,
    plan: Plan,
    batch: Batch<Vec<f32>, Vec<u32>>,
    page_locked: Batch<PageLocked<f32>, PageLocked<u32>>,
}

/// The measurements of a contender.
struct Timed {
    lines: Vec<Line>,
    /// The losses, in the order of reading.
    losses: Vec<f32>,
}

/// Queues the step's work: forward, loss, backward that overwrites the gradients, clipping, AdamW.
/// Returns the loss, `[1]`.
fn train<'s, S: Activation>(
    step: &Step<'s>,
    state: &mut State<S>,
    ticket: UpdateTicket,
    (x, labels): Inside<'s>,
) -> Result<Saved<'s>> {
    let State { model, parameters, gradients, optimizer, precision } = state;
    step.set_precision(*precision);
    let tape = Tape::new(step, parameters);
    let logits = model.logits(&tape, &tape.input(x))?;
    let loss = tape.cross_entropy(&tape.to_f32(&logits)?, labels)?;
    tape.backward_overwrite(&loss, gradients)?;
    optimizer.apply(ticket, step, parameters, gradients)?;
    Ok(*loss.value())
}

/// Records [`train`] for a capture.
fn record<'s, S: Activation>(step: &mut Step<'s>, state: &mut State<S>, slots: &CaptureInputs<'s>) -> Result<Output> {
    let inside = (slots.input(0)?, slots.indices(1)?);
    Ok(slots.output(&train(step, state, UpdateTicket::each_replay(slots), inside)?))
}

impl<S: Activation> State<S> {
    fn new(device: &Device, precision: Precision) -> Result<Self> {
        let (model, spec) = Model::new()?;
        let parameters = Parameters::new(device, &spec, SEED)?;
        let parameters = if size_of::<S>() < size_of::<f32>() { parameters.with_bf16_copy()? } else { parameters };
        let config = AdamW { learning_rate: LEARNING_RATE, clip: Some(1.0), ..AdamW::default() };
        let (gradients, optimizer) = (Gradients::zeros(&parameters)?, Optimizer::new(&parameters, config)?);
        Ok(Self { model, parameters, gradients, optimizer, precision })
    }
}

impl Batch<Vec<f32>, Vec<u32>> {
    /// Returns random inputs, with the classes in turn.
    fn new(len: usize) -> Self {
        let x = uniform(len * SCALES.len() * FEATURES, 1);
        let labels = (0..len).map(|at| (at % CLASSES) as u32).collect();
        Self { x, labels }
    }

    /// Copies the batch to pinned memory.
    fn page_locked(&self, device: &Device) -> Result<Batch<PageLocked<f32>, PageLocked<u32>>> {
        let mut x = PageLocked::zeros(device, self.x.len())?;
        x.write()?.copy_from_slice(&self.x);
        let mut labels = PageLocked::zeros(device, self.labels.len())?;
        labels.write()?.copy_from_slice(&self.labels);
        Ok(Batch { x, labels })
    }
}

impl<X: Deref<Target = [f32]>, L: Deref<Target = [u32]>> Batch<X, L> {
    fn upload<'s>(&self, step: &EagerStep<'s>) -> Result<Inside<'s>> {
        let len = self.labels.len();
        let x = step.upload(&self.x, [len, SCALES.len(), FEATURES])?;
        Ok((x.save(), step.upload_indices(&self.labels, [len])?))
    }

    fn inputs(&self) -> Result<HostInputs<'_>> {
        let len = self.labels.len();
        HostInputs::new().with(&self.x, [len, SCALES.len(), FEATURES])?.with(&self.labels, [len])
    }
}

impl Ours {
    /// Creates contenders that train on a random batch on `device`.
    ///
    /// # Errors
    /// When the host cannot allocate pinned memory for it.
    pub(crate) fn new(device: &Device, plan: Plan) -> Result<Self> {
        let batch = Batch::new(plan.batch);
        let page_locked = batch.page_locked(device)?;
        Ok(Self { device: device.clone(), plan, batch, page_locked })
    }

    /// Measures all our contenders, with activations of type `S`.
    ///
    /// # Errors
    /// When a step fails, or the contenders' losses differ.
    pub(crate) fn measure<S: Activation>(&self) -> harness::Result<Vec<Line>> {
        let need = self.need::<S>()?;
        let (eager, captured) = (self.eager::<S>(need)?, self.captured::<S>(need)?);
        if eager.losses != captured.losses {
            return Err(format!("losses differ: eager {:?}, captured {:?}", eager.losses, captured.losses).into());
        }
        Ok([eager.lines, captured.lines].concat())
    }

    fn need<S: Activation>(&self) -> Result<Measured> {
        let mut state = State::<S>::new(&self.device, self.plan.precision)?;
        let arena = Arena::builder(&self.device).capacity(Capacity::mib(1)).build()?;
        let ticket = state.optimizer.advance()?;
        arena.measure(|step| train(step, &mut state, ticket, self.batch.upload(step)?).map(drop))
    }

    /// Measures steps that launch their kernels one by one. Each has its own inputs, so it always
    /// uploads.
    fn eager<S: Activation>(&self, need: Measured) -> Result<Timed> {
        let mut state = State::<S>::new(&self.device, self.plan.precision)?;
        let mut arena = Arena::builder(&self.device).capacity(Capacity::Measured(need)).build()?;
        let measures = [Measure::RoundTrip, Measure::Host, Measure::HostPinned, Measure::Queued, Measure::Pinned];
        self.times("stepscope eager", &measures, |measure| {
            let ticket = state.optimizer.advance()?;
            arena.step(|step| {
                let batch =
                    if measure.is_pinned() { self.page_locked.upload(step)? } else { self.batch.upload(step)? };
                let loss = train(step, &mut state, ticket, batch)?;
                (measure == Measure::RoundTrip).then(|| step.read_scalar(&loss)).transpose()
            })
        })
    }

    /// Measures steps that replay one graph.
    fn captured<S: Activation>(&self, need: Measured) -> Result<Timed> {
        let mut arena = Arena::builder(&self.device).capacity(Capacity::Measured(need)).build()?;
        let (inputs, page_locked) = (self.batch.inputs()?, self.page_locked.inputs()?);
        let mut captured = arena.capture(State::<S>::new(&self.device, self.plan.precision)?, &inputs, record)?;
        let measures = [
            Measure::RoundTrip,
            Measure::Host,
            Measure::HostPinned,
            Measure::HostResident,
            Measure::Queued,
            Measure::Pinned,
            Measure::Resident,
        ];
        self.times("stepscope captured", &measures, |measure| {
            captured.state_mut().optimizer.advance()?.leave_to_replay();
            let inputs = if measure.is_pinned() { &page_locked } else { &inputs };
            let is_there = matches!(measure, Measure::Resident | Measure::HostResident);
            let replay = if is_there { captured.repeat()? } else { captured.replay(inputs)? };
            (measure == Measure::RoundTrip).then(|| replay.read_scalar(*replay.outputs())).transpose()
        })
    }

    /// Measures a contender whose `step` runs a step for a measure, and reads the loss if the
    /// measure includes it.
    fn times(
        &self,
        contender: &str,
        measures: &[Measure],
        mut step: impl FnMut(Measure) -> Result<Option<f32>>,
    ) -> Result<Timed> {
        let Plan { batch, samples, row, .. } = self.plan;
        let mut timed = Timed { lines: Vec::new(), losses: Vec::new() };
        // The emulator's memory is all of one kind.
        let is_gpu = self.device.description().kind == DeviceKind::Cuda;
        for &measure in measures.iter().filter(|measure| is_gpu || !measure.is_pinned()) {
            let is_host = matches!(measure, Measure::Host | Measure::HostPinned | Measure::HostResident);
            let each = if is_host || measure == Measure::RoundTrip { 1 } else { row };
            let work = || {
                timed.losses.extend(step(measure)?);
                Ok(())
            };
            let settle = || self.device.synchronize(self.device.deadline());
            let nanoseconds = if is_host {
                Samples::collect_queueing(samples, work, settle)?
            } else {
                Samples::collect(samples, each, work, settle)?
            };
            timed.lines.push(Line::Measured { batch, contender: contender.into(), measure, nanoseconds });
        }
        assert!(timed.losses.iter().all(|loss| loss.is_finite()), "{contender} does not train: {:?}", timed.losses);
        Ok(timed)
    }
}

/// Compares the peer's model with ours.
///
/// # Errors
/// When the numbers of tensors or weights differ, so that the table would compare different work.
pub(crate) fn check_model(tensors: usize, weights: usize) -> harness::Result<()> {
    let (_, spec) = Model::<f32>::new()?;
    let ours = (spec.entries().len(), spec.entries().iter().map(|entry| entry.shape().elements()).sum::<usize>());
    if ours == (tensors, weights) {
        return Ok(());
    }
    let (our_tensors, our_weights) = ours;
    Err(format!(
        "PyTorch's model has {tensors} tensors with {weights} weights, ours {our_tensors} with {our_weights}: not the same work"
    )
    .into())
}
