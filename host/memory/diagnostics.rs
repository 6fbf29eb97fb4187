//! What an arena knows about itself: how much, by whom, in which phase, and why it was not enough.
//!
//! Invariant: counting costs a few nanoseconds and no allocation once a call site is known; nothing here touches a device.

#![forbid(unsafe_code)]

use serde::Serialize;
use std::collections::HashMap;
use std::fmt;
use std::hash::{BuildHasherDefault, Hasher};
use std::panic::Location;
use std::time::Duration;
use tracing::Span;

/// What a step is doing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    /// Uploads and the forward pass.
    #[default]
    Forward,
    /// [`Tape::backward`](crate::Tape::backward).
    Backward,
    /// [`Optimizer::apply`](crate::Optimizer::apply).
    Optimizer,
}

impl Phase {
    const ALL: [Self; 3] = [Self::Forward, Self::Backward, Self::Optimizer];

    /// The phase's name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Forward => "forward",
            Self::Backward => "backward",
            Self::Optimizer => "optimizer",
        }
    }

    /// A span of this name.
    pub(crate) fn span(self) -> Span {
        match self {
            Self::Forward => tracing::debug_span!("forward"),
            Self::Backward => tracing::debug_span!("backward"),
            Self::Optimizer => tracing::debug_span!("optimizer"),
        }
    }
}

/// Why an arena was full.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Cause {
    /// One tensor is larger than the whole arena.
    RequestLargerThanArena,
    /// The step goes on and on: it has run whole passes and was not ended.
    NeverReset {
        /// Backward passes that the step had completed.
        passes: u64,
    },
    /// One pass needs more than the arena holds.
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

/// Allocations of one kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Count {
    /// How many.
    pub allocations: u64,
    /// Their bytes, after rounding up to the alignment.
    pub bytes: u64,
}

impl Count {
    fn add(&mut self, bytes: usize) {
        self.allocations += 1;
        self.bytes += bytes as u64;
    }
}

/// Allocations of one line of source.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Site {
    /// `file:line`.
    pub location: String,
    /// How many, and their bytes.
    #[serde(flatten)]
    pub count: Count,
}

/// The largest allocation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Largest {
    /// `file:line`.
    pub location: String,
    /// Its bytes.
    pub bytes: u64,
}

/// What went beyond an arena.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct OverflowReport {
    /// Tensors that did not fit and came from the pool.
    pub allocations: u64,
    /// Their bytes.
    pub bytes: u64,
    /// The most bytes that a step had from the pool.
    pub peak_bytes: u64,
    /// Blocks that were not given back; zero between steps.
    pub live_blocks: u64,
    /// Milliseconds that callers waited for the pool.
    pub waited_ms: f64,
    /// Requests beyond the cap, or for which there was no memory.
    pub refusals: u64,
    /// Requests that missed their deadline.
    pub timeouts: u64,
}

/// Memory of device and host when the report was made, in bytes; none where nobody tells.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct SystemMemory {
    /// All of the device's.
    pub device_total_bytes: Option<u64>,
    /// What the driver calls free.
    pub device_free_bytes: Option<u64>,
    /// The host's `MemFree`.
    pub host_free_bytes: Option<u64>,
    /// The host's `MemAvailable`: free, or reclaimable from caches.
    pub host_available_bytes: Option<u64>,
}

/// What an arena has done since it was built.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct ArenaReport {
    /// Bytes that steps may fill.
    pub capacity_bytes: usize,
    /// Bytes beside them that captured steps own.
    pub captured_bytes: usize,
    /// Bytes of it in use now; zero between steps.
    pub offset_bytes: usize,
    /// The most bytes that a step had in use, the overflow's included.
    pub high_water_bytes: usize,
    /// Steps that have ended.
    pub resets: u64,
    /// Backward passes since the last reset.
    pub passes_since_reset: u64,
    /// Tensors that were made.
    pub allocations: u64,
    /// The largest of them.
    pub largest: Option<Largest>,
    /// Tensors by phase: forward, backward, optimizer.
    pub phases: [(Phase, Count); 3],
    /// Tensors by the line that made them, most bytes first.
    pub sites: Vec<Site>,
    /// What went beyond.
    pub overflow: OverflowReport,
    /// How many times the arena grew at a step's end.
    pub growths: u64,
    /// Memory of device and host.
    pub memory: SystemMemory,
}

/// Call sites that an error or a printed report names.
const SITES_SHOWN: usize = 10;

/// Bytes in MiB, or in KiB where that would round them away.
pub(crate) fn size(bytes: impl TryInto<u64>) -> String {
    let bytes = bytes.try_into().unwrap_or(u64::MAX) as f64;
    let (kib, mib) = (bytes / 1024.0, bytes / f64::from(1 << 20));
    if mib < 1.0 && kib > 0.0 { format!("{kib:.1} KiB") } else { format!("{mib:.1} MiB") }
}

