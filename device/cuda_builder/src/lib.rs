//! Compiles a kernel crate to PTX from a build script, with rust-cuda's `CudaBuilder` API.
//!
//! rust-cuda has its own code generator, which needs one pinned nightly. This crate uses rustc's
//! NVPTX target instead: any `rustc` with LLVM's NVPTX backend and the source of `core`, including
//! stable. A build script written for one works with the other.
//!
//! ```no_run
//! # fn main() -> Result<(), cuda_builder::CudaBuilderError> {
//! use cuda_builder::{CudaBuilder, NvvmArch};
//!
//! let ptx = CudaBuilder::new("device").arch(NvvmArch::Compute121).fma_contraction(false).build()?;
//! # Ok(()) }
//! ```
//!
//! Invariant: the PTX depends only on the sources, the architecture and the device compiler. The
//! environment (flags, wrappers, profiles, the folder's name) does not affect it.

#![warn(clippy::disallowed_methods)]
#![forbid(unsafe_code)]
#![warn(missing_docs)]

mod arch;
mod bounds;
mod builder;
mod compiler;
mod error;
mod table;

pub use arch::NvvmArch;
pub use builder::CudaBuilder;
pub use compiler::{DeviceCompiler, Library, Search};
pub use error::CudaBuilderError;
pub use table::write_table;
