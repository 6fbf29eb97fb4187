//! The memory available on a device now: the driver and host figures that admission uses.

#![forbid(unsafe_code)]

use crate::admission::{MemoryBudget, default_reserve_bytes};
use crate::cgroup::CgroupMemory;
use crate::device::{Description, Device, DeviceKind};
use crate::error::{Error, Result};
use std::time::Duration;

/// The smallest request that admission checks. Smaller requests are covered by the reserve.
const LEAST_ADMITTED_BYTES: usize = 1 << 20;

/// Returns the memory that is available on the device now.
pub(super) fn situation(device: &Device, reserve_bytes: Option<u64>, deadline: Duration) -> Result<MemoryBudget> {
    let Description { kind, integrated, memory_bytes, .. } = *device.description();
    let driver_free_bytes = device.free_bytes(deadline)?;
    let driver_total_bytes = memory_bytes.unwrap_or(driver_free_bytes);
    let reserve_bytes = reserve_bytes.unwrap_or_else(|| default_reserve_bytes(integrated, driver_total_bytes));
    let host = MemoryBudget::read_host();
    // The emulator's memory belongs to this process.
    let (cgroup, promised_bytes) = match kind {
        DeviceKind::Emulated => (CgroupMemory::read(), device.unbacked_bytes()?.unwrap_or(0)),
        _ => (None, 0),
    };
    Ok(MemoryBudget { integrated, driver_free_bytes, driver_total_bytes, host, cgroup, promised_bytes, reserve_bytes })
}

/// Returns an error unless a buffer of `bytes` bytes may be requested. A dry run takes no memory.
pub(super) fn admit(device: &Device, bytes: usize) -> Result<()> {
    if bytes < LEAST_ADMITTED_BYTES || device.is_dry_run() {
        return Ok(());
    }
    let situation = situation(device, None, device.deadline())?;
    situation.admit(bytes as u64).map_err(|refusal| Error::Refused(Box::new(refusal)))
}

/// Returns an error unless the host can lock `bytes` bytes of its memory. Integrated GPUs and the
/// emulator use host memory as device memory.
pub(super) fn admit_on_host(device: &Device, bytes: usize) -> Result<()> {
    let Description { kind, integrated, .. } = *device.description();
    if integrated || kind == DeviceKind::Emulated || bytes < LEAST_ADMITTED_BYTES {
        return admit(device, bytes);
    }
    let Some(host) = MemoryBudget::read_host() else { return Ok(()) };
    let reserve_bytes = default_reserve_bytes(true, host.available_bytes);
    let free_bytes = host.available_bytes.saturating_sub(reserve_bytes);
    if bytes as u64 <= free_bytes {
        return Ok(());
    }
    let reason =
        format!("MemAvailable minus {reserve_bytes} bytes for other processes; pinned memory cannot be swapped");
    Err(Error::DeviceMemory { device: "the host".into(), requested_bytes: bytes, free_bytes, reason })
}
