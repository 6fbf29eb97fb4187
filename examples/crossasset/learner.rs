//! What a training step changes, and the step itself: the same function runs eagerly and captured.

use stepscope::ops::Precision;
use stepscope::{
    AdamW, AdamWConfig, Device, Gradients, Inputs, Output, Parameters, Result, Saved, Slots, Step, Tape, Tensor, ops,
};

use crate::features::{FEATURES, SAMPLE_LEN, SCALES};
use crate::model::Model;

/// Weights, gradients and optimiser of a model.
pub(crate) struct Learner {
    pub(crate) model: Model,
    pub(crate) parameters: Parameters,
    pub(crate) gradients: Gradients,
    pub(crate) optimizer: AdamW,
    /// Of the multiplies of training.
    pub(crate) precision: Precision,
}

/// Samples that a step works on, on the host.
pub(crate) struct MicroBatch {
    /// Features, `[samples, 12, 193]`.
    pub(crate) x: Vec<f32>,
    /// Classes, `[samples]`.
    pub(crate) labels: Vec<u32>,
}

/// A micro-batch's place in its batch.
#[derive(Clone, Copy)]
pub(crate) struct Part {
    /// Samples of the whole batch, by which the loss is divided.
    pub(crate) batch: usize,
    /// The gradients start from zero.
    pub(crate) first: bool,
    /// The gradients are complete.
    pub(crate) last: bool,
    /// The weights are updated at the end.
    pub(crate) update: bool,
}

impl Part {
    /// All that decides what is recorded besides the shapes.
    fn variant(self) -> u64 {
        (self.batch as u64) << 3 | u64::from(self.first) << 2 | u64::from(self.last) << 1 | u64::from(self.update)
    }

    fn of(variant: u64) -> Self {
        let bit = |place: u32| (variant >> place) & 1 == 1;
        Self { batch: (variant >> 3) as usize, first: bit(2), last: bit(1), update: bit(0) }
    }
}

/// What a step tells: its share of the loss, and, when the gradients are complete, the squared norm of the head's.
pub(crate) struct Told<Loss, Norm> {
    pub(crate) loss: Loss,
    pub(crate) head_squared: Option<Norm>,
}

impl MicroBatch {
    /// So many samples, all zero.
    pub(crate) fn zeros(samples: usize) -> Self {
        Self { x: vec![0.0; samples * SAMPLE_LEN], labels: vec![0; samples] }
    }

    /// The extents of `x`.
    pub(crate) fn shape(&self) -> [usize; 3] {
        [self.labels.len(), SCALES.len(), FEATURES]
    }

    /// As the inputs of a captured step.
    pub(crate) fn inputs(&self, part: Part) -> Result<Inputs<'_>> {
        Ok(Inputs::new().with(&self.x, self.shape())?.with(&self.labels, [self.labels.len()])?.variant(part.variant()))
    }
}

impl Learner {
    /// Fresh weights.
    ///
    /// # Errors
    /// When the device has no room.
    pub(crate) fn new(device: &Device, seed: u64, config: AdamWConfig, precision: Precision) -> Result<Self> {
        let (model, layout) = Model::new()?;
        let parameters = Parameters::new(device, &layout, seed)?;
        let (gradients, optimizer) = (Gradients::zeros(&parameters)?, AdamW::new(&parameters, config)?);
        Ok(Self { model, parameters, gradients, optimizer, precision })
    }

    /// Forward, backward and, at the end of a batch, the update that [`AdamW::advance`] has set up.
    pub(crate) fn learn<'s>(
        &mut self,
        step: &Step<'s>,
        x: Saved<'s>,
        labels: Saved<'s, u32>,
        part: Part,
    ) -> Result<Told<Saved<'s>, Tensor<'s>>> {
        let Self { model, parameters, gradients, optimizer, precision } = self;
        step.set_precision(*precision);
        let tape = Tape::new(step, parameters);
        let logits = model.forward(&tape, &tape.input(x))?;
        let mean = tape.cross_entropy(&logits, labels, 1.0 / part.batch as f32)?;
        if part.first {
            tape.backward_afresh(&mean, gradients)?;
        } else {
            tape.backward(&mean, gradients)?;
        }
        let head = gradients.lend_mut(step, model.head_weight())?;
        let head_squared = part.last.then(|| ops::squared_norm(step, &head)).transpose()?;
        if part.update {
            optimizer.apply(step, parameters, gradients)?;
        }
        Ok(Told { loss: *mean.value(), head_squared })
    }

    /// [`Learner::learn`], to be captured.
    pub(crate) fn record<'s>(
        step: &mut Step<'s>,
        learner: &mut Self,
        slots: &Slots<'s>,
    ) -> Result<Told<Output, Output>> {
        let told = learner.learn(step, slots.input(0)?, slots.input(1)?, Part::of(slots.variant()))?;
        let head_squared = told.head_squared.map(|norm| slots.output(&norm));
        Ok(Told { loss: slots.output(&told.loss), head_squared })
    }
}
