//! The host: memory, limits and relevant settings.

#![expect(clippy::disallowed_methods, reason = "reads the kernel's own files, which end")]

use rustix::process::{Resource, getrlimit, getuid};
use serde::{Deserialize, Serialize};
use std::fs;
use stepscope::memory::CgroupMemory;

#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct Host {
    pub architecture: Option<String>,
    pub kernel: Option<String>,
    /// The words with which the kernel was booted.
    pub command_line: Option<String>,
    pub user_id: Option<u32>,
    pub mem_total_bytes: Option<u64>,
    pub mem_free_bytes: Option<u64>,
    pub mem_available_bytes: Option<u64>,
    /// Memory that is reserved for large allocations without gaps, and its free part.
    pub cma_total_bytes: Option<u64>,
    pub cma_free_bytes: Option<u64>,
    pub dirty_bytes: Option<u64>,
    pub swap_total_bytes: Option<u64>,
    pub swap_free_bytes: Option<u64>,
    pub swappiness: Option<u32>,
    /// The share of the last ten seconds in which a process waited for memory.
    pub stalled_percent: Option<f64>,
    /// The cgroup with the least memory left; none without a limit.
    pub cgroup: Option<CgroupMemory>,
    /// The result of `ulimit -l`; the largest number for "unlimited".
    pub memlock_bytes: Option<u64>,
    /// The setting `RemoveIPC` in logind's files; none without logind.
    pub remove_ipc: Option<bool>,
}

impl Host {
    pub(crate) fn gather() -> Self {
        let text = |path: &str| fs::read_to_string(path).ok();
        let meminfo = text("/proc/meminfo").unwrap_or_default();
        let field = |name: &str| {
            let rest = meminfo.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
            rest.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
        };
        let pressure = text("/proc/pressure/memory").unwrap_or_default();
        let stalled = pressure.split_whitespace().find_map(|word| word.strip_prefix("avg10="));
        Self {
            architecture: Some(std::env::consts::ARCH.into()),
            kernel: text("/proc/sys/kernel/osrelease").map(|name| name.trim().into()),
            command_line: text("/proc/cmdline").map(|words| words.trim().into()),
            user_id: Some(getuid().as_raw()),
            mem_total_bytes: field("MemTotal"),
            mem_free_bytes: field("MemFree"),
            mem_available_bytes: field("MemAvailable"),
            cma_total_bytes: field("CmaTotal"),
            cma_free_bytes: field("CmaFree"),
            dirty_bytes: field("Dirty").zip(field("Writeback")).and_then(|(a, b)| a.checked_add(b)),
            swap_total_bytes: field("SwapTotal"),
            swap_free_bytes: field("SwapFree"),
            swappiness: text("/proc/sys/vm/swappiness").and_then(|value| value.trim().parse().ok()),
            stalled_percent: stalled.and_then(|value| value.parse().ok()),
            cgroup: CgroupMemory::read(),
            memlock_bytes: Some(getrlimit(Resource::Memlock).current.unwrap_or(u64::MAX)),
            remove_ipc: remove_ipc(),
        }
    }
}

/// Reads logind's files in systemd's order, in which the last setting wins. Defaults to `yes`.
fn remove_ipc() -> Option<bool> {
    fs::metadata("/run/systemd/seats").ok()?;
    let mut parts = Vec::new();
    for folder in ["/usr/lib/systemd/logind.conf.d", "/run/systemd/logind.conf.d", "/etc/systemd/logind.conf.d"] {
        parts.extend(fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path()));
    }
    parts.sort_by_key(|path| path.file_name().map(ToOwned::to_owned));
    let texts = std::iter::once("/etc/systemd/logind.conf".into())
        .chain(parts)
        .filter_map(|path| fs::read_to_string(path).ok());
    let lines = texts.flat_map(|text| text.lines().map(str::to_owned).collect::<Vec<_>>());
    let last = lines.filter_map(|line| Some(line.trim().strip_prefix("RemoveIPC=")?.trim().to_lowercase())).next_back();
    Some(!last.is_some_and(|value| matches!(value.as_str(), "no" | "false" | "0" | "off")))
}
