//! The memory of the host: its size, the part that may be used, and the pinned part that a device
//! copies from.
//!
//! `meminfo` and `cgroup` read the kernel's figures. `admission` decides from these figures and the
//! driver's figures whether memory may be requested. `shortage` decides whether a run should end,
//! and `floor` applies that rule to every step of an arena.

mod admission;
mod cgroup;
mod floor;
mod meminfo;
mod page_locked;
mod shortage;

pub(crate) use admission::admit;
pub use admission::{AdmissionError, MemoryBudget};
pub use cgroup::CgroupMemory;
pub(crate) use floor::Floor;
pub use meminfo::MemInfo;
pub use page_locked::PageLocked;
pub use shortage::{HostMemory, MemoryForecast, MemoryShortage, ProcessMemory};

use cuda_std::float_mode;
use std::fmt;

/// A number of bytes, shown in readable and in exact form.
pub(crate) struct Size(pub(crate) u64);

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mib = float_mode::in_default(|| self.0 as f64 / f64::from(1 << 20));
        write!(f, "{mib:.1} MiB ({} bytes)", self.0)
    }
}

#[cfg(test)]
mod testdata {
    //! Figures written by hand in the form that `/proc/meminfo` has on a GB10 with 128 GB, of which
    //! Linux sees 121.69 GiB.

    pub(super) const FRESH_BOOT: &str = include_str!("testdata/gb10_fresh_boot.meminfo");
    pub(super) const PAGE_CACHE: &str = include_str!("testdata/gb10_page_cache.meminfo");
    pub(super) const SWAPPING: &str = include_str!("testdata/gb10_swapping.meminfo");
}
