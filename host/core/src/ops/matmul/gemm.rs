//! The description of a multiply: extents, strides, and the epilogue.

use crate::precision::Precision;
use crate::step::Step;
use crate::tensor::{Source, Stored, Target, Tensor};
use cuda_std::launch::{Pointer, PointerMut, Slice};
use kernels::matmul::{GELU_DERIVATIVE, STORE_PREACT, Tile};

/// A matrix multiply by extents and strides, named as in BLAS. Every matrix is row-major.
///
/// `out = alpha A B + bias + beta c` for each of `batches`: A is `[m, k]` (stored `[k, m]` when
/// `transpose_a`), B `[k, n]` (stored `[n, k]` when `transpose_b`), `out` and `c` `[m, n]`, `bias`
/// `[n]`. `ld*` is the number of elements between rows, `stride_*` between batches. Rows of A
/// and of B may overlap.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Gemm {
    /// Rows of the output.
    pub m: usize,
    /// Columns of the output.
    pub n: usize,
    /// Products in each output.
    pub k: usize,
    /// True if A is stored as `[k, m]`.
    pub transpose_a: bool,
    /// True if B is stored as `[n, k]`.
    pub transpose_b: bool,
    /// Elements between rows of A as stored.
    pub lda: usize,
    /// Elements between rows of B as stored.
    pub ldb: usize,
    /// Elements between rows of the output.
    pub ldc: usize,
    /// The number of multiplies of this form.
    pub batches: usize,
    /// Elements between batches of A.
    pub stride_a: usize,
    /// Elements between batches of B.
    pub stride_b: usize,
    /// Elements between batches of the output.
    pub stride_c: usize,
    /// Elements between batches of the bias.
    pub stride_bias: usize,
    /// The factor of the sums, applied before anything is added.
    pub alpha: f32,
    /// The factor of the old content.
    pub beta: f32,
    /// The tile to use, one of [`TILES`](crate::ops::TILES). `None` chooses the tile that should
    /// finish first, or on the emulator the CPU's own tile. The bits are the same for every tile.
    pub tile: Option<Tile>,
    /// The precision to which operands are rounded. `None` means the step's precision.
    pub precision: Option<Precision>,
    /// The tile to use in TF32, one of [`MMA_TILES`](crate::ops::MMA_TILES);
    /// as for `tile`.
    pub mma_tile: Option<kernels::matmul_mma::Tile>,
    /// The tile to use for BF16 tensors, one of [`BF16_TILES`](crate::ops::BF16_TILES); as for
    /// `tile`.
    pub bf16_tile: Option<kernels::matmul_bf16::Tile>,
}

impl Default for Gemm {
    /// Makes a multiply of no elements, without scaling and with nothing added to the sums.
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
            mma_tile: None,
            bf16_tile: None,
        }
    }
}

impl Gemm {
    /// The rows for which k is split in a [batch-invariant](crate::Step::set_batch_invariant)
    /// step, for any number of rows.
    pub const BATCH_INVARIANT_ROWS: usize = 256;

    /// The rows on which the split of k depends. Where A is stored as `[k, m]`, as for the gradient
    /// of weights, its rows are not those of a batch.
    pub(super) fn rows_of_split(&self, step: &Step<'_>) -> usize {
        if step.batch_invariant() && !self.transpose_a { Self::BATCH_INVARIANT_ROWS } else { self.m }
    }

    /// Makes one multiply of packed matrices: `[m, k] [k, n]`.
    pub fn new(m: usize, n: usize, k: usize) -> Self {
        Self { m, n, k, lda: k, ldb: n, ldc: n, batches: 1, ..Self::default() }
    }

    /// Sets A to be stored as `[k, m]`, packed.
    #[must_use]
    pub fn transpose_a(self) -> Self {
        Self { transpose_a: true, lda: self.m, ..self }
    }

    /// Sets B to be stored as `[n, k]`, packed.
    #[must_use]
    pub fn transpose_b(self) -> Self {
        Self { transpose_b: true, ldb: self.k, ..self }
    }

    /// Sets the tile.
    #[must_use]
    pub fn tile(self, tile: Tile) -> Self {
        Self { tile: Some(tile), ..self }
    }

    /// Sets the precision.
    #[must_use]
    pub fn precision(self, precision: Precision) -> Self {
        Self { precision: Some(precision), ..self }
    }

    /// Scales the sums by `alpha`.
    #[must_use]
    pub fn scaled(self, alpha: f32) -> Self {
        Self { alpha, ..self }
    }

    /// Adds the result to the output's old content.
    #[must_use]
    pub fn accumulate(self) -> Self {
        Self { beta: 1.0, ..self }
    }
}

/// A multiply with its operands and the memory that it writes.
#[derive(Debug)]
pub struct Product<'p, F, S> {
    pub(super) form: Gemm,
    pub(super) a: Slice<'p, F>,
    pub(super) b: Slice<'p, F>,
    pub(super) bias: Slice<'p, f32>,
    /// The term or factor of the epilogue: the old content of `out`, unless it is set.
    pub(super) c: Pointer<'p, S>,
    pub(super) out: PointerMut<'p, S>,
    /// The sums before they are activated.
    pub(super) pre: PointerMut<'p, S>,
    /// The kernels' flags of the epilogue.
    pub(super) flags: u32,
}

impl<'p, F: Stored, S: Stored> Product<'p, F, S> {
    pub(super) fn new<'s>(
        form: Gemm,
        a: &'p impl Source<'s, F>,
        b: &'p impl Source<'s, F>,
        out: &'p mut impl Target<'s, S>,
    ) -> Self {
        let (c, out) = out.in_place();
        let (bias, pre) = (Slice::empty(), PointerMut::empty());
        Self { form, a: a.slice(), b: b.slice(), bias, c, out, pre, flags: 0 }
    }

    pub(super) fn bias<'s>(self, bias: Option<&'p impl Source<'s, f32>>) -> Self {
        Self { bias: bias.map_or(self.bias, Source::slice), ..self }
    }

    pub(super) fn c<'s>(self, c: Option<&'p impl Source<'s, S>>) -> Self {
        Self { c: c.map_or(self.c, Source::pointer), ..self }
    }

    /// Activates the sums according to this flag of the kernels: `GELU`, `SILU`, or `SWIGLU`, where
    /// `c` is the gate.
    pub(super) fn activated(self, flag: u32, pre: &'p mut Tensor<'_, S>) -> Self {
        Self { flags: flag | STORE_PREACT, pre: pre.out(), ..self }
    }

    /// Multiplies the sums by gelu'(c). Only for BF16.
    pub(super) fn by_gelu_derivative(self) -> Self {
        Self { flags: GELU_DERIVATIVE, ..self }
    }
}

/// A multiply that computes the gradient of one operand from that of the product, for
/// [`gradients_into`](crate::ops::launch::gradients_into).
#[derive(Debug)]
pub struct Gradient<'g, S, T> {
    /// The multiply. [`Gemm::accumulate`] makes it add to the old content.
    pub form: Gemm,
    /// The other operand.
    pub of: &'g S,
    /// The output for the gradient.
    pub into: &'g mut T,
}

/// The output for the gradient of a product's bias, which is the sum of dy over its rows, for
/// [`gradients_into`](crate::ops::launch::gradients_into).
#[derive(Debug)]
pub struct BiasGradient<'g, T> {
    /// The output, of as many elements as the bias.
    pub into: &'g mut T,
    /// True to add to the old content.
    pub accumulate: bool,
}