impl fmt::Display for ArenaReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "arena: {} at most in use of {}, {} tensors in {} steps, {} overflows",
            size(self.high_water_bytes),
            size(self.capacity_bytes),
            self.allocations,
            self.resets,
            self.overflow.allocations
        )?;
        if self.captured_bytes > 0 {
            writeln!(f, "  captured steps own {}", size(self.captured_bytes))?;
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

/// Counts while steps run.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    sites: HashMap<usize, (&'static Location<'static>, Count), BuildHasherDefault<AddressHasher>>,
    phases: [Count; 3],
    allocations: u64,
    largest: Option<(&'static Location<'static>, usize)>,
    pub(crate) phase: Phase,
    pub(crate) passes: u64,
    pub(crate) step_allocations: u64,
    pub(crate) overflow: OverflowReport,
    pub(crate) waited: Duration,
}

impl Counters {
    /// A tensor was made.
    #[inline]
    pub(crate) fn allocated(&mut self, site: &'static Location<'static>, bytes: usize) {
        self.allocations += 1;
        self.step_allocations += 1;
        self.phases[self.phase as usize].add(bytes);
        if self.largest.is_none_or(|(_, largest)| bytes > largest) {
            self.largest = Some((site, bytes));
        }
        // A line of source has one address, or a few.
        let address = std::ptr::from_ref(site) as usize;
        self.sites.entry(address).or_insert((site, Count::default())).1.add(bytes);
    }

    /// The step is over.
    pub(crate) fn reset(&mut self) {
        self.passes = 0;
        self.step_allocations = 0;
        self.phase = Phase::Forward;
    }

    /// Why `bytes` did not fit into `capacity`.
    pub(crate) fn cause(&self, bytes: usize, capacity: usize) -> Cause {
        match (bytes, self.passes) {
            (bytes, _) if bytes > capacity => Cause::RequestLargerThanArena,
            (_, 2..) => Cause::NeverReset { passes: self.passes },
            (_, 1) if self.phase == Phase::Forward => Cause::NeverReset { passes: 1 },
            _ => Cause::WorkingSetLargerThanArena,
        }
    }

    /// The counts, with what only the arena knows still to be filled in.
    pub(crate) fn report(&self) -> ArenaReport {
        let mut sites: HashMap<String, Count> = HashMap::new();
        for (site, count) in self.sites.values() {
            let sum = sites.entry(format!("{}:{}", site.file(), site.line())).or_default();
            sum.allocations += count.allocations;
            sum.bytes += count.bytes;
        }
        let mut sites: Vec<Site> = sites.into_iter().map(|(location, count)| Site { location, count }).collect();
        sites.sort_by(|a, b| b.count.bytes.cmp(&a.count.bytes).then_with(|| a.location.cmp(&b.location)));
        let largest = self
            .largest
            .map(|(site, bytes)| Largest { location: format!("{}:{}", site.file(), site.line()), bytes: bytes as u64 });
        ArenaReport {
            capacity_bytes: 0,
            captured_bytes: 0,
            offset_bytes: 0,
            high_water_bytes: 0,
            resets: 0,
            passes_since_reset: self.passes,
            allocations: self.allocations,
            largest,
            phases: Phase::ALL.map(|phase| (phase, self.phases[phase as usize])),
            sites,
            overflow: OverflowReport { waited_ms: self.waited.as_secs_f64() * 1e3, ..self.overflow },
            growths: 0,
            memory: SystemMemory::default(),
        }
    }
}

/// A static's address is already spread: one multiplication mixes it (Fibonacci hashing).
#[derive(Default)]
pub(crate) struct AddressHasher(u64);

impl Hasher for AddressHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.write_usize(usize::from(byte) ^ self.0 as usize);
        }
    }

    fn write_usize(&mut self, address: usize) {
        self.0 = (address as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cause_follows_from_size_and_passes() {
        let mut counters = Counters::default();
        assert_eq!(counters.cause(2048, 1024), Cause::RequestLargerThanArena);
        assert_eq!(counters.cause(512, 1024), Cause::WorkingSetLargerThanArena);
        counters.passes = 3;
        assert_eq!(counters.cause(512, 1024), Cause::NeverReset { passes: 3 });
        (counters.passes, counters.phase) = (1, Phase::Optimizer);
        assert_eq!(counters.cause(512, 1024), Cause::WorkingSetLargerThanArena, "the pass is not over yet");
        counters.reset();
        assert_eq!((counters.passes, counters.phase), (0, Phase::Forward));
    }

    #[test]
    fn sites_are_sorted_by_bytes_and_phases_add_up() {
        let mut counters = Counters::default();
        let small = here();
        let large = here();
        counters.allocated(small, 256);
        counters.phase = Phase::Backward;
        for _ in 0..3 {
            counters.allocated(large, 1024);
        }
        let report = counters.report();
        assert_eq!(report.allocations, 4);
        assert_eq!(report.sites[0].count, Count { allocations: 3, bytes: 3072 });
        assert_eq!(report.largest.unwrap().bytes, 1024);
        assert_eq!(report.phases.map(|(_, count)| count.bytes), [256, 3072, 0]);
    }

    #[track_caller]
    fn here() -> &'static Location<'static> {
        Location::caller()
    }
}
