//! Whether the host has so little memory left that a run should end before the kernel ends it.
//!
//! Plain figures and one rule: [`HostMemory::shortage`]. Invariant: the figures that decided are those that are told.
#![forbid(unsafe_code)]
#![expect(clippy::disallowed_methods, reason = "reads the kernel's own files, which end")]

use crate::admission::{MemInfo, Situation, Size, bytes_of_line};
use crate::cgroup::{CgroupMemory, Cgroups};
use cuda_std::float_mode;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::fs;
use std::path::Path;

/// The share of a memory cgroup's limit that stays free at most: a floor for a whole machine may be more than a small container has.
const CGROUP_SHARE: u64 = 32;

/// What the host has for this process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct HostMemory {
    /// The host's figures.
    pub host: Option<MemInfo>,
    /// The memory cgroup that leaves this process least, if one limits it.
    pub cgroup: Option<CgroupMemory>,
    /// Of the last ten seconds, the share in percent in which a process of the host waited for memory, where the kernel tells (`some avg10` of
    /// `/proc/pressure/memory`).
    pub stalled_percent: Option<f32>,
}

impl HostMemory {
    /// Now.
    pub(crate) fn read(cgroups: &Cgroups) -> Self {
        let pressure = fs::read_to_string("/proc/pressure/memory").ok();
        Self {
            host: Situation::read_host(),
            cgroup: cgroups.tightest(),
            stalled_percent: pressure.as_deref().and_then(stalled_percent),
        }
    }

    /// The bytes that the host, or this process's cgroup, has available now: the largest number
    /// where the system does not tell.
    pub fn available_bytes() -> u64 {
        Self::read(&Cgroups::find(Path::new("/"))).above(0)
    }

    /// The floor of a cgroup, where that of the machine is `floor_bytes`.
    fn floor_of(cgroup: CgroupMemory, floor_bytes: u64) -> u64 {
        floor_bytes.min(cgroup.limit_bytes / CGROUP_SHARE)
    }

    /// What all others leave to this process, which has `resident_bytes`: page cache that is still to be written is not theirs.
    pub(crate) fn left_by_others(&self, resident_bytes: u64) -> Option<u64> {
        let of_host = self.host.map(|host| host.available_bytes);
        let of_cgroup = self.cgroup.map(|cgroup| cgroup.available_bytes().saturating_add(cgroup.dirty_bytes));
        Some(of_host.into_iter().chain(of_cgroup).min()?.saturating_add(resident_bytes))
    }

    /// What is left above the floor: the host's available memory less `floor_bytes`, or the cgroup's less its floor, the smaller one.
    pub(crate) fn above(&self, floor_bytes: u64) -> u64 {
        let of_host = self.host.map(|host| host.available_bytes.saturating_sub(floor_bytes));
        let of_cgroup =
            self.cgroup.map(|cgroup| cgroup.available_bytes().saturating_sub(Self::floor_of(cgroup, floor_bytes)));
        of_host.into_iter().chain(of_cgroup).min().unwrap_or(u64::MAX)
    }

    /// The shortage, if less than `floor_bytes` is available.
    pub fn shortage(&self, floor_bytes: u64) -> Option<MemoryShortage> {
        self.shortage_for(floor_bytes, [0, 0])
    }

    /// The shortage, if less than `floor_bytes` would be available once so many more bytes are taken, by the run and by others.
    pub(crate) fn shortage_for(
        &self,
        floor_bytes: u64,
        [still_wanted_bytes, others_take_bytes]: [u64; 2],
    ) -> Option<MemoryShortage> {
        let taken = still_wanted_bytes.saturating_add(others_take_bytes);
        let short =
            |available: u64, floor: u64| (available < floor.saturating_add(taken)).then_some((available, floor));
        let of_cgroup = |cgroup: CgroupMemory| short(cgroup.available_bytes(), Self::floor_of(cgroup, floor_bytes));
        let cgroup = self.cgroup.and_then(of_cgroup);
        let found = cgroup.or_else(|| self.host.and_then(|host| short(host.available_bytes, floor_bytes)));
        found.map(|(available_bytes, floor_bytes)| MemoryShortage {
            rank: None,
            available_bytes,
            floor_bytes,
            still_wanted_bytes,
            others_take_bytes,
            of_cgroup: cgroup.is_some(),
            memory: *self,
        })
    }
}

