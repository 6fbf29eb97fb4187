//! The one seam to hardware.
//!
//! A [`Driver`] knows bytes, addresses and kernels by name; nothing above it knows which device it is. [`Device`] calls it
//! and adds what no driver gives: deadlines, and the loss of a device that missed one. Invariant: all work of a driver is
//! ordered on one stream, so that a later call sees what an earlier one wrote; above this folder nothing can wait without
//! a deadline.

mod counting;
#[cfg(feature = "cuda")]
mod cuda;
mod device;
mod emulated;
pub mod faults;
mod lane;

pub use device::{Device, DeviceBuilder};

use crate::error::{Error, Result};
use cuda_std::launch::{Entry, Grid, Words};
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
}

/// A memory pool of a driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Pool(pub u64);

/// Memory, pools, copies and launches of one device, in the order of one stream. Any call may block, but for
/// [`Driver::poll`], [`Driver::upload`] and [`Driver::launch`]: [`Device`] runs the others on a worker thread.
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

    /// Copies host bytes to the device, in stream order. The source may be reused on return.
    ///
    /// # Safety
    /// `to` is device memory of at least `from.len()` bytes.
    unsafe fn upload(&self, to: u64, from: &[u8]) -> Result<()>;

    /// Copies device bytes to the host once the work queued before is done.
    ///
    /// # Safety
    /// `from` is device memory of at least `to.len()` bytes.
    unsafe fn download(&self, from: u64, to: &mut [u8]) -> Result<()>;

    /// Queues a kernel.
    ///
    /// # Safety
    /// The kernel's contract accepted these arguments for this grid, and their memory is alive.
    unsafe fn launch(&self, entry: &Entry, grid: Grid, words: &Words) -> Result<()>;

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
