//! The one error type. An error states what happened, the values concerned, and what to do.
//!
//! Invariant: a caller's mistake is [`Error::Misuse`] or [`Error::Contract`], and is found before
//! anything runs. A resource that the system does not provide is [`Error::System`], and a panic is
//! [`Error::Panic`]. Every other variant names the call that failed and the reason that the system
//! gave.

pub(crate) mod disagreement;
pub(crate) mod rank_fault;
mod system;

pub use system::{Resource, SystemError};

use crate::host_memory::{AdmissionError, MemoryShortage};
use crate::ptx::PtxBuild;
use crate::report::{ArenaReport, Cause};
use cuda_std::emulator::Fault;
use cuda_std::launch::Violation;
use disagreement::Disagreement;
use rank_fault::{RankFault, RendezvousFault};
use std::fmt::{self, Write};
use std::io;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// The result of anything in stepscope that can fail.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// The reason that a call failed.
///
/// `Debug` prints the same message as `Display`, because `unwrap` and a `main` that returns a
/// `Result` print it.
#[derive(Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The caller passed something invalid.
    #[error("{op}: expected {expected}, got {got}")]
    Misuse {
        /// The operation.
        op: &'static str,
        /// The requirement of the operation.
        expected: String,
        /// The value that the caller passed.
        got: String,
    },
    /// The system did not provide a resource.
    #[error("{op}: the system provided no {resource}: {source}; {}", resource.advice())]
    System {
        /// The operation.
        op: &'static str,
        /// The missing resource.
        resource: Resource,
        /// The system's error.
        source: SystemError,
    },
    /// A launch broke its kernel's contract. Nothing ran.
    #[error("kernel `{kernel}`: {violation}")]
    Contract {
        /// The kernel.
        kernel: &'static str,
        /// The argument and the rule that it broke.
        violation: Violation,
    },
    /// A value of the training is not finite. Training stopped before anything was written to a
    /// file.
    #[error(
        "{}{what} is not finite; the first tensor concerned: {tensor}. Check the data, lower the learning rate, or resume from a \
         checkpoint; `NonFinite::Allow` disables this check",
        what.found_at(*update)
    )]
    NotFinite {
        /// The update, counted from 1, that produced the value, or the last update before it was
        /// found. `None` for weights that were never trained.
        update: Option<u64>,
        /// The quantity that was checked.
        what: Quantity,
        /// The first tensor that holds such a value, such as `` `head.weight` `` or the gradient of
        /// it.
        tensor: String,
    },
    /// A label is not a class, or an id is not a row of its table. Nothing was computed with it.
    #[error(
        "sample {sample} has the label or id {label}, but there are only {classes} classes or rows, counted from 0"
    )]
    Label {
        /// The sample's index in the batch.
        sample: usize,
        /// The sample's label or id.
        label: u32,
        /// The number of classes, or of the table's rows.
        classes: usize,
    },
    /// The arena cannot hold one more tensor in this step, and the overflow, if there is one, could
    /// not provide it.
    #[error(
        "arena: a tensor of {requested_bytes} bytes at {site} does not fit: {used_bytes} of {capacity_bytes} bytes are used by \
         this step's {allocations} tensors.\ncause: {cause}\nadvice: {advice}\n{report}"
    )]
    ArenaFull {
        /// The tensor's size in bytes, after rounding up to the alignment.
        requested_bytes: usize,
        /// Bytes that the step had taken from the arena.
        used_bytes: usize,
        /// The arena's size in bytes.
        capacity_bytes: usize,
        /// The number of tensors that the step had made.
        allocations: u64,
        /// The source line that requested the tensor.
        site: String,
        /// The reason that it does not fit.
        cause: Cause,
        /// The action to take.
        advice: String,
        /// The arena's report.
        report: Box<ArenaReport>,
    },
    /// A step to be captured needs more of the arena than is available. Nothing was captured.
    #[error(
        "capture: the step needs {bytes} bytes of the arena, but only {available} are available{}: raise the capacity, drop other captured \
         steps, or capture the largest shapes first",
        no_overflow(*.overflow_bytes)
    )]
    CaptureNeeds {
        /// Bytes that the step and its inputs needed before recording stopped.
        bytes: usize,
        /// Bytes available to a captured step.
        available: usize,
        /// The overflow's limit in bytes. A captured step cannot use the overflow, because a
        /// graph's memory must not move.
        overflow_bytes: usize,
    },
    /// Checked mode: something wrote past the end of a tensor.
    #[error(
        "the {tensor} made at {site} ({bytes} bytes) was overrun: something wrote at byte {offset_bytes}; check the kernels that write it or the tensor before it"
    )]
    Overrun {
        /// The element type and shape.
        tensor: String,
        /// The source line that made the tensor.
        site: String,
        /// The tensor's size in bytes.
        bytes: usize,
        /// The first byte that was overwritten, counted from the tensor's start.
        offset_bytes: usize,
    },
    /// Checked mode: bytes on the device differ from the uploaded bytes.
    #[error(
        "`{tensor}` was damaged on its way to the device, at byte {offset_bytes}: checksum {expected:#018x} when it was staged, \
         {got:#018x} on the device; upload it again, and if it fails again, suspect the machine's memory or the link to the device"
    )]
    Damaged {
        /// The parameter, or the buffer's element type and length.
        tensor: String,
        /// The first byte that differs, counted from the tensor's start.
        offset_bytes: usize,
        /// The checksum of the surrounding bytes when they were staged.
        expected: u64,
        /// The checksum of the same bytes on the device.
        got: u64,
    },
    /// Taking the memory would starve other processes, so none was taken.
    #[error("{0}")]
    Refused(Box<AdmissionError>),
    /// The host has so little memory left that no step begins. End the run before the operating
    /// system kills it. The trainer's epoch has already written the checkpoint, if it has a path
    /// for one.
    #[error("{0}")]
    MemoryShortage(Box<MemoryShortage>),
    /// The device has no memory left.
    #[error("{device}: no memory for {requested_bytes} bytes ({free_bytes} free): {reason}")]
    DeviceMemory {
        /// The device's name.
        device: String,
        /// Bytes requested.
        requested_bytes: usize,
        /// Bytes that the driver reports as free.
        free_bytes: u64,
        /// The driver's message.
        reason: String,
    },
    /// A kernel broke the machine's rules on the emulator.
    #[error(transparent)]
    Kernel(Box<Fault>),
    /// The driver refused a call.
    #[error("driver: `{call}` failed: {reason}")]
    Driver {
        /// The driver's function.
        call: &'static str,
        /// The driver's error code and message.
        reason: String,
        /// True if the failure leaves the device unusable.
        fatal: bool,
    },
    /// A call missed its deadline. The device is lost.
    #[error(
        "`{call}` had not ended after {waited:?}; the device is lost: write a checkpoint of what the host holds, and restart{}",
        report.as_ref().map(|report| format!("\n{report}")).unwrap_or_default()
    )]
    Timeout {
        /// The call that was waited for.
        call: &'static str,
        /// The length of the wait.
        waited: Duration,
        /// The report of the arena that was waiting, if there was one.
        report: Option<Box<ArenaReport>>,
    },
    /// A call panicked on the thread of the device's driver. The device is lost.
    #[error("`{call}` panicked: {message}; the device is lost: write a checkpoint of what the host holds, and restart")]
    Panic {
        /// The call that panicked.
        call: &'static str,
        /// The message of the panic.
        message: String,
    },
    /// An earlier failure left the device unusable.
    #[error("the device was lost: {cause}")]
    DeviceLost {
        /// The failure that caused it.
        cause: String,
    },
    /// A kernel failed the self-test. Nothing else was computed with the device.
    #[error(
        "{device}: kernel `{kernel}` {reason}. {}, or skip the self-test, at the risk of wrong results, with STEPSCOPE_SELF_TEST=never",
        ptx.as_ref().map_or_else(
            || "On the emulator, a kernel or its committed digest was changed: run `cargo xtask generate golden` if that is intended".into(),
            |ptx| format!(
                "Its PTX is {ptx}; that compiler or the driver miscompiles it: build with rustc's NVPTX backend, or with a \
                 rust-cuda that avoids the problems in device/rust-cuda/README.md"
            )
        )
    )]
    Kernels {
        /// The kernel.
        kernel: &'static str,
        /// The failure: wrong bits, a kernel that does not end, or a refused launch.
        reason: String,
        /// The device's name.
        device: String,
        /// The PTX that the kernels were compiled from. `None` on the emulator.
        ptx: Option<PtxBuild>,
    },
    /// No device of the requested kind is available.
    #[error("no {wanted} device: {reason}")]
    NoDevice {
        /// The requested kind, such as `cuda`.
        wanted: &'static str,
        /// The reason, and what to do.
        reason: String,
    },
    /// Another rank prevents this rank from continuing, or this rank prevents the others.
    #[error("{0}")]
    Rank(Box<RankFault>),
    /// The rendezvous of a group's ranks failed.
    #[error("{0}")]
    Rendezvous(Box<RendezvousFault>),
    /// The ranks of a group have different settings, weights or data, so they would not train one
    /// model. Every rank gets this error.
    #[error("{0}")]
    Disagreement(Box<Disagreement>),
    /// The loader could not make batches.
    #[error("loader: {reason}")]
    Loader {
        /// The reason that the loader's thread gave.
        reason: String,
    },
    /// A checkpoint holds the state of another optimizer. Nothing was changed.
    #[error(
        "{}: expected the state of the optimizer `{expected}`, got that of `{got}`: restore it with `{got}`, or restore only the weights",
        path.display()
    )]
    OtherOptimizer {
        /// The file.
        path: PathBuf,
        /// The optimizer whose state was requested.
        expected: &'static str,
        /// The optimizer whose state the file holds.
        got: String,
    },
    /// A backward pass and finite differences disagree.
    #[error(
        "gradcheck: input {input}, element {element}: the backward pass gives {backward}, finite differences give {difference}; the tolerance is {tolerance}"
    )]
    Gradient {
        /// The index of the input.
        input: usize,
        /// The index of its element, row-major.
        element: usize,
        /// The derivative from the backward pass.
        backward: f32,
        /// The derivative from finite differences.
        difference: f64,
        /// The largest difference allowed.
        tolerance: f64,
    },
    /// A file could not be read or written, or has unexpected contents.
    #[error("{}: {reason}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The problem with it.
        reason: String,
    },
}

