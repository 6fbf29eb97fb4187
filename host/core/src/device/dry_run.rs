//! Dry runs: measured steps, and recorded steps, whose launches are listed and not run. Their
//! driver hands out addresses without memory.
//!
//! Invariants:
//!
//! - The driver accesses neither memory nor a device, so a dry run of any size costs nothing and
//!   leaves nothing allocated. Reads return zero.
//! - A dry run is a separate device. It may use its parents' memory, nothing else may use its own,
//!   and it ends with its closure.
//! - While a thread records a step, it reaches the device only through that step.

use super::builder::CheckedMode;
use super::driver::{Description, Driver, Fence, Graph, Link, Nodes, Piece, Pool, Wire};
use super::graph::Pins;
use super::memory::new_identity;
use super::{Device, Shared};
use crate::error::{Error, Result};
use cuda_std::launch::{Entry, Grid, Words};
use std::cell::RefCell;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// A future launch, whose contract has been checked.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Launch {
    /// The kernel.
    pub entry: Entry,
    /// Its grid of blocks.
    pub grid: Grid,
    /// Its arguments.
    pub words: Words,
}

#[derive(Debug)]
pub(super) struct DryRun {
    description: Description,
    next: AtomicU64,
    listed: Option<Listed>,
}

/// The launches so far, and the pins of their memory.
#[derive(Debug)]
struct Listed {
    launches: Mutex<Vec<Launch>>,
    pins: Pins,
}

impl DryRun {
    /// Creates a driver that discards launches.
    pub(super) fn of(description: Description) -> Self {
        Self { description, next: AtomicU64::new(1 << 40), listed: None }
    }

    /// Creates a driver that lists launches and pins their memory as soon as they are listed.
    fn listing(description: Description, pins: Pins) -> Self {
        Self { listed: Some(Listed { launches: Mutex::default(), pins }), ..Self::of(description) }
    }

    /// Takes the launches since the last call.
    fn take_launches(&self) -> Vec<Launch> {
        let take =
            |listed: &Listed| std::mem::take(&mut *listed.launches.lock().unwrap_or_else(PoisonError::into_inner));
        self.listed.as_ref().map_or_else(Vec::new, take)
    }
}

fn never<R>(call: &'static str) -> Result<R> {
    Err(Error::Driver { call, reason: "a dry run has no device".into(), fatal: false })
}

// SAFETY: nothing is ever read or written at the addresses that it hands out. They are multiples of
// 256.
unsafe impl Driver for DryRun {
    fn description(&self) -> &Description {
        &self.description
    }

    fn free_bytes(&self) -> Result<u64> {
        Ok(u64::MAX)
    }

    fn allocate(&self, bytes: usize) -> Result<u64> {
        let after = |next: u64| (bytes as u64).checked_next_multiple_of(256).and_then(|bytes| next.checked_add(bytes));
        self.next.fetch_update(Ordering::Relaxed, Ordering::Relaxed, after).map_err(|next| Error::DeviceMemory {
            device: "a dry run".into(),
            requested_bytes: bytes,
            free_bytes: u64::MAX - next,
            reason: "its addresses are exhausted".into(),
        })
    }

    unsafe fn free(&self, _: u64, _: usize) -> Result<()> {
        Ok(())
    }

    fn create_pool(&self) -> Result<Pool> {
        never("create_pool")
    }

    fn pool_allocate(&self, _: Pool, _: usize) -> Result<u64> {
        never("pool_allocate")
    }

    unsafe fn pool_free(&self, _: Pool, _: u64, _: usize) -> Result<()> {
        never("pool_free")
    }

    fn trim_pool(&self, _: Pool, _: usize) -> Result<()> {
        never("trim_pool")
    }

    unsafe fn destroy_pool(&self, _: Pool) -> Result<()> {
        never("destroy_pool")
    }

    fn allocate_pinned(&self, _: usize) -> Result<u64> {
        never("allocate_pinned")
    }

    unsafe fn free_pinned(&self, _: u64, _: usize) -> Result<()> {
        never("free_pinned")
    }

    unsafe fn queue_upload(&self, _: u64, _: &[u8], _: Option<u64>) -> Result<()> {
        Ok(())
    }

    fn create_fence(&self) -> Result<Fence> {
        never("create_fence")
    }

    fn record_fence(&self, _: Fence) -> Result<()> {
        never("record_fence")
    }

    fn poll_fence(&self, _: Fence) -> Result<bool> {
        never("poll_fence")
    }

    unsafe fn destroy_fence(&self, _: Fence) -> Result<()> {
        never("destroy_fence")
    }

    unsafe fn download(&self, _: u64, to: &mut [u8]) -> Result<()> {
        to.fill(0);
        Ok(())
    }

    unsafe fn queue_download(&self, _: u64, _: u64, _: usize) -> Result<()> {
        never("queue_download")
    }

    fn load(&self, _: &Entry) -> Result<()> {
        Ok(())
    }

    unsafe fn launch(&self, entry: &Entry, grid: Grid, words: &Words) -> Result<()> {
        let Some(Listed { launches, pins }) = &self.listed else { return Ok(()) };
        // The address of an empty argument may be the start of another's memory.
        pins.add(words.extents().iter().filter(|extent| extent.length > 0).map(|extent| extent.address));
        let launch = Launch { entry: *entry, grid, words: words.clone() };
        launches.lock().unwrap_or_else(PoisonError::into_inner).push(launch);
        Ok(())
    }

