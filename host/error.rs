//! One error type: what was asked, what was there, what to do.
//!
//! Invariant: a caller's mistake is [`Error::Misuse`] or [`Error::Contract`], found before anything ran; everything
//! else names the call that failed and what the system said.

use crate::admission::Refusal;
use crate::group::disagreement::Disagreement;
use crate::group::fault::{MeetingFault, RankFault};
use crate::ptx::PtxBuild;
use crate::report::{ArenaReport, Cause};
use crate::shortage::MemoryShortage;
use cuda_std::emulator::Fault;
use cuda_std::launch::Violation;
use std::fmt::{self, Write};
use std::path::PathBuf;
use std::time::{Duration, Instant};

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
    /// A number of the training is not finite: what went on would be worthless, and nothing was written to a file.
    #[error(
        "{}{what} is not finite; the first tensor concerned: {tensor}. Look at the data, lower the learning rate, or go on from a \
         checkpoint; `Numbers::Any` lets such numbers be",
        what.found_at(*update)
    )]
    NotFinite {
        /// The update, counted from 1, or the last one behind which it was found; none for weights that nothing has trained.
        update: Option<u64>,
        /// What was looked at.
        what: Quantity,
        /// The first tensor that holds such a number, and whose it is: `` `head.weight` ``, say, or the gradient of it.
        tensor: String,
    },
    /// A label that is no class; nothing was trained on it.
    #[error("sample {sample} has the label {label}, and there are {classes} classes, counted from 0")]
    Label {
        /// Its place in the batch.
        sample: usize,
        /// Its label.
        label: u32,
        /// How many there are.
        classes: usize,
    },
    /// The arena cannot hold one more tensor in this step, and the overflow, if there is one, did not give.
    #[error(
        "arena: a tensor of {requested_bytes} bytes at {site} does not fit: {used_bytes} of {capacity_bytes} bytes are used by \
         this step's {allocations} tensors.\ncause: {cause}\nadvice: {advice}\n{report}"
    )]
    ArenaFull {
        /// Bytes of the tensor, after rounding up to the alignment.
        requested_bytes: usize,
        /// Bytes that the step had taken from the arena.
        used_bytes: usize,
        /// Bytes of the arena.
        capacity_bytes: usize,
        /// Tensors that the step had made.
        allocations: u64,
        /// The line that asked.
        site: String,
        /// Why it does not fit.
        cause: Cause,
        /// What to do.
        advice: String,
        /// What the arena knows about itself.
        report: Box<ArenaReport>,
    },
    /// A step that is to be captured needs more of the arena than there is; nothing was captured.
    #[error(
        "capture: the step needs {bytes} bytes of the arena, and {available} can be had{}: raise the capacity, end other captured \
         steps, or capture the largest shapes first",
        no_overflow(*.overflow_bytes)
    )]
    CaptureNeeds {
        /// Bytes that the step and its inputs need, as far as it came.
        bytes: usize,
        /// Bytes that a captured step could have.
        available: usize,
        /// The overflow's cap, of which a captured step has nothing: a graph's memory must stay where it is.
        overflow_bytes: usize,
    },
    /// Checked mode: something wrote behind a tensor.
    #[error(
        "the {tensor} made at {site} ({bytes} bytes) was overrun: something wrote at byte {offset_bytes}; look at the kernels that write it, or its neighbour before"
    )]
    Overrun {
        /// Element type and shape.
        tensor: String,
        /// The line that made it.
        site: String,
        /// Its bytes.
        bytes: usize,
        /// The first byte that was hit, from the tensor's start.
        offset_bytes: usize,
    },
    /// Checked mode: what the device holds is not what was uploaded.
    #[error(
        "`{tensor}` was damaged on its way to the device, at byte {offset_bytes}: checksum {expected:#018x} when it was staged, \
         {got:#018x} on the device; upload it again, and if that repeats distrust the machine's memory and its link"
    )]
    Damaged {
        /// The parameter, or the buffer's element type and length.
        tensor: String,
        /// The first byte that differs, from the tensor's start.
        offset_bytes: usize,
        /// The checksum of the bytes around it as they were staged.
        expected: u64,
        /// The checksum of the same bytes on the device.
        got: u64,
    },
    /// There is no memory to take without starving others; nothing was taken.
    #[error("{0}")]
    Refused(Box<Refusal>),
    /// The host has so little memory left that no step begins: end the run before the kernel does. A trainer's epoch has written the
    /// checkpoint, if there is a path for one.
    #[error("{0}")]
    MemoryShortage(Box<MemoryShortage>),
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
    /// The driver refused a call.
    #[error("driver: `{call}` failed: {reason}")]
    Driver {
        /// The driver's function.
        call: &'static str,
        /// Its code and words.
        reason: String,
        /// Whether it leaves the device unusable.
        fatal: bool,
    },
    /// A call did not end in time. The device is lost.
    #[error(
        "`{call}` had not ended after {waited:?}; the device is lost: write a checkpoint of what the host holds, and restart{}",
        report.as_ref().map(|report| format!("\n{report}")).unwrap_or_default()
    )]
    Timeout {
        /// What was waited for.
        call: &'static str,
        /// How long.
        waited: Duration,
        /// What the arena knows, if one was waiting.
        report: Option<Box<ArenaReport>>,
    },
    /// An earlier failure left the device unusable.
    #[error("the device was lost: {cause}")]
    DeviceLost {
        /// The failure.
        cause: String,
    },
    /// A kernel does not do what it must, found by the self-test; nothing else was computed with the device.
    #[error(
        "{device}: kernel `{kernel}` {reason}. {}, or open the device without a test, at the risk of wrong results: STEPSCOPE_SELF_TEST=never",
        ptx.as_ref().map_or_else(
            || "On the emulator a kernel or its committed digest was changed: `same_bits --update` where that is meant".into(),
            |ptx| format!(
                "Its PTX is {ptx}; that compiler, or the driver, compiles it wrongly: build with rustc's NVPTX backend, or with a \
                 rust-cuda without the traps of docs/rust-cuda.md"
            )
        )
    )]
    Kernels {
        /// The kernel.
        kernel: &'static str,
        /// What was seen: wrong bits, a kernel that does not end, a refusal.
        reason: String,
        /// The device's name.
        device: String,
        /// The PTX that its kernels were compiled from; none on the emulator.
        ptx: Option<PtxBuild>,
    },
    /// No device of the kind that was asked for.
    #[error("no {wanted} device: {reason}")]
    NoDevice {
        /// `cuda`, say.
        wanted: &'static str,
        /// Why not, and what to do.
        reason: String,
    },
    /// Another rank keeps this one from going on, or this one the others.
    #[error("{0}")]
    Rank(Box<RankFault>),
    /// The ranks of a group did not meet.
    #[error("{0}")]
    Meeting(Box<MeetingFault>),
    /// The ranks of a group have different settings, weights or data, so they would not train one
    /// model. All ranks have this error.
    #[error("{0}")]
    Disagreement(Box<Disagreement>),
    /// Batches could not be made.
    #[error("loader: {reason}")]
    Loader {
        /// What the thread that makes them said.
        reason: String,
    },
    /// A checkpoint holds the state of another optimiser; nothing was changed.
    #[error(
        "{}: expected the state of the optimiser `{expected}`, got that of `{got}`: restore it with `{got}`, or the weights alone",
        path.display()
    )]
    OtherOptimizer {
        /// The file.
        path: PathBuf,
        /// The optimiser whose state was asked for.
        expected: &'static str,
        /// The one whose state it is.
        got: String,
    },
    /// A backward pass and finite differences do not agree.
    #[error(
        "gradcheck: input {input}, element {element}: the backward pass has {backward}, finite differences {difference}; they may be {tolerance} apart"
    )]
    Gradient {
        /// Which input.
        input: usize,
        /// Which of its elements, row-major.
        element: usize,
        /// The backward pass's derivative.
        backward: f32,
        /// That of finite differences.
        difference: f64,
        /// How far apart they may be.
        tolerance: f64,
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

/// What [`Error::NotFinite`] is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Quantity {
    /// The loss of a batch.
    Loss,
    /// The loss of samples that were not trained on: the update before did not make it.
    EvaluationLoss,
    /// The L2 norm of all gradients together.
    GradientNorm,
    /// A weight.
    Weight,
    /// What the optimiser keeps for a weight, such as a moment.
    OptimizerState,
}