/// What this process has of the host's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessMemory {
    /// Now (`VmRSS`).
    pub resident_bytes: u64,
    /// At most so far (`VmHWM`).
    pub peak_bytes: u64,
}

impl ProcessMemory {
    /// From `/proc/self/status`; none where that is not to be had.
    pub fn read() -> Option<Self> {
        let status = fs::read_to_string("/proc/self/status").ok()?;
        let line = |name| bytes_of_line(&status, name).ok();
        Some(Self { resident_bytes: line("VmRSS")?, peak_bytes: line("VmHWM")? })
    }
}

/// The memory that a run takes of the host, as it stands behind the first update, and what is to come. See [`Trainer::memory_forecast`](crate::Trainer::memory_forecast).
///
/// The emulator's device memory is the process's own, and the system backs it page by page as it is touched: all of it counts, as on a GPU. A
/// GPU's memory is taken whole by then, and no part of these figures.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct MemoryForecast {
    /// What the process has.
    pub process: ProcessMemory,
    /// What the system has still to back: of the emulator's device memory, and of slots for uploads that have not been needed yet.
    pub unbacked_bytes: u64,
    /// What a checkpoint takes while it is written, where there is a path for one.
    pub checkpoint_bytes: u64,
}

impl MemoryForecast {
    /// The most that the process will have.
    #[must_use]
    pub fn peak_bytes(&self) -> u64 {
        self.process.peak_bytes.max(self.process.resident_bytes + self.still_wanted_bytes())
    }

    /// What it will have beyond what it has.
    #[must_use]
    pub fn still_wanted_bytes(&self) -> u64 {
        self.unbacked_bytes + self.checkpoint_bytes
    }
}

/// The percentage that a text as of `/proc/pressure/memory` gives.
fn stalled_percent(text: &str) -> Option<f32> {
    let some = text.lines().find_map(|line| line.strip_prefix("some "))?;
    let percent = some.split(' ').find_map(|word| word.strip_prefix("avg10="))?;
    let percent = float_mode::in_default(|| percent.parse::<f32>()).ok()?;
    percent.is_finite().then_some(percent)
}

/// Memory is short: less is available than the floor of an arena.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct MemoryShortage {
    /// In a group whose ranks have all ended together, the one whose memory is short.
    pub rank: Option<usize>,
    /// What is available.
    pub available_bytes: u64,
    /// What should be.
    pub floor_bytes: u64,
    /// What the run will still take beyond what it has, by its [`MemoryForecast`](crate::MemoryForecast); 0 where less than the floor is available already.
    pub still_wanted_bytes: u64,
    /// What others will take until the next steps are done, if they go on as fast as they take now.
    pub others_take_bytes: u64,
    /// Whether both are the cgroup's, and not the host's.
    pub of_cgroup: bool,
    /// All figures.
    pub memory: HostMemory,
}

