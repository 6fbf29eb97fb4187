//! A training step of CrossAsset: on the GPU, and as predicted by `predict`.

use crate::crossasset::Model;
use crate::sizes::{FEATURES, SCALES};
use stepscope::{AdamW, Device, EagerStep, Gradients, Optimizer, Parameters, Result, Tape, ops};
use stepscope_predict::{Forecast, Gpu, Kernels, dry_run};

/// Samples per step.
const BATCH: usize = 256;

/// The state that persists across steps.
pub(super) struct Training {
    model: Model,
    parameters: Parameters,
    gradients: Gradients,
    optimizer: Optimizer<AdamW>,
}

impl Training {
    pub(super) fn new(device: &Device) -> Result<Self> {
        let (model, layout) = Model::new()?;
        let parameters = Parameters::new(device, &layout, 7)?;
        let config = AdamW { clip: Some(1.0), ..AdamW::default() };
        let (gradients, optimizer) = (Gradients::zeros(&parameters)?, Optimizer::new(&parameters, config)?);
        Ok(Self { model, parameters, gradients, optimizer })
    }

    /// Runs forward, loss, backward, clipping and AdamW.
    pub(super) fn step(&mut self, step: &EagerStep<'_>) -> Result<()> {
        let ticket = self.optimizer.advance()?;
        let x = ops::fill(step, [BATCH, SCALES.len(), FEATURES], 0.37)?;
        let labels = step.upload_indices(&[0; BATCH], [BATCH])?;
        let tape = Tape::new(step, &self.parameters);
        let logits = self.model.logits(&tape, &tape.input(x))?;
        let loss = tape.cross_entropy(&logits, labels)?;
        tape.backward_overwrite(&loss, &mut self.gradients)?;
        self.optimizer.apply(ticket, step, &mut self.parameters, &self.gradients)
    }
}

/// Returns the predicted time of such a step on a GPU of this name, in milliseconds; none if
/// `predict` does not model it.
pub(super) fn predicted_ms(name: &str) -> Result<Option<f64>> {
    let Some(gpu) = [Gpu::GB10, Gpu::H200].into_iter().find(|gpu| name.contains(gpu.name)) else { return Ok(None) };
    // The launches that initialize the weights are not part of a step.
    let before = dry_run(&gpu, |step| Training::new(step.device()).map(drop))?.len();
    let mut launches = dry_run(&gpu, |step| Training::new(step.device())?.step(step))?;
    let forecast = Forecast::of(&gpu, &Kernels::of(gpu.arch), &launches.split_off(before));
    Ok(Some(forecast.microseconds / 1e3))
}
