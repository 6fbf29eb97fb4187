//! Benchmarks memory-bound kernels, compared with PyTorch's in the same run and with the rate of a
//! copy.
//!
//! Run `cargo bench --bench kernels` (the emulator) or `cargo bench --features cuda --bench kernels
//! -- --device cuda`. Prints a table per size, and writes every sample to
//! `benches/runs/DATE-GPU-kernels.json`. `benches/README.md` explains how to read them.
//!
//! Invariant: both sides make the same calls on the same number of bytes, queued the same way,
//! under the same clock.

#![forbid(unsafe_code)]

#[allow(dead_code, reason = "nothing is timed while it is queued")]
mod harness;

#[path = "kernels/cases.rs"]
mod cases;
#[path = "kernels/ours.rs"]
mod ours;
#[path = "kernels/table.rs"]
mod table;

use cases::{CASES, COLUMNS, Case};
use clap::Parser;
use harness::{Common, Peer, Samples, record};
use serde::{Deserialize, Serialize};
use stepscope::DeviceKind;

/// Times memory-bound kernels, compared with PyTorch's
#[derive(Debug, Parser)]
struct Args {
    #[command(flatten)]
    common: Common,
    /// Sizes, as powers of two: 12 for 2^12 elements [default: 12,16,20,24,28 on a GPU, 12,16 on
    /// the emulator]
    #[arg(long, value_delimiter = ',', value_name = "N,..", value_parser = clap::value_parser!(u32).range(10..=32))]
    sizes: Option<Vec<u32>>,
}

/// A line of the run.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(untagged)]
enum Line {
    /// The time of a contender for one call.
    Measured { elements: usize, kernel: String, contender: String, nanoseconds: Samples },
    /// The reason why a contender was not measured.
    Missing { elements: usize, kernel: String, contender: String, reason: String },
    /// A description of the peer.
    Peer { peer: String, device: String },
}

/// The measurements for a size, equal on both sides.
#[derive(Clone, Debug, Serialize)]
struct Plan {
    elements: usize,
    /// The calls, by the names of [`CASES`].
    kernels: Vec<&'static str>,
    /// The number of tensors that hold the weights of PyTorch's AdamW. Ours always has one flat
    /// region.
    tensors: usize,
    /// Sets of inputs and outputs, used in turn.
    sets: usize,
    /// Passes of a graph over all sets.
    rounds: usize,
    /// Consecutive graph replays per sample.
    replays: usize,
    samples: usize,
}

impl Plan {
    /// From 2^26 elements on, one set exceeds any cache. Smaller sizes use several sets, up to 64.
    /// Below 2^20 elements all sets fit the cache together, on both sides, like the tensors of a
    /// small step.
    fn of(elements: usize, kind: DeviceKind) -> Self {
        let kernels = CASES.iter().map(|case| case.name).collect::<Vec<_>>();
        if kind != DeviceKind::Cuda {
            return Self { elements, kernels, tensors: 1, sets: 2, rounds: 1, replays: 2, samples: 20 };
        }
        let sets = ((1 << 26) / elements).clamp(1, 64);
        let calls = ((1 << 28) / elements).clamp(2, 256);
        Self { elements, kernels, tensors: 1, sets, rounds: calls.div_ceil(sets), replays: 4, samples: 30 }
    }

    /// Returns plans for AdamW over 2^26 weights, and over 50 tensors of 256 x 1024, each with a
    /// copy for comparison.
    fn optimizers(kind: DeviceKind) -> [Self; 2] {
        let plan = |(elements, tensors)| Self { kernels: vec!["copy", "adamw"], tensors, ..Self::of(elements, kind) };
        [(1 << 26, 1), (50 * 256 * 1024, 50)].map(plan)
    }

    fn cases(&self) -> impl Iterator<Item = &'static Case> {
        CASES.iter().filter(|case| self.kernels.contains(&case.name))
    }

    /// Returns the number of calls in one graph.
    fn calls(&self) -> usize {
        self.sets * self.rounds
    }
}

fn main() -> harness::Result<()> {
    let Args { common, sizes } = Args::parse();
    let device = common.builder().open()?;
    let kind = device.description().kind;
    let default = if kind == DeviceKind::Cuda { vec![12, 16, 20, 24, 28] } else { vec![12, 16] };
    let mut plans: Vec<Plan> =
        sizes.unwrap_or(default).into_iter().map(|size| Plan::of(1usize << size, kind)).collect();
    if kind == DeviceKind::Cuda {
        plans.extend(Plan::optimizers(kind));
    }
    let mut lines = Vec::new();
    for plan in &plans {
        lines.extend(ours::measure(&device, plan)?);
    }
    lines.extend(pytorch(kind, &plans)?);
    for plan in &plans {
        table::print(&device, plan, &lines);
    }
    println!("samples in {}", record("kernels", &device, &lines)?);
    Ok(())
}

/// Returns the peer's lines: from the GPU, or from the CPU for the emulator.
fn pytorch(kind: DeviceKind, plans: &[Plan]) -> harness::Result<Vec<Line>> {
    let device = if kind == DeviceKind::Cuda { "cuda" } else { "cpu" };
    let arguments = ["--device", device, "--columns", &COLUMNS.to_string(), "--plans", &serde_json::to_string(plans)?];
    let (mut lines, failed) = Peer::start("kernels.py", &arguments.map(str::to_owned)).rest();
    if let Some(reason) = failed {
        let missing = |plan: &Plan| Line::Missing {
            elements: plan.elements,
            kernel: "the rest".into(),
            contender: "PyTorch".into(),
            reason: reason.clone(),
        };
        lines.extend(plans.iter().map(missing));
    }
    Ok(lines)
}
