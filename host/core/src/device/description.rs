//! The description of a device, and the kinds that can be opened.

#![forbid(unsafe_code)]

use crate::error::{Error, Result};
use crate::ptx::PtxBuild;
use std::fmt;
use std::str::FromStr;

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
    /// The driver, which compiles PTX for the device: its CUDA version, and its own version if the
    /// system reports it. None on the emulator.
    pub driver: Option<String>,
    /// The PTX that the library's own kernels were compiled from, or none on the emulator.
    pub ptx: Option<PtxBuild>,
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
