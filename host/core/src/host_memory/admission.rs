//! Admission: decides whether a request for device memory may be made at all.
//!
//! If CPU and GPU share one memory, requesting memory that does not exist stalls the machine. The
//! request enters the kernel, which reclaims and swaps until it can be met. Admission therefore
//! decides beforehand, only from figures. Invariant: no request above
//! [`MemoryBudget::available_bytes`] is admitted, whatever the figures are.

#![forbid(unsafe_code)]

use super::Size;
use super::cgroup::CgroupMemory;
use super::meminfo::MemInfo;
use serde::Serialize;
use std::fmt;

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

/// The smallest request that admission checks. Smaller requests are covered by the reserve.
pub(crate) const LEAST_ADMITTED_BYTES: usize = 1 << 20;

/// The figures that decide whether device memory may be requested.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct MemoryBudget {
    /// True if CPU and GPU share one memory, as on GB10.
    pub integrated: bool,
    /// The bytes that the driver reports as free (`cuMemGetInfo`).
    pub driver_free_bytes: u64,
    /// The total bytes that the driver reports (`cuMemGetInfo`).
    pub driver_total_bytes: u64,
    /// The host's own figures. See [`MemInfo::read`].
    pub host: Option<MemInfo>,
    /// The memory cgroup that limits the request. It applies only to the emulator, whose memory
    /// belongs to this process. Cgroups do not count the memory of a GPU's driver.
    pub cgroup: Option<CgroupMemory>,
    /// The device memory that the emulator has promised to this process and that is still
    /// untouched. It is still free, and must not be promised twice.
    pub promised_bytes: u64,
    /// The bytes that are left to everything else. The default is a sixteenth of the memory, and at
    /// most 2 GiB (256 MiB on a discrete GPU).
    pub reserve_bytes: u64,
}

impl MemoryBudget {
    /// Returns the bytes that may be requested.
    ///
    /// On an integrated GPU this is min(driver free + reclaimable, MemAvailable) - reserve. There,
    /// the driver's "free" is MemFree. On a GB10, both were 103.25 GiB before a file of 60 GiB was
    /// written and 41.52 GiB after. MemAvailable stayed at 115.8 GiB (measured in unslothai/unsloth
    /// pull request 10704). NVIDIA's list of issues of DGX Spark describes the same behavior of
    /// `cudaMemGetInfo`.
    ///
    /// The kernel gives up page cache on demand, hence reclaimable = MemAvailable - MemFree is
    /// added. MemAvailable bounds the sum, because the two sources are read one after the other and
    /// may disagree. Swap is never counted: getting memory by swapping is the stall to be avoided.
    ///
    /// On a discrete GPU it is driver free - reserve, and likewise on an integrated one whose host
    /// figures are unknown. If a cgroup counts, the result is at most what the cgroup has left,
    /// minus the reserve or a sixteenth of the limit, whichever is smaller. Memory that was
    /// promised before is subtracted.
    pub fn available_bytes(&self) -> u64 {
        let usable = match self.host {
            Some(host) if self.integrated => {
                self.driver_free_bytes.saturating_add(host.reclaimable_bytes()).min(host.available_bytes)
            }
            _ => self.driver_free_bytes,
        };
        let usable = usable.saturating_sub(self.reserve_bytes);
        let usable = self.cgroup.map_or(usable, |cgroup| usable.min(self.available_in(cgroup)));
        usable.saturating_sub(self.promised_bytes)
    }

    fn available_in(&self, cgroup: CgroupMemory) -> u64 {
        cgroup.available_bytes().saturating_sub(self.reserve_bytes.min(cgroup.limit_bytes / 16))
    }

    /// Returns the cgroup if it decides the result.
    fn deciding_cgroup(&self) -> Option<CgroupMemory> {
        self.cgroup
            .filter(|&cgroup| self.available_in(cgroup).saturating_sub(self.promised_bytes) == self.available_bytes())
    }

    /// Admits a request for `requested_bytes`.
    ///
    /// # Errors
    /// [`AdmissionError`] if they exceed [`MemoryBudget::available_bytes`].
    pub fn admit(&self, requested_bytes: u64) -> Result<(), AdmissionError> {
        let available_bytes = self.available_bytes();
        if requested_bytes <= available_bytes {
            return Ok(());
        }
        Err(AdmissionError { requested_bytes, available_bytes, situation: *self })
    }
}

