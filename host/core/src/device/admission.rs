//! Admission of requests for a device's memory, from the figures of its driver and of the host.
//!
//! Invariant: no buffer, arena or pinned memory is requested that [`MemoryBudget`] does not admit.

#![forbid(unsafe_code)]

use super::{Description, Device, DeviceKind};
use crate::error::{Error, Result};
use crate::host_memory::{CgroupMemory, LEAST_ADMITTED_BYTES, MemInfo, MemoryBudget, default_reserve_bytes};
use std::time::Duration;

impl Device {
    /// Returns the figures that decide whether memory may be requested now.
    pub(crate) fn budget(&self, reserve_bytes: Option<u64>, deadline: Duration) -> Result<MemoryBudget> {
        let Description { kind, integrated, memory_bytes, .. } = *self.description();
        let driver_free_bytes = self.free_bytes(deadline)?;
        let driver_total_bytes = memory_bytes.unwrap_or(driver_free_bytes);
        let reserve_bytes = reserve_bytes.unwrap_or_else(|| default_reserve_bytes(integrated, driver_total_bytes));
        let host = MemInfo::read();
        // The emulator's memory belongs to this process.
        let (cgroup, promised_bytes) = match kind {
            DeviceKind::Emulated => (CgroupMemory::read(), self.unbacked_bytes()?.unwrap_or(0)),
            _ => (None, 0),
        };
        Ok(MemoryBudget {
            integrated,
            driver_free_bytes,
            driver_total_bytes,
            host,
            cgroup,
            promised_bytes,
            reserve_bytes,
        })
    }

    /// Returns an error unless a buffer of `bytes` bytes may be requested. A dry run takes no
    /// memory.
    pub(crate) fn admit(&self, bytes: usize) -> Result<()> {
        if bytes < LEAST_ADMITTED_BYTES || self.is_dry_run() {
            return Ok(());
        }
        let budget = self.budget(None, self.deadline())?;
        budget.admit(bytes as u64).map_err(|refusal| Error::Refused(Box::new(refusal)))
    }

    /// Returns an error unless the host can lock `bytes` bytes of its memory. Integrated GPUs and
    /// the emulator use host memory as device memory.
    pub(super) fn admit_on_host(&self, bytes: usize) -> Result<()> {
        let Description { kind, integrated, .. } = *self.description();
        if integrated || kind == DeviceKind::Emulated || bytes < LEAST_ADMITTED_BYTES {
            return self.admit(bytes);
        }
        let Some(host) = MemInfo::read() else { return Ok(()) };
        let reserve_bytes = default_reserve_bytes(true, host.available_bytes);
        let free_bytes = host.available_bytes.saturating_sub(reserve_bytes);
        if bytes as u64 <= free_bytes {
            return Ok(());
        }
        let reason =
            format!("MemAvailable minus {reserve_bytes} bytes for other processes; pinned memory cannot be swapped");
        Err(Error::DeviceMemory { device: "the host".into(), requested_bytes: bytes, free_bytes, reason })
    }
}
