//! The memory of a run: what it needs, before anything is allocated, and the arena of its steps.
//!
//! Invariant: the needs follow from the model and the batch. The steps run as a dry run, which
//! computes and allocates nothing, however large the model.

use std::fmt;
use std::ops::Range;

use stepscope::memory::HostMemory;
use stepscope::ops::Activation;
use stepscope::optim::UpdateRule;
use stepscope::parameters::{FrozenType, GradientConsumer, GradientType, LentMasters, MasterType, ParameterEntry};
use stepscope::tensor::{Element, Lent};
use stepscope::{
    AdamW, Arena, Capacity, Device, Gradients, HostBatch, HostInputs, Model, Optimizer, ParameterSpec, Parameters,
    Result, Step, Tape, TrainState, bf16, ops,
};

use crate::program::ranks::Rank;
use crate::train::bad_input::{Outcome, bad};

/// Spare bytes of the arena, for differences from the measured steps.
const ROOM: usize = 4 << 20;
const GIB: f64 = (1 << 30) as f64;

/// The bytes that a run needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RunMemory {
    /// Weights, gradients, two moments, and the BF16 copy; frozen weights once.
    pub(crate) weights: u64,
    /// The arena: a training step and an evaluation step.
    pub(crate) steps: u64,
    /// Reading and the export: the largest tensor in f32, and a copy if a file may have another
    /// order.
    pub(crate) files: u64,
    /// The gradients, which are a part of `weights`.
    gradients: u64,
    /// The optimizer's state, which is a part of `weights`.
    state: u64,
    /// The sums of shards, the slices of all ranks, and this rank's slices of the optimizer's
    /// state, which a checkpoint needs next to the whole state.
    group: u64,
    /// The ranks of this process, each of which needs all of this.
    ranks: u64,
}

/// Returns the samples of an evaluation step. It is smaller than a training batch, because it needs
/// memory in addition.
pub(crate) fn evaluation_batch(batch: usize) -> usize {
    batch.div_ceil(4)
}

impl RunMemory {
    /// Computes the needs of a run whose largest training step and evaluation step have these
    /// samples. Their values are not read.
    pub(crate) fn of<S: ops::Cast, M: Model<S>>(
        device: &Device,
        model: impl Fn() -> Result<(M, ParameterSpec)>,
        precision: ops::Precision,
        [largest, evaluated]: [&impl HostBatch; 2],
    ) -> Result<Self> {
        let small = Arena::builder(device).capacity(Capacity::mib(1)).build()?;
        let needs = |inputs: &HostInputs<'_>, train: bool| {
            let measured = small.measure(|step| {
                let (model, spec) = model()?;
                let mut state = TrainState::new(step.device(), model, &spec, 0, AdamW::default())?;
                run(step, &mut state, precision, inputs, train)
            });
            measured.map(|measured| measured.high_water_bytes())
        };
        let (_, spec) = model()?;
        let steps =
            needs(&largest.inputs()?, true)? + spec.converted_bytes() + needs(&evaluated.inputs()?, false)? + ROOM;
        let is_bf16 = <S as Element>::NAME == bf16::NAME;
        let copied = if is_bf16 { size_of::<bf16>() } else { 0 };
        let frozen: usize = spec.frozen(FrozenType::F32).iter().map(|entry| entry.shape().elements()).sum();
        let trained = trained_bytes(&spec, is_bf16);
        Ok(Self {
            weights: trained + (frozen * copied) as u64 + spec.frozen_bytes(),
            steps: steps as u64,
            files: files_bytes(&spec),
            gradients: spec.gradients_bytes(),
            state: 2 * spec.state_bytes(),
            group: 0,
            ranks: 1,
        })
    }

    /// Adds the memory of an update by a rule that needs more than the norm of the gradients.
    pub(crate) fn with_update<S: Activation>(
        self,
        device: &Device,
        spec: &ParameterSpec,
        rule: impl UpdateRule,
    ) -> Result<Self> {
        let small = Arena::builder(device).capacity(Capacity::mib(1)).build()?;
        let measured = small.measure(|step| {
            let mut weights = Parameters::new(step.device(), spec, 0)?;
            if <S as Element>::NAME == bf16::NAME {
                weights = weights.with_bf16_copy()?;
            }
            let gradients = Gradients::zeros(&weights)?;
            let mut optimizer = Optimizer::new(&weights, rule)?;
            let ticket = optimizer.advance()?;
            optimizer.apply(ticket, step, &mut weights, &gradients)
        })?;
        Ok(Self { steps: self.steps + measured.high_water_bytes() as u64, ..self })
    }

    /// Computes the needs of a text that is written with loaded weights, whose step takes `steps`
    /// bytes. Trained weights are stored in f32, and if products read BF16, in both types.
    pub(crate) fn of_text(spec: &ParameterSpec, steps: usize, is_bf16: bool) -> Self {
        let copied = if is_bf16 { size_of::<bf16>() } else { 0 };
        let frozen: usize = spec.frozen(FrozenType::F32).iter().map(|entry| entry.shape().elements()).sum();
        let weights = spec.elements() * (size_of::<f32>() + copied) + frozen * copied;
        let (weights, steps, files) = (weights as u64 + spec.frozen_bytes(), steps as u64, files_bytes(spec));
        Self { weights, steps, files, gradients: 0, state: 0, group: 0, ranks: 1 }
    }

    /// Adds the needs of a rank of a group.
    #[must_use]
    pub(crate) fn of_rank(self, rank: &Rank) -> Self {
        let own = (rank.shards() / rank.ranks()).max(1);
        let slices = if rank.ranks() > 1 { self.gradients + self.state / rank.ranks() as u64 } else { 0 };
        let group = u64::from(own.ilog2()) * self.gradients + slices;
        Self { group, ranks: rank.in_process() as u64, ..self }
    }

    /// Returns all bytes together.
    pub(crate) fn total(&self) -> u64 {
        self.weights + self.steps + self.files + self.group
    }

    /// Returns an error if the device, or the host if the device shares its memory, has less. The
    /// error ends with `advice`.
    pub(crate) fn check(&self, device: &Device, advice: &str) -> Outcome<()> {
        let description = device.description();
        let of_host = HostMemory::available_bytes();
        // The ranks of a process share the host's memory, but not that of their GPUs.
        let (available, ranks) = match description.memory_bytes.filter(|_| !description.integrated) {
            Some(bytes) => (bytes, 1),
            None => (of_host, self.ranks),
        };
        if ranks * self.total() <= available && self.files <= of_host {
            return Ok(());
        }
        let reason = format!(
            "the run needs {self}{}, but only {:.2} GiB are available: {advice}",
            if ranks > 1 { format!(", for each of {ranks} ranks") } else { String::new() },
            available as f64 / GIB
        );
        Err(bad("memory", reason))
    }
}

