//! GPT-2 with a tied head: the model of gpt2.py.

use burn::module::Initializer;
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::{Embedding, EmbeddingConfig, Gelu, LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn::prelude::*;
use burn::tensor::DType;
use burn::tensor::backend::AutodiffBackend;
use burn::tensor::module::attention;
use burn::tensor::ops::AttentionModuleOptions;

use crate::training::Learns;
use crate::work::Gpt2Sizes;

#[derive(Module, Debug)]
pub(crate) struct Gpt2<B: Backend> {
    tokens: Embedding<B>,
    positions: Embedding<B>,
    blocks: Vec<Block<B>>,
    norm: LayerNorm<B>,
}

#[derive(Module, Debug)]
struct Block<B: Backend> {
    norm1: LayerNorm<B>,
    norm2: LayerNorm<B>,
    attention: Linear<B>,
    output: Linear<B>,
    up: Linear<B>,
    gelu: Gelu,
    down: Linear<B>,
    heads: usize,
}

impl<B: Backend> Gpt2<B> {
    pub(crate) fn new(sizes: Gpt2Sizes, device: &B::Device) -> Self {
        let Gpt2Sizes { vocabulary, width, layers, tokens, .. } = sizes;
        let initializer = Initializer::Normal { mean: 0.0, std: 0.02 };
        let table = |rows| EmbeddingConfig::new(rows, width).with_initializer(initializer.clone()).init(device);
        Self {
            tokens: table(vocabulary),
            positions: table(tokens),
            blocks: (0..layers).map(|_| Block::new(sizes, device)).collect(),
            norm: LayerNormConfig::new(width).init(device),
        }
    }

    /// Returns logits `[samples * tokens, vocabulary]` for `ids: [samples, tokens]`.
    fn forward(&self, ids: Tensor<B, 2, Int>) -> Tensor<B, 2> {
        let mut h = self.tokens.forward(ids) + self.positions.weight.val().unsqueeze();
        for block in &self.blocks {
            h = block.forward(h);
        }
        self.norm.forward(h).flatten::<2>(0, 1).matmul(self.tokens.weight.val().transpose())
    }
}

impl<B: Backend> Block<B> {
    fn new(Gpt2Sizes { width, heads, .. }: Gpt2Sizes, device: &B::Device) -> Self {
        let norm = || LayerNormConfig::new(width).init(device);
        Self {
            norm1: norm(),
            norm2: norm(),
            attention: LinearConfig::new(width, 3 * width).init(device),
            output: LinearConfig::new(width, width).init(device),
            up: LinearConfig::new(width, 4 * width).init(device),
            gelu: Gelu::new_approximate(),
            down: LinearConfig::new(4 * width, width).init(device),
            heads,
        }
    }

    fn forward(&self, h: Tensor<B, 3>) -> Tensor<B, 3> {
        let [samples, tokens, width] = h.dims();
        let parts = self.attention.forward(self.norm1.forward(h.clone())).chunk(3, 2);
        let heads = |part: &Tensor<B, 3>| {
            part.clone().reshape([samples, tokens, self.heads, width / self.heads]).swap_dims(1, 2)
        };
        let causal = AttentionModuleOptions { is_causal: true, ..Default::default() };
        let mixed = attention(heads(&parts[0]), heads(&parts[1]), heads(&parts[2]), None, None, causal);
        let h = h + self.output.forward(mixed.swap_dims(1, 2).reshape([samples, tokens, width]));
        let z = self.up.forward(self.norm2.forward(h.clone()));
        h + self.down.forward(self.gelu.forward(z))
    }
}

impl<B: AutodiffBackend> Learns<B> for Gpt2<B> {
    type Inputs = (Tensor<B, 2, Int>, Tensor<B, 2, Int>);

    fn upload([ids, targets]: &[TensorData; 2], device: &B::Device) -> Self::Inputs {
        (Tensor::from_data(ids.clone(), device), Tensor::from_data(targets.clone(), device))
    }

    fn loss(&self, (ids, targets): Self::Inputs) -> Tensor<B, 1> {
        let logits = self.forward(ids).cast(DType::F32);
        CrossEntropyLossConfig::new().init(&logits.device()).forward(logits, targets.flatten::<1>(0, 1))
    }
}
