//! A device that works as late as a GPU may, for tests on the emulator.
//!
//! The emulator makes each call at once. A GPU makes a queued one at any later time, until
//! something waits for it. A program that changes what a queued copy still reads therefore computes
//! the right result on the emulator, and a wrong one on a GPU. With this layer it is wrong on both.
//!
//! ```
//! use stepscope::check::late::LateWork;
//! use stepscope::{Device, DeviceKind};
//!
//! let device = Device::builder(DeviceKind::Emulated).layer(LateWork).open()?;
//! # Ok::<(), stepscope::Error>(())
//! ```
//! Invariant: the work runs in the order of the calls. It has run before any call returns that
//! waits for it, frees its memory, or belongs to a capture or a group. Its errors are those of the
//! call that waits.

use cuda_std::emulator::Mode;
use cuda_std::launch::{Entry, Grid, Words};
use std::collections::VecDeque;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::ThreadId;
use std::time::Duration;
use stepscope_core::internals::{Driver, DriverLayer, Fence, Graph, Link, Nodes, Piece, Pool, Wire};
use stepscope_core::{Description, Result};

/// Makes queued uploads, launches, replays, downloads and frees only when something waits for them,
/// for [`DeviceBuilder::layer`](stepscope_core::DeviceBuilder::layer).
#[derive(Clone, Copy, Debug)]
pub struct LateWork;

// SAFETY: see `Late`, which keeps the driver to itself.
unsafe impl DriverLayer for LateWork {
    fn cover(&self, driver: Arc<dyn Driver>) -> Arc<dyn Driver> {
        let described = driver.description();
        let description = Description { name: format!("{}, late", described.name), ..described.clone() };
        Arc::new(Late { description, driver, state: Mutex::default() })
    }
}

/// A driver and the work that it has not received yet.
struct Late {
    description: Description,
    driver: Arc<dyn Driver>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    work: VecDeque<Work>,
    /// The thread that captures.
    capturing: Option<ThreadId>,
}

type Call = Box<dyn FnOnce(&dyn Driver) -> Result<()> + Send>;

/// A queued call.
struct Work {
    /// The fence that the call records.
    fence: Option<Fence>,
    call: Call,
}

impl fmt::Debug for Late {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Late work of {:?}", self.driver)
    }
}

impl Late {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Queues a call. A thread that captures makes it at once.
    fn queue(&self, fence: Option<Fence>, call: impl FnOnce(&dyn Driver) -> Result<()> + Send + 'static) -> Result<()> {
        let mut state = self.state();
        if state.capturing == Some(std::thread::current().id()) {
            drop(state);
            return call(&*self.driver);
        }
        let mode = Mode::of_thread();
        let call = move |driver: &dyn Driver| match mode {
            None => call(driver),
            Some(mode) => mode.scope(|| call(driver)),
        };
        state.work.push_back(Work { fence, call: Box::new(call) });
        Ok(())
    }

    /// Makes the first `count` queued calls.
    fn make(&self, count: usize) -> Result<()> {
        (0..count).try_for_each(|_| {
            let next = self.state().work.pop_front();
            next.map_or(Ok(()), |work| (work.call)(&*self.driver))
        })
    }

    /// Makes all queued calls.
    fn catch_up(&self) -> Result<()> {
        let all = self.state().work.len();
        self.make(all)
    }

    /// Makes the queued calls up to the last record of a fence.
    fn catch_up_to(&self, fence: Fence) -> Result<()> {
        let last = self.state().work.iter().rposition(|work| work.fence == Some(fence));
        self.make(last.map_or(0, |last| last + 1))
    }
}

// SAFETY: every call goes to a sound driver unchanged, in the order of the calls. A queued call
// keeps its requirements until it is made. The caller vouched for its memory until the memory is
// freed, and a call that frees memory is made after it. For pinned memory the caller waits for a
// fence or for all work, and both are reported only after the driver has received the calls before
// them.
unsafe impl Driver for Late {
    fn description(&self) -> &Description {
        &self.description
    }

    fn free_bytes(&self) -> Result<u64> {
        self.driver.free_bytes()
    }

    fn unbacked_bytes(&self) -> Option<u64> {
        self.driver.unbacked_bytes()
    }

    fn allocate(&self, bytes: usize) -> Result<u64> {
        self.driver.allocate(bytes)
    }

    unsafe fn free(&self, address: u64, bytes: usize) -> Result<()> {
        self.catch_up()?;
        // SAFETY: the same arguments, so the requirements of `Driver::free` hold.
        unsafe { self.driver.free(address, bytes) }
    }

    fn create_pool(&self) -> Result<Pool> {
        self.driver.create_pool()
    }

    fn pool_allocate(&self, pool: Pool, bytes: usize) -> Result<u64> {
        self.driver.pool_allocate(pool, bytes)
    }

    unsafe fn pool_free(&self, pool: Pool, address: u64, bytes: usize) -> Result<()> {
        // SAFETY: the same arguments, in the same order of calls (`Driver::pool_free`).
        self.queue(None, move |driver| unsafe { driver.pool_free(pool, address, bytes) })
    }

