//! One error type: what was asked, what was there, what to do.
//!
//! Invariant: a caller's mistake is [`Error::Misuse`] or [`Error::Contract`], found before anything ran; everything
//! else names the call that failed and what the system said.

use cuda_std::emulator::Fault;
use cuda_std::launch::Violation;
use std::path::PathBuf;
use std::time::Duration;

/// The result of anything in stepscope that can fail.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why a call failed.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The caller asked for something that makes no sense.
    #[error("{op}: expected {expected}, got {got}")]
    Misuse {
        /// The operation.
        op: &'static str,
        /// What it needs.
        expected: String,
        /// What it was given.
        got: String,
    },
    /// A launch that breaks its kernel's contract; nothing ran.
    #[error("kernel `{kernel}`: {violation}")]
    Contract {
        /// The kernel.
        kernel: &'static str,
        /// The argument and the rule.
        violation: Violation,
    },
    /// The arena cannot hold one more tensor in this step.
    #[error(
        "arena: a tensor of {requested_bytes} bytes does not fit: {used_bytes} of {capacity_bytes} bytes are used by this \
         step's {allocations} tensors; raise the capacity, shorten the step (a smaller micro-batch), or free scratch \
         memory early with `step.scratch`"
    )]
    ArenaFull {
        /// Bytes of the tensor, after rounding up to the alignment.
        requested_bytes: usize,
        /// Bytes that the step had taken.
        used_bytes: usize,
        /// Bytes of the arena.
        capacity_bytes: usize,
        /// Tensors that the step had made.
        allocations: u64,
    },
    /// The device has no memory left.
    #[error("{device}: no memory for {requested_bytes} bytes ({free_bytes} free): {reason}")]
    DeviceMemory {
        /// The device's name.
        device: String,
        /// Bytes asked for.
        requested_bytes: usize,
        /// Bytes that the driver calls free.
        free_bytes: u64,
        /// The driver's own words.
        reason: String,
    },
    /// A kernel broke the rules of the machine, on the emulator.
    #[error(transparent)]
    Kernel(Box<Fault>),
    /// The CUDA driver refused a call.
    #[error("CUDA driver: `{call}` failed: {reason}")]
    Driver {
        /// The driver's function.
        call: &'static str,
        /// Its code and words.
        reason: String,
    },
    /// A call did not end in time. The device is lost.
    #[error(
        "`{call}` had not ended after {waited:?}; the device is lost, write a checkpoint of what the host holds and restart"
    )]
    Timeout {
        /// What was waited for.
        call: &'static str,
        /// How long.
        waited: Duration,
    },
    /// An earlier failure left the device unusable.
    #[error("the device was lost: {cause}")]
    DeviceLost {
        /// The failure.
        cause: String,
    },
    /// No device of the kind that was asked for.
    #[error("no {wanted} device: {reason}")]
    NoDevice {
        /// `cuda`, say.
        wanted: &'static str,
        /// Why not, and what to do.
        reason: String,
    },
    /// A file could not be read or written, or does not hold what it should.
    #[error("{}: {reason}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
}

impl Error {
    pub(crate) fn misuse(op: &'static str, expected: impl Into<String>, got: impl Into<String>) -> Self {
        Self::Misuse { op, expected: expected.into(), got: got.into() }
    }

    pub(crate) fn file(path: impl Into<PathBuf>, reason: impl ToString) -> Self {
        Self::File { path: path.into(), reason: reason.to_string() }
    }
}

impl From<Fault> for Error {
    fn from(fault: Fault) -> Self {
        Self::Kernel(Box::new(fault))
    }
}
