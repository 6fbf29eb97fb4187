//! An open device: the driver behind deadlines.
//!
//! Invariant: a call that can block runs on the worker lane and is waited for until its deadline; a wait for the device
//! polls. After a missed deadline, or a failure that spoils the driver's context, the device is lost: every later call
//! fails at once with that cause, and memory leaks rather than blocks. While a thread records a step, it reaches the device
//! through that step alone.

use super::faults::{FaultPlan, Faulty};
use super::lane::{Lane, TimedOut};
use super::pins::{PinTable, Pins};
use super::ptx::check_names;
use super::rehearsal::{Launch, Rehearsal};
use super::staging::{RingSize, Staging};
use super::{DEFAULT_DEADLINE, Description, DeviceKind, Driver, Kernels, Pool, emulated};
use crate::error::{Error, Result};
use cuda_std::emulator::Mode;
use cuda_std::launch::{Entry, Grid, Words};
use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// Waits shorter than this look again at once, and let other threads run in between: a step of training lasts milliseconds, and
/// a nap would make it longer.
const AWAKE: Duration = Duration::from_millis(20);
/// A longer wait naps for this share of what it has waited, so that it ends that much late at most ..
const NAP_SHARE: u32 = 64;
/// .. but not longer than this.
const LONGEST_NAP: Duration = Duration::from_millis(1);
/// The environment variable that turns checked mode on (`1`) or off (`0`).
const CHECKED_VARIABLE: &str = "STEPSCOPE_CHECKED";

/// Settings of a device; see [`Device::builder`].
#[derive(Debug)]
pub struct DeviceBuilder {
    kind: DeviceKind,
    deadline: Duration,
    faults: Option<FaultPlan>,
    ring: RingSize,
    checked: bool,
    kernels: Vec<Kernels>,
}

impl DeviceBuilder {
    /// How long a call of the driver may take (default [`DEFAULT_DEADLINE`]).
    #[must_use]
    pub fn deadline(mut self, deadline: Duration) -> Self {
        self.deadline = deadline;
        self
    }

    /// Page-locked host memory that uploads pass through: `slots` of `slot_bytes` each, at least one of at least 4 KiB (default:
    /// two of 64 MiB). Each is taken from the system when it is first needed.
    #[must_use]
    pub fn staging(mut self, slots: usize, slot_bytes: usize) -> Self {
        self.ring = RingSize { slots: slots.max(1), slot_bytes: slot_bytes.max(4096).next_multiple_of(256) };
        self
    }

    /// Whether what is uploaded to buffers is verified on the device, and whether arenas of this device are checked unless they
    /// say otherwise (default: no). The environment variable `STEPSCOPE_CHECKED` (`1` or `0`) overrides this and them.
    #[must_use]
    pub fn checked(mut self, checked: bool) -> Self {
        self.checked = checked;
        self
    }

    /// Kernels of another package than stepscope's, made by [`kernels!`](crate::kernels) there; to be called once for each package.
    #[must_use]
    pub fn kernels(mut self, kernels: Kernels) -> Self {
        self.kernels.push(kernels);
        self
    }

    /// Makes chosen calls of the driver fail, for tests.
    #[must_use]
    pub fn faults(mut self, plan: FaultPlan) -> Self {
        self.faults = Some(plan);
        self
    }

    /// Opens the device.
    ///
    /// # Errors
    /// [`Error::NoDevice`] when it is not there or this build cannot drive it, with what to do; [`Error::Timeout`] when
    /// the driver does not answer; [`Error::Misuse`] for a malformed `STEPSCOPE_CHECKED`, and for kernels of two packages of one
    /// name, or of one that is named like stepscope's own.
    pub fn open(self) -> Result<Device> {
        check_names(&self.kernels)?;
        let checks = Checks { asked: self.checked, forced: checked_variable()? };
        let lane = Lane::start().map_err(|error| Error::NoDevice {
            wanted: "any",
            reason: format!("no thread for the driver's calls: {error}"),
        })?;
        let (kind, kernels) = (self.kind, self.kernels);
        // Opening compiles the kernels, which takes seconds, and a driver can hang there as anywhere.
        let opened = lane.run(self.deadline.max(DEFAULT_DEADLINE), move || match kind {
            DeviceKind::Emulated => emulated(),
            DeviceKind::Cuda => cuda(&kernels),
            DeviceKind::Auto => cuda(&kernels).or_else(|reason| {
                tracing::debug!(%reason, "no CUDA device, using the emulator");
                emulated()
            }),
        });
        let mut driver =
            opened.map_err(|TimedOut { waited }| Error::Timeout { call: "open", waited, report: None })??;
        if let Some(plan) = self.faults {
            driver = Arc::new(Faulty::new(driver, plan));
        }
        let description = driver.description().clone();
        tracing::info!(kind = %description.kind, name = description.name, memory_bytes = description.memory_bytes, "device opened");
        // Tells memory of one device from another's.
        static DEVICES: AtomicU64 = AtomicU64::new(0);
        let identity = DEVICES.fetch_add(1, Ordering::Relaxed);
        let shared = Shared {
            driver,
            description,
            lane: Arc::new(lane),
            deadline: self.deadline,
            identity,
            lost: OnceLock::new(),
            pins: PinTable::default(),
            staging: Mutex::new(Staging::new(self.ring)),
            checks,
            rehearsal: None,
        };
        Ok(Device { shared: Arc::new(shared) })
    }
}

