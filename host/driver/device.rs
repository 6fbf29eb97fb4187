//! An open device: the driver behind deadlines.
//!
//! Invariant: every call of the driver is made on the worker lane, one after the other, and waited for until its deadline; a
//! wait for the device polls. After a missed deadline, or a failure that spoils the driver's context, the device is lost: every
//! later call fails at once with that cause, nothing of it is destroyed, and memory leaks rather than blocks. While a thread
//! records a step, it reaches the device through that step alone. A rehearsal is a device of its own: it may take its parents'
//! memory, nothing else may take its, and it ends with the closure that it was made for.

use super::calls::{Driver, Pool};
use super::description::Description;
use super::lane::{Lane, TimedOut};
use super::lends::{Lending, Lends, Use};
use super::pages::Pages;
use super::patience;
use super::pins::{PinTable, Pins};
use super::rehearsal::{Launch, Rehearsal};
use super::retired::{self, NotEnded, Retired};
use super::ring::Staging;
use crate::error::{Error, Result};
use crate::shortage::HostMemory;
use bytemuck::Pod;
use cuda_std::emulator::Mode;
use std::cell::RefCell;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// Waits shorter than this look again at once, and let other threads run in between: a step of training lasts milliseconds, and
/// a nap would make it longer.
const AWAKE: Duration = Duration::from_millis(20);
/// A longer wait naps for this share of what it has waited, so that it ends that much late at most ..
const NAP_SHARE: u32 = 64;
/// .. but not longer than this.
const LONGEST_NAP: Duration = Duration::from_millis(1);
/// The low bits of the number of a memory's owner: zero for a buffer, else the number of the arena
/// whose step has the memory. The others are the device's.
const ARENA_BITS: u64 = (1 << 24) - 1;

/// The number of one more device.
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
    lane: Arc<Lane>,
    deadline: Duration,
    identity: u64,
    /// Why the device was lost. Calls that still stand on the lane look at it too.
    lost: Arc<OnceLock<String>>,
    pins: PinTable,
    lends: Arc<Lends>,
    /// What its owner has let go, and could not be ended so far.
    retired: Mutex<Vec<Retired>>,
    staging: Mutex<Staging>,
    pages: Mutex<Pages>,
    checks: CheckedMode,
    rehearsing: Option<Rehearsing>,
    /// How long its links' groups wait for other ranks. A wait for this device may be one.
    links: Mutex<Vec<Duration>>,
}

/// What makes a device a rehearsal.
#[derive(Debug)]
struct Rehearsing {
    /// The devices whose memory it may take: that which it stands for first.
    parents: Vec<u64>,
    /// True if its launches are replayed after the steps that run now. Then it takes buffers of its
    /// parents and no memory of their steps.
    replayed: bool,
    /// Whether the closure that it was made for has ended.
    over: AtomicBool,
}

/// Whether the program wants checked mode, and what the environment has to say.
#[derive(Clone, Copy, Debug)]
pub(super) struct CheckedMode {
    pub(super) asked: bool,
    pub(super) forced: Option<bool>,
}

thread_local! {
    /// The devices of which this thread records a step, the innermost last.
    static RECORDED: RefCell<Vec<u64>> = const { RefCell::new(Vec::new()) };
}

/// The time in which this thread records a step of a device.
struct RecordingGuard;

impl RecordingGuard {
    /// An error where this thread is ending, and drops what it kept in its local storage.
    fn of(identity: u64) -> Result<Self> {
        let pushed = RECORDED.try_with(|recorded| recorded.borrow_mut().push(identity));
        pushed.map(|()| Self).map_err(|_| Error::misuse("capture", "a thread that goes on", "one that is ending"))
    }
}

impl Drop for RecordingGuard {
    fn drop(&mut self) {
        // A thread that is ending has left all recordings.
        let _ = RECORDED.try_with(|recorded| recorded.borrow_mut().pop());
    }
}

