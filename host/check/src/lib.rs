//! Checks of kernels, gradients, error paths and memory: the self-test with its committed digests,
//! the rule of matrix instructions, finite differences, fault injection, late work, and recordings
//! of an arena's memory.

#![deny(unsafe_op_in_unsafe_fn)]
// Paths are opened through `PlainFile`. Tests may open their own files.
#![cfg_attr(not(test), warn(clippy::disallowed_methods))]

pub mod faults;
mod gradcheck;
pub mod late;
pub mod matrix_rule;
mod memory_recording;
#[cfg(feature = "nvtx")]
mod nvtx;
pub mod same_bits;
#[cfg(feature = "nvtx")]
mod sanitizer;

pub use gradcheck::GradCheck;
pub use memory_recording::{MemoryRecorder, Recording};
#[cfg(feature = "nvtx")]
pub use nvtx::NvtxLayer;
