//! Checks of the host's memory, limits and disk.

use super::{Finding, gib, is_gb10, stops, unknown, warning, well};
use crate::doctor::facts::Facts;

const GIB: u64 = 1 << 30;
/// An arena's default floor.
const FLOOR_BYTES: u64 = GIB;
/// The amount of dirty page cache that delays allocations.
const MOST_DIRTY_BYTES: u64 = 4 * GIB;
/// Two checkpoints of a large model, with weights and moments.
const DISK_BYTES: u64 = 20 * GIB;

pub(super) fn memory_figures(facts: &Facts) -> Finding {
    match (facts.host.mem_total_bytes, facts.host.mem_free_bytes, facts.host.mem_available_bytes) {
        (Some(total), Some(free), Some(available)) if free <= total && available <= total => {
            well(format!("{} in all, MemFree {}, MemAvailable {}", gib(total), gib(free), gib(available)))
        }
        (Some(_), Some(_), Some(_)) => warning(
            "/proc/meminfo reports more free memory than there is",
            "admission control would use wrong figures",
            "run outside the container or program that replaces that file",
        ),
        _ => warning(
            "/proc/meminfo could not be read",
            "admission then counts only the driver's free memory, which page cache reduces",
            "let the container see /proc/meminfo",
        ),
    }
}

/// Kernels of NVIDIA's series 7.0 keep memory for a kernel that `kexec` starts, and count it as
/// free memory of a region of size zero.
pub(super) fn kernel_handover(facts: &Facts) -> Finding {
    let Some(kernel) = &facts.host.kernel else { return unknown(facts.why_unknown("host")) };
    let is_affected = kernel.starts_with("7.0.0-") && kernel.contains("nvidia");
    let words = facts.host.command_line.as_deref().unwrap_or_default();
    if !is_affected || words.split_whitespace().any(|word| word == "kho=off") {
        return well(format!("kernel {kernel}"));
    }
    match (facts.host.cma_total_bytes, facts.host.cma_free_bytes) {
        (Some(0), Some(free)) if free > 0 => warning(
            format!("kernel {kernel} reports CmaTotal 0 and CmaFree {}", gib(free)),
            "this kernel keeps memory for a successor (kexec handover): MemFree lacks up to 26 GiB, and NCCL between two machines fails, because ibv_reg_mr returns ENOMEM",
            "add `kho=off` to the kernel's command line and reboot, or boot kernel 6.17",
        ),
        (Some(total), Some(_)) => well(format!("kernel {kernel}, CmaTotal {}", gib(total))),
        _ => unknown("/proc/meminfo has no CmaTotal"),
    }
}

pub(super) fn memory_available(facts: &Facts) -> Finding {
    match facts.host.mem_available_bytes {
        None => unknown(facts.why_unknown("host")),
        Some(bytes) if bytes < FLOOR_BYTES => stops(
            format!("MemAvailable is {}", gib(bytes)),
            "below its floor of 1 GiB an arena starts no step, since less could freeze a GB10",
            "end other programs",
        ),
        Some(bytes) => well(format!("MemAvailable is {}", gib(bytes))),
    }
}

pub(super) fn page_cache(facts: &Facts) -> Finding {
    let (Some(free), Some(available)) = (facts.host.mem_free_bytes, facts.host.mem_available_bytes) else {
        return unknown(facts.why_unknown("host"));
    };
    let figures = match facts.load.driver_free_bytes {
        Some(driver) => format!("MemFree {}, MemAvailable {}, the driver {}", gib(free), gib(available), gib(driver)),
        None => format!("MemFree {}, MemAvailable {}", gib(free), gib(available)),
    };
    if is_gb10(facts) && free < available / 2 {
        return warning(
            figures,
            "the driver's free memory is the kernel's MemFree, without page cache: programs that rely on it refuse to start; this library does not",
            "nothing for this library; for other programs, drop the caches as root",
        );
    }
    well(figures)
}

pub(super) fn dirty_pages(facts: &Facts) -> Finding {
    match facts.host.dirty_bytes {
        None => unknown(facts.why_unknown("host")),
        Some(bytes) if bytes > MOST_DIRTY_BYTES => warning(
            format!("{} of page cache waits to be written", gib(bytes)),
            "the kernel must write it to disk before freeing it, and allocations wait meanwhile",
            "run `sync` and wait until it ends",
        ),
        Some(bytes) => well(format!("{} of page cache waits to be written", gib(bytes))),
    }
}

pub(super) fn memory_pressure(facts: &Facts) -> Finding {
    match facts.host.stalled_percent {
        None => unknown("/proc/pressure/memory could not be read"),
        Some(percent) if percent > 10.0 => warning(
            format!("in {percent} % of the last 10 s a process waited for memory"),
            "the machine is already short of memory; a step could stall it",
            "end the program that uses it",
        ),
        Some(percent) => well(format!("in {percent} % of the last 10 s a process waited for memory")),
    }
}

