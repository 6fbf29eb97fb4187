//! What a training step of CrossAsset takes: ours, eager and captured, beside PyTorch's in the same run.
//!
//! `cargo bench --bench step` (the emulator), `cargo bench --features cuda --bench step -- --device cuda`; `--stored bf16` keeps activations,
//! and a copy of the weights, in BF16, beside PyTorch's autocast. Prints a table of medians and spreads and writes every sample to
//! `benches/runs/DATE-GPU-step.json`; `benches/README.md` tells how to read them. Invariant: both sides do the same work, on a model with the
//! same number of weights, under the same clock.

#![forbid(unsafe_code)]

mod harness;

#[path = "../examples/crossasset/model.rs"]
#[allow(dead_code, reason = "a bench writes no report")]
mod model;
#[path = "step/ours.rs"]
mod ours;
#[path = "../examples/crossasset/sizes.rs"]
mod sizes;
#[path = "step/table.rs"]
mod table;

use clap::Parser;
use harness::stored::{StoredAs, group};
use harness::{Common, Peer, Samples, record};
use ours::Ours;
use serde::{Deserialize, Serialize};
use stepscope::ops::Precision;
use stepscope::{Device, DeviceKind, bf16};

/// Times CrossAsset's training step, ours beside PyTorch's.
#[derive(Debug, Parser)]
struct Args {
    #[command(flatten)]
    common: Common,
    /// Samples in a step [default: 1,256,4096 on a GPU, 1,8 on the emulator]
    #[arg(long, value_delimiter = ',', value_name = "N,..", value_parser = clap::value_parser!(u32).range(1..))]
    batches: Option<Vec<u32>>,
    /// How matrix multiplies round their factors, on both sides
    #[arg(long, value_name = "ieee|tf32|bf16", default_value = "ieee")]
    precision: Precision,
    /// What our activations are in memory; of BF16 nothing is rounded before a product
    #[arg(long, value_enum, default_value = "f32", conflicts_with = "precision")]
    stored: StoredAs,
}

/// What is timed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Measure {
    /// From the batch on the host to the loss on the host.
    RoundTrip,
    /// The host's part of a step with its upload: until all is queued, while the device is idle.
    Host,
    /// The same on inputs that are on the device already.
    HostResident,
    /// Many steps, each with its upload, and one wait at the end.
    Queued,
    /// The same on inputs that are on the device already.
    Resident,
    /// [`Measure::Host`] with the batch in page-locked memory.
    HostPinned,
    /// [`Measure::Queued`] with the batch in page-locked memory.
    Pinned,
    /// Between two events of the device, on inputs that are there already; only the peer has events.
    Events,
}

impl Measure {
    /// Whether the batch is in page-locked memory.
    fn is_pinned(self) -> bool {
        matches!(self, Self::HostPinned | Self::Pinned)
    }
}

/// A line of the run.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(untagged)]
enum Line {
    /// What a contender needs for a step.
    Measured { batch: usize, contender: String, measure: Measure, nanoseconds: Samples },
    /// Why a contender was not measured, or not further.
    Missing { batch: usize, contender: String, reason: String },
    /// What the peer is and trains.
    Peer { peer: String, device: String, tensors: usize, weights: usize },
}

/// How much is measured for a batch size, the same on both sides.
#[derive(Clone, Copy, Debug)]
struct Plan {
    batch: usize,
    samples: usize,
    /// Steps in a row to a sample.
    row: usize,
    precision: Precision,
}

impl Plan {
    /// On the CPU nothing is queued, so two steps make a row.
    fn of(batch: usize, kind: DeviceKind, precision: Precision) -> Self {
        let row = if kind == DeviceKind::Cuda { 10 } else { 2 };
        Self { batch, samples: if batch < 1024 { 30 } else { 20 }, row, precision }
    }
}

fn main() -> harness::Result<()> {
    let Args { common, batches, precision, stored } = Args::parse();
    // The peer's autocast keeps BF16 too.
    let precision = if stored == StoredAs::Bf16 { Precision::Bf16 } else { precision };
    let device = Device::open(common.device)?;
    let kind = device.description().kind;
    let default = if kind == DeviceKind::Cuda { vec![1, 256, 4096] } else { vec![1, 8] };
    let plan = |batch| Plan::of(batch as usize, kind, precision);
    let plans: Vec<Plan> = batches.unwrap_or(default).into_iter().map(plan).collect();
    let mut lines = Vec::new();
    for &plan in &plans {
        let ours = Ours::new(&device, plan)?;
        lines.extend(match stored {
            StoredAs::Bf16 => ours.measure::<bf16>()?,
            StoredAs::F32 => ours.measure::<f32>()?,
        });
        lines.extend(pytorch(kind, plan)?);
    }
    let how = format!("activations in {stored}, multiplies in {precision}");
    table::print(&device, &how, &plans, &lines);
    println!("samples in {}", record(&group("step", precision, stored), &device, &lines)?);
    Ok(())
}

/// The peer's lines: on the GPU beside ours, or on the CPU beside the emulator.
fn pytorch(kind: DeviceKind, Plan { batch, samples, row, precision }: Plan) -> harness::Result<Vec<Line>> {
    let device = if kind == DeviceKind::Cuda { "cuda" } else { "cpu" };
    let arguments =
        format!("--device {device} --batch {batch} --samples {samples} --row {row} --precision {precision}");
    let arguments: Vec<String> = arguments.split(' ').map(str::to_owned).collect();
    let Peer { mut lines, failed } = Peer::run("step.py", &arguments);
    for line in &lines {
        if let Line::Peer { tensors, weights, .. } = line {
            ours::check_model(*tensors, *weights)?;
        }
    }
    lines.extend(failed.map(|reason| Line::Missing { batch, contender: "PyTorch".into(), reason }));
    Ok(lines)
}
