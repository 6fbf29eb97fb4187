//! The counts of an arena's tensors: by line, by phase, and in total.
//!
//! Invariant: counting costs a few nanoseconds, and allocates only for a new call site. Nothing
//! here accesses a device.

#![forbid(unsafe_code)]

use crate::report::{ArenaReport, Cause, Count, Largest, OverflowReport, Phase, Site, SystemMemory};
use cuda_std::float_mode;
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
        assert_eq!(counters.cause(512, 1024), Cause::WorkingSetLargerThanArena, "the pass is not over yet");
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
}
