//! Trains CrossAsset from one-minute bars: bars, features, tensors in a step, kernels, gradients, AdamW, a report.
//!
//! ```text
//! cargo run --release --example crossasset                                   # a synthetic market, on this CPU
//! cargo run --release --example crossasset -- --bars BTCUSD.csv --epochs 2   # real bars
//! cargo run --release --features cuda --example crossasset -- --device cuda  # on the GPU
//! ```
//! Exit code 0: done. 1: the device or a file failed. 2: the command line or the bars are wrong; nothing was written.
//! 130: stopped by Ctrl-C, with a checkpoint from which `--resume` goes on.

#![forbid(unsafe_code)]

mod bars;
mod cli;
mod dataset;
mod features;
mod log;
mod loss_svg;
mod model;
mod progress;
mod random;
mod report;
mod samples;
mod screen;
mod synthetic;
mod tensor_file;
mod trace;
mod train;

use std::error::Error;
use std::fs;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use cli::{Args, DeviceChoice, Log};
use dataset::{Asset, Dataset, Plan};
use model::Model;
use report::{ArenaUse, DataSize, ModelSize, Report};
use stepscope::{Arena, Capacity, Checkpoint, Device, DeviceKind, Overflow};
use train::Run;

/// Set by Ctrl-C.
static STOP: AtomicBool = AtomicBool::new(false);
/// The exit code behind Ctrl-C, as shells expect it: 128 and the signal's number.
const INTERRUPTED: u8 = 130;

fn main() -> ExitCode {
    let args = Args::from_command_line();
    log::start(args.log);
    let dataset = match load(&args) {
        Ok(dataset) => dataset,
        Err(error) => {
            log::failed(args.log, &*error);
            return ExitCode::from(2);
        }
    };
    match run(&args, dataset) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::from(INTERRUPTED),
        Err(error) => {
            log::failed(args.log, &*error);
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

/// Samples to weights and a report; false when it was stopped before its end.
fn run(args: &Args, dataset: Dataset) -> Result<bool, Box<dyn Error>> {
    let device = Device::open(match args.device {
        DeviceChoice::Auto => DeviceKind::Auto,
        DeviceChoice::Emulated => DeviceKind::Emulated,
        DeviceChoice::Cuda => DeviceKind::Cuda,
    })?;
    fs::create_dir_all(&args.out).map_err(|error| format!("{}: {error}", args.out.display()))?;
    let (_, layout) = Model::new()?;
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

    let log = args.log;
    ctrlc::set_handler(move || interrupted(log))?;
    let overflow = match args.overflow_mib {
        0 => Overflow::Refuse,
        mebibytes => Overflow::pool(mebibytes << 20),
    };
    let mut arena = Arena::builder(&device).capacity(Capacity::mib(args.arena_mib)).overflow(overflow).build()?;
    let (dataset, checkpoint) = (Arc::new(dataset), args.out.join("model.safetensors"));
    let resumed = args.resume.as_ref().map(Checkpoint::load).transpose()?;
    let mut run = Run::new(args, &dataset, &checkpoint, resumed.as_ref(), &STOP)?;
    let Some(weights_sha256) = run.train(&mut arena, resumed.as_ref())? else {
        println!("stopped; go on with --resume {}", checkpoint.display());
        return Ok(false);
    };

    let report = Report {
        device: device.description().kind.to_string(),
        model,
        data,
        epochs: run.position.epochs,
        batches: run.position.batches,
        arena: ArenaUse::from(arena.report()),
        capture: run.captured,
        weights_sha256,
    };
    report.write(&args.out)?;
    println!("{}\n{}", screen::epoch_table(&report.epochs), report.arena.summary());
    println!("weights {}\nresults in {}", report.weights_sha256, args.out.display());
    Ok(true)
}

/// Ctrl-C: the first asks for an end behind the update that is running, the second ends at once.
fn interrupted(log: Log) {
    if STOP.swap(true, Ordering::Relaxed) {
        std::process::exit(i32::from(INTERRUPTED));
    }
    log::say(log, "interrupted: writing a checkpoint behind this update");
}
