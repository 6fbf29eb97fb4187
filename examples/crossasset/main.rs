//! Trains CrossAsset from one-minute bars: bars, features, tensors in a step, kernels, gradients, AdamW, a report.
//!
//! ```text
//! cargo run --release --example crossasset                                   # a synthetic market, on this CPU
//! cargo run --release --example crossasset -- --bars BTCUSD.csv --epochs 2   # real bars
//! cargo run --release --features cuda --example crossasset -- --device cuda  # on the GPU
//! ```
//! Exit code 0: done. 1: the device or a file failed. 2: the command line or the bars are wrong; nothing was written.

#![forbid(unsafe_code)]

mod bars;
mod cli;
mod dataset;
mod features;
mod learner;
mod loss_svg;
mod model;
mod random;
mod report;
mod screen;
mod synthetic;
mod tensor_file;
mod trace;
mod train;

use std::error::Error;
use std::fs;
use std::io::IsTerminal;
use std::process::ExitCode;

use cli::{Args, DeviceChoice};
use dataset::{Asset, Dataset, Plan};
use report::{ArenaUse, DataSize, ModelSize, Report};
use stepscope::{Checkpoint, Device, DeviceKind};
use tracing_subscriber::EnvFilter;
use train::{Position, Trainer};

fn main() -> ExitCode {
    let args = Args::from_command_line();
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("warn"));
    let ansi = std::io::stderr().is_terminal();
    tracing_subscriber::fmt().with_env_filter(filter).with_ansi(ansi).with_writer(std::io::stderr).init();
    let dataset = match load(&args) {
        Ok(dataset) => dataset,
        Err(error) => {
            eprintln!("error: {error}");
            return ExitCode::from(2);
        }
    };
    match run(&args, &dataset) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Bars to samples.
fn load(args: &Args) -> Result<Dataset, Box<dyn Error>> {
    let assets = if args.bars.is_empty() {
        println!("no --bars given: training on a synthetic market of {} bars, seed {}", synthetic::BARS, args.seed);
        vec![Asset { name: "synthetic market".into(), bars: synthetic::market(args.seed) }]
    } else {
        let read = |path: &std::path::PathBuf| Ok(Asset { name: path.clone(), bars: bars::read_bars(path)? });
        args.bars.iter().map(read).collect::<Result<_, bars::BarsError>>()?
    };
    let plan = Plan { horizon: args.horizon, folds: args.folds, limit: args.sample_limit() };
    Ok(Dataset::new(&assets, plan)?)
}

/// Samples to weights and a report.
fn run(args: &Args, dataset: &Dataset) -> Result<(), Box<dyn Error>> {
    let device = Device::open(match args.device {
        DeviceChoice::Auto => DeviceKind::Auto,
        DeviceChoice::Emulated => DeviceKind::Emulated,
        DeviceChoice::Cuda => DeviceKind::Cuda,
    })?;
    fs::create_dir_all(&args.out).map_err(|error| format!("{}: {error}", args.out.display()))?;
    let model_file = args.out.join("model.safetensors");
    let mut trainer = Trainer::new(&device, args, dataset)?;
    let layout = trainer.layout();
    let model = ModelSize { tensors: layout.entries().len(), weights: layout.weights() };
    let data = DataSize { bars: dataset.bars(), samples: dataset.samples().len() };
    println!(
        "{} tensors, {} weights; {} samples of {} bars; {} folds of {} epochs; on the {}",
        model.tensors,
        model.weights,
        data.samples,
        data.bars,
        args.folds,
        args.epochs,
        device.description().name
    );

    let checkpoint = args.resume.as_ref().map(Checkpoint::load).transpose()?;
    let mut position = match (&checkpoint, &args.resume) {
        (Some(checkpoint), Some(path)) => train::position(checkpoint, path, args, dataset)?,
        _ => Position::default(),
    };
    let done = position.epochs.len();
    for (number, fold) in dataset.folds().iter().enumerate() {
        let epochs_before = number * args.epochs;
        if done > epochs_before + args.epochs || (done == epochs_before + args.epochs && number + 1 < args.folds) {
            continue;
        }
        trainer.start_fold(fold)?;
        if let Some(checkpoint) = checkpoint.as_ref().filter(|_| done > epochs_before) {
            trainer.restore(checkpoint)?;
        }
        for epoch in done.saturating_sub(epochs_before)..args.epochs {
            let result = trainer.epoch(fold, epoch, &mut position.batches)?;
            position.epochs.push(result);
            trainer.save(&model_file, &position)?;
        }
    }

    let report = Report {
        device: device.description().kind.to_string(),
        model,
        data,
        epochs: position.epochs,
        batches: position.batches,
        arena: ArenaUse::from(trainer.arena()),
        capture: trainer.capture(),
        weights_sha256: trainer.weights_sha256()?,
    };
    report.write(&args.out)?;
    println!("{}\n{}", screen::epoch_table(&report.epochs), report.arena.summary());
    println!("weights {}\nresults in {}", report.weights_sha256, args.out.display());
    Ok(())
}
