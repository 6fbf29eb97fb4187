//! The launches of a training step, from a dry run on a GPU that is not present.
//!
//! Invariant: nothing is computed and no memory is allocated, however large the model. Its weights
//! are created in the dry run too.

use stepscope::models::{Lora, ModelConfig, Transformer};
use stepscope::ops::{Activation, Cast};
use stepscope::parameters::{FrozenType, GradientType};
use stepscope::tensor::Element;
use stepscope::{
    AdamW, Device, DeviceKind, EagerStep, HostBatch, HostInputs, Model, ParameterSpec, Result, Tape, TrainState, bf16,
};
use stepscope_core::internals::Launch;

use crate::crossasset;
use crate::finetune::cli::Quantize;
use crate::run::memory::{RunMemory, evaluation_batch, trained_bytes};
use crate::sizes::{FEATURES, SCALES};
use crate::train::cli::Precision;
use crate::train::model::{Gpt, Mode};
use stepscope_predict::{Gpu, dry_run};

/// The model to train.
#[derive(Clone, Debug)]
pub(crate) enum Work {
    CrossAsset,
    Gpt { config: Box<ModelConfig>, mode: Mode, lora: Option<Adapters> },
}

/// The adapters that are trained instead of a model's weights.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Adapters {
    pub(crate) rank: usize,
    /// The type of the frozen weights of linear layers, if it is another one than that of the
    /// activations.
    pub(crate) quantize: Option<Quantize>,
}

/// Returns the launches of one step on `batch` samples on a GPU.
///
/// # Errors
/// Returns an error if an op fails.
pub(crate) fn launches(gpu: &Gpu, work: &Work, precision: Precision, batch: usize) -> Result<Vec<Launch>> {
    // The launches that initialize the weights and the optimizer's state are not part of a step.
    let before = dry_run(gpu, |step| set_up(step, work, precision, batch, Until::Ready))?.len();
    let mut launches = dry_run(gpu, |step| set_up(step, work, precision, batch, Until::Updated))?;
    Ok(launches.split_off(before))
}

/// Builds the layers, with adapters on all linear layers of blocks if there are any. Frozen weights
/// that are not quantized are stored as the activations are.
fn gpt<S: Activation>(config: &ModelConfig, mode: Mode, lora: Option<Adapters>) -> Result<(Gpt<S>, ParameterSpec)> {
    let Some(Adapters { rank, quantize }) = lora else { return Gpt::new(config.clone(), mode) };
    let unquantized = if <S as Element>::NAME == bf16::NAME { FrozenType::Bf16 } else { FrozenType::F32 };
    let lora = Lora::new(rank, 2.0 * rank as f64);
    let (layers, spec) = Transformer::with_lora(config.clone(), &lora, |entry| {
        let is_matrix = entry.name().starts_with("blocks.") && entry.shape().extents().len() == 2;
        let is_linear = is_matrix && !entry.name().ends_with("mlp.router.weight");
        match quantize {
            Some(Quantize::Nf4) if is_linear => FrozenType::Nf4,
            _ => unquantized,
        }
    })?;
    Ok((Gpt::of(layers, mode), mode.memory.of(spec)))
}

/// The most bytes of weights, gradients and moments: more than any GPU has.
const MAX_BYTES: u64 = 2 << 40;

/// Returns an error if the weights of a model, with their gradients and moments, exceed the memory
/// of any GPU. Its steps would take hours to predict.
pub(crate) fn check_size(config: &ModelConfig, mode: Mode, lora: Option<Adapters>) -> std::result::Result<(), String> {
    let (_, spec) = gpt::<bf16>(config, mode, lora).map_err(|error| error.to_string())?;
    let bytes = trained_bytes(&spec, false) + spec.frozen_bytes();
    match bytes <= MAX_BYTES {
        true => Ok(()),
        false => Err(format!(
            "{} weights take {} GiB with their gradients and moments, but the most that can be predicted are {} GiB: \
             check the sizes in config.json, or add --lora",
            spec.weights(),
            bytes >> 30,
            MAX_BYTES >> 30
        )),
    }
}

