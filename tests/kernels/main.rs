//! Every kernel against a float64 reference, through the public API.
//!
//! A stem names the kernel file, the op and its tests: `norm` is `device/src/kernels/norm.rs`, `host/ops/norm.rs` and
//! `norm.rs` here. Every op runs in a [`trial`]: a poisoned arena of which each word is accounted for, twice, at two
//! addresses, and in a build with CUDA also against the emulator's bits.

#![forbid(unsafe_code)]

#[path = "../support/mod.rs"]
mod support;

#[path = "../../examples/scalars/reference.rs"]
mod reference;
#[path = "../../examples/scalars/sweep.rs"]
mod sweep;

mod launches;
mod shapes;
mod tolerance;
mod trees;
mod trial;

mod activation;
mod adamw;
mod attention;
mod checksum;
mod clip;
mod elementwise;
mod fill;
mod layer_norm;
mod loss;
mod math;
mod matmul;
mod matmul_tensor;
mod modes;
mod norm;
mod precision;
mod reduce;
mod same_bits;
mod scalars;
mod sgd;
mod softmax;
mod tokens;
mod transpose;
