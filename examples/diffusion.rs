//! A denoising diffusion model (Ho, Jain and Abbeel, 2020) that draws handwritten digits.
//!
//! `cargo run --release --example diffusion`. It learns to predict images from noisy ones, then
//! draws ten by the deterministic sampler of Song, Meng and Ermon (2020). Exit code 0: they are
//! about as close to images of the data as other real images are. 1: they are not.

#![forbid(unsafe_code)]
#![cfg_attr(not(test), warn(clippy::disallowed_methods))]

#[expect(dead_code, reason = "its batches have no noise")]
#[path = "digits/data.rs"]
mod data;

use clap::Parser;
use data::{CLASSES, Images, PIXELS};
use std::{array, f32::consts::TAU, process::ExitCode};
use stepscope::data::SplitMix64;
use stepscope::nn::{Embedding, LayerNorm, Linear};
use stepscope::optim::Schedule;
use stepscope::prelude::*;

/// Steps from noise to an image.
const STEPS: u32 = 60;
const WIDTH: usize = 256;
const BATCH: usize = 64;
const UPDATES: u64 = 3000;

/// Learns to draw handwritten digits
#[derive(Parser)]
struct Args {
    /// Device to train on
    #[arg(long, value_name = "auto|emulated|cuda", default_value = "auto")]
    device: DeviceKind,
}

type Image = [f32; PIXELS];

#[derive(HostBatch)]
struct Noisy {
    images: Vec<Image>,
    steps: Vec<u32>,
    clean: Vec<Image>,
}

/// Layers whose outputs are added to their inputs.
struct Denoiser {
    input: Linear,
    step: Embedding,
    layers: Vec<(LayerNorm, Linear)>,
    output: Linear,
}

impl Model for Denoiser {
    fn forward<'s>(&self, tape: &Tape<'_, 's>, batch: &DeviceBatch<'s>) -> Result<Var<'s>> {
        let x = self.input.forward(tape, &tape.input(batch.input("images")?))?;
        let step = self.step.forward(tape, batch.indices("steps")?)?;
        let x = self.layers.iter().try_fold(x, |x, (norm, layer)| {
            layer.forward_residual(tape, &(norm.forward(tape, &x)? + step)?.silu()?, &x)
        })?;
        self.output.forward(tape, &x)
    }

    fn loss<'s>(&self, tape: &Tape<'_, 's>, image: &Var<'s>, batch: &DeviceBatch<'s>) -> Result<Var<'s>> {
        (image - tape.input(batch.input("clean")?))?.square()?.mean(..)
    }
}

fn main() -> Result<ExitCode> {
    let center = |images: Images| images.pixels.iter().map(|image| image.map(|x| 2.0 * x - 1.0)).collect::<Vec<_>>();
    let (training, others) = Images::load(7);
    let (training, others) = (center(training), center(others));
    let mut spec = ParameterSpec::builder();
    let model = Denoiser {
        input: Linear::new(spec.at("input"), PIXELS, WIDTH),
        step: Embedding::new(spec.at("step"), STEPS as usize, WIDTH, 1.0),
        layers: ["first", "second", "third"]
            .map(|name| (LayerNorm::new(spec.at(name).at("norm"), WIDTH), Linear::new(spec.at(name), WIDTH, WIDTH)))
            .into(),
        output: Linear::new(spec.at("output"), WIDTH, PIXELS),
    };
    let schedule = Schedule::cosine(100, UPDATES, 0.01);
    let device = Device::open(Args::parse().device)?;
    let config = AdamW { learning_rate: 1e-3, schedule, ..AdamW::default() };
    let state = TrainState::new(&device, model, &spec.build()?, 7, config)?;

    let mut random = SplitMix64::new(7);
    let mut below = |count: u64| random.next_u64() % count;
    let mut batch = |update: u64| {
        let mut normal = normals(update);
        let clean: Vec<Image> = (0..BATCH).map(|_| training[below(training.len() as u64) as usize]).collect();
        let steps: Vec<u32> = clean.iter().map(|_| below(u64::from(STEPS)) as u32).collect();
        let mut mix = |(&step, image): (_, &Image)| {
            let [signal, spread] = shares(step);
            image.map(|x| signal * x + spread * normal())
        };
        Noisy { images: steps.iter().zip(&clean).map(&mut mix).collect(), steps, clean }
    };
    let mut trainer = Trainer::captured(&device, state, &batch(0))?;
    println!("mean squared error of the images: {:.3}", trainer.fit((0..UPDATES).map(batch))?.mean_loss());

    let mut normal = normals(UPDATES);
    let mut images: Vec<Image> = (0..CLASSES).map(|_| array::from_fn(|_| normal())).collect();
    for step in (0..STEPS).rev() {
        let noisy = Noisy { steps: vec![step; images.len()], clean: images.clone(), images };
        let (_, clean) = trainer.evaluate_with(&noisy, |step, clean| step.read(clean.value()))?;
        let ([signal, spread], [next_signal, next_spread]) = (shares(step), shares(step.wrapping_sub(1)));
        let next = |x: f32, clean: f32| next_signal * clean + next_spread * (x - signal * clean) / spread;
        let pairs = noisy.images.iter().zip(clean.as_chunks::<PIXELS>().0);
        images = pairs.map(|(image, clean)| array::from_fn(|at| next(image[at], clean[at]))).collect();
    }
    for row in 0..8 {
        let shade =
            |x: &f32| [[' '; 2], ['░'; 2], ['▒'; 2], ['▓'; 2], ['█'; 2]][((x + 1.0) * 2.5).clamp(0.0, 4.0) as usize];
        let line = |image: &Image| image[8 * row..][..8].iter().flat_map(shade).collect::<String>();
        println!("{}", images.iter().map(line).collect::<Vec<_>>().join(" "));
    }
    let [drawn, real] = [&images, &others].map(|images| distance(images, &training));
    println!("mean squared distance to the nearest image: {drawn:.3}, of other real images {real:.3}");
    Ok(ExitCode::from(u8::from(drawn > 1.5 * real)))
}

/// Returns the factors of image and noise in a step: 1 and 0 in the step before the first.
fn shares(step: u32) -> [f32; 2] {
    let angle = step.wrapping_add(1) as f32 / STEPS as f32 * 0.98 * TAU / 4.0;
    [angle.cos(), angle.sin()]
}

/// Draws independent normal numbers (Box and Muller, 1958).
fn normals(seed: u64) -> impl FnMut() -> f32 {
    let mut random = SplitMix64::new(SplitMix64::mix(seed));
    move || (-2.0 * (1.0 - random.unit()).ln()).sqrt() * (TAU * random.unit()).cos()
}

/// Returns the mean over images of the squared distance to the nearest of others.
fn distance(images: &[Image], others: &[Image]) -> f32 {
    let squared = |a: &Image, b: &Image| a.iter().zip(b).map(|(a, b)| (a - b).powi(2)).sum::<f32>() / PIXELS as f32;
    let nearest = |image| others.iter().map(|other| squared(image, other)).fold(f32::MAX, f32::min);
    images.iter().map(nearest).sum::<f32>() / images.len() as f32
}
