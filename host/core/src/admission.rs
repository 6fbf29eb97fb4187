//! Admission: decides whether a request for device memory may be made at all.
//!
//! If CPU and GPU share one memory, requesting memory that does not exist stalls the machine. The
//! request enters the kernel, which reclaims and swaps until it can be met. Admission therefore
//! decides beforehand, only from figures. Invariant: no request above
//! [`MemoryBudget::available_bytes`] is admitted, whatever the figures are.
#![forbid(unsafe_code)]
#![expect(clippy::disallowed_methods, reason = "reads the kernel's own files, which end")]

use crate::cgroup::CgroupMemory;
use cuda_std::float_mode;
use serde::{Deserialize, Serialize};
use std::fmt;

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

/// The host's memory figures: the two lines of `/proc/meminfo` that admission needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemInfo {
    /// `MemFree`: bytes that nothing uses at all.
    pub free_bytes: u64,
    /// `MemAvailable`: the kernel's estimate of the bytes available without swapping, after it
    /// drops page cache.
    pub available_bytes: u64,
}

impl MemInfo {
    /// Parses the text of `/proc/meminfo`.
    ///
    /// # Errors
    /// Quotes a line that is missing, appears twice or is not `Name: <digits> kB`.
    pub fn parse(text: &str) -> Result<Self, String> {
        Ok(Self { free_bytes: field(text, "MemFree")?, available_bytes: field(text, "MemAvailable")? })
    }

    /// Returns the bytes that the kernel would have to take from the page cache before a process
    /// could have them. MemAvailable excludes the kernel's own low-water marks, so on an idle host
    /// it can be below MemFree. The result is zero then.
    pub fn reclaimable_bytes(&self) -> u64 {
        self.available_bytes.saturating_sub(self.free_bytes)
    }
}

fn field(text: &str, name: &str) -> Result<u64, String> {
    bytes_of_line(text, name).map_err(|reason| format!("/proc/meminfo: {reason}"))
}

/// Returns the bytes that the line `name: <digits> kB` of a `/proc` file states. The kernel's `kB`
/// is 1024 bytes.
pub(crate) fn bytes_of_line(text: &str, name: &str) -> Result<u64, String> {
    let mut lines =
        text.lines().filter_map(|line| Some((line, line.split_once(':').filter(|(key, _)| *key == name)?.1)));
    let (line, value) = lines.next().ok_or_else(|| format!("no line `{name}:`"))?;
    if let Some((again, _)) = lines.next() {
        return Err(format!("a second line `{again}` after `{line}`"));
    }
    let malformed = || format!("expected `{name}: <digits> kB`, got `{line}`");
    let digits = value.trim_start().strip_suffix(" kB").ok_or_else(malformed)?;
    if digits.is_empty() || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
        return Err(malformed());
    }
    let too_large = || format!("more than 2^64 bytes in `{line}`");
    digits.parse::<u64>().ok().and_then(|kib| kib.checked_mul(KIB)).ok_or_else(too_large)
}

/// The figures that decide whether device memory may be requested. Nothing here reads a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct MemoryBudget {
    /// True if CPU and GPU share one memory, as on GB10.
    pub integrated: bool,
    /// The bytes that the driver reports as free (`cuMemGetInfo`).
    pub driver_free_bytes: u64,
    /// The total bytes that the driver reports (`cuMemGetInfo`).
    pub driver_total_bytes: u64,
    /// The host's own figures. See [`MemoryBudget::read_host`].
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
    /// Reads the host's figures from `/proc/meminfo`. None off Linux, where there is no such file,
    /// and if it cannot be read, after a warning. Admission then uses only the driver's figure,
    /// which on GB10 is the smaller one.
    pub fn read_host() -> Option<MemInfo> {
        if !cfg!(target_os = "linux") {
            return None;
        }
        let read = std::fs::read_to_string("/proc/meminfo").map_err(|error| format!("/proc/meminfo: {error}"));
        match read.and_then(|text| MemInfo::parse(&text)) {
            Ok(host) => Some(host),
            Err(reason) => {
                tracing::warn!(reason, "the host's memory is unknown: admission uses only the driver's free bytes");
                None
            }
        }
    }

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

/// A number of bytes, shown in readable and in exact form.
pub(crate) struct Size(pub(crate) u64);

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mib = float_mode::in_default(|| self.0 as f64 / MIB as f64);
        write!(f, "{mib:.1} MiB ({} bytes)", self.0)
    }
}

/// The environment variable that sets the capacity of an arena. See [`arena_bytes_from_env`].
pub(crate) const ARENA_VARIABLE: &str = "STEPSCOPE_ARENA_GB";

