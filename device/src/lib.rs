//! The kernels of stepscope.
//!
//! Each file of [`kernels`](self) holds the entry points of one op family, each with its contract.
//! Arithmetic that several families share is in [`math`], [`activations`], [`philox`], [`exps`],
//! [`update`], [`vector`], [`flat`], [`window`], [`broadcast`], [`warp`], [`block`] and [`tile`].
//! The tensor core instructions are in [`mod@format`] and [`mod@mma`], and the tables of NF4 in
//! [`nf4_format`]. [`machine`] has what a GPU and the emulator do in different ways. The same
//! source compiles to PTX, by rustc or (`cfg(rust_cuda)`) by rust-cuda, and to plain functions for
//! the emulator.
//!
//! Invariant: f32 results have the same bits on every device. Multiply-adds are fused only where
//! the source says so. Sums run in ascending index order, and a reduction's tree depends only on
//! its length. The kernels use neither library functions nor approximate instructions. The
//! exceptions are tensor core multiplies ([`mod@mma`]) and the exponential of attention that uses
//! them ([`math::exp2_weight`]). They have the bits of a GPU's instruction, which the emulator
//! computes too.

#![warn(clippy::disallowed_methods)]
#![no_std]
#![cfg_attr(
    target_arch = "nvptx64",
    feature(abi_ptx, asm_experimental_arch, link_llvm_intrinsics),
    allow(internal_features)
)]
// PTX for sm_90a contains only the kernels of warpgroups, and what they call.
#![cfg_attr(cuda_arch = "sm_90a", allow(unused))]
// rust-cuda adds `no_std` itself. Its entry points are plain `extern` functions, and each slice is
// passed as two words.
#![cfg_attr(rust_cuda, allow(unused_attributes, improper_ctypes_definitions))]

#[cfg(not(target_arch = "nvptx64"))]
extern crate std;

mod contract;
mod family;
#[cfg(not(target_arch = "nvptx64"))]
pub use contract::{ALIGN, entries, package_of};
pub use half::bf16;

pub mod activations;
pub mod block;
pub mod broadcast;
pub mod companded;
pub mod exps;
#[allow(clippy::disallowed_methods, reason = "accesses memory for the kernels")]
pub mod flat;
pub mod format;
#[allow(clippy::disallowed_methods, reason = "accesses memory for the kernels")]
pub mod machine;
pub mod math;
pub mod mma;
pub mod nf4_format;
pub mod philox;
pub mod pointwise_op;
pub mod qkv_layout;
pub mod rescale;
pub mod row_chunk;
pub mod split;
#[allow(clippy::disallowed_methods, reason = "accesses memory for the kernels")]
pub mod stored;
#[allow(clippy::disallowed_methods, reason = "accesses memory for the kernels")]
pub mod tile;
mod unroll;
pub mod update;
#[allow(clippy::disallowed_methods, reason = "accesses memory for the kernels")]
pub mod vector;
pub mod warp;
#[cfg(any(not(target_arch = "nvptx64"), cuda_arch = "sm_90a"))]
pub mod wgmma;
pub mod window;

#[cfg(not(all(target_arch = "nvptx64", feature = "library")))]
#[path = "kernels"]
mod entries {
    pub mod activation;
    pub mod adamw;
    pub mod along;
    pub mod attention;
    pub mod cast;
    pub mod checksum;
    pub mod clip;
    pub mod dropout;
    pub mod elementwise;
    pub mod embedding;
    pub mod fill;
    pub mod flash_attention;
    pub mod flash_attention_mma;
    #[cfg(any(not(target_arch = "nvptx64"), cuda_arch = "sm_90a"))]
    pub mod flash_attention_wgmma;
    pub mod fold;
    pub mod gate;
    pub mod guard;
    pub mod layer_norm;
    pub mod loss;
    pub mod lstm;
    pub mod matmul;
    pub mod matmul_bf16;
    pub mod matmul_grouped;
    pub mod matmul_mma;
    #[cfg(any(not(target_arch = "nvptx64"), cuda_arch = "sm_90a"))]
    pub mod matmul_wgmma;
    #[cfg(any(not(target_arch = "nvptx64"), cuda_arch = "sm_90a"))]
    pub mod matmul_wgmma_tf32;
    pub mod mixture;
    pub mod nf4;
    pub mod norm;
    pub mod pointwise;
    pub mod precision;
    pub mod qk_norm;
    pub mod reduce;
    pub mod rotary;
    pub mod scalars;
    pub mod sgd;
    pub mod softmax;
    pub mod split_masters;
    pub mod strided;
    pub mod sum_parts;
    pub mod tokens;
    pub mod transpose;
}

#[cfg(not(all(target_arch = "nvptx64", feature = "library")))]
pub use entries::*;
