//! Trains CrossAsset on one-minute bars, from bars through features, kernels, gradients and AdamW
//! to a report.
//!
//! ```text
//! cargo run --release --example crossasset  # a synthetic market, on this CPU
//! cargo run --release --example crossasset -- --bars BTCUSD.csv --epochs 2  # real bars
//! cargo run --release --features cuda --example crossasset -- --device cuda  # on the GPU
//! ```
//! | exit code | meaning |
//! |---|---|
//! | 0 | done |
//! | 1 | the device or a file failed |
//! | 2 | the command line or the bars are wrong, or the folder has another run's checkpoint; nothing was written |
//! | 130 | stopped by Ctrl-C, SIGTERM or SIGHUP |
//!
//! After a stop, `--resume` continues from the checkpoint, which exists once the first update was
//! made. A full standard output counts as a failed file, reported once everything else is done. A
//! closed one is not an error.

#![forbid(unsafe_code)]
#![cfg_attr(not(test), warn(clippy::disallowed_methods))]

mod bars;
mod cli;
mod dataset;
mod features;
mod model;
mod random;
mod report;
mod samples;
mod sizes;
mod synthetic;
mod tensor_file;
mod trace;
mod train;

use std::error::Error;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use cli::{Args, DeviceChoice};
use dataset::{Asset, Dataset, Plan};
use model::Model;
use report::{DataSize, Report};
use stepscope::memory::Overflow;
use stepscope::{Arena, Capacity, Checkpoint, DeviceKind};
use stepscope_cli::program::exit::{self, INTERRUPTED};
use stepscope_cli::program::log;
use stepscope_cli::program::ranks::{self, Rank};
use stepscope_cli::program::results::{CHECKPOINT, Claim};
use stepscope_cli::program::screen::Screen;
use stepscope_cli::program::signals;
use stepscope_cli::program::usage::{ArenaUse, ModelSize};
use train::Run;

fn main() -> ExitCode {
    let args = Args::from_command_line();
    log::start(args.log);
    let mut screen = Screen::default();
    let stop = match signals::listen(args.log) {
        Ok(stop) => stop,
        Err(error) => {
            log::failed(args.log, &*Box::<dyn Error>::from(format!("cannot install signal handlers: {error}")));
            return ExitCode::FAILURE;
        }
    };
    let dataset = match load(&args, &mut screen) {
        Ok(dataset) => dataset,
        Err(error) => {
            log::failed(args.log, &*error);
            return ExitCode::from(2);
        }
    };
    let ended = run(&args, dataset, &stop, &mut screen);
    let printed = screen.end().map_err(Into::into);
    let stopped = matches!(ended, Ok(false));
    match ended.and(printed) {
        Ok(()) if stopped => ExitCode::from(INTERRUPTED),
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            log::failed(args.log, &*error);
            ExitCode::from(exit::code(&*error))
        }
    }
}

/// Reads the bars and makes the samples.
fn load(args: &Args, screen: &mut Screen) -> Result<Dataset, Box<dyn Error>> {
    let assets = if args.bars.is_empty() {
        let (bars, seed) = (synthetic::BARS, args.seed);
        screen.say(format_args!("no --bars given: training on a synthetic market of {bars} bars, seed {seed}"));
        vec![Asset { name: "synthetic market".into(), bars: synthetic::market(args.seed) }]
    } else {
        let read = |path: &std::path::PathBuf| Ok(Asset { name: path.clone(), bars: bars::read_bars(path)? });
        args.bars.iter().map(read).collect::<Result<_, bars::BarsError>>()?
    };
    let plan = Plan { horizon: args.horizon, folds: args.folds, limit: args.sample_limit() };
    let dataset = Dataset::new(&assets, plan)?;
    if args.ranks.ranks()?[0].leads() {
        claim(args).check()?;
    }
    Ok(dataset)
}

