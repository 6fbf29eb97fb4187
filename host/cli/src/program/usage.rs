//! Report sections about the model, the memory and the graphs of a run.

use serde::Serialize;
use stepscope::capture::CaptureReport;
use stepscope::memory::{MemoryForecast, ProcessMemory};
use stepscope::report::ArenaReport;

/// The size of the model.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct ModelSize {
    /// Weight tensors.
    pub tensors: usize,
    /// Elements of all weight tensors.
    pub weights: usize,
}

/// Use of the step arena.
#[derive(Clone, Debug, Default, Serialize)]
pub struct ArenaUse {
    /// The size of the arena.
    pub capacity_bytes: u64,
    /// The most bytes in use at once: by a step, its overflow, and coexisting captured steps.
    pub peak_bytes: u64,
    /// Steps ended.
    pub resets: u64,
    /// Tensors that steps allocated.
    pub allocations: u64,
    /// Allocations that did not fit the arena.
    pub overflow_allocations: u64,
    /// The full arena report: phases, call sites, overflow, device and host memory.
    pub report: Option<ArenaReport>,
}

/// Host memory of the process during training.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct MemoryUse {
    /// The predicted peak, forecast after the first update.
    pub predicted_peak_bytes: Option<u64>,
    /// The measured peak.
    pub peak_bytes: Option<u64>,
}

impl MemoryUse {
    /// Returns the forecast of a trainer and the peak so far.
    pub fn of(forecast: Option<MemoryForecast>) -> Self {
        Self {
            predicted_peak_bytes: forecast.map(|forecast| forecast.peak_bytes()),
            peak_bytes: ProcessMemory::read().map(|process| process.peak_bytes),
        }
    }
}

/// Use of captured steps over the whole run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct CaptureUse {
    /// Launches per replay.
    pub nodes: usize,
    /// Recordings made: one per batch shape in each fold.
    pub recordings: u64,
    /// Time spent on recording.
    pub record_seconds: f64,
    /// Steps replayed as one graph.
    pub replays: u64,
    /// Bytes of the arena reserved for captured steps.
    pub bytes_owned: usize,
}

impl CaptureUse {
    /// Returns the totals with one more capture added.
    pub fn after(before: Option<Self>, report: CaptureReport) -> Self {
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
    /// Returns the report's first line, and its overflow line if there was overflow.
    pub fn summary(&self) -> String {
        let text = self.report.as_ref().map(ToString::to_string).unwrap_or_default();
        let overflow = |line: &str| line.trim_start().starts_with("overflow:");
        let shown = text.lines().enumerate().filter(|(number, line)| *number == 0 || overflow(line));
        shown.map(|(_, line)| line).collect::<Vec<_>>().join("\n")
    }
}