/// The quantity that [`Error::NotFinite`] reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Quantity {
    /// The loss of a batch.
    Loss,
    /// The loss of samples that were not trained on. The update before it did not produce it.
    EvaluationLoss,
    /// The L2 norm of all gradients together.
    GradientNorm,
    /// A weight.
    Weight,
    /// State that the optimizer keeps for a weight, such as a moment.
    OptimizerState,
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

impl fmt::Display for Quantity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Loss => "the loss",
            Self::EvaluationLoss => "the loss of an evaluation",
            Self::GradientNorm => "the gradients' norm",
            Self::Weight => "a weight",
            Self::OptimizerState => "the optimizer's state",
        })
    }
}

impl Quantity {
    /// The message's prefix: the update that produced the value, or the last update before it was
    /// found.
    fn found_at(self, update: Option<u64>) -> String {
        match (self, update) {
            (_, None) => String::new(),
            (Self::EvaluationLoss, Some(update)) => format!("after update {update}: "),
            (_, Some(update)) => format!("update {update}: "),
        }
    }
}

/// The text that a capture's error adds when the arena has an overflow.
fn no_overflow(overflow_bytes: usize) -> String {
    match overflow_bytes {
        0 => String::new(),
        bytes => format!(
            " (captured steps cannot use the overflow of {bytes} bytes: run this step eagerly, or use a larger arena)"
        ),
    }
}

