//! Device memory: its owners, allocations, pools, blocking reads, and driver objects that their
//! owner has dropped and the driver still holds.
//!
//! A value may be dropped inside a recording, where no call can be made. It may also be dropped
//! after a failed call that would have reported that it is unused. Dropping therefore only hands
//! the object to [`Device::retire`]. That frees it at once if possible. Otherwise it is freed when
//! something else is retired, when a recording ends, or with the device.
//!
//! Invariant: an object is freed at most once, and never while a graph can reach it.

use super::Device;
use super::driver::{Driver, Graph, Link, Pool};
use super::graph::{PinTable, Pins};
use super::pinned::Slot;
use crate::error::{Error, Result};
use crate::host_memory::HostMemory;
use bytemuck::Pod;
use std::mem::ManuallyDrop;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

/// The bits of an owner's number that name an arena: zero for a buffer, else the number of the
/// arena whose step has the memory. The remaining bits name the device.
const ARENA_BITS: u64 = (1 << 24) - 1;

/// Returns a new device number.
pub(super) fn new_identity() -> u64 {
    static DEVICES: AtomicU64 = AtomicU64::new(0);
    DEVICES.fetch_add(ARENA_BITS + 1, Ordering::Relaxed)
}

/// The read size above which the host's available memory is checked first.
const LARGE_READ_BYTES: usize = 64 << 20;

/// Returns the error for a read that the host has no memory for.
fn no_host_memory(requested_bytes: usize, free_bytes: u64) -> Error {
    let reason = "a read takes host memory of the same size: read one range at a time, or free some memory".into();
    Error::DeviceMemory { device: "the host".into(), requested_bytes, free_bytes, reason }
}

/// A driver object without an owner.
#[derive(Debug)]
pub(crate) enum DeferredFree {
    /// Memory of [`Driver::allocate`].
    Memory { address: u64, bytes: usize },
    /// A pool whose blocks have all been freed.
    Pool(Pool),
    /// A graph, and the pins that keep its memory alive.
    Graph { graph: Graph, pins: Pins },
    /// Pinned memory and its fence.
    Slot { slot: Slot, bytes: usize },
    /// A link to other ranks.
    Link(Link),
}

/// The reason why an object was not freed, and the object itself if freeing can be retried.
#[derive(Debug)]
struct NotEnded {
    error: Error,
    left: Option<DeferredFree>,
}

impl DeferredFree {
    /// Returns the name of the call that frees it.
    fn name(&self) -> &'static str {
        match self {
            Self::Memory { .. } => "free",
            Self::Pool(_) => "destroy_pool",
            Self::Graph { .. } => "destroy_graph",
            Self::Slot { .. } => "free_pinned",
            Self::Link(_) => "leave_link",
        }
    }

    /// Returns true if a graph can reach it.
    fn is_held(&self, pins: &PinTable) -> bool {
        matches!(*self, Self::Memory { address, bytes } if pins.holds(address, bytes))
    }

    /// Frees it after the device has finished the work that uses it.
    fn end(self, driver: &dyn Driver, deadline: Duration) -> Result<(), Box<NotEnded>> {
        let waits = matches!(self, Self::Graph { .. } | Self::Slot { .. } | Self::Link(_));
        if waits && let Err(error) = idle(driver, self.name(), deadline) {
            return Err(Box::new(NotEnded { error, left: Some(self) }));
        }
        // SAFETY: the caller of `retire` vouched that nothing else uses it, and it is not held by a
        // graph. For memory and pools the driver waits for queued work, and for the others that
        // work is done. This call consumes it.
        let ended = unsafe {
            match self {
                Self::Memory { address, bytes } => driver.free(address, bytes),
                Self::Pool(pool) => driver.destroy_pool(pool),
                // A graph that still exists keeps its memory.
                Self::Graph { graph, pins } => driver.destroy_graph(graph).inspect_err(|_| std::mem::forget(pins)),
                Self::Slot { slot, bytes } => slot.end(driver, bytes),
                Self::Link(link) => driver.leave_link(link),
            }
        };
        ended.map_err(|error| Box::new(NotEnded { error, left: None }))
    }
}

impl Device {
    /// Returns the number of the device, which is also the owner number of its buffers.
    pub(crate) fn identity(&self) -> u64 {
        self.shared.identity
    }

