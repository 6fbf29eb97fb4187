//! The one seam to hardware.
//!
//! A [`Driver`] knows bytes, addresses and kernels by name; nothing above it knows which device it is. [`Device`] calls it
//! and adds what no driver gives: deadlines, and the loss of a device that missed one. Invariant: all work of a driver is
//! ordered on one stream, so that a later call sees what an earlier one wrote; above this folder nothing can wait without
//! a deadline.

mod builder;
#[cfg(feature = "cuda")]
mod cuda;
mod device;
mod emulated;
pub mod faults;
mod graphs;
mod landing;
mod lane;
mod lends;
pub(crate) mod patience;
mod pins;
mod ptx;
mod rehearsal;
mod retired;
mod staging;

use crate::error::{Error, Result};
pub use builder::{DeviceBuilder, SelfTest};
use cuda_std::launch::{Entry, Grid, Words};
pub use device::Device;
pub(crate) use graphs::SealedGraph;
pub(crate) use landing::Landing;
pub(crate) use lends::Lending;
pub(crate) use pins::Pins;
pub use ptx::{Kernels, PtxBuild, PtxCompiler, ptx_builds};
pub(crate) use rehearsal::Launch;
pub(crate) use retired::Retired;
pub(crate) use staging::Fill;
use std::fmt;
use std::str::FromStr;
use std::time::Duration;

/// How long a call of the driver, or a wait for the device, may take unless the caller says otherwise. A step of training
/// lasts milliseconds.
pub const DEFAULT_DEADLINE: Duration = Duration::from_secs(60);

/// What a device is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Description {
    /// `Emulated` or `Cuda`, never `Auto`.
    pub kind: DeviceKind,
    /// CUDA's number of the device within this process; 0 on the emulator.
    pub ordinal: i32,
    /// The device's own name.
    pub name: String,
    /// Bytes of memory, as the driver tells; none where the host's allocator is the only judge.
    pub memory_bytes: Option<u64>,
    /// Whether the memory is the host's too, as on GB10.
    pub integrated: bool,
    /// Blocks that run at the same time at least: multiprocessors of a GPU, threads of a CPU.
    pub processors: u32,
    /// Compute capability times ten (121 for GB10); none on the emulator.
    pub capability: Option<u32>,
    /// The driver, which compiles PTX for the device: which CUDA it has, and its own version where the system tells; none on the
    /// emulator.
    pub driver: Option<String>,
    /// The PTX that the library's own kernels were compiled from; none on the emulator.
    pub ptx: Option<PtxBuild>,
}

/// A memory pool of a driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Pool(pub u64);

/// A captured graph of a driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Graph(pub u64);

/// A place in the stream's order that can be asked whether the device has passed it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Fence(pub u64);

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

/// Memory, pools, copies, launches and graphs of one device, in the order of one stream. [`Device`] makes every call on one worker
/// thread, one after the other, since any of them may block.
///
/// Between [`Driver::begin_capture`] and [`Driver::end_capture`] a launch of the same thread is recorded and does not run; any
/// other call of that thread may be refused and spoil the capture.
///
/// # Safety
/// An implementation must keep memory valid from its allocation to its release, on addresses that are multiples of 256,
/// and must run the calls' effects in the order of the calls.
pub unsafe trait Driver: Send + Sync + fmt::Debug {
    /// What the device is.
    fn description(&self) -> &Description;

    /// Bytes that the driver calls free now.
    fn free_bytes(&self) -> Result<u64>;

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
    unsafe fn upload(&self, to: u64, from: &[u8], transit: Option<u64>) -> Result<()>;

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

    /// Whether all work queued before is done. Returns at once.
    fn poll(&self) -> Result<bool>;
}

/// Which device to open.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DeviceKind {
    /// CUDA where the build has it and a GPU is there, else the emulator.
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
