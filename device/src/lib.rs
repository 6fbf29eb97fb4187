//! The kernels of stepscope.
//!
//! Each file of [`kernels`](self) holds the entry points of one op family, each with its contract; the arithmetic
//! that several share stands in [`math`], [`exps`], [`vector`], [`warp`], [`block`] and [`tile`]. The same source is compiled
//! to PTX, by rustc or (`cfg(rust_cuda)`) by rust-cuda, and to plain functions for the emulator.
//!
//! Invariant: f32 results have the same bits on every device: fused multiply-adds only where written, ascending
//! sums, trees that depend on lengths alone, no library function and no approximate instruction.

#![no_std]
#![cfg_attr(target_arch = "nvptx64", feature(abi_ptx, asm_experimental_arch))]
#![cfg_attr(rust_cuda, feature(link_llvm_intrinsics))]
#![cfg_attr(rust_cuda, allow(internal_features))]

#[cfg(not(target_arch = "nvptx64"))]
extern crate std;

mod contract;

pub mod block;
pub mod exps;
pub mod math;
pub mod tile;
pub mod vector;
pub mod warp;

#[path = "kernels"]
mod entries {
    pub mod activation;
    pub mod adamw;
    pub mod attention;
    pub mod checksum;
    pub mod elementwise;
    pub mod fill;
    pub mod guard;
    pub mod loss;
    pub mod matmul;
    pub mod norm;
    pub mod reduce;
    pub mod scalars;
    pub mod softmax;
    pub mod tokens;
}

pub use entries::*;
