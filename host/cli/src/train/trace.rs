//! The trace for `tests/oracle/gpt.py`: logits, loss and all gradients of the first batch, under
//! transformers' names.

use std::path::Path;

use stepscope::{Arena, HostBatch, Model, StateDict, Tape, TrainState};

use crate::train::bad_input::Outcome;
use crate::train::model::{Activation, Gpt};
use crate::train::samples::Sequences;
use crate::train::weights::as_theirs;

/// Writes the file without changing the weights.
pub(crate) fn write<S: Activation>(
    path: &Path,
    arena: &mut Arena,
    state: &mut TrainState<Gpt<S>>,
    batch: &Sequences,
) -> Outcome<()> {
    let TrainState { model, parameters, gradients, .. } = state;
    let (logits, loss) = arena.step(|step| {
        let inputs = step.upload_inputs(&batch.inputs()?)?;
        let tape = Tape::new(step, parameters);
        let hidden = model.forward(&tape, &inputs)?;
        let loss = model.loss(&tape, &hidden, &inputs, 1.0 / batch.len() as f32)?;
        let logits = step.read(&model.logits(step, parameters, tape.to_f32(&hidden)?.value())?)?;
        let value = step.read_scalar(loss.value())?;
        tape.backward_overwrite(&loss, gradients)?;
        Ok((logits, value))
    })?;
    let sizes = &model.sizes;
    let shape = [batch.len(), sizes.context];
    // Token numbers are exact in f32.
    let numbers = |ids: &[u32]| ids.iter().map(|&id| id as f32).collect();
    let mut tensors = StateDict::default();
    for (name, shape, gradient) in as_theirs(parameters.layout(), sizes, &gradients.flat().read()?)?.iter() {
        tensors.insert(format!("gradient.{name}"), shape, gradient.to_vec())?;
    }
    tensors.insert("ids", shape, numbers(&batch.ids))?;
    tensors.insert("labels", shape, numbers(&batch.labels))?;
    tensors.insert("loss", [1], vec![loss])?;
    tensors.insert("logits", [batch.len(), sizes.context, sizes.vocabulary], logits)?;
    Ok(tensors.save(path)?)
}
