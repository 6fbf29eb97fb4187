//! Bug A in miniature: an arena that is full, for each of three causes, and the remedy for each.
//!
//! ```text
//! cargo run --release --example overflow                                    # on this CPU
//! cargo run --release --features cuda --example overflow -- --device cuda   # on the GPU
//! ```
//! In the original bug, an arena of 64 GB overflowed at the first sample's tanh output of 48 KB (12
//! tokens x 1024 x f32), and nobody could explain it. Here a step with tensors of that kind
//! overflows in the three possible ways. Each time the arena names the cause: in the error if it
//! refuses, or in a warning if it has a pool.
//!
//! Exit code 0: every cause was named correctly and no run leaked memory. 1: a cause was wrong, or
//! the device failed. 2: the command line is wrong.

#![forbid(unsafe_code)]
#![cfg_attr(not(test), warn(clippy::disallowed_methods))]

use clap::Parser;
use std::fmt::Display;
use std::io::{self, Write};
use std::ops::Range;
use std::process::ExitCode;
use std::sync::{Mutex, PoisonError};
use stepscope::memory::{ArenaBuilder, Growth, Overflow};
use stepscope::parameters::Initializer;
use stepscope::report::Cause;
use stepscope::{
    Arena, Capacity, Device, DeviceKind, EagerStep, Error, Gradients, Parameter, ParameterSpec, Parameters, Tape,
};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

/// Shows why an arena overflows: three causes with their reports, then runs without overflow.
#[derive(Parser)]
#[command(name = "overflow")]
struct Args {
    /// Device to run on
    #[arg(long, value_name = "auto|emulated|cuda", default_value = "auto")]
    device: DeviceKind,
}

const TOKENS: usize = 12;
const FEATURES: usize = 193;
const WIDTH: usize = 1024;
const CLASSES: usize = 3;
/// The samples that each run trains on.
const SAMPLES: usize = 12;
const MIB: usize = 1 << 20;

