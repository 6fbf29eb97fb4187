//! The settings of an arena: its capacity, its growth, and the environment variables that override
//! them.
//!
//! Invariant: every invalid setting is an error that quotes it, raised before any memory is taken.

#![forbid(unsafe_code)]

use super::Arena;
use super::events::ArenaTool;
use super::layout::ALIGN_BYTES;
use super::overflow::{Overflow, OverflowPool};
use super::region::ArenaInner;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::host_memory::Floor;
use cuda_std::float_mode;
use std::cell::RefCell;
use std::time::Duration;

/// The environment variable that sets the capacity of an arena. See [`arena_bytes_from_env`].
const ARENA_VARIABLE: &str = "STEPSCOPE_ARENA_GB";

/// The needs of a step, measured by [`Arena::measure`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Measured {
    pub(crate) high_water_bytes: usize,
}

impl Measured {
    /// Returns the most bytes that the step had in use.
    pub fn high_water_bytes(self) -> usize {
        self.high_water_bytes
    }
}

/// The size of an arena.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum Capacity {
    /// A number of bytes.
    Bytes(usize),
    /// A share, above 0 and up to 1, of the memory that is available when the arena is built.
    FractionOfAvailable(f64),
    /// The measured needs of a step, exactly.
    Measured(Measured),
}

impl Capacity {
    /// Returns `mebibytes` times 2^20 bytes, or on overflow more than any device has.
    pub const fn mib(mebibytes: usize) -> Self {
        Self::Bytes(mebibytes.saturating_mul(1 << 20))
    }

    /// Returns `gibibytes` times 2^30 bytes, or on overflow more than any device has.
    pub const fn gib(gibibytes: usize) -> Self {
        Self::Bytes(gibibytes.saturating_mul(1 << 30))
    }
}

/// The growth of an arena's capacity.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Growth {
    /// The capacity never changes.
    #[default]
    Fixed,
    /// The capacity grows after a step that needed more, to the bytes of that step, up to
    /// `max_bytes`.
    AtBoundary {
        /// The largest capacity.
        max_bytes: usize,
    },
}

/// The settings of an arena. See [`Arena::builder`].
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
    /// Starts an arena on `device`.
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

    /// Sets the arena's capacity (default 1 GiB). The environment variable `STEPSCOPE_ARENA_GB`
    /// overrides it.
    #[must_use]
    pub fn capacity(mut self, capacity: Capacity) -> Self {
        self.capacity = capacity;
        self
    }

    /// Sets what happens when the arena is full (default: an error).
    #[must_use]
    pub fn overflow(mut self, overflow: Overflow) -> Self {
        self.overflow = overflow;
        self
    }

    /// Sets whether the capacity follows the steps' needs (default: fixed).
    #[must_use]
    pub fn growth(mut self, growth: Growth) -> Self {
        self.growth = growth;
        self
    }

    /// Sets the longest time from a step's start to the end of its work on the device. The default
    /// bounds only its single calls. A step with a deadline waits for the device at its end.
    #[must_use]
    pub fn step_deadline(mut self, deadline: Duration) -> Self {
        self.step_deadline = Some(deadline);
        self
    }

    /// Sets the bytes that must stay available to others on the device (default: see
    /// `docs/memory.md`).
    #[must_use]
    pub fn reserve_bytes(mut self, reserve_bytes: u64) -> Self {
        self.reserve_bytes = Some(reserve_bytes);
        self
    }

    /// Sets the floor of the host's memory in bytes. Below it no step of the arena begins, and each
    /// fails with [`Error::MemoryShortage`]. Where CPU and GPU share one memory, and on the
    /// emulator, the default is half of the reserve. Elsewhere the default is no floor, and zero
    /// means the same. A memory cgroup has the same floor, or a thirty-second of its limit if that
    /// is less. A step reads the figures if the last ones are a second old, or less near the floor.
    #[must_use]
    pub fn memory_floor(mut self, bytes: u64) -> Self {
        self.memory_floor = Some(bytes);
        self
    }

    /// Sets whether tensors are guarded and poisoned (default: as set for the device). The
    /// environment variable `STEPSCOPE_CHECKED` (`1` or `0`) overrides it with its value when the
    /// device was opened. In checked mode, a write past the end of a tensor is an
    /// [`Error::Overrun`] at the end of its scope.
    #[must_use]
    pub fn checked(mut self, checked: bool) -> Self {
        self.checked = Some(checked);
        self
    }

    /// Returns an arena of almost no memory. Its steps need as many bytes as the steps of the arena
    /// that this builder builds. Steps can only be measured on it.
    ///
    /// # Errors
    /// [`Error::DeviceMemory`] if the driver is out of memory.
    pub(crate) fn build_to_measure(&self) -> Result<Arena> {
        let mut arena = Arena::bare(&self.device, ALIGN_BYTES)?;
        if self.device.checked_unless(self.checked) {
            arena.region.check()?;
        }
        Ok(arena)
    }

    /// Takes the memory from the device and builds the arena.
    ///
    /// # Errors
    /// [`Error::Refused`] if the memory is not available, with all figures. [`Error::DeviceMemory`]
    /// if the driver is out of memory. [`Error::Misuse`] for a capacity of zero, a malformed
    /// `STEPSCOPE_ARENA_GB` or a prime above the cap.
    pub fn build(self) -> Result<Arena> {
        let Self { device, capacity, overflow, growth, step_deadline, reserve_bytes, memory_floor, checked } = self;
        let budget = device.budget(reserve_bytes, device.deadline())?;
        let capacity = match (variable()?, capacity) {
            (Some(bytes), _) | (None, Capacity::Bytes(bytes)) => bytes,
            (None, Capacity::Measured(measured)) => measured.high_water_bytes,
            (None, Capacity::FractionOfAvailable(share)) if share > 0.0 && share <= 1.0 => {
                float_mode::in_default(|| (budget.available_bytes() as f64 * share) as usize)
            }
            (None, Capacity::FractionOfAvailable(share)) => {
                return Err(Error::misuse("arena", "a share above 0 and up to 1", share.to_string()));
            }
        };
        if capacity == 0 {
            return Err(Error::misuse("arena", "a capacity above zero", "0 bytes"));
        }
        budget.admit(capacity as u64).map_err(|refusal| Error::Refused(Box::new(refusal)))?;
        let mut region = ArenaInner::allocate(device.clone(), capacity)?;
        region.reserve_bytes = reserve_bytes;
        if device.checked_unless(checked) {
            region.check()?;
        }
        ArenaTool::observers(&device).for_each(|observer| region.observe(observer));
        if let Overflow::Pool { cap_bytes, prime_bytes, deadline } = overflow {
            let pool = OverflowPool::open(region.device(), cap_bytes, prime_bytes, deadline, reserve_bytes)?;
            // From here on the region owns the pool and frees it, even if priming fails.
            region.overflow.insert(RefCell::new(pool)).get_mut().prime(&device)?;
        }
        tracing::info!(
            number = region.number(),
            capacity_bytes = capacity,
            ?overflow,
            ?growth,
            device = region.device().description().name,
            available_bytes = budget.available_bytes(),
            "arena ready"
        );
        let usual = if budget.integrated { budget.reserve_bytes / 2 } else { 0 };
        let floor = Floor::new(memory_floor.unwrap_or(usual));
        Ok(Arena { region, growth, step_deadline, floor })
    }
}

