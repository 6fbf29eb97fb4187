//! The calls that every driver implements, the objects that they create, and the description of the
//! driver's device.
//!
//! Invariant: this interface passes only bytes, addresses and kernels by name. Callers cannot
//! distinguish devices.

use crate::error::{Error, Result};
use crate::ptx::PtxBuild;
use cuda_std::launch::{Entry, Grid, Words};
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

/// A memory pool of a driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Pool(pub u64);

/// A captured graph of a driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Graph(pub u64);

/// A point in the stream's order. A query returns whether the device has passed it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Fence(pub u64);

/// A connection between a device and those of the other ranks of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Link(pub u64);

/// A range of device memory that is sent to a rank or received from one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// The other rank, or this one.
    pub rank: usize,
    /// The address on this rank.
    pub address: u64,
    /// The length in bytes.
    pub bytes: usize,
}

/// A channel that carries bytes between ranks whose devices have no connection of their own, such
/// as emulators. Delivery between two ranks is first in, first out.
pub trait Wire: Send + Sync + fmt::Debug {
    /// Sends bytes to another rank.
    ///
    /// # Errors
    /// Fails if the wire does not accept them within the group's deadline.
    fn send(&self, to: usize, bytes: &[u8]) -> Result<()>;

    /// Fills `bytes` with bytes that another rank has sent.
    ///
    /// # Errors
    /// Fails if too few bytes arrive within the group's deadline.
    fn receive(&self, from: usize, bytes: &mut [u8]) -> Result<()>;
}

/// The node counts of a captured graph.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Nodes {
    /// The number of launches.
    pub kernels: usize,
    /// The number of allocations and frees.
    pub memory: usize,
    /// The number of other nodes.
    pub other: usize,
}

/// The memory, pools, copies, launches and graphs of one device. All work except exchanges is
/// ordered on one stream. [`Device`](super::Device) makes every call on one worker thread, one
/// after another, because any of them may block.
///
/// Between [`Driver::begin_capture`] and [`Driver::end_capture`], a launch on the same thread is
/// recorded and does not run. Any other call on that thread may be refused and invalidate the
/// capture.
///
/// # Safety
/// An implementation must keep memory valid from its allocation to its release, at addresses that
/// are multiples of 256. It must run the calls' effects in the order of the calls, except as
/// [`Driver::exchange`] states.
pub unsafe trait Driver: Send + Sync + fmt::Debug {
    /// Returns the description of the device.
    fn description(&self) -> &Description;

    /// Returns the bytes that are free now, according to the driver.
    fn free_bytes(&self) -> Result<u64>;

    /// Returns the bytes of allocations that the system has not backed with memory yet, or none if
    /// that is unknown. A GPU backs all of its memory.
    fn unbacked_bytes(&self) -> Option<u64> {
        Some(0)
    }

    /// Allocates `bytes` (not zero) of device memory.
    fn allocate(&self, bytes: usize) -> Result<u64>;

    /// Frees memory after all work queued before.
    ///
    /// # Safety
    /// `address` came from [`Driver::allocate`] with the same `bytes` and is not used afterwards.
    unsafe fn free(&self, address: u64, bytes: usize) -> Result<()>;

    /// Creates a separate pool, which keeps freed memory until it is trimmed or destroyed.
    fn create_pool(&self) -> Result<Pool>;

    /// Allocates `bytes` (not zero) from a pool, in stream order.
    fn pool_allocate(&self, pool: Pool, bytes: usize) -> Result<u64>;

    /// Returns memory to its pool, in stream order.
    ///
    /// # Safety
    /// `address` came from this pool with the same `bytes`, and no work queued later uses it.
    unsafe fn pool_free(&self, pool: Pool, address: u64, bytes: usize) -> Result<()>;

    /// Returns the pool's unused memory beyond `keep_bytes` to the system. Waits for the work
    /// queued before.
    fn trim_pool(&self, pool: Pool, keep_bytes: usize) -> Result<()>;

    /// Destroys a pool whose memory has all been freed.
    ///
    /// # Safety
    /// No memory of the pool is used afterwards.
    unsafe fn destroy_pool(&self, pool: Pool) -> Result<()>;