/// Parses the value of `STEPSCOPE_ARENA_GB` into bytes. The value is a plain decimal number of GiB
/// (2^30 bytes), such as `4` or `0.5`. Fractions of a byte are dropped. An unset variable (`None`)
/// requests nothing.
///
/// # Errors
/// Quotes any other value, a value below one byte, or one above this machine's address space.
pub(crate) fn arena_bytes_from_env(value: Option<&str>) -> Result<Option<usize>, String> {
    let Some(value) = value else { return Ok(None) };
    let refuse = |why: &str| format!("`{}`, which is {why}", value.escape_debug());
    // Accepts only plain decimal notation: no sign, no exponent, no `inf`, no `nan`, no blanks.
    let (whole, fraction) = value.split_once('.').unwrap_or((value, "0"));
    let decimal = |part: &str| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit());
    if !decimal(whole) || !decimal(fraction) {
        return Err(refuse("not a positive decimal number"));
    }
    let bytes = float_mode::in_default(|| value.parse::<f64>().map(|gib| gib * GIB as f64));
    let bytes = bytes.map_err(|_| refuse("not a positive decimal number"))?;
    if bytes >= isize::MAX as f64 {
        return Err(refuse("more than this machine can address"));
    }
    if bytes < 1.0 {
        return Err(refuse("less than one byte"));
    }
    Ok(Some(bytes as usize))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    // Written by hand in the form that /proc/meminfo has on a GB10 with 128 GB, of which Linux sees
    // 121.69 GiB.
    const FRESH_BOOT: &str = include_str!("testdata/gb10_fresh_boot.meminfo");
    const PAGE_CACHE: &str = include_str!("testdata/gb10_page_cache.meminfo");
    const SWAPPING: &str = include_str!("testdata/gb10_swapping.meminfo");
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
    fn reads_gb10_memory_figures() {
        for (text, free_kib, available_kib) in [
            (FRESH_BOOT, 121_034_668, 123_310_720),
            (PAGE_CACHE, 22_764_896, 118_466_532),
            (SWAPPING, 612_340, 1_486_204),
        ] {
            let expected = MemInfo { free_bytes: free_kib * KIB, available_bytes: available_kib * KIB };
            assert_eq!(MemInfo::parse(text), Ok(expected));
        }
    }

    #[test]
    fn page_cache_counts_as_available() {
        let fresh = gb10(MemInfo::parse(FRESH_BOOT).unwrap());
        let cached = gb10(MemInfo::parse(PAGE_CACHE).unwrap());
        let swapping = gb10(MemInfo::parse(SWAPPING).unwrap());
        assert_eq!(fresh.available_bytes(), 123_310_720 * KIB - 2 * GIB);
        assert_eq!(cached.available_bytes(), 118_466_532 * KIB - 2 * GIB);
        assert_eq!(swapping.available_bytes(), 0, "1.4 GiB are left, less than the reserve");
        assert_eq!(cached.admit(64 * GIB), Ok(()), "64 GiB are there, though only 21.7 GiB are free");
        assert!(swapping.admit(48 << 10).is_err(), "48 KiB are refused rather than got by swapping");
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
        assert_eq!(discrete.available_bytes(), 28 * GIB, "the host's memory is not the card's");
    }

    #[test]
    fn malformed_lines_are_quoted() {
        let good = "MemFree:  100 kB\nMemAvailable:  200 kB\n";
        assert!(MemInfo::parse(good).is_ok());
        for (from, to, quoted) in [
            ("MemFree:  100 kB\n", "", "no line `MemFree:`"),
            ("MemAvailable:  200 kB\n", "", "no line `MemAvailable:`"),
            ("100 kB", "100 MB", "`MemFree:  100 MB`"),
            ("100 kB", "100", "`MemFree:  100`"),
            ("100 kB", "-100 kB", "`MemFree:  -100 kB`"),
            ("100 kB", "1.5 kB", "`MemFree:  1.5 kB`"),
            ("100 kB", "+100 kB", "`MemFree:  +100 kB`"),
            ("100 kB", " kB", "`MemFree:   kB`"),
            ("100 kB", "18014398509481984 kB", "`MemFree:  18014398509481984 kB`"),
            ("100 kB", "99999999999999999999 kB", "`MemFree:  99999999999999999999 kB`"),
            ("100 kB\n", "100 kB\nMemFree: 7 kB\n", "a second line `MemFree: 7 kB`"),
        ] {
            let text = good.replace(from, to);
            let error = MemInfo::parse(&text).expect_err(&text);
            assert!(error.contains(quoted), "{error:?} does not quote {quoted:?}");
        }
    }

    #[test]
    fn reads_this_host() {
        let host = MemoryBudget::read_host();
        assert_eq!(host.is_some(), cfg!(target_os = "linux"));
        assert!(host.is_none_or(|host| host.available_bytes > 0 && host.free_bytes > 0), "{host:?}");
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

    #[test]
    fn the_environment_gives_decimal_gib() {
        for (value, bytes) in [("4", 4 << 30), ("0.5", 1 << 29), ("007.25", 29 << 28), ("64", 64 << 30)] {
            assert_eq!(arena_bytes_from_env(Some(value)), Ok(Some(bytes)), "{value}");
        }
        assert_eq!(arena_bytes_from_env(None), Ok(None));
    }

    #[test]
    fn a_malformed_environment_is_quoted() {
        let words = "4GB four -1 +1 1e3 nan NaN inf .5 5. . 1.2.3 1,5 0x10 0 0.0 0.0000000001 8589934592";
        for value in words.split(' ').chain(["", " ", "4 ", " 4", "4\n"]) {
            let error = arena_bytes_from_env(Some(value)).expect_err(value);
            assert!(error.contains(&format!("`{}`", value.escape_debug())), "{error:?} does not quote {value:?}");
        }
        let long = "9".repeat(400);
        assert!(arena_bytes_from_env(Some(&long)).is_err(), "a number that f64 rounds to infinity");
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

        #[test]
        fn meminfo_parses_its_own_format(free in 0..1u64 << 53, available in 0..1u64 << 53) {
            let text = format!("MemTotal: 1 kB\nMemFree:{free:>16} kB\nMemAvailable: {available} kB\nSwapFree: 9 kB\n");
            let expected = MemInfo { free_bytes: free * KIB, available_bytes: available * KIB };
            prop_assert_eq!(MemInfo::parse(&text), Ok(expected));
        }

        #[test]
        fn any_text_parses_or_is_refused(text: String) {
            let _ = MemInfo::parse(&text);
            if let Ok(Some(bytes)) = arena_bytes_from_env(Some(&text)) {
                prop_assert!(bytes > 0);
            }
        }
    }
}
