//! What a device is, and which one to open.

#![forbid(unsafe_code)]

use crate::error::{Error, Result};
use crate::ptx::PtxBuild;
use std::fmt;
use std::str::FromStr;

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
