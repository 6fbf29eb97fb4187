//! What the kernels that memory bounds take: ours beside PyTorch's in the same run, and beside the rate of a copy.
//!
//! `cargo bench --bench kernels` (the emulator), `cargo bench --features cuda --bench kernels -- --device cuda`. Prints a
//! table a size and writes every sample to `benches/runs/DATE-GPU-kernels.json`; `benches/README.md` tells how to read them.
//! Invariant: both sides make the same calls on as many bytes, queued the same way under the same clock.

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
use stepscope::{Device, DeviceKind};

/// Times the kernels that memory bounds, ours beside PyTorch's.
#[derive(Debug, Parser)]
struct Args {
    #[command(flatten)]
    common: Common,
    /// Sizes, as powers of two: 12 for 2^12 elements [default: 12,16,20,24,28 on a GPU, 12,16 on the emulator]
    #[arg(long, value_delimiter = ',', value_name = "N,..", value_parser = clap::value_parser!(u32).range(10..=32))]
    sizes: Option<Vec<u32>>,
}

/// A line of the run.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(untagged)]
enum Line {
    /// What a contender needs for one call.
    Measured { elements: usize, kernel: String, contender: String, nanoseconds: Samples },
    /// Why a contender was not measured.
    Missing { elements: usize, kernel: String, contender: String, reason: String },
    /// What the peer is.
    Peer { peer: String, device: String },
}

/// How much is measured for a size, the same on both sides.
#[derive(Clone, Debug, Serialize)]
struct Plan {
    elements: usize,
    /// What is called, by the names of [`CASES`].
    kernels: Vec<&'static str>,
    /// Tensors into which PyTorch's AdamW finds its weights divided. Ours always has one flat region.
    tensors: usize,
    /// Sets of inputs and outputs, used in turn.
    sets: usize,
    /// How often a graph goes through all sets.
    rounds: usize,
    /// Graphs in a row to a sample.
    replays: usize,
    samples: usize,
}

impl Plan {
    /// One set fits no cache from 2^26 elements on. Of less there are several, up to 64: below 2^20 elements they fit the
    /// cache together, on both sides, as the tensors of a small step do.
    fn of(elements: usize, kind: DeviceKind) -> Self {
        let kernels = CASES.iter().map(|case| case.name).collect::<Vec<_>>();
        if kind != DeviceKind::Cuda {
            return Self { elements, kernels, tensors: 1, sets: 2, rounds: 1, replays: 2, samples: 20 };
        }
        let sets = ((1 << 26) / elements).clamp(1, 64);
        let calls = ((1 << 28) / elements).clamp(2, 256);
        Self { elements, kernels, tensors: 1, sets, rounds: calls.div_ceil(sets), replays: 4, samples: 30 }
    }

    /// AdamW over 2^26 weights, and over 50 tensors of 256 x 1024; each beside a copy, to compare with.
    fn optimizers(kind: DeviceKind) -> [Self; 2] {
        let plan = |(elements, tensors)| Self { kernels: vec!["copy", "adamw"], tensors, ..Self::of(elements, kind) };
        [(1 << 26, 1), (50 * 256 * 1024, 50)].map(plan)
    }

    fn cases(&self) -> impl Iterator<Item = &'static Case> {
        CASES.iter().filter(|case| self.kernels.contains(&case.name))
    }

    /// Calls in one graph.
    fn calls(&self) -> usize {
        self.sets * self.rounds
    }
}

fn main() -> harness::Result<()> {
    let Args { common, sizes } = Args::parse();
    let device = Device::open(common.device)?;
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

/// The peer's lines: on the GPU beside ours, or on the CPU beside the emulator.
fn pytorch(kind: DeviceKind, plans: &[Plan]) -> harness::Result<Vec<Line>> {
    let device = if kind == DeviceKind::Cuda { "cuda" } else { "cpu" };
    let arguments = ["--device", device, "--columns", &COLUMNS.to_string(), "--plans", &serde_json::to_string(plans)?];
    let Peer { mut lines, failed } = Peer::run("kernels.py", &arguments.map(str::to_owned));
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