fn main() -> ExitCode {
    let Args { device } = Args::parse();
    tracing_subscriber::fmt()
        .with_max_level(tracing::Level::WARN)
        .with_ansi(false)
        .without_time()
        .with_target(false)
        .with_writer(|| Warnings)
        .init();
    match run(device) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

/// A step that does not fit its arena, and the cause that the arena must name.
struct Case {
    title: &'static str,
    capacity_bytes: usize,
    work: Work,
    named: fn(Cause) -> bool,
}

/// The forward and backward passes over all samples in one step scope.
#[derive(Clone, Copy)]
enum Work {
    /// One pass per sample.
    SampleBySample,
    /// One pass over all samples.
    AllAtOnce,
}

const CASES: [Case; 3] = [
    Case {
        title: "1. A request larger than the arena: one pass over 12 samples, in 0.5 MiB",
        capacity_bytes: MIB / 2,
        work: Work::AllAtOnce,
        named: |cause| cause == Cause::RequestLargerThanArena,
    },
    Case {
        title: "2. Never reset: a pass for each of 12 samples, all in one step, in 1 MiB",
        capacity_bytes: MIB,
        work: Work::SampleBySample,
        named: |cause| matches!(cause, Cause::NeverReset { passes: 1.. }),
    },
    Case {
        title: "3. A working set larger than the arena: one pass over 12 samples, in 1 MiB",
        capacity_bytes: MIB,
        work: Work::AllAtOnce,
        named: |cause| cause == Cause::WorkingSetLargerThanArena,
    },
];

fn run(kind: DeviceKind) -> Result<()> {
    if std::env::var_os("STEPSCOPE_ARENA_GB").is_some() {
        return Err(
            "STEPSCOPE_ARENA_GB is set, and overrides every capacity that this example chooses: unset it".into()
        );
    }
    let device = Device::open(kind)?;
    let mut model = Model::new(&device)?;
    println!("On the {}.", device.description().name);
    for case in &CASES {
        refused_then_pooled(&device, &mut model, case)?;
    }

    heading("4. Run 2 with a step for each pass: the same 1 MiB");
    let mut arena = Arena::builder(&device).capacity(Capacity::Bytes(MIB)).build()?;
    for sample in 0..SAMPLES {
        arena.step(|step| model.pass(step, sample..sample + 1))?;
    }
    ended(&arena, 0)?;

    heading("5. Run 3 in an arena of the size that `Arena::measure` returns");
    let wanted = model.roomy_step(&device, Work::AllAtOnce)?;
    let measured = arena.measure(|step| model.work(step, Work::AllAtOnce))?;
    let mut arena = Arena::builder(&device).capacity(Capacity::Measured(measured)).build()?;
    check(model.step(&mut arena, Work::AllAtOnce)? == wanted, "the gradients differ")?;
    ended(&arena, 0)?;

    heading("6. Run 3 in an arena of 1 MiB that grows when a step ends");
    let mut arena = pooled(&device, MIB).growth(Growth::AtBoundary { max_bytes: 64 * MIB }).build()?;
    let mut overflows = 0;
    for number in ["first", "second"] {
        check(model.step(&mut arena, Work::AllAtOnce)? == wanted, "the gradients differ")?;
        let report = arena.report();
        println!("  {number} step: {} overflows", report.overflow.allocations - overflows);
        overflows = report.overflow.allocations;
    }
    check(warned()?.contains(&Cause::WorkingSetLargerThanArena.to_string()), "the warning names another cause")?;
    check(overflows > 0, "the first step did not overflow")?;
    check(arena.report().growths == 1, "the arena did not grow just once")?;
    ended(&arena, overflows)?;
    println!("\nEach cause was named correctly.");
    Ok(())
}

/// Runs a case in an arena that refuses, and then in one with an overflow pool.
fn refused_then_pooled(device: &Device, model: &mut Model, case: &Case) -> Result<()> {
    let Case { title, capacity_bytes, work, named } = *case;
    heading(title);
    let mut arena = Arena::builder(device).capacity(Capacity::Bytes(capacity_bytes)).build()?;
    let cause = match model.step(&mut arena, work) {
        Err(error @ Error::ArenaFull { cause, .. }) => {
            indented(error);
            check(named(cause), "the arena named another cause")?;
            cause
        }
        Err(error) => return Err(error.into()),
        Ok(_) => return Err("the step fitted its arena".into()),
    };
    println!("  -- with a pool:");
    let wanted = model.roomy_step(device, work)?;
    let mut arena = pooled(device, capacity_bytes).build()?;
    check(model.step(&mut arena, work)? == wanted, "the gradients differ")?;
    let warning = warned()?;
    indented(&warning);
    check(warning.contains(&cause.to_string()), "the warning names another cause than the error")?;
    let overflows = arena.report().overflow.allocations;
    check(overflows > 0, "the step fitted its arena")?;
    ended(&arena, overflows)
}

/// Returns the builder of an arena with a pool.
fn pooled(device: &Device, capacity_bytes: usize) -> ArenaBuilder {
    Arena::builder(device).capacity(Capacity::Bytes(capacity_bytes)).overflow(Overflow::pool(16 * MIB))
}

/// Prints an arena's totals, and checks that it overflowed this often and leaked nothing.
fn ended(arena: &Arena, overflows: u64) -> Result<()> {
    let report = arena.report();
    let text = report.to_string();
    // The error already printed the whole report; this prints only the totals.
    let totals = text.lines().filter(|line| line.starts_with("arena:") || line.starts_with("  overflow:"));
    totals.for_each(indented);
    check(report.overflow.allocations == overflows, "the arena overflowed again")?;
    check(report.overflow.live_blocks == 0, "blocks of the pool were not freed")?;
    check(warnings().is_empty(), "there was an unexpected warning")
}

fn heading(title: &str) {
    println!("\n{title}");
}

fn indented(text: impl Display) {
    for line in text.to_string().lines() {
        println!("  {line}");
    }
}

fn check(holds: bool, otherwise: &str) -> Result<()> {
    if holds { Ok(()) } else { Err(otherwise.into()) }
}

/// A model over tokens, and its training samples: `h = tanh(x W1 + b1)`, `logits = mean_tokens(h)
/// W2 + b2`, with `x: [samples, 12, 193]` and `h: [samples, 12, 1024]`.
struct Model {
    w1: Parameter,
    b1: Parameter,
    w2: Parameter,
    b2: Parameter,
    weights: Parameters,
    gradients: Gradients,
    samples: Vec<f32>,
    labels: Vec<u32>,
}

impl Model {
    fn new(device: &Device) -> stepscope::Result<Self> {
        let mut spec = ParameterSpec::builder();
        let w1 = spec.add("w1", [FEATURES, WIDTH], Initializer::fan_in(FEATURES));
        let b1 = spec.add("b1", [WIDTH], Initializer::Constant(0.0));
        let w2 = spec.add("w2", [WIDTH, CLASSES], Initializer::fan_in(WIDTH));
        let b2 = spec.add("b2", [CLASSES], Initializer::Constant(0.0));
        let weights = Parameters::new(device, &spec.build()?, 7)?;
        let gradients = Gradients::zeros(&weights)?;
        let samples = (0..SAMPLES * TOKENS * FEATURES).map(|at| (at * 37 % 101) as f32 / 50.0 - 1.0).collect();
        let labels = (0..SAMPLES).map(|at| (at % CLASSES) as u32).collect();
        Ok(Self { w1, b1, w2, b2, weights, gradients, samples, labels })
    }

    /// Runs forward and backward over some samples.
    fn pass(&mut self, step: &EagerStep<'_>, of: Range<usize>) -> stepscope::Result<()> {
        let Self { w1, b1, w2, b2, ref weights, ref mut gradients, ref samples, ref labels } = *self;
        let batch = of.len();
        let labels = step.upload_indices(&labels[of.clone()], [batch])?;
        let values = &samples[of.start * TOKENS * FEATURES..of.end * TOKENS * FEATURES];
        let tape = Tape::new(step, weights);
        let x = tape.input(step.upload(values, [batch, TOKENS, FEATURES])?);
        let hidden = tape.linear(&x, w1, Some(b1))?;
        let hidden = hidden.tanh()?;
        let logits = tape.linear(&tape.mean_tokens(&hidden)?, w2, Some(b2))?;
        let loss = tape.cross_entropy(&logits, labels)?;
        tape.backward(&loss, gradients)
    }

    /// Runs passes over all samples in one step.
    fn work(&mut self, step: &EagerStep<'_>, work: Work) -> stepscope::Result<()> {
        self.gradients.zero(step)?;
        match work {
            Work::SampleBySample => (0..SAMPLES).try_for_each(|sample| self.pass(step, sample..sample + 1)),
            Work::AllAtOnce => self.pass(step, 0..SAMPLES),
        }
    }

    /// Runs a step in an arena and returns the bits of the gradients.
    fn step(&mut self, arena: &mut Arena, work: Work) -> stepscope::Result<Vec<u32>> {
        arena.step(|step| self.work(step, work))?;
        Ok(self.gradients.read_flat()?.into_iter().map(f32::to_bits).collect())
    }

    /// Runs [`Model::step`] in an arena with more room than any step here needs.
    fn roomy_step(&mut self, device: &Device, work: Work) -> stepscope::Result<Vec<u32>> {
        self.step(&mut Arena::builder(device).capacity(Capacity::mib(64)).build()?, work)
    }
}

/// The buffer that collects warnings until the run that caused them prints them.
static WARNINGS: Mutex<Vec<u8>> = Mutex::new(Vec::new());

struct Warnings;

impl Write for Warnings {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        WARNINGS.lock().unwrap_or_else(PoisonError::into_inner).write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Removes and returns the warnings.
fn warnings() -> String {
    let bytes = std::mem::take(&mut *WARNINGS.lock().unwrap_or_else(PoisonError::into_inner));
    String::from_utf8_lossy(&bytes).trim().to_owned()
}

/// Removes and returns the only warning.
fn warned() -> Result<String> {
    let text = warnings();
    check(text.lines().count() == 1, "there was not exactly one warning")?;
    Ok(text)
}
