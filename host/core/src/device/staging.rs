//! The paths of host bytes to the device: a bounded ring of pinned slots, and pinned pages of
//! callers.
//!
//! A copy from pageable memory runs on the caller's thread for an unbounded time. A copy from a
//! mapped file can stall on the disk inside the driver. Every source is therefore first written
//! into a slot of the ring, and the device copies from there, piece by piece. The exception is the
//! caller's pinned memory, which works like a slot:
//!
//! ```text
//! held by its owner --upload--> a fence after the copy --passed--> may be written again
//!      |                                                              ^
//!      '--dropped--> spare: reused for the same size after the fence is passed
//! ```
//! Invariants:
//!
//! - A slot or page is written again or freed only after the device has passed the fence after its
//!   last copy. That wait has a deadline, and no other call here blocks. On a lost device the
//!   memory stays.
//! - A failed upload leaves the ring unchanged, so the next one tries again.
//! - A slot's memory and its fence have the same lifetime. A block of pages is held or spare.

use super::driver::{DeviceKind, Driver, Fence};
use super::handle::Device;
use super::memory::DeferredFree;
use crate::error::{Error, Result};
use crate::shortage::HostMemory;
use cuda_std::float_mode;
use rayon::{ThreadPool, ThreadPoolBuilder};
use std::collections::BTreeMap;
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

/// The number of slots of a ring, and the bytes of each. The default has none.
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

/// A slot of pinned memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Slot {
    address: u64,
    fence: Fence,
    /// The number of bytes from the start that are in use.
    filled: usize,
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

impl Slot {
    pub(super) fn address(&self) -> u64 {
        self.address
    }

    pub(super) fn fence(&self) -> Fence {
        self.fence
    }

