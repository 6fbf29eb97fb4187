//! Operations on tensors. Each op checks shapes, allocates its output, and launches its kernels.
//!
//! Ops take a bare [`Step`](crate::Step), so they run the same whether or not the step is being
//! recorded. They only queue work: no op waits or reads. Outputs are new tensors of the step,
//! except for ops whose names end in `_into` or `_assign`. Ops compute and accumulate in f32.
//! Results have the same bits on every device, except for multiplies in [`Precision::Tf32`].
//!
//! Invariant: no op calls the driver.

#![forbid(unsafe_code)]

mod activation;
mod adamw;
mod attention;
mod binary;
mod cast;
mod clip;
pub(crate) mod declare;
mod dropout;
mod elementwise;
mod embedding;
mod gate;
mod gelu_bias;
mod layer_norm;
mod linear_cross_entropy;
mod loss;
mod matmul;
mod norm;
mod precision;
mod qk_norm;
pub(crate) mod reduce;
mod rotary;
mod sgd;
mod shapes;
mod slice;
mod softmax;
mod sum_parts;
mod tokens;
mod transpose;

pub use crate::elementary::{add_assign, copy, copy_into, fill, fill_into, same_shape, scale, scale_by, scale_by_into};
pub use crate::generator::{Draw, Draws, Generator};
pub use crate::precision::Precision;
pub use activation::*;
pub use adamw::adamw;
pub use attention::{
    Attention, AttentionConfig, AttentionElement, AttentionKept, AttentionMask, attention, attention_backward,
    attention_cached,
};
pub use binary::*;
pub use cast::{Cast, to_bf16, to_f32};
pub use clip::clip_factor;
pub use dropout::dropout;
pub use elementwise::add_bias;
pub use embedding::{
    add_positions, add_positions_backward, embedding, embedding_backward, embedding_bf16, gather, gather_backward,
};
pub use gate::{swiglu, swiglu_backward, swiglu_packed, swiglu_packed_backward};
pub use gelu_bias::gelu_bias_backward;
pub use kernels::matmul_bf16::{TILES as BF16_TILES, Tile as Bf16Tile};
pub use kernels::matmul_mma::{TILES as MMA_TILES, Tile as MmaTile};
pub use layer_norm::{Normalized, layer_norm, layer_norm_backward, layer_norm_residual};
pub use linear_cross_entropy::{LmHeadConfig, linear_cross_entropy};
pub use loss::{IGNORED, LabelRules, binary_cross_entropy, cross_entropy, cross_entropy_by, squared_error};
pub use matmul::{
    BiasGradient, Gemm, GemmElement, Gradient, LOW_RANK_PARTS, LOW_RANK_UNIT, LowRank, LowRankDropout, LowRankPart,
    TILES, Tile, gelu_linear_backward, gemm_into, gradients_into, linear, linear_gelu, linear_residual, linear_silu,
    linear_swiglu, matmul,
};
pub use norm::{rms_norm, rms_norm_backward, rms_norm_residual};
pub use qk_norm::{QkNorm, qk_norm, qk_norm_backward};
pub use reduce::{
    argmax_columns, max, max_columns, mean, scaled_sum, squared_norm, sum, sum_columns, sum_rows, sum_rows_into,
};
pub use rotary::{PairFactors, Rotary, RotaryScaling, rotary, rotary_backward};
pub use sgd::sgd;
pub use slice::{concat, slice, slice_backward};
pub use softmax::*;
pub use sum_parts::sum_parts_into;
pub use tokens::{mean_tokens, mean_tokens_backward};
pub use transpose::{swap_extents, transpose};

/// The stored types of a network's activations: f32 and BF16.
pub trait Activation: AttentionElement + GemmElement<Self> + GemmElement<f32> {}

impl<S: AttentionElement + GemmElement<S> + GemmElement<f32>> Activation for S {}
