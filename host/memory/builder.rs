//! How an arena is built: its settings, and what the environment overrides.
//!
//! Invariant: a setting that makes no sense is an error that quotes it, before any memory is taken.

#![forbid(unsafe_code)]

use super::arena::Arena;
use super::floor::Floor;
use super::overflow::{Overflow, OverflowPool};
use super::region::Region;
use super::settings::{Capacity, Growth};
use super::situation::situation;
use crate::admission::{ARENA_VARIABLE, arena_bytes_from_env};
use crate::driver::Device;
use crate::error::{Error, Result};
use cuda_std::float_mode;
use std::cell::RefCell;
use std::time::Duration;

/// Settings of an arena; see [`Arena::builder`].
#[derive(Debug)]
pub struct ArenaBuilder {
    device: Device,
    capacity: Capacity,
    overflow: Overflow,
    growth: Growth,
    step_deadline: Option<Duration>,
    reserve_bytes: Option<u64>,
    memory_floor: Option<u64>,
    checked: Option<bool>,
}

impl Arena {
    /// An arena on `device`.
    pub fn builder(device: &Device) -> ArenaBuilder {
        ArenaBuilder::new(device)
    }
}

impl ArenaBuilder {
    fn new(device: &Device) -> Self {
        Self {
            device: device.clone(),
            capacity: Capacity::gib(1),
            overflow: Overflow::Refuse,
            growth: Growth::Fixed,
            step_deadline: None,
            reserve_bytes: None,
            memory_floor: None,
            checked: None,
        }
    }

    /// How large the arena is (default 1 GiB). The environment variable `STEPSCOPE_ARENA_GB` overrides it.
    #[must_use]
    pub fn capacity(mut self, capacity: Capacity) -> Self {
        self.capacity = capacity;
        self
    }

    /// What happens when the arena is full (default: an error).
    #[must_use]
    pub fn overflow(mut self, overflow: Overflow) -> Self {
        self.overflow = overflow;
        self
    }

    /// Whether the capacity follows the steps' needs (default: fixed).
    #[must_use]
    pub fn growth(mut self, growth: Growth) -> Self {
        self.growth = growth;
        self
    }

    /// How long a step may take from its start to the end of its work on the device (default: no bound but those of its
    /// single calls). A step with a deadline waits for the device at its end.
    #[must_use]
    pub fn step_deadline(mut self, deadline: Duration) -> Self {
        self.step_deadline = Some(deadline);
        self
    }

    /// Bytes that must stay available to others on the device (default: see the admission rules of the guide).
    #[must_use]
    pub fn reserve_bytes(mut self, reserve_bytes: u64) -> Self {
        self.reserve_bytes = Some(reserve_bytes);
        self
    }

    /// Bytes of the host's memory below which no step of the arena begins: it fails with [`Error::MemoryShortage`]. Default where CPU and GPU
    /// share one memory, and on the emulator: half of the reserve; elsewhere, and for zero, there is none. A memory cgroup has the same
    /// floor, or a thirty-second of its limit if that is less. A thread of the process looks, at least once a second.
    #[must_use]
    pub fn memory_floor(mut self, bytes: u64) -> Self {
        self.memory_floor = Some(bytes);
        self
    }

    /// Whether tensors are guarded and poisoned (default: as the device). The environment variable `STEPSCOPE_CHECKED` (`1` or
    /// `0`), as it was when the device was opened, overrides it. A write behind a tensor is then [`Error::Overrun`] at the end of its scope.
    #[must_use]
    pub fn checked(mut self, checked: bool) -> Self {
        self.checked = Some(checked);
        self
    }

    /// Takes the memory from the device.
    ///
    /// # Errors
    /// [`Error::Refused`] when the memory is not available, with every number; [`Error::DeviceMemory`] when the driver
    /// has none; [`Error::Misuse`] for a capacity of zero, a malformed `STEPSCOPE_ARENA_GB` or a prime above the cap.
    pub fn build(self) -> Result<Arena> {
        let Self { device, capacity, overflow, growth, step_deadline, reserve_bytes, memory_floor, checked } = self;
        let situation = situation(&device, reserve_bytes, device.deadline())?;
        let capacity = match (variable()?, capacity) {
            (Some(bytes), _) | (None, Capacity::Bytes(bytes)) => bytes,
            (None, Capacity::Measured(measured)) => measured.high_water_bytes,
            (None, Capacity::FractionOfAvailable(share)) if share > 0.0 && share <= 1.0 => {
                float_mode::in_default(|| (situation.available_bytes() as f64 * share) as usize)
            }
            (None, Capacity::FractionOfAvailable(share)) => {
                return Err(Error::misuse("arena", "a share above 0 and up to 1", share.to_string()));
            }
        };
        if capacity == 0 {
            return Err(Error::misuse("arena", "a capacity above zero", "0 bytes"));
        }
        situation.admit(capacity as u64).map_err(|refusal| Error::Refused(Box::new(refusal)))?;
        let mut region = Region::allocate(device.clone(), capacity)?;
        region.reserve_bytes = reserve_bytes;
        if device.checked_unless(checked) {
            region.check()?;
        }
        #[cfg(feature = "nvtx")]
        region.sanitize();
        if let Overflow::Pool { cap_bytes, prime_bytes, deadline } = overflow {
            let pool = OverflowPool::open(region.device(), cap_bytes, prime_bytes, deadline, reserve_bytes)?;
            // The region owns the pool from here on, and ends it whatever becomes of the prime.
            region.overflow.insert(RefCell::new(pool)).get_mut().prime(&device)?;
        }
        tracing::info!(
            number = region.number(),
            capacity_bytes = capacity,
            ?overflow,
            ?growth,
            device = region.device().description().name,
            available_bytes = situation.available_bytes(),
            "arena ready"
        );
        let usual = if situation.integrated { situation.reserve_bytes / 2 } else { 0 };
        let floor = Floor::new(memory_floor.unwrap_or(usual));
        Ok(Arena { region, growth, step_deadline, floor })
    }
}

/// What the environment asks for.
fn variable() -> Result<Option<usize>> {
    let value = std::env::var_os(ARENA_VARIABLE).map(|value| value.to_string_lossy().into_owned());
    arena_bytes_from_env(value.as_deref())
        .map_err(|reason| Error::misuse("arena", "a number of GiB in STEPSCOPE_ARENA_GB", reason))
}
