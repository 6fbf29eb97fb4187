//! examples/distillation.rs in burn: distillation of a small GPT into a smaller one.

use std::error::Error;
use std::iter;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use burn::backend::{Autodiff, Flex};
use burn::module::{AutodiffModule, Initializer};
use burn::nn::activation::ActivationConfig;
use burn::nn::attention::generate_autoregressive_mask;
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::transformer::{TransformerEncoder, TransformerEncoderConfig, TransformerEncoderInput};
use burn::nn::{Embedding, EmbeddingConfig, LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn::optim::{AdamWConfig, GradientsParams, Optimizer};
use burn::prelude::*;
use burn::tensor::activation::log_softmax;
use clap::Parser;
use rand::SeedableRng;
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use serde_json::json;

const CONTEXT: usize = 32;
const HEADS: usize = 4;
const BATCH: usize = 16;
const UPDATES: usize = 500;
/// The bytes that the model tells apart. All others are the last.
const CLASSES: usize = 128;

type B = Autodiff<Flex>;

/// Distills a model of a text
#[derive(Parser)]
struct Args {
    /// The text
    text: PathBuf,
}

#[derive(Module, Debug)]
struct Gpt<B: Backend> {
    tokens: Embedding<B>,
    positions: Embedding<B>,
    blocks: TransformerEncoder<B>,
    norm: LayerNorm<B>,
    head: Linear<B>,
}

impl<B: Backend> Gpt<B> {
    fn new(width: usize, layers: usize, device: &B::Device) -> Self {
        let initializer = Initializer::Normal { mean: 0.0, std: 0.02 };
        let table = |rows| EmbeddingConfig::new(rows, width).with_initializer(initializer.clone()).init(device);
        Self {
            tokens: table(CLASSES),
            positions: table(CONTEXT),
            blocks: TransformerEncoderConfig::new(width, 4 * width, HEADS, layers)
                .with_dropout(0.0)
                .with_norm_first(true)
                .with_activation(ActivationConfig::GeluApproximate)
                .init(device),
            norm: LayerNormConfig::new(width).init(device),
            head: LinearConfig::new(width, CLASSES).init(device),
        }
    }

    /// Computes the logits of the bytes after those of windows, `[samples * CONTEXT, CLASSES]`.
    fn forward(&self, windows: Tensor<B, 2, Int>) -> Tensor<B, 2> {
        let ids = windows.slice(s![.., ..CONTEXT]);
        let mask = generate_autoregressive_mask(ids.dims()[0], CONTEXT, &ids.device());
        let x = self.tokens.forward(ids) + self.positions.weight.val().unsqueeze::<3>();
        let x = self.blocks.forward(TransformerEncoderInput::new(x).mask_attn(mask));
        self.head.forward(self.norm.forward(x)).flatten(0, 1)
    }
}

fn cross_entropy<B: Backend>(logits: Tensor<B, 2>, windows: Tensor<B, 2, Int>) -> Tensor<B, 1> {
    let next = windows.slice(s![.., 1..]).flatten::<1>(0, 1);
    CrossEntropyLossConfig::new().init(&next.device()).forward(logits, next)
}

/// Trains a model of this width and number of layers, and returns it with its held-out loss.
fn fit(
    [training, test]: &[Tensor<Flex, 2, Int>; 2],
    width: usize,
    layers: usize,
    teacher: Option<&Gpt<Flex>>,
) -> (Gpt<Flex>, f32) {
    let device = training.device();
    let mut model = Gpt::<B>::new(width, layers, &device);
    let mut optimizer = AdamWConfig::new().with_epsilon(1e-8).with_weight_decay(0.01).init();
    let mut random = StdRng::seed_from_u64(7);
    let mut order: Vec<u32> = (0..training.dims()[0] as u32).collect();
    let mut numbers = iter::repeat_with(|| {
        order.shuffle(&mut random);
        order.clone()
    })
    .flatten();
    for _ in 0..UPDATES {
        let ids: Vec<u32> = numbers.by_ref().take(BATCH).collect();
        let windows = training.clone().select(0, Tensor::from_data(ids.as_slice(), &device));
        let of_model = Tensor::from_inner(windows.clone());
        let logits = model.forward(of_model.clone());
        let mut loss = cross_entropy(logits.clone(), of_model);
        if let Some(teacher) = teacher {
            let ours = log_softmax(logits, 1);
            let theirs = Tensor::from_inner(log_softmax(teacher.forward(windows), 1));
            let divergence = (theirs.clone().exp() * (theirs - ours)).sum_dim(1).mean();
            loss = loss * 0.3 + divergence * 0.7;
        }
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        model = optimizer.step(3e-3, model, gradients);
    }
    let model = model.valid();
    let loss = cross_entropy(model.forward(test.clone()), test.clone()).into_scalar();
    (model, loss)
}

fn main() -> Result<ExitCode, Box<dyn Error>> {
    let device = Default::default();
    B::seed(&device, 7);
    let text = std::fs::read(Args::parse().text)?;
    let text: Vec<u8> = text.into_iter().map(|byte| byte.min(CLASSES as u8 - 1)).collect();
    let (training, held_out) = text.split_at(text.len() / 10 * 9);
    let data = [training, held_out].map(|text| {
        let starts = (0..text.len() - CONTEXT).step_by(CONTEXT);
        let windows: Vec<&[u8]> = starts.map(|start| &text[start..=start + CONTEXT]).collect();
        Tensor::from_data(TensorData::new(windows.concat(), [windows.len(), CONTEXT + 1]), &device)
    });

    let started = Instant::now();
    let (teacher, of_teacher) = fit(&data, 96, 2, None);
    let (_, of_student) = fit(&data, 32, 1, None);
    let (_, of_distilled) = fit(&data, 32, 1, Some(&teacher));
    let seconds = started.elapsed().as_secs_f64();
    for (name, loss) in [("teacher", of_teacher), ("student", of_student), ("student, distilled", of_distilled)] {
        println!("{name:<18} held out {loss:.3} nats a byte");
    }
    let result = json!({ "teacher": of_teacher, "student": of_student, "student, distilled": of_distilled });
    println!("{}", json!({ "example": "distillation", "framework": "burn", "seconds": seconds, "result": result }));
    Ok(ExitCode::from(u8::from(of_distilled >= of_student)))
}
