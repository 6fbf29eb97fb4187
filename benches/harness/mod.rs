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

/// Returns how often a sample repeats work of this many floating-point operations. On the
/// emulator it is once. At the rate of a GPU's fastest instruction a sample takes about 2 ms:
/// then the launch of its graph and the wait for it, some microseconds, count for little.
pub(crate) fn repetitions(device: &Device, operations: f64) -> usize {
    if device.description().kind == DeviceKind::Emulated {
        return 1;
    }
    let seconds = 4e-6 + operations / 600e12;
    ((2e-3 / seconds) as usize).clamp(2, 200)
}
