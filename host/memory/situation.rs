//! What can be had on a device now: the figures that admission decides by, from the driver and the host.

#![forbid(unsafe_code)]

use crate::admission::{Situation, default_reserve_bytes};
use crate::cgroup::CgroupMemory;
use crate::driver::{Description, Device, DeviceKind};
use crate::error::{Error, Result};
use std::time::Duration;

/// Less than this is a part of the reserve, and not worth the question.
const LEAST_ADMITTED_BYTES: usize = 1 << 20;

/// Memory that can be had on the device now.
pub(super) fn situation(device: &Device, reserve_bytes: Option<u64>, deadline: Duration) -> Result<Situation> {
    let Description { kind, integrated, memory_bytes, .. } = *device.description();
    let driver_free_bytes = device.free_bytes(deadline)?;
    let driver_total_bytes = memory_bytes.unwrap_or(driver_free_bytes);
    let reserve_bytes = reserve_bytes.unwrap_or_else(|| default_reserve_bytes(integrated, driver_total_bytes));
    let host = Situation::read_host();
    // The emulator's memory is this process's.
    let (cgroup, promised_bytes) = match kind {
        DeviceKind::Emulated => (CgroupMemory::read(), device.unbacked_bytes()?.unwrap_or(0)),
        _ => (None, 0),
    };
    Ok(Situation { integrated, driver_free_bytes, driver_total_bytes, host, cgroup, promised_bytes, reserve_bytes })
}

/// An error unless so many bytes may be asked for, for a buffer. A rehearsal takes none.
pub(super) fn admit(device: &Device, bytes: usize) -> Result<()> {
    if bytes < LEAST_ADMITTED_BYTES || device.rehearses() {
        return Ok(());
    }
    let situation = situation(device, None, device.deadline())?;
    situation.admit(bytes as u64).map_err(|refusal| Error::Refused(Box::new(refusal)))
}

/// An error unless the host can lock so many bytes of its memory. That of an integrated GPU, and of the emulator, is the device's.
pub(super) fn admit_on_host(device: &Device, bytes: usize) -> Result<()> {
    let Description { kind, integrated, .. } = *device.description();
    if integrated || kind == DeviceKind::Emulated || bytes < LEAST_ADMITTED_BYTES {
        return admit(device, bytes);
    }
    let Some(host) = Situation::read_host() else { return Ok(()) };
    let reserve_bytes = default_reserve_bytes(true, host.available_bytes);
    let free_bytes = host.available_bytes.saturating_sub(reserve_bytes);
    if bytes as u64 <= free_bytes {
        return Ok(());
    }
    let reason =
        format!("MemAvailable less {reserve_bytes} bytes for all others; what is page-locked cannot be swapped");
    Err(Error::DeviceMemory { device: "the host".into(), requested_bytes: bytes, free_bytes, reason })
}
