//! The one seam to hardware.
//!
//! A [`Driver`] knows bytes, addresses and kernels by name; nothing above it knows which device it is. Invariant: all
//! work of a driver is ordered on one stream, so that a later call sees what an earlier one wrote; only
//! [`Driver::download`] and [`Driver::synchronize`] wait, and neither without a deadline.

#[cfg(feature = "cuda")]
mod cuda;
mod emulated;

use crate::error::{Error, Result};
use cuda_std::launch::{Entry, Grid, Words};
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

/// How long a wait for the device may take unless the caller says otherwise. A step of training lasts milliseconds.
pub const DEFAULT_DEADLINE: Duration = Duration::from_secs(60);

/// What a device is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Description {
    /// `Emulated` or `Cuda`, never `Auto`.
    pub kind: DeviceKind,
    /// The device's own name.
    pub name: String,
    /// Bytes of memory, as the driver tells.
    pub memory_bytes: u64,
    /// Blocks that run at the same time at least: multiprocessors of a GPU, threads of a CPU.
    pub processors: u32,
    /// Compute capability times ten (121 for GB10); none on the emulator.
    pub capability: Option<u32>,
}

/// Memory, copies and launches of one device, in the order of one stream.
///
/// # Safety
/// An implementation must keep memory valid from [`Driver::allocate`] to [`Driver::free`], on addresses that are
/// multiples of 256, and must run the calls' effects in the order of the calls.
pub unsafe trait Driver: Send + Sync + fmt::Debug {
    /// What the device is.
    fn description(&self) -> &Description;

    /// Takes `bytes` (not zero) of device memory.
    ///
    /// # Errors
    /// [`Error::DeviceMemory`] with what was free.
    fn allocate(&self, bytes: usize) -> Result<u64>;

    /// Gives memory back, after all work queued before.
    ///
    /// # Safety
    /// `address` came from [`Driver::allocate`] with the same `bytes` and is not used afterwards.
    unsafe fn free(&self, address: u64, bytes: usize);

    /// Copies host bytes to the device. The source may be reused on return.
    ///
    /// # Safety
    /// `to` is device memory of at least `from.len()` bytes.
    unsafe fn upload(&self, to: u64, from: &[u8]) -> Result<()>;

    /// Waits for all work queued before, then copies device bytes to the host.
    ///
    /// # Safety
    /// `from` is device memory of at least `to.len()` bytes.
    unsafe fn download(&self, from: u64, to: &mut [u8], deadline: Duration) -> Result<()>;

    /// Queues a kernel.
    ///
    /// # Safety
    /// The kernel's contract accepted these arguments for this grid, and their memory is alive.
    unsafe fn launch(&self, entry: &Entry, grid: Grid, words: &Words) -> Result<()>;

    /// Waits for all work queued before.
    ///
    /// # Errors
    /// [`Error::Timeout`] at the deadline; the device is lost then.
    fn synchronize(&self, deadline: Duration) -> Result<()>;
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

/// An open device. Clones share it.
#[derive(Clone, Debug)]
pub struct Device {
    driver: Arc<dyn Driver>,
}

impl Device {
    /// Opens a device.
    ///
    /// # Errors
    /// [`Error::NoDevice`] when it is not there or this build cannot drive it, with what to do.
    pub fn open(kind: DeviceKind) -> Result<Self> {
        let device = match kind {
            DeviceKind::Emulated => Self::emulated(),
            DeviceKind::Cuda => Self::cuda()?,
            DeviceKind::Auto => Self::cuda().unwrap_or_else(|reason| {
                tracing::debug!(%reason, "no CUDA device, using the emulator");
                Self::emulated()
            }),
        };
        let Description { kind, name, memory_bytes, .. } = device.description();
        tracing::info!(%kind, name, memory_bytes, "device opened");
        Ok(device)
    }

    fn emulated() -> Self {
        Self { driver: Arc::new(emulated::Emulated::new()) }
    }

    #[cfg(feature = "cuda")]
    fn cuda() -> Result<Self> {
        Ok(Self { driver: Arc::new(cuda::Cuda::open()?) })
    }

    #[cfg(not(feature = "cuda"))]
    fn cuda() -> Result<Self> {
        let reason = "this build has no CUDA; build with `--features cuda`".into();
        Err(Error::NoDevice { wanted: "cuda", reason })
    }

    /// What the device is.
    pub fn description(&self) -> &Description {
        self.driver.description()
    }

    /// Waits until the device has done all that was asked of it.
    ///
    /// # Errors
    /// [`Error::Timeout`] at the deadline; the device is lost then.
    pub fn synchronize(&self, deadline: Duration) -> Result<()> {
        self.driver.synchronize(deadline)
    }

    pub(crate) fn driver(&self) -> &dyn Driver {
        &*self.driver
    }

    /// Whether both are the same open device.
    pub(crate) fn same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.driver, &other.driver)
    }
}
