//! What is multiplied: extents, strides, and what follows the sums.

use crate::precision::Precision;
use crate::tensor::{Stored, Target, Tensor};
use cuda_std::launch::PointerMut;
use kernels::matmul::{GELU_DERIVATIVE, KEEP, Tile};

/// A matrix multiply by extents and strides, as BLAS names them; every matrix is row-major.
///
/// `out = alpha A B + bias + beta c` for each of `batches`: A is `[m, k]` (stored `[k, m]` when `transpose_a`), B `[k, n]`
/// (stored `[n, k]` when `transpose_b`), `out` and `c` `[m, n]`, `bias` `[n]`. `ld*` are elements between rows,
/// `stride_*` between batches.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Gemm {
    /// Rows of the output.
    pub m: usize,
    /// Columns of the output.
    pub n: usize,
    /// Products in each output.
    pub k: usize,
    /// A is stored as `[k, m]`.
    pub transpose_a: bool,
    /// B is stored as `[n, k]`.
    pub transpose_b: bool,
    /// Elements between rows of A as stored.
    pub lda: usize,
    /// Elements between rows of B as stored.
    pub ldb: usize,
    /// Elements between rows of the output.
    pub ldc: usize,
    /// Multiplies of the same form.
    pub batches: usize,
    /// Elements between batches of A.
    pub stride_a: usize,
    /// Elements between batches of B.
    pub stride_b: usize,
    /// Elements between batches of the output.
    pub stride_c: usize,
    /// Elements between batches of the bias.
    pub stride_bias: usize,
    /// What the sums count: they are scaled by it, before anything is added.
    pub alpha: f32,
    /// What the old content counts.
    pub beta: f32,
    /// Which tile computes it, of [`TILES`](crate::ops::TILES); none: the one that should be done first, or on the emulator the CPU's own. The
    /// bits are the same.
    pub tile: Option<Tile>,
    /// How its factors are rounded; none: as the step says.
    pub precision: Option<Precision>,
    /// Which tile computes it in a precision below f32, of [`TENSOR_TILES`](crate::ops::TENSOR_TILES); as `tile`.
    pub tensor_tile: Option<kernels::matmul_tensor::Tile>,
    /// Which tile computes it of BF16 tensors, of [`BF16_TILES`](crate::ops::BF16_TILES); as `tile`.
    pub bf16_tile: Option<kernels::matmul_bf16::Tile>,
}

impl Default for Gemm {
    /// Of no elements; the sums are not scaled, and nothing is added to them.
    fn default() -> Self {
        Self {
            m: 0,
            n: 0,
            k: 0,
            transpose_a: false,
            transpose_b: false,
            lda: 0,
            ldb: 0,
            ldc: 0,
            batches: 0,
            stride_a: 0,
            stride_b: 0,
            stride_c: 0,
            stride_bias: 0,
            alpha: 1.0,
            beta: 0.0,
            tile: None,
            precision: None,
            tensor_tile: None,
            bf16_tile: None,
        }
    }
}

impl Gemm {
    /// One multiply of packed matrices: `[m, k] [k, n]`.
    pub fn new(m: usize, n: usize, k: usize) -> Self {
        Self { m, n, k, lda: k, ldb: n, ldc: n, batches: 1, ..Self::default() }
    }

    /// A is stored as `[k, m]`, packed.
    #[must_use]
    pub fn transpose_a(self) -> Self {
        Self { transpose_a: true, lda: self.m, ..self }
    }

    /// B is stored as `[n, k]`, packed.
    #[must_use]
    pub fn transpose_b(self) -> Self {
        Self { transpose_b: true, ldb: self.k, ..self }
    }

    /// Computed by this tile.
    #[must_use]
    pub fn tile(self, tile: Tile) -> Self {
        Self { tile: Some(tile), ..self }
    }

    /// In this precision.
    #[must_use]
    pub fn precision(self, precision: Precision) -> Self {
        Self { precision: Some(precision), ..self }
    }

    /// Scales the sums by `alpha`.
    #[must_use]
    pub fn scaled(self, alpha: f32) -> Self {
        Self { alpha, ..self }
    }

    /// Adds to what is there.
    #[must_use]
    pub fn accumulate(self) -> Self {
        Self { beta: 1.0, ..self }
    }
}

/// What is done with the sums before they are written.
#[doc(hidden)]
#[derive(Debug)]
pub enum Epilogue<'e, 's, S: Stored> {
    Store,
    /// By this flag of the kernels (`GELU`, `SILU`, or `GATE`, where `c` is the gate); the sums themselves go to `pre`.
    Activate {
        flag: u32,
        pre: &'e mut Tensor<'s, S>,
    },
    /// They are multiplied by gelu'(c); of BF16 alone.
    GeluDerivative,
}

impl<'e, S: Stored> Epilogue<'e, '_, S> {
    /// Where the sums go before they are activated or gated, and what a kernel is told of what follows them.
    pub(super) fn out(self) -> (PointerMut<'e, S>, u32) {
        match self {
            Self::Store => (PointerMut::empty(), 0),
            Self::Activate { flag, pre } => (pre.out(), flag | KEEP),
            Self::GeluDerivative => (PointerMut::empty(), GELU_DERIVATIVE),
        }
    }
}

/// A multiply that gives the gradient of one factor from that of the product; for [`gradients_into`](crate::ops::gradients_into).
#[derive(Debug)]
pub struct Gradient<'g, S, T> {
    /// The multiply; with [`Gemm::accumulate`] it adds to what is there.
    pub form: Gemm,
    /// The other factor.
    pub of: &'g S,
    /// Where the gradient goes.
    pub into: &'g mut T,
}

/// Where the gradient of a product's bias goes: the sum of dy over its rows; for [`gradients_into`](crate::ops::gradients_into).
#[derive(Debug)]
pub struct BiasGradient<'g, T> {
    /// Its place, of as many elements as the bias.
    pub into: &'g mut T,
    /// It is added to what is there.
    pub accumulate: bool,
}
