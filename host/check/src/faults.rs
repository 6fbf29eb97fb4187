//! Fault injection for tests: a device whose driver's Nth call of a kind fails, is late, panics, or
//! never returns.
//!
//! ```
//! use std::time::Duration;
//! use stepscope::check::faults::{Call, Fault, FaultPlan};
//! use stepscope::{Buffer, Device, DeviceKind, Error};
//!
//! let plan = FaultPlan::new().on(Call::Allocate, 2, Fault::Never);
//! let device = Device::builder(DeviceKind::Emulated).deadline(Duration::from_millis(20)).layer(plan).open()?;
//! let _first = Buffer::<f32>::zeros(&device, 8)?;
//! let second = Buffer::<f32>::zeros(&device, 8).unwrap_err();
//! assert!(matches!(second, Error::Timeout { call: "allocate", .. }));
//! assert!(matches!(Buffer::<f32>::zeros(&device, 8).unwrap_err(), Error::DeviceLost { .. }));
//! # Ok::<(), Error>(())
//! ```
//! Invariant: a call without a fault goes to the real driver unchanged.

use cuda_std::launch::{Entry, Grid, Words};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use stepscope_core::internals::{Driver, DriverLayer, Fence, Graph, Link, Nodes, Piece, Pool, Wire};
use stepscope_core::{Description, Error, Result};

/// A kind of call of a device's driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Call {
    /// Reads the number of free bytes.
    FreeBytes,
    /// Allocates device memory.
    Allocate,
    /// Frees device memory.
    Free,
    /// Creates a memory pool.
    CreatePool,
    /// Allocates from a pool.
    PoolAllocate,
    /// Returns memory to its pool.
    PoolFree,
    /// Returns unused memory of a pool to the system.
    TrimPool,
    /// Destroys a pool.
    DestroyPool,
    /// Allocates pinned host memory.
    AllocatePinned,
    /// Frees pinned host memory.
    FreePinned,
    /// Queues a copy to the device.
    Upload,
    /// Creates a fence, a point in the order of queued work.
    CreateFence,
    /// Moves a fence after all work queued before.
    RecordFence,
    /// Reads whether the device has passed a fence.
    PollFence,
    /// Destroys a fence.
    DestroyFence,
    /// Copies device memory to the host after the work queued before.
    Download,
    /// Queues a copy from the device to pinned memory.
    QueueDownload,
    /// Loads a kernel before its first launch.
    Load,
    /// Launches a kernel that runs.
    Launch,
    /// Begins a capture.
    BeginCapture,
    /// Launches a kernel within a capture, which records it.
    Record,
    /// Ends a capture.
    EndCapture,
    /// Counts the nodes of a captured graph.
    GraphNodes,
    /// Makes a graph ready for replays.
    Instantiate,
    /// Queues all work of a graph.
    Replay,
    /// Destroys a graph.
    DestroyGraph,
    /// Reads whether all queued work is done.
    Poll,
    /// Joins the devices of a group.
    JoinLink,
    /// Queues copies between the ranks of a group.
    Exchange,
    /// Makes later work wait for the exchanges so far.
    FollowExchanges,
    /// Ends a link between the ranks of a group.
    LeaveLink,
}

impl Call {
    /// All kinds of calls.
    pub const ALL: [Self; 31] = [
        Self::FreeBytes,
        Self::Allocate,
        Self::Free,
        Self::CreatePool,
        Self::PoolAllocate,
        Self::PoolFree,
        Self::TrimPool,
        Self::DestroyPool,
        Self::AllocatePinned,
        Self::FreePinned,
        Self::Upload,
        Self::CreateFence,
        Self::RecordFence,
        Self::PollFence,
        Self::DestroyFence,
        Self::Download,
        Self::QueueDownload,
        Self::Load,
        Self::Launch,
        Self::BeginCapture,
        Self::Record,
        Self::EndCapture,
        Self::GraphNodes,
        Self::Instantiate,
        Self::Replay,
        Self::DestroyGraph,
        Self::Poll,
        Self::JoinLink,
        Self::Exchange,
        Self::FollowExchanges,
        Self::LeaveLink,
    ];
}