/// Whether the environment asks for checked mode.
fn checked_variable() -> Result<Option<bool>> {
    match std::env::var(CHECKED_VARIABLE).as_deref() {
        Err(_) => Ok(None),
        Ok("0") => Ok(Some(false)),
        Ok("1") => Ok(Some(true)),
        Ok(other) => Err(Error::misuse("device", "0 or 1 in STEPSCOPE_CHECKED", format!("`{other}`"))),
    }
}

fn emulated() -> Result<Arc<dyn Driver>> {
    let expected = "0 or 1 in STEPSCOPE_RACES and a seed in STEPSCOPE_SHUFFLE";
    Mode::from_environment().map_err(|found| Error::misuse("emulator", expected, found))?;
    Ok(Arc::new(emulated::Emulated::new()))
}

#[cfg(feature = "cuda")]
fn cuda(others: &[Kernels]) -> Result<Arc<dyn Driver>> {
    Ok(Arc::new(super::cuda::Cuda::open(others)?))
}

#[cfg(not(feature = "cuda"))]
fn cuda(_: &[Kernels]) -> Result<Arc<dyn Driver>> {
    let reason = "this build has no CUDA; build with `--features cuda`".into();
    Err(Error::NoDevice { wanted: "cuda", reason })
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
    lost: OnceLock<String>,
    pins: PinTable,
    staging: Mutex<Staging>,
    checks: Checks,
    /// The driver again, where it is one that rehearses.
    rehearsal: Option<Arc<Rehearsal>>,
}

/// Whether the program wants checked mode, and what the environment has to say.
#[derive(Clone, Copy, Debug)]
struct Checks {
    asked: bool,
    forced: Option<bool>,
}

thread_local! {
    /// The device of which this thread records a step.
    static RECORDING: Cell<Option<u64>> = const { Cell::new(None) };
}

/// Ends this thread's recording.
struct Recording;

impl Drop for Recording {
    fn drop(&mut self) {
        RECORDING.set(None);
    }
}

impl Device {
    /// Opens a device with the default settings.
    ///
    /// # Errors
    /// As for [`DeviceBuilder::open`].
    pub fn open(kind: DeviceKind) -> Result<Self> {
        Self::builder(kind).open()
    }

    /// Settings for a device.
    pub fn builder(kind: DeviceKind) -> DeviceBuilder {
        DeviceBuilder {
            kind,
            deadline: DEFAULT_DEADLINE,
            faults: None,
            ring: RingSize::default(),
            checked: false,
            kernels: Vec::new(),
        }
    }

    /// What the device is.
    pub fn description(&self) -> &Description {
        &self.shared.description
    }

    /// How long a call of the driver may take.
    pub fn deadline(&self) -> Duration {
        self.shared.deadline
    }

    /// Whether uploads to buffers are verified on the device; see [`DeviceBuilder::checked`].
    pub fn checked(&self) -> bool {
        self.checked_unless(None)
    }

