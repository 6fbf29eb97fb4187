//! The trace for `tests/oracle/gpt.py`: logits, loss and all gradients of the first batch, under
//! transformers' names.

use std::path::Path;

use stepscope::files::StateDict;
use stepscope::models::Weights;
use stepscope::ops::Activation;
use stepscope::{Arena, Capacity, Device, EagerStep, HostBatch, Model, Result, Tape, TrainState};

use crate::run::rule::Rule;
use crate::train::bad_input::Outcome;
use crate::train::model::Gpt;
use crate::train::samples::Sequences;

/// Writes the file without changing the weights. The logits need more memory than a training step,
/// so the step has an arena of its own.
pub(crate) fn write<S: Activation>(
    path: &Path,
    device: &Device,
    state: &mut TrainState<Gpt<S>, Rule>,
    batch: &Sequences,
) -> Outcome<()> {
    let small = Arena::builder(device).capacity(Capacity::mib(1)).build()?;
    let needed = small.measure(|step| traced(step, state, batch).map(drop))?.high_water_bytes();
    let mut arena = Arena::builder(device).capacity(Capacity::Bytes(needed)).build()?;
    let (logits, loss) = arena.step(|step| traced(step, state, batch))?;
    let TrainState { model, gradients, .. } = state;
    let config = model.config();
    let shape = [batch.len(), config.context];
    // Token numbers are exact in f32.
    let numbers = |ids: &[u32]| ids.iter().map(|&id| id as f32).collect();
    let mut tensors = StateDict::default();
    for (name, shape, gradient) in Weights::gradients(config, gradients)?.iter() {
        tensors.insert(format!("gradient.{name}"), shape, gradient.to_vec())?;
    }
    tensors.insert("ids", shape, numbers(&batch.ids))?;
    tensors.insert("labels", shape, numbers(&batch.labels))?;
    tensors.insert("loss", [1], vec![loss])?;
    tensors.insert("logits", [batch.len(), config.context, config.vocabulary], logits)?;
    Ok(tensors.save(path)?)
}

/// Computes the gradients, and returns the logits and the loss.
fn traced<S: Activation>(
    step: &mut EagerStep<'_>,
    state: &mut TrainState<Gpt<S>, Rule>,
    batch: &Sequences,
) -> Result<(Vec<f32>, f32)> {
    let TrainState { model, parameters, gradients, precision, .. } = state;
    step.set_precision(*precision);
    let inputs = step.upload_inputs(&batch.inputs()?)?;
    let tape = Tape::new(step, parameters);
    let hidden = model.forward(&tape, &inputs)?;
    let loss = model.loss(&tape, &hidden, &inputs)?;
    let logits = step.read(&model.layers.logits(step, parameters, tape.to_f32(&hidden)?.value())?)?;
    let value = step.read_scalar(loss.value())?;
    tape.backward_overwrite(&loss, gradients)?;
    Ok((logits, value))
}