/// A fault of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Fault {
    /// The call fails, and the driver stays usable.
    Fail,
    /// The call fails, and the driver's context becomes unusable.
    Spoil,
    /// The call succeeds after this delay.
    Delay(Duration),
    /// The call never returns.
    Never,
    /// The call panics.
    Panics,
    /// [`Call::Poll`] and [`Call::PollFence`] return false from then on, as for a kernel that never
    /// ends.
    Stalls,
    /// The call first allocates memory, like a library that loads something at its first use.
    Allocates,
    /// The call first takes memory from a pool in stream order, which a capture turns into a memory
    /// node.
    AllocatesInStream,
    /// The call succeeds, and one bit of the data that [`Call::Upload`] copied is wrong.
    Flips,
}

/// The faults of chosen calls, for [`DeviceBuilder::layer`](stepscope_core::DeviceBuilder::layer).
/// Clones share their counts.
#[derive(Clone, Debug, Default)]
pub struct FaultPlan {
    shared: Arc<Mutex<Plan>>,
}

#[derive(Debug, Default)]
struct Plan {
    faults: HashMap<(Call, u64), Fault>,
    counts: HashMap<Call, u64>,
    stalled: bool,
    /// True if launches only queue on any device, as on a GPU.
    queued_launches: bool,
    /// True if the current upload flips a bit.
    flips: bool,
    /// The newest pool, for [`Fault::AllocatesInStream`].
    pool: Option<Pool>,
    /// The thread that captures.
    capturing: Option<std::thread::ThreadId>,
}

impl FaultPlan {
    /// Creates a plan without faults.
    pub fn new() -> Self {
        Self::default()
    }

    /// Plants `fault` on the `number`th call of a kind, counted from 1.
    ///
    /// # Panics
    /// Panics for [`Fault::Flips`] on a call other than an upload, and for [`Fault::Stalls`] on a
    /// call other than a poll.
    #[must_use]
    pub fn on(self, call: Call, number: u64, fault: Fault) -> Self {
        let looks = matches!(call, Call::Poll | Call::PollFence);
        assert!(fault != Fault::Stalls || looks, "{call:?} does not poll the device");
        assert!(fault != Fault::Flips || call == Call::Upload, "{call:?} copies nothing to the device");
        self.plan().faults.insert((call, number), fault);
        self
    }

    /// Lets steps continue while the driver takes their launches, as on a GPU, even on the
    /// emulator. A launch's result is then reported later.
    #[must_use]
    pub fn queued_launches(self) -> Self {
        self.plan().queued_launches = true;
        self
    }

    /// Returns the number of calls of a kind so far.
    pub fn count(&self, call: Call) -> u64 {
        self.plan().counts.get(&call).copied().unwrap_or(0)
    }

    fn plan(&self) -> std::sync::MutexGuard<'_, Plan> {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts a call and applies its fault.
    fn meet(&self, call: Call, driver: &dyn Driver) -> Result<()> {
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
            Some(Fault::Allocates) => {
                let address = driver.allocate(256)?;
                // SAFETY: it was just allocated, and nothing has used it.
                unsafe { driver.free(address, 256) }
            }
            Some(Fault::AllocatesInStream) => {
                let pool = self.plan().pool.ok_or_else(|| failed(false))?;
                driver.pool_allocate(pool, 256).map(drop)
            }
            Some(Fault::Flips) => {
                self.plan().flips = true;
                Ok(())
            }
            Some(Fault::Stalls) => {
                self.plan().stalled = true;
                Ok(())
            }
            Some(Fault::Never) => loop {
                std::thread::park();
            },
            Some(Fault::Panics) => panic!("planted on {call:?}"),
        }
    }
}

// SAFETY: see `Faulty`, which keeps the driver to itself.
unsafe impl DriverLayer for FaultPlan {
    fn cover(&self, driver: Arc<dyn Driver>) -> Arc<dyn Driver> {
        Arc::new(Faulty { driver, plan: self.clone() })
    }
}

/// A driver with a fault plan in front of it.
#[derive(Debug)]
struct Faulty {
    driver: Arc<dyn Driver>,
    plan: FaultPlan,
}