    fn trim_pool(&self, pool: Pool, keep_bytes: usize) -> Result<()> {
        self.catch_up()?;
        self.driver.trim_pool(pool, keep_bytes)
    }

    unsafe fn destroy_pool(&self, pool: Pool) -> Result<()> {
        self.catch_up()?;
        // SAFETY: the same arguments, so the requirements of `Driver::destroy_pool` hold.
        unsafe { self.driver.destroy_pool(pool) }
    }

    fn allocate_pinned(&self, bytes: usize) -> Result<u64> {
        self.driver.allocate_pinned(bytes)
    }

    unsafe fn free_pinned(&self, address: u64, bytes: usize) -> Result<()> {
        // SAFETY: the same arguments, so the requirements of `Driver::free_pinned` hold. No copy
        // from or to this memory is queued here either.
        unsafe { self.driver.free_pinned(address, bytes) }
    }

    unsafe fn queue_upload(&self, to: u64, from: &[u8], transit: Option<u64>) -> Result<()> {
        let (start, bytes) = (from.as_ptr() as u64, from.len());
        self.queue(None, move |driver| {
            // SAFETY: the source is neither written nor freed before a later fence is passed
            // (`Driver::queue_upload`). That is reported after this call.
            unsafe { driver.queue_upload(to, std::slice::from_raw_parts(start as *const u8, bytes), transit) }
        })
    }

    fn create_fence(&self) -> Result<Fence> {
        self.driver.create_fence()
    }

    fn record_fence(&self, fence: Fence) -> Result<()> {
        self.queue(Some(fence), move |driver| driver.record_fence(fence))
    }

    fn poll_fence(&self, fence: Fence) -> Result<bool> {
        self.catch_up_to(fence)?;
        self.driver.poll_fence(fence)
    }

    unsafe fn destroy_fence(&self, fence: Fence) -> Result<()> {
        self.catch_up_to(fence)?;
        // SAFETY: the same arguments, so the requirements of `Driver::destroy_fence` hold.
        unsafe { self.driver.destroy_fence(fence) }
    }

    unsafe fn download(&self, from: u64, to: &mut [u8]) -> Result<()> {
        self.catch_up()?;
        // SAFETY: the same arguments, so the requirements of `Driver::download` hold.
        unsafe { self.driver.download(from, to) }
    }

    unsafe fn queue_download(&self, from: u64, to: u64, bytes: usize) -> Result<()> {
        // SAFETY: the same arguments, in the same order of calls. `to` is not used before a later
        // fence is passed (`Driver::queue_download`), which is reported after this call.
        self.queue(None, move |driver| unsafe { driver.queue_download(from, to, bytes) })
    }

    fn load(&self, entry: &Entry) -> Result<()> {
        self.driver.load(entry)
    }

    fn launch_only_queues(&self) -> bool {
        true
    }

    unsafe fn launch(&self, entry: &Entry, grid: Grid, words: &Words) -> Result<()> {
        let (entry, words) = (*entry, words.clone());
        // SAFETY: the same arguments. Their memory is freed by a later call (`Driver::launch`).
        self.queue(None, move |driver| unsafe { driver.launch(&entry, grid, &words) })
    }

    fn begin_capture(&self) -> Result<()> {
        self.catch_up()?;
        self.driver.begin_capture()?;
        self.state().capturing = Some(std::thread::current().id());
        Ok(())
    }

    fn end_capture(&self) -> Result<Graph> {
        self.state().capturing = None;
        self.driver.end_capture()
    }

    fn graph_nodes(&self, graph: Graph) -> Result<Nodes> {
        self.driver.graph_nodes(graph)
    }

    fn instantiate(&self, graph: Graph) -> Result<()> {
        self.driver.instantiate(graph)
    }

    unsafe fn replay(&self, graph: Graph) -> Result<()> {
        // SAFETY: the same graph, which a later call destroys. The memory of its launches lives as
        // long as the graph (`Driver::replay`).
        self.queue(None, move |driver| unsafe { driver.replay(graph) })
    }

    unsafe fn destroy_graph(&self, graph: Graph) -> Result<()> {
        self.catch_up()?;
        // SAFETY: the same arguments, so the requirements of `Driver::destroy_graph` hold.
        unsafe { self.driver.destroy_graph(graph) }
    }

    fn poll(&self) -> Result<bool> {
        self.catch_up()?;
        self.driver.poll()
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
        self.driver.join_link(name, rank, ranks, wire, deadline)
    }

    unsafe fn exchange(&self, link: Link, sends: &[Piece], receives: &[Piece]) -> Result<()> {
        // Other ranks wait for it.
        self.catch_up()?;
        // SAFETY: the same pieces, so the requirements of `Driver::exchange` hold.
        unsafe { self.driver.exchange(link, sends, receives) }
    }

    fn follow_exchanges(&self) -> Result<()> {
        self.driver.follow_exchanges()
    }

    unsafe fn leave_link(&self, link: Link) -> Result<()> {
        // SAFETY: the same link, so the requirements of `Driver::leave_link` hold.
        unsafe { self.driver.leave_link(link) }
    }
}
