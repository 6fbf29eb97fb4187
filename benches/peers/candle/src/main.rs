//! CrossAsset and GPT-2 trained by candle, for the benches: `candle step ..` and `candle gpt2 ..`
//! print one JSON value per line.
//!
//! Written in the style of candle's examples: weights in a `VarMap`, layers of `candle_nn`, and its
//! AdamW. It uses the differentiable forms of those layers: `layer_norm_slow`,
//! `RmsNorm::forward_diff` and `softmax`. The fused forms silently stop the backward pass.

mod clip;
mod crossasset;
mod gpt2;
mod training;
#[path = "../../work.rs"]
mod work;

use candle_core::{DType, Device};
use clap::Parser;

use training::Trained;
use work::{Command, Gpt2Sizes, Kind, Peer, Precision, Result, Work};

const PEER: Peer = Peer { contender: "candle", package: "candle-core", lock: include_str!("../Cargo.lock") };

fn main() -> Result<()> {
    let Command { work } = Command::parse();
    work::start_deadline();
    match work {
        Work::Step(given) => {
            let measured = open(given.device, given.precision).and_then(|(device, dtype)| {
                let training = Trained::crossasset(&device, dtype, given.batch)?;
                work::measure_step(&given, &PEER, training)
            });
            if let Err(error) = measured {
                work::missing(&given, &PEER, &error.to_string());
            }
            Ok(())
        }
        Work::Gpt2(given) => {
            let (device, dtype) = open(given.device, given.precision)?;
            let training = Trained::gpt2(&device, dtype, Gpt2Sizes::of(given.device), given.batch)?;
            work::measure_gpt2(&given, &PEER, training)
        }
    }
}

/// Opens the device, and returns the type of all weights and activations. candle casts nothing
/// implicitly.
fn open(kind: Kind, precision: Precision) -> Result<(Device, DType)> {
    candle_core::cuda::set_gemm_reduced_precision_f32(precision == Precision::Tf32);
    let device = match kind {
        Kind::Cuda => Device::new_cuda(0)?,
        Kind::Cpu => Device::Cpu,
    };
    Ok((device, if precision == Precision::Bf16 { DType::BF16 } else { DType::F32 }))
}