impl Device {
    /// What `driver` drives, by way of `lane`.
    pub(super) fn new(
        driver: Arc<dyn Driver>,
        lane: Lane,
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
            rehearsing: None,
            links: Mutex::default(),
        };
        Self { shared: Arc::new(shared) }
    }

    /// What the device is.
    pub fn description(&self) -> &Description {
        &self.shared.description
    }

    /// How long a call of the driver may take.
    pub fn deadline(&self) -> Duration {
        self.shared.deadline
    }

    /// Whether uploads to buffers are verified on the device; see [`DeviceBuilder::checked`](super::DeviceBuilder::checked).
    pub fn checked(&self) -> bool {
        self.checked_unless(None)
    }

    /// Whether something of this device is checked that has its own setting, or none.
    pub(crate) fn checked_unless(&self, setting: Option<bool>) -> bool {
        let CheckedMode { asked, forced } = self.shared.checks;
        forced.or(setting).unwrap_or(asked)
    }

    /// Why the device was lost, if it was.
    pub fn lost(&self) -> Option<&str> {
        self.shared.lost.get().map(String::as_str)
    }

    /// Waits until the device has done all that was asked of it, looking again and again with growing naps.
    ///
    /// # Errors
    /// [`Error::Timeout`] at the deadline; the device is lost then.
    pub fn synchronize(&self, deadline: Duration) -> Result<()> {
        self.wait("synchronize", deadline, |driver| driver.poll())
    }

    /// Waits until the device has come to where `reached` says so.
    pub(super) fn wait(
        &self,
        name: &'static str,
        deadline: Duration,
        reached: impl FnOnce(&dyn Driver) -> Result<bool> + Copy + Send + 'static,
    ) -> Result<()> {
        self.until(name, deadline, |left| Ok(self.call(name, left.max(AWAKE), reached)?.then_some(())))
    }

    /// Polls, with growing naps, until there is something to return. Each poll hears how much of the deadline is left.
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
                if waited < AWAKE {
                    std::thread::yield_now();
                } else {
                    std::thread::sleep((waited / NAP_SHARE).min(LONGEST_NAP).min(deadline - waited));
                }
            }
        })
    }

    /// How long the groups of the device's links wait for other ranks: no wait for the device is longer.
    pub(super) fn links(&self) -> MutexGuard<'_, Vec<Duration>> {
        self.shared.links.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs `rehearse` with this device without memory or kernels: what is allocated there is counted and nothing else.
    pub(crate) fn rehearse<R>(&self, rehearse: impl FnOnce(&Self) -> Result<R>) -> Result<R> {
        self.rehearse_on(Arc::new(Rehearsal::of(self.description().clone())), false, rehearse)
    }

    /// The same as if this were such a device, and what was launched there, in order; `pins` hold what that uses.
    pub(crate) fn rehearse_as<R>(
        &self,
        description: Description,
        pins: Pins,
        rehearse: impl FnOnce(&Self) -> Result<R>,
    ) -> Result<(R, Vec<Launch>)> {
        self.list(description, pins, false, rehearse)
    }

    fn list<R>(
        &self,
        description: Description,
        pins: Pins,
        replayed: bool,
        rehearse: impl FnOnce(&Self) -> Result<R>,
    ) -> Result<(R, Vec<Launch>)> {
        let rehearsal = Arc::new(Rehearsal::listing(description, pins));
        let result = self.rehearse_on(Arc::clone(&rehearsal), replayed, rehearse)?;
        Ok((result, rehearsal.take_launches()))
    }

    /// Whether nothing that is launched on it runs.
    pub(crate) fn rehearses(&self) -> bool {
        self.shared.rehearsing.is_some()
    }

    fn rehearse_on<R>(
        &self,
        driver: Arc<Rehearsal>,
        replayed: bool,
        rehearse: impl FnOnce(&Self) -> Result<R>,
    ) -> Result<R> {
        let Shared { lane, deadline, identity, pins, rehearsing, .. } = &*self.shared;
        let mut parents = vec![*identity];
        parents.extend(rehearsing.iter().flat_map(|rehearsing| &rehearsing.parents));
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
            // There are no bytes to verify and no guards to look at.
            checks: CheckedMode { asked: false, forced: None },
            rehearsing: Some(Rehearsing { parents, replayed, over: AtomicBool::new(false) }),
            links: Mutex::default(),
        };
        let rehearsal = Over(Self { shared: Arc::new(shared) });
        rehearse(&rehearsal.0)
    }

    /// Pins that hold nothing so far.
    pub(crate) fn pins(&self) -> Pins {
        self.shared.pins.pins()
    }

    /// What the running step of an arena is lent: nothing so far.
    pub(crate) fn lending(&self) -> Lending {
        Lending::new(&self.shared.lends)
    }

    /// Queues a replay that uses this memory, once no running step relies on it.
    pub(super) fn replay(
        &self,
        uses: &[Use],
        queue: impl FnOnce(&dyn Driver) -> Result<()> + Send + 'static,
    ) -> Result<()> {
        self.check("replay")?;
        self.shared.lends.replay(uses, self.deadline(), || self.call("replay", self.deadline(), queue))
    }

    /// Runs `record` with a device that lists what is launched on it, and returns the list. Meanwhile this thread cannot
    /// reach the real one, and what it drops is ended later.
    pub(crate) fn record<R>(&self, pins: &Pins, record: impl FnOnce(&Self) -> Result<R>) -> Result<(R, Vec<Launch>)> {
        self.check("capture")?;
        let outcome = {
            let _recording = RecordingGuard::of(self.identity())?;
            self.list(self.description().clone(), pins.clone(), true, record)
        };
        self.end_retired();
        outcome
    }

    /// The number of the device, and of the owner of its buffers.
    pub(crate) fn identity(&self) -> u64 {
        self.shared.identity
    }

    /// The number of the owner of what an arena's steps have.
    pub(crate) fn owner_of_steps(&self, arena: u64) -> u64 {
        self.identity() | arena.clamp(1, ARENA_BITS)
    }

    /// Returns true for memory that may be used here: the device's own, and in a rehearsal its
    /// parents'. A recorded step may not use the memory of running steps.
    pub(crate) fn reaches(&self, owner: u64) -> bool {
        let of_parent = |rehearsing: &Rehearsing| {
            rehearsing.parents.contains(&(owner & !ARENA_BITS)) && !(rehearsing.replayed && owner & ARENA_BITS > 0)
        };
        owner & !ARENA_BITS == self.identity() || self.shared.rehearsing.as_ref().is_some_and(of_parent)
    }

    /// The number of the arena that owns this memory, if the memory is refused because its step
    /// runs while this device records another.
    pub(crate) fn arena_of_running_step(&self, owner: u64) -> Option<u64> {
        let arena = owner & ARENA_BITS;
        (arena > 0 && !self.reaches(owner) && self.reaches(owner & !ARENA_BITS)).then_some(arena)
    }

    pub(crate) fn free_bytes(&self, deadline: Duration) -> Result<u64> {
        self.call("free_bytes", deadline, |driver| driver.free_bytes())
    }

    /// Bytes that the system still has to find: of its memory, and of slots for uploads. None where that cannot be known.
    pub(crate) fn unbacked_bytes(&self) -> Result<Option<u64>> {
        let slots = self.unmade_slots_bytes()?;
        self.call("unbacked_bytes", self.deadline(), move |driver| {
            Ok(driver.unbacked_bytes().map(|bytes| bytes + slots))
        })
    }

    pub(crate) fn allocate(&self, bytes: usize) -> Result<u64> {
        self.call("allocate", self.deadline(), move |driver| driver.allocate(bytes))
    }

    /// Ends what its owner has let go: now, or as soon as no graph names it and this thread records nothing. On a lost device it
    /// stays, since the driver could block for ever.
    ///
    /// # Safety
    /// It is of this device, and nothing but queued work, graphs that are pinned and [`Retired`] itself uses it.
    pub(crate) unsafe fn retire(&self, thing: Retired) {
        if self.shared.rehearsing.is_none() {
            self.retired().push(thing);
            self.end_retired();
        }
    }

    fn retired(&self) -> MutexGuard<'_, Vec<Retired>> {
        self.shared.retired.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends what has been retired, as far as it can be.
    pub(super) fn end_retired(&self) {
        // What a lost device has stays until the process ends.
        if self.is_recorded_here() || self.lost().is_some() {
            return;
        }
        // A graph that ends lets go of memory that waited for it.
        while let Some(ready) = self.take_ready() {
            let (name, deadline) = (ready.name(), self.deadline());
            let ended = self.call(name, deadline, move |driver| Ok(ready.end(driver, deadline)));
            match ended {
                Ok(Ok(())) => {}
                Ok(Err(failed)) => {
                    let NotEnded { error, left } = *failed;
                    tracing::warn!(%error, again = left.is_some(), "what was dropped was not ended");
                    self.after(error);
                    if let Some(left) = left {
                        return self.retired().push(left);
                    }
                }
                Err(error) => return tracing::warn!(%error, "what was dropped stays until the process ends"),
            }
        }
    }

    /// One thing that nothing holds any more.
    fn take_ready(&self) -> Option<Retired> {
        let mut retired = self.retired();
        let ready = retired.iter().position(|thing| !thing.is_held(&self.shared.pins))?;
        Some(retired.remove(ready))
    }

    /// Waits until nothing of this device can reach memory any more, which its owner gives to another library.
    #[cfg(feature = "dlpack")]
    pub(crate) fn hand_over(&self, address: u64, bytes: usize) -> Result<()> {
        let refused = |got| Error::misuse("into_dlpack", "memory that this device alone holds", got);
        if self.shared.rehearsing.is_some() {
            return Err(refused("a buffer of a step that is only measured, which has none"));
        }
        // Who could launch with it, or record a launch, would hold the buffer; a graph that is there already needs nobody.
        if self.shared.pins.holds(address, bytes) {
            return Err(refused("a buffer that a captured step uses: end the capture first, by `into_state`"));
        }
        self.synchronize(self.deadline())
    }

    pub(crate) fn create_pool(&self) -> Result<Pool> {
        self.call("create_pool", self.deadline(), |driver| driver.create_pool())
    }

    pub(crate) fn pool_allocate(&self, pool: Pool, bytes: usize, deadline: Duration) -> Result<u64> {
        self.call("pool_allocate", deadline, move |driver| driver.pool_allocate(pool, bytes))
    }

    /// Gives several blocks back in one hop to the lane, each whatever became of the others. The pool's owner calls it once
    /// for each block that it took, when no tensor can name the block any more. Returns how many did not go back, and the
    /// first reason.
    pub(crate) fn pool_give_back(
        &self,
        pool: Pool,
        blocks: Vec<(u64, usize)>,
        deadline: Duration,
    ) -> (usize, Result<()>) {
        let all = blocks.len();
        let given_back = self.call("pool_free", deadline, move |driver| {
            // SAFETY: the blocks came from this pool with these sizes; their step is over, so nothing queued later uses
            // them, and the owner forgets them with this call.
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

    /// The ring that uploads pass through; none on a device that rehearses, which has no memory to upload to.
    pub(super) fn staging(&self) -> Option<&Mutex<Staging>> {
        self.shared.rehearsing.is_none().then_some(&self.shared.staging)
    }

    /// The page-locked memory of callers.
    pub(super) fn pages(&self) -> MutexGuard<'_, Pages> {
        self.shared.pages.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for the work queued before, until the deadline, then copies.
    ///
    /// # Safety
    /// `from` is memory of this device, of at least `len` elements, that stays until the copy is done or the device is lost.
    pub(crate) unsafe fn download<T: Pod + Send>(&self, from: u64, len: usize, deadline: Duration) -> Result<Vec<T>> {
        let start = Instant::now();
        let bytes = len.saturating_mul(size_of::<T>());
        // The system grants memory that it does not have, and ends a process that writes to it.
        let available = (bytes >= LARGE_READ_BYTES).then(HostMemory::available_bytes);
        if let Some(available) = available.filter(|&available| bytes as u64 > available) {
            return Err(no_host_memory(bytes, available));
        }
        self.synchronize(deadline)?;
        self.call("download", deadline.saturating_sub(start.elapsed()), move |driver| {
            let zeros = bytemuck::allocation::try_zeroed_slice_box(len);
            let mut to: Vec<T> = zeros.map_err(|()| no_host_memory(bytes, HostMemory::available_bytes()))?.into_vec();
            // SAFETY: `from` is device memory of `len` elements, as this function asks, and `to` is as long and the call's own.
            let copied = unsafe { driver.download(from, bytemuck::cast_slice_mut(&mut to)) };
            if let Err(error) = copied {
                // The copy may be under way.
                std::mem::forget(to);
                return Err(error);
            }
            Ok(to)
        })
    }

    /// Whether a launch does no more than queue.
    pub(super) fn launch_only_queues(&self) -> bool {
        self.shared.driver.launch_only_queues()
    }

    /// Makes a call of the driver on the lane, and waits for it until the deadline. All that it uses is its own: it may end later,
    /// or never. A rehearsal has no driver to wait for.
    pub(super) fn call<R: Send + 'static>(
        &self,
        name: &'static str,
        deadline: Duration,
        call: impl FnOnce(&dyn Driver) -> Result<R> + Send + 'static,
    ) -> Result<R> {
        self.check(name)?;
        if self.shared.rehearsing.is_some() {
            return call(&*self.shared.driver);
        }
        match self.shared.lane.run(deadline, self.unless_lost(call)) {
            Ok(result) => result.map_err(|error| self.after(error)),
            Err(TimedOut { waited }) => Err(self.lose_to(Error::Timeout { call: name, waited, report: None })),
        }
    }

    /// Posts a call of the driver to the lane, where it is made before any that comes later, and waits for nothing. `done` hears there what
    /// became of it, and of the device: a failure that spoils it has lost it by then.
    pub(super) fn post(
        &self,
        name: &'static str,
        call: impl FnOnce(&dyn Driver) -> Result<()> + Send + 'static,
        done: impl FnOnce(Result<()>) + Send + 'static,
    ) -> Result<()> {
        self.check(name)?;
        let call = self.unless_lost(call);
        let (driver, lost) = (Arc::clone(&self.shared.driver), Arc::clone(&self.shared.lost));
        self.shared.lane.post(move || {
            let outcome = call();
            if let Some(error) = outcome.as_ref().err().filter(|error| spoils(error)) {
                lose(&lost, &driver, error);
            }
            done(outcome);
        });
        Ok(())
    }

    /// A call as the lane makes it. One that stood behind a stuck one does not touch what is lost.
    fn unless_lost<R>(
        &self,
        call: impl FnOnce(&dyn Driver) -> Result<R> + Send + 'static,
    ) -> impl FnOnce() -> Result<R> + Send + 'static {
        let (driver, lost) = (Arc::clone(&self.shared.driver), Arc::clone(&self.shared.lost));
        // The emulator runs a launch in the mode of the thread that asks for it.
        let mode = Mode::of_thread();
        move || match (lost.get(), mode) {
            (Some(cause), _) => Err(Error::DeviceLost { cause: cause.clone() }),
            (None, None) => call(&*driver),
            (None, Some(mode)) => mode.scope(|| call(&*driver)),
        }
    }

    /// Runs what asks the driver for the thread's context: only where calls are made there is one.
    #[cfg(feature = "nvtx")]
    pub(crate) fn in_context<R: Send + 'static>(
        &self,
        name: &'static str,
        run: impl FnOnce() -> R + Send + 'static,
    ) -> Result<R> {
        self.call(name, self.deadline(), move |_| Ok(run()))
    }

    /// Makes a call of the driver that may hang on a thread of its own, which is given up: for what must be possible while the lane is stuck.
    pub(super) fn call_beside_lane(&self, call: impl FnOnce(&dyn Driver) -> Result<()> + Send + 'static) {
        let driver = Arc::clone(&self.shared.driver);
        let run = move || {
            if let Err(error) = call(&*driver) {
                tracing::warn!(%error, "a call beside the lane failed");
            }
            // The lane ends the driver, and not this thread, which may be late.
            if Arc::strong_count(&driver) == 1 {
                std::mem::forget(driver);
            }
        };
        if let Err(error) = std::thread::Builder::new().name("stepscope-beside".into()).spawn(run) {
            tracing::warn!(%error, "no thread for a call beside the lane");
        }
    }

    /// Whether this thread records a step of this device. The device that it records on is another.
    fn is_recorded_here(&self) -> bool {
        // A thread that is ending has left all recordings, and still drops what it kept in its
        // local storage.
        RECORDED.try_with(|recorded| recorded.borrow().contains(&self.identity())).unwrap_or(false)
    }

    /// An error when `call` cannot be made: the device is lost, or this thread records a step of it.
    pub(crate) fn check(&self, call: &'static str) -> Result<()> {
        if let Some(cause) = self.shared.lost.get() {
            return Err(Error::DeviceLost { cause: cause.clone() });
        }
        if self.is_recorded_here() {
            let expected = "only tensors and kernels of the step, while it is recorded";
            return Err(Error::misuse("capture", expected, format!("`{call}` on the device")));
        }
        if self.shared.rehearsing.as_ref().is_some_and(|rehearsing| rehearsing.over.load(Ordering::Relaxed)) {
            let expected = "a device, not the rehearsal of one, which ends with the closure that it was made for";
            return Err(Error::misuse("measure", expected, format!("`{call}` after that")));
        }
        Ok(())
    }

    /// Loses the device if the error spoils it.
    fn after(&self, error: Error) -> Error {
        if spoils(&error) { self.lose_to(error) } else { error }
    }

    pub(super) fn lose_to(&self, error: Error) -> Error {
        lose(&self.shared.lost, &self.shared.driver, &error);
        error
    }
}