impl Error {
    /// Makes an [`Error::Misuse`] from the operation, its requirement, and the given value.
    pub fn misuse(op: &'static str, expected: impl Into<String>, got: impl Into<String>) -> Self {
        Self::Misuse { op, expected: expected.into(), got: got.into() }
    }

    /// Makes an [`Error::System`] from the operation, the missing resource, and the system's error.
    pub fn system(op: &'static str, resource: Resource, source: impl Into<io::Error>) -> Self {
        Self::System { op, resource, source: SystemError::from(source.into()) }
    }

    /// Renames the operation of a misuse to the one that passed the argument on.
    pub(crate) fn in_op(self, op: &'static str) -> Self {
        match self {
            Self::Misuse { expected, got, .. } => Self::Misuse { op, expected, got },
            other => other,
        }
    }

    /// Adds the launched kernel's name to a driver error.
    pub(crate) fn of_kernel(self, kernel: &str) -> Self {
        match self {
            Self::Driver { call, reason, fatal } => {
                Self::Driver { call, reason: format!("{reason}, at kernel `{kernel}`"), fatal }
            }
            other => other,
        }
    }

    /// Extends a timeout to a wait that began before its last call.
    pub(crate) fn waiting_since(self, start: Instant) -> Self {
        match self {
            Self::Timeout { call, report, .. } => Self::Timeout { call, waited: start.elapsed(), report },
            other => other,
        }
    }

    /// An error of a file, with what is wrong about it.
    pub fn file(path: impl Into<PathBuf>, reason: impl ToString) -> Self {
        Self::File { path: path.into(), reason: reason.to_string() }
    }
}

/// Prepares a text from outside for a message: without control characters, and no longer than a
/// line.
pub fn short(text: &str) -> Short<'_> {
    Short(text)
}

/// The result of [`short`].
pub struct Short<'t>(&'t str);

impl Short<'_> {
    /// The number of characters shown.
    const MOST: usize = 120;
}

impl fmt::Display for Short<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut rest = self.0.chars();
        for character in rest.by_ref().take(Self::MOST) {
            f.write_char(if character.is_control() { char::REPLACEMENT_CHARACTER } else { character })?;
        }
        match rest.as_str().len() {
            0 => Ok(()),
            more => write!(f, ".. and {more} more bytes"),
        }
    }
}

impl From<Fault> for Error {
    fn from(fault: Fault) -> Self {
        Self::Kernel(Box::new(fault))
    }
}