    /// Whether something of this device is checked that has its own setting, or none.
    pub(crate) fn checked_unless(&self, own: Option<bool>) -> bool {
        let Checks { asked, forced } = self.shared.checks;
        forced.or(own).unwrap_or(asked)
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

    /// Waits until `done` says so.
    pub(super) fn wait(
        &self,
        name: &'static str,
        deadline: Duration,
        mut done: impl FnMut(&dyn Driver) -> Result<bool>,
    ) -> Result<()> {
        let start = Instant::now();
        loop {
            if self.direct(name, &mut done)? {
                return Ok(());
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
    }

    /// The same device without memory or kernels: what is allocated on it is counted and nothing else.
    pub(crate) fn counting(&self) -> Self {
        self.rehearsing(Arc::new(Rehearsal::of(self.description().clone())))
    }

    fn rehearsing(&self, rehearsal: Arc<Rehearsal>) -> Self {
        let Shared { description, lane, deadline, identity, pins, checks, .. } = &*self.shared;
        let shared = Shared {
            driver: Arc::clone(&rehearsal) as Arc<dyn Driver>,
            description: description.clone(),
            lane: Arc::clone(lane),
            deadline: *deadline,
            identity: *identity,
            lost: OnceLock::new(),
            pins: pins.clone(),
            staging: Mutex::default(),
            checks: *checks,
            rehearsal: Some(rehearsal),
        };
        Self { shared: Arc::new(shared) }
    }

    /// Pins that hold nothing so far.
    pub(crate) fn pins(&self) -> Pins {
        self.shared.pins.pins()
    }

    /// Runs `record` with a device that lists what is launched on it, and returns the list. Meanwhile this thread cannot
    /// reach the real one, and memory that it drops is freed later.
    pub(crate) fn record<R>(&self, pins: &Pins, record: impl FnOnce(&Self) -> Result<R>) -> Result<(R, Vec<Launch>)> {
        self.check("capture")?;
        let rehearsal = Arc::new(Rehearsal::listing(self.description().clone(), pins.clone()));
        let outcome = {
            RECORDING.set(Some(self.identity()));
            let _recording = Recording;
            record(&self.rehearsing(Arc::clone(&rehearsal)))
        };
        self.free_waiting();
        Ok((outcome?, rehearsal.take_launches()))
    }

    /// What tells this device's memory from another's.
    pub(crate) fn identity(&self) -> u64 {
        self.shared.identity
    }

    /// Whether both stand for the same open device.
    pub(crate) fn same(&self, other: &Self) -> bool {
        self.identity() == other.identity()
    }

    pub(crate) fn free_bytes(&self, deadline: Duration) -> Result<u64> {
        self.bounded("free_bytes", deadline, |driver| driver.free_bytes())
    }

    pub(crate) fn allocate(&self, bytes: usize) -> Result<u64> {
        self.bounded("allocate", self.deadline(), move |driver| driver.allocate(bytes))
    }

    /// Gives memory back; on a lost device it leaks, since the driver could block for ever.
    ///
    /// # Safety
    /// As for [`Driver::free`].
    pub(crate) unsafe fn free(&self, address: u64, bytes: usize) {
        if self.is_recorded_here() {
            self.shared.pins.wait(address, bytes);
        } else if !self.shared.pins.postpone(address, bytes) {
            // SAFETY: the caller's promise, and no graph names the memory.
            unsafe { self.free_now(address, bytes) };
        }
    }

    /// Waits until nothing of this device can reach memory any more, which its owner gives to another library.
    #[cfg(feature = "dlpack")]
    pub(crate) fn hand_over(&self, address: u64, bytes: usize) -> Result<()> {
        let refused = |got| Error::misuse("into_dlpack", "memory that this device alone holds", got);
        if self.shared.rehearsal.is_some() {
            return Err(refused("a buffer of a step that is only measured, which has none"));
        }
        // Who could launch with it, or record a launch, would hold the buffer; a graph that is there already needs nobody.
        if self.shared.pins.holds(address, bytes) {
            return Err(refused("a buffer that a captured step uses: end the capture first, by `into_state`"));
        }
        self.synchronize(self.deadline())
    }

    /// Frees what only waited for graphs that are gone.
    pub(super) fn free_waiting(&self) {
        for (address, bytes) in self.shared.pins.take_free() {
            // SAFETY: it was given to `free`, and no graph names it any more.
            unsafe { self.free_now(address, bytes) };
        }
    }

    /// # Safety
    /// As for [`Device::free`], and no graph names the memory.
    unsafe fn free_now(&self, address: u64, bytes: usize) {
        // SAFETY: the caller's promise.
        let freed = self.bounded("free", self.deadline(), move |driver| unsafe { driver.free(address, bytes) });
        if let Err(error) = freed {
            tracing::warn!(%error, bytes, "device memory was not freed");
        }
    }

    pub(crate) fn create_pool(&self) -> Result<Pool> {
        self.bounded("create_pool", self.deadline(), |driver| driver.create_pool())
    }

    pub(crate) fn pool_allocate(&self, pool: Pool, bytes: usize, deadline: Duration) -> Result<u64> {
        self.bounded("pool_allocate", deadline, move |driver| driver.pool_allocate(pool, bytes))
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
        let given_back = self.bounded("pool_free", deadline, move |driver| {
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
        self.bounded("trim_pool", self.deadline(), move |driver| driver.trim_pool(pool, keep_bytes))
    }

    /// # Safety
    /// As for [`Driver::destroy_pool`].
    pub(crate) unsafe fn destroy_pool(&self, pool: Pool) -> Result<()> {
        // SAFETY: the caller's promise.
        self.bounded("destroy_pool", self.deadline(), move |driver| unsafe { driver.destroy_pool(pool) })
    }

    /// The ring that uploads pass through; none on a device that rehearses, which has no memory to upload to.
    pub(super) fn staging(&self) -> Option<&Mutex<Staging>> {
        self.shared.rehearsal.is_none().then_some(&self.shared.staging)
    }

    /// Waits for the work queued before, until the deadline, then copies.
    ///
    /// # Safety
    /// As for [`Driver::download`].
    pub(crate) unsafe fn download(&self, from: u64, bytes: usize, deadline: Duration) -> Result<Vec<u8>> {
        let start = Instant::now();
        self.synchronize(deadline)?;
        self.bounded("download", deadline.saturating_sub(start.elapsed()), move |driver| {
            let mut to = vec![0; bytes];
            // SAFETY: the caller's promise; the buffer is the call's own, so it may end after the caller has gone.
            unsafe { driver.download(from, &mut to)? };
            Ok(to)
        })
    }

    /// # Safety
    /// As for [`Driver::launch`].
    pub(crate) unsafe fn launch(&self, entry: &Entry, grid: Grid, words: &Words) -> Result<()> {
        // SAFETY: the caller's promise.
        self.direct("launch", |driver| unsafe { driver.launch(entry, grid, words) })
    }

    /// A call that does not block.
    pub(super) fn direct<R>(&self, name: &'static str, call: impl FnOnce(&dyn Driver) -> Result<R>) -> Result<R> {
        self.check(name)?;
        call(&*self.shared.driver).map_err(|error| self.after(error))
    }

    /// A call that can block, on the lane; a rehearsal does not block.
    pub(super) fn bounded<R: Send + 'static>(
        &self,
        name: &'static str,
        deadline: Duration,
        call: impl FnOnce(&dyn Driver) -> Result<R> + Send + 'static,
    ) -> Result<R> {
        self.check(name)?;
        let driver = Arc::clone(&self.shared.driver);
        if self.shared.rehearsal.is_some() {
            return call(&*driver);
        }
        match self.shared.lane.run(deadline, move || call(&*driver)) {
            Ok(result) => result.map_err(|error| self.after(error)),
            Err(TimedOut { waited }) => Err(self.lose_to(Error::Timeout { call: name, waited, report: None })),
        }
    }

    /// Whether this thread records a step of this device, and this is not the device that it records on.
    fn is_recorded_here(&self) -> bool {
        RECORDING.get() == Some(self.identity()) && self.shared.rehearsal.is_none()
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
        Ok(())
    }

    /// Loses the device if the error spoils it.
    fn after(&self, error: Error) -> Error {
        if matches!(error, Error::Driver { fatal: true, .. }) { self.lose_to(error) } else { error }
    }

    pub(super) fn lose_to(&self, error: Error) -> Error {
        tracing::error!(%error, "device lost");
        // The first cause is the one that matters.
        let _ = self.shared.lost.set(error.to_string());
        error
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        // What a lost device may still read stays until the process ends.
        if self.lost.get().is_some() || self.rehearsal.is_some() {
            return;
        }
        let (driver, staging) =
            (Arc::clone(&self.driver), std::mem::take(self.staging.get_mut().unwrap_or_else(PoisonError::into_inner)));
        let deadline = self.deadline;
        let ended = self.lane.run(deadline, move || staging.end(&*driver, deadline));
        if !matches!(ended, Ok(Ok(()))) {
            tracing::warn!("page-locked memory was not freed");
        }
    }
}
