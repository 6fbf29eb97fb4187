//! examples/convnet.rs in burn: a convolutional net that classifies handwritten digits.

#[path = "../../digits.rs"]
mod digits;
#[path = "../../schedule.rs"]
mod schedule;

use std::process::ExitCode;
use std::time::Instant;

use burn::backend::{Autodiff, Flex};
use burn::module::AutodiffModule;
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::pool::{MaxPool2d, MaxPool2dConfig};
use burn::nn::{Linear, LinearConfig, PaddingConfig2d};
use burn::optim::{AdamWConfig, GradientsParams, Optimizer};
use burn::prelude::*;
use burn::tensor::activation::relu;
use digits::{CLASSES, Images};
use rand::SeedableRng;
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use serde_json::json;

/// Rows and columns of an image.
const SIDE: usize = 8;
/// Channels after each convolution.
const CHANNELS: [usize; 2] = [16, 32];
const BATCH: usize = 32;
const EPOCHS: usize = 8;
const RATE: f64 = 3e-3;
const WANTED: f32 = 0.95;

type B = Autodiff<Flex>;

#[derive(Module, Debug)]
struct ConvNet<B: Backend> {
    first: Conv2d<B>,
    second: Conv2d<B>,
    pool: MaxPool2d,
    head: Linear<B>,
}

impl<B: Backend> ConvNet<B> {
    fn new(device: &B::Device) -> Self {
        let [first, second] = CHANNELS;
        let conv = |channels| Conv2dConfig::new(channels, [3, 3]).with_padding(PaddingConfig2d::Same).init(device);
        Self {
            first: conv([1, first]),
            second: conv([first, second]),
            pool: MaxPool2dConfig::new([2, 2]).init(),
            head: LinearConfig::new(second * (SIDE / 4) * (SIDE / 4), CLASSES).init(device),
        }
    }

    fn forward(&self, x: Tensor<B, 4>) -> Tensor<B, 2> {
        let x = self.pool.forward(relu(self.first.forward(x)));
        let x = self.pool.forward(relu(self.second.forward(x)));
        self.head.forward(x.flatten(1, 3))
    }
}

fn main() -> ExitCode {
    let device = Default::default();
    B::seed(&device, 7);
    let mut random = StdRng::seed_from_u64(7);
    let [training, validation] = Images::load(&mut random);
    let (pixels, labels) = upload::<B>(training, &device);
    let (test_pixels, test_labels) = upload::<Flex>(validation, &device);

    let mut model = ConvNet::<B>::new(&device);
    let mut optimizer = AdamWConfig::new().with_epsilon(1e-8).with_weight_decay(0.01).init();
    let mut order: Vec<u32> = (0..labels.dims()[0] as u32).collect();
    let (total, mut update, mut accuracy) = (EPOCHS * order.len().div_ceil(BATCH), 0, 0.0);
    let started = Instant::now();
    for epoch in 0..EPOCHS {
        order.shuffle(&mut random);
        let mut losses = 0.0;
        for numbers in order.chunks(BATCH) {
            let ids = Tensor::from_data(numbers, &device);
            let logits = model.forward(pixels.clone().select(0, ids.clone()));
            let loss = CrossEntropyLossConfig::new().init(&device).forward(logits, labels.clone().select(0, ids));
            let gradients = GradientsParams::from_grads(loss.backward(), &model);
            update += 1;
            model = optimizer.step(RATE * schedule::cosine(update, [total / 20, total], 0.05), model, gradients);
            losses += loss.into_scalar() * numbers.len() as f32;
        }
        let guesses = model.valid().forward(test_pixels.clone()).argmax(1).squeeze_dim::<1>(1);
        accuracy = guesses.equal(test_labels.clone()).float().mean().into_scalar();
        println!("epoch {epoch}: loss {:.4}, accuracy {:.1} %", losses / order.len() as f32, 100.0 * accuracy);
    }
    let seconds = started.elapsed().as_secs_f64();
    println!("{}", json!({ "example": "convnet", "framework": "burn", "seconds": seconds, "result": accuracy }));
    ExitCode::from(u8::from(accuracy < WANTED))
}

fn upload<B: Backend>(images: Images, device: &B::Device) -> (Tensor<B, 4>, Tensor<B, 1, Int>) {
    let count = images.digits.len();
    let pixels = TensorData::new(images.pixels, [count, 1, SIDE, SIDE]);
    (Tensor::from_data(pixels, device), Tensor::from_data(images.digits.as_slice(), device))
}
