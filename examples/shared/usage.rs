//! What a report says of the model, the memory and the graphs of a run.

use serde::Serialize;
use stepscope::{ArenaReport, CaptureReport, MemoryForecast, ProcessMemory};

/// The size of the model.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub(crate) struct ModelSize {
    /// Weight tensors.
    pub(crate) tensors: usize,
    /// Numbers in all of them.
    pub(crate) weights: usize,
}

/// What the step arena did.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct ArenaUse {
    /// Its size.
    pub(crate) capacity_bytes: u64,
    /// The most in use at once: by a step, its overflow, and captured steps beside it.
    pub(crate) peak_bytes: u64,
    /// Steps ended.
    pub(crate) resets: u64,
    /// Tensors that steps allocated.
    pub(crate) allocations: u64,
    /// Those among them that did not fit.
    pub(crate) overflow_allocations: u64,
    /// The whole of what it knows: phases, call sites, overflow, memory of device and host.
    pub(crate) report: Option<ArenaReport>,
}

/// What the process took of the host's memory to train.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub(crate) struct MemoryUse {
    /// What it would take at most, as told behind the first update.
    pub(crate) predicted_peak_bytes: Option<u64>,
    /// What it took at most.
    pub(crate) peak_bytes: Option<u64>,
}

impl MemoryUse {
    /// What was told of a trainer's run, and what was taken until now.
    pub(crate) fn of(forecast: Option<MemoryForecast>) -> Self {
        Self {
            predicted_peak_bytes: forecast.map(|forecast| forecast.peak_bytes()),
            peak_bytes: ProcessMemory::read().map(|process| process.peak_bytes),
        }
    }
}

/// What captured steps did over the whole run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub(crate) struct CaptureUse {
    /// Launches of a replay.
    pub(crate) nodes: usize,
    /// Recordings made: one for each shape of batch in each fold.
    pub(crate) recordings: u64,
    /// Time that making them took.
    pub(crate) record_seconds: f64,
    /// Steps that ran as one graph.
    pub(crate) replays: u64,
    /// Bytes of the arena that they had for themselves.
    pub(crate) bytes_owned: usize,
}

impl CaptureUse {
    /// With one more capture.
    pub(crate) fn after(before: Option<Self>, report: CaptureReport) -> Self {
        let before = before.unwrap_or_default();
        Self {
            nodes: before.nodes.max(report.nodes),
            recordings: before.recordings + report.recordings,
            record_seconds: before.record_seconds + report.record_seconds,
            replays: before.replays + report.replays,
            bytes_owned: before.bytes_owned.max(report.bytes_owned),
        }
    }
}

impl From<ArenaReport> for ArenaUse {
    fn from(report: ArenaReport) -> Self {
        Self {
            capacity_bytes: (report.capacity_bytes + report.captured_bytes) as u64,
            peak_bytes: report.peak_bytes as u64,
            resets: report.resets,
            allocations: report.allocations,
            overflow_allocations: report.overflow.allocations,
            report: Some(report),
        }
    }
}

impl ArenaUse {
    /// The printed report's first line, and the overflow's where there was one.
    pub(crate) fn summary(&self) -> String {
        let text = self.report.as_ref().map(ToString::to_string).unwrap_or_default();
        let overflow = |line: &str| line.trim_start().starts_with("overflow:");
        let shown = text.lines().enumerate().filter(|(number, line)| *number == 0 || overflow(line));
        shown.map(|(_, line)| line).collect::<Vec<_>>().join("\n")
    }
}
