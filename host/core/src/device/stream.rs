//! The work that is queued on a device: the launches of a step, which does not wait for each of
//! them, and exchanges with the devices of other ranks, which run on a side stream.
//!
//! ```text
//! step              | prepare 1 | prepare 2 | prepare 3 | ..      | end: waits for the last
//! driver thread     |           | launch 1  | launch 2  | launch 3 | ..
//! ```
//! A driver whose launch only queues a kernel reports nothing but failures. Such a launch is posted
//! to the driver thread, and the step continues. For any other driver the step waits. The path is
//! one-way: a step has [`Launches`], which call the [`Device`], which calls the driver thread.
//!
//! Invariants:
//!
//! - After a posted launch that failed, no later launch of the same step runs, and
//!   [`Launches::settle`] returns the error. At most [`AHEAD`] launches are queued on the driver
//!   thread, so a stuck thread costs one deadline.
//! - An exchange runs after the work queued before it, and concurrently with work queued later
//!   until `follow`. Meanwhile no replay is queued that writes a sent piece or uses a received one.
//! - A link ends when its owner drops it, after the device has finished the work that uses it. On a
//!   lost device it stays.
//! - While a link exists, a wait for the device is no longer than the group's wait for another
//!   rank. The device may be waiting for an exchange.

use super::Device;
use super::driver::{Driver, Link, Piece, Wire};
use super::driver_thread;
use super::dry_run::Launch;
use super::graph::BufferBorrow;
use super::memory::DeferredFree;
use crate::error::{Error, Result};
use cuda_std::launch::Extent;
use std::cell::{Cell, RefCell};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

/// The largest number of launches that are queued ahead. It covers the step's work between two of
/// them.
const AHEAD: u64 = 8;
/// The time that the step polls for the driver thread before it sleeps, which is about the driver's
/// time for this many launches.
const SPIN_TIME: Duration = Duration::from_micros(50);

/// The launches of a step.
#[derive(Debug)]
pub(crate) struct Launches {
    device: Device,
    posted: Cell<u64>,
    made: RefCell<Arc<Made>>,
    /// The memory that launches use, while it is being watched.
    watched: RefCell<Option<Vec<Extent>>>,
}

/// The progress of the driver thread.
#[derive(Debug, Default)]
struct Made {
    /// The number of finished launches.
    count: AtomicU64,
    /// The first failure.
    failure: OnceLock<Error>,
}

impl Launch {
    /// Passes the launch to the driver.
    ///
    /// # Safety
    /// The requirements of [`Driver::launch`].
    unsafe fn make(&self, driver: &dyn Driver) -> Result<()> {
        // SAFETY: this function's requirements are those of the driver.
        let made = unsafe { driver.launch(&self.entry, self.grid, &self.words) };
        made.map_err(|error| error.of_kernel(self.entry.name))
    }
}

impl Device {
    /// Makes a launch that belongs to no step, and waits until the driver has taken it.
    ///
    /// # Safety
    /// The kernel's contract accepted the launch. Its memory belongs to this device or a parent,
    /// and is alive until the next call.
    pub(crate) unsafe fn launch(&self, launch: Launch) -> Result<()> {
        // SAFETY: the driver thread makes the call before any later one, so the memory is alive.
        // Recorded memory is pinned by the dry run.
        self.call("launch", self.launch_deadline(self.deadline()), move |driver| unsafe { launch.make(driver) })
    }
}

impl Made {
    /// Returns the first launch error, if a launch has failed.
    fn failure(&self) -> Result<()> {
        self.failure.get().cloned().map_or(Ok(()), Err)
    }

    /// Records the result of a launch.
    fn done(&self, outcome: Result<()>) {
        if let Err(error) = outcome {
            // Launches after the first failure have the same error.
            let _ = self.failure.set(error);
        }
        self.count.fetch_add(1, Ordering::Release);
    }
}

impl Launches {
    pub(crate) fn new(device: Device) -> Self {
        Self { device, posted: Cell::default(), made: RefCell::default(), watched: RefCell::default() }
    }

    /// Returns the device that the launches run on.
    #[inline]
    pub(crate) fn device(&self) -> &Device {
        &self.device
    }

    /// Runs `make`, and also returns the memory that its launches use.
    pub(crate) fn watch<R>(&self, make: impl FnOnce() -> R) -> (R, Vec<Extent>) {
        self.watched.replace(Some(Vec::new()));
        let made = make();
        (made, self.watched.take().unwrap_or_default())
    }

