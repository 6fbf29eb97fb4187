//! An open device: the driver behind deadlines.
//!
//! Invariant: a call that can block runs on the worker lane and is waited for until its deadline; a wait for the device
//! polls. After a missed deadline, or a failure that spoils the driver's context, the device is lost: every later call
//! fails at once with that cause, and memory leaks rather than blocks.

use super::counting::Counting;
use super::faults::{FaultPlan, Faulty};
use super::lane::{Lane, TimedOut};
use super::{DEFAULT_DEADLINE, Description, DeviceKind, Driver, Pool, emulated};
use crate::error::{Error, Result};
use cuda_std::emulator::Mode;
use cuda_std::launch::{Entry, Grid, Words};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

/// The longest sleep between two looks at the stream.
const LONGEST_NAP: Duration = Duration::from_micros(500);
/// Waits shorter than this spin.
const SPIN: Duration = Duration::from_micros(200);

/// Settings of a device; see [`Device::builder`].
#[derive(Debug)]
pub struct DeviceBuilder {
    kind: DeviceKind,
    deadline: Duration,
    faults: Option<FaultPlan>,
}

impl DeviceBuilder {
    /// How long a call of the driver may take (default [`DEFAULT_DEADLINE`]).
    #[must_use]
    pub fn deadline(mut self, deadline: Duration) -> Self {
        self.deadline = deadline;
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
    /// the driver does not answer.
    pub fn open(self) -> Result<Device> {
        let lane = Lane::start().map_err(|error| Error::NoDevice {
            wanted: "any",
            reason: format!("no thread for the driver's calls: {error}"),
        })?;
        let kind = self.kind;
        // Opening compiles the kernels, which takes seconds, and a driver can hang there as anywhere.
        let opened = lane.run(self.deadline.max(DEFAULT_DEADLINE), move || match kind {
            DeviceKind::Emulated => emulated(),
            DeviceKind::Cuda => cuda(),
            DeviceKind::Auto => cuda().or_else(|reason| {
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
        let shared = Shared { driver, description, lane, deadline: self.deadline, identity, lost: OnceLock::new() };
        Ok(Device { shared: Arc::new(shared) })
    }
}

fn emulated() -> Result<Arc<dyn Driver>> {
    let expected = "0 or 1 in STEPSCOPE_RACES and a seed in STEPSCOPE_SHUFFLE";
    Mode::from_environment().map_err(|found| Error::misuse("emulator", expected, found))?;
    Ok(Arc::new(emulated::Emulated::new()))
}

#[cfg(feature = "cuda")]
fn cuda() -> Result<Arc<dyn Driver>> {
    Ok(Arc::new(super::cuda::Cuda::open()?))
}

#[cfg(not(feature = "cuda"))]
fn cuda() -> Result<Arc<dyn Driver>> {
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
    lane: Lane,
    deadline: Duration,
    identity: u64,
    lost: OnceLock<String>,
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
        DeviceBuilder { kind, deadline: DEFAULT_DEADLINE, faults: None }
    }

    /// What the device is.
    pub fn description(&self) -> &Description {
        &self.shared.description
    }

    /// How long a call of the driver may take.
    pub fn deadline(&self) -> Duration {
        self.shared.deadline
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
        let start = Instant::now();
        let mut nap = Duration::ZERO;
        loop {
            if self.direct(|driver| driver.poll())? {
                return Ok(());
            }
            let waited = start.elapsed();
            if waited >= deadline {
                return Err(self.lose_to(Error::Timeout { call: "synchronize", waited, report: None }));
            }
            if waited < SPIN {
                std::hint::spin_loop();
            } else {
                nap = (nap * 2).clamp(Duration::from_micros(20), LONGEST_NAP).min(deadline - waited);
                std::thread::sleep(nap);
            }
        }
    }

    /// The same device without memory or kernels: what is allocated on it is counted and nothing else.
    pub(crate) fn counting(&self) -> Result<Self> {
        let Shared { description, deadline, identity, .. } = &*self.shared;
        let lane = Lane::start().map_err(|error| Error::misuse("measure", "a worker thread", error.to_string()))?;
        let shared = Shared {
            driver: Arc::new(Counting::new(description.clone())),
            description: description.clone(),
            lane,
            deadline: *deadline,
            identity: *identity,
            lost: OnceLock::new(),
        };
        Ok(Self { shared: Arc::new(shared) })
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

    /// # Safety
    /// As for [`Driver::upload`].
    pub(crate) unsafe fn upload(&self, to: u64, from: &[u8]) -> Result<()> {
        // SAFETY: the caller's promise.
        self.direct(|driver| unsafe { driver.upload(to, from) })
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
        self.direct(|driver| unsafe { driver.launch(entry, grid, words) })
    }

    /// A call that does not block.
    fn direct<R>(&self, call: impl FnOnce(&dyn Driver) -> Result<R>) -> Result<R> {
        self.check()?;
        call(&*self.shared.driver).map_err(|error| self.after(error))
    }

    /// A call that can block, on the lane.
    fn bounded<R: Send + 'static>(
        &self,
        name: &'static str,
        deadline: Duration,
        call: impl FnOnce(&dyn Driver) -> Result<R> + Send + 'static,
    ) -> Result<R> {
        self.check()?;
        let driver = Arc::clone(&self.shared.driver);
        match self.shared.lane.run(deadline, move || call(&*driver)) {
            Ok(result) => result.map_err(|error| self.after(error)),
            Err(TimedOut { waited }) => Err(self.lose_to(Error::Timeout { call: name, waited, report: None })),
        }
    }

    /// An error when the device is lost.
    pub(crate) fn check(&self) -> Result<()> {
        self.shared.lost.get().map_or(Ok(()), |cause| Err(Error::DeviceLost { cause: cause.clone() }))
    }

    /// Loses the device if the error spoils it.
    fn after(&self, error: Error) -> Error {
        if matches!(error, Error::Driver { fatal: true, .. }) { self.lose_to(error) } else { error }
    }

    fn lose_to(&self, error: Error) -> Error {
        tracing::error!(%error, "device lost");
        // The first cause is the one that matters.
        let _ = self.shared.lost.set(error.to_string());
        error
    }
}