impl fmt::Display for RunMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [total, weights, steps, files, group] =
            [self.total(), self.weights, self.steps, self.files, self.group].map(|bytes| bytes as f64 / GIB);
        write!(
            f,
            "{total:.2} GiB of memory: {weights:.2} for {}, {steps:.2} for steps, {files:.2} for files",
            if self.gradients > 0 { "weights, gradients and moments" } else { "weights" }
        )?;
        if self.group > 0 { write!(f, ", {group:.2} for shards and ranks") } else { Ok(()) }
    }
}

/// Advice for a training run that does not fit.
pub(crate) const TRAINING_ADVICE: &str =
    "give a smaller --batch and a larger --accumulate, a smaller --context, --recompute, or --precision bf16";

/// Returns the most bytes of the host that a parameter takes while it is read or written: those of
/// its f32, and if the file may have another order, those of a copy.
fn files_bytes(spec: &ParameterSpec) -> u64 {
    let bytes = |entry: &ParameterEntry| {
        let copies = if entry.is_table() || entry.shape().extents().len() == 1 { 1 } else { 2 };
        copies * entry.shape().elements() * size_of::<f32>()
    };
    spec.iter().map(|(_, entry)| bytes(entry)).max().unwrap_or(0) as u64
}

/// Returns an error if the host cannot hold the tokens of a batch: ids, labels and documents.
pub(crate) fn check_batch(batch: usize, context: usize) -> Outcome<()> {
    let (batch, context) = (batch as u64, context as u64);
    let (needed, available) = (batch * context * 3 * size_of::<u32>() as u64, HostMemory::available_bytes());
    if needed <= available {
        return Ok(());
    }
    let reason = format!(
        "{batch} samples of {context} tokens take {needed} bytes of the host's memory, and {available} are available: give a smaller --batch \
         and a larger --accumulate"
    );
    Err(bad("--batch", reason))
}

/// Builds an arena of `mebibytes`, or else of the bytes that the steps need.
pub(crate) fn arena(device: &Device, mebibytes: Option<usize>, needs: RunMemory) -> Result<Arena> {
    let capacity = mebibytes.map_or(Capacity::Bytes(needs.steps as usize), Capacity::mib);
    Arena::builder(device).capacity(capacity).build()
}

/// Runs a training step without its update, or an evaluation step.
fn run<S: ops::Cast, M: Model<S>>(
    step: &mut stepscope::EagerStep<'_>,
    state: &mut TrainState<M>,
    precision: ops::Precision,
    inputs: &HostInputs<'_>,
    train: bool,
) -> Result<()> {
    step.set_precision(precision);
    let batch = step.upload_inputs(inputs)?;
    let generator = ops::Generator::new(step.device(), 0)?;
    let tape = Tape::new(step, &state.parameters);
    let tape = if train { tape.with_generator(&generator) } else { tape.evaluating() };
    let hidden = state.model.forward(&tape, &batch)?;
    let loss = state.model.loss(&tape, &hidden, &batch)?;
    match state.parameters.spec().gradients() {
        _ if !train => Ok(()),
        GradientType::Released => tape.backward_consumed(&loss, &mut Freed),
        GradientType::F32 | GradientType::Bf16 => tape.backward_overwrite(&loss, &mut state.gradients),
    }
}

/// Gradients that are freed without an update.
struct Freed;

impl GradientConsumer for Freed {
    fn consume<'s>(&mut self, _: &Step<'s>, _: Range<usize>, _: LentMasters<'_, 's>, _: Lent<'_, 's>) -> Result<()> {
        Ok(())
    }
}

/// Returns the bytes that persist across steps: weights, gradients, two moments, and the BF16 copy.
pub(crate) fn weights_bytes(weights: &Parameters) -> usize {
    let spec = weights.spec();
    (trained_bytes(spec, weights.bf16_copy().is_some()) + spec.frozen_bytes()) as usize
}

/// Returns the bytes of trained weights, their gradients and two moments. Weights in f32 have a
/// BF16 copy if products read BF16.
pub(crate) fn trained_bytes(spec: &ParameterSpec, is_bf16: bool) -> u64 {
    let copied = if is_bf16 && spec.masters() == MasterType::F32 { size_of::<bf16>() } else { 0 };
    spec.masters_bytes() + spec.gradients_bytes() + 2 * spec.state_bytes() + (spec.elements() * copied) as u64
}
