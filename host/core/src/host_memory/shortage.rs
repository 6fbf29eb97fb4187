//! Checks whether the host has so little memory left that a run should end before the kernel kills
//! it.
//!
//! It has plain figures and one rule, [`HostMemory::shortage`]. Invariant: an error contains
//! exactly the figures that decided it.
#![forbid(unsafe_code)]
#![expect(clippy::disallowed_methods, reason = "reads the kernel's own files, which end")]

use super::Size;
use super::cgroup::{CgroupMemory, Cgroups};
use super::meminfo::{MemInfo, bytes_of_line};
use cuda_std::float_mode;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::fs;
use std::path::Path;

/// The divisor of a memory cgroup's limit that bounds its floor. The floor of a whole machine may
/// exceed all of a small container's memory.
const CGROUP_SHARE: u64 = 32;

/// The memory that the host has for this process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct HostMemory {
    /// The host's figures.
    pub host: Option<MemInfo>,
    /// The memory cgroup that leaves this process the least memory, if a cgroup limits it.
    pub cgroup: Option<CgroupMemory>,
    /// The percentage of the last ten seconds in which a process of the host waited for memory, if
    /// the kernel reports it (`some avg10` of `/proc/pressure/memory`).
    pub stalled_percent: Option<f32>,
}

impl HostMemory {
    /// Reads the current figures.
    pub(crate) fn read(cgroups: &Cgroups) -> Self {
        let pressure = fs::read_to_string("/proc/pressure/memory").ok();
        Self {
            host: MemInfo::read(),
            cgroup: cgroups.tightest(),
            stalled_percent: pressure.as_deref().and_then(stalled_percent),
        }
    }

    /// Returns the bytes that the host, or this process's cgroup, has available now. It is the
    /// largest number on systems that do not report it.
    pub fn available_bytes() -> u64 {
        Self::read(&Cgroups::find(Path::new("/"))).above(0)
    }

    /// Returns the floor of a cgroup, given the machine's floor.
    fn floor_of(cgroup: CgroupMemory, floor_bytes: u64) -> u64 {
        floor_bytes.min(cgroup.limit_bytes / CGROUP_SHARE)
    }

    /// Returns the memory that all other processes leave to this process, which has
    /// `resident_bytes`. Unwritten page cache does not count as theirs.
    pub(crate) fn left_by_others(&self, resident_bytes: u64) -> Option<u64> {
        let of_host = self.host.map(|host| host.available_bytes);
        let of_cgroup = self.cgroup.map(|cgroup| cgroup.available_bytes().saturating_add(cgroup.dirty_bytes));
        Some(of_host.into_iter().chain(of_cgroup).min()?.saturating_add(resident_bytes))
    }

    /// Returns the bytes above the floor. It is the smaller of two differences: the host's
    /// available memory minus `floor_bytes`, and the cgroup's minus its own floor.
    pub(crate) fn above(&self, floor_bytes: u64) -> u64 {
        let of_host = self.host.map(|host| host.available_bytes.saturating_sub(floor_bytes));
        let of_cgroup =
            self.cgroup.map(|cgroup| cgroup.available_bytes().saturating_sub(Self::floor_of(cgroup, floor_bytes)));
        of_host.into_iter().chain(of_cgroup).min().unwrap_or(u64::MAX)
    }

    /// Returns the shortage if less than `floor_bytes` is available.
    pub fn shortage(&self, floor_bytes: u64) -> Option<MemoryShortage> {
        self.shortage_for(floor_bytes, [0, 0])
    }

    /// Returns the shortage if less than `floor_bytes` would be available after the run and other
    /// processes have taken these further bytes.
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

/// The host memory of this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessMemory {
    /// The current resident bytes (`VmRSS`).
    pub resident_bytes: u64,
    /// The peak of resident bytes so far (`VmHWM`).
    pub peak_bytes: u64,
}

impl ProcessMemory {
    /// Reads `/proc/self/status`, or returns none if it is not available.
    pub fn read() -> Option<Self> {
        let status = fs::read_to_string("/proc/self/status").ok()?;
        let line = |name| bytes_of_line(&status, name).ok();
        Some(Self { resident_bytes: line("VmRSS")?, peak_bytes: line("VmHWM")? })
    }
}