/// Returns the default reserve: a sixteenth of the memory, up to a maximum. On an integrated GPU
/// the maximum is 2 GiB, which is reached at 32 GiB. There, the operating system, its page cache
/// and all other processes share the memory. On a discrete GPU the maximum is 256 MiB, for the
/// driver's contexts and modules.
pub(crate) fn default_reserve_bytes(integrated: bool, driver_total_bytes: u64) -> u64 {
    (driver_total_bytes / 16).min(if integrated { 2 * GIB } else { 256 * MIB })
}

/// A refused request for device memory, with every figure that decided it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct AdmissionError {
    /// The requested bytes.
    pub requested_bytes: u64,
    /// The bytes that could have been requested.
    pub available_bytes: u64,
    /// The figures that decided it.
    pub situation: MemoryBudget,
}

impl AdmissionError {
    /// Returns advice for these figures.
    fn advice(&self) -> &'static str {
        let MemoryBudget { integrated, driver_total_bytes, host, reserve_bytes, .. } = self.situation;
        if self.situation.deciding_cgroup().is_some() {
            return "raise the limit of the container, service or job that this process is in, or use a smaller arena or a smaller micro-batch";
        }
        if self.requested_bytes > driver_total_bytes.saturating_sub(reserve_bytes) {
            return "this device can never hold it: use a smaller arena or a smaller micro-batch, or lower the reserve";
        }
        match (integrated, host) {
            (true, Some(_)) => {
                "use a smaller arena or a smaller micro-batch, end other processes (CPU and GPU share this memory), or \
                 lower the reserve"
            }
            (true, None) => {
                "make /proc/meminfo readable, so that reclaimable page cache is counted, or drop the page cache \
                 (`sync; echo 1 > /proc/sys/vm/drop_caches` as root); else use a smaller arena or a smaller micro-batch"
            }
            (false, _) => {
                "use a smaller arena or a smaller micro-batch, end other processes on the GPU (`nvidia-smi` lists \
                 them), or lower the reserve"
            }
        }
    }
}

impl fmt::Display for AdmissionError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let MemoryBudget {
            integrated,
            driver_free_bytes,
            driver_total_bytes,
            host,
            cgroup,
            promised_bytes,
            reserve_bytes,
        } = self.situation;
        write!(
            f,
            "{} of device memory refused, {} available: the driver reports {} free of {}",
            Size(self.requested_bytes),
            Size(self.available_bytes),
            Size(driver_free_bytes),
            Size(driver_total_bytes)
        )?;
        match (integrated, host) {
            (true, Some(host)) => write!(
                f,
                ", the host reports MemFree {}, MemAvailable {}, hence reclaimable {}",
                Size(host.free_bytes),
                Size(host.available_bytes),
                Size(host.reclaimable_bytes())
            )?,
            (true, None) => f.write_str(", the host's figures are unknown")?,
            (false, _) => {}
        }
        if let Some(CgroupMemory { version, limit_bytes, used_bytes, .. }) = cgroup {
            let (limit, used) = (Size(limit_bytes), Size(used_bytes));
            write!(f, ", the memory cgroup (version {version}) reports limit {limit}, in use {used}")?;
        }
        if promised_bytes > 0 {
            write!(f, ", {} are already promised and still untouched", Size(promised_bytes))?;
        }
        write!(f, ", the reserve is {}; {}", Size(reserve_bytes), self.advice())
    }
}

impl std::error::Error for AdmissionError {}

#[cfg(test)]
mod tests {
    use super::super::testdata::{FRESH_BOOT, PAGE_CACHE, SWAPPING};
    use super::*;
    use proptest::prelude::*;

    const KIB: u64 = 1 << 10;
    const GB10_TOTAL: u64 = 127_601_452 * KIB;

    /// Returns the figures of a GB10, whose driver reports MemFree.
    fn gb10(host: MemInfo) -> MemoryBudget {
        MemoryBudget {
            integrated: true,
            driver_free_bytes: host.free_bytes,
            driver_total_bytes: GB10_TOTAL,
            host: Some(host),
            cgroup: None,
            promised_bytes: 0,
            reserve_bytes: default_reserve_bytes(true, GB10_TOTAL),
        }
    }

    fn gib(bytes: u64) -> f64 {
        bytes as f64 / GIB as f64
    }

