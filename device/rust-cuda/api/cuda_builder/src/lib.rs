//! The part of rust-cuda's `cuda_builder` that `build.rs` uses: the same signatures, over
//! stepscope's own crate with the same API. It exercises the whole path from the sources to the
//! host's build where rust-cuda cannot be fetched.

use std::path::{Path, PathBuf};

pub use ours::{CudaBuilderError, NvvmArch};

/// A build of one kernel crate; see rust-cuda.
#[must_use]
pub struct CudaBuilder(ours::CudaBuilder);

impl CudaBuilder {
    /// Returns a builder for the crate in this folder.
    pub fn new(path_to_crate_root: impl AsRef<Path>) -> Self {
        Self(ours::CudaBuilder::new(path_to_crate_root))
    }

    /// Sets the architecture.
    pub fn arch(self, arch: NvvmArch) -> Self {
        Self(self.0.arch(arch))
    }

    /// Allows a multiplication and an addition to become one operation.
    pub fn fma_contraction(self, fma_contraction: bool) -> Self {
        Self(self.0.fma_contraction(fma_contraction))
    }

    /// Replaces calls of libm by calls of libdevice, which rustc never does.
    pub fn override_libm(self, override_libm: bool) -> Self {
        assert!(!override_libm, "libdevice's functions give other bits");
        self
    }

    /// Also copies the PTX to this file.
    pub fn copy_to(self, path: impl AsRef<Path>) -> Self {
        Self(self.0.copy_to(path))
    }

    /// Compiles.
    pub fn build(self) -> Result<PathBuf, CudaBuilderError> {
        self.0.build()
    }
}
