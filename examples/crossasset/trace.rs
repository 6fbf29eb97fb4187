//! The trace of a run's first updates, which an independent computation checks: `tests/oracle/`.
//!
//! Invariant: a trace's tensors are those of the run, bit for bit, and its notes are all other
//! inputs of the optimizer. Together they suffice to recompute the losses, gradients and weights.

use std::path::PathBuf;

use stepscope::optim::{Decay, Schedule};
use stepscope::{AdamW, Result, TrainState};

use crate::samples::MicroBatch;
use crate::sizes::{FEATURES, SCALES};
use crate::tensor_file::TensorFile;

/// The number of traced updates.
const UPDATES: usize = 3;

/// The inputs and results of a run's first updates.
pub(crate) struct Trace {
    path: PathBuf,
    file: TensorFile,
    updates: usize,
}

impl Trace {
    /// Starts the trace of an optimizer with these settings that has made no update, to be written
    /// to `path`.
    pub(crate) fn new(path: PathBuf, config: &AdamW) -> Self {
        let AdamW { learning_rate, beta1, beta2, epsilon, weight_decay, clip, schedule } = *config;
        let Schedule { warmup, total, decay: Decay::Cosine, floor, .. } = schedule else {
            unreachable!("the example's rate follows a cosine, not {schedule:?}");
        };
        let mut file = TensorFile::default();
        let numbers = [
            ("learning_rate", learning_rate),
            ("beta1", beta1),
            ("beta2", beta2),
            ("epsilon", epsilon),
            ("weight_decay", weight_decay),
            ("clip", clip.unwrap_or(f32::INFINITY)),
        ];
        numbers.into_iter().for_each(|(name, number)| file.note(name, number));
        file.note("warmup", warmup);
        file.note("total", total);
        file.note("floor", floor);
        Self { path, file, updates: 0 }
    }

    /// Adds a batch whose gradients are complete and whose update is still to come.
    ///
    /// # Errors
    /// When the device fails.
    pub(crate) fn before_update<M>(&mut self, batch: &[MicroBatch], loss: f32, state: &TrainState<M>) -> Result<()> {
        let update = self.updates;
        let x: Vec<f32> = batch.iter().flat_map(MicroBatch::x).copied().collect();
        let labels: Vec<u32> = batch.iter().flat_map(|part| &part.labels).copied().collect();
        self.file.add(format!("{update}.input"), [labels.len(), SCALES.len(), FEATURES], &x);
        self.file.add(format!("{update}.label"), [labels.len()], &labels);
        self.file.add(format!("{update}.loss"), [1], &[loss]);
        if update == 0 {
            self.add_all("weight", state, &state.parameters.read_flat()?);
        }
        self.add_all("gradient", state, &state.gradients.read_flat()?);
        Ok(())
    }

    /// Adds the updated weights and writes the file. Returns true once it is complete.
    ///
    /// # Errors
    /// When the device fails or the file cannot be written.
    pub(crate) fn after_update<M>(&mut self, state: &TrainState<M>) -> Result<bool> {
        self.updates += 1;
        self.add_all("weight", state, &state.parameters.read_flat()?);
        self.file.write(&self.path)?;
        Ok(self.updates == UPDATES)
    }

    /// Adds a flat region, parameter by parameter.
    fn add_all<M>(&mut self, kind: &str, state: &TrainState<M>, flat: &[f32]) {
        for entry in state.parameters.spec().entries() {
            let name = format!("{}.{kind}.{}", self.updates, entry.name());
            self.file.add(name, entry.shape(), &flat[entry.range()]);
        }
    }
}
