//! CrossAsset and GPT-2 trained by burn, for the benches: `burn step ..` and `burn gpt2 ..` print
//! one JSON value per line.
//!
//! Written in the style of the Burn Book: modules, a custom training loop, AdamW with its clipping,
//! and the CUDA backend with fusion and autotune.

mod crossasset;
mod gpt2;
mod training;
#[path = "../../work.rs"]
mod work;

use burn::backend::{Autodiff, Cuda, Flex};
use burn::tensor::backend::AutodiffBackend;
use burn::tensor::bf16;
use clap::Parser;

use crossasset::CrossAsset;
use gpt2::Gpt2;
use training::Trained;
use work::{Command, Kind, Peer, Precision, Result, Work};

const PEER: Peer = Peer { contender: "burn", package: "burn", lock: include_str!("../Cargo.lock") };
/// Autotune compares products in TF32 with those in f32, and keeps the fastest.
const NO_IEEE: &str = "burn multiplies f32 in TF32 where that is faster, and cannot be configured otherwise";

fn main() -> Result<()> {
    let Command { work } = Command::parse();
    work::start_deadline();
    let (device, precision) = match work {
        Work::Step(given) => (given.device, given.precision),
        Work::Gpt2(given) => (given.device, given.precision),
    };
    match (device, precision) {
        (Kind::Cuda, Precision::Tf32) => train::<Autodiff<Cuda>>(work),
        (Kind::Cuda, Precision::Bf16) => train::<Autodiff<Cuda<bf16>>>(work),
        (Kind::Cuda, Precision::F32) => refuse(work, NO_IEEE),
        (Kind::Cpu, Precision::F32) => train::<Autodiff<Flex>>(work),
        (Kind::Cpu, _) => refuse(work, "the CPU supports only f32"),
    }
}

fn train<B: AutodiffBackend>(work: Work) -> Result<()> {
    let device = B::Device::default();
    match work {
        Work::Step(given) => {
            work::measure_step(&given, &PEER, Trained::<B, CrossAsset<B>>::crossasset(&device, given.batch))
        }
        Work::Gpt2(given) => {
            let sizes = work::Gpt2Sizes::of(given.device);
            work::measure_gpt2(&given, &PEER, Trained::<B, Gpt2<B>>::gpt2(&device, sizes, given.batch))
        }
    }
}

/// Prints a line for the table of steps, or returns an error for GPT-2, which has only one line.
fn refuse(work: Work, reason: &str) -> Result<()> {
    match work {
        Work::Step(given) => {
            work::missing(&given, &PEER, reason);
            Ok(())
        }
        Work::Gpt2(_) => Err(reason.into()),
    }
}