/// From this size on, a read first checks the host's available memory.
const LARGE_READ_BYTES: usize = 64 << 20;

/// The error for a read that the host has no memory for.
fn no_host_memory(requested_bytes: usize, free_bytes: u64) -> Error {
    let reason = "a read takes as much of the host's memory: read a range at a time, or free some memory".into();
    Error::DeviceMemory { device: "the host".into(), requested_bytes, free_bytes, reason }
}

/// Whether the error leaves its device of no use.
fn spoils(error: &Error) -> bool {
    matches!(error, Error::Driver { fatal: true, .. } | Error::Timeout { .. })
}

fn lose(lost: &OnceLock<String>, driver: &Arc<dyn Driver>, error: &Error) {
    tracing::error!(%error, "device lost");
    // The first cause is the one that matters.
    if lost.set(error.to_string()).is_ok() {
        // Destroying streams, modules or the context would wait for what is stuck: they stay until the process ends.
        std::mem::forget(Arc::clone(driver));
    }
}

/// Ends a rehearsal, whatever became of its closure.
struct Over(Device);

impl Drop for Over {
    fn drop(&mut self) {
        if let Some(rehearsing) = &self.0.shared.rehearsing {
            rehearsing.over.store(true, Ordering::Relaxed);
        }
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        // What a lost device may still read stays until the process ends.
        if self.lost.get().is_some() || self.rehearsing.is_some() {
            return;
        }
        let mut left = std::mem::take(self.retired.get_mut().unwrap_or_else(PoisonError::into_inner));
        let (slots, bytes) =
            std::mem::take(self.staging.get_mut().unwrap_or_else(PoisonError::into_inner)).into_slots();
        left.extend(slots.into_iter().map(|slot| Retired::Slot { slot, bytes }));
        left.extend(std::mem::take(self.pages.get_mut().unwrap_or_else(PoisonError::into_inner)).into_retired());
        // The driver's own end can block as well, so it ends on the lane, too.
        let driver = std::mem::replace(&mut self.driver, Arc::new(Rehearsal::of(self.description.clone())));
        let (pins, deadline) = (self.pins.clone(), self.deadline);
        match self.lane.run(deadline, move || retired::end_all(left, &pins, driver, deadline)) {
            Ok(true) => {}
            Ok(false) => tracing::warn!("not all that the device had was given back"),
            Err(TimedOut { waited }) => {
                let error = Error::Timeout { call: "close", waited, report: None };
                tracing::error!(%error, "device lost");
            }
        }
    }
}
