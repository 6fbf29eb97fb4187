//! An open device: the driver with deadlines.
//!
//! A device is lost after a missed deadline, after a panic on the driver thread, or after a failure
//! that makes the driver's context unusable. Every later call then fails at once with that cause.
//! Nothing of a lost device is destroyed: memory leaks rather than blocks.
//!
//! Invariants:
//!
//! - Every driver call is made on one driver thread, one after another, and its caller waits at
//!   most until its deadline. Waits for the device poll.
//! - While a thread records a step, it reaches the device only through that step.
//! - A dry run is a separate device. It may use its parents' memory, nothing else may use its own,
//!   and it ends with its closure.

use super::deferred_free::{self, DeferredFree, NotEnded};
use super::driver::{Description, Driver, Pool};
use super::driver_thread::{DriverThread, NoResult, caught};
use super::dry_run::{DryRun, Launch};
use super::graph::{BorrowTable, BufferBorrow, PinTable, Pins, Use};
use super::patience;
use super::staging::{Pages, Staging};
use crate::error::{Error, Result};
use crate::shortage::HostMemory;
use bytemuck::Pod;
use cuda_std::emulator::Mode;
use std::cell::RefCell;
use std::mem::ManuallyDrop;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// The time for which a wait polls without sleeping, yielding to other threads in between. A
/// training step takes milliseconds, and a sleep would make it longer.
const SPIN_TIME: Duration = Duration::from_millis(20);
/// The divisor that gives the next sleep of a longer wait from the time waited so far. It bounds
/// how late the wait ends, relative to its length.
const NAP_SHARE: u32 = 64;
/// The longest sleep of a wait.
const LONGEST_NAP: Duration = Duration::from_millis(1);
/// The bits of an owner's number that name an arena: zero for a buffer, else the number of the
/// arena whose step has the memory. The remaining bits name the device.
const ARENA_BITS: u64 = (1 << 24) - 1;

/// Returns a new device number.
fn new_identity() -> u64 {
    static DEVICES: AtomicU64 = AtomicU64::new(0);
    DEVICES.fetch_add(ARENA_BITS + 1, Ordering::Relaxed)
}

/// An open device. Clones share it.
#[derive(Clone, Debug)]
pub struct Device {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    driver: Arc<dyn Driver>,
    description: Description,
    lane: Arc<DriverThread>,
    deadline: Duration,
    identity: u64,
    /// The reason why the device was lost. Calls that are still queued on the driver thread check
    /// it too.
    lost: Arc<OnceLock<String>>,
    pins: PinTable,
    lends: Arc<BorrowTable>,
    /// Objects that their owner has dropped and that could not be freed so far.
    retired: Mutex<Vec<DeferredFree>>,
    staging: Mutex<Staging>,
    pages: Mutex<Pages>,
    checks: CheckedMode,
    dry_run: Option<DryRunInProgress>,
    /// The deadlines of the groups whose links use this device. A wait for the device may be a wait
    /// for another rank.
    links: Mutex<Vec<Duration>>,
}

/// The state of a dry run.
#[derive(Debug)]
struct DryRunInProgress {
    /// The devices whose memory it may use. The device that it stands for comes first.
    parents: Vec<u64>,
    /// True if its launches are replayed after the steps that run now. It may then use buffers of
    /// its parents, but no memory of their steps.
    replayed: bool,
    /// True if its closure has ended.
    over: AtomicBool,
}

/// Checked mode as the program requested it and as the environment overrides it.
#[derive(Clone, Copy, Debug)]
pub(super) struct CheckedMode {
    pub(super) asked: bool,
    pub(super) forced: Option<bool>,
}

thread_local! {
    /// The devices of which this thread records a step, the innermost last.
    static RECORDED: RefCell<Vec<u64>> = const { RefCell::new(Vec::new()) };
}

/// A guard for the time in which this thread records a step of a device.
struct RecordingGuard;

