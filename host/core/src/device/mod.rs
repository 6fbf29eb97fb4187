//! An open device: the only interface to the hardware, with deadlines.
//!
//! A [`Driver`] handles bytes, addresses and kernels by name. No code above it depends on the kind
//! of device. [`Device`] calls the driver, and adds what no driver provides: deadlines, and the
//! loss of a device. A device is lost after a missed deadline, after a panic on the driver thread,
//! or after a failure that makes the driver's context unusable. Every later call then fails at once
//! with that cause. Nothing of a lost device is destroyed: memory leaks rather than blocks.
//!
//! Invariant: every driver call is made on one driver thread, one after another, and its caller
//! waits at most until its deadline. Waits for the device poll. Invariant: all work of a driver is
//! ordered on one stream, so a later call sees the writes of an earlier one.

mod admission;
mod builder;
#[cfg(feature = "cuda")]
mod cuda;
mod driver;
mod driver_thread;
mod dry_run;
mod emulated;
mod graph;
mod kernels;
mod matrix_instruction;
mod memory;
mod page_locked;
mod pinned;
mod self_test;
mod staging;
mod stream;

pub use builder::{DEFAULT_DEADLINE, DeviceBuilder, SelfTest};
pub use driver::{Description, DeviceKind, Driver, DriverLayer, Fence, Graph, Link, Nodes, Piece, Pool, Wire};
pub use driver_thread::panic_message;
pub use dry_run::Launch;
pub(crate) use graph::{BufferBorrow, Pins, SealedGraph};
pub use kernels::{Kernels, ptx_builds};
pub use matrix_instruction::MatrixInstruction;
pub(crate) use memory::DeferredFree;
pub use page_locked::PageLocked;
pub use pinned::PinnedReadback;
pub use self_test::{KernelTest, Tested, remembered};
pub(crate) use staging::Fill;
pub use stream::DeviceLink;
pub(crate) use stream::Launches;

use crate::error::{Error, Result};
use builder::CheckedMode;
use cuda_std::emulator::Mode;
use driver_thread::{DriverThread, NoResult, caught};
use dry_run::{DryRun, DryRunState};
use graph::{BorrowTable, PinTable, Use};
use memory::{end_all, new_identity};
use pinned::Pages;
use staging::Staging;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// The time for which a wait polls without sleeping, yielding to other threads in between. A
/// training step takes milliseconds, and a sleep would make it longer.
const SPIN_TIME: Duration = Duration::from_millis(20);
/// The divisor that gives the next sleep of a longer wait from the time waited so far. It bounds
/// how late the wait ends, relative to its length.
const SLEEP_SHARE: u32 = 64;
/// The longest sleep of a wait.
const LONGEST_SLEEP: Duration = Duration::from_millis(1);
/// An open device. Clones share it.
#[derive(Clone, Debug)]
pub struct Device {
    shared: Arc<Shared>,
    /// The time that the waits of this handle and its clones may still take in all, if limited.
    wait_budget: Option<Arc<Mutex<Duration>>>,
}

#[derive(Debug)]
struct Shared {
    driver: Arc<dyn Driver>,
    description: Description,
    thread: Arc<DriverThread>,
    deadline: Duration,
    identity: u64,
    /// The reason why the device was lost. Calls that are still queued on the driver thread check
    /// it too.
    lost: Arc<OnceLock<String>>,
    pins: PinTable,
    borrows: Arc<BorrowTable>,
    /// Objects that their owner has dropped and that could not be freed so far.
    deferred: Mutex<Vec<DeferredFree>>,
    staging: Mutex<Staging>,
    pages: Mutex<Pages>,
    checks: CheckedMode,
    dry_run: Option<DryRunState>,
    /// The deadlines of the groups whose links use this device. A wait for the device may be a wait
    /// for another rank.
    links: Mutex<Vec<Duration>>,
}

