//! The arena: one region of device memory that each step fills from the start.
//!
//! The arena never searches for free space and never grows within a step. Between two resets it
//! hands each byte out only once, unless the tensor that owned it was passed by value to `free`.
//! The next tensor of the same size may then reuse it. A reset is one store.
//!
//! Invariant: a reset happens only after the step value is gone. The borrow checker ties every
//! tensor of the step to that value.

mod builder;
mod checked;
mod counters;
mod events;
mod layout;
mod overflow;
mod plan;
mod region;
mod scope;

pub use builder::{ArenaBuilder, Capacity, Growth, Measured};
pub(crate) use checked::Checks;
pub use events::{ArenaObserver, ArenaTool, Event, Kind, Origin};
pub use layout::ALIGN_BYTES;
pub(crate) use layout::GraphReservation;
pub use overflow::Overflow;
pub(crate) use plan::{Listing, MemoryPlan, Placement, Uses};
pub(crate) use region::ArenaInner;
pub(crate) use scope::NestedScope;

use crate::device::{Description, Device, Launch};
use crate::error::{Error, Result};
use crate::host_memory::{Floor, MemoryShortage};
use crate::report::ArenaReport;
use std::sync::Arc;
use std::time::Duration;
use tracing::field::Empty;

/// Device memory for the tensors of one step at a time.
#[derive(Debug)]
pub struct Arena {
    region: ArenaInner,
    growth: Growth,
    step_deadline: Option<Duration>,
    floor: Floor,
}

impl Arena {
    /// Creates an arena of `bytes` bytes that ignores all settings, including the environment. It
    /// skips admission, so use it only for little memory and a short time.
    pub fn bare(device: &Device, bytes: usize) -> Result<Self> {
        let region = ArenaInner::allocate(device.clone(), bytes)?;
        Ok(Self { region, growth: Growth::Fixed, step_deadline: None, floor: Floor::new(0) })
    }

    /// Returns the device that owns this memory.
    pub fn device(&self) -> &Device {
        self.region.device()
    }

    /// Lends the region to one step, which `run` runs. Takes its memory back only after the closure
    /// has returned, failed or panicked. It is compiled once for the steps of all programs.
    pub(crate) fn run_step(&mut self, run: &mut dyn FnMut(&ArenaInner) -> Result<()>) -> Result<()> {
        self.device().check("step")?;
        self.floor.begin_step().map_err(Error::MemoryShortage)?;
        let region = &self.region;
        let span = tracing::debug_span!("step", number = region.steps(), bytes = Empty, tensors = Empty).entered();
        let step = region.step_begins(self.step_deadline);
        let waits = self.step_deadline.is_some();
        let outcome = region.scope(|| {
            region.launched(run(region))?;
            let (bytes, tensors) = region.in_use();
            span.record("bytes", bytes).record("tensors", tensors);
            if waits {
                region.device().synchronize(region.time_left())?;
            }
            Ok(())
        });
        let outcome = outcome.map_err(|error| region.with_report(error));
        drop(step);
        let grown = match self.growth {
            Growth::AtBoundary { max_bytes } => {
                let grown = self.region.grow(max_bytes);
                grown.map_err(|error| self.region.with_report(error))
            }
            Growth::Fixed => Ok(()),
        };
        // The step's own error came first and is more precise.
        outcome.and(grown)
    }

    /// Grows the arena now if its steps may fill less than `bytes` and its settings let it grow. If
    /// there is no memory, the arena keeps its size.
    pub(crate) fn make_room(&mut self, bytes: usize) -> Result<()> {
        let Growth::AtBoundary { max_bytes } = self.growth else { return Ok(()) };
        self.region.needed.set(self.region.needed.get().max(bytes));
        self.region.grow(max_bytes).map_err(|error| self.region.with_report(error))
    }

    /// Returns the shortage if the host has less memory than the arena's floor.
    pub fn shortage(&self) -> Option<MemoryShortage> {
        self.floor.shortage()
    }

    /// Returns the floor, for steps that are replayed.
    pub(crate) fn shortage_for(&self, still_wanted_bytes: u64) -> Option<MemoryShortage> {
        self.floor.shortage_for(still_wanted_bytes)
    }

    /// The floor, for steps that are replayed.
    pub(crate) fn floor(&self) -> Floor {
        self.floor.clone()
    }

    /// Lends a region without memory to one step on a dry run of the device, and returns what the
    /// step needed.
    pub(crate) fn run_measured<R>(&self, run: impl FnOnce(&ArenaInner) -> Result<R>) -> Result<Measured> {
        self.device().dry_run(|dry_run| self.measure_on(dry_run, run))
    }

    /// Measures a step on a dry run of another device, and lists its launches in order.
    pub(crate) fn run_listed<R>(
        &self,
        other: Description,
        run: impl FnOnce(&ArenaInner) -> Result<R>,
    ) -> Result<(Measured, Vec<Launch>)> {
        self.device().dry_run_as(other, self.device().pins(), |dry_run| self.measure_on(dry_run, run))
    }

    fn measure_on<R>(&self, dry_run: &Device, run: impl FnOnce(&ArenaInner) -> Result<R>) -> Result<Measured> {
        let region = self.region.counting(dry_run)?;
        region.scope(|| run(&region).map(drop))?;
        Ok(Measured { high_water_bytes: region.high_water_bytes() })
    }

    /// Returns all memory that the overflow pool keeps to the system. Waits for the device.
    ///
    /// # Errors
    /// [`Error::Timeout`] if the device does not answer.
    pub fn trim(&mut self) -> Result<()> {
        self.region.trim().map_err(|error| self.region.with_report(error))
    }

    /// Sets a new floor for the host's memory, which also applies to steps that are already
    /// captured. See [`ArenaBuilder::memory_floor`].
    ///
    /// [`ArenaBuilder::memory_floor`]: crate::ArenaBuilder::memory_floor
    pub fn set_memory_floor(&mut self, bytes: u64) {
        self.floor.set(bytes);
    }

    /// Passes the events of this arena's memory to an observer from now on.
    pub(crate) fn observe(&mut self, observer: Box<dyn ArenaObserver>) {
        self.region.observe(observer);
    }

    /// Returns the cap of the overflow pool, or zero if there is no pool.
    pub(crate) fn overflow_bytes(&self) -> usize {
        self.region.overflow.as_ref().map_or(0, |overflow| overflow.borrow().cap_bytes)
    }

    /// Reserves bytes at the arena's end for a captured step, and returns them with their address.
    /// The step's plan has saved `saved` more.
    pub(crate) fn reserve(&mut self, bytes: usize, saved: usize) -> Option<(Arc<GraphReservation>, u64)> {
        self.region.reserve(bytes, saved)
    }

    /// Returns the most bytes that a captured step may have.
    pub(crate) fn available_bytes(&self) -> usize {
        self.region.available_bytes()
    }

    /// Returns the guard bytes after each tensor in checked mode, else zero.
    pub(crate) fn guard_bytes(&self) -> usize {
        self.region.guard_bytes()
    }

    /// Returns the longest time that a wait may take.
    pub fn deadline(&self) -> Duration {
        let deadline = self.device().deadline();
        self.step_deadline.map_or(deadline, |step| step.min(deadline))
    }

    /// Returns the report of the arena's work so far.
    pub fn report(&self) -> ArenaReport {
        self.region.report()
    }
}