impl RecordingGuard {
    /// Creates the guard, or returns an error on a thread that is ending and has destroyed its
    /// thread-local storage.
    fn of(identity: u64) -> Result<Self> {
        let pushed = RECORDED.try_with(|recorded| recorded.borrow_mut().push(identity));
        pushed
            .map(|()| Self)
            .map_err(|_| Error::misuse("capture", "a thread that keeps running", "a thread that is ending"))
    }
}

impl Drop for RecordingGuard {
    fn drop(&mut self) {
        // A thread that is ending has left all recordings.
        let _ = RECORDED.try_with(|recorded| recorded.borrow_mut().pop());
    }
}

impl Device {
    /// Creates a device for `driver`, which is called on the thread `lane`.
    pub(super) fn new(
        driver: Arc<dyn Driver>,
        lane: DriverThread,
        deadline: Duration,
        staging: Staging,
        checks: CheckedMode,
    ) -> Self {
        let description = driver.description().clone();
        tracing::info!(kind = %description.kind, name = description.name, memory_bytes = description.memory_bytes, "device opened");
        let shared = Shared {
            driver,
            description,
            lane: Arc::new(lane),
            deadline,
            identity: new_identity(),
            lost: Arc::default(),
            pins: PinTable::default(),
            lends: Arc::default(),
            retired: Mutex::default(),
            staging: Mutex::new(staging),
            pages: Mutex::default(),
            checks,
            dry_run: None,
            links: Mutex::default(),
        };
        Self { shared: Arc::new(shared) }
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
    /// [`DeviceBuilder::checked`](super::DeviceBuilder::checked).
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
    pub(super) fn wait(
        &self,
        name: &'static str,
        deadline: Duration,
        reached: impl FnOnce(&dyn Driver) -> Result<bool> + Copy + Send + 'static,
    ) -> Result<()> {
        self.until(name, deadline, |left| Ok(self.call(name, left.max(SPIN_TIME), reached)?.then_some(())))
    }

    /// Polls with growing sleeps until `poll` returns a value. Each poll receives the remaining
    /// time.
    pub(super) fn until<R>(
        &self,
        name: &'static str,
        deadline: Duration,
        mut poll: impl FnMut(Duration) -> Result<Option<R>>,
    ) -> Result<R> {
        let of_links = self.links().iter().min().copied();
        let deadline = of_links.map_or(deadline, |of_link| of_link.min(deadline));
        patience::of_wait(deadline, |deadline| {
            let start = Instant::now();
            loop {
                if let Some(found) = poll(deadline.saturating_sub(start.elapsed()))? {
                    return Ok(found);
                }
                let waited = start.elapsed();
                if waited >= deadline {
                    return Err(self.lose_to(Error::Timeout { call: name, waited, report: None }));
                }
                if waited < SPIN_TIME {
                    std::thread::yield_now();
                } else {
                    std::thread::sleep((waited / NAP_SHARE).min(LONGEST_NAP).min(deadline - waited));
                }
            }
        })
    }

    /// Returns the deadlines of the groups whose links use this device. They bound every wait for
    /// the device.
    pub(super) fn links(&self) -> MutexGuard<'_, Vec<Duration>> {
        self.shared.links.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs `run` on a dry run of this device, which has no memory and no kernels. It only counts
    /// allocations.
    pub(crate) fn dry_run<R>(&self, run: impl FnOnce(&Self) -> Result<R>) -> Result<R> {
        self.dry_run_on(Arc::new(DryRun::of(self.description().clone())), false, run)
    }

    /// Runs a dry run as if this were a device with this description, and returns its launches in
    /// order. `pins` keep the memory that they use.
    pub(crate) fn dry_run_as<R>(
        &self,
        description: Description,
        pins: Pins,
        run: impl FnOnce(&Self) -> Result<R>,
    ) -> Result<(R, Vec<Launch>)> {
        self.list(description, pins, false, run)
    }

    fn list<R>(
        &self,
        description: Description,
        pins: Pins,
        replayed: bool,
        run: impl FnOnce(&Self) -> Result<R>,
    ) -> Result<(R, Vec<Launch>)> {
        let dry_run = Arc::new(DryRun::listing(description, pins));
        let result = self.dry_run_on(Arc::clone(&dry_run), replayed, run)?;
        Ok((result, dry_run.take_launches()))
    }

    /// Returns true if launches on this device do not run.
    pub(crate) fn is_dry_run(&self) -> bool {
        self.shared.dry_run.is_some()
    }

    fn dry_run_on<R>(&self, driver: Arc<DryRun>, replayed: bool, run: impl FnOnce(&Self) -> Result<R>) -> Result<R> {
        let Shared { lane, deadline, identity, pins, dry_run, .. } = &*self.shared;
        let mut parents = vec![*identity];
        parents.extend(dry_run.iter().flat_map(|dry_run| &dry_run.parents));
        let shared = Shared {
            description: driver.description().clone(),
            driver,
            lane: Arc::clone(lane),
            deadline: *deadline,
            identity: new_identity(),
            lost: Arc::default(),
            pins: pins.clone(),
            lends: Arc::default(),
            retired: Mutex::default(),
            staging: Mutex::default(),
            pages: Mutex::default(),
            // A dry run has no bytes to verify and no guards to check.
            checks: CheckedMode { asked: false, forced: None },
            dry_run: Some(DryRunInProgress { parents, replayed, over: AtomicBool::new(false) }),
            links: Mutex::default(),
        };
        let dry_run = DryRunGuard(Self { shared: Arc::new(shared) });
        run(&dry_run.0)
    }

    /// Returns an empty set of pins.
    pub(crate) fn pins(&self) -> Pins {
        self.shared.pins.pins()
    }

    /// Returns an empty set of borrows for an arena's running step.
    pub(crate) fn lending(&self) -> BufferBorrow {
        BufferBorrow::new(&self.shared.lends)
    }

    /// Queues a replay that uses this memory once no running step relies on it.
    pub(super) fn replay(
        &self,
        uses: &[Use],
        queue: impl FnOnce(&dyn Driver) -> Result<()> + Send + 'static,
    ) -> Result<()> {
        self.check("replay")?;
        self.shared.lends.replay(uses, self.deadline(), || self.call("replay", self.deadline(), queue))
    }

    /// Runs `record` with a device that only lists its launches, and returns the list. Meanwhile
    /// this thread cannot reach the real device, and the objects that it drops are freed later.
    pub(crate) fn record<R>(&self, pins: &Pins, record: impl FnOnce(&Self) -> Result<R>) -> Result<(R, Vec<Launch>)> {
        self.check("capture")?;
        let outcome = {
            let _recording = RecordingGuard::of(self.identity())?;
            self.list(self.description().clone(), pins.clone(), true, record)
        };
        self.end_retired();
        outcome
    }

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
        let of_parent = |dry_run: &DryRunInProgress| {
            dry_run.parents.contains(&(owner & !ARENA_BITS)) && !(dry_run.replayed && owner & ARENA_BITS > 0)
        };
        owner & !ARENA_BITS == self.identity() || self.shared.dry_run.as_ref().is_some_and(of_parent)
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

    /// Frees a dropped object. This happens now, or as soon as no graph uses it and this thread
    /// records nothing. The objects of a lost device are kept, because the driver could block
    /// forever.
    ///
    /// # Safety
    /// The object belongs to this device. Only queued work, pinned graphs and [`DeferredFree`]
    /// itself use it.
    pub(crate) unsafe fn retire(&self, thing: DeferredFree) {
        if self.shared.dry_run.is_none() {
            self.retired().push(thing);
            self.end_retired();
        }
    }

    fn retired(&self) -> MutexGuard<'_, Vec<DeferredFree>> {
        self.shared.retired.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Frees the retired objects that can be freed now.
    pub(super) fn end_retired(&self) {
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
                        return self.retired().push(left);
                    }
                }
                Err(error) => return tracing::warn!(%error, "dropped device objects stay until the process ends"),
            }
        }
    }

    /// Takes one object that nothing holds any more.
    fn take_ready(&self) -> Option<DeferredFree> {
        let mut retired = self.retired();
        let ready = retired.iter().position(|thing| !thing.is_held(&self.shared.pins))?;
        Some(retired.remove(ready))
    }

    /// Waits until nothing on this device can reach memory that its owner passes to another
    /// library.
    #[cfg(feature = "dlpack")]
    pub(crate) fn hand_over(&self, address: u64, bytes: usize) -> Result<()> {
        let refused = |got| Error::misuse("into_dlpack", "memory that only this device uses", got);
        if self.shared.dry_run.is_some() {
            return Err(refused("a buffer of a dry run, which has no memory"));
        }
        // A thread that could launch with it, or record a launch, would have to borrow the buffer.
        // An existing graph needs no borrow.
        if self.shared.pins.holds(address, bytes) {
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

    /// Returns the ring that uploads pass through, or none in a dry run, which has no memory to
    /// upload to.
    pub(super) fn staging(&self) -> Option<&Mutex<Staging>> {
        self.shared.dry_run.is_none().then_some(&self.shared.staging)
    }

    /// Returns the pinned memory of callers.
    pub(super) fn pages(&self) -> MutexGuard<'_, Pages> {
        self.shared.pages.lock().unwrap_or_else(PoisonError::into_inner)
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

    /// Returns true if a launch only queues.
    pub(super) fn launch_only_queues(&self) -> bool {
        self.shared.driver.launch_only_queues()
    }

    /// Makes a driver call on the driver thread, and waits for it until the deadline. The call owns
    /// everything that it uses, so it may end later, or never. A dry run has no driver to wait for.
    pub(super) fn call<R: Send + 'static>(
        &self,
        name: &'static str,
        deadline: Duration,
        call: impl FnOnce(&dyn Driver) -> Result<R> + Send + 'static,
    ) -> Result<R> {
        self.check(name)?;
        if self.shared.dry_run.is_some() {
            return call(&*self.shared.driver);
        }
        let result = self.shared.lane.run(deadline, self.guarded(name, call));
        result.unwrap_or_else(|reason| Err(self.lose_to(no_result(name, reason))))
    }

    /// Posts a driver call to the driver thread, ahead of all later calls, and does not wait.
    /// `done` runs there with its result. A failure that makes the device unusable has marked it
    /// lost by then.
    pub(super) fn post(
        &self,
        name: &'static str,
        call: impl FnOnce(&dyn Driver) -> Result<()> + Send + 'static,
        done: impl FnOnce(Result<()>) + Send + 'static,
    ) -> Result<()> {
        self.check(name)?;
        let call = self.guarded(name, call);
        self.shared.lane.post(move || done(call()));
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
    #[cfg(feature = "nvtx")]
    pub(crate) fn in_context<R: Send + 'static>(
        &self,
        name: &'static str,
        run: impl FnOnce() -> R + Send + 'static,
    ) -> Result<R> {
        self.call(name, self.deadline(), move |_| Ok(run()))
    }

    /// Makes a driver call that may hang, on a thread of its own that is then abandoned. This works
    /// even while the driver thread is stuck.
    pub(super) fn call_beside_lane(&self, call: impl FnOnce(&dyn Driver) -> Result<()> + Send + 'static) {
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
        if let Err(error) = std::thread::Builder::new().name("stepscope-beside".into()).spawn(run) {
            tracing::warn!(%error, "no thread for a call outside of the driver thread");
        }
    }

    /// Returns true if this thread records a step of this device. The device that it records on is
    /// a different one.
    fn is_recorded_here(&self) -> bool {
        // A thread that is ending has left all recordings, but still drops the values in its
        // thread-local storage.
        RECORDED.try_with(|recorded| recorded.borrow().contains(&self.identity())).unwrap_or(false)
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
        if self.shared.dry_run.as_ref().is_some_and(|dry_run| dry_run.over.load(Ordering::Relaxed)) {
            let expected = "a device, or a dry run within its closure";
            return Err(Error::misuse("measure", expected, format!("`{call}` after the dry run ended")));
        }
        Ok(())
    }

    /// Marks the device lost if the error makes it unusable.
    fn after(&self, error: Error) -> Error {
        if spoils(&error) { self.lose_to(error) } else { error }
    }

    pub(super) fn lose_to(&self, error: Error) -> Error {
        lose(&self.shared.lost, &self.shared.driver, &error);
        error
    }
}

