//! Everything that a GPU and the emulator do in different ways: access to memory, exchange between
//! lanes, tensor core products, and a few instructions and hints.
//!
//! `gpu/` and `emulated/` have the same files, and each file has the same functions in both. A
//! kernel calls `machine::warp::shfl_xor` and does not know where it runs. `gpu/` is inline
//! assembly and LLVM's intrinsics. `emulated/` is plain Rust, which reports every access to the
//! emulator.
//!
//! Invariant: a function gives the same bits in both folders. A tensor core product (see
//! [`mma`](crate::mma)) and [`float::exp2_weight`] have those of the instruction, which the
//! emulator computes.

#[cfg(not(target_arch = "nvptx64"))]
mod emulated;
#[cfg(target_arch = "nvptx64")]
mod gpu;

#[cfg(not(target_arch = "nvptx64"))]
pub use emulated::*;
#[cfg(target_arch = "nvptx64")]
pub use gpu::*;
