//! Code shared by all benches: arguments, samples, the peer, and the file of a run.
//!
//! Invariant: every figure in a table comes from samples of this run, and the run's file has all
//! samples. Anything not measured has a reason in both, never a figure.

mod peer;
mod record;
mod samples;
pub(crate) mod stored;
pub(crate) mod values;

pub(crate) use peer::Peer;
pub(crate) use record::record;
pub(crate) use samples::Samples;

use stepscope::device::{DeviceBuilder, MatrixInstruction};
use stepscope::{Device, DeviceKind};

/// The result type of the benches, whose errors are printed and end them.
pub(crate) type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

/// The arguments of every bench.
#[derive(Debug, clap::Args)]
pub(crate) struct Common {
    /// Device to run on
    #[arg(long, value_name = "auto|emulated|cuda", default_value = "emulated")]
    pub(crate) device: DeviceKind,
    /// Instruction of matrix multiplies and attention on tensor cores [default: the fastest that
    /// the GPU has]
    #[arg(long, value_name = "mma-sync|wgmma")]
    pub(crate) matrix_instruction: Option<MatrixInstruction>,
    /// The flag that `cargo bench` passes to every bench
    #[arg(long, hide = true)]
    bench: bool,
}

impl Common {
    /// Returns a builder of the device.
    pub(crate) fn builder(&self) -> DeviceBuilder {
        let builder = Device::builder(self.device);
        self.matrix_instruction.into_iter().fold(builder, DeviceBuilder::matrix_instruction)
    }
}
