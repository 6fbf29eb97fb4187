//! What the model makes of the first batch, for `tests/oracle/gpt.py`: logits, loss and every gradient, by the names of transformers.

use std::collections::BTreeMap;
use std::path::Path;

use stepscope::{Arena, Learner, Model, Samples, Tape, replace_file};

use crate::bad_input::Outcome;
use crate::model::Gpt;
use crate::samples::Sequences;
use crate::weights::{as_theirs, serialized};

/// Writes the file; the weights stay as they are.
pub(crate) fn write(path: &Path, arena: &mut Arena, learner: &mut Learner<Gpt>, batch: &Sequences) -> Outcome<()> {
    let Learner { model, parameters, gradients, .. } = learner;
    let (logits, loss) = arena.step(|step| {
        let inputs = step.upload_inputs(&batch.inputs()?)?;
        let tape = Tape::new(step, parameters);
        let hidden = model.forward(&tape, &inputs)?;
        let loss = model.loss(&tape, &hidden, &inputs, 1.0 / batch.len() as f32)?;
        let logits = step.read(&model.logits(step, parameters, hidden.value())?)?;
        let value = step.read_scalar(loss.value())?;
        tape.backward_afresh(&loss, gradients)?;
        Ok((logits, value))
    })?;
    let sizes = &model.sizes;
    let shape = vec![batch.len(), sizes.context];
    // Numbers of tokens are exact in f32.
    let numbers = |ids: &[u32]| (shape.clone(), ids.iter().map(|&id| id as f32).collect());
    let mut tensors: BTreeMap<_, _> = as_theirs(parameters.layout(), sizes, &gradients.flat().read()?)
        .into_iter()
        .map(|(name, gradient)| (format!("gradient.{name}"), gradient))
        .collect();
    tensors.insert("ids".into(), numbers(&batch.ids));
    tensors.insert("labels".into(), numbers(&batch.labels));
    tensors.insert("loss".into(), (vec![1], vec![loss]));
    tensors.insert("logits".into(), (vec![batch.len(), sizes.context, sizes.vocabulary], logits));
    Ok(replace_file(path, &serialized(&tensors)?)?)
}
