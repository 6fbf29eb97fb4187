//! Classifies handwritten digits with a model of two linear layers, trained and validated in
//! seconds on this CPU or a GPU.
//!
//! ```text
//! cargo run --release --example digits
//! cargo run --release --features cuda --example digits -- --device cuda
//! ```
//! Exit code 0: at least 95 % accuracy on the validation images. 1: less, or the device failed. 2:
//! the command line is wrong.

#![forbid(unsafe_code)]
#![cfg_attr(not(test), warn(clippy::disallowed_methods))]

mod data;

use std::process::ExitCode;
use std::sync::Arc;

use clap::Parser;
use data::{CLASSES, Images, PIXELS};
use stepscope::nn::Mlp;
use stepscope::optim::Schedule;
use stepscope::{
    AdamW, Device, DeviceBatch, DeviceKind, HostBatch, Model, ParameterSpec, Result, Tape, TrainState, Trainer, Var,
};

const HIDDEN: usize = 128;
const BATCH: usize = 32;
/// The required accuracy on the validation images.
const WANTED: f64 = 0.95;

/// Learns to classify handwritten digits
#[derive(Parser)]
#[command(name = "digits")]
struct Args {
    /// Device to train on
    #[arg(long, value_name = "auto|emulated|cuda", default_value = "auto")]
    device: DeviceKind,
    /// Passes over the training images
    #[arg(long, value_name = "N", default_value_t = 12)]
    epochs: u64,
    /// Seed of the initial weights, the order of the images, and the split into training and
    /// validation
    #[arg(long, default_value_t = 7)]
    seed: u64,
}

struct Reader {
    mlp: Mlp,
}

impl Model for Reader {
    fn forward<'s>(&self, tape: &Tape<'_, 's>, batch: &DeviceBatch<'s>) -> Result<Var<'s>> {
        self.mlp.forward(tape, &tape.input(batch.input::<f32>("pixels")?))
    }
}

fn main() -> ExitCode {
    match run(&Args::parse()) {
        Ok(accuracy) => {
            println!("validation accuracy {:.1} %", 100.0 * accuracy);
            ExitCode::from(u8::from(accuracy < WANTED))
        }
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Trains, and returns the accuracy on the validation images.
fn run(args: &Args) -> Result<f64> {
    let (training, validation) = Images::load(args.seed);
    let mut spec = ParameterSpec::builder();
    let model = Reader { mlp: Mlp::new(spec.at("mlp"), PIXELS, HIDDEN, CLASSES) };
    let total = args.epochs * training.len().div_ceil(BATCH) as u64;
    let config = AdamW { learning_rate: 3e-3, schedule: Schedule::cosine(total / 20, total, 0.05), ..AdamW::default() };

    let device = Device::open(args.device)?;
    let state = TrainState::new(&device, model, &spec.build()?, args.seed, config)?;
    let mut trainer = Trainer::captured(&device, state, &training.choose(&[0; BATCH]))?;
    let training = Arc::new(training);
    let mut accuracy = 0.0;
    for epoch in 0..args.epochs {
        let progress = trainer.fit(training.batches(BATCH, args.seed ^ (epoch + 1))?)?;
        let (loss, right) = trainer.evaluate_classes(&validation)?;
        accuracy = right as f64 / validation.len() as f64;
        println!(
            "epoch {epoch}: training loss {:.4}, validation loss {:.4}, accuracy {:.1} %",
            progress.mean_loss(),
            loss,
            100.0 * accuracy
        );
    }
    Ok(accuracy)
}
