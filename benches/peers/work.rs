//! Code shared by the Rust peers: arguments, the order of measurements, and the printed lines.
//!
//! The lines have the format of step.py and gpt2.py. The harness of our own benches takes the
//! samples, so both sides have the same clock.

#[allow(dead_code, reason = "a peer prints samples, not medians")]
#[path = "../harness/samples.rs"]
mod samples;

use std::cell::RefCell;
use std::process::exit;
use std::thread;
use std::time::{Duration, Instant};

use clap::{Args, Parser, Subcommand, ValueEnum};
use serde_json::{Value, json};

use samples::Samples;

/// Steps and updates before the first sample, in which kernels are compiled and tuned.
const WARM_UP: usize = 20;
/// The time limit of a process. Compiling and tuning kernels at run time takes minutes.
const DEADLINE: Duration = Duration::from_secs(480);

pub(crate) type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

/// Trains a model and prints its times, one JSON value per line
#[derive(Debug, Parser)]
pub(crate) struct Command {
    #[command(subcommand)]
    pub(crate) work: Work,
}

#[derive(Clone, Copy, Debug, Subcommand)]
pub(crate) enum Work {
    /// CrossAsset's training step, as in step.py
    Step(StepArgs),
    /// GPT-2 124M on random tokens, as in gpt2.py; a tiny model on the CPU
    Gpt2(Gpt2Args),
}

#[derive(Args, Clone, Copy, Debug)]
pub(crate) struct StepArgs {
    #[arg(long)]
    pub(crate) device: Kind,
    #[arg(long)]
    pub(crate) batch: usize,
    #[arg(long)]
    samples: usize,
    /// Consecutive steps
    #[arg(long)]
    row: usize,
    #[arg(long, default_value = "f32")]
    pub(crate) precision: Precision,
}

#[derive(Args, Clone, Copy, Debug)]
pub(crate) struct Gpt2Args {
    #[arg(long)]
    pub(crate) device: Kind,
    /// Samples per update
    #[arg(long, default_value_t = 16)]
    pub(crate) batch: usize,
    #[arg(long, default_value = "bf16")]
    pub(crate) precision: Precision,
    #[arg(long, default_value_t = 20)]
    updates: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Kind {
    Cuda,
    Cpu,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Precision {
    F32,
    Tf32,
    Bf16,
}

impl Precision {
    fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::Tf32 => "tf32",
            Self::Bf16 => "bf16",
        }
    }
}

/// The sizes of CrossAsset.
pub(crate) mod crossasset {
    pub(crate) const SCALES: usize = 12;
    pub(crate) const FEATURES: usize = 193;
    pub(crate) const WIDTH: usize = 256;
    pub(crate) const HEADS: usize = 4;
    pub(crate) const HIDDEN: usize = 1024;
    pub(crate) const LAYERS: usize = 2;
    pub(crate) const CLASSES: usize = 3;
    pub(crate) const LEARNING_RATE: f64 = 1e-5;
}

/// The sizes of GPT-2, and its training settings.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Gpt2Sizes {
    pub(crate) vocabulary: usize,
    pub(crate) width: usize,
    pub(crate) heads: usize,
    pub(crate) layers: usize,
    /// Tokens per sample.
    pub(crate) tokens: usize,
}

impl Gpt2Sizes {
    pub(crate) const LEARNING_RATE: f64 = 6e-4;
    pub(crate) const WEIGHT_DECAY: f32 = 0.1;

    /// Returns the sizes of 124M on a GPU, and of a small model on the CPU for tests.
    pub(crate) fn of(device: Kind) -> Self {
        match device {
            Kind::Cuda => Self { vocabulary: 50304, width: 768, heads: 12, layers: 12, tokens: 1024 },
            Kind::Cpu => Self { vocabulary: 128, width: 64, heads: 4, layers: 2, tokens: 32 },
        }
    }
}

/// A model in training, with a batch on the host and its copy on the device.
pub(crate) trait Training {
    /// Returns the number of tensors and of weights.
    fn model(&self) -> [usize; 2];
    /// Copies the batch to the device.
    fn upload(&mut self) -> Result<()>;
    /// Queues a step on the device's batch: forward, backward, clipping, AdamW.
    fn step(&mut self) -> Result<()>;
    /// Returns the loss of the last step.
    fn loss(&self) -> Result<f32>;
    /// Waits for the queued work.
    fn wait(&self) -> Result<()>;
}

/// Starts a thread that ends the process after the deadline, so that benches need no time limit.
pub(crate) fn start_deadline() {
    eprintln!("the deadline is {} s", DEADLINE.as_secs());
    thread::spawn(|| {
        thread::sleep(DEADLINE);
        eprintln!("not done after {} s", DEADLINE.as_secs());
        exit(1);
    });
}