    /// Begins another step. Pending launches of an earlier step that panicked no longer report to
    /// anyone.
    pub(crate) fn begin(&self) {
        self.watched.take();
        if self.posted.replace(0) > 0 {
            *self.made.borrow_mut() = Arc::default();
        }
    }

    /// Makes one more launch. It is posted to the driver thread if the driver only queues it, and
    /// waited for otherwise.
    ///
    /// # Safety
    /// The requirements of [`Device::launch`].
    pub(crate) unsafe fn push(&self, launch: Launch, deadline: Duration) -> Result<()> {
        if let Some(watched) = &mut *self.watched.borrow_mut() {
            watched.extend(launch.words.extents());
        }
        let (device, deadline) = (&self.device, self.device.launch_deadline(deadline));
        // SAFETY: the driver thread makes the call before any later one, so the memory is alive.
        // Recorded memory is pinned by the dry run.
        let launch = move |driver: &dyn Driver| unsafe { launch.make(driver) };
        if !device.launch_only_queues() || device.wait_time_left().is_some() {
            // The caller gets the error at once.
            return device.call("launch", deadline, launch);
        }
        self.wait(AHEAD - 1, deadline)?;
        let made = self.made.borrow();
        made.failure()?;
        let (before, after) = (Arc::clone(&made), Arc::clone(&made));
        let unless_failed = move |driver: &dyn Driver| before.failure().and_then(|()| launch(driver));
        device.post("launch", unless_failed, move |outcome| after.done(outcome))?;
        self.posted.set(self.posted.get() + 1);
        Ok(())
    }

    /// Waits until at most `left` launches are pending.
    fn wait(&self, left: u64, deadline: Duration) -> Result<()> {
        let made = self.made.borrow();
        let caught_up = || (self.posted.get() - made.count.load(Ordering::Acquire) <= left).then_some(());
        // If polling is not enough, a call after all of them waits.
        driver_thread::watch(SPIN_TIME, caught_up).map_or_else(|| self.device.call("launch", deadline, |_| Ok(())), Ok)
    }

    /// Returns the result of a part of the step after the driver has taken all its launches.
    ///
    /// # Errors
    /// The error of the first launch that failed. Otherwise the part's own error, which came before
    /// that of this wait.
    pub(crate) fn settle<R>(&self, deadline: Duration, part: Result<R>) -> Result<R> {
        // A step without launches costs nothing here.
        if self.posted.get() == 0 {
            return part;
        }
        let waited = self.wait(0, deadline);
        self.made.borrow().failure()?;
        let part = part?;
        waited.map(|()| part)
    }
}

/// The time that a call on the driver thread may take beyond the group's deadline, so that the
/// wire's more precise error comes first.
const MARGIN: Duration = Duration::from_millis(500);

/// The connection of a device to those of other ranks.
#[derive(Debug)]
pub struct DeviceLink {
    device: Device,
    link: Link,
    /// The time that queuing an exchange may take. On the emulator, the time of the exchange
    /// itself.
    deadline: Duration,
    /// The memory of exchanges that run concurrently with other work.
    lent: Mutex<BufferBorrow>,
}

impl DeviceLink {
    /// Creates the name of a new link, which one rank sends to all.
    pub fn name(device: &Device) -> Result<Vec<u8>> {
        device.call("name_link", device.deadline(), |driver| driver.name_link())
    }

    /// Joins the link of this name as `rank` of `ranks`. The other ranks' bytes may arrive by the
    /// wire.
    pub fn join(
        device: &Device,
        name: Vec<u8>,
        (rank, ranks): (usize, usize),
        wire: Arc<dyn Wire>,
        deadline: Duration,
    ) -> Result<Self> {
        let join = move |driver: &dyn Driver| driver.join_link(&name, rank, ranks, wire, deadline);
        let link = device.call("join_link", deadline.saturating_add(MARGIN), join)?;
        device.links().push(deadline);
        Ok(Self { device: device.clone(), link, deadline, lent: Mutex::new(device.lending()) })
    }

    /// Returns the device of this link.
    pub(crate) fn device(&self) -> &Device {
        &self.device
    }

    /// Ends the link on a separate thread, whatever hangs. Exchanges that wait for other ranks end
    /// with it. The link is unusable afterwards.
    pub fn give_up(&self) {
        let link = self.link;
        // Data that is still in transit is no longer needed.
        self.lent().end();
        // SAFETY: the driver refuses an exchange on a link that has ended, and ending it twice does
        // nothing.
        self.device.call_on_own_thread(move |driver| unsafe { driver.leave_link(link) });
    }