    /// Frees the memory and its fence.
    ///
    /// # Safety
    /// The slot was made with `bytes` bytes, no copy from or to it is queued, and it is not used
    /// afterwards.
    pub(super) unsafe fn end(self, driver: &dyn Driver, bytes: usize) -> Result<()> {
        // SAFETY: no copy is queued and nothing uses the slot afterwards, by this function's
        // contract. `Slot::new` made both.
        unsafe { driver.destroy_fence(self.fence).and(driver.free_pinned(self.address, bytes)) }
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
    unsafe fn stage(
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

/// The most bytes that are kept for later requests. Beyond this, the block that was returned first
/// is freed.
const MOST_SPARE_BYTES: usize = 512 << 20;

/// The copies from a block that the device may still have to make.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Copies {
    None,
    /// All copies come before the block's fence.
    BeforeFence,
    /// The call that would have reported the state failed.
    Unknown,
}

/// A block of pinned memory.
#[derive(Clone, Copy, Debug)]
struct Block {
    slot: Slot,
    bytes: usize,
    copies: Copies,
}

/// The blocks of a device.
#[derive(Debug, Default)]
pub(super) struct Pages {
    /// The held blocks, by address.
    held: BTreeMap<u64, Block>,
    /// The spare blocks, in the order in which they were returned.
    spare: Vec<Block>,
}

impl Pages {
    /// Returns the block that contains these bytes. Zero bytes are in no block, because another
    /// block may begin at their end.
    fn around(&mut self, bytes: &[u8]) -> Option<&mut Block> {
        let start = bytes.first().map(std::ptr::from_ref)? as u64;
        let (&address, block) = self.held.range_mut(..=start).next_back()?;
        let end = (start - address).checked_add(bytes.len() as u64)?;
        (end <= block.bytes as u64).then_some(block)
    }

    /// Returns all blocks for freeing. None of them is held.
    pub(super) fn into_deferred(self) -> impl Iterator<Item = DeferredFree> {
        self.spare.into_iter().map(Block::deferred)
    }
}

impl Block {
    fn deferred(self) -> DeferredFree {
        DeferredFree::Slot { slot: self.slot, bytes: self.bytes }
    }
}

impl Device {
    /// Returns `bytes` bytes (above zero) with unspecified contents. [`Device::give_pages_back`]
    /// frees them. `admit` is called if they are newly allocated.
    pub(crate) fn take_pages(&self, bytes: usize, admit: impl FnOnce() -> Result<()>) -> Result<u64> {
        self.check("page-locked memory")?;
        if self.is_dry_run() {
            return Err(Error::misuse("page-locked memory", "a device", "a dry run, which has no memory"));
        }
        let block = match self.spare_pages(bytes)? {
            Some(spare) => spare,
            None => {
                admit()?;
                Block { slot: Slot::new(self, bytes, self.deadline())?, bytes, copies: Copies::None }
            }
        };
        let address = block.slot.address();
        self.pages().held.insert(address, block);
        Ok(address)
    }

    /// Takes the first spare block of this size, if no copy from it is pending.
    fn spare_pages(&self, bytes: usize) -> Result<Option<Block>> {
        let first = |pages: &Pages| pages.spare.iter().position(|block| block.bytes == bytes);
        let fence = {
            let pages = self.pages();
            first(&pages).map(|at| pages.spare[at].slot.fence())
        };
        let Some(fence) = fence else { return Ok(None) };
        if !self.call("poll_fence", self.deadline(), move |driver| driver.poll_fence(fence))? {
            return Ok(None);
        }
        let mut pages = self.pages();
        // Another thread may have taken it meanwhile.
        let at = first(&pages).filter(|&at| pages.spare[at].slot.fence() == fence);
        Ok(at.map(|at| Block { copies: Copies::None, ..pages.spare.remove(at) }))
    }

    /// Waits until no copy from the block at an address is pending.
    pub(crate) fn wait_for_pages(&self, address: u64) -> Result<()> {
        let Some(Block { slot, copies, .. }) = self.pages().held.get(&address).copied() else { return Ok(()) };
        let fence = slot.fence();
        match copies {
            Copies::None => return Ok(()),
            Copies::BeforeFence => self.wait("upload", self.deadline(), move |driver| driver.poll_fence(fence))?,
            Copies::Unknown => self.synchronize(self.deadline())?,
        }
        if let Some(block) = self.pages().held.get_mut(&address) {
            block.copies = Copies::None;
        }
        Ok(())
    }

    /// Keeps a block for the next request of the same size, or frees it.
    ///
    /// # Safety
    /// Nothing reads or writes it any more except queued copies.
    pub(crate) unsafe fn give_pages_back(&self, address: u64) {
        let freed = {
            let mut pages = self.pages();
            let Some(block) = pages.held.remove(&address) else { return };
            pages.spare.push(block);
            let mut kept_bytes = pages.spare.iter().map(|block| block.bytes).sum::<usize>();
            let is_freed = |block: &mut Block| {
                let is_freed = kept_bytes > MOST_SPARE_BYTES || block.copies == Copies::Unknown;
                kept_bytes -= if is_freed { block.bytes } else { 0 };
                is_freed
            };
            pages.spare.extract_if(.., is_freed).collect::<Vec<_>>()
        };
        // SAFETY: the blocks belong to this device, and nothing owns them any more. At most copies
        // from them are queued.
        freed.into_iter().for_each(|block| unsafe { self.retire(block.deferred()) });
    }

    /// Queues a copy directly from pinned memory of this device. Returns false if the bytes do not
    /// lie in such memory.
    ///
    /// # Safety
    /// The requirements of [`Device::stage`].
    unsafe fn copy_from_pages(&self, to: u64, transit: Option<u64>, from: &[u8]) -> Result<bool> {
        let Some(Block { slot, .. }) = self.pages().around(from).copied() else { return Ok(false) };
        let (fence, address, bytes) = (slot.fence(), from.as_ptr() as u64, from.len());
        let queued = self.call("upload", self.deadline(), move |driver: &dyn Driver| {
            // SAFETY: `to` and `transit` meet this function's requirements. The source lies in
            // pinned memory. It is borrowed until this function returns, and then neither written
            // nor freed before the fence is passed.
            unsafe { driver.queue_upload(to, std::slice::from_raw_parts(address as *const u8, bytes), transit) }?;
            driver.record_fence(fence)
        });
        if let Some(block) = self.pages().around(from) {
            // An unknown state stays unknown even when another thread's copy is queued.
            let unknown = queued.is_err() || block.copies == Copies::Unknown;
            block.copies = if unknown { Copies::Unknown } else { Copies::BeforeFence };
        }
        queued.map(|()| true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The test does not access the memory, so it needs no owner.
    #[test]
    fn spare_pages_are_limited() {
        let device = Device::open(DeviceKind::Emulated).unwrap();
        let take = |number: usize, is_new: bool| {
            let mut admitted = false;
            let admit = || {
                admitted = true;
                Ok(())
            };
            let address = device.take_pages(MOST_SPARE_BYTES / 3 + number, admit).unwrap();
            assert_eq!(admitted, is_new, "{number}");
            address
        };
        let blocks = [0, 1, 2, 3].map(|number| take(number, true));
        for (given_back, address) in (1..).zip(blocks) {
            // SAFETY: nothing has accessed it.
            unsafe { device.give_pages_back(address) };
            assert_eq!(device.pages().spare.len(), 2.min(given_back), "{given_back}");
        }
        for number in 0..4 {
            take(number, number < 2);
        }
    }
}