/// The read size above which the host's available memory is checked first.
const LARGE_READ_BYTES: usize = 64 << 20;

/// Returns the error for a read that the host has no memory for.
fn no_host_memory(requested_bytes: usize, free_bytes: u64) -> Error {
    let reason = "a read takes host memory of the same size: read one range at a time, or free some memory".into();
    Error::DeviceMemory { device: "the host".into(), requested_bytes, free_bytes, reason }
}

/// Returns true if the error makes its device unusable.
fn spoils(error: &Error) -> bool {
    matches!(error, Error::Driver { fatal: true, .. } | Error::Timeout { .. } | Error::Panic { .. })
}

/// Returns the error of a call on the driver thread that has no result.
pub(super) fn no_result(call: &'static str, reason: NoResult) -> Error {
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

/// A guard that ends a dry run when its closure returns, fails or panics.
struct DryRunGuard(Device);

impl Drop for DryRunGuard {
    fn drop(&mut self) {
        if let Some(dry_run) = &self.0.shared.dry_run {
            dry_run.over.store(true, Ordering::Relaxed);
        }
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        // Memory that a lost device may still read stays until the process ends.
        if self.lost.get().is_some() || self.dry_run.is_some() {
            return;
        }
        let mut left = std::mem::take(self.retired.get_mut().unwrap_or_else(PoisonError::into_inner));
        let (slots, bytes) =
            std::mem::take(self.staging.get_mut().unwrap_or_else(PoisonError::into_inner)).into_slots();
        left.extend(slots.into_iter().map(|slot| DeferredFree::Slot { slot, bytes }));
        left.extend(std::mem::take(self.pages.get_mut().unwrap_or_else(PoisonError::into_inner)).into_retired());
        // Destroying the driver can block as well, so that also runs on the driver thread.
        let driver = std::mem::replace(&mut self.driver, Arc::new(DryRun::of(self.description.clone())));
        let (pins, lost, deadline) = (self.pins.clone(), Arc::clone(&self.lost), self.deadline);
        match self.lane.run(deadline, move || deferred_free::end_all(left, &pins, driver, &lost, deadline)) {
            Ok(true) => {}
            Ok(false) => tracing::warn!("some memory or objects of the device were not freed"),
            Err(reason) => tracing::error!(error = %no_result("close", reason), "device lost"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::driver::DeviceKind;
    use super::*;
    use std::sync::mpsc;

    /// Also checks that the driver of a lost device stays, and that of any other ends with it.
    #[cfg_attr(miri, ignore = "leaks the driver on purpose")]
    #[test]
    fn panic_loses_the_device() {
        const FAR: Duration = Duration::from_secs(20);
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
                device.call("launch", FAR, |_| panic!("planted"))
            };
            let error = error.unwrap_err();
            assert_eq!(error, Error::Panic { call: "launch", message: "planted".into() });
            assert!(error.to_string().starts_with("`launch` panicked: planted; the device is lost"), "{error}");
            let lost = Error::DeviceLost { cause: error.to_string() };
            assert_eq!((device.synchronize(FAR).unwrap_err(), device.allocate(8).unwrap_err()), (lost.clone(), lost));
            drop(device);
            assert!(driver.upgrade().is_some(), "the driver of a lost device was destroyed");
        }
        assert!(start.elapsed() < FAR);
        let (device, driver) = open();
        drop(device);
        assert!(driver.upgrade().is_none());
    }
}