    /// Allocates `bytes` (not zero) of pinned host memory, and returns its address on the host.
    fn allocate_pinned(&self, bytes: usize) -> Result<u64>;

    /// Frees pinned memory.
    ///
    /// # Safety
    /// `address` came from [`Driver::allocate_pinned`] with the same `bytes`, no copy from it is
    /// queued, and it is not used afterwards.
    unsafe fn free_pinned(&self, address: u64, bytes: usize) -> Result<()>;

    /// Queues a copy of pinned host bytes to the device. If there is a `bounce`, the bytes may be
    /// copied there concurrently with the work queued before. Only the copy from there to `to` then
    /// keeps its place in the order of the calls.
    ///
    /// # Safety
    /// `to` is device memory of at least `from.len()` bytes. So is `bounce`, which no other call
    /// uses. `from` lies in memory of [`Driver::allocate_pinned`], and is neither written nor freed
    /// before a fence recorded after this call has been passed.
    unsafe fn queue_upload(&self, to: u64, from: &[u8], bounce: Option<u64>) -> Result<()>;

    /// Creates a fence in the passed state.
    fn create_fence(&self) -> Result<Fence>;

    /// Moves a fence after all work queued before.
    fn record_fence(&self, fence: Fence) -> Result<()>;

    /// Returns true if the device has passed the fence, without waiting.
    fn poll_fence(&self, fence: Fence) -> Result<bool>;

    /// Destroys a fence, passed or not.
    ///
    /// # Safety
    /// The fence is not used afterwards.
    unsafe fn destroy_fence(&self, fence: Fence) -> Result<()>;

    /// Copies device bytes to the host after the work queued before is done.
    ///
    /// # Safety
    /// `from` is device memory of at least `to.len()` bytes.
    unsafe fn download(&self, from: u64, to: &mut [u8]) -> Result<()>;

    /// Queues a copy of device bytes to pinned host memory.
    ///
    /// # Safety
    /// `from` is device memory of at least `bytes` bytes. `to` is memory of
    /// [`Driver::allocate_pinned`] of at least `bytes` bytes. It is neither read, written nor freed
    /// before a fence recorded after this call has been passed.
    unsafe fn queue_download(&self, from: u64, to: u64, bytes: usize) -> Result<()>;

    /// Loads a kernel, so that its first launch takes no longer than later ones.
    fn load(&self, entry: &Entry) -> Result<()>;

    /// Returns true if a launch only queues. Callers then need not wait for it, except to learn of
    /// a failure.
    fn launch_only_queues(&self) -> bool {
        false
    }

    /// Queues a kernel, or records it during a capture.
    ///
    /// # Safety
    /// The kernel's contract accepted these arguments for this grid, and their memory is alive. If
    /// the launch is recorded, the memory lives as long as the graph.
    unsafe fn launch(&self, entry: &Entry, grid: Grid, words: &Words) -> Result<()>;

    /// Starts a capture in a mode that refuses potentially unsafe calls on this thread, which must
    /// also end it.
    fn begin_capture(&self) -> Result<()>;

    /// Ends the capture, successful or not. No capture is in progress afterwards, even after an
    /// error.
    fn end_capture(&self) -> Result<Graph>;

    /// Returns the node counts of a graph.
    fn graph_nodes(&self, graph: Graph) -> Result<Nodes>;

    /// Makes a graph ready for [`Driver::replay`].
    fn instantiate(&self, graph: Graph) -> Result<()>;

    /// Queues all work of a graph.
    ///
    /// # Safety
    /// The graph was instantiated, and all memory that its launches name is alive.
    unsafe fn replay(&self, graph: Graph) -> Result<()>;

    /// Destroys a graph. Queued replays still run.
    ///
    /// # Safety
    /// The graph is not used afterwards.
    unsafe fn destroy_graph(&self, graph: Graph) -> Result<()>;

    /// Returns true if all work queued before is done, including exchanges, without waiting.
    fn poll(&self) -> Result<bool>;

