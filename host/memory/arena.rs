//! The arena: one region of device memory that each step fills from the start.
//!
//! What it does not do: it never frees a single tensor, keeps no free list, never grows within a step and never hands
//! the same byte out twice between two resets. A reset is one store. Invariant: a reset happens only when the step
//! value is gone, which the borrow checker ties to every tensor of the step.

use super::layout::{Bump, padded};
use crate::driver::Device;
use crate::error::{Error, Result};
use crate::step::Eager;
use serde::Serialize;
use std::cell::Cell;
use std::fmt;

/// How large an arena is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Capacity {
    /// So many bytes.
    Bytes(usize),
}

impl Capacity {
    /// So many times 2^20 bytes.
    pub const fn mib(mebibytes: usize) -> Self {
        Self::Bytes(mebibytes << 20)
    }

    /// So many times 2^30 bytes.
    pub const fn gib(gibibytes: usize) -> Self {
        Self::Bytes(gibibytes << 30)
    }
}

/// Settings of an arena; see [`Arena::builder`].
#[derive(Debug)]
pub struct ArenaBuilder {
    device: Device,
    capacity: Capacity,
}

impl ArenaBuilder {
    /// How large the arena is (default 1 GiB).
    #[must_use]
    pub fn capacity(mut self, capacity: Capacity) -> Self {
        self.capacity = capacity;
        self
    }

    /// Takes the memory from the device.
    ///
    /// # Errors
    /// [`Error::DeviceMemory`] when it is not there; [`Error::Misuse`] for a capacity of zero.
    pub fn build(self) -> Result<Arena> {
        let Capacity::Bytes(capacity) = self.capacity;
        if capacity == 0 {
            return Err(Error::misuse("arena", "a capacity above zero", "0 bytes"));
        }
        let address = self.device.driver().allocate(capacity)?;
        tracing::info!(capacity_bytes = capacity, device = self.device.description().name, "arena ready");
        let region = Region {
            device: self.device,
            address,
            capacity,
            bump: Cell::new(Bump::new(capacity)),
            high_water: Cell::new(0),
            allocations: Cell::new(0),
            step_allocations: Cell::new(0),
            resets: Cell::new(0),
        };
        Ok(Arena { region })
    }
}

/// The memory of an arena and where it stands. Steps borrow it.
#[derive(Debug)]
pub(crate) struct Region {
    device: Device,
    address: u64,
    capacity: usize,
    bump: Cell<Bump>,
    high_water: Cell<usize>,
    allocations: Cell<u64>,
    step_allocations: Cell<u64>,
    resets: Cell<u64>,
}

impl Region {
    pub(crate) fn device(&self) -> &Device {
        &self.device
    }

    /// The address of `bytes` that nothing else uses until the rewind past them.
    pub(crate) fn take(&self, bytes: usize) -> Result<u64> {
        let bump = self.bump.get();
        let Some((offset, next)) = bump.take(bytes) else {
            return Err(Error::ArenaFull {
                requested_bytes: padded(bytes).unwrap_or(usize::MAX),
                used_bytes: bump.offset(),
                capacity_bytes: self.capacity,
                allocations: self.step_allocations.get(),
            });
        };
        self.bump.set(next);
        self.high_water.set(self.high_water.get().max(next.offset()));
        self.allocations.set(self.allocations.get() + 1);
        self.step_allocations.set(self.step_allocations.get() + 1);
        Ok(self.address + offset as u64)
    }

    /// Rewinds to here when the guard goes, panic or not.
    pub(crate) fn mark(&self) -> Rewind<'_> {
        Rewind { region: self, offset: self.bump.get().offset(), allocations: self.step_allocations.get() }
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: `build` took exactly this; the arena owns it, and no step is alive: each borrows the region.
        unsafe { self.device.driver().free(self.address, self.capacity) };
    }
}

/// Takes memory back at the end of a scope.
#[derive(Debug)]
pub(crate) struct Rewind<'r> {
    region: &'r Region,
    offset: usize,
    allocations: u64,
}

impl Drop for Rewind<'_> {
    fn drop(&mut self) {
        self.region.bump.set(self.region.bump.get().rewind(self.offset));
        self.region.step_allocations.set(self.allocations);
    }
}

/// Device memory for the tensors of one step at a time.
#[derive(Debug)]
pub struct Arena {
    region: Region,
}

impl Arena {
    /// An arena on `device`.
    pub fn builder(device: &Device) -> ArenaBuilder {
        ArenaBuilder { device: device.clone(), capacity: Capacity::gib(1) }
    }

    /// The device whose memory this is.
    pub fn device(&self) -> &Device {
        self.region.device()
    }

    /// Runs one step. Every tensor that it makes is branded with `'s`, which the result cannot name; the memory is
    /// taken back when the closure has returned, failed or panicked, and only then.
    ///
    /// # Errors
    /// Those of the closure.
    pub fn step<R>(&mut self, run: impl for<'s> FnOnce(&mut Eager<'s>) -> Result<R>) -> Result<R> {
        let region = &self.region;
        let rewind = region.mark();
        let outcome = run(&mut Eager::new(region));
        drop(rewind);
        region.resets.set(region.resets.get() + 1);
        outcome
    }

    /// What the arena has done so far.
    pub fn report(&self) -> ArenaReport {
        let region = &self.region;
        ArenaReport {
            capacity_bytes: region.capacity,
            high_water_bytes: region.high_water.get(),
            allocations: region.allocations.get(),
            resets: region.resets.get(),
            overflow_allocations: 0,
        }
    }
}

/// What an arena has done since it was built.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct ArenaReport {
    /// Bytes that it holds.
    pub capacity_bytes: usize,
    /// The most bytes that a step had in use.
    pub high_water_bytes: usize,
    /// Steps that have ended.
    pub resets: u64,
    /// Tensors that were made.
    pub allocations: u64,
    /// Tensors that did not fit and went elsewhere: always zero, a full arena is [`Error::ArenaFull`].
    pub overflow_allocations: u64,
}

impl fmt::Display for ArenaReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mib = |bytes: usize| bytes as f64 / f64::from(1 << 20);
        write!(
            f,
            "arena: {:.1} MiB at most in use of {:.1} MiB, {} tensors in {} steps, {} overflows",
            mib(self.high_water_bytes),
            mib(self.capacity_bytes),
            self.allocations,
            self.resets,
            self.overflow_allocations
        )
    }
}
