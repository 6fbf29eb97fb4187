//! CrossAsset: the model of examples/crossasset/model.rs.

use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::{Gelu, Linear, LinearConfig, RmsNorm, RmsNormConfig};
use burn::prelude::*;
use burn::tensor::DType;
use burn::tensor::backend::AutodiffBackend;
use burn::tensor::module::attention;

use crate::training::Learns;
use crate::work::crossasset::{CLASSES, FEATURES, HEADS, HIDDEN, LAYERS, SCALES, WIDTH};

#[derive(Module, Debug)]
pub(crate) struct CrossAsset<B: Backend> {
    scales: Vec<Linear<B>>,
    blocks: Vec<Block<B>>,
    head: Linear<B>,
}

#[derive(Module, Debug)]
struct Block<B: Backend> {
    norm1: RmsNorm<B>,
    norm2: RmsNorm<B>,
    wq: Linear<B>,
    wk: Linear<B>,
    wv: Linear<B>,
    wo: Linear<B>,
    q_norm: RmsNorm<B>,
    k_norm: RmsNorm<B>,
    ffn1: Linear<B>,
    gelu: Gelu,
    ffn2: Linear<B>,
}

impl<B: Backend> CrossAsset<B> {
    pub(crate) fn new(device: &B::Device) -> Self {
        Self {
            scales: (0..SCALES).map(|_| LinearConfig::new(FEATURES, WIDTH).init(device)).collect(),
            blocks: (0..LAYERS).map(|_| Block::new(device)).collect(),
            head: LinearConfig::new(WIDTH, CLASSES).init(device),
        }
    }

    /// Returns `[batch, classes]` for `x: [batch, scales, features]`.
    fn forward(&self, x: Tensor<B, 3>) -> Tensor<B, 2> {
        let token = |(scale, linear): (usize, &Linear<B>)| {
            linear.forward(x.clone().slice_dim(1, scale..scale + 1).squeeze_dim::<2>(1))
        };
        let mut h = Tensor::stack::<3>(self.scales.iter().enumerate().map(token).collect(), 1);
        for block in &self.blocks {
            h = block.forward(h);
        }
        self.head.forward(h.mean_dim(1).squeeze_dim::<2>(1))
    }
}

impl<B: Backend> Block<B> {
    fn new(device: &B::Device) -> Self {
        let norm = |size| RmsNormConfig::new(size).with_epsilon(1e-6).init(device);
        let square = || LinearConfig::new(WIDTH, WIDTH).with_bias(false).init(device);
        Self {
            norm1: norm(WIDTH),
            norm2: norm(WIDTH),
            wq: square(),
            wk: square(),
            wv: square(),
            wo: square(),
            q_norm: norm(WIDTH / HEADS),
            k_norm: norm(WIDTH / HEADS),
            ffn1: LinearConfig::new(WIDTH, HIDDEN).init(device),
            gelu: Gelu::new_approximate(),
            ffn2: LinearConfig::new(HIDDEN, WIDTH).init(device),
        }
    }

    fn forward(&self, h: Tensor<B, 3>) -> Tensor<B, 3> {
        let [batch, tokens, _] = h.dims();
        let z = self.norm1.forward(h.clone());
        let heads = |linear: &Linear<B>| linear.forward(z.clone()).reshape([batch, tokens, HEADS, WIDTH / HEADS]);
        let q = self.q_norm.forward(heads(&self.wq)).swap_dims(1, 2);
        let k = self.k_norm.forward(heads(&self.wk)).swap_dims(1, 2);
        let v = heads(&self.wv).swap_dims(1, 2);
        let mixed = attention(q, k, v, None, None, Default::default()).swap_dims(1, 2);
        let h = h + self.wo.forward(mixed.reshape([batch, tokens, WIDTH]));
        let z = self.ffn1.forward(self.norm2.forward(h.clone()));
        h + self.ffn2.forward(self.gelu.forward(z))
    }
}

impl<B: AutodiffBackend> Learns<B> for CrossAsset<B> {
    type Inputs = (Tensor<B, 3>, Tensor<B, 1, Int>);

    fn upload([x, labels]: &[TensorData; 2], device: &B::Device) -> Self::Inputs {
        (Tensor::from_data(x.clone(), device), Tensor::from_data(labels.clone(), device))
    }

    fn loss(&self, (x, labels): Self::Inputs) -> Tensor<B, 1> {
        let logits = self.forward(x).cast(DType::F32);
        CrossEntropyLossConfig::new().init(&logits.device()).forward(logits, labels)
    }
}
