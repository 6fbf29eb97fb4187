//! A convolutional net that classifies handwritten digits.
//!
//! `cargo run --release --example convnet`. Exit code 0: at least 95 % accuracy on the test images.
//! 1: less, or the device failed. 2: the command line is wrong.

#![forbid(unsafe_code)]
#![cfg_attr(not(test), warn(clippy::disallowed_methods))]

#[path = "digits/data.rs"]
mod data;

use clap::Parser;
use data::{CLASSES, Images};
use std::{process::ExitCode, sync::Arc};
use stepscope::nn::{Conv2d, Linear, Sequential};
use stepscope::ops::ConvolutionConfig;
use stepscope::optim::Schedule;
use stepscope::parameters::ParameterSpecBuilder;
use stepscope::{
    AdamW, Device, DeviceBatch, DeviceKind, HostBatch, Model, ParameterSpec, Result, Tape, TrainState, Trainer, Var,
};

/// Rows and columns of an image.
const SIDE: usize = 8;
/// Channels after each convolution.
const CHANNELS: [usize; 2] = [16, 32];
const BATCH: usize = 32;
const WANTED: f64 = 0.95;

/// Learns to classify handwritten digits
#[derive(Parser)]
struct Args {
    /// Device to train on
    #[arg(long, value_name = "auto|emulated|cuda", default_value = "auto")]
    device: DeviceKind,
    /// Passes over the training images
    #[arg(long, value_name = "N", default_value_t = 8)]
    epochs: u64,
}

struct ConvNet(Sequential);

impl ConvNet {
    /// Each convolution keeps the image's extents, and each pooling halves them.
    fn new(spec: &mut ParameterSpecBuilder) -> Self {
        let [first, second] = CHANNELS;
        let (kernel, config) = ([3, 3], ConvolutionConfig { padding: [1; 2], ..ConvolutionConfig::default() });
        let features = second * (SIDE / 4) * (SIDE / 4);
        let layers = Sequential::default()
            .then(Conv2d::new(spec.at("first"), [1, first], kernel, config))
            .then_fn(|_, x| x.relu()?.max_pool2d([2, 2]))
            .then(Conv2d::new(spec.at("second"), [first, second], kernel, config))
            .then_fn(|_, x| x.relu()?.max_pool2d([2, 2]))
            .then_fn(move |_, x| x.reshape([x.shape().elements() / features, features]))
            .then(Linear::new(spec.at("head"), features, CLASSES));
        Self(layers)
    }
}

impl Model for ConvNet {
    fn forward<'s>(&self, tape: &Tape<'_, 's>, batch: &DeviceBatch<'s>) -> Result<Var<'s>> {
        let pixels = batch.input::<f32>("pixels")?;
        let images = pixels.shape().extents()[0];
        self.0.forward(tape, &tape.input(pixels.reshape([images, 1, SIDE, SIDE])?))
    }
}

fn main() -> ExitCode {
    match run(&Args::parse()) {
        Ok(accuracy) => ExitCode::from(u8::from(accuracy < WANTED)),
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(args: &Args) -> Result<f64> {
    let (training, validation) = Images::load(7);
    let mut spec = ParameterSpec::builder();
    let model = ConvNet::new(&mut spec);
    let total = args.epochs * training.len().div_ceil(BATCH) as u64;
    let schedule = Schedule::cosine(total / 20, total, 0.05);
    let config = AdamW { learning_rate: 3e-3, schedule, ..AdamW::default() };
    let device = Device::open(args.device)?;
    let state = TrainState::new(&device, model, &spec.build()?, 7, config)?;
    let mut trainer = Trainer::captured(&device, state, &training.choose(&[0; BATCH]))?;
    let (training, mut accuracy) = (Arc::new(training), 0.0);
    for epoch in 0..args.epochs {
        let progress = trainer.fit(training.batches(BATCH, epoch)?)?;
        let (_, right) = trainer.evaluate_classes(&validation)?;
        accuracy = right as f64 / validation.len() as f64;
        println!("epoch {epoch}: loss {:.4}, accuracy {:.1} %", progress.mean_loss(), 100.0 * accuracy);
    }
    Ok(accuracy)
}