impl fmt::Display for MemoryShortage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { rank, available_bytes, floor_bytes, still_wanted_bytes, others_take_bytes, of_cgroup, memory } =
            self;
        if let Some(rank) = rank {
            write!(f, "rank {rank}: ")?;
        }
        let whose = if *of_cgroup { "this process's memory cgroup" } else { "the host" };
        write!(f, "{whose} has {} available, less than the floor of {}", Size(*available_bytes), Size(*floor_bytes))?;
        if *still_wanted_bytes > 0 {
            write!(f, " and the {} that this run will still take", Size(*still_wanted_bytes))?;
        }
        if *others_take_bytes > 0 {
            write!(
                f,
                " and the {} that others take until a step is done, as fast as they take now",
                Size(*others_take_bytes)
            )?;
        }
        if let Some(host) = memory.host {
            write!(f, ": MemFree {}, MemAvailable {}", Size(host.free_bytes), Size(host.available_bytes))?;
        }
        if let Some(cgroup) = memory.cgroup {
            write!(f, ", the cgroup's limit {}, in use {}", Size(cgroup.limit_bytes), Size(cgroup.used_bytes))?;
        }
        if let Some(percent) = memory.stalled_percent {
            write!(f, "; in {percent} % of the last 10 s a process waited for memory")?;
        }
        let whose = if *of_cgroup { "raise the cgroup's limit, use a smaller arena" } else { "end other processes" };
        write!(
            f,
            ". No step begins, so that the kernel need not end the process: {whose}, or lower the floor (`memory_floor`)"
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn memory(available_mib: u64, cgroup: Option<(u64, u64)>) -> HostMemory {
        let host = Some(MemInfo { free_bytes: MIB, available_bytes: available_mib * MIB });
        let cgroup = cgroup.map(|(limit, used)| CgroupMemory {
            version: 2,
            limit_bytes: limit * MIB,
            used_bytes: used * MIB,
            dirty_bytes: 0,
        });
        HostMemory { host, cgroup, stalled_percent: Some(12.5) }
    }

    #[test]
    fn the_host_is_short_below_its_floor_and_not_at_it() {
        assert_eq!(memory(512, None).shortage(512 * MIB), None);
        let shortage = memory(511, None).shortage(512 * MIB).unwrap();
        assert_eq!((shortage.available_bytes, shortage.of_cgroup), (511 * MIB, false));
        let text = shortage.to_string();
        for figure in ["511.0 MiB", "512.0 MiB", "MemFree 1.0 MiB", "12.5 % of the last 10 s", "memory_floor"] {
            assert!(text.contains(figure), "{figure}: {text}");
        }
        assert_eq!(memory(511, None).shortage(0), None, "no floor");
        assert_eq!(memory(512, None).shortage_for(500 * MIB, [5 * MIB, 7 * MIB]), None);
        let text = memory(512, None).shortage_for(500 * MIB, [5 * MIB, 8 * MIB]).unwrap().to_string();
        for part in
            ["the floor of 500.0 MiB", "5.0 MiB (5242880 bytes) that this run", "8.0 MiB (8388608 bytes) that others"]
        {
            assert!(text.contains(part), "{part}: {text}");
        }
        assert_eq!(HostMemory::default().shortage(u64::MAX), None, "nobody tells");
    }

    #[test]
    fn a_small_cgroup_has_a_small_floor() {
        // A thirty-second of 320 MiB.
        assert_eq!(memory(90_000, Some((320, 310))).shortage(1024 * MIB), None);
        let shortage = memory(90_000, Some((320, 311))).shortage(1024 * MIB).unwrap();
        assert_eq!((shortage.available_bytes, shortage.floor_bytes, shortage.of_cgroup), (9 * MIB, 10 * MIB, true));
        assert!(
            shortage.to_string().contains("the cgroup's limit 320.0 MiB") && shortage.to_string().contains("raise")
        );
        // A large one has that of the machine.
        assert_eq!(memory(90_000, Some((100_000, 98_976))).shortage(1024 * MIB), None);
        assert!(memory(90_000, Some((100_000, 98_977))).shortage(1024 * MIB).is_some());
    }

    #[test]
    fn what_is_left_is_the_smaller_of_both() {
        assert_eq!(memory(600, None).above(512 * MIB), 88 * MIB);
        assert_eq!(memory(600, Some((320, 300))).above(512 * MIB), 10 * MIB);
        assert_eq!(memory(600, Some((320, 400))).above(512 * MIB), 0);
        assert_eq!(HostMemory::default().above(7), u64::MAX);
    }

    #[test]
    fn what_others_leave_does_not_depend_on_what_this_process_has_or_writes() {
        let before = memory(600, Some((320, 200)));
        let mut after = memory(570, Some((320, 240)));
        after.cgroup.as_mut().unwrap().dirty_bytes = 10 * MIB;
        assert_eq!(before.left_by_others(50 * MIB), Some(170 * MIB));
        assert_eq!(after.left_by_others(80 * MIB), Some(170 * MIB), "30 MiB more of its own, 10 MiB to be written");
        assert_eq!(HostMemory::default().left_by_others(1), None);
    }

    #[test]
    fn pressure_is_read_or_unknown() {
        let text = "some avg10=3.25 avg60=1.00 avg300=0.00 total=12\nfull avg10=1.00 avg60=0.00 avg300=0.00 total=2\n";
        assert_eq!(stalled_percent(text), Some(3.25));
        for text in ["", "some", "some avg60=1", "some avg10=", "some avg10=NaN", "full avg10=1"] {
            assert_eq!(stalled_percent(text), None, "{text}");
        }
    }
}
