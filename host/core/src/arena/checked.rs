//! Checked mode: guards after every tensor, and NaN where nothing has been written.
//!
//! A tensor's memory is poisoned when it is made (f32 and BF16 NaN, u32 0xdeadbeef) and again when
//! its step ends. A read of memory that was never written, or is no longer valid, therefore shows.
//! At least 256 bytes directly after each tensor hold a pattern, which kernels check when the step
//! ends.
//!
//! Invariant: a correct step computes the same result with and without checks.

#![forbid(unsafe_code)]

use super::region::Request;
use crate::buffer::Buffer;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::launch::launch_on;
use crate::tensor::Memory;
use half::bf16;
use kernels::fill::fill;
use kernels::guard::{guard_check, guard_write};
use std::ops::Range;
use std::panic::Location;

/// The smallest size of a guard in bytes. A tensor's own padding is guarded too.
pub(crate) const GUARD_BYTES: usize = 256;
/// The number of guards that are checked between two reads.
const PLACES: usize = 4096;

/// The guards of a step.
#[derive(Debug)]
pub(crate) struct Checks {
    guards: Vec<Guard>,
    found: Buffer<u32>,
    /// The guards of a recorded step whose check is part of the graph, by their index in `found`.
    recorded: Option<Vec<Guard>>,
}

/// A tensor and the guard after it.
#[derive(Clone, Copy, Debug)]
struct Guard {
    /// The memory from the tensor's end on, in half words.
    behind: Memory<bf16>,
    request: Request,
    site: &'static Location<'static>,
}

impl Checks {
    pub(crate) fn new(device: &Device) -> Result<Self> {
        Ok(Self { guards: Vec::new(), found: Buffer::zeros(device, PLACES)?, recorded: None })
    }

    /// Creates the checks of a recorded step with at most `tensors` tensors. Each replay checks all
    /// guards, and [`Checks::replayed`] returns the error.
    pub(crate) fn recorded(device: &Device, tensors: usize) -> Result<Self> {
        let found = Buffer::zeros(device, tensors.max(1))?;
        Ok(Self { guards: Vec::new(), found, recorded: Some(Vec::new()) })
    }

    /// Poisons a new tensor's block and guards its end.
    pub(crate) fn made(
        &mut self,
        device: &Device,
        block: Memory<u8>,
        request: Request,
        site: &'static Location<'static>,
    ) -> Result<()> {
        let behind = block.part(request.bytes, block.len() - request.bytes).cast::<bf16>();
        poison(device, block.cast(), request.poison)?;
        launch_on(device, &guard_write { guard: behind.as_out(), length: behind.len() })?;
        self.guards.push(Guard { behind, request, site });
        Ok(())
    }

    /// Returns the number of guards so far.
    pub(crate) fn mark(&self) -> usize {
        self.guards.len()
    }

    /// Removes the guards between two marks.
    pub(crate) fn forget(&mut self, between: Range<usize>) {
        self.guards.drain(between);
    }

    /// Checks the guards between two marks, or records that each replay checks them.
    pub(crate) fn verify(&mut self, device: &Device, between: Range<usize>) -> Result<()> {
        let guards = &self.guards[between];
        if let Some(recorded) = &mut self.recorded {
            let (tensors, measured) = (recorded.len() + guards.len(), self.found.len());
            if tensors > measured {
                let expected = format!("a function that makes the same tensors in both runs, {measured} of them");
                return Err(Error::misuse("capture", expected, format!("{tensors} in the second run")));
            }
            queue_guard_checks(device, guards, &self.found, recorded.len())?;
            recorded.extend(guards);
            return Ok(());
        }
        for guards in guards.chunks(PLACES) {
            queue_guard_checks(device, guards, &self.found, 0)?;
            refuse_overrun(guards, &self.found)?;
        }
        Ok(())
    }

    /// Waits for a replay, and returns an error for the first overwritten guard.
    pub(crate) fn replayed(&self) -> Result<()> {
        self.recorded.as_ref().map_or(Ok(()), |guards| refuse_overrun(guards, &self.found))
    }
}

/// Queues a check of each guard. The results go to `found`, from `place` on.
fn queue_guard_checks(device: &Device, guards: &[Guard], found: &Buffer<u32>, place: usize) -> Result<()> {
    let found = found.memory();
    for (number, Guard { behind, .. }) in guards.iter().enumerate() {
        let place = place + number;
        launch_on(device, &guard_check { guard: behind.as_slice(), place, found: found.as_out() })?;
    }
    Ok(())
}

/// Returns an error for the first overwritten guard.
fn refuse_overrun(guards: &[Guard], found: &Buffer<u32>) -> Result<()> {
    let found = found.read_range(0, guards.len())?;
    match guards.iter().zip(found).find(|(guard, found)| (*found as usize) < guard.behind.len()) {
        None => Ok(()),
        Some((Guard { request: Request { element, shape, bytes, .. }, site, .. }, found)) => Err(Error::Overrun {
            tensor: format!("{element}{shape}"),
            site: site.to_string(),
            bytes: *bytes,
            offset_bytes: bytes + found as usize * size_of::<bf16>(),
        }),
    }
}

/// Fills memory with a word that is invalid as a number.
pub(crate) fn poison(device: &Device, memory: Memory<u32>, word: u32) -> Result<()> {
    let memory: Memory<f32> = memory.cast();
    launch_on(device, &fill { out: memory.as_out(), length: memory.len(), value: f32::from_bits(word) })
}