impl Device {
    /// Creates a device for `driver`, whose calls are made on `thread`.
    fn new(
        driver: Arc<dyn Driver>,
        thread: DriverThread,
        deadline: Duration,
        staging: Staging,
        checks: CheckedMode,
    ) -> Self {
        let description = driver.description().clone();
        tracing::info!(kind = %description.kind, name = description.name, memory_bytes = description.memory_bytes, "device opened");
        let shared = Shared {
            driver,
            description,
            thread: Arc::new(thread),
            deadline,
            identity: new_identity(),
            lost: Arc::default(),
            pins: PinTable::default(),
            borrows: Arc::default(),
            deferred: Mutex::default(),
            staging: Mutex::new(staging),
            pages: Mutex::default(),
            checks,
            dry_run: None,
            links: Mutex::default(),
        };
        Self { shared: Arc::new(shared), wait_budget: None }
    }

    /// Returns a handle whose waits for launched work take at most `time` in all, and each launch
    /// at most the rest of it, whatever the deadlines. Only waits for the device use up this time,
    /// so a slow host cannot make a device appear stuck.
    pub(crate) fn with_wait_budget(&self, time: Duration) -> Self {
        Self { shared: Arc::clone(&self.shared), wait_budget: Some(Arc::new(Mutex::new(time))) }
    }

