//! examples/mixture.rs in burn: a small GPT whose feed-forward layers are mixtures of experts.

use std::error::Error;
use std::iter;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use burn::backend::{Autodiff, Flex};
use burn::module::{AutodiffModule, Initializer};
use burn::nn::attention::{MhaInput, MultiHeadAttention, MultiHeadAttentionConfig, generate_autoregressive_mask};
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::{Embedding, EmbeddingConfig, LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn::optim::{AdamWConfig, GradientsParams, Optimizer};
use burn::prelude::*;
use burn::tensor::IndexingUpdateOp;
use burn::tensor::activation::{silu, softmax};
use clap::Parser;
use rand::SeedableRng;
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use serde_json::json;

const CONTEXT: usize = 64;
const WIDTH: usize = 64;
const HEADS: usize = 4;
const LAYERS: usize = 2;
const EXPERTS: usize = 4;
/// Experts that a token uses.
const CHOSEN: usize = 2;
const BATCH: usize = 8;
const UPDATES: usize = 400;

type B = Autodiff<Flex>;

/// Learns a text
#[derive(Parser)]
struct Args {
    /// The text
    text: PathBuf,
}

#[derive(Module, Debug)]
struct Mixture<B: Backend> {
    router: Linear<B>,
    experts: Vec<Expert<B>>,
}

#[derive(Module, Debug)]
struct Expert<B: Backend> {
    up: Linear<B>,
    down: Linear<B>,
}

impl<B: Backend> Mixture<B> {
    fn new(device: &B::Device) -> Self {
        let linear = |inputs, outputs| LinearConfig::new(inputs, outputs).with_bias(false).init(device);
        let expert = |_| Expert { up: linear(WIDTH, 2 * WIDTH), down: linear(2 * WIDTH, WIDTH) };
        Self { router: linear(WIDTH, EXPERTS), experts: (0..EXPERTS).map(expert).collect() }
    }

    /// Computes the result, and a loss that is 1 if the tokens are spread evenly.
    fn forward(&self, x: Tensor<B, 3>) -> (Tensor<B, 3>, Tensor<B, 1>) {
        let rows = x.clone().flatten::<2>(0, 1);
        let probabilities = softmax(self.router.forward(rows.clone()), 1);
        let (gates, ids) = probabilities.clone().topk_with_indices(CHOSEN, 1);
        let gates = gates.clone() / gates.sum_dim(1);
        let mut y = rows.zeros_like();
        for (number, expert) in self.experts.iter().enumerate() {
            let is_chosen = ids.clone().equal_elem(number as i64);
            let gates = (gates.clone() * is_chosen.clone().float()).sum_dim(1);
            let tokens = is_chosen.any_dim(1).argwhere();
            if tokens.dims()[0] == 0 {
                continue;
            }
            let tokens = tokens.squeeze_dim::<1>(1);
            let hidden = silu(expert.up.forward(rows.clone().select(0, tokens.clone())));
            let output = expert.down.forward(hidden) * gates.select(0, tokens.clone());
            y = y.select_assign(0, tokens, output, IndexingUpdateOp::Add);
        }
        let share = ids.one_hot::<3>(EXPERTS).float().mean_dims(&[0, 1]).squeeze_dim::<2>(0);
        (y.reshape(x.dims()), (share * probabilities.mean_dim(0)).sum() * EXPERTS as f64)
    }
}

#[derive(Module, Debug)]
struct Block<B: Backend> {
    norms: [LayerNorm<B>; 2],
    attention: MultiHeadAttention<B>,
    mixture: Mixture<B>,
}

#[derive(Module, Debug)]
struct Gpt<B: Backend> {
    tokens: Embedding<B>,
    positions: Embedding<B>,
    blocks: Vec<Block<B>>,
    norm: LayerNorm<B>,
    head: Linear<B>,
}

impl<B: Backend> Gpt<B> {
    fn new(device: &B::Device) -> Self {
        let initializer = Initializer::Normal { mean: 0.0, std: 0.02 };
        let table = |rows| EmbeddingConfig::new(rows, WIDTH).with_initializer(initializer.clone()).init(device);
        let norm = || LayerNormConfig::new(WIDTH).init(device);
        let block = |_| Block {
            norms: [norm(), norm()],
            attention: MultiHeadAttentionConfig::new(WIDTH, HEADS).with_dropout(0.0).init(device),
            mixture: Mixture::new(device),
        };
        Self {
            tokens: table(256),
            positions: table(CONTEXT),
            blocks: (0..LAYERS).map(block).collect(),
            norm: norm(),
            head: LinearConfig::new(WIDTH, 256).init(device),
        }
    }

    /// Computes the logits of the next bytes, and the sum of the mixtures' losses.
    fn forward(&self, ids: Tensor<B, 2, Int>) -> (Tensor<B, 3>, Tensor<B, 1>) {
        let mask = generate_autoregressive_mask(ids.dims()[0], CONTEXT, &ids.device());
        let mut x = self.tokens.forward(ids) + self.positions.weight.val().unsqueeze::<3>();
        let mut losses = Vec::new();
        for Block { norms: [first, second], attention, mixture } in &self.blocks {
            let input = MhaInput::self_attn(first.forward(x.clone())).mask_attn(mask.clone());
            x = attention.forward(input).context + x;
            let (y, loss) = mixture.forward(second.forward(x.clone()));
            x = y + x;
            losses.push(loss);
        }
        (self.head.forward(self.norm.forward(x)), Tensor::cat(losses, 0).sum())
    }

    /// Computes the losses of windows of a byte more than the context.
    fn evaluate(&self, windows: Tensor<B, 2, Int>) -> (Tensor<B, 1>, Tensor<B, 1>) {
        let next = windows.clone().slice(s![.., 1..]).flatten::<1>(0, 1);
        let (logits, balance) = self.forward(windows.slice(s![.., ..CONTEXT]));
        (CrossEntropyLossConfig::new().init(&next.device()).forward(logits.flatten(0, 1), next), balance)
    }
}

fn main() -> Result<ExitCode, Box<dyn Error>> {
    let device = Default::default();
    B::seed(&device, 7);
    let text = std::fs::read(Args::parse().text)?;
    let (training, held_out) = text.split_at(text.len() / 10 * 9);
    let (training, test) = (windows::<B>(training, &device), windows::<Flex>(held_out, &device));
    let mut model = Gpt::<B>::new(&device);
    let mut optimizer = AdamWConfig::new().with_epsilon(1e-8).with_weight_decay(0.01).init();

    let mut random = StdRng::seed_from_u64(7);
    let mut order: Vec<u32> = (0..training.dims()[0] as u32).collect();
    let mut numbers = iter::repeat_with(|| {
        order.shuffle(&mut random);
        order.clone()
    })
    .flatten();
    let mut losses = 0.0;
    let started = Instant::now();
    for _ in 0..UPDATES {
        let ids: Vec<u32> = numbers.by_ref().take(BATCH).collect();
        let (loss, balance) = model.evaluate(training.clone().select(0, Tensor::from_data(ids.as_slice(), &device)));
        let loss = loss + balance * 0.01;
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        model = optimizer.step(3e-3, model, gradients);
        losses += loss.into_scalar();
    }
    let seconds = started.elapsed().as_secs_f64();
    let model = model.valid();
    let loss = model.evaluate(test).0.into_scalar();
    println!("loss {:.3}, held out {loss:.3} nats a byte", losses / UPDATES as f32);

    let mut written = held_out[..CONTEXT].to_vec();
    for _ in 0..200 {
        let context = Tensor::<Flex, 1, Int>::from_data(&written[written.len() - CONTEXT..], &device);
        let logits = model.forward(context.unsqueeze()).0.slice(s![0, -1, ..]).flatten::<1>(0, 2);
        written.push(softmax(logits / 0.8, 0).categorical(1).into_scalar() as u8);
    }
    println!("{}", String::from_utf8_lossy(&written));
    println!("{}", json!({ "example": "mixture", "framework": "burn", "seconds": seconds, "result": loss }));
    Ok(ExitCode::from(u8::from(loss > 2.6)))
}

/// Returns the adjacent windows of a text, of a byte more than the context.
fn windows<B: Backend>(text: &[u8], device: &B::Device) -> Tensor<B, 2, Int> {
    let starts = (0..text.len() - CONTEXT).step_by(CONTEXT);
    let windows: Vec<&[u8]> = starts.map(|start| &text[start..=start + CONTEXT]).collect();
    Tensor::from_data(TensorData::new(windows.concat(), [windows.len(), CONTEXT + 1]), device)
}
