//! Benchmarks the time from process start to the first step's loss, compared with PyTorch's. Each
//! sample is its own process.
//!
//! Run `cargo bench --features cuda --bench startup -- --device cuda`. The step is that of
//! `benches/step.rs` at batch 256, eager. In a cold start, the driver's cache of compiled kernels
//! (`CUDA_CACHE_PATH`) is empty, so the driver compiles them first. In a warm start, the cache has
//! them.
//!
//! Invariant: a sample covers the whole life of a process, by the clock of the parent process.

#![forbid(unsafe_code)]

#[allow(dead_code, unused_imports, reason = "processes are timed, not pieces of work")]
mod harness;

#[path = "../examples/crossasset/model.rs"]
#[allow(dead_code, reason = "a bench writes no report")]
mod model;
#[path = "../examples/crossasset/sizes.rs"]
mod sizes;

use clap::Parser;
use harness::values::uniform;
use harness::{Common, Samples, record};
use serde::Serialize;
use std::path::Path;
use std::process::Command;
use std::time::Instant;
use stepscope::{AdamW, Arena, Capacity, Gradients, Optimizer, Parameters, Tape};

const BATCH: usize = 256;
const COLD: usize = 3;
const WARM: usize = 10;

/// Times the first step of a process, compared with PyTorch's
#[derive(Debug, Parser)]
struct Args {
    #[command(flatten)]
    common: Common,
    /// Train one step, print its parts and exit
    #[arg(long, hide = true)]
    once: bool,
}

/// Nanoseconds of whole processes, and of the parts that they report.
#[derive(Debug, Serialize)]
struct Line {
    contender: &'static str,
    cache: &'static str,
    process: Samples,
    parts: Vec<(String, Samples)>,
}

fn main() -> harness::Result<()> {
    let Args { common, once } = Args::parse();
    if once {
        return first_step(&common);
    }
    let place = common.device.to_string();
    let ours = || {
        let mut command = Command::new(std::env::current_exe()?);
        command.args(["--once", "--device", &place]);
        command.args(common.matrix_instruction.map(|instruction| format!("--matrix-instruction={instruction}")));
        Ok(command)
    };
    let peer = || {
        let mut command = Command::new("python3");
        command.args(["benches/peers/startup.py", if place == "cuda" { "cuda" } else { "cpu" }]);
        Ok(command)
    };
    let mut lines = Vec::new();
    lines.extend(contender("stepscope", &ours)?);
    match contender("PyTorch", &peer) {
        Ok(of_peer) => lines.extend(of_peer),
        Err(error) => println!("PyTorch: not measured here ({error})"),
    }
    // Opened only for its name, after all timing.
    let device = common.builder().open()?;
    println!("{:<40}{:>10}{:>10}{:>10}", device.description().name, "ms", "p10", "p90");
    for Line { contender, cache, process, parts } in &lines {
        print(&format!("{contender}, {cache}"), process);
        parts.iter().for_each(|(part, samples)| print(&format!("  {part}"), samples));
    }
    println!("samples in {}", record("startup", &device, &lines)?);
    Ok(())
}

fn print(what: &str, samples: &Samples) {
    let [median, low, high] = [0.5, 0.1, 0.9].map(|share| samples.quantile(share) / 1e6);
    println!("{what:<40}{median:>10.1}{low:>10.1}{high:>10.1}");
}

/// Returns a contender's cold and warm lines.
fn contender(name: &'static str, command: &dyn Fn() -> harness::Result<Command>) -> harness::Result<[Line; 2]> {
    let caches = (0..COLD).map(|_| tempfile::tempdir()).collect::<std::io::Result<Vec<_>>>()?;
    let mut cold = Line { contender: name, cache: "cold", process: Samples(Vec::new()), parts: Vec::new() };
    for cache in &caches {
        cold.add(command()?, cache.path())?;
    }
    let mut warm = Line { cache: "warm", process: Samples(Vec::new()), parts: Vec::new(), ..cold };
    // The last cold start has filled its cache.
    for _ in 0..WARM {
        warm.add(command()?, caches[COLD - 1].path())?;
    }
    Ok([cold, warm])
}

impl Line {
    /// Adds a sample: the life of a process with this kernel cache.
    fn add(&mut self, mut command: Command, cache: &Path) -> harness::Result<()> {
        let start = Instant::now();
        let output = command.env("CUDA_CACHE_PATH", cache).output()?;
        self.process.0.push(start.elapsed().as_nanos() as f64);
        if !output.status.success() {
            return Err(format!("{command:?}: {}: {}", output.status, String::from_utf8_lossy(&output.stderr)).into());
        }
        let parts: Vec<(String, f64)> = serde_json::from_slice(&output.stdout)?;
        for (part, nanoseconds) in parts {
            match self.parts.iter_mut().find(|(known, _)| *known == part) {
                Some((_, samples)) => samples.0.push(nanoseconds),
                None => self.parts.push((part, Samples(vec![nanoseconds]))),
            }
        }
        Ok(())
    }
}

/// Runs one step, and prints the times of its parts.
fn first_step(common: &Common) -> harness::Result<()> {
    let start = Instant::now();
    let device = common.builder().open()?;
    let opened = start.elapsed();
    let (model, layout) = model::Model::<f32>::new()?;
    let mut parameters = Parameters::new(&device, &layout, 7)?;
    let mut gradients = Gradients::zeros(&parameters)?;
    let mut optimizer = Optimizer::new(&parameters, AdamW { clip: Some(1.0), ..AdamW::default() })?;
    let mut arena = Arena::builder(&device).capacity(Capacity::mib(512)).build()?;
    let made = start.elapsed();
    let x = uniform(BATCH * sizes::SCALES.len() * sizes::FEATURES, 1);
    let labels: Vec<u32> = (0..BATCH).map(|at| (at % sizes::CLASSES) as u32).collect();
    let ticket = optimizer.advance()?;
    let loss = arena.step(|step| {
        let x = step.upload(&x, [BATCH, sizes::SCALES.len(), sizes::FEATURES])?.save();
        let labels = step.upload_indices(&labels, [BATCH])?;
        let tape = Tape::new(step, &parameters);
        let loss = tape.cross_entropy(&model.logits(&tape, &tape.input(x))?, labels)?;
        tape.backward_overwrite(&loss, &mut gradients)?;
        let loss = *loss.value();
        optimizer.apply(ticket, step, &mut parameters, &gradients)?;
        step.read_scalar(&loss)
    })?;
    let all = start.elapsed();
    assert!(loss.is_finite(), "the first loss is {loss}");
    let parts = [("opening the device", opened), ("weights and arena", made - opened), ("first step", all - made)];
    let parts: Vec<(&str, f64)> = parts.iter().map(|(part, took)| (*part, took.as_nanos() as f64)).collect();
    println!("{}", serde_json::to_string(&parts)?);
    Ok(())
}