/// Reads the capacity from the environment.
fn variable() -> Result<Option<usize>> {
    let value = std::env::var_os(ARENA_VARIABLE).map(|value| value.to_string_lossy().into_owned());
    arena_bytes_from_env(value.as_deref())
        .map_err(|got| Error::misuse("arena", format!("a number of GiB such as `4` or `0.5` in {ARENA_VARIABLE}"), got))
}

/// Parses the value of `STEPSCOPE_ARENA_GB` into bytes. The value is a plain decimal number of GiB
/// (2^30 bytes), such as `4` or `0.5`. Fractions of a byte are dropped. An unset variable (`None`)
/// requests nothing.
///
/// # Errors
/// Quotes any other value, a value below one byte, or one above this machine's address space.
fn arena_bytes_from_env(value: Option<&str>) -> Result<Option<usize>, String> {
    let Some(value) = value else { return Ok(None) };
    let refuse = |why: &str| format!("`{}`, which is {why}", value.escape_debug());
    // Accepts only plain decimal notation: no sign, no exponent, no `inf`, no `nan`, no blanks.
    let (whole, fraction) = value.split_once('.').unwrap_or((value, "0"));
    let decimal = |part: &str| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit());
    if !decimal(whole) || !decimal(fraction) {
        return Err(refuse("not a positive decimal number"));
    }
    let bytes = float_mode::in_default(|| value.parse::<f64>().map(|gib| gib * f64::from(1 << 30)));
    let bytes = bytes.map_err(|_| refuse("not a positive decimal number"))?;
    if bytes >= isize::MAX as f64 {
        return Err(refuse("more than this machine can address"));
    }
    if bytes < 1.0 {
        return Err(refuse("less than one byte"));
    }
    Ok(Some(bytes as usize))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_environment_gives_decimal_gib() {
        for (value, bytes) in [("4", 4 << 30), ("0.5", 1 << 29), ("007.25", 29 << 28), ("64", 64 << 30)] {
            assert_eq!(arena_bytes_from_env(Some(value)), Ok(Some(bytes)), "{value}");
        }
        assert_eq!(arena_bytes_from_env(None), Ok(None));
    }

    #[test]
    fn a_malformed_environment_is_quoted() {
        let words = "4GB four -1 +1 1e3 nan NaN inf .5 5. . 1.2.3 1,5 0x10 0 0.0 0.0000000001 8589934592";
        for value in words.split(' ').chain(["", " ", "4 ", " 4", "4\n"]) {
            let error = arena_bytes_from_env(Some(value)).expect_err(value);
            assert!(error.contains(&format!("`{}`", value.escape_debug())), "{error:?} does not quote {value:?}");
        }
        let long = "9".repeat(400);
        assert!(arena_bytes_from_env(Some(&long)).is_err(), "a number that f64 rounds to infinity");
    }

    proptest! {
        #[test]
        fn arena_size_parser_never_panics(text: String) {
            if let Ok(Some(bytes)) = arena_bytes_from_env(Some(&text)) {
                prop_assert!(bytes > 0);
            }
        }
    }
}
