//! Every kernel and every gradient against a float64 reference, through the public API.
//!
//! A stem names the kernel file, the op and its tests: `norm` is `device/src/kernels/norm.rs`, `host/ops/norm.rs` and
//! `norm.rs` here. Every op runs in a [`trial`]: a poisoned arena of which each word is accounted for, twice, at two
//! addresses, and in a build with CUDA also against the emulator's bits. An op of the tape also has its gradients compared with finite
//! differences ([`gradients`]); `tape.rs` and its like have several ops on one tape. Every kernel is launched with [`hostile`] numbers.
//!
//! Every file of this folder is a module. `cargo fmt` does not see that: `rustfmt tests/kernels/*.rs` does, and `ci/lint` asks it.

#![forbid(unsafe_code)]

#[path = "../support/mod.rs"]
mod support;

#[path = "../../examples/scalars/reference.rs"]
mod reference;
#[path = "../../examples/scalars/sweep.rs"]
mod sweep;

automod::dir!("tests/kernels");
