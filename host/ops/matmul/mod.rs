//! Matrix multiply, in every precision, and what is fused behind it.
//!
//! ```text
//! form.rs    what is multiplied: Gemm, Gradient, BiasGradient, Epilogue
//! split.rs   what the kernels of every precision share: extents, chunks of k, the time of a tile
//! ieee.rs    f32                               tensor.rs  by matrix instructions, TF32 and BF16
//! bf16.rs    BF16 tensors, and GELU backward   factor.rs  which of them a tensor's type means
//! linear.rs  the ops                           tape.rs    linear layers on a tape
//! ```
//! Each file uses those above it.

mod bf16;
mod factor;
mod form;
mod ieee;
mod linear;
mod split;
mod tape;
mod tensor;

pub use bf16::gelu_linear_backward;
pub use factor::Factor;
pub use form::{BiasGradient, Gemm, Gradient};
pub use kernels::matmul::{TILES, Tile};
pub use linear::{gemm_into, gradients_into, linear, linear_gelu, linear_residual, linear_silu, linear_swiglu, matmul};