    /// Creates the name of a new link, which one rank sends to all others. For NCCL this is its
    /// unique id.
    fn name_link(&self) -> Result<Vec<u8>>;

    /// Joins the link of this name as `rank` of `ranks`. Waits for the others until the deadline.
    fn join_link(
        &self,
        name: &[u8],
        rank: usize,
        ranks: usize,
        wire: Arc<dyn Wire>,
        deadline: Duration,
    ) -> Result<Link>;

    /// Queues copies between the ranks of a link, after all work queued before. Every rank must
    /// call it. Each sent piece is received by its target rank, in the order of the pieces. Work
    /// queued next may run concurrently with the copies, until [`Driver::follow_exchanges`].
    ///
    /// # Safety
    /// The pieces are live memory of this device, and no received piece overlaps another piece.
    /// Work queued before the next [`Driver::follow_exchanges`] writes no piece, and reads no
    /// received piece.
    unsafe fn exchange(&self, link: Link, sends: &[Piece], receives: &[Piece]) -> Result<()>;

    /// Makes work that is queued next wait until all exchanges so far have sent and received this
    /// rank's pieces.
    fn follow_exchanges(&self) -> Result<()>;

    /// Ends a link, whatever state the other ranks are in, including everything on it that still
    /// waits for them. Any thread may call it at any time, and repeatedly. Later exchanges on it
    /// are refused.
    ///
    /// # Safety
    /// No code relies on the data of queued exchanges.
    unsafe fn leave_link(&self, link: Link) -> Result<()>;
}

/// A layer over a driver, such as fault injection.
///
/// # Safety
/// The returned driver meets the requirements of [`Driver`]. The given one receives only calls that
/// [`Device`](super::Device) makes on the returned one, or that meet the same requirements.
pub unsafe trait DriverLayer: Send + Sync + fmt::Debug {
    /// Returns a driver that passes its calls to `driver`.
    fn cover(&self, driver: Arc<dyn Driver>) -> Arc<dyn Driver>;
}

/// The properties of a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Description {
    /// `Emulated` or `Cuda`, never `Auto`.
    pub kind: DeviceKind,
    /// CUDA's number of the device within this process, or 0 on the emulator.
    pub ordinal: i32,
    /// The device's own name.
    pub name: String,
    /// The bytes of memory that the driver reports. None if only the host's allocator decides.
    pub memory_bytes: Option<u64>,
    /// True if the device shares the host's memory, as on GB10.
    pub integrated: bool,
    /// The least number of blocks that run at the same time: multiprocessors of a GPU, threads of a
    /// CPU.
    pub processors: u32,
    /// The compute capability times ten (121 for GB10), or none on the emulator.
    pub capability: Option<u32>,
    /// True if the device runs the kernels of warpgroups: matrix multiplies and attention by
    /// [`MatrixInstruction::Wgmma`](super::MatrixInstruction::Wgmma).
    pub has_wgmma: bool,
    /// The driver, which compiles PTX for the device: its CUDA version, and its own version if the
    /// system reports it. None on the emulator.
    pub driver: Option<String>,
    /// The PTX that the library's own kernels were compiled from, or none on the emulator.
    pub ptx: Option<PtxBuild>,
    /// The PTX of the kernels of warpgroups, if a GPU runs them.
    pub wgmma_ptx: Option<PtxBuild>,
}

/// The kind of device to open.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DeviceKind {
    /// CUDA if the build supports it and a GPU is present, else the emulator.
    Auto,
    /// The CPU, running the same kernels.
    Emulated,
    /// The first NVIDIA GPU.
    Cuda,
}

impl fmt::Display for DeviceKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Auto => "auto",
            Self::Emulated => "emulated",
            Self::Cuda => "cuda",
        })
    }
}

impl FromStr for DeviceKind {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        match text {
            "auto" => Ok(Self::Auto),
            "emulated" => Ok(Self::Emulated),
            "cuda" => Ok(Self::Cuda),
            other => Err(Error::misuse("device", "auto, emulated or cuda", format!("`{other}`"))),
        }
    }
}