impl Faulty {
    fn meet(&self, call: Call) -> Result<()> {
        self.plan.meet(call, &*self.driver)
    }
}

// SAFETY: every call that passes goes to a sound driver unchanged. A call that does not pass has no
// effect.
unsafe impl Driver for Faulty {
    fn description(&self) -> &Description {
        self.driver.description()
    }

    fn free_bytes(&self) -> Result<u64> {
        self.meet(Call::FreeBytes)?;
        self.driver.free_bytes()
    }

    fn unbacked_bytes(&self) -> Option<u64> {
        self.driver.unbacked_bytes()
    }

    fn allocate(&self, bytes: usize) -> Result<u64> {
        self.meet(Call::Allocate)?;
        self.driver.allocate(bytes)
    }

    unsafe fn free(&self, address: u64, bytes: usize) -> Result<()> {
        self.meet(Call::Free)?;
        // SAFETY: the same arguments, so the requirements of `Driver::free` hold.
        unsafe { self.driver.free(address, bytes) }
    }

    fn create_pool(&self) -> Result<Pool> {
        self.meet(Call::CreatePool)?;
        let pool = self.driver.create_pool()?;
        self.plan.plan().pool = Some(pool);
        Ok(pool)
    }

    fn pool_allocate(&self, pool: Pool, bytes: usize) -> Result<u64> {
        self.meet(Call::PoolAllocate)?;
        self.driver.pool_allocate(pool, bytes)
    }

    unsafe fn pool_free(&self, pool: Pool, address: u64, bytes: usize) -> Result<()> {
        self.meet(Call::PoolFree)?;
        // SAFETY: the same arguments, so the requirements of `Driver::pool_free` hold.
        unsafe { self.driver.pool_free(pool, address, bytes) }
    }

    fn trim_pool(&self, pool: Pool, keep_bytes: usize) -> Result<()> {
        self.meet(Call::TrimPool)?;
        self.driver.trim_pool(pool, keep_bytes)
    }

    unsafe fn destroy_pool(&self, pool: Pool) -> Result<()> {
        self.meet(Call::DestroyPool)?;
        // SAFETY: the same arguments, so the requirements of `Driver::destroy_pool` hold.
        unsafe { self.driver.destroy_pool(pool) }
    }

    fn allocate_pinned(&self, bytes: usize) -> Result<u64> {
        self.meet(Call::AllocatePinned)?;
        self.driver.allocate_pinned(bytes)
    }

    unsafe fn free_pinned(&self, address: u64, bytes: usize) -> Result<()> {
        self.meet(Call::FreePinned)?;
        // SAFETY: the same arguments, so the requirements of `Driver::free_pinned` hold.
        unsafe { self.driver.free_pinned(address, bytes) }
    }

    unsafe fn queue_upload(&self, to: u64, from: &[u8], transit: Option<u64>) -> Result<()> {
        self.meet(Call::Upload)?;
        // SAFETY: the same arguments, so the requirements of `Driver::queue_upload` hold.
        unsafe { self.driver.queue_upload(to, from, transit) }?;
        match from.get(from.len() / 2) {
            Some(&byte) if std::mem::take(&mut self.plan.plan().flips) => {
                let flipped = self.driver.allocate_pinned(1)? as *mut u8;
                // SAFETY: this byte is leaked and stays, because no fence here marks the end of its
                // copy. The device has room for it where the byte before was copied to.
                unsafe {
                    flipped.write(byte ^ 1);
                    self.driver.queue_upload(to + from.len() as u64 / 2, std::slice::from_raw_parts(flipped, 1), None)
                }
            }
            _ => Ok(()),
        }
    }

    fn create_fence(&self) -> Result<Fence> {
        self.meet(Call::CreateFence)?;
        self.driver.create_fence()
    }

    fn record_fence(&self, fence: Fence) -> Result<()> {
        self.meet(Call::RecordFence)?;
        self.driver.record_fence(fence)
    }

    fn poll_fence(&self, fence: Fence) -> Result<bool> {
        self.meet(Call::PollFence)?;
        let stalled = self.plan.plan().stalled;
        Ok(!stalled && self.driver.poll_fence(fence)?)
    }

