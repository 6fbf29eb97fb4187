//! Handwritten digits: a model of two linear layers, trained and validated in seconds, on this CPU or on a GPU.
//!
//! ```text
//! cargo run --release --example digits
//! cargo run --release --features cuda --example digits -- --device cuda
//! ```
//! Exit code 0: at least 95 % of the images that it was not trained on are told right. 1: fewer, or the device failed. 2: the
//! command line is wrong.

#![forbid(unsafe_code)]
#![cfg_attr(not(test), warn(clippy::disallowed_methods))]

mod data;

use std::process::ExitCode;
use std::sync::Arc;

use clap::Parser;
use data::{CLASSES, Images, PIXELS};
use stepscope::nn::Mlp;
use stepscope::{
    AdamWConfig, Arena, Batch, Capacity, Device, DeviceKind, EpochProgress, Layout, Learner, Model, Result, Samples,
    Schedule, Tape, Trainer, Var,
};

const HIDDEN: usize = 128;
const BATCH: usize = 32;
/// The share of the validation images that must be told right.
const WANTED: f64 = 0.95;

/// Learns to tell handwritten digits.
#[derive(Parser)]
#[command(name = "digits")]
struct Args {
    /// Where to train
    #[arg(long, value_name = "auto|emulated|cuda", default_value = "auto")]
    device: DeviceKind,
    /// Passes over the training images
    #[arg(long, value_name = "N", default_value_t = 12)]
    epochs: u64,
    /// Names the initial weights, the order of the images, and which of them are for validation
    #[arg(long, default_value_t = 7)]
    seed: u64,
}

struct Reader {
    mlp: Mlp,
}

impl Model for Reader {
    fn forward<'s>(&self, tape: &Tape<'_, 's>, batch: &Batch<'s>) -> Result<Var<'s>> {
        self.mlp.forward(tape, &tape.input(batch.input::<f32>(0)?))
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

/// Trains, and returns the share of the validation images that are told right.
fn run(args: &Args) -> Result<f64> {
    let (training, validation) = Images::load(args.seed);
    let mut layout = Layout::builder();
    let model = Reader { mlp: Mlp::new(layout.names().at("mlp"), PIXELS, HIDDEN, CLASSES) };
    let total = args.epochs * training.len().div_ceil(BATCH) as u64;
    let config = AdamWConfig {
        learning_rate: 3e-3,
        schedule: Schedule::WarmupCosine { warmup: total / 20, total, floor: 0.05 },
        ..AdamWConfig::default()
    };

    let device = Device::open(args.device)?;
    let mut arena = Arena::builder(&device).capacity(Capacity::mib(8)).build()?;
    let learner = Learner::new(&device, model, &layout.build()?, args.seed, config)?;
    let largest = training.choose(&[0; BATCH]);
    let mut trainer = Trainer::captured(&mut arena, learner, &largest)?;
    let training = Arc::new(training);
    let mut accuracy = 0.0;
    for epoch in 0..args.epochs {
        let mut progress = EpochProgress::default();
        trainer.epoch(training.batches(BATCH, args.seed ^ (epoch + 1))?, &mut progress, &mut ())?;
        let (loss, right) = trainer.evaluate_classes(&validation, &validation.digits)?;
        accuracy = right as f64 / validation.len() as f64;
        println!(
            "epoch {epoch}: training loss {:.4}, validation loss {:.4}, accuracy {:.1} %",
            progress.mean_loss(),
            loss / validation.len() as f64,
            100.0 * accuracy
        );
    }
    Ok(accuracy)
}
