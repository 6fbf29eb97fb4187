//! What every bench shares: its arguments, its samples, the peer it is compared to, and the file of a run.
//!
//! Invariant: a figure in a table comes from samples of this run, and all of them are in the run's file. What was not
//! measured has a reason in both, never a figure.

mod peer;
mod record;
mod samples;
pub(crate) mod stored;
pub(crate) mod values;

pub(crate) use peer::Peer;
pub(crate) use record::record;
pub(crate) use samples::Samples;

use stepscope::DeviceKind;

/// A bench's own errors are told and end it.
pub(crate) type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

/// The arguments of every bench.
#[derive(Debug, clap::Args)]
pub(crate) struct Common {
    /// Where to run
    #[arg(long, value_name = "auto|emulated|cuda", default_value = "emulated")]
    pub(crate) device: DeviceKind,
    /// What `cargo bench` gives to every bench
    #[arg(long, hide = true)]
    bench: bool,
}
