//! The one way host bytes reach the device: a bounded ring of page-locked slots.
//!
//! A copy from pageable memory runs on the caller's thread for as long as the driver likes, and one from a mapped file can
//! stall on the disk inside the driver. So every source is first copied into a slot, and the device copies from there.
//! Neighbours on the device are gathered into one copy. Invariant: a slot is written again only when the device has passed
//! the fence behind its last copy; that wait has a deadline, and no other call here blocks.

use super::device::Device;
use super::{Driver, Fence};
use crate::error::{Error, Result};
use rayon::prelude::*;
use std::time::{Duration, Instant};

/// A copy is queued once it has gathered this much, so that the device starts while the host still gathers.
const PIECE_BYTES: usize = 4 << 20;
/// Copies larger than this are made by several threads, each with parts of this size.
const PARALLEL_BYTES: usize = 512 << 10;
/// Where a copy starts within its slot.
const ALIGN_BYTES: usize = 256;

/// Slots of a ring, and the bytes of each.
#[derive(Clone, Copy, Debug)]
pub(super) struct RingSize {
    pub(super) slots: usize,
    pub(super) slot_bytes: usize,
}

impl Default for RingSize {
    fn default() -> Self {
        Self { slots: 2, slot_bytes: 64 << 20 }
    }
}

/// The ring. Its slots are made when they are first needed.
#[derive(Debug, Default)]
pub(super) struct Staging {
    size: RingSize,
    slots: Vec<Slot>,
    current: usize,
    gathered: Option<Gathered>,
}

/// Page-locked memory.
#[derive(Debug)]
struct Slot {
    address: u64,
    fence: Fence,
    /// Bytes from the start that are in use.
    filled: usize,
}

/// The copy that is being gathered at the end of the current slot.
#[derive(Clone, Copy, Debug)]
struct Gathered {
    to: u64,
    start: usize,
    bytes: usize,
}

impl Staging {
    pub(super) fn new(size: RingSize) -> Self {
        Self { size, slots: Vec::new(), current: 0, gathered: None }
    }

    /// Stages `from` for the device's memory at `to`; [`Staging::flush`] queues what is still gathered then.
    ///
    /// # Safety
    /// `to` is device memory of at least `from.len()` bytes, until the copy is done.
    pub(super) unsafe fn push(
        &mut self,
        device: &Device,
        mut to: u64,
        mut from: &[u8],
        deadline: Duration,
    ) -> Result<()> {
        while !from.is_empty() {
            let continues = self.gathered.is_some_and(|gathered| gathered.to + gathered.bytes as u64 == to);
            if !continues {
                self.flush(device)?;
            }
            let room = self.room(device, !continues, deadline)?;
            let (part, rest) = from.split_at(from.len().min(room).min(PIECE_BYTES));
            let slot = &mut self.slots[self.current];
            // SAFETY: the slot has room for the part, and no queued copy reads there: its last fence was passed, and what was
            // queued since lies before `filled`.
            let place =
                unsafe { std::slice::from_raw_parts_mut((slot.address + slot.filled as u64) as *mut u8, part.len()) };
            copy(part, place);
            let gathered = self.gathered.get_or_insert(Gathered { to, start: slot.filled, bytes: 0 });
            gathered.bytes += part.len();
            slot.filled += part.len();
            if gathered.bytes >= PIECE_BYTES {
                self.flush(device)?;
            }
            (to, from) = (to + part.len() as u64, rest);
        }
        Ok(())
    }

    /// Queues the copy that is being gathered.
    pub(super) fn flush(&mut self, device: &Device) -> Result<()> {
        let Some(Gathered { to, start, bytes }) = self.gathered.take() else { return Ok(()) };
        let slot = &self.slots[self.current];
        // SAFETY: `push` wrote these bytes of the slot, and writes them again only behind a passed fence.
        let from = unsafe { std::slice::from_raw_parts((slot.address + start as u64) as *const u8, bytes) };
        // SAFETY: the promise made to `push`; the source is page-locked.
        device.direct("upload", |driver| unsafe { driver.upload(to, from) })
    }

    /// Bytes that the current slot can still take, above zero; moves on to the next slot when it is full.
    fn room(&mut self, device: &Device, align: bool, deadline: Duration) -> Result<usize> {
        if let Some(slot) = self.slots.get_mut(self.current) {
            if align {
                slot.filled = slot.filled.next_multiple_of(ALIGN_BYTES);
            }
            if slot.filled < self.size.slot_bytes {
                return Ok(self.size.slot_bytes - slot.filled);
            }
            self.flush(device)?;
            let fence = self.slots[self.current].fence;
            device.direct("record_fence", |driver| driver.record_fence(fence))?;
            self.current = (self.current + 1) % self.size.slots;
        }
        match self.slots.get_mut(self.current) {
            Some(slot) => {
                device.wait("upload", deadline, |driver| driver.poll_fence(slot.fence))?;
                slot.filled = 0;
            }
            None => self.slots.push(Slot::new(device, self.size.slot_bytes, deadline)?),
        }
        Ok(self.size.slot_bytes)
    }

    /// Gives the slots back, once the device has done what reads them.
    pub(super) fn end(self, driver: &dyn Driver, deadline: Duration) -> Result<()> {
        let start = Instant::now();
        while !self.slots.is_empty() && !driver.poll()? {
            if start.elapsed() >= deadline {
                return Err(Error::Timeout { call: "free_pinned", waited: start.elapsed(), report: None });
            }
            std::thread::sleep(Duration::from_micros(50));
        }
        for Slot { address, fence, .. } in self.slots {
            // SAFETY: all copies are done, and the ring ends here.
            unsafe {
                driver.destroy_fence(fence)?;
                driver.free_pinned(address, self.size.slot_bytes)?;
            }
        }
        Ok(())
    }
}

impl Slot {
    fn new(device: &Device, bytes: usize, deadline: Duration) -> Result<Self> {
        device.bounded("allocate_pinned", deadline, move |driver| {
            let fence = driver.create_fence()?;
            let address = driver.allocate_pinned(bytes).inspect_err(|_| {
                // SAFETY: the fence was just made. That it may stay is the smaller evil.
                let _ = unsafe { driver.destroy_fence(fence) };
            })?;
            Ok(Self { address, fence, filled: 0 })
        })
    }
}

fn copy(from: &[u8], to: &mut [u8]) {
    if from.len() <= PARALLEL_BYTES {
        to.copy_from_slice(from);
    } else {
        let parts = to.par_chunks_mut(PARALLEL_BYTES).zip(from.par_chunks(PARALLEL_BYTES));
        parts.for_each(|(to, from)| to.copy_from_slice(from));
    }
}