impl fmt::Display for Quantity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Loss => "the loss",
            Self::EvaluationLoss => "the loss of an evaluation",
            Self::GradientNorm => "the gradients' norm",
            Self::Weight => "a weight",
            Self::OptimizerState => "the optimiser's state",
        })
    }
}

impl Quantity {
    /// The update that made it, or the last one before it was found.
    fn found_at(self, update: Option<u64>) -> String {
        match (self, update) {
            (_, None) => String::new(),
            (Self::EvaluationLoss, Some(update)) => format!("after update {update}: "),
            (_, Some(update)) => format!("update {update}: "),
        }
    }
}

/// What a capture's error adds where the arena has an overflow.
fn no_overflow(overflow_bytes: usize) -> String {
    match overflow_bytes {
        0 => String::new(),
        bytes => format!(
            " (the overflow of {bytes} bytes is for steps that are not captured: run those eagerly, or use a larger arena)"
        ),
    }
}

impl Error {
    /// [`Error::Misuse`] of an operation: what it needs, and what it was given.
    pub fn misuse(op: &'static str, expected: impl Into<String>, got: impl Into<String>) -> Self {
        Self::Misuse { op, expected: expected.into(), got: got.into() }
    }

    /// The same misuse in the name of the operation that passed on what it was given.
    pub(crate) fn in_op(self, op: &'static str) -> Self {
        match self {
            Self::Misuse { expected, got, .. } => Self::Misuse { op, expected, got },
            other => other,
        }
    }

    /// The same refusal of the driver's, of a launch of this kernel.
    pub(crate) fn of_kernel(self, kernel: &str) -> Self {
        match self {
            Self::Driver { call, reason, fatal } => {
                Self::Driver { call, reason: format!("{reason}, at kernel `{kernel}`"), fatal }
            }
            other => other,
        }
    }

    /// The same timeout, of a wait that began earlier than its last call.
    pub(crate) fn waiting_since(self, start: Instant) -> Self {
        match self {
            Self::Timeout { call, report, .. } => Self::Timeout { call, waited: start.elapsed(), report },
            other => other,
        }
    }

    pub(crate) fn file(path: impl Into<PathBuf>, reason: impl ToString) -> Self {
        Self::File { path: path.into(), reason: reason.to_string() }
    }
}

/// A text from outside as a message shows it: without control characters, and no longer than a line.
pub(crate) fn short(text: &str) -> Short<'_> {
    Short(text)
}

/// See [`short`].
pub(crate) struct Short<'t>(&'t str);

impl Short<'_> {
    /// Characters that are shown.
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
            more => write!(f, ".. and {more} bytes more"),
        }
    }
}

impl From<Fault> for Error {
    fn from(fault: Fault) -> Self {
        Self::Kernel(Box::new(fault))
    }
}