    /// Returns the rest of the time for waits, if it is limited.
    fn wait_time_left(&self) -> Option<MutexGuard<'_, Duration>> {
        self.wait_budget.as_ref().map(|left| left.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Returns the deadline of a launch.
    fn launch_deadline(&self, deadline: Duration) -> Duration {
        self.wait_time_left().map_or(deadline, |left| *left)
    }

    /// Returns the device's properties.
    pub fn description(&self) -> &Description {
        &self.shared.description
    }

    /// Returns the deadline of driver calls.
    pub fn deadline(&self) -> Duration {
        self.shared.deadline
    }

    /// Returns true if uploads to buffers are verified on the device. See
    /// [`DeviceBuilder::checked`].
    pub fn checked(&self) -> bool {
        self.checked_unless(None)
    }

    /// Returns true if an object of this device is checked, given its own setting or none.
    pub(crate) fn checked_unless(&self, setting: Option<bool>) -> bool {
        let CheckedMode { asked, forced } = self.shared.checks;
        forced.or(setting).unwrap_or(asked)
    }

    /// Returns the reason why the device was lost, if it was.
    pub fn lost(&self) -> Option<&str> {
        self.shared.lost.get().map(String::as_str)
    }

    /// Waits until the device has finished all work, polling with growing sleeps.
    ///
    /// # Errors
    /// [`Error::Timeout`] at the deadline, which also loses the device.
    pub fn synchronize(&self, deadline: Duration) -> Result<()> {
        self.wait("synchronize", deadline, |driver| driver.poll())
    }

    /// Waits until `reached` returns true.
    fn wait(
        &self,
        name: &'static str,
        deadline: Duration,
        reached: impl FnOnce(&dyn Driver) -> Result<bool> + Copy + Send + 'static,
    ) -> Result<()> {
        self.until(name, deadline, |left| Ok(self.call(name, left.max(SPIN_TIME), reached)?.then_some(())))
    }

    /// Polls with growing sleeps until `poll` returns a value. Each poll receives the remaining
    /// time.
    fn until<R>(
        &self,
        name: &'static str,
        deadline: Duration,
        mut poll: impl FnMut(Duration) -> Result<Option<R>>,
    ) -> Result<R> {
        let of_links = self.links().iter().min().copied();
        let deadline = of_links.map_or(deadline, |of_link| of_link.min(deadline));
        let deadline = self.launch_deadline(deadline);
        let start = Instant::now();
        let found = loop {
            if let Some(found) = poll(deadline.saturating_sub(start.elapsed())).transpose() {
                break found;
            }
            let waited = start.elapsed();
            if waited >= deadline {
                break Err(self.lose_to(Error::Timeout { call: name, waited, report: None }));
            }
            if waited < SPIN_TIME {
                std::thread::yield_now();
            } else {
                std::thread::sleep((waited / SLEEP_SHARE).min(LONGEST_SLEEP).min(deadline - waited));
            }
        };
        if let Some(mut left) = self.wait_time_left() {
            *left = left.saturating_sub(start.elapsed());
        }
        found
    }

    /// Returns the deadlines of the groups whose links use this device. They bound every wait for
    /// the device.
    fn links(&self) -> MutexGuard<'_, Vec<Duration>> {
        self.shared.links.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns an empty set of pins.
    pub(crate) fn pins(&self) -> Pins {
        self.shared.pins.pins()
    }

    /// Returns an empty set of borrows for an arena's running step.
    pub(crate) fn lending(&self) -> BufferBorrow {
        BufferBorrow::new(&self.shared.borrows)
    }

    /// Queues a replay that uses this memory once no running step relies on it.
    fn replay(&self, uses: &[Use], queue: impl FnOnce(&dyn Driver) -> Result<()> + Send + 'static) -> Result<()> {
        self.check("replay")?;
        self.shared.borrows.replay(uses, self.deadline(), || self.call("replay", self.deadline(), queue))
    }

    /// Returns the objects that their owner has dropped and that could not be freed so far.
    fn deferred(&self) -> MutexGuard<'_, Vec<DeferredFree>> {
        self.shared.deferred.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the pins of all graphs.
    fn pin_table(&self) -> &PinTable {
        &self.shared.pins
    }

    /// Returns the ring that uploads pass through, or none in a dry run, which has no memory to
    /// upload to.
    fn staging(&self) -> Option<&Mutex<Staging>> {
        self.shared.dry_run.is_none().then_some(&self.shared.staging)
    }

    /// Returns the pinned memory of callers.
    fn pages(&self) -> MutexGuard<'_, Pages> {
        self.shared.pages.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns true if a launch only queues.
    fn launch_only_queues(&self) -> bool {
        self.shared.driver.launch_only_queues()
    }

    /// Makes a driver call on the driver thread, and waits for it until the deadline. The call owns
    /// everything that it uses, so it may end later, or never. A dry run has no driver to wait for.
    fn call<R: Send + 'static>(
        &self,
        name: &'static str,
        deadline: Duration,
        call: impl FnOnce(&dyn Driver) -> Result<R> + Send + 'static,
    ) -> Result<R> {
        self.check(name)?;
        if self.shared.dry_run.is_some() {
            return call(&*self.shared.driver);
        }
        let result = self.shared.thread.run(deadline, self.guarded(name, call));
        result.unwrap_or_else(|reason| Err(self.lose_to(no_result(name, reason))))
    }

    /// Posts a driver call to the driver thread, ahead of all later calls, and does not wait.
    /// `done` runs there with its result. A failure that makes the device unusable has marked it
    /// lost by then.
    fn post(
        &self,
        name: &'static str,
        call: impl FnOnce(&dyn Driver) -> Result<()> + Send + 'static,
        done: impl FnOnce(Result<()>) + Send + 'static,
    ) -> Result<()> {
        self.check(name)?;
        let call = self.guarded(name, call);
        self.shared.thread.post(move || done(call()));
        Ok(())
    }

