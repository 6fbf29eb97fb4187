//! What `build.rs` uses of rust-cuda's `cuda_builder`: the same signatures, over stepscope's own crate of the same API, so
//! that the way from the sources to the host's build is gone in full where rust-cuda cannot be fetched.

use std::path::{Path, PathBuf};

pub use ours::{CudaBuilderError, NvvmArch};

/// Compiles one kernel crate; see rust-cuda.
#[must_use]
pub struct CudaBuilder(ours::CudaBuilder);

impl CudaBuilder {
    /// For the crate in this folder.
    pub fn new(path_to_crate_root: impl AsRef<Path>) -> Self {
        Self(ours::CudaBuilder::new(path_to_crate_root))
    }

    /// The architecture.
    pub fn arch(self, arch: NvvmArch) -> Self {
        Self(self.0.arch(arch))
    }

    /// Whether a multiplication and an addition may become one operation.
    pub fn fma_contraction(self, fma_contraction: bool) -> Self {
        Self(self.0.fma_contraction(fma_contraction))
    }

    /// Whether calls of libm become calls of libdevice; rustc never does that.
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
