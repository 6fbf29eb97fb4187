//! What hardware must be able to do: the calls of a driver, and the names of what they make.
//!
//! Invariant: bytes, addresses and kernels by name are all that goes through here; nobody who calls knows which device it is.

use super::description::Description;
use crate::error::Result;
use cuda_std::launch::{Entry, Grid, Words};
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

/// A memory pool of a driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Pool(pub u64);

/// A captured graph of a driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Graph(pub u64);

/// A place in the stream's order that can be asked whether the device has passed it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Fence(pub u64);

/// What connects a device with those of the other ranks of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Link(pub u64);

/// Device memory that goes to a rank, or is filled by one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// The other rank, or this one.
    pub rank: usize,
    /// Where it lies here.
    pub address: u64,
    /// How long it is.
    pub bytes: usize,
}

/// What carries bytes between ranks whose devices have no way of their own: the emulator's. First in, first out between two ranks.
pub trait Wire: Send + Sync + fmt::Debug {
    /// Sends bytes to another rank.
    ///
    /// # Errors
    /// When it does not take them within the group's deadline.
    fn send(&self, to: usize, bytes: &[u8]) -> Result<()>;

    /// Fills `bytes` with what another rank has sent.
    ///
    /// # Errors
    /// When as many do not come within the group's deadline.
    fn receive(&self, from: usize, bytes: &mut [u8]) -> Result<()>;
}

/// What a captured graph is made of.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Nodes {
    /// Launches.
    pub kernels: usize,
    /// Allocations and frees.
    pub memory: usize,
    /// Anything else.
    pub other: usize,
}

/// Memory, pools, copies, launches and graphs of one device, in the order of one stream but for exchanges. [`Device`](super::Device) makes every call on one worker
/// thread, one after the other, since any of them may block.
///
/// Between [`Driver::begin_capture`] and [`Driver::end_capture`] a launch of the same thread is recorded and does not run; any
/// other call of that thread may be refused and spoil the capture.
///
/// # Safety
/// An implementation must keep memory valid from its allocation to its release, on addresses that are multiples of 256,
/// and must run the calls' effects in the order of the calls, but for what [`Driver::exchange`] says.
pub unsafe trait Driver: Send + Sync + fmt::Debug {
    /// What the device is.
    fn description(&self) -> &Description;

    /// Bytes that the driver calls free now.
    fn free_bytes(&self) -> Result<u64>;

    /// Bytes of allocations that the system has not backed with memory yet, as far as that can be known. A GPU has all of its own.
    fn unbacked_bytes(&self) -> Option<u64> {
        Some(0)
    }

    /// Takes `bytes` (not zero) of device memory.
    fn allocate(&self, bytes: usize) -> Result<u64>;

    /// Gives memory back, after all work queued before.
    ///
    /// # Safety
    /// `address` came from [`Driver::allocate`] with the same `bytes` and is not used afterwards.
    unsafe fn free(&self, address: u64, bytes: usize) -> Result<()>;

    /// A pool of its own, which keeps what is given back to it until it is trimmed or destroyed.
    fn create_pool(&self) -> Result<Pool>;

    /// Takes `bytes` (not zero) from a pool, in stream order.
    fn pool_allocate(&self, pool: Pool, bytes: usize) -> Result<u64>;

    /// Gives memory back to its pool, in stream order.
    ///
    /// # Safety
    /// `address` came from this pool with the same `bytes`, and no work queued later uses it.
    unsafe fn pool_free(&self, pool: Pool, address: u64, bytes: usize) -> Result<()>;

    /// Gives the pool's unused memory beyond `keep_bytes` back to the system. Waits for the work queued before.
    fn trim_pool(&self, pool: Pool, keep_bytes: usize) -> Result<()>;

    /// Ends a pool whose memory has all been given back.
    ///
    /// # Safety
    /// No memory of the pool is used afterwards.
    unsafe fn destroy_pool(&self, pool: Pool) -> Result<()>;

    /// Takes `bytes` (not zero) of page-locked host memory; returns its address on the host.
    fn allocate_pinned(&self, bytes: usize) -> Result<u64>;

    /// Gives page-locked memory back.
    ///
    /// # Safety
    /// `address` came from [`Driver::allocate_pinned`] with the same `bytes`, no copy from it is queued, and it is not used
    /// afterwards.
    unsafe fn free_pinned(&self, address: u64, bytes: usize) -> Result<()>;