    /// Returns the time that a call of the link may take on the driver thread.
    fn call_deadline(&self) -> Duration {
        self.deadline.saturating_add(MARGIN)
    }

    fn lent(&self) -> MutexGuard<'_, BufferBorrow> {
        self.lent.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Queues copies between this rank and others. They run after all work queued before, and
    /// concurrently with later work until [`DeviceLink::follow`].
    ///
    /// # Safety
    /// The pieces are memory of this device that stays until the copies are done or the device is
    /// lost. No received piece overlaps another piece. Until `follow`, launches and copies write no
    /// piece, and read no received piece. This function itself keeps replays from them.
    pub(crate) unsafe fn exchange(&self, sends: Vec<Piece>, receives: Vec<Piece>) -> Result<()> {
        let link = self.link;
        for (pieces, written) in [(&sends, false), (&receives, true)] {
            // The gaps between pieces of one kind are borrowed too, which keeps the list of borrows
            // short.
            let start = pieces.iter().map(|piece| piece.address).min();
            let end = pieces.iter().map(|piece| piece.address + piece.bytes as u64).max();
            if let (Some(start), Some(end)) = (start, end) {
                self.lent().add(start, (end - start) as usize, written);
            }
        }
        // SAFETY: this function's requirements are those of the driver, and replays check the
        // borrows.
        let exchange = move |driver: &dyn Driver| unsafe { driver.exchange(link, &sends, &receives) };
        self.device.call("exchange", self.call_deadline(), exchange).inspect_err(|_| self.lent().end())
    }

    /// Makes work that is queued next run after all exchanges so far.
    pub fn follow(&self) -> Result<()> {
        self.device.call("follow_exchanges", self.call_deadline(), |driver| driver.follow_exchanges())?;
        self.lent().end();
        Ok(())
    }
}

impl Drop for DeviceLink {
    fn drop(&mut self) {
        let mut links = self.device.links();
        if let Some(own) = links.iter().position(|of_link| *of_link == self.deadline) {
            links.swap_remove(own);
        }
        drop(links);
        // SAFETY: the link belongs to this device, and its only name is dropped here. At most
        // exchanges on it are queued.
        unsafe { self.device.retire(DeferredFree::Link(self.link)) };
    }
}

#[cfg(test)]
mod tests {
    use super::super::driver::DeviceKind;
    use super::super::graph::Use;
    use super::*;
    use std::ops::Range;

    /// The wire of a single rank, which has no peers.
    #[derive(Debug)]
    struct Nobody;

    impl Wire for Nobody {
        fn send(&self, _: usize, _: &[u8]) -> Result<()> {
            unreachable!("a group of one rank sends nothing")
        }

        fn receive(&self, _: usize, _: &mut [u8]) -> Result<()> {
            unreachable!("a group of one rank sends nothing")
        }
    }

    #[test]
    fn replays_respect_running_exchanges() {
        let device = Device::open(DeviceKind::Emulated).unwrap();
        let link = DeviceLink::join(&device, Vec::new(), (0, 1), Arc::new(Nobody), device.deadline()).unwrap();
        let memory = device.allocate(1024).unwrap();
        let piece = |at: u64| vec![Piece { rank: 0, address: memory + at, bytes: 256 }];
        // SAFETY: both pieces are disjoint parts of this memory, which stays. Nothing is launched.
        let exchange = || unsafe { link.exchange(piece(0), piece(512)) }.unwrap();
        let replays = |bytes: Range<u64>, written| {
            let used = Use { bytes: memory + bytes.start..memory + bytes.end, written };
            device.replay(&[used], |_| Ok(())).is_ok()
        };
        exchange();
        assert!(
            replays(0..512, false) && replays(256..512, true),
            "a replay may read sent memory and write neighbouring memory"
        );
        assert!(
            !replays(255..256, true) && !replays(767..1024, false),
            "a replay must neither write sent memory nor read received memory"
        );
        link.follow().unwrap();
        assert!(replays(0..1024, true), "after the exchange, a replay may use the memory");
        exchange();
        link.give_up();
        assert!(replays(0..1024, true), "closing the link must end the exchange");
        // SAFETY: nothing uses it any more.
        unsafe { device.retire(DeferredFree::Memory { address: memory, bytes: 1024 }) };
    }
}
