//! The path of host bytes to the device: a bounded ring of pinned slots.
//!
//! A copy from pageable memory runs on the caller's thread for an unbounded time. A copy from a
//! mapped file can stall on the disk inside the driver. Every source is therefore first written
//! into a slot of the ring, and the device copies from there, piece by piece. The exception is the
//! caller's pinned memory, from which the device copies directly (see `pinned`).
//!
//! Invariants:
//!
//! - A slot is written again only after the device has passed the fence after its last copy. That
//!   wait has a deadline, and no other call here blocks.
//! - A failed upload leaves the ring unchanged, so the next one tries again.

use super::Device;
use super::driver::DeviceKind;
use super::pinned::Slot;
use crate::error::{Error, Result};
use crate::host_memory::HostMemory;
use cuda_std::float_mode;
use rayon::{ThreadPool, ThreadPoolBuilder};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError, TryLockError};
use std::time::{Duration, Instant};

/// The source of an upload: writes the bytes from an offset on into a slot. Offsets are multiples
/// of [`ALIGN_BYTES`]. Several threads write parts of a piece.
pub(crate) type Fill<'f> = dyn Fn(usize, &mut [u8]) + Sync + 'f;

/// The bytes of the smallest slot.
const LEAST_SLOT_BYTES: usize = 4096;
/// The bytes of a piece that a thread writes at a time.
const PART_BYTES: usize = 128 << 10;
/// The alignment of a piece within its slot.
const ALIGN_BYTES: usize = 256;

/// The number of slots of a ring, and the bytes of each slot. The default has no slots.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct RingSize {
    slots: usize,
    slot_bytes: usize,
}

impl RingSize {
    /// Returns a size of at least one slot of at least 4 KiB.
    ///
    /// # Errors
    /// [`Error::DeviceMemory`] if it exceeds the host's available memory.
    pub(super) fn asked(slots: usize, slot_bytes: usize) -> Result<Self> {
        let slots = slots.max(1);
        let size = slot_bytes.max(LEAST_SLOT_BYTES).checked_next_multiple_of(ALIGN_BYTES);
        let size = size.and_then(|slot_bytes| Some((slot_bytes, slot_bytes.checked_mul(slots)?)));
        let free_bytes = HostMemory::available_bytes();
        match size {
            Some((slot_bytes, bytes)) if bytes as u64 <= free_bytes => Ok(Self { slots, slot_bytes }),
            _ => Err(Error::DeviceMemory {
                device: "the host".into(),
                requested_bytes: slot_bytes.saturating_mul(slots),
                free_bytes,
                reason: format!(
                    "staging needs {slots} slots of {slot_bytes} bytes; request less with `DeviceBuilder::staging`"
                ),
            }),
        }
    }

    /// Returns the default size for a kind of device. The emulator copies at once, so large slots
    /// would only waste host memory.
    pub(super) fn of(kind: DeviceKind) -> Self {
        let slot_bytes = if kind == DeviceKind::Emulated { 1 << 20 } else { 64 << 20 };
        Self { slots: 2, slot_bytes }
    }
}

/// The ring. Its slots are allocated when they are first needed.
#[derive(Debug, Default)]
pub(super) struct Staging {
    size: RingSize,
    slots: Vec<Slot>,
    /// The index of the slot that is being filled.
    current: usize,
    writers: Writers,
}

impl Staging {
    pub(super) fn new(size: RingSize) -> Self {
        Self { size, ..Self::default() }
    }

    /// Returns the bytes of the slots that are not allocated yet.
    fn unmade_bytes(&self) -> u64 {
        ((self.size.slots - self.slots.len()) * self.size.slot_bytes) as u64
    }

    /// Returns the slots for freeing, and the bytes of each.
    pub(super) fn into_slots(self) -> (Vec<Slot>, usize) {
        (self.slots, self.size.slot_bytes)
    }
}

/// Threads that write pieces, because one thread is slower than the link to the device. The ring
/// owns them, because all threads of a shared pool may be waiting for the ring.
#[derive(Debug, Default)]
struct Writers {
    pool: OnceLock<Option<ThreadPool>>,
}

impl Writers {
    /// Writes a piece. A thread of a pool writes it without help. While waiting for helpers, it
    /// could be given another upload, which would wait for this one.
    fn write(&self, piece: &mut [u8], fill: &Fill<'_>) {
        let alone = piece.len() <= PART_BYTES || rayon::current_thread_index().is_some();
        let pool = if alone { None } else { self.pool.get_or_init(Self::start).as_ref() };
        let Some(pool) = pool else { return fill(0, piece) };
        let parts = Mutex::new(piece.chunks_mut(PART_BYTES).enumerate());
        let next = || parts.lock().unwrap_or_else(PoisonError::into_inner).next();
        let write = || {
            while let Some((number, part)) = next() {
                fill(number * PART_BYTES, part);
            }
        };
        pool.in_place_scope(|scope| {
            (0..pool.current_num_threads()).for_each(|_| scope.spawn(|_| write()));
            write();
        });
    }

