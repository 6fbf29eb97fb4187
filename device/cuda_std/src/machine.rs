//! Everything that a GPU and the emulator do in different ways. `machine/gpu.rs` has the
//! intrinsics of rustc's NVPTX backend. `machine/emulated.rs` has the same functions as requests to
//! the [`emulator`](crate::emulator).
//!
//! Invariant: both files have the same functions, with the same contracts as the public functions
//! that call them.

#[cfg(not(target_arch = "nvptx64"))]
mod emulated;
#[cfg(target_arch = "nvptx64")]
mod gpu;

#[cfg(not(target_arch = "nvptx64"))]
pub(crate) use emulated::*;
#[cfg(target_arch = "nvptx64")]
pub(crate) use gpu::*;
