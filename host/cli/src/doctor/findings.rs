//! The checks: one table of functions that judge the facts.
//!
//! Invariant: an unknown fact never counts as good. A new check is a function and a row of
//! `CHECKS`; `host/cli/tests/doctor.rs` then requires a fixture that triggers it.

mod gpu;
mod host;
mod network;

use crate::doctor::facts::Facts;
use serde::Serialize;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Level {
    Well,
    NotLookedAt,
    Warning,
    StopsTraining,
}

impl Level {
    pub(crate) fn word(self) -> &'static str {
        match self {
            Self::Well => "well",
            Self::NotLookedAt => "not looked at",
            Self::Warning => "WARNING",
            Self::StopsTraining => "STOPS TRAINING",
        }
    }
}

/// The result of a check. `why` and `todo` are empty if all is well.
#[derive(Debug, Serialize)]
pub(crate) struct Finding {
    pub check: &'static str,
    pub level: Level,
    pub what: String,
    pub why: &'static str,
    pub todo: String,
}

type Check = fn(&Facts) -> Finding;

const CHECKS: &[(&str, Check)] = &[
    ("memory_figures", host::memory_figures),
    ("kernel_handover", host::kernel_handover),
    ("memory_available", host::memory_available),
    ("page_cache", host::page_cache),
    ("dirty_pages", host::dirty_pages),
    ("memory_pressure", host::memory_pressure),
    ("cgroup", host::cgroup),
    ("swap_in_use", host::swap_in_use),
    ("swappiness", host::swappiness),
    ("locked_memory", host::locked_memory),
    ("remove_ipc", host::remove_ipc),
    ("checkpoint_disk", host::checkpoint_disk),
    ("checkpoint_folder", host::checkpoint_folder),
    ("gpu_driver", gpu::driver),
    ("gpu_build", gpu::build),
    ("cuda_version", gpu::cuda_version),
    ("ptx", gpu::ptx),
    ("ptx_cache", gpu::ptx_cache),
    ("gpu_found", gpu::found),
    ("gpu_opens", gpu::opens),
    ("integrated", gpu::integrated),
    ("same_bits", gpu::same_bits),
    ("page_locking", gpu::page_locking),
    ("copy_rate", gpu::copy_rate),
    ("bf16_rate", gpu::bf16_rate),
    ("step_time", gpu::step_time),
    ("clock", gpu::clock),
    ("power_state", gpu::power_state),
    ("throttling", gpu::throttling),
    ("network_cards", network::cards),
    ("network_rate", network::rate),
    ("wheels", network::wheels),
];

/// Runs every check, in the table's order.
pub(crate) fn of(facts: &Facts) -> Vec<Finding> {
    CHECKS.iter().map(|(name, check)| Finding { check: name, ..check(facts) }).collect()
}

fn finding(level: Level, what: String, why: &'static str, todo: &str) -> Finding {
    Finding { check: "", level, what, why, todo: todo.into() }
}

fn well(what: impl Into<String>) -> Finding {
    finding(Level::Well, what.into(), "", "")
}

/// Reports a check that could not run, with the reason.
fn unknown(because: impl std::fmt::Display) -> Finding {
    finding(Level::NotLookedAt, format!("because {because}"), "", "")
}

fn warning(what: impl Into<String>, why: &'static str, todo: &str) -> Finding {
    finding(Level::Warning, what.into(), why, todo)
}

fn stops(what: impl Into<String>, why: &'static str, todo: &str) -> Finding {
    finding(Level::StopsTraining, what.into(), why, todo)
}

/// Formats bytes in GiB.
fn gib(bytes: u64) -> String {
    format!("{:.1} GiB", bytes as f64 / f64::from(1 << 30))
}

/// Returns true if the GPU is a GB10, whose rates are known.
fn is_gb10(facts: &Facts) -> bool {
    facts.gpu.capability.or(facts.load.capability) == Some(121)
}