    fn begin_capture(&self) -> Result<()> {
        never("begin_capture")
    }

    fn end_capture(&self) -> Result<Graph> {
        never("end_capture")
    }

    fn graph_nodes(&self, _: Graph) -> Result<Nodes> {
        never("graph_nodes")
    }

    fn instantiate(&self, _: Graph) -> Result<()> {
        never("instantiate")
    }

    unsafe fn replay(&self, _: Graph) -> Result<()> {
        never("replay")
    }

    unsafe fn destroy_graph(&self, _: Graph) -> Result<()> {
        never("destroy_graph")
    }

    fn poll(&self) -> Result<bool> {
        Ok(true)
    }

    fn name_link(&self) -> Result<Vec<u8>> {
        never("name_link")
    }

    fn join_link(&self, _: &[u8], _: usize, _: usize, _: Arc<dyn Wire>, _: Duration) -> Result<Link> {
        never("join_link")
    }

    unsafe fn exchange(&self, _: Link, _: &[Piece], _: &[Piece]) -> Result<()> {
        never("exchange")
    }

    fn follow_exchanges(&self) -> Result<()> {
        never("follow_exchanges")
    }

    unsafe fn leave_link(&self, _: Link) -> Result<()> {
        never("leave_link")
    }
}

/// The state of a dry run.
#[derive(Debug)]
pub(super) struct DryRunState {
    /// The devices whose memory it may use. The device that it stands for comes first.
    parents: Vec<u64>,
    /// True if its launches are replayed after the steps that run now. It may then use buffers of
    /// its parents, but no memory of their steps.
    replayed: bool,
    /// True if its closure has ended.
    over: AtomicBool,
}

impl DryRunState {
    /// Returns true if the dry run may use memory of this device. `of_step` is true for memory of
    /// a running step.
    pub(super) fn reaches(&self, device: u64, of_step: bool) -> bool {
        self.parents.contains(&device) && !(self.replayed && of_step)
    }

    /// Returns true if its closure has ended.
    pub(super) fn is_over(&self) -> bool {
        self.over.load(Ordering::Relaxed)
    }
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

    fn dry_run_on<R>(&self, driver: Arc<DryRun>, replayed: bool, run: impl FnOnce(&Self) -> Result<R>) -> Result<R> {
        let mut parents = vec![self.identity()];
        parents.extend(self.dry_run_state().iter().flat_map(|dry_run| &dry_run.parents));
        let state = DryRunState { parents, replayed, over: AtomicBool::new(false) };
        let dry_run = DryRunGuard(self.stand_in(driver, state));
        run(&dry_run.0)
    }

    /// Returns a device for a dry run of this one, with a driver that has no memory.
    fn stand_in(&self, driver: Arc<DryRun>, state: DryRunState) -> Self {
        let Shared { thread, deadline, pins, .. } = &*self.shared;
        let shared = Shared {
            description: driver.description().clone(),
            driver,
            thread: Arc::clone(thread),
            deadline: *deadline,
            identity: new_identity(),
            lost: Arc::default(),
            pins: pins.clone(),
            borrows: Arc::default(),
            deferred: Mutex::default(),
            staging: Mutex::default(),
            pages: Mutex::default(),
            // A dry run has no bytes to verify and no guards to check.
            checks: CheckedMode { asked: false, forced: None },
            dry_run: Some(state),
            links: Mutex::default(),
        };
        Self { shared: Arc::new(shared), wait_budget: None }
    }

    /// Returns the state of the dry run, if this device stands for one.
    pub(super) fn dry_run_state(&self) -> Option<&DryRunState> {
        self.shared.dry_run.as_ref()
    }

    /// Returns true if launches on this device do not run.
    pub(crate) fn is_dry_run(&self) -> bool {
        self.shared.dry_run.is_some()
    }

    /// Runs `record` with a device that only lists its launches, and returns the list. Meanwhile
    /// this thread cannot reach the real device, and the objects that it drops are freed later.
    pub(crate) fn record<R>(&self, pins: &Pins, record: impl FnOnce(&Self) -> Result<R>) -> Result<(R, Vec<Launch>)> {
        self.check("capture")?;
        let outcome = {
            let _recording = RecordingGuard::of(self.identity())?;
            self.list(self.description().clone(), pins.clone(), true, record)
        };
        self.free_deferred();
        outcome
    }

    /// Returns true if this thread records a step of this device. The device that it records on is
    /// a different one.
    pub(super) fn is_recorded_here(&self) -> bool {
        // A thread that is ending has left all recordings, but still drops the values in its
        // thread-local storage.
        RECORDED.try_with(|recorded| recorded.borrow().contains(&self.identity())).unwrap_or(false)
    }
}

/// A guard that ends a dry run when its closure returns, fails or panics.
struct DryRunGuard(Device);

impl Drop for DryRunGuard {
    fn drop(&mut self) {
        if let Some(dry_run) = self.0.dry_run_state() {
            dry_run.over.store(true, Ordering::Relaxed);
        }
    }
}
