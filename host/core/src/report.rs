//! The report of an arena: how much memory was used, by which lines, in which phase, and why it was
//! not enough.
//!
//! It has plain figures and their text form. Invariant: nothing here accesses a device, so errors
//! can contain a report.

#![forbid(unsafe_code)]

use cuda_std::float_mode;
use serde::Serialize;
use std::fmt;
use tracing::Span;

/// The phase of a step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    /// Uploads and the forward pass.
    #[default]
    Forward,
    /// The backward pass ([`Tape::backward`](crate::Tape::backward)).
    Backward,
    /// The optimizer's update (`Optimizer::apply`).
    Optimizer,
}

impl Phase {
    pub(crate) const ALL: [Self; 3] = [Self::Forward, Self::Backward, Self::Optimizer];

    /// Returns the phase's name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Forward => "forward",
            Self::Backward => "backward",
            Self::Optimizer => "optimizer",
        }
    }

    /// Returns a span of this name.
    pub(crate) fn span(self) -> Span {
        match self {
            Self::Forward => tracing::debug_span!("forward"),
            Self::Backward => tracing::debug_span!("backward"),
            Self::Optimizer => tracing::debug_span!("optimizer"),
        }
    }
}

/// The reason why an arena was full.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Cause {
    /// A tensor is larger than the whole arena.
    RequestLargerThanArena,
    /// The step has run whole passes without ending.
    NeverReset {
        /// The backward passes that the step had completed.
        passes: u64,
    },
    /// A single pass needs more than the arena holds.
    WorkingSetLargerThanArena,
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::RequestLargerThanArena => {
                f.write_str("RequestLargerThanArena: this one tensor is larger than the arena")
            }
            Self::NeverReset { passes } => write!(
                f,
                "NeverReset: the step has completed {passes} backward passes and was not ended, so their memory is still held"
            ),
            Self::WorkingSetLargerThanArena => {
                f.write_str("WorkingSetLargerThanArena: one forward and backward pass needs more than the arena holds")
            }
        }
    }
}

/// The allocations of one kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Count {
    /// The number of allocations.
    pub allocations: u64,
    /// The bytes of the allocations, rounded up to the alignment.
    pub bytes: u64,
}

impl Count {
    pub(crate) fn add(&mut self, bytes: usize) {
        self.allocations += 1;
        self.bytes += bytes as u64;
    }
}

/// The allocations of one source line.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Site {
    /// The location as `file:line`.
    pub location: String,
    /// The number of allocations and their bytes.
    #[serde(flatten)]
    pub count: Count,
}

/// The largest allocation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Largest {
    /// The location as `file:line`.
    pub location: String,
    /// Its bytes.
    pub bytes: u64,
}

/// The memory that steps took beyond an arena.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct OverflowReport {
    /// The tensors that did not fit and came from the pool.
    pub allocations: u64,
    /// Their bytes.
    pub bytes: u64,
    /// The most bytes that a step had from the pool.
    pub peak_bytes: u64,
    /// The blocks that were not returned, which is zero between steps.
    pub live_blocks: u64,
    /// The milliseconds that callers waited for the pool.
    pub waited_ms: f64,
    /// The requests that exceeded the cap, or for which there was no memory.
    pub refusals: u64,
    /// The requests that missed their deadline.
    pub timeouts: u64,
}

/// The memory of device and host when the report was made, in bytes. Figures that no source reports
/// are none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct SystemMemory {
    /// The device's total memory.
    pub device_total_bytes: Option<u64>,
    /// The memory that the driver reports as free.
    pub device_free_bytes: Option<u64>,
    /// The host's `MemFree`.
    pub host_free_bytes: Option<u64>,
    /// The host's `MemAvailable`: free, or reclaimable from caches.
    pub host_available_bytes: Option<u64>,
    /// The limit of the memory cgroup that leaves this process least.
    pub cgroup_limit_bytes: Option<u64>,
    /// The memory that this cgroup's processes may still take.
    pub cgroup_available_bytes: Option<u64>,
}