    /// Returns the owner number of the memory that an arena's steps have.
    pub(crate) fn owner_of_steps(&self, arena: u64) -> u64 {
        self.identity() | arena.clamp(1, ARENA_BITS)
    }

    /// Returns true for memory that may be used on this device: its own, and in a dry run its
    /// parents'. A recorded step may not use the memory of running steps.
    pub(crate) fn reaches(&self, owner: u64) -> bool {
        let (device, of_step) = (owner & !ARENA_BITS, owner & ARENA_BITS > 0);
        device == self.identity() || self.dry_run_state().is_some_and(|dry_run| dry_run.reaches(device, of_step))
    }

    /// Returns the number of the arena that owns this memory, if the memory is refused because its
    /// step runs while this device records another.
    pub(crate) fn arena_of_running_step(&self, owner: u64) -> Option<u64> {
        let arena = owner & ARENA_BITS;
        (arena > 0 && !self.reaches(owner) && self.reaches(owner & !ARENA_BITS)).then_some(arena)
    }

    pub(crate) fn free_bytes(&self, deadline: Duration) -> Result<u64> {
        self.call("free_bytes", deadline, |driver| driver.free_bytes())
    }

    /// Returns the bytes that the system has yet to provide for device memory and upload slots, or
    /// none if that is unknown.
    pub fn unbacked_bytes(&self) -> Result<Option<u64>> {
        let slots = self.unmade_slots_bytes()?;
        self.call("unbacked_bytes", self.deadline(), move |driver| {
            Ok(driver.unbacked_bytes().map(|bytes| bytes + slots))
        })
    }

    pub(crate) fn allocate(&self, bytes: usize) -> Result<u64> {
        self.call("allocate", self.deadline(), move |driver| driver.allocate(bytes))
    }

    /// Waits for the work queued before, until the deadline, and then copies.
    ///
    /// # Safety
    /// `from` is memory of this device, of at least `len` elements. It stays until the copy is done
    /// or the device is lost.
    pub(crate) unsafe fn download<T: Pod + Send>(&self, from: u64, len: usize, deadline: Duration) -> Result<Vec<T>> {
        let start = Instant::now();
        let bytes = len.saturating_mul(size_of::<T>());
        // The system grants memory that it does not have, and kills a process that writes to it.
        let available = (bytes >= LARGE_READ_BYTES).then(HostMemory::available_bytes);
        if let Some(available) = available.filter(|&available| bytes as u64 > available) {
            return Err(no_host_memory(bytes, available));
        }
        self.synchronize(deadline)?;
        self.call("download", deadline.saturating_sub(start.elapsed()), move |driver| {
            let zeros = bytemuck::allocation::try_zeroed_slice_box(len);
            let to = zeros.map_err(|()| no_host_memory(bytes, HostMemory::available_bytes()))?.into_vec();
            // After an error or a panic the copy may be in progress, so the memory stays.
            let mut to = ManuallyDrop::new(to);
            // SAFETY: `from` is device memory of `len` elements, which is this function's contract.
            // `to` has the same length and belongs to this call.
            unsafe { driver.download(from, bytemuck::cast_slice_mut(&mut to)) }?;
            Ok(ManuallyDrop::into_inner(to))
        })
    }

    /// Waits until nothing on this device can reach memory that its owner passes to another
    /// library.
    #[cfg(feature = "dlpack")]
    pub(crate) fn hand_over(&self, address: u64, bytes: usize) -> Result<()> {
        let refused = |got| Error::misuse("into_dlpack", "memory that only this device uses", got);
        if self.is_dry_run() {
            return Err(refused("a buffer of a dry run, which has no memory"));
        }
        // A thread that could launch with it, or record a launch, would have to borrow the buffer.
        // An existing graph needs no borrow.
        if self.pin_table().holds(address, bytes) {
            return Err(refused("a buffer that a captured step uses: end the capture first with `into_state`"));
        }
        self.synchronize(self.deadline())
    }

    pub(crate) fn create_pool(&self) -> Result<Pool> {
        self.call("create_pool", self.deadline(), |driver| driver.create_pool())
    }

    pub(crate) fn pool_allocate(&self, pool: Pool, bytes: usize, deadline: Duration) -> Result<u64> {
        self.call("pool_allocate", deadline, move |driver| driver.pool_allocate(pool, bytes))
    }

