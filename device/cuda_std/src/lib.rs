//! rust-cuda's `cuda_std`, the part that stepscope's kernels use: same paths, same signatures.
//!
//! On `nvptx64` each function is an intrinsic of rustc's NVPTX backend. On a CPU it asks the [`emulator`], which
//! runs the same kernel, thread by thread, and turns what a GPU would leave undefined into an error that names
//! kernel, block and thread.
//!
//! Invariant: a kernel written against this crate compiles unchanged with rust-cuda's own `cuda_std`. What stands
//! beyond that API ([`launch`], [`emulator`], [`float_mode`]) exists on the CPU alone.

#![warn(clippy::disallowed_methods)]
#![cfg_attr(target_arch = "nvptx64", no_std)]
#![cfg_attr(
    target_arch = "nvptx64",
    feature(stdarch_nvptx, core_intrinsics, link_llvm_intrinsics, asm_experimental_arch)
)]
#![cfg_attr(target_arch = "nvptx64", allow(internal_features))]

pub use stepscope_cuda_std_macros::kernel;
#[doc(hidden)]
pub use stepscope_cuda_std_macros::{arguments, written_unsafe};

mod float;
#[cfg(target_arch = "nvptx64")]
#[doc(hidden)]
pub mod grid;
pub mod shared;
pub mod thread;
pub mod warp;

#[cfg(not(target_arch = "nvptx64"))]
pub mod emulator;
#[cfg(not(target_arch = "nvptx64"))]
pub mod float_mode;
#[cfg(not(target_arch = "nvptx64"))]
pub mod launch;

pub use float::GpuFloat;

/// What a kernel's file imports; no more than rust-cuda's has.
pub mod prelude {
    pub use crate::{kernel, thread};
}

// A kernel has nobody to tell: the trap ends the launch, and the host sees a lost context.
#[cfg(target_arch = "nvptx64")]
#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    // SAFETY: `trap` ends the grid; nothing after it runs.
    unsafe { core::arch::nvptx::trap() }
}