    #[test]
    fn page_cache_counts_as_available() {
        let fresh = gb10(MemInfo::parse(FRESH_BOOT).unwrap());
        let cached = gb10(MemInfo::parse(PAGE_CACHE).unwrap());
        let swapping = gb10(MemInfo::parse(SWAPPING).unwrap());
        assert_eq!(fresh.available_bytes(), 123_310_720 * KIB - 2 * GIB);
        assert_eq!(cached.available_bytes(), 118_466_532 * KIB - 2 * GIB);
        assert_eq!(swapping.available_bytes(), 0, "1.4 GiB are less than the reserve");
        assert_eq!(cached.admit(64 * GIB), Ok(()), "64 GiB are available, of which only 21.7 GiB are free");
        assert!(swapping.admit(48 << 10).is_err(), "48 KiB must be refused, because they would be swapped");
    }

    /// Checks the figures measured on a GB10 around the writing of a 60 GiB file. See
    /// [`MemoryBudget::available_bytes`].
    #[test]
    fn file_writes_do_not_change_availability() {
        for (free, available) in [(103.25, 115.85), (41.52, 115.65), (103.30, 115.87)] {
            let bytes = |gib: f64| (gib * GIB as f64) as u64;
            let host = MemInfo { free_bytes: bytes(free), available_bytes: bytes(available) };
            let admitted = gib(gb10(host).available_bytes());
            assert!((admitted - (available - 2.0)).abs() < 0.01, "{admitted} GiB of {available}");
        }
    }

    #[test]
    fn smaller_driver_figure_wins() {
        let host = MemInfo { free_bytes: 20 * GIB, available_bytes: 50 * GIB };
        let situation = MemoryBudget { driver_free_bytes: 5 * GIB, reserve_bytes: GIB, ..gb10(host) };
        assert_eq!(situation.available_bytes(), (5 + 30 - 1) * GIB);
    }

    #[test]
    fn driver_decides_without_host_figures() {
        let host = MemInfo { free_bytes: 4 * GIB, available_bytes: 100 * GIB };
        let blind = MemoryBudget { host: None, ..gb10(host) };
        assert_eq!(blind.available_bytes(), 2 * GIB);
        let discrete = MemoryBudget { integrated: false, driver_free_bytes: 30 * GIB, ..gb10(host) };
        assert_eq!(discrete.available_bytes(), 28 * GIB, "only the card's own memory counts");
    }

    #[test]
    fn default_reserve_protects_the_host() {
        for (integrated, total, reserve) in [
            (true, 128 * GIB, 2 * GIB),
            (true, 32 * GIB, 2 * GIB),
            (true, 16 * GIB, GIB),
            (true, 0, 0),
            (false, 139 * GIB, 256 * MIB),
            (false, 2 * GIB, 128 * MIB),
        ] {
            assert_eq!(default_reserve_bytes(integrated, total), reserve, "{integrated} {total}");
        }
    }

    #[test]
    fn refusal_shows_figures_and_advice() {
        let situation = gb10(MemInfo::parse(SWAPPING).unwrap());
        let refusal = situation.admit(48 << 10).unwrap_err();
        assert_eq!(
            refusal.to_string(),
            "0.0 MiB (49152 bytes) of device memory refused, 0.0 MiB (0 bytes) available: the driver reports \
             598.0 MiB (627036160 bytes) free of 124610.8 MiB (130663886848 bytes), the host reports MemFree 598.0 MiB \
             (627036160 bytes), MemAvailable 1451.4 MiB (1521872896 bytes), hence reclaimable 853.4 MiB (894836736 \
             bytes), the reserve is 2048.0 MiB (2147483648 bytes); use a smaller arena or a smaller micro-batch, end \
             other processes (CPU and GPU share this memory), or lower the reserve"
        );
        let never = situation.admit(200 * GIB).unwrap_err().to_string();
        assert!(never.contains("can never hold it"), "{never}");
        let blind = MemoryBudget { host: None, ..situation }.admit(GIB).unwrap_err().to_string();
        assert!(blind.contains("the host's figures are unknown") && blind.contains("make /proc/meminfo"), "{blind}");
        let discrete = MemoryBudget { integrated: false, ..situation }.admit(GIB).unwrap_err().to_string();
        assert!(discrete.contains("nvidia-smi") && !discrete.contains("MemAvailable"), "{discrete}");
    }