    /// Starts one thread fewer than there are processors, because the caller also writes. None if
    /// no thread can be started.
    fn start() -> Option<ThreadPool> {
        let threads = std::thread::available_parallelism().map_or(1, usize::from).saturating_sub(1).max(1);
        let name = |number| format!("stepscope-upload-{number}");
        let pool = ThreadPoolBuilder::new().num_threads(threads).thread_name(name);
        let pool = pool.start_handler(|_| float_mode::set_default()).build();
        pool.inspect_err(|error| tracing::warn!(%error, "uploads are written by one thread")).ok()
    }
}

/// The most bytes that are written before their copy is queued, so that the device copies one piece
/// while the host writes the next.
const PIECE_BYTES: usize = 8 << 20;

impl Device {
    /// Queues a copy of host bytes. They may be reused on return, or are pinned and do not change.
    /// If there is a `bounce`, it runs concurrently with the work queued before
    /// ([`Driver::queue_upload`]). Waits for room to stage the bytes, at most until the deadline.
    ///
    /// # Safety
    /// `to` is device memory of at least `from.len()` bytes, and so is `bounce`, which nothing
    /// else uses.
    pub(crate) unsafe fn stage(&self, to: u64, bounce: Option<u64>, from: &[u8], deadline: Duration) -> Result<()> {
        // SAFETY: both addresses meet this function's requirements, which are the same.
        if unsafe { self.copy_from_pages(to, bounce, from)? } {
            return Ok(());
        }
        let fill = |offset: usize, place: &mut [u8]| place.copy_from_slice(&from[offset..][..place.len()]);
        // SAFETY: `to` and `bounce` meet this function's requirements, which are the same.
        unsafe { self.stage_with(to, bounce, from.len(), &fill, deadline, &mut |_| Ok(())) }
    }

    /// Stages `bytes` bytes that `fill` writes, like [`Device::stage`]. After each piece it calls
    /// `staged` with the number of bytes so far. Other uploads may run between the pieces.
    ///
    /// # Safety
    /// `to` is device memory of at least `bytes` bytes, and so is `bounce`, which nothing else
    /// uses.
    pub(crate) unsafe fn stage_with(
        &self,
        to: u64,
        bounce: Option<u64>,
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
            done += unsafe { ring.stage(self, at(to), bounce.map(at), bytes - done, &rest, left)? };
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
    /// `to` is device memory of at least `bytes` bytes until the copy is done, and so is `bounce`,
    /// which nothing else uses.
    unsafe fn stage(
        &mut self,
        device: &Device,
        to: u64,
        bounce: Option<u64>,
        bytes: usize,
        fill: &Fill<'_>,
        deadline: Duration,
    ) -> Result<usize> {
        let bytes = self.room(device, deadline)?.min(bytes).min(PIECE_BYTES);
        let slot = &mut self.slots[self.current];
        let place = (slot.address() + slot.filled as u64) as *mut u8;
        // SAFETY: the slot has room for the piece, and no queued copy reads there. Its last fence
        // was passed, and what was queued since lies before `filled`.
        let place = unsafe { std::slice::from_raw_parts_mut(place, bytes) };
        self.writers.write(place, fill);
        // This also holds if the next call fails, because it may have queued the copy.
        slot.filled += bytes.next_multiple_of(ALIGN_BYTES);
        let from = place.as_ptr() as u64;
        device.call("upload", device.deadline(), move |driver| {
            // SAFETY: `to` and `bounce` meet this function's requirements. The source lies in a
            // slot, which stays until the ring ends and is written again only after a passed fence.
            unsafe { driver.queue_upload(to, std::slice::from_raw_parts(from as *const u8, bytes), bounce) }
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
                let fence = slot.fence();
                device.call("record_fence", deadline, move |driver| driver.record_fence(fence))?;
                (self.current + 1) % slots
            }
            None => 0,
        };
        match self.slots.get_mut(next) {
            Some(slot) => {
                let fence = slot.fence();
                device.wait("upload", deadline, move |driver| driver.poll_fence(fence))?;
                slot.filled = 0;
            }
            None => self.slots.push(Slot::new(device, slot_bytes, deadline)?),
        }
        self.current = next;
        Ok(slot_bytes)
    }
}
