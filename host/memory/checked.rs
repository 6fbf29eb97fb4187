//! Checked mode: guards behind every tensor, and NaN where nothing has been written.
//!
//! A tensor's memory is poisoned when it is made (f32 NaN, u32 0xdeadbeef) and again when its step is over, so a read
//! of what was never written, or no longer is, shows. Behind the tensor at least 256 bytes hold a pattern; kernels look at
//! them when the step ends. Invariant: what a sound step computes is the same with checks and without.

#![forbid(unsafe_code)]

use super::buffer::Buffer;
use super::region::Request;
use crate::driver::Device;
use crate::error::{Error, Result};
use crate::launch::{Memory, launch_on};
use kernels::fill::fill;
use kernels::guard::{guard_check, guard_write};
use std::panic::Location;

/// Bytes of a guard, at least: a tensor's own padding is guarded too.
pub(crate) const GUARD_BYTES: usize = 256;
/// Guards that are looked at between two reads.
const PLACES: usize = 4096;

/// The guards of a step.
#[derive(Debug)]
pub(crate) struct Checks {
    guards: Vec<Guard>,
    found: Buffer<u32>,
}

/// A tensor and what is behind it.
#[derive(Debug)]
struct Guard {
    block: Memory<u32>,
    /// The first word behind the tensor.
    start: usize,
    request: Request,
    site: &'static Location<'static>,
}

impl Checks {
    pub(crate) fn new(device: &Device) -> Result<Self> {
        Ok(Self { guards: Vec::new(), found: Buffer::zeros(device, PLACES)? })
    }

    /// Poisons a new tensor's block and guards its end.
    pub(crate) fn made(
        &mut self,
        device: &Device,
        block: Memory<u32>,
        request: Request,
        site: &'static Location<'static>,
    ) -> Result<()> {
        let start = request.bytes / size_of::<u32>();
        poison(device, block, request.poison)?;
        launch_on(device, &guard_write { block: block.as_out(), length: block.len(), start })?;
        self.guards.push(Guard { block, start, request, site });
        Ok(())
    }

    /// Guards so far.
    pub(crate) fn mark(&self) -> usize {
        self.guards.len()
    }

    /// Forgets the guards since `mark`.
    pub(crate) fn forget(&mut self, mark: usize) {
        self.guards.truncate(mark);
    }

    /// Looks at the guards since `mark`.
    pub(crate) fn verify(&self, device: &Device, mark: usize) -> Result<()> {
        for guards in self.guards[mark..].chunks(PLACES) {
            for (place, Guard { block, start, .. }) in guards.iter().enumerate() {
                let found = self.found.memory();
                launch_on(
                    device,
                    &guard_check { block: block.as_slice(), start: *start, place, found: found.as_out() },
                )?;
            }
            let found = self.found.read_range(0, guards.len())?;
            for (guard, found) in guards.iter().zip(found) {
                if (found as usize) < guard.block.len() {
                    let Request { element, shape, bytes, .. } = guard.request;
                    return Err(Error::Overrun {
                        tensor: format!("{element}{shape}"),
                        site: guard.site.to_string(),
                        bytes,
                        offset_bytes: found as usize * size_of::<u32>(),
                    });
                }
            }
        }
        Ok(())
    }
}

/// Fills memory with a word that is wrong as a number.
pub(crate) fn poison(device: &Device, memory: Memory<u32>, word: u32) -> Result<()> {
    let memory: Memory<f32> = memory.cast();
    launch_on(device, &fill { out: memory.as_out(), length: memory.len(), value: f32::from_bits(word) })
}
