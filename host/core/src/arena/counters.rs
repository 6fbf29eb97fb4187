//! The counts of an arena's tensors (by line, by phase, and in total), its peak, and the report of
//! both.
//!
//! Invariant: counting costs a few nanoseconds, and allocates only for a new call site.

#![forbid(unsafe_code)]

use super::region::ArenaInner;
use crate::host_memory::{CgroupMemory, MemInfo};
use crate::report::{ArenaReport, Cause, Count, Largest, OverflowReport, Phase, Site, SystemMemory};
use cuda_std::float_mode;
use std::cell::Cell;
use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::panic::Location;
use std::time::Duration;

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
    /// Counts a new tensor.
    #[inline]
    pub(crate) fn allocated(&mut self, site: &'static Location<'static>, bytes: usize) {
        self.allocations += 1;
        self.step_allocations += 1;
        self.phases[self.phase as usize].add(bytes);
        if self.largest.is_none_or(|(_, largest)| bytes > largest) {
            self.largest = Some((site, bytes));
        }
        // A source line has one address, or a few.
        let address = std::ptr::from_ref(site) as usize;
        self.sites.entry(address).or_insert((site, Count::default())).1.add(bytes);
    }

    /// Resets the step's counts when the step ends.
    pub(crate) fn reset(&mut self) {
        self.passes = 0;
        self.step_allocations = 0;
        self.phase = Phase::Forward;
    }

    /// Returns the reason why `bytes` did not fit into `capacity`.
    pub(crate) fn cause(&self, bytes: usize, capacity: usize) -> Cause {
        match (bytes, self.passes) {
            (bytes, _) if bytes > capacity => Cause::RequestLargerThanArena,
            (_, 2..) => Cause::NeverReset { passes: self.passes },
            (_, 1) if self.phase == Phase::Forward => Cause::NeverReset { passes: 1 },
            _ => Cause::WorkingSetLargerThanArena,
        }
    }

    /// Returns the counts. The arena fills in the remaining fields.
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
        let waited_ms = float_mode::in_default(|| self.waited.as_secs_f64() * 1e3);
        ArenaReport {
            capacity_bytes: 0,
            captured_bytes: 0,
            saved_bytes: 0,
            offset_bytes: 0,
            high_water_bytes: 0,
            peak_bytes: 0,
            resets: 0,
            passes_since_reset: self.passes,
            allocations: self.allocations,
            largest,
            phases: Phase::ALL.map(|phase| (phase, self.phases[phase as usize])),
            sites,
            overflow: OverflowReport { waited_ms, ..self.overflow },
            growths: 0,
            memory: SystemMemory::default(),
        }
    }
}

impl ArenaInner {
    /// Returns the state and counts of the arena.
    pub(super) fn report(&self) -> ArenaReport {
        let (host, cgroup) = (MemInfo::read(), CgroupMemory::read());
        let description = self.device.description();
        let memory = SystemMemory {
            device_total_bytes: description.memory_bytes,
            // A lost device is not called again.
            device_free_bytes: self.device.free_bytes(self.device.deadline()).ok(),
            host_free_bytes: host.map(|host| host.free_bytes),
            host_available_bytes: host.map(|host| host.available_bytes),
            cgroup_limit_bytes: cgroup.map(|cgroup| cgroup.limit_bytes),
            cgroup_available_bytes: cgroup.as_ref().map(CgroupMemory::available_bytes),
        };
        let (captured_bytes, saved_bytes) = self.sections.bytes();
        ArenaReport {
            capacity_bytes: self.available_bytes(),
            captured_bytes,
            saved_bytes,
            offset_bytes: self.bump.get().taken(),
            high_water_bytes: self.high_water_bytes(),
            peak_bytes: self.peak.whole_bytes(self.captured_bytes()),
            resets: self.resets.get(),
            growths: self.growths,
            memory,
            ..self.counters.borrow().report()
        }
    }
}

/// A hasher for addresses of statics. These are already spread, so one multiplication mixes them
/// (Fibonacci hashing).
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

/// The peak of an arena's bytes in use: those of a step and its overflow, plus those of captured
/// steps. The bytes of captured steps change only between steps, so a peak is their current bytes
/// plus the most that a step has had since they last changed.
#[derive(Debug, Default)]
pub(super) struct Peak {
    /// The most that a step has had since the captured bytes last changed.
    recent: Cell<usize>,
    /// The most that a step had before that.
    steps: Cell<usize>,
    /// The peak including captured bytes before that.
    whole: Cell<usize>,
}

impl Peak {
    /// Records that a step has `bytes` in use, its overflow included.
    #[inline]
    pub(super) fn step_has(&self, bytes: usize) {
        self.recent.set(self.recent.get().max(bytes));
    }

    /// Records that the captured bytes are about to change from `captured_bytes`.
    pub(super) fn captured_changes(&self, captured_bytes: usize) {
        self.whole.set(self.whole_bytes(captured_bytes));
        self.steps.set(self.step_bytes());
        self.recent.set(0);
    }

    /// Returns the most that a step has had.
    pub(super) fn step_bytes(&self) -> usize {
        self.steps.get().max(self.recent.get())
    }

    /// Returns the total peak, given the captured bytes now.
    pub(super) fn whole_bytes(&self, captured_bytes: usize) -> usize {
        self.whole.get().max(captured_bytes.saturating_add(self.recent.get()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cause_follows_from_size_and_passes() {
        let mut counters = Counters::default();
        assert_eq!(counters.cause(2048, 1024), Cause::RequestLargerThanArena);
        assert_eq!(counters.cause(512, 1024), Cause::WorkingSetLargerThanArena);
        counters.passes = 3;
        assert_eq!(counters.cause(512, 1024), Cause::NeverReset { passes: 3 });
        (counters.passes, counters.phase) = (1, Phase::Optimizer);
        assert_eq!(counters.cause(512, 1024), Cause::WorkingSetLargerThanArena, "the pass has not ended yet");
        counters.reset();
        assert_eq!((counters.passes, counters.phase), (0, Phase::Forward));
    }

    #[test]
    fn sites_sort_and_phases_add_up() {
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

    #[test]
    fn peak_counts_simultaneous_use() {
        let peak = Peak::default();
        peak.step_has(100);
        peak.step_has(70);
        assert_eq!((peak.step_bytes(), peak.whole_bytes(0)), (100, 100));
        peak.captured_changes(0);
        assert_eq!(peak.whole_bytes(40), 100, "captured steps own 40 bytes, and no step ran while they did");
        peak.step_has(50);
        assert_eq!(peak.whole_bytes(40), 100);
        peak.step_has(90);
        assert_eq!((peak.step_bytes(), peak.whole_bytes(40)), (100, 130));
        peak.captured_changes(40);
        peak.step_has(10);
        assert_eq!((peak.step_bytes(), peak.whole_bytes(0)), (100, 130), "the captured steps were dropped");
    }
}
