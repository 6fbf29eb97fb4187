//! Operations on tensors. Each op checks shapes, allocates its output, and launches its kernels.
//!
//! Ops take a bare [`Step`](crate::Step), so they run the same whether or not the step is being
//! recorded. They only queue work: no op waits or reads. Outputs are new tensors of the step,
//! except for ops whose names end in `_into` or `_assign`. Ops compute and accumulate in f32.
//! Results have the same bits on every device. Products and attention in [`Precision::Tf32`] and of
//! BF16 tensors have those of a rule, which GPUs of compute capability 9.0 and the emulator share.
//!
//! Invariant: no op calls the driver.

#![forbid(unsafe_code)]

mod activation;
mod adamw;
mod along;
mod attention;
mod broadcast;
mod cast;
mod clip;
mod convolution;
pub(crate) mod declare;
mod dropout;
mod elementwise;
mod embedding;
mod fold;
mod gate;
mod gelu_bias;
mod layer_norm;
mod linear_cross_entropy;
mod loss;
mod lstm;
mod matmul;
mod mixture;
mod norm;
mod pieces;
pub mod pointwise;
mod precision;
mod product;
mod qk_norm;
pub(crate) mod reduce;
mod reductions;
mod rotary;
mod sgd;
mod shapes;
mod slice;
mod softmax;
mod sum_parts;
mod tokens;
mod transpose;
mod views;

use launch::*;

pub use crate::elementary::{add_assign, copy, copy_into, fill, fill_into, same_shape, scale, scale_by};
pub use crate::generator::{Draw, Draws, Generator};
pub use crate::precision::Precision;
pub use activation::{gelu, gelu_exact, relu, relu_squared, sigmoid, silu, softplus, tanh};
pub use adamw::{adamw, adamw_small};
pub use along::one_hot;
pub use attention::{Attention, AttentionConfig, AttentionElement, AttentionMask, attention, attention_cached};
pub use broadcast::Operand;
pub use cast::{Cast, to_bf16, to_f32};
pub use clip::clip_factor;
pub use convolution::ConvolutionConfig;
pub use dropout::dropout;
pub use elementwise::add_bias;
pub use embedding::{add_positions, embedding, embedding_bf16, gather};
pub use gate::{swiglu, swiglu_packed};
pub use kernels::matmul_bf16::{TILES as BF16_TILES, Tile as Bf16Tile};
pub use kernels::matmul_mma::{TILES as MMA_TILES, Tile as MmaTile};
pub use layer_norm::{Normalized, layer_norm, layer_norm_residual};
pub use linear_cross_entropy::{LmHeadConfig, linear_cross_entropy, linear_cross_entropy_of_rows};
pub use loss::{IGNORED, LabelRules, binary_cross_entropy, cross_entropy, cross_entropy_by, squared_error};
pub use matmul::{
    Gemm, GemmElement, GroupedLowRank, LOW_RANK_PARTS, LOW_RANK_UNIT, LowRank, LowRankDropout, LowRankPart, TILES,
    Tile, gemm_into, grouped_linear, linear, linear_gelu, linear_residual, linear_silu, linear_swiglu, matmul,
    orthogonalize_assign,
};
pub use mixture::{Groups, combine, dispatch, group_by};
pub use norm::{rms_norm, rms_norm_residual};
pub use pointwise::{Term, add, mul, pointwise_op, sub};
pub use qk_norm::{QkNorm, qk_norm};
pub use reduce::{argmax_columns, max, max_columns, mean, scaled_sum, squared_norm, sum, sum_columns, sum_rows};
pub use reductions::Extents;
pub use rotary::{PairFactors, Rotary, RotaryScaling, rotary};
pub use sgd::{sgd, sgd_small};
pub use slice::{concat, slice};
pub use softmax::{log_softmax, softmax};
pub use tokens::mean_tokens;
pub use transpose::{swap_extents, transpose};

/// The launches of which backward passes consist: gradients of ops, and sums that they add to.
/// Programs call them only in ops of their own.
pub mod launch {
    pub use super::activation::{
        gelu_backward, gelu_exact_backward, relu_backward, relu_squared_backward, sigmoid_backward, silu_backward,
        softplus_backward, tanh_backward,
    };
    pub use super::attention::{AttentionKept, attention_backward};
    pub use super::embedding::{add_positions_backward, embedding_backward, gather_backward};
    pub use super::gate::{swiglu_backward, swiglu_packed_backward};
    pub use super::gelu_bias::gelu_bias_backward;
    pub use super::layer_norm::layer_norm_backward;
    pub use super::linear_cross_entropy::linear_cross_entropy_of_rows_backward;
    pub use super::matmul::{BiasGradient, Gradient, gelu_linear_backward, gradients_into};
    pub use super::mixture::combine_backward;
    pub use super::norm::rms_norm_backward;
    pub use super::qk_norm::qk_norm_backward;
    pub use super::reduce::sum_rows_into;
    pub use super::rotary::rotary_backward;
    pub use super::softmax::{log_softmax_backward, softmax_backward};
    pub use super::sum_parts::sum_parts_into;
    pub use super::tokens::mean_tokens_backward;
    pub use crate::elementary::scale_by_into;
}

/// The stored types of a network's activations: f32 and BF16.
pub trait Activation: AttentionElement + GemmElement<Self> + GemmElement<f32> {}

impl<S: AttentionElement + GemmElement<S> + GemmElement<f32>> Activation for S {}