pub(super) fn cgroup(facts: &Facts) -> Finding {
    let Some(cgroup) = facts.host.cgroup else {
        return well("no memory cgroup limits this process, or none could be read");
    };
    let available = cgroup.available_bytes();
    let what = format!("the memory cgroup has {} left of {}", gib(available), gib(cgroup.limit_bytes));
    let why = "the kernel kills processes of a cgroup at its limit, even if the host has free memory; CUDA memory does not count";
    if available < (FLOOR_BYTES).min(cgroup.limit_bytes / 32) {
        return stops(what, why, "raise the limit of the container or service");
    }
    if facts.host.mem_total_bytes.is_some_and(|total| cgroup.limit_bytes < total / 4) {
        return warning(what, why, "raise the limit, or keep data and loaders small");
    }
    well(what)
}

pub(super) fn swap_in_use(facts: &Facts) -> Finding {
    let (Some(total), Some(free)) = (facts.host.swap_total_bytes, facts.host.swap_free_bytes) else {
        return unknown(facts.why_unknown("host"));
    };
    let used = total.saturating_sub(free);
    if used > GIB {
        return warning(
            format!("{} of swap are in use", gib(used)),
            "the machine is out of memory; swapped memory returns page by page",
            "end other programs, then `swapoff -a` as root",
        );
    }
    well(format!("{} of {} of swap are in use", gib(used), gib(total)))
}

pub(super) fn swappiness(facts: &Facts) -> Finding {
    match (facts.host.swap_total_bytes, facts.host.swappiness) {
        (Some(0), _) => well("no swap"),
        (_, None) | (None, _) => unknown(facts.why_unknown("host")),
        (Some(_), Some(value)) if is_gb10(facts) && value > 1 => warning(
            format!("swap is on, and vm.swappiness is {value}"),
            "if CPU and GPU share memory, swap turns a shortage into a stall",
            "`swapoff -a`, or `sysctl vm.swappiness=1`, as root",
        ),
        (Some(_), Some(value)) => well(format!("swap is on, and vm.swappiness is {value}")),
    }
}

pub(super) fn locked_memory(facts: &Facts) -> Finding {
    let Some(bytes) = facts.host.memlock_bytes else { return unknown(facts.why_unknown("host")) };
    let rdma = facts.network.cards.iter().flatten().any(|card| card.rdma && card.up);
    if rdma && bytes < GIB {
        return warning(
            format!("`ulimit -l` is {} MiB", bytes >> 20),
            "RDMA cards register locked memory; without it, NCCL between two machines fails",
            "set `memlock unlimited` in /etc/security/limits.conf, or `--ulimit memlock=-1` for a container",
        );
    }
    well(if bytes == u64::MAX {
        "`ulimit -l` is unlimited".into()
    } else {
        format!("`ulimit -l` is {} MiB", bytes >> 20)
    })
}

pub(super) fn remove_ipc(facts: &Facts) -> Finding {
    let (Some(removes), Some(user)) = (facts.host.remove_ipc, facts.host.user_id) else {
        return unknown("logind does not run here, or its files could not be read");
    };
    // logind exempts system users.
    if removes && user >= 1000 {
        return warning(
            "logind has RemoveIPC=yes",
            "when you log out, your programs' shared memory is deleted: a worker dies, and its peers wait",
            "set RemoveIPC=no in /etc/systemd/logind.conf, or `loginctl enable-linger`",
        );
    }
    well(format!("RemoveIPC is {}, for user {user}", if removes { "yes" } else { "no" }))
}

pub(super) fn checkpoint_disk(facts: &Facts) -> Finding {
    let Some(bytes) = facts.disk.available_bytes else { return unknown(facts.why_unknown("disk")) };
    let what = format!("{} left for checkpoints", gib(bytes));
    let (why, todo) = (
        "a new checkpoint is written next to the last one before it replaces it",
        "free space, or choose another folder",
    );
    match bytes {
        _ if bytes < GIB => stops(what, why, todo),
        _ if bytes < DISK_BYTES => warning(what, why, todo),
        _ => well(what),
    }
}

pub(super) fn checkpoint_folder(facts: &Facts) -> Finding {
    let folder = facts.disk.checkpoints.as_deref().unwrap_or("the folder");
    match facts.disk.writable {
        None => unknown(facts.why_unknown("disk")),
        Some(false) => stops(
            format!("{folder} is not writable"),
            "a run ends when it cannot write its checkpoint",
            "choose another folder with --checkpoints",
        ),
        Some(true) => well(format!("{folder} is writable")),
    }
}