/// The activity of an arena since it was built.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct ArenaReport {
    /// The bytes that steps may fill.
    pub capacity_bytes: usize,
    /// The further bytes that captured steps own.
    pub captured_bytes: usize,
    /// The bytes that captured steps would own in addition if each of their tensors lived until its
    /// scope ends.
    pub saved_bytes: usize,
    /// The bytes in use now, which are zero between steps.
    pub offset_bytes: usize,
    /// The most bytes that a step had in use, including the overflow's.
    pub high_water_bytes: usize,
    /// The most bytes in use at once: by a step, its overflow and captured steps together.
    pub peak_bytes: usize,
    /// The number of steps that have ended.
    pub resets: u64,
    /// The number of backward passes since the last reset.
    pub passes_since_reset: u64,
    /// The number of tensors made.
    pub allocations: u64,
    /// The largest tensor.
    pub largest: Option<Largest>,
    /// The tensors by phase: forward, backward, optimizer.
    pub phases: [(Phase, Count); 3],
    /// The tensors by the line that made them, most bytes first.
    pub sites: Vec<Site>,
    /// The memory that steps took beyond the arena.
    pub overflow: OverflowReport,
    /// The number of times the arena grew at a step's end.
    pub growths: u64,
    /// The memory of device and host.
    pub memory: SystemMemory,
}

/// The number of call sites that an error or a printed report names.
const SITES_SHOWN: usize = 10;

/// Formats bytes in MiB, or in KiB if they would round to zero.
pub(crate) fn size(bytes: impl TryInto<u64>) -> String {
    float_mode::in_default(|| {
        let bytes = bytes.try_into().unwrap_or(u64::MAX) as f64;
        let (kib, mib) = (bytes / 1024.0, bytes / f64::from(1 << 20));
        if mib < 1.0 && kib > 0.0 { format!("{kib:.1} KiB") } else { format!("{mib:.1} MiB") }
    })
}

impl fmt::Display for ArenaReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "arena: {} at most in use of {}, {} tensors in {} steps, {} overflows",
            size(self.peak_bytes),
            size(self.capacity_bytes + self.captured_bytes),
            self.allocations,
            self.resets,
            self.overflow.allocations
        )?;
        if self.captured_bytes > 0 {
            let (owned, saved) = (size(self.captured_bytes), size(self.saved_bytes));
            writeln!(f, "  captured steps own {owned}; plans of their tensors' lifetimes saved {saved}")?;
        }
        if self.offset_bytes > 0 {
            let (used, passes) = (size(self.offset_bytes), self.passes_since_reset);
            writeln!(f, "  now: {used} in use, {passes} backward passes since the last reset")?;
        }
        for (phase, count) in &self.phases {
            if count.allocations > 0 {
                let bytes = size(count.bytes);
                writeln!(f, "  {:<10} {:>8} tensors {bytes:>12} in all", phase.name(), count.allocations)?;
            }
        }
        if let Some(largest) = &self.largest {
            writeln!(f, "  largest: {} at {}", size(largest.bytes), largest.location)?;
        }
        let OverflowReport { allocations, bytes, peak_bytes, live_blocks, waited_ms, refusals, timeouts } =
            self.overflow;
        if allocations + refusals + timeouts > 0 {
            writeln!(
                f,
                "  overflow: {allocations} tensors, {} in all, {} at most at once, {live_blocks} blocks live, \
                 {waited_ms:.3} ms waited, {refusals} refused, {timeouts} timed out",
                size(bytes),
                size(peak_bytes)
            )?;
        }
        let memory = [
            ("device total", self.memory.device_total_bytes),
            ("device free", self.memory.device_free_bytes),
            ("host free", self.memory.host_free_bytes),
            ("host available", self.memory.host_available_bytes),
            ("cgroup's limit", self.memory.cgroup_limit_bytes),
            ("available in it", self.memory.cgroup_available_bytes),
        ];
        let known: Vec<String> =
            memory.iter().filter_map(|(name, bytes)| Some(format!("{name} {}", size((*bytes)?)))).collect();
        if !known.is_empty() {
            writeln!(f, "  memory: {}", known.join(", "))?;
        }
        for Site { location, count } in self.sites.iter().take(SITES_SHOWN) {
            writeln!(f, "  {:>12} in {:>8} tensors at {location}", size(count.bytes), count.allocations)?;
        }
        if self.sites.len() > SITES_SHOWN {
            writeln!(f, "  and {} more call sites", self.sites.len() - SITES_SHOWN)?;
        }
        Ok(())
    }
}
