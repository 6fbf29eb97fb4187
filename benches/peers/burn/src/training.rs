//! A model in training, with its weights, optimizer and batch.

use burn::grad_clipping::GradientClippingConfig;
use burn::module::{AutodiffModule, list_param_ids};
use burn::optim::adaptor::OptimizerAdaptor;
use burn::optim::{AdamW, AdamWConfig, GradientsParams, Optimizer};
use burn::prelude::*;
use burn::tensor::backend::AutodiffBackend;

use crate::crossasset::CrossAsset;
use crate::gpt2::Gpt2;
use crate::work::crossasset::{CLASSES, FEATURES, LEARNING_RATE, SCALES};
use crate::work::{self, Gpt2Sizes, Result, Training};

/// A model and the batches that it trains on.
pub(crate) trait Learns<B: AutodiffBackend>: AutodiffModule<B> {
    /// A batch on the device.
    type Inputs: Clone;

    fn upload(host: &[TensorData; 2], device: &B::Device) -> Self::Inputs;
    /// Returns the cross-entropy in f32.
    fn loss(&self, inputs: Self::Inputs) -> Tensor<B, 1>;
}

pub(crate) struct Trained<B: AutodiffBackend, M: Learns<B>> {
    device: B::Device,
    /// The model; none during an update, which takes it by value.
    model: Option<M>,
    optimizer: OptimizerAdaptor<AdamW, M, B>,
    learning_rate: f64,
    host: [TensorData; 2],
    inputs: Option<M::Inputs>,
    loss: Option<Tensor<B::InnerBackend, 1>>,
}

impl<B: AutodiffBackend> Trained<B, CrossAsset<B>> {
    /// Creates CrossAsset on random features.
    pub(crate) fn crossasset(device: &B::Device, batch: usize) -> Self {
        let x = TensorData::new(work::numbers(batch * SCALES * FEATURES), [batch, SCALES, FEATURES]);
        let labels = TensorData::new(signed(work::below(CLASSES, batch)), [batch]);
        Self::new(device, CrossAsset::new(device), LEARNING_RATE, 0.01, [x, labels])
    }
}

impl<B: AutodiffBackend> Trained<B, Gpt2<B>> {
    /// Creates GPT-2 on random tokens.
    pub(crate) fn gpt2(device: &B::Device, sizes: Gpt2Sizes, batch: usize) -> Self {
        let ids = signed(work::below(sizes.vocabulary, batch * (sizes.tokens + 1)));
        let window = |first: usize| {
            let rows = ids.chunks_exact(sizes.tokens + 1).flat_map(|row| &row[first..first + sizes.tokens]);
            TensorData::new(rows.copied().collect(), [batch, sizes.tokens])
        };
        let host = [window(0), window(1)];
        Self::new(device, Gpt2::new(sizes, device), Gpt2Sizes::LEARNING_RATE, Gpt2Sizes::WEIGHT_DECAY, host)
    }
}

impl<B: AutodiffBackend, M: Learns<B>> Trained<B, M> {
    fn new(device: &B::Device, model: M, learning_rate: f64, weight_decay: f32, host: [TensorData; 2]) -> Self {
        let optimizer = AdamWConfig::new()
            .with_epsilon(1e-8)
            .with_weight_decay(weight_decay)
            .with_grad_clipping(Some(GradientClippingConfig::Norm(1.0)))
            .init();
        let device = device.clone();
        Self { device, model: Some(model), optimizer, learning_rate, host, inputs: None, loss: None }
    }
}

impl<B: AutodiffBackend, M: Learns<B>> Training for Trained<B, M> {
    fn model(&self) -> [usize; 2] {
        self.model.as_ref().map_or([0; 2], |model| [list_param_ids(model).len(), model.num_params()])
    }

    fn upload(&mut self) -> Result<()> {
        self.inputs = Some(M::upload(&self.host, &self.device));
        Ok(())
    }

    fn step(&mut self) -> Result<()> {
        let model = self.model.take().ok_or("an earlier step failed")?;
        let loss = model.loss(self.inputs.clone().ok_or("no batch on the device")?);
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        self.model = Some(self.optimizer.step(self.learning_rate, model, gradients));
        self.loss = Some(loss.inner());
        Ok(())
    }

    fn loss(&self) -> Result<f32> {
        Ok(self.loss.clone().ok_or("no step was made")?.into_scalar().elem())
    }

    fn wait(&self) -> Result<()> {
        B::sync(&self.device).map_err(|error| format!("{error:?}").into())
    }
}

fn signed(numbers: Vec<u32>) -> Vec<i32> {
    numbers.into_iter().map(u32::cast_signed).collect()
}
