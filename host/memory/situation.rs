//! What can be had on a device now: the figures that admission decides by, from the driver and the host.

#![forbid(unsafe_code)]

use crate::admission::{Situation, default_reserve_bytes};
use crate::cgroup::CgroupMemory;
use crate::driver::{Description, Device, DeviceKind};
use crate::error::Result;
use std::time::Duration;

/// Memory that can be had on the device now.
pub(super) fn situation(device: &Device, reserve_bytes: Option<u64>, deadline: Duration) -> Result<Situation> {
    let Description { kind, integrated, memory_bytes, .. } = *device.description();
    let driver_free_bytes = device.free_bytes(deadline)?;
    let driver_total_bytes = memory_bytes.unwrap_or(driver_free_bytes);
    let reserve_bytes = reserve_bytes.unwrap_or_else(|| default_reserve_bytes(integrated, driver_total_bytes));
    let host = Situation::read_host();
    let cgroup = if kind == DeviceKind::Emulated { CgroupMemory::read() } else { None };
    Ok(Situation { integrated, driver_free_bytes, driver_total_bytes, host, cgroup, reserve_bytes })
}
