//! The arena: one region of device memory that each step fills from the start.
//!
//! What it does not do: it never looks for room, never grows within a step and never hands the same byte out twice between two resets, unless
//! the tensor that had it was given back, by value, to be the next one of its size. A reset is one store. Invariant: a reset happens only when the step
//! value is gone, which the borrow checker ties to every tensor of the step.

use super::floor::Floor;
use super::region::Region;
use super::sections::Section;
use super::settings::{Growth, Measured};
use super::snapshot::Recording;
use crate::driver::{Description, Device, Launch};
use crate::error::Result;
use crate::report::ArenaReport;
use crate::shortage::MemoryShortage;
use std::sync::Arc;
use std::time::Duration;
use tracing::field::Empty;

/// Device memory for the tensors of one step at a time.
#[derive(Debug)]
pub struct Arena {
    pub(super) region: Region,
    pub(super) growth: Growth,
    pub(super) step_deadline: Option<Duration>,
    pub(super) floor: Floor,
}

impl Arena {
    /// An arena of so many bytes that no setting reaches: the environment's neither. Whether the memory can be had is not asked, so
    /// it is for little memory and a short time.
    pub(crate) fn bare(device: &Device, bytes: usize) -> Result<Self> {
        let region = Region::allocate(device.clone(), bytes)?;
        Ok(Self { region, growth: Growth::Fixed, step_deadline: None, floor: Floor::new(0) })
    }

    /// The device whose memory this is.
    pub fn device(&self) -> &Device {
        self.region.device()
    }

    /// Lends the region to one step, and takes its memory back when the closure has returned, failed or panicked, and only then.
    pub(crate) fn run_step<R>(&mut self, run: impl FnOnce(&Region) -> Result<R>) -> Result<R> {
        self.device().check("step")?;
        self.floor.begin_step()?;
        let region = &self.region;
        let span = tracing::debug_span!("step", number = region.steps(), bytes = Empty, tensors = Empty).entered();
        let step = region.step_begins(self.step_deadline);
        let waits = self.step_deadline.is_some();
        let outcome = region.scope(|| {
            let result = region.launched(run(region))?;
            let (bytes, tensors) = region.in_use();
            span.record("bytes", bytes).record("tensors", tensors);
            if waits {
                region.device().synchronize(region.time_left())?;
            }
            Ok(result)
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
        // The step's own error came first and says more.
        outcome.and_then(|result| grown.map(|()| result))
    }

    /// The shortage, if the host has less memory than the arena's floor.
    pub(crate) fn shortage(&self) -> Option<MemoryShortage> {
        self.floor.shortage()
    }

    /// The floor, for steps that are replayed.
    pub(crate) fn floor(&self) -> Floor {
        self.floor.clone()
    }

    /// Lends a region without memory to one step, on a rehearsal of the device, and tells what the step took.
    pub(crate) fn run_measured<R>(&self, run: impl FnOnce(&Region) -> Result<R>) -> Result<Measured> {
        self.device().rehearse(|rehearsal| self.measure_on(rehearsal, run))
    }

    /// The same on a rehearsal of another device, and what the step would launch, in order.
    pub(crate) fn run_listed<R>(
        &self,
        other: Description,
        run: impl FnOnce(&Region) -> Result<R>,
    ) -> Result<(Measured, Vec<Launch>)> {
        self.device().rehearse_as(other, self.device().pins(), |rehearsal| self.measure_on(rehearsal, run))
    }

    fn measure_on<R>(&self, rehearsal: &Device, run: impl FnOnce(&Region) -> Result<R>) -> Result<Measured> {
        let region = self.region.counting(rehearsal)?;
        region.scope(|| run(&region).map(drop))?;
        Ok(Measured { high_water_bytes: region.high_water_bytes() })
    }

    /// Gives the system all memory that the overflow pool keeps. Waits for the device.
    ///
    /// # Errors
    /// [`Error::Timeout`](crate::Error::Timeout) when the device does not answer.
    pub fn trim(&mut self) -> Result<()> {
        self.region.trim().map_err(|error| self.region.with_report(error))
    }

    /// Another floor for the host's memory from now on, also for steps that are captured already; see [`ArenaBuilder::memory_floor`].
    ///
    /// [`ArenaBuilder::memory_floor`]: crate::ArenaBuilder::memory_floor
    pub fn set_memory_floor(&mut self, bytes: u64) {
        self.floor.set(bytes);
    }

    /// Keeps the latest `limit` events of the memory from now on: what was made, by which line, in which phase. Zero: none.
    pub fn record(&mut self, limit: usize) {
        self.region.record(limit);
    }

    /// What has been recorded, if anything is: see [`Recording::pickle`] and [`Recording::timeline_svg`].
    pub fn recording(&self) -> Option<Recording> {
        self.region.recording()
    }

    /// The overflow's cap; zero without one.
    pub(crate) fn overflow_bytes(&self) -> usize {
        self.region.overflow.as_ref().map_or(0, |overflow| overflow.borrow().cap_bytes)
    }

    /// Bytes at the arena's end for a captured step, and their address.
    pub(crate) fn reserve(&mut self, bytes: usize) -> Option<(Arc<Section>, u64)> {
        self.region.reserve(bytes)
    }

    /// Bytes that a captured step may have at most.
    pub(crate) fn available_bytes(&self) -> usize {
        self.region.available_bytes()
    }

    /// Bytes behind each tensor in checked mode, else none.
    pub(crate) fn guard_bytes(&self) -> usize {
        self.region.guard_bytes()
    }

    /// How long a wait may take.
    pub(crate) fn deadline(&self) -> Duration {
        let deadline = self.device().deadline();
        self.step_deadline.map_or(deadline, |step| step.min(deadline))
    }

    /// What the arena has done so far.
    pub fn report(&self) -> ArenaReport {
        self.region.report()
    }
}
