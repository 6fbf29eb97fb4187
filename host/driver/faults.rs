//! Fault injection, a test aid: a driver whose Nth call of a kind fails, is late, or never returns.
//!
//! ```
//! use std::time::Duration;
//! use stepscope::faults::{Call, Fault, FaultPlan};
//! use stepscope::{Buffer, Device, DeviceKind, Error};
//!
//! let plan = FaultPlan::new().on(Call::Allocate, 2, Fault::Never);
//! let device = Device::builder(DeviceKind::Emulated).deadline(Duration::from_millis(20)).faults(plan).open()?;
//! let _first = Buffer::<f32>::zeros(&device, 8)?;
//! let second = Buffer::<f32>::zeros(&device, 8).unwrap_err();
//! assert!(matches!(second, Error::Timeout { call: "allocate", .. }));
//! assert!(matches!(Buffer::<f32>::zeros(&device, 8).unwrap_err(), Error::DeviceLost { .. }));
//! # Ok::<(), Error>(())
//! ```
//! Invariant: a call without a fault goes to the real driver unchanged.

use super::{Description, Driver, Pool};
use crate::error::{Error, Result};
use cuda_std::launch::{Entry, Grid, Words};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// A kind of driver call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Call {
    /// [`Driver::free_bytes`].
    FreeBytes,
    /// [`Driver::allocate`].
    Allocate,
    /// [`Driver::free`].
    Free,
    /// [`Driver::create_pool`].
    CreatePool,
    /// [`Driver::pool_allocate`].
    PoolAllocate,
    /// [`Driver::pool_free`].
    PoolFree,
    /// [`Driver::trim_pool`].
    TrimPool,
    /// [`Driver::destroy_pool`].
    DestroyPool,
    /// [`Driver::upload`].
    Upload,
    /// [`Driver::download`].
    Download,
    /// [`Driver::launch`].
    Launch,
    /// [`Driver::poll`].
    Poll,
}

impl Call {
    /// All kinds.
    pub const ALL: [Self; 12] = [
        Self::FreeBytes,
        Self::Allocate,
        Self::Free,
        Self::CreatePool,
        Self::PoolAllocate,
        Self::PoolFree,
        Self::TrimPool,
        Self::DestroyPool,
        Self::Upload,
        Self::Download,
        Self::Launch,
        Self::Poll,
    ];

    /// Whether the call never blocks in a sound driver, so that it runs on the caller's own thread.
    pub fn is_direct(self) -> bool {
        matches!(self, Self::Upload | Self::Launch | Self::Poll)
    }
}

/// What happens to a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Fault {
    /// It fails, and the driver goes on.
    Fail,
    /// It fails, and spoils the driver's context.
    Spoil,
    /// It succeeds, so much later.
    Delay(Duration),
    /// It never returns; [`Driver::poll`] says "not done" from then on.
    Never,
}

/// Which calls meet which fault. Clones share their counts.
#[derive(Clone, Debug, Default)]
pub struct FaultPlan {
    shared: Arc<Mutex<Plan>>,
}

#[derive(Debug, Default)]
struct Plan {
    faults: HashMap<(Call, u64), Fault>,
    counts: HashMap<Call, u64>,
    stalled: bool,
}

impl FaultPlan {
    /// A plan without faults.
    pub fn new() -> Self {
        Self::default()
    }

    /// The `number`th call of a kind, counted from 1, meets `fault`.
    ///
    /// # Panics
    /// For [`Fault::Never`] on an upload or a launch: they run on the caller's thread, which nothing could free.
    #[must_use]
    pub fn on(self, call: Call, number: u64, fault: Fault) -> Self {
        assert!(
            fault != Fault::Never || !call.is_direct() || call == Call::Poll,
            "{call:?} runs on the caller's own thread: a call that never returns would hang it"
        );
        self.plan().faults.insert((call, number), fault);
        self
    }

    /// Calls of a kind so far.
    pub fn count(&self, call: Call) -> u64 {
        self.plan().counts.get(&call).copied().unwrap_or(0)
    }