    #[test]
    fn a_refusal_serializes_with_its_figures() {
        let refusal = gb10(MemInfo { free_bytes: 1, available_bytes: 2 }).admit(3).unwrap_err();
        let json = serde_json::to_value(&refusal).unwrap();
        assert_eq!(json["requested_bytes"], 3);
        assert_eq!(json["situation"]["host"]["available_bytes"], 2);
    }

    /// Generates small and extreme figures.
    fn figure() -> impl Strategy<Value = u64> {
        prop_oneof![any::<u64>(), 0..64u64, (0..64u64).prop_map(|below| u64::MAX - below), (0..200 * GIB)]
    }

    prop_compose! {
        fn situation()(
            integrated: bool,
            driver_free_bytes in figure(),
            driver_total_bytes in figure(),
            host in prop::option::of((figure(), figure())),
            cgroup in prop::option::of((figure(), figure())),
            promised_bytes in figure(),
            reserve_bytes in figure(),
        ) -> MemoryBudget {
            let host = host.map(|(free_bytes, available_bytes)| MemInfo { free_bytes, available_bytes });
            let cgroup = cgroup.map(|(limit_bytes, used_bytes)| CgroupMemory { version: 2, limit_bytes, used_bytes, dirty_bytes: 0 });
            MemoryBudget { integrated, driver_free_bytes, driver_total_bytes, host, cgroup, promised_bytes, reserve_bytes }
        }
    }

    proptest! {
        #[test]
        fn never_admits_more_than_is_available(situation in situation(), requested in figure()) {
            // The documented formula in wider numbers, where nothing can overflow.
            let wide = |bytes: u64| i128::from(bytes);
            let usable = match situation.host.filter(|_| situation.integrated) {
                None => wide(situation.driver_free_bytes),
                Some(host) => {
                    let reclaimable = (wide(host.available_bytes) - wide(host.free_bytes)).max(0);
                    (wide(situation.driver_free_bytes) + reclaimable).min(wide(host.available_bytes))
                }
            };
            let mut available = (usable - wide(situation.reserve_bytes)).max(0);
            if let Some(CgroupMemory { limit_bytes, used_bytes, .. }) = situation.cgroup {
                let left = (wide(limit_bytes) - wide(used_bytes)).max(0);
                available = available.min((left - wide(situation.reserve_bytes).min(wide(limit_bytes) / 16)).max(0));
            }
            let available = (available - wide(situation.promised_bytes)).max(0);
            prop_assert_eq!(wide(situation.available_bytes()), available);
            prop_assert_eq!(situation.admit(requested).is_ok(), wide(requested) <= available);
            prop_assert_eq!(situation.admit(situation.available_bytes()), Ok(()));
            prop_assert!(situation.available_bytes().checked_add(1).is_none_or(|more| situation.admit(more).is_err()));
        }

        #[test]
        fn more_memory_never_admits_less(situation in situation(), more in figure()) {
            let available = situation.available_bytes();
            let driver_free_bytes = situation.driver_free_bytes.saturating_add(more);
            let roomier = MemoryBudget { driver_free_bytes, ..situation };
            prop_assert!(roomier.available_bytes() >= available);
            let tighter = MemoryBudget { reserve_bytes: situation.reserve_bytes.saturating_add(more), ..situation };
            prop_assert!(tighter.available_bytes() <= available);
            if let Some(host) = situation.host {
                let host = MemInfo { available_bytes: host.available_bytes.saturating_add(more), ..host };
                let roomier = MemoryBudget { host: Some(host), ..situation };
                prop_assert!(roomier.available_bytes() >= available);
            }
        }

        #[test]
        fn every_refusal_can_be_shown(situation in situation(), requested in figure()) {
            if let Err(refusal) = situation.admit(requested) {
                let text = refusal.to_string();
                let MemoryBudget { driver_free_bytes, driver_total_bytes, cgroup, promised_bytes, reserve_bytes, .. } = situation;
                let promised = (promised_bytes > 0).then_some(promised_bytes);
                let of_cgroup = cgroup.map_or([requested; 2], |cgroup| [cgroup.limit_bytes, cgroup.used_bytes]);
                for bytes in [requested, driver_free_bytes, driver_total_bytes, reserve_bytes].into_iter().chain(of_cgroup).chain(promised) {
                    let shown = text.contains(&format!("({bytes} bytes)"));
                    prop_assert!(shown, "{}: {}", bytes, text);
                }
            }
        }

    }
}
