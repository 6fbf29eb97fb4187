//! Matrix multiply in every precision, with its fused epilogues.
//!
//! | file | contents |
//! |---|---|
//! | `gemm.rs` | the description of a multiply: `Gemm`, `Product`, `Gradient`, `BiasGradient` |
//! | `split.rs` | shared by all precisions: extents and split-K |
//! | `tile.rs` | shared by all precisions: the choice of a tile by its time |
//! | `f32.rs` | multiplies in f32 |
//! | `tf32_wgmma.rs` | multiplies of f32 tensors by `wgmma`, as TF32 |
//! | `mma.rs` | multiplies of f32 tensors on tensor cores, as TF32 |
//! | `aligned.rs` | operands of BF16 products by `wgmma`: rows that begin on 16 bytes |
//! | `bf16.rs` | multiplies of BF16 tensors, and the GELU backward epilogue |
//! | `grouped.rs` | products of groups of rows, each with weights of its own |
//! | `element.rs` | the choice among them by a tensor's type |
//! | `linear.rs` | the ops |
//! | `tape.rs` | linear layers on a tape |
//! | `low_rank.rs` | linear layers with a low-rank addition, on a tape |
//! | `grouped_low_rank.rs` | layers of groups of rows with such an addition, on a tape |
//! | `orthogonalize.rs` | orthogonalized matrices, by products of BF16 tensors |
//!
//! Each file uses only those above it.

mod aligned;
mod bf16;
mod element;
mod f32;
mod gemm;
mod grouped;
mod grouped_low_rank;
mod linear;
mod low_rank;
mod mma;
mod orthogonalize;
mod split;
mod tape;
mod tf32_wgmma;
mod tile;

pub use bf16::gelu_linear_backward;
pub use element::GemmElement;
pub use gemm::{BiasGradient, Gemm, Gradient};
pub use grouped_low_rank::GroupedLowRank;
pub use kernels::matmul::{TILES, Tile};
pub use linear::{
    gemm_into, gradients_into, grouped_linear, linear, linear_gelu, linear_residual, linear_silu, linear_swiglu, matmul,
};
pub use low_rank::{LOW_RANK_PARTS, LOW_RANK_UNIT, LowRank, LowRankDropout, LowRankPart};
pub use orthogonalize::orthogonalize_assign;
