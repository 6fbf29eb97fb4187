//! The kernels of stepscope.
//!
//! Each file of [`kernels`](self) holds the entry points of one op family, each with its contract; the arithmetic
//! that several share stands in [`math`], [`vector`], [`warp`], [`block`] and [`tile`]. The same source is compiled
//! to PTX and to plain functions for the emulator.
//!
//! Invariant: f32 results have the same bits on every device: fused multiply-adds only where written, ascending
//! sums, trees that depend on lengths alone, no library function and no approximate instruction.

#![no_std]
#![cfg_attr(target_arch = "nvptx64", feature(abi_ptx, asm_experimental_arch))]

#[cfg(not(target_arch = "nvptx64"))]
extern crate std;

mod contract;

pub mod block;
pub mod math;
pub mod tile;
pub mod vector;
pub mod warp;

#[cfg(not(all(target_arch = "nvptx64", feature = "library")))]
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

#[cfg(not(all(target_arch = "nvptx64", feature = "library")))]
pub use entries::*;
