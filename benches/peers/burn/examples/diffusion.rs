//! examples/diffusion.rs in burn: a denoising diffusion model that draws handwritten digits.

#[path = "../../digits.rs"]
mod digits;
#[path = "../../schedule.rs"]
mod schedule;

use std::f64::consts::PI;
use std::process::ExitCode;
use std::time::Instant;

use burn::backend::{Autodiff, Flex};
use burn::module::AutodiffModule;
use burn::nn::loss::{MseLoss, Reduction};
use burn::nn::{Embedding, EmbeddingConfig, LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn::optim::{AdamWConfig, GradientsParams, Optimizer};
use burn::prelude::*;
use burn::tensor::Distribution;
use burn::tensor::activation::silu;
use digits::{CLASSES, Images, PIXELS};
use rand::SeedableRng;
use rand::rngs::StdRng;
use serde_json::json;

/// Steps from noise to an image.
const STEPS: usize = 60;
const WIDTH: usize = 256;
const BATCH: usize = 64;
const UPDATES: usize = 3000;
const WARM_UP: usize = 100;
const RATE: f64 = 1e-3;

type B = Autodiff<Flex>;

/// Layers whose outputs are added to their inputs.
#[derive(Module, Debug)]
struct Denoiser<B: Backend> {
    input: Linear<B>,
    step: Embedding<B>,
    layers: Vec<Layer<B>>,
    output: Linear<B>,
}

#[derive(Module, Debug)]
struct Layer<B: Backend> {
    norm: LayerNorm<B>,
    linear: Linear<B>,
}

impl<B: Backend> Denoiser<B> {
    fn new(device: &B::Device) -> Self {
        let layer = |_| Layer {
            norm: LayerNormConfig::new(WIDTH).init(device),
            linear: LinearConfig::new(WIDTH, WIDTH).init(device),
        };
        Self {
            input: LinearConfig::new(PIXELS, WIDTH).init(device),
            step: EmbeddingConfig::new(STEPS, WIDTH).init(device),
            layers: (0..3).map(layer).collect(),
            output: LinearConfig::new(WIDTH, PIXELS).init(device),
        }
    }

    /// Computes images, `[batch, PIXELS]`, for steps, `[batch, 1]`.
    fn forward(&self, images: Tensor<B, 2>, steps: Tensor<B, 2, Int>) -> Tensor<B, 2> {
        let mut x = self.input.forward(images);
        let step = self.step.forward(steps).squeeze_dim::<2>(1);
        for layer in &self.layers {
            x = layer.linear.forward(silu(layer.norm.forward(x.clone()) + step.clone())) + x;
        }
        self.output.forward(x)
    }
}

fn main() -> ExitCode {
    let device = Default::default();
    B::seed(&device, 7);
    let [training, others] = Images::load(&mut StdRng::seed_from_u64(7)).map(|images| {
        let shape = [images.digits.len(), PIXELS];
        Tensor::<Flex, 2>::from_data(TensorData::new(images.pixels, shape), &device) * 2.0 - 1.0
    });
    let mut model = Denoiser::<B>::new(&device);
    let mut optimizer = AdamWConfig::new().with_epsilon(1e-8).with_weight_decay(0.01).init();

    let normal = Distribution::Normal(0.0, 1.0);
    let below = |most| Distribution::Uniform(0.0, most as f64);
    let mut losses = 0.0;
    let images = Tensor::<B, 2>::from_inner(training.clone());
    let started = Instant::now();
    for update in 1..=UPDATES {
        let numbers = Tensor::<B, 1, Int>::random([BATCH], below(training.dims()[0]), &device);
        let steps = Tensor::<B, 2, Int>::random([BATCH, 1], below(STEPS), &device);
        let clean = images.clone().select(0, numbers);
        let [signal, spread] = shares(steps.clone().float());
        let noisy = clean.clone() * signal + clean.random_like(normal) * spread;
        let loss = MseLoss::new().forward(model.forward(noisy, steps), clean, Reduction::Mean);
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        model = optimizer.step(RATE * schedule::cosine(update, [WARM_UP, UPDATES], 0.01), model, gradients);
        losses += loss.into_scalar();
    }
    let seconds = started.elapsed().as_secs_f64();
    println!("mean squared error of the images: {:.3}", losses / UPDATES as f32);

    let model = model.valid();
    let mut images = Tensor::<Flex, 2>::random([CLASSES, PIXELS], normal, &device);
    for step in (0..STEPS).rev() {
        let clean = model.forward(images.clone(), Tensor::full([CLASSES, 1], step as i64, &device));
        let [signal, spread] = shares(Tensor::full([1, 1], step as f32, &device));
        let [next_signal, next_spread] = shares(Tensor::full([1, 1], step as f32 - 1.0, &device));
        images = clean.clone() * next_signal + (images - clean * signal) / spread * next_spread;
    }
    let pixels: Vec<f32> = images.to_data().to_vec().expect("they are f32");
    let shade =
        |x: &f32| [[' '; 2], ['░'; 2], ['▒'; 2], ['▓'; 2], ['█'; 2]][((x + 1.0) * 2.5).clamp(0.0, 4.0) as usize];
    for row in 0..8 {
        let line = |image: &[f32]| image[8 * row..][..8].iter().flat_map(shade).collect::<String>();
        println!("{}", pixels.chunks(PIXELS).map(line).collect::<Vec<_>>().join(" "));
    }
    let [drawn, real] = [images, others].map(|images| distance(images, &training));
    println!("mean squared distance to the nearest image: {drawn:.3}, of other real images {real:.3}");
    let result = [drawn, real];
    println!("{}", json!({ "example": "diffusion", "framework": "burn", "seconds": seconds, "result": result }));
    ExitCode::from(u8::from(drawn > 1.5 * real))
}

/// Returns the factors of image and noise in steps: 1 and 0 in the step before the first.
fn shares<B: Backend>(steps: Tensor<B, 2>) -> [Tensor<B, 2>; 2] {
    let angle = (steps + 1.0) * (0.98 * PI / 2.0 / STEPS as f64);
    [angle.clone().cos(), angle.sin()]
}

/// Returns the mean over images of the squared distance to the nearest of others.
fn distance(images: Tensor<Flex, 2>, others: &Tensor<Flex, 2>) -> f32 {
    let nearest = |image: Tensor<Flex, 2>| (others.clone() - image).square().mean_dim(1).min();
    Tensor::cat(images.iter_dim(0).map(nearest).collect(), 0).mean().into_scalar()
}
