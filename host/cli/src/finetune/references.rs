//! The log-probabilities of answers by the reference: the model without its adapters, or as it was
//! before full fine-tuning.
//!
//! They are computed once for each file, before the first update, in the shapes of training, and
//! are in `references.safetensors` next to the checkpoint. A run that resumes reads them from
//! there.
//!
//! Invariant: references are used only if the file's note has the digest of the contexts and of
//! everything else that decides their numbers. The same references are the same bytes.

use std::path::Path;

use safetensors::tensor::{Dtype, SafeTensorError, SafeTensors, TensorView};
use sha2::{Digest, Sha256};
use stepscope::files::{PlainFile, replace_file};
use stepscope::ops::Activation;
use stepscope::{Arena, HostBatch, Model, Result, Tape, TrainState};
use stepscope_chat::Packed;
use stepscope_core::internals::hex;

use crate::finetune::plan::{Plan, digest};
use crate::program::marks;
use crate::program::results::REFERENCES;
use crate::program::settings;
use crate::run::rule::Rule;
use crate::train::bad_input::Outcome;
use crate::train::model::Gpt;

/// The references of contexts, in their order: two for each place of a pair. Empty without pairs.
#[derive(Clone, Debug, Default)]
pub(crate) struct References {
    pub(crate) training: Vec<f32>,
    pub(crate) held_out: Vec<f32>,
}

/// The largest file, of some 100 million pairs.
const MAX_BYTES: u64 = 1 << 30;
/// The tensors.
const TENSORS: [&str; 2] = ["training", "held_out"];

impl Plan<'_> {
    /// Returns the references of all pairs: from the folder of the checkpoint to resume from, or
    /// else computed by the state, whose weights must be those of the reference. Writes the file if
    /// this rank `leads`.
    pub(crate) fn references<S: Activation>(
        &self,
        arena: &mut Arena,
        state: &TrainState<Gpt<S>, Rule>,
        leads: bool,
    ) -> Outcome<References> {
        if self.args.preferences.is_none() {
            return Ok(References::default());
        }
        let own = self.args.out.join(REFERENCES);
        let earlier = self.args.resume.as_ref().map(|checkpoint| checkpoint.with_file_name(REFERENCES));
        let all = [&self.data.training[..], &self.data.held_out];
        let digests = all.map(|contexts| self.digest_of_references(contexts));
        let mut known = earlier.and_then(|path| read(&path, &digests)).unwrap_or_default();
        let mut values = [const { Vec::new() }; 2];
        for (number, (values, contexts)) in values.iter_mut().zip(all).enumerate() {
            let count = self.data.references(contexts, self.args.batch);
            *values = match known[number].take().filter(|known| known.len() == count) {
                Some(known) => known,
                None => self.computed(arena, state, contexts)?,
            };
        }
        if leads {
            write(&own, &values, &digests)?;
        }
        let [training, held_out] = values;
        Ok(References { training, held_out })
    }

    /// Computes the references of contexts, in parts of the size of a training step.
    fn computed<S: Activation>(
        &self,
        arena: &mut Arena,
        state: &TrainState<Gpt<S>, Rule>,
        contexts: &[Packed],
    ) -> Result<Vec<f32>> {
        let mut all = Vec::new();
        for part in self.data.in_order(contexts, self.config.context, self.args.batch, &[]) {
            let values = arena.step(|step| {
                step.set_precision(state.precision);
                let batch = step.upload_inputs(&part.inputs()?)?;
                let tape = Tape::new(step, &state.parameters).evaluating();
                let hidden = state.model.forward(&tape, &batch)?;
                step.read(state.model.log_probabilities(&tape, &hidden, &batch)?.value())
            })?;
            all.extend(values);
        }
        Ok(all)
    }

    fn digest_of_references(&self, contexts: &[Packed]) -> String {
        hex(&Sha256::digest(format!("{} {}", settings::to_note(&self.settings()), digest(contexts))))
    }
}

/// Reads the references of these digests, of which the file may have only some. Returns none if it
/// has no such references.
fn read(path: &Path, digests: &[String; 2]) -> Option<[Option<Vec<f32>>; 2]> {
    let notes = marks::notes(path)?;
    let noted: Vec<&str> = notes[marks::REFERENCES_NOTE].as_str()?.split(' ').collect();
    let has = |number: usize| noted.get(number).is_some_and(|digest| *digest == digests[number]);
    if !has(0) && !has(1) {
        return None;
    }
    let bytes = PlainFile::read_whole(path, MAX_BYTES).ok()?;
    let file = SafeTensors::deserialize(&bytes).ok()?;
    Some([0, 1].map(|number| {
        let tensor = file.tensor(TENSORS[number]).ok().filter(|_| has(number))?;
        let (numbers, _) = tensor.data().as_chunks();
        Some(numbers.iter().map(|&bytes| f32::from_le_bytes(bytes)).collect())
    }))
}

fn write(path: &Path, values: &[Vec<f32>; 2], digests: &[String; 2]) -> Outcome<()> {
    let bytes =
        values.each_ref().map(|values| values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<u8>>());
    let views = TENSORS
        .iter()
        .zip(&bytes)
        .map(|(name, bytes)| Ok((*name, TensorView::new(Dtype::F32, vec![bytes.len() / size_of::<f32>()], bytes)?)));
    let views = views.collect::<std::result::Result<Vec<_>, SafeTensorError>>()?;
    // The package writes several notes in a random order.
    let notes = [(marks::REFERENCES_NOTE.to_owned(), digests.join(" "))].into();
    Ok(replace_file(path, &safetensors::serialize(views, Some(notes))?)?)
}
