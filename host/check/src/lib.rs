//! Checks of kernels, gradients and error paths: the self-test with its committed digests, finite
//! differences, and fault injection.

#![deny(unsafe_op_in_unsafe_fn)]
// Paths are opened through `PlainFile`. Tests may open their own files.
#![cfg_attr(not(test), warn(clippy::disallowed_methods))]

pub mod faults;
mod gradcheck;
#[cfg(feature = "nvtx")]
mod nvtx;
pub mod same_bits;

pub use gradcheck::GradCheck;
#[cfg(feature = "nvtx")]
pub use nvtx::NvtxLayer;