/// Prints the reason why a contender is not measured, as step.py does. Only the first line, because
/// a backtrace may follow.
pub(crate) fn missing(given: &StepArgs, peer: &Peer, reason: &str) {
    let reason = reason.lines().next().unwrap_or_default();
    println!("{}", json!({ "batch": given.batch, "contender": peer.contender, "reason": reason }));
}

/// Prints the measures of step.py, except those that need the library's events.
pub(crate) fn measure_step(given: &StepArgs, peer: &Peer, training: impl Training) -> Result<()> {
    let &StepArgs { batch, samples, row, .. } = given;
    let training = RefCell::new(training);
    let upload = || training.borrow_mut().upload();
    let step = || training.borrow_mut().step();
    let loss = || training.borrow().loss();
    let wait = || training.borrow().wait();
    upload()?;
    step()?;
    let first = loss()?;
    for _ in 1..WARM_UP {
        step()?;
    }
    let [tensors, weights] = training.borrow().model();
    println!(
        "{}",
        json!({
            "peer": peer.name(), "device": given.device.name(), "tensors": tensors, "weights": weights,
            "precision": given.precision.name(), "losses": [first, loss()?],
        })
    );
    let queued = || upload().and_then(|()| step());
    let round_trip = || queued().and_then(|()| loss()).map(drop);
    let report = |measure: &str, nanoseconds: Samples| {
        let contender = peer.contender;
        println!(
            "{}",
            json!({ "batch": batch, "contender": contender, "measure": measure, "nanoseconds": nanoseconds })
        );
    };
    report("round_trip", Samples::collect(samples, 1, round_trip, wait)?);
    report("host", Samples::collect_queueing(samples, queued, wait)?);
    report("host_resident", Samples::collect_queueing(samples, step, wait)?);
    report("queued", Samples::collect(samples, row, queued, wait)?);
    report("resident", Samples::collect(samples, row, step, wait)?);
    Ok(())
}

/// Prints the line of gpt2.py without the allocator's peak, which neither library reports.
pub(crate) fn measure_gpt2(given: &Gpt2Args, peer: &Peer, mut training: impl Training) -> Result<()> {
    let tokens = Gpt2Sizes::of(given.device).tokens;
    let (mut seconds, mut losses) = (Vec::new(), Vec::new());
    for _ in 0..WARM_UP + given.updates {
        training.upload()?;
        training.wait()?;
        let begun = Instant::now();
        training.step()?;
        training.wait()?;
        seconds.push(begun.elapsed().as_secs_f64());
        losses.push(training.loss()?);
    }
    let mut timed = seconds.split_off(WARM_UP);
    let seconds = json!(timed);
    timed.sort_by(f64::total_cmp);
    let median = timed[timed.len() / 2];
    let line: Value = json!({
        "peer": peer.name(), "device": given.device.name(), "ranks": 1, "precision": given.precision.name(),
        "samples": given.batch, "tokens": tokens, "weights": training.model()[1],
        "tokens_per_second": (given.batch * tokens) as f64 / median, "seconds": seconds,
        "losses": [losses[0], losses[losses.len() - 1]],
    });
    println!("{line}");
    Ok(())
}

impl Kind {
    fn name(self) -> &'static str {
        match self {
            Self::Cuda => "CUDA device 0",
            Self::Cpu => "CPU",
        }
    }
}

/// The library that is measured.
pub(crate) struct Peer {
    /// The name of the library in the bench's table.
    pub(crate) contender: &'static str,
    /// The package whose version is printed, and the lock file that contains it.
    pub(crate) package: &'static str,
    pub(crate) lock: &'static str,
}

impl Peer {
    /// Returns the library's name with its version.
    fn name(&self) -> String {
        let entry = format!("name = \"{}\"\nversion = \"", self.package);
        let version =
            self.lock.split_once(&entry).and_then(|(_, rest)| rest.split_once('"')).map(|(version, _)| version);
        format!("{} {}", self.contender, version.unwrap_or("of unknown version"))
    }
}

/// Returns reproducible numbers of mean 0 and variance 1.
pub(crate) fn numbers(count: usize) -> Vec<f32> {
    let width = 12_f32.sqrt();
    random(count).map(|bits| (bits as f32 / u32::MAX as f32 - 0.5) * width).collect()
}

/// Returns reproducible numbers below a bound.
pub(crate) fn below(bound: usize, count: usize) -> Vec<u32> {
    random(count).map(|bits| bits % bound as u32).collect()
}

/// Returns the upper halves of Knuth's linear congruential generator, whose lower bits repeat
/// early.
fn random(count: usize) -> impl Iterator<Item = u32> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    (0..count).map(move |_| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 32) as u32
    })
}