    unsafe fn destroy_fence(&self, fence: Fence) -> Result<()> {
        self.meet(Call::DestroyFence)?;
        // SAFETY: the same arguments, so the requirements of `Driver::destroy_fence` hold.
        unsafe { self.driver.destroy_fence(fence) }
    }

    unsafe fn download(&self, from: u64, to: &mut [u8]) -> Result<()> {
        self.meet(Call::Download)?;
        // SAFETY: the same arguments, so the requirements of `Driver::download` hold.
        unsafe { self.driver.download(from, to) }
    }

    unsafe fn queue_download(&self, from: u64, to: u64, bytes: usize) -> Result<()> {
        self.meet(Call::QueueDownload)?;
        // SAFETY: the same arguments, so the requirements of `Driver::queue_download` hold.
        unsafe { self.driver.queue_download(from, to, bytes) }
    }

    fn load(&self, entry: &Entry) -> Result<()> {
        self.meet(Call::Load)?;
        self.driver.load(entry)
    }

    fn launch_only_queues(&self) -> bool {
        self.plan.plan().queued_launches || self.driver.launch_only_queues()
    }

    unsafe fn launch(&self, entry: &Entry, grid: Grid, words: &Words) -> Result<()> {
        let recorded = self.plan.plan().capturing == Some(std::thread::current().id());
        self.meet(if recorded { Call::Record } else { Call::Launch })?;
        // SAFETY: the same arguments, so the requirements of `Driver::launch` hold.
        unsafe { self.driver.launch(entry, grid, words) }
    }

    fn begin_capture(&self) -> Result<()> {
        self.meet(Call::BeginCapture)?;
        self.driver.begin_capture()?;
        self.plan.plan().capturing = Some(std::thread::current().id());
        Ok(())
    }

    fn end_capture(&self) -> Result<Graph> {
        self.meet(Call::EndCapture)?;
        self.plan.plan().capturing = None;
        self.driver.end_capture()
    }

    fn graph_nodes(&self, graph: Graph) -> Result<Nodes> {
        self.meet(Call::GraphNodes)?;
        self.driver.graph_nodes(graph)
    }

    fn instantiate(&self, graph: Graph) -> Result<()> {
        self.meet(Call::Instantiate)?;
        self.driver.instantiate(graph)
    }

    unsafe fn replay(&self, graph: Graph) -> Result<()> {
        self.meet(Call::Replay)?;
        // SAFETY: the same arguments, so the requirements of `Driver::replay` hold.
        unsafe { self.driver.replay(graph) }
    }

    unsafe fn destroy_graph(&self, graph: Graph) -> Result<()> {
        self.meet(Call::DestroyGraph)?;
        // SAFETY: the same arguments, so the requirements of `Driver::destroy_graph` hold.
        unsafe { self.driver.destroy_graph(graph) }
    }

    fn poll(&self) -> Result<bool> {
        self.meet(Call::Poll)?;
        let stalled = self.plan.plan().stalled;
        Ok(!stalled && self.driver.poll()?)
    }

    fn name_link(&self) -> Result<Vec<u8>> {
        self.driver.name_link()
    }

    fn join_link(
        &self,
        name: &[u8],
        rank: usize,
        ranks: usize,
        wire: Arc<dyn Wire>,
        deadline: Duration,
    ) -> Result<Link> {
        self.meet(Call::JoinLink)?;
        self.driver.join_link(name, rank, ranks, wire, deadline)
    }

    unsafe fn exchange(&self, link: Link, sends: &[Piece], receives: &[Piece]) -> Result<()> {
        self.meet(Call::Exchange)?;
        // SAFETY: the same pieces, so the requirements of `Driver::exchange` hold.
        unsafe { self.driver.exchange(link, sends, receives) }
    }

    fn follow_exchanges(&self) -> Result<()> {
        self.meet(Call::FollowExchanges)?;
        self.driver.follow_exchanges()
    }

    unsafe fn leave_link(&self, link: Link) -> Result<()> {
        self.meet(Call::LeaveLink)?;
        // SAFETY: the same link, so the requirements of `Driver::leave_link` hold.
        unsafe { self.driver.leave_link(link) }
    }
}
