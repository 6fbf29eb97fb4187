//! Checks of kernels and gradients: the self-test with its committed digests, and finite
//! differences.

#![deny(unsafe_op_in_unsafe_fn)]
// Paths are opened through `PlainFile`. Tests may open their own files.
#![cfg_attr(not(test), warn(clippy::disallowed_methods))]

mod gradcheck;
#[cfg(feature = "nvtx")]
mod nvtx;
pub mod same_bits;

pub use gradcheck::GradCheck;
#[cfg(feature = "nvtx")]
pub use nvtx::NvtxLayer;
