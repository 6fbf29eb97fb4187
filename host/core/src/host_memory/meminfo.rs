//! The host's memory figures, as the kernel reports them.
//!
//! Invariant: a line that is missing, repeated or malformed is an error that quotes it, never a
//! guess.

#![forbid(unsafe_code)]
#![expect(clippy::disallowed_methods, reason = "reads the kernel's own files, which end")]

use serde::{Deserialize, Serialize};

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
    /// Reads the host's figures from `/proc/meminfo`. None off Linux, where there is no such file,
    /// and if it cannot be read, after a warning. Admission then uses only the driver's figure,
    /// which on GB10 is the smaller one.
    pub fn read() -> Option<Self> {
        if !cfg!(target_os = "linux") {
            return None;
        }
        let read = std::fs::read_to_string("/proc/meminfo").map_err(|error| format!("/proc/meminfo: {error}"));
        match read.and_then(|text| Self::parse(&text)) {
            Ok(host) => Some(host),
            Err(reason) => {
                tracing::warn!(reason, "the host's memory is unknown: admission uses only the driver's free bytes");
                None
            }
        }
    }

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
    digits.parse::<u64>().ok().and_then(|kib| kib.checked_mul(1024)).ok_or_else(too_large)
}

#[cfg(test)]
mod tests {
    use super::super::testdata::{FRESH_BOOT, PAGE_CACHE, SWAPPING};
    use super::*;
    use proptest::prelude::*;

    const KIB: u64 = 1 << 10;

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
        let host = MemInfo::read();
        assert_eq!(host.is_some(), cfg!(target_os = "linux"));
        assert!(host.is_none_or(|host| host.available_bytes > 0 && host.free_bytes > 0), "{host:?}");
    }

    proptest! {
        #[test]
        fn meminfo_parses_its_own_format(free in 0..1u64 << 53, available in 0..1u64 << 53) {
            let text = format!("MemTotal: 1 kB\nMemFree:{free:>16} kB\nMemAvailable: {available} kB\nSwapFree: 9 kB\n");
            let expected = MemInfo { free_bytes: free * KIB, available_bytes: available * KIB };
            prop_assert_eq!(MemInfo::parse(&text), Ok(expected));
        }

        #[test]
        fn any_text_parses_or_is_refused(text: String) {
            let _ = MemInfo::parse(&text);
        }
    }
}