/// Returns the run's claim to its folder.
fn claim(args: &Args) -> Claim<'_> {
    let reads = args.bars.iter().map(|path| ("--bars", &**path)).collect();
    Claim { out: &args.out, resume: args.resume.as_deref(), overwrite: args.overwrite, reads }
}

/// Trains on the samples and writes a report, on each rank of this process. Returns false if it was
/// stopped early.
fn run(args: &Args, dataset: Dataset, stop: &AtomicBool, screen: &mut Screen) -> Result<bool, Box<dyn Error>> {
    let ranks = args.ranks.ranks()?;
    let _results = if ranks[0].leads() {
        Some(claim(args).take().map_err(|error| -> Box<dyn Error> { error })?)
    } else {
        *screen = Screen::quiet();
        None
    };
    let dataset = Arc::new(dataset);
    let rank = |rank: &Rank, screen: &mut Screen| run_rank(args, &dataset, rank, stop, screen);
    let quiet = |other: &Rank| rank(other, &mut Screen::quiet()).map(drop).map_err(|error| error.to_string());
    ranks::on_each(ranks, |first| rank(first, screen), quiet)
}

/// Runs one rank. Returns false if it was stopped early.
fn run_rank(
    args: &Args,
    dataset: &Arc<Dataset>,
    rank: &Rank,
    stop: &AtomicBool,
    screen: &mut Screen,
) -> Result<bool, Box<dyn Error>> {
    let kind = match args.device {
        DeviceChoice::Auto => DeviceKind::Auto,
        DeviceChoice::Emulated => DeviceKind::Emulated,
        DeviceChoice::Cuda => DeviceKind::Cuda,
    };
    let device = rank.open(kind, None)?;
    let mut settings = train::settings(args, dataset, rank.shards());
    settings.push(("checkpoint-every", format!("{:?}", args.checkpoint_every)));
    settings.push(("resumes", args.resume.is_some().to_string()));
    let group = rank.join(&device, &settings)?;
    let (_, spec) = Model::<f32>::new()?;
    let model = ModelSize { tensors: spec.entries().len(), weights: spec.weights() };
    let data = DataSize { bars: dataset.bars(), samples: dataset.samples().len() };
    screen.say(format_args!(
        "{} tensors, {} weights; {} samples of {} bars; {} folds of {} epochs; on the {}",
        model.tensors,
        model.weights,
        data.samples,
        data.bars,
        args.folds,
        args.epochs,
        device.description().name
    ));

    let overflow = match args.overflow_mib {
        0 => Overflow::Refuse,
        mebibytes => Overflow::pool(mebibytes << 20),
    };
    let mut arena = Arena::builder(&device).capacity(Capacity::mib(args.arena_mib)).overflow(overflow);
    if let Some(floor) = args.memory_floor_mib {
        arena = arena.memory_floor((floor as u64) << 20);
    }
    let mut arena = arena.build()?;
    let checkpoint = args.out.join(CHECKPOINT);
    let resumed = args.resume.as_ref().map(Checkpoint::load).transpose()?;
    let mut run = Run::new(args, dataset, rank, group.as_ref(), &checkpoint, resumed.as_ref(), stop)?;
    let Some(weights_sha256) = run.train(&mut arena, resumed)? else {
        screen.say(format_args!("stopped; continue with --resume {}", checkpoint.display()));
        return Ok(false);
    };
    signals::training_has_ended();
    if !rank.leads() {
        return Ok(true);
    }

    let report = Report {
        device: device.description().kind.to_string(),
        ptx: device.description().ptx.as_ref().map(ToString::to_string),
        model,
        data,
        epochs: run.position.epochs,
        batches: run.position.batches,
        arena: ArenaUse::from(arena.report()),
        memory: run.memory_use,
        capture: run.captured,
        weights_sha256,
    };
    report.write(&args.out)?;
    screen.say(format_args!("{}\n{}", report::epoch_table(&report.epochs), report.arena.summary()));
    screen.say(format_args!("weights {}\nresults in {}", report.weights_sha256, args.out.display()));
    Ok(true)
}