    /// Wraps a call for the driver thread. It does not use a device that was lost while the call
    /// was queued, and marks the device lost before the next call if it panics or fails fatally.
    fn guarded<R>(
        &self,
        name: &'static str,
        call: impl FnOnce(&dyn Driver) -> Result<R> + Send + 'static,
    ) -> impl FnOnce() -> Result<R> + Send + 'static {
        let (driver, lost) = (Arc::clone(&self.shared.driver), Arc::clone(&self.shared.lost));
        // The emulator runs a launch in the floating-point mode of the requesting thread.
        let mode = Mode::of_thread();
        move || {
            if let Some(cause) = lost.get() {
                return Err(Error::DeviceLost { cause: cause.clone() });
            }
            let called = caught(|| match mode {
                None => call(&*driver),
                Some(mode) => mode.scope(|| call(&*driver)),
            });
            let result = called.unwrap_or_else(|message| Err(Error::Panic { call: name, message }));
            if let Some(error) = result.as_ref().err().filter(|error| spoils(error)) {
                lose(&lost, &driver, error);
            }
            result
        }
    }

    /// Runs code that needs the thread's CUDA context, which exists only on the driver thread.
    ///
    /// # Safety
    /// `run` leaves the device, its memory and the thread's current context as they are.
    pub(crate) unsafe fn in_context<R: Send + 'static>(
        &self,
        name: &'static str,
        run: impl FnOnce() -> R + Send + 'static,
    ) -> Result<R> {
        self.call(name, self.deadline(), move |_| Ok(run()))
    }

    /// Makes a driver call that may hang, on a thread of its own that is then abandoned. This works
    /// even while the driver thread is stuck.
    fn call_on_own_thread(&self, call: impl FnOnce(&dyn Driver) -> Result<()> + Send + 'static) {
        let driver = Arc::clone(&self.shared.driver);
        let run = move || {
            if let Err(error) = call(&*driver) {
                tracing::warn!(%error, "a call outside of the driver thread failed");
            }
            // The driver thread must destroy the driver. This thread may be late.
            if Arc::strong_count(&driver) == 1 {
                std::mem::forget(driver);
            }
        };
        if let Err(error) = std::thread::Builder::new().name("stepscope-call".into()).spawn(run) {
            tracing::warn!(%error, "no thread for a call outside of the driver thread");
        }
    }

    /// Returns an error if `call` cannot be made because the device is lost or this thread records
    /// a step of it.
    pub(crate) fn check(&self, call: &'static str) -> Result<()> {
        if let Some(cause) = self.shared.lost.get() {
            return Err(Error::DeviceLost { cause: cause.clone() });
        }
        if self.is_recorded_here() {
            let expected = "only the step's own tensors and kernels while it is recorded";
            return Err(Error::misuse("capture", expected, format!("`{call}` on the device")));
        }
        if self.dry_run_state().is_some_and(DryRunState::is_over) {
            let expected = "a device, or a dry run within its closure";
            return Err(Error::misuse("measure", expected, format!("`{call}` after the dry run ended")));
        }
        Ok(())
    }

    /// Marks the device lost if the error makes it unusable.
    fn after(&self, error: Error) -> Error {
        if spoils(&error) { self.lose_to(error) } else { error }
    }

    fn lose_to(&self, error: Error) -> Error {
        lose(&self.shared.lost, &self.shared.driver, &error);
        error
    }
}

/// Returns true if the error makes its device unusable.
fn spoils(error: &Error) -> bool {
    matches!(error, Error::Driver { fatal: true, .. } | Error::Timeout { .. } | Error::Panic { .. })
}

/// Returns the error of a call on the driver thread that has no result.
fn no_result(call: &'static str, reason: NoResult) -> Error {
    match reason {
        NoResult::TimedOut { waited } => Error::Timeout { call, waited, report: None },
        NoResult::Panicked { message } => Error::Panic { call, message },
    }
}

