//! The only path of host bytes to the device: a bounded ring of pinned slots.
//!
//! A copy from pageable memory runs on the caller's thread for an unbounded time. A copy from a
//! mapped file can stall on the disk inside the driver. Every source is therefore first written
//! into a slot, and the device copies from there, piece by piece. The exception is the caller's
//! pinned memory (`page_copies`), which works like a slot.
//!
//! Invariant: a slot is written again only after the device has passed the fence after its last
//! copy. That wait has a deadline, and no other call here blocks. A failed call leaves the ring
//! unchanged, so the next one tries again.

use super::handle::Device;
use super::ring::{ALIGN_BYTES, Fill, RingSize, Slot, Staging};
use crate::error::{Error, Result};
use std::sync::{Mutex, MutexGuard, TryLockError};
use std::time::{Duration, Instant};

/// The most bytes that are written before their copy is queued, so that the device copies one piece
/// while the host writes the next.
const PIECE_BYTES: usize = 8 << 20;

impl Device {
    /// Queues a copy of host bytes. They may be reused on return, or are pinned and do not change.
    /// If there is a `transit`, it runs concurrently with the work queued before
    /// ([`Driver::queue_upload`]). Waits for room to stage the bytes, at most until the deadline.
    ///
    /// # Safety
    /// `to` is device memory of at least `from.len()` bytes, and so is `transit`, which nothing
    /// else uses.
    pub(crate) unsafe fn stage(&self, to: u64, transit: Option<u64>, from: &[u8], deadline: Duration) -> Result<()> {
        // SAFETY: both addresses meet this function's requirements, which are the same.
        if unsafe { self.copy_from_pages(to, transit, from)? } {
            return Ok(());
        }
        let fill = |offset: usize, place: &mut [u8]| place.copy_from_slice(&from[offset..][..place.len()]);
        // SAFETY: `to` and `transit` meet this function's requirements, which are the same.
        unsafe { self.stage_with(to, transit, from.len(), &fill, deadline, &mut |_| Ok(())) }
    }

    /// Stages `bytes` bytes that `fill` writes, like [`Device::stage`]. After each piece it calls
    /// `staged` with the number of bytes so far. Other uploads may run between the pieces.
    ///
    /// # Safety
    /// `to` is device memory of at least `bytes` bytes, and so is `transit`, which nothing else
    /// uses.
    pub(crate) unsafe fn stage_with(
        &self,
        to: u64,
        transit: Option<u64>,
        bytes: usize,
        fill: &Fill<'_>,
        deadline: Duration,
        staged: &mut dyn FnMut(usize) -> Result<()>,
    ) -> Result<()> {
        self.check("upload")?;
        let Some(ring) = self.staging() else { return Ok(()) };
        let _span = tracing::debug_span!("upload", bytes).entered();
        let start = Instant::now();
        let mut done = 0;
        while done < bytes {
            let waited = start.elapsed();
            let left = deadline.saturating_sub(waited).min(self.deadline());
            if left.is_zero() {
                return Err(self.lose_to(Error::Timeout { call: "upload", waited, report: None }));
            }
            let rest = |offset: usize, place: &mut [u8]| fill(done + offset, place);
            let at = |address: u64| address + done as u64;
            let mut ring = lock(self, ring, left)?;
            // SAFETY: both have `bytes` bytes by this function's contract, and so `bytes - done`
            // from `done` on.
            done += unsafe { ring.stage(self, at(to), transit.map(at), bytes - done, &rest, left)? };
            drop(ring);
            staged(done)?;
        }
        Ok(())
    }

    /// Returns the bytes that uploads may still take from the system.
    pub(super) fn unmade_slots_bytes(&self) -> Result<u64> {
        let ring = self.staging().map(|ring| lock(self, ring, self.deadline())).transpose()?;
        Ok(ring.map_or(0, |ring| ring.unmade_bytes()))
    }
}

/// Locks the ring once no other thread uses it.
fn lock<'r>(device: &Device, ring: &'r Mutex<Staging>, deadline: Duration) -> Result<MutexGuard<'r, Staging>> {
    device.until("upload", deadline, |_| {
        device.check("upload")?;
        Ok(match ring.try_lock() {
            Ok(ring) => Some(ring),
            // A source that panicked has left the ring unchanged.
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        })
    })
}

impl Staging {
    /// Writes the first piece of `bytes` into a slot, queues its copy to the device's memory at
    /// `to`, and returns its length.
    ///
    /// # Safety
    /// `to` is device memory of at least `bytes` bytes until the copy is done, and so is `transit`,
    /// which nothing else uses.
    pub(super) unsafe fn stage(
        &mut self,
        device: &Device,
        to: u64,
        transit: Option<u64>,
        bytes: usize,
        fill: &Fill<'_>,
        deadline: Duration,
    ) -> Result<usize> {
        let bytes = self.room(device, deadline)?.min(bytes).min(PIECE_BYTES);
        let slot = &mut self.slots[self.current];
        let place = (slot.address + slot.filled as u64) as *mut u8;
        // SAFETY: the slot has room for the piece, and no queued copy reads there. Its last fence
        // was passed, and what was queued since lies before `filled`.
        let place = unsafe { std::slice::from_raw_parts_mut(place, bytes) };
        self.writers.write(place, fill);
        // This also holds if the next call fails, because it may have queued the copy.
        slot.filled += bytes.next_multiple_of(ALIGN_BYTES);
        let from = place.as_ptr() as u64;
        device.call("upload", device.deadline(), move |driver| {
            // SAFETY: `to` and `transit` meet this function's requirements. The source lies in a
            // slot, which stays until the ring ends and is written again only after a passed fence.
            unsafe { driver.queue_upload(to, std::slice::from_raw_parts(from as *const u8, bytes), transit) }
        })?;
        Ok(bytes)
    }

    /// Moves to the next slot if the current one is full. Returns the room in the current one,
    /// above zero.
    fn room(&mut self, device: &Device, deadline: Duration) -> Result<usize> {
        let RingSize { slots, slot_bytes } = self.size;
        let next = match self.slots.get(self.current) {
            Some(slot) if slot.filled < slot_bytes => return Ok(slot_bytes - slot.filled),
            Some(slot) => {
                let fence = slot.fence;
                device.call("record_fence", deadline, move |driver| driver.record_fence(fence))?;
                (self.current + 1) % slots
            }
            None => 0,
        };
        match self.slots.get_mut(next) {
            Some(slot) => {
                let fence = slot.fence;
                device.wait("upload", deadline, move |driver| driver.poll_fence(fence))?;
                slot.filled = 0;
            }
            None => self.slots.push(Slot::new(device, slot_bytes, deadline)?),
        }
        self.current = next;
        Ok(slot_bytes)
    }
}

impl Slot {
    pub(super) fn new(device: &Device, bytes: usize, deadline: Duration) -> Result<Self> {
        device.call("allocate_pinned", deadline, move |driver| {
            let fence = driver.create_fence()?;
            let address = driver.allocate_pinned(bytes).inspect_err(|_| {
                // SAFETY: the fence was just made. Leaking it is the lesser harm.
                let _ = unsafe { driver.destroy_fence(fence) };
            })?;
            Ok(Self { address, fence, filled: 0 })
        })
    }
}
