//! The part of rust-cuda's `cuda_std` that stepscope's kernels use, with the same paths and
//! signatures.
//!
//! On `nvptx64` each function is an intrinsic of rustc's NVPTX backend. On a CPU it calls the
//! [`emulator`], which runs the same kernel, thread by thread. The emulator turns what is undefined
//! on a GPU into an error that names kernel, block and thread.
//!
//! Invariant: a `#[kernel]` written against this crate compiles unchanged with rust-cuda's own
//! `cuda_std`, which has no [`macro@warpgroup_kernel`]. The rest of this crate ([`launch`],
//! [`emulator`], [`float_mode`]) exists only on the CPU.

#![warn(clippy::disallowed_methods)]
#![cfg_attr(
    target_arch = "nvptx64",
    no_std,
    feature(stdarch_nvptx, core_intrinsics, link_llvm_intrinsics, asm_experimental_arch),
    allow(internal_features)
)]

#[doc(hidden)]
pub use stepscope_cuda_std_macros::{arguments, written_unsafe};
pub use stepscope_cuda_std_macros::{kernel, warpgroup_kernel};

#[cfg(target_arch = "nvptx64")]
#[doc(hidden)]
pub mod array;
#[cfg(target_arch = "nvptx64")]
mod entry;
mod float;
#[cfg(target_arch = "nvptx64")]
#[doc(hidden)]
pub mod grid;
mod machine;
pub mod shared;
pub mod tensor_map;
pub mod thread;
pub mod warp;

#[allow(clippy::disallowed_methods, reason = "runs only on the host")]
#[cfg(not(target_arch = "nvptx64"))]
pub mod emulator;
#[cfg(not(target_arch = "nvptx64"))]
pub mod float_mode;
#[allow(clippy::disallowed_methods, reason = "runs only on the host")]
#[cfg(not(target_arch = "nvptx64"))]
pub mod launch;

pub use float::GpuFloat;

/// The imports of a kernel's file. They are a subset of rust-cuda's prelude.
pub mod prelude {
    pub use crate::{kernel, thread};
}
