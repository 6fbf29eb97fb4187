//! The ring of pinned slots that uploads pass through, and the threads that write into it.
//!
//! `staging` decides when a slot is written, copied from and reused. Invariant: a slot's memory and
//! its fence have the same lifetime.

use super::calls::{Driver, Fence};
use super::description::DeviceKind;
use crate::error::{Error, Result};
use crate::shortage::HostMemory;
use cuda_std::float_mode;
use rayon::{ThreadPool, ThreadPoolBuilder};
use std::sync::{Mutex, OnceLock, PoisonError};

/// The source of an upload: writes the bytes from an offset on into a slot. Offsets are multiples
/// of [`ALIGN_BYTES`]. Several threads write parts of a piece.
pub(crate) type Fill<'f> = dyn Fn(usize, &mut [u8]) + Sync + 'f;

/// The bytes of the smallest slot.
const LEAST_SLOT_BYTES: usize = 4096;
/// The bytes of a piece that a thread writes at a time.
const PART_BYTES: usize = 128 << 10;
/// The alignment of a piece within its slot.
pub(super) const ALIGN_BYTES: usize = 256;

/// The number of slots of a ring, and the bytes of each. The default has none.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct RingSize {
    pub(super) slots: usize,
    pub(super) slot_bytes: usize,
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
    pub(super) size: RingSize,
    pub(super) slots: Vec<Slot>,
    /// The index of the slot that is being filled.
    pub(super) current: usize,
    pub(super) writers: Writers,
}

/// A slot of pinned memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Slot {
    pub(super) address: u64,
    pub(super) fence: Fence,
    /// The number of bytes from the start that are in use.
    pub(super) filled: usize,
}

impl Staging {
    pub(super) fn new(size: RingSize) -> Self {
        Self { size, ..Self::default() }
    }

    /// Returns the bytes of the slots that are not allocated yet.
    pub(super) fn unmade_bytes(&self) -> u64 {
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
pub(super) struct Writers {
    pool: OnceLock<Option<ThreadPool>>,
}

impl Writers {
    /// Writes a piece. A thread of a pool writes it without help. While waiting for helpers, it
    /// could be given another upload, which would wait for this one.
    pub(super) fn write(&self, piece: &mut [u8], fill: &Fill<'_>) {
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
