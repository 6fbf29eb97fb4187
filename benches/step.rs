//! Benchmarks a training step of CrossAsset, eager and captured, compared with PyTorch's in the
//! same run.
//!
//! Run `cargo bench --bench step` (the emulator) or `cargo bench --features cuda --bench step --
//! --device cuda`. `--stored bf16` stores activations and a copy of the weights in BF16, compared
//! with PyTorch's autocast. Prints a table of medians and spreads, and writes every sample to
//! `benches/runs/DATE-GPU-step.json`. `benches/README.md` explains how to read them.
//!
//! Invariant: both sides do the same work, on models with the same number of weights, under the
//! same clock.

#![forbid(unsafe_code)]

#[allow(dead_code, reason = "other benches ask their peer case by case")]
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
use stepscope::{DeviceKind, bf16};

/// Times CrossAsset's training step, compared with PyTorch's
#[derive(Debug, Parser)]
struct Args {
    #[command(flatten)]
    common: Common,
    /// Samples per step [default: 1,256,4096 on a GPU, 1,8 on the emulator]
    #[arg(long, value_delimiter = ',', value_name = "N,..", value_parser = clap::value_parser!(u32).range(1..))]
    batches: Option<Vec<u32>>,
    /// Rounding of the operands of matrix multiplies, on both sides
    #[arg(long, value_name = "f32|tf32", default_value = "f32")]
    precision: Precision,
    /// Element type of our activations; BF16 tensors need no rounding before a product
    #[arg(long, value_enum, default_value = "f32", conflicts_with = "precision")]
    stored: StoredAs,
}

/// The measured quantity.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Measure {
    /// From the batch on the host to the loss on the host.
    RoundTrip,
    /// The host's part of a step with its upload: until all is queued, on an idle device.
    Host,
    /// The host's part on inputs that are already on the device.
    HostResident,
    /// Many consecutive steps, each with its upload, and one wait at the end.
    Queued,
    /// Many consecutive steps on inputs that are already on the device.
    Resident,
    /// [`Measure::Host`] with the batch in pinned memory.
    HostPinned,
    /// [`Measure::Queued`] with the batch in pinned memory.
    Pinned,
    /// The time between two device events, on inputs that are already there; only the peer has
    /// events.
    Events,
}

impl Measure {
    /// Returns true if the batch is in pinned memory.
    fn is_pinned(self) -> bool {
        matches!(self, Self::HostPinned | Self::Pinned)
    }
}

/// A line of the run.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(untagged)]
enum Line {
    /// The time of a contender for a step.
    Measured { batch: usize, contender: String, measure: Measure, nanoseconds: Samples },
    /// The reason why a contender was not measured, or only in part.
    Missing { batch: usize, contender: String, reason: String },
    /// A description of the peer and its model.
    Peer { peer: String, device: String, tensors: usize, weights: usize },
}

/// The measurements for a batch size, equal on both sides.
#[derive(Clone, Copy, Debug)]
struct Plan {
    batch: usize,
    samples: usize,
    /// Consecutive steps per sample.
    row: usize,
    precision: Precision,
    stored: StoredAs,
}

impl Plan {
    /// Makes a plan. On the CPU nothing is queued, so two consecutive steps suffice.
    fn of(batch: usize, kind: DeviceKind, precision: Precision, stored: StoredAs) -> Self {
        let row = if kind == DeviceKind::Cuda { 10 } else { 2 };
        Self { batch, samples: if batch < 1024 { 30 } else { 20 }, row, precision, stored }
    }
}

fn main() -> harness::Result<()> {
    let Args { common, batches, precision, stored } = Args::parse();
    let device = common.builder().open()?;
    let kind = device.description().kind;
    let default = if kind == DeviceKind::Cuda { vec![1, 256, 4096] } else { vec![1, 8] };
    let plan = |batch| Plan::of(batch as usize, kind, precision, stored);
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

/// Returns the peer's lines: from the GPU, or from the CPU for the emulator.
fn pytorch(kind: DeviceKind, Plan { batch, samples, row, precision, stored }: Plan) -> harness::Result<Vec<Line>> {
    // The peer's autocast stores BF16 too.
    let precision = if stored == StoredAs::Bf16 { stored.to_string() } else { precision.to_string() };
    let device = if kind == DeviceKind::Cuda { "cuda" } else { "cpu" };
    let arguments =
        format!("--device {device} --batch {batch} --samples {samples} --row {row} --precision {precision}");
    let arguments: Vec<String> = arguments.split(' ').map(str::to_owned).collect();
    let (mut lines, failed) = Peer::start("step.py", &arguments).rest();
    for line in &lines {
        if let Line::Peer { tensors, weights, .. } = line {
            ours::check_model(*tensors, *weights)?;
        }
    }
    lines.extend(failed.map(|reason| Line::Missing { batch, contender: "PyTorch".into(), reason }));
    Ok(lines)
}
