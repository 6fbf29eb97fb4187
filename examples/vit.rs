//! A small vision transformer (Dosovitskiy et al., 2021) that classifies handwritten digits. It
//! uses the language models' blocks over rows of pixels.
//!
//! `cargo run --release --example vit`. Exit code 0: at least 95 % accuracy on the test images. 1:
//! less, or the device failed. 2: the command line is wrong.

#![forbid(unsafe_code)]
#![cfg_attr(not(test), warn(clippy::disallowed_methods))]

#[path = "digits/data.rs"]
mod data;

use clap::Parser;
use data::{CLASSES, Images, PIXELS};
use std::{process::ExitCode, sync::Arc};
use stepscope::nn::{Block, Embedding, LayerNorm, Linear};
use stepscope::optim::Schedule;
use stepscope::{
    AdamW, Device, DeviceBatch, DeviceKind, HostBatch, Model, ParameterSpec, Result, Tape, TrainState, Trainer, Var,
};

/// Rows of an image, each of which is a token, and pixels per row.
const ROWS: usize = 8;
const WIDTH: usize = 64;
const HEADS: usize = 4;
const LAYERS: usize = 2;
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

struct Vit {
    rows: Linear,
    positions: Embedding,
    blocks: Vec<Block>,
    norm: LayerNorm,
    head: Linear,
}

impl Model for Vit {
    fn forward<'s>(&self, tape: &Tape<'_, 's>, batch: &DeviceBatch<'s>) -> Result<Var<'s>> {
        let pixels = batch.input::<f32>("pixels")?;
        let images = pixels.shape().extents()[0];
        let x = self.rows.forward(tape, &tape.input(pixels.reshape([images, ROWS, PIXELS / ROWS])?))?;
        let x = self.positions.add_positions(tape, &x)?;
        let x = self.blocks.iter().try_fold(x, |x, block| block.forward(tape, &x))?;
        self.head.forward(tape, &tape.mean_tokens(&self.norm.forward(tape, &x)?)?)
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
    let model = Vit {
        rows: Linear::new(spec.at("rows"), PIXELS / ROWS, WIDTH),
        positions: Embedding::new(spec.at("positions"), ROWS, WIDTH, 0.02),
        blocks: (0..LAYERS).map(|n| Block::vit(spec.at(format!("blocks.{n}")), WIDTH, HEADS, 4 * WIDTH)).collect(),
        norm: LayerNorm::new(spec.at("norm"), WIDTH),
        head: Linear::new(spec.at("head"), WIDTH, CLASSES),
    };
    let total = args.epochs * training.len().div_ceil(BATCH) as u64;
    let schedule = Schedule::cosine(total / 20, total, 0.05);
    let config = AdamW { learning_rate: 2e-3, clip: Some(1.0), schedule, ..AdamW::default() };
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
