//! Every kernel and every gradient against a float64 reference, through the public API.
//!
//! A file name is the same for the kernel, the op and its tests: `norm` is
//! `device/src/kernels/norm.rs`, `host/core/src/ops/norm.rs` and `norm.rs` here. Every op runs in a
//! [`trial`]: a poisoned arena in which each word is accounted for, at two addresses. A build with
//! CUDA also compares the bits with the emulator's. The gradients of tape ops are also compared
//! with finite differences ([`gradients`]). `tape.rs` and similar files have several ops on one
//! tape. Every kernel is launched with [`hostile`] numbers.
//!
//! Every file of this folder is a module. `cargo fmt` does not find them: `cargo xtask lint` runs
//! `rustfmt tests/kernels/*.rs`.

#![forbid(unsafe_code)]

#[path = "../support/mod.rs"]
mod support;

#[path = "../../examples/scalars/reference.rs"]
mod reference;
#[path = "../../examples/scalars/sweep.rs"]
mod sweep;

/// The strided-batched products of stacked parameters.
#[path = "../../examples/crossasset/layers.rs"]
#[allow(dead_code, reason = "only the ops are tested here")]
mod crossasset;

automod::dir!("tests/kernels");