/// The host memory that a run takes: its state after the first update, and the remaining demand.
/// See `Trainer::memory_forecast`.
///
/// The emulator's device memory belongs to the process, and the system backs it page by page as it
/// is touched. All of it counts, as on a GPU. A GPU's memory is fully allocated by then, and is not
/// part of these figures.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryForecast {
    /// The memory that the process has.
    pub process: ProcessMemory,
    /// The bytes that the system has yet to back: of the emulator's device memory, and of upload
    /// slots that have not been needed yet.
    pub unbacked_bytes: u64,
    /// The memory that writing a checkpoint takes, if a path is set.
    pub checkpoint_bytes: u64,
}

impl MemoryForecast {
    /// Returns the most memory that the process will have.
    #[must_use]
    pub fn peak_bytes(&self) -> u64 {
        self.process.peak_bytes.max(self.process.resident_bytes + self.still_wanted_bytes())
    }

    /// Returns the memory that the process will take in addition to its current memory.
    #[must_use]
    pub fn still_wanted_bytes(&self) -> u64 {
        self.unbacked_bytes + self.checkpoint_bytes
    }
}

/// Parses the percentage from a text in the format of `/proc/pressure/memory`.
fn stalled_percent(text: &str) -> Option<f32> {
    let some = text.lines().find_map(|line| line.strip_prefix("some "))?;
    let percent = some.split(' ').find_map(|word| word.strip_prefix("avg10="))?;
    let percent = float_mode::in_default(|| percent.parse::<f32>()).ok()?;
    percent.is_finite().then_some(percent)
}

/// A memory shortage: less memory is available than the floor of an arena.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MemoryShortage {
    /// The rank whose memory is short, in a group whose ranks have all ended together.
    pub rank: Option<usize>,
    /// The available bytes.
    pub available_bytes: u64,
    /// The bytes that should be available.
    pub floor_bytes: u64,
    /// The bytes that the run will still take, according to its
    /// [`MemoryForecast`](crate::MemoryForecast). It is 0 if less than the floor is already
    /// available.
    pub still_wanted_bytes: u64,
    /// The bytes that other processes will take until the next steps are done, at their current
    /// rate.
    pub others_take_bytes: u64,
    /// True if available memory and floor are the cgroup's, not the host's.
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
                " and the {} that other processes take until a step is done, at their current rate",
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
            ". No step begins, so that the kernel does not kill the process: {whose}, or lower the floor (`memory_floor`)"
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
    fn shortage_begins_below_the_floor() {
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
        for part in [
            "the floor of 500.0 MiB",
            "5.0 MiB (5242880 bytes) that this run",
            "8.0 MiB (8388608 bytes) that other processes",
        ] {
            assert!(text.contains(part), "{part}: {text}");
        }
        assert_eq!(HostMemory::default().shortage(u64::MAX), None, "unknown memory is no shortage");
    }

    #[test]
    fn small_cgroups_have_small_floors() {
        // A thirty-second of 320 MiB.
        assert_eq!(memory(90_000, Some((320, 310))).shortage(1024 * MIB), None);
        let shortage = memory(90_000, Some((320, 311))).shortage(1024 * MIB).unwrap();
        assert_eq!((shortage.available_bytes, shortage.floor_bytes, shortage.of_cgroup), (9 * MIB, 10 * MIB, true));
        assert!(
            shortage.to_string().contains("the cgroup's limit 320.0 MiB") && shortage.to_string().contains("raise")
        );
        // A large cgroup has the machine's floor.
        assert_eq!(memory(90_000, Some((100_000, 98_976))).shortage(1024 * MIB), None);
        assert!(memory(90_000, Some((100_000, 98_977))).shortage(1024 * MIB).is_some());
    }

    #[test]
    fn remainder_is_the_smaller_figure() {
        assert_eq!(memory(600, None).above(512 * MIB), 88 * MIB);
        assert_eq!(memory(600, Some((320, 300))).above(512 * MIB), 10 * MIB);
        assert_eq!(memory(600, Some((320, 400))).above(512 * MIB), 0);
        assert_eq!(HostMemory::default().above(7), u64::MAX);
    }

    #[test]
    fn own_memory_does_not_count_twice() {
        let before = memory(600, Some((320, 200)));
        let mut after = memory(570, Some((320, 240)));
        after.cgroup.as_mut().unwrap().dirty_bytes = 10 * MIB;
        assert_eq!(before.left_by_others(50 * MIB), Some(170 * MIB));
        assert_eq!(after.left_by_others(80 * MIB), Some(170 * MIB), "own growth and dirty pages must count");
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