fn lose(lost: &OnceLock<String>, driver: &Arc<dyn Driver>, error: &Error) {
    tracing::error!(%error, "device lost");
    // Only the first cause is reported.
    if lost.set(error.to_string()).is_ok() {
        // Destroying streams, modules or the context would wait for stuck work, so they stay until
        // the process ends.
        std::mem::forget(Arc::clone(driver));
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        // Memory that a lost device may still read stays until the process ends.
        if self.lost.get().is_some() || self.dry_run.is_some() {
            return;
        }
        let mut left = std::mem::take(self.deferred.get_mut().unwrap_or_else(PoisonError::into_inner));
        let (slots, bytes) =
            std::mem::take(self.staging.get_mut().unwrap_or_else(PoisonError::into_inner)).into_slots();
        left.extend(slots.into_iter().map(|slot| DeferredFree::Slot { slot, bytes }));
        left.extend(std::mem::take(self.pages.get_mut().unwrap_or_else(PoisonError::into_inner)).into_deferred());
        // Destroying the driver can block as well, so that also runs on the driver thread.
        let driver = std::mem::replace(&mut self.driver, Arc::new(DryRun::of(self.description.clone())));
        let (pins, lost, deadline) = (self.pins.clone(), Arc::clone(&self.lost), self.deadline);
        match self.thread.run(deadline, move || end_all(left, &pins, driver, &lost, deadline)) {
            Ok(true) => {}
            Ok(false) => tracing::warn!("some memory or objects of the device were not freed"),
            Err(reason) => tracing::error!(error = %no_result("close", reason), "device lost"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;

    /// Also checks that the driver of a lost device is kept, and that any other driver ends with
    /// its device.
    #[cfg_attr(miri, ignore = "leaks the driver on purpose")]
    #[test]
    fn panic_loses_the_device() {
        const LONG: Duration = Duration::from_secs(20);
        let open = || {
            let device = Device::open(DeviceKind::Emulated).unwrap();
            let driver = Arc::downgrade(&device.shared.driver);
            (device, driver)
        };
        let start = Instant::now();
        for posted in [false, true] {
            let (device, driver) = open();
            let error = if posted {
                let (done, outcome) = mpsc::channel();
                device.post("launch", |_| panic!("planted"), move |result| done.send(result).unwrap()).unwrap();
                outcome.recv().unwrap()
            } else {
                device.call("launch", LONG, |_| panic!("planted"))
            };
            let error = error.unwrap_err();
            assert_eq!(error, Error::Panic { call: "launch", message: "planted".into() });
            assert!(error.to_string().starts_with("`launch` panicked: planted; the device is lost"), "{error}");
            let lost = Error::DeviceLost { cause: error.to_string() };
            assert_eq!((device.synchronize(LONG).unwrap_err(), device.allocate(8).unwrap_err()), (lost.clone(), lost));
            drop(device);
            assert!(driver.upgrade().is_some(), "the driver of a lost device was destroyed");
        }
        assert!(start.elapsed() < LONG);
        let (device, driver) = open();
        drop(device);
        assert!(driver.upgrade().is_none());
    }

    /// A wait beyond the budget loses the device, whose driver is then kept.
    #[cfg_attr(miri, ignore = "leaks the driver on purpose")]
    #[test]
    fn only_waits_use_the_budget() {
        const LONG: Duration = Duration::from_secs(60);
        const PAUSE: Duration = Duration::from_millis(2);
        let time = Duration::from_secs(2);
        let device = Device::open(DeviceKind::Emulated).unwrap();
        let limited = device.with_wait_budget(time);
        std::thread::sleep(PAUSE);
        assert_eq!(limited.launch_deadline(LONG), time);
        let waits = |left: Duration| {
            assert!(left <= time);
            std::thread::sleep(PAUSE);
            Ok(Some(()))
        };
        limited.until("synchronize", LONG, waits).unwrap();
        let left = limited.launch_deadline(LONG);
        assert!(left <= time - PAUSE, "{left:?}");
        assert_eq!(limited.clone().launch_deadline(LONG), left, "clones must share the remaining time");
        assert_eq!(device.launch_deadline(LONG), LONG);
        let error = device.with_wait_budget(PAUSE).until("synchronize", LONG, |_| Ok(None::<()>)).unwrap_err();
        assert!(matches!(error, Error::Timeout { waited, .. } if waited >= PAUSE && waited < LONG), "{error}");
    }
}
