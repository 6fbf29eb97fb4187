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
mod shortage;

pub use admission::{AdmissionError, MemoryBudget};
pub(crate) use admission::{LEAST_ADMITTED_BYTES, default_reserve_bytes};
pub use cgroup::CgroupMemory;
pub(crate) use floor::Floor;
pub use meminfo::MemInfo;
pub use shortage::{HostMemory, MemoryForecast, MemoryShortage, ProcessMemory};

use bytemuck::Pod;
use cuda_std::float_mode;
use std::{fmt, io};

/// Returns an error unless the host has memory for so many bytes of a file.
///
/// # Errors
/// [`io::ErrorKind::FileTooLarge`], with both figures.
pub(crate) fn check_room(bytes: u128) -> io::Result<()> {
    // The system may grant memory that it does not have, and kill a process that writes to it.
    let available = HostMemory::available_bytes();
    if bytes <= u128::from(available) {
        return Ok(());
    }
    let reason = format!(
        "expected at most the {available} bytes that the host, or this process's cgroup, has available, got {bytes}: free some memory"
    );
    Err(io::Error::new(io::ErrorKind::FileTooLarge, reason))
}

/// Returns zeros to be overwritten with the values of a file, after checking that the host has
/// memory for them. The system provides pages when they are written.
///
/// # Errors
/// [`io::ErrorKind::FileTooLarge`].
pub fn zeros<T: Pod>(count: usize) -> io::Result<Vec<T>> {
    check_room(count as u128 * size_of::<T>() as u128)?;
    let refused = || io::Error::new(io::ErrorKind::FileTooLarge, format!("no memory for its {count} values"));
    bytemuck::try_zeroed_vec(count).map_err(|()| refused())
}

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