    /// Frees several blocks in one call to the driver thread, each regardless of the failures of
    /// others. The pool's owner calls it once for each block, when no tensor can use the block any
    /// more. Returns how many failed, and the first error.
    pub(crate) fn pool_give_back(
        &self,
        pool: Pool,
        blocks: Vec<(u64, usize)>,
        deadline: Duration,
    ) -> (usize, Result<()>) {
        let all = blocks.len();
        let given_back = self.call("pool_free", deadline, move |driver| {
            // SAFETY: the blocks came from this pool with these sizes. Their step is over, so no
            // work queued later uses them, and the owner drops them with this call.
            let free = |(address, bytes)| unsafe { driver.pool_free(pool, address, bytes) };
            let failed: Vec<Error> = blocks.into_iter().filter_map(|block| free(block).err()).collect();
            Ok((failed.len(), failed.into_iter().next()))
        });
        match given_back {
            Ok((failed, reason)) => (failed, reason.map_or(Ok(()), |reason| Err(self.after(reason)))),
            Err(error) => (all, Err(error)),
        }
    }

    pub(crate) fn trim_pool(&self, pool: Pool, keep_bytes: usize) -> Result<()> {
        self.synchronize(self.deadline())?;
        self.call("trim_pool", self.deadline(), move |driver| driver.trim_pool(pool, keep_bytes))
    }

    /// Frees a dropped object. This happens now, or as soon as no graph uses it and this thread
    /// records nothing. The objects of a lost device are kept, because the driver could block
    /// forever.
    ///
    /// # Safety
    /// The object belongs to this device. Only queued work, pinned graphs and [`DeferredFree`]
    /// itself use it.
    pub(crate) unsafe fn retire(&self, thing: DeferredFree) {
        if !self.is_dry_run() {
            self.deferred().push(thing);
            self.free_deferred();
        }
    }

    /// Frees the dropped objects that can be freed now.
    pub(super) fn free_deferred(&self) {
        // The objects of a lost device stay until the process ends.
        if self.is_recorded_here() || self.lost().is_some() {
            return;
        }
        // Freeing a graph releases memory that waited for it.
        while let Some(ready) = self.take_ready() {
            let (name, deadline) = (ready.name(), self.deadline());
            let ended = self.call(name, deadline, move |driver| Ok(ready.end(driver, deadline)));
            match ended {
                Ok(Ok(())) => {}
                Ok(Err(failed)) => {
                    let NotEnded { error, left } = *failed;
                    tracing::warn!(%error, again = left.is_some(), "a dropped device object could not be freed");
                    self.after(error);
                    if let Some(left) = left {
                        return self.deferred().push(left);
                    }
                }
                Err(error) => return tracing::warn!(%error, "dropped device objects stay until the process ends"),
            }
        }
    }

    /// Takes one object that nothing holds any more.
    fn take_ready(&self) -> Option<DeferredFree> {
        let mut deferred = self.deferred();
        let ready = deferred.iter().position(|thing| !thing.is_held(self.pin_table()))?;
        Some(deferred.remove(ready))
    }
}

/// Frees all objects that no graph holds, regardless of the failures of others, and then the
/// driver. Returns true if nothing failed and nothing is left. A driver that is stuck, panics, or
/// was lost while this call was queued is left as it is.
pub(super) fn end_all(
    mut things: Vec<DeferredFree>,
    pins: &PinTable,
    driver: Arc<dyn Driver>,
    lost: &OnceLock<String>,
    deadline: Duration,
) -> bool {
    let driver = ManuallyDrop::new(driver);
    if lost.get().is_some() {
        return false;
    }
    let mut all = true;
    // Freeing a graph releases its memory.
    while let Some(ready) = things.iter().position(|thing| !thing.is_held(pins)) {
        match things.remove(ready).end(&**driver, deadline) {
            Ok(()) => {}
            Err(failed) if matches!(failed.error, Error::Timeout { .. }) => return false,
            Err(_) => all = false,
        }
    }
    drop(ManuallyDrop::into_inner(driver));
    all && things.is_empty()
}

/// Waits on the driver thread until the device has finished all queued work.
fn idle(driver: &dyn Driver, call: &'static str, deadline: Duration) -> Result<()> {
    let start = Instant::now();
    while !driver.poll()? {
        let waited = start.elapsed();
        if waited >= deadline {
            return Err(Error::Timeout { call, waited, report: None });
        }
        std::thread::sleep(Duration::from_micros(50));
    }
    Ok(())
}