    fn plan(&self) -> std::sync::MutexGuard<'_, Plan> {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts a call and meets its fault.
    fn meet(&self, call: Call) -> Result<()> {
        let fault = {
            let mut plan = self.plan();
            let count = plan.counts.entry(call).or_default();
            *count += 1;
            let number = *count;
            plan.faults.get(&(call, number)).copied()
        };
        let failed = |fatal| Error::Driver { call: "fault injection", reason: format!("planted on {call:?}"), fatal };
        match fault {
            None => Ok(()),
            Some(Fault::Fail) => Err(failed(false)),
            Some(Fault::Spoil) => Err(failed(true)),
            Some(Fault::Delay(delay)) => {
                std::thread::sleep(delay);
                Ok(())
            }
            Some(Fault::Never) if call == Call::Poll => {
                self.plan().stalled = true;
                Ok(())
            }
            Some(Fault::Never) => loop {
                std::thread::park();
            },
        }
    }
}

/// A driver with a fault plan before it.
#[derive(Debug)]
pub(super) struct Faulty {
    driver: Arc<dyn Driver>,
    plan: FaultPlan,
}

impl Faulty {
    pub(super) fn new(driver: Arc<dyn Driver>, plan: FaultPlan) -> Self {
        Self { driver, plan }
    }
}

// SAFETY: every call that is let through goes to a sound driver unchanged; one that is not has no effect.
unsafe impl Driver for Faulty {
    fn description(&self) -> &Description {
        self.driver.description()
    }

    fn free_bytes(&self) -> Result<u64> {
        self.plan.meet(Call::FreeBytes)?;
        self.driver.free_bytes()
    }

    fn allocate(&self, bytes: usize) -> Result<u64> {
        self.plan.meet(Call::Allocate)?;
        self.driver.allocate(bytes)
    }

    unsafe fn free(&self, address: u64, bytes: usize) -> Result<()> {
        self.plan.meet(Call::Free)?;
        // SAFETY: the caller's promise.
        unsafe { self.driver.free(address, bytes) }
    }

    fn create_pool(&self) -> Result<Pool> {
        self.plan.meet(Call::CreatePool)?;
        self.driver.create_pool()
    }

    fn pool_allocate(&self, pool: Pool, bytes: usize) -> Result<u64> {
        self.plan.meet(Call::PoolAllocate)?;
        self.driver.pool_allocate(pool, bytes)
    }

    unsafe fn pool_free(&self, pool: Pool, address: u64, bytes: usize) -> Result<()> {
        self.plan.meet(Call::PoolFree)?;
        // SAFETY: the caller's promise.
        unsafe { self.driver.pool_free(pool, address, bytes) }
    }

    fn trim_pool(&self, pool: Pool, keep_bytes: usize) -> Result<()> {
        self.plan.meet(Call::TrimPool)?;
        self.driver.trim_pool(pool, keep_bytes)
    }

    unsafe fn destroy_pool(&self, pool: Pool) -> Result<()> {
        self.plan.meet(Call::DestroyPool)?;
        // SAFETY: the caller's promise.
        unsafe { self.driver.destroy_pool(pool) }
    }

    unsafe fn upload(&self, to: u64, from: &[u8]) -> Result<()> {
        self.plan.meet(Call::Upload)?;
        // SAFETY: the caller's promise.
        unsafe { self.driver.upload(to, from) }
    }

    unsafe fn download(&self, from: u64, to: &mut [u8]) -> Result<()> {
        self.plan.meet(Call::Download)?;
        // SAFETY: the caller's promise.
        unsafe { self.driver.download(from, to) }
    }

    unsafe fn launch(&self, entry: &Entry, grid: Grid, words: &Words) -> Result<()> {
        self.plan.meet(Call::Launch)?;
        // SAFETY: the caller's promise.
        unsafe { self.driver.launch(entry, grid, words) }
    }

    fn poll(&self) -> Result<bool> {
        self.plan.meet(Call::Poll)?;
        let stalled = self.plan.plan().stalled;
        Ok(!stalled && self.driver.poll()?)
    }
}