/// Returns the memory of a run that trains `config` on `batch` samples a step.
///
/// # Errors
/// When an op fails.
pub(crate) fn memory(
    config: &ModelConfig,
    mode: Mode,
    lora: Option<Adapters>,
    precision: Precision,
    batch: usize,
) -> Result<RunMemory> {
    let device = Device::open(DeviceKind::Emulated)?;
    let [step, evaluation] = [batch, evaluation_batch(batch)].map(|samples| Tokens::new(samples, config.context));
    match precision {
        Precision::Bf16 => {
            RunMemory::of(&device, || gpt::<bf16>(config, mode, lora), precision.of_f32(), [&step, &evaluation])
        }
        _ => RunMemory::of(&device, || gpt::<f32>(config, mode, lora), precision.of_f32(), [&step, &evaluation]),
    }
}

/// Samples of zeros.
struct Tokens {
    shape: [usize; 2],
    zeros: Vec<u32>,
}

impl Tokens {
    fn new(samples: usize, context: usize) -> Self {
        Self { shape: [samples, context], zeros: vec![0; samples * context] }
    }
}

impl HostBatch for Tokens {
    fn len(&self) -> usize {
        self.shape[0]
    }

    fn inputs(&self) -> Result<HostInputs<'_>> {
        HostInputs::new().with(&self.zeros, self.shape)?.with(&self.zeros, self.shape)
    }
}

/// The end of a dry run.
#[derive(Clone, Copy, PartialEq)]
enum Until {
    Ready,
    Updated,
}

fn set_up(step: &EagerStep<'_>, work: &Work, precision: Precision, batch: usize, until: Until) -> Result<()> {
    match work {
        Work::CrossAsset => {
            let (x, labels) = (vec![0.0; batch * SCALES.len() * FEATURES], vec![0; batch]);
            let inputs = HostInputs::new().with(&x, [batch, SCALES.len(), FEATURES])?.with(&labels, [batch])?;
            if precision == Precision::Bf16 {
                let (model, spec) = crossasset::Model::<bf16>::new()?;
                return train(step, model, &spec, &inputs, precision, until);
            }
            let (model, spec) = crossasset::Model::<f32>::new()?;
            train(step, model, &spec, &inputs, precision, until)
        }
        Work::Gpt { config, mode, lora } => {
            let mode = *mode;
            let tokens = Tokens::new(batch, config.context);
            let inputs = tokens.inputs()?;
            if precision == Precision::Bf16 {
                let (model, spec) = gpt::<bf16>(config, mode, *lora)?;
                return train(step, model, &spec, &inputs, precision, until);
            }
            let (model, spec) = gpt::<f32>(config, mode, *lora)?;
            train(step, model, &spec, &inputs, precision, until)
        }
    }
}

/// Runs forward, loss, backward, clipping and AdamW, as the trainer does.
fn train<S: Cast, M: Model<S>>(
    step: &EagerStep<'_>,
    model: M,
    spec: &ParameterSpec,
    inputs: &HostInputs<'_>,
    precision: Precision,
    until: Until,
) -> Result<()> {
    let config = AdamW { clip: Some(1.0), ..AdamW::default() };
    let state = TrainState::new(step.device(), model, spec, 7, config)?;
    let TrainState { model, mut parameters, mut gradients, mut optimizer, .. } = state;
    step.set_precision(precision.of_f32());
    let batch = step.upload_inputs(inputs)?;
    let ticket = optimizer.advance()?;
    if until == Until::Ready {
        return Ok(());
    }
    let tape = Tape::new(step, &parameters);
    let (loss, _) = model.training_loss_with_figures(&tape, &batch)?;
    if spec.gradients() == GradientType::Released {
        return optimizer.apply_in_backward(ticket, tape, &loss).map(drop);
    }
    tape.backward_overwrite(&loss, &mut gradients)?;
    optimizer.apply(ticket, step, &mut parameters, &gradients)
}