    /// Queues a copy of page-locked host bytes to the device. With a `transit` the bytes may come to it beside the work queued
    /// before; only the copy from there to `to` then has its place in the order of the calls.
    ///
    /// # Safety
    /// `to` is device memory of at least `from.len()` bytes, and so is `transit`, which no other call names; `from` lies in memory of [`Driver::allocate_pinned`] and is
    /// neither written nor freed until a fence that is recorded behind this call has been passed.
    unsafe fn queue_upload(&self, to: u64, from: &[u8], transit: Option<u64>) -> Result<()>;

    /// A fence that has been passed.
    fn create_fence(&self) -> Result<Fence>;

    /// Moves a fence behind all work queued before.
    fn record_fence(&self, fence: Fence) -> Result<()>;

    /// Whether the device has passed the fence. Returns at once.
    fn poll_fence(&self, fence: Fence) -> Result<bool>;

    /// Ends a fence, passed or not.
    ///
    /// # Safety
    /// The fence is not used afterwards.
    unsafe fn destroy_fence(&self, fence: Fence) -> Result<()>;

    /// Copies device bytes to the host once the work queued before is done.
    ///
    /// # Safety
    /// `from` is device memory of at least `to.len()` bytes.
    unsafe fn download(&self, from: u64, to: &mut [u8]) -> Result<()>;

    /// Queues a copy of device bytes to page-locked host memory.
    ///
    /// # Safety
    /// `from` is device memory of at least `bytes` bytes, and so is `to` of [`Driver::allocate_pinned`]'s, which is neither read,
    /// written nor freed until a fence that is recorded behind this call has been passed.
    unsafe fn queue_download(&self, from: u64, to: u64, bytes: usize) -> Result<()>;

    /// Loads a kernel, so that its first launch does no more than any other.
    fn load(&self, entry: &Entry) -> Result<()>;

    /// Whether a launch does no more than queue: then only its failure is news.
    fn launch_only_queues(&self) -> bool {
        false
    }

    /// Queues a kernel, or records it.
    ///
    /// # Safety
    /// The kernel's contract accepted these arguments for this grid, and their memory is alive; if it is recorded, for as
    /// long as the graph is.
    unsafe fn launch(&self, entry: &Entry, grid: Grid, words: &Words) -> Result<()>;

    /// Starts a capture in a mode that refuses whatever could be unsafe on this thread, which must also end it.
    fn begin_capture(&self) -> Result<()>;

    /// Ends the capture, whatever became of it: after an error too nothing is being captured any more.
    fn end_capture(&self) -> Result<Graph>;

    /// What a graph is made of.
    fn graph_nodes(&self, graph: Graph) -> Result<Nodes>;

    /// Makes a graph ready for [`Driver::replay`].
    fn instantiate(&self, graph: Graph) -> Result<()>;

    /// Queues all work of a graph.
    ///
    /// # Safety
    /// The graph was instantiated, and all memory that its launches name is alive.
    unsafe fn replay(&self, graph: Graph) -> Result<()>;

    /// Ends a graph. Replays that are queued still run.
    ///
    /// # Safety
    /// The graph is not used afterwards.
    unsafe fn destroy_graph(&self, graph: Graph) -> Result<()>;

    /// Whether all work queued before is done, exchanges too. Returns at once.
    fn poll(&self) -> Result<bool>;

    /// Makes the name of a new link, which one rank gives to all others: NCCL's id.
    fn name_link(&self) -> Result<Vec<u8>>;

    /// Joins the link of this name as `rank` of `ranks`. Waits for the others, not longer than the deadline.
    fn join_link(
        &self,
        name: &[u8],
        rank: usize,
        ranks: usize,
        wire: Arc<dyn Wire>,
        deadline: Duration,
    ) -> Result<Link>;

    /// Queues copies between the ranks of a link, behind all work queued before. What one rank sends another receives, in the order of their
    /// pieces; each rank calls it. Work queued next may run beside the copies, until [`Driver::follow_exchanges`].
    ///
    /// # Safety
    /// The pieces are memory of this device, alive, and no received piece overlaps another piece. What is queued before the next
    /// [`Driver::follow_exchanges`] writes no piece, and reads none that is received.
    unsafe fn exchange(&self, link: Link, sends: &[Piece], receives: &[Piece]) -> Result<()>;

    /// What is queued next runs when all exchanges so far have sent and received what is this rank's.
    fn follow_exchanges(&self) -> Result<()>;

    /// Ends a link, whatever has become of the other ranks; what still waits for them ends, too. Any thread may call it at any time, and again:
    /// an exchange behind it is refused.
    ///
    /// # Safety
    /// Nobody relies on what exchanges that are queued would bring.
    unsafe fn leave_link(&self, link: Link) -> Result<()>;
}
