//! Matrix multiply and what is fused behind it.

use super::matmul_tensor;
use super::split::{self, Outputs, Words, in_chunks};
use crate::driver::DeviceKind;
use crate::error::{Error, Result};
use crate::precision::Precision;
use crate::step::Step;
use crate::tensor::{Source, Target, Tensor};
use cuda_std::launch::{PointerMut, Slice};
use kernels::matmul::*;

pub use kernels::matmul::{TILES, Tile};

/// A matrix multiply by extents and strides, as BLAS names them; every matrix is row-major.
///
/// `out = A B + bias + beta c` for each of `batches`: A is `[m, k]` (stored `[k, m]` when `transpose_a`), B `[k, n]`
/// (stored `[n, k]` when `transpose_b`), `out` and `c` `[m, n]`, `bias` `[n]`. `ld*` are elements between rows,
/// `stride_*` between batches.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
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
    /// What the old content counts.
    pub beta: f32,
    /// Which tile computes it, of [`TILES`]; none: the one that should be done first, or on the emulator the CPU's own. The
    /// bits are the same.
    pub tile: Option<Tile>,
    /// How its factors are rounded; none: as the step says.
    pub precision: Option<Precision>,
    /// Which tile computes it in a precision below f32, of [`TENSOR_TILES`](super::TENSOR_TILES); as `tile`.
    pub tensor_tile: Option<kernels::matmul_tensor::Tile>,
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

    /// Adds to what is there.
    #[must_use]
    pub fn accumulate(self) -> Self {
        Self { beta: 1.0, ..self }
    }
}

/// What is done with the sums before they are written.
pub(super) enum Epilogue<'e, 's> {
    Store,
    Gelu { pre: &'e mut Tensor<'s> },
}

impl<'e> Epilogue<'e, '_> {
    /// Where the sums before gelu go, and what a kernel is told of it.
    pub(super) fn out(self) -> (PointerMut<'e, f32>, u32) {
        match self {
            Self::Store => (PointerMut::empty(), 0),
            Self::Gelu { pre } => (pre.out(), GELU | KEEP),
        }
    }
}

/// `out = x w`; `x`: `[.., k]`, `w`: `[k, n]`, `out`: `[.., n]`.
///
/// One fused-multiply-add chain over ascending k for each element; where outputs are few and k is long, k is cut into chunks
/// by a rule in m, n and k alone ([`kernels::matmul::chunk`]), and their sums are added in order: the same bits for every
/// tile and device. Scratch: none, or `m n` floats for each chunk, up to 8 MiB for each batch; queued, does not wait.
///
/// # Errors
/// [`Error::Misuse`] when the inner extents differ; [`Error::ArenaFull`].
#[track_caller]
pub fn matmul<'s>(step: &Step<'s>, x: &impl Source<'s, f32>, w: &impl Source<'s, f32>) -> Result<Tensor<'s>> {
    linear(step, x, w, None::<&Tensor<'s>>)
}

/// `out = x w + bias`; `x`: `[.., k]`, `w`: `[k, n]`, `bias`: `[n]`, `out`: `[.., n]`. As [`matmul`].
///
/// # Errors
/// As for [`matmul`].
#[track_caller]
pub fn linear<'s>(
    step: &Step<'s>,
    x: &impl Source<'s, f32>,
    w: &impl Source<'s, f32>,
    bias: Option<&impl Source<'s, f32>>,
) -> Result<Tensor<'s>> {
    let (shape, form) = forward("linear", x, w)?;
    let mut out = step.empty(shape)?;
    gemm_into(step, &form, x, w, bias, &mut out)?;
    Ok(out)
}

/// `out = residual + x w + bias`; `residual`: the shape of `out`. As [`linear`].
///
/// # Errors
/// As for [`linear`].
#[track_caller]
pub fn linear_residual<'s>(
    step: &Step<'s>,
    x: &impl Source<'s, f32>,
    w: &impl Source<'s, f32>,
    bias: Option<&impl Source<'s, f32>>,
    residual: &impl Source<'s, f32>,
) -> Result<Tensor<'s>> {
    let (shape, form) = forward("linear_residual", x, w)?;
    super::same_shape("linear_residual", shape, residual.shape())?;
    let mut out = step.empty(shape)?;
    queue(step, &form.accumulate(), x, w, bias, Some(residual), &mut out, Epilogue::Store)?;
    Ok(out)
}

/// `pre = x w + bias`, `out = gelu(pre)`; returns `(out, pre)`, backward needs `pre`. As [`linear`].
///
/// # Errors
/// As for [`linear`].
#[track_caller]
pub fn linear_gelu<'s>(
    step: &Step<'s>,
    x: &impl Source<'s, f32>,
    w: &impl Source<'s, f32>,
    bias: Option<&impl Source<'s, f32>>,
) -> Result<(Tensor<'s>, Tensor<'s>)> {
    let (shape, form) = forward("linear_gelu", x, w)?;
    let (mut out, mut pre) = (step.empty(shape)?, step.empty(shape)?);
    queue(step, &form, x, w, bias, None::<&Tensor<'s>>, &mut out, Epilogue::Gelu { pre: &mut pre })?;
    Ok((out, pre))
}

/// `out = A B + bias + beta out`, in place, for any strides; see [`Gemm`].
///
/// # Errors
/// [`Error::Contract`] when a matrix does not lie inside its tensor; [`Error::Misuse`] for extents beyond 2^32.
#[track_caller]
pub fn gemm_into<'s>(
    step: &Step<'s>,
    form: &Gemm,
    a: &impl Source<'s, f32>,
    b: &impl Source<'s, f32>,
    bias: Option<&impl Source<'s, f32>>,
    out: &mut impl Target<'s, f32>,
) -> Result<()> {
    queue(step, form, a, b, bias, None::<&Tensor<'s>>, out, Epilogue::Store)
}

/// A multiply that gives the gradient of one factor from that of the product; for [`gradients_into`].
#[derive(Debug)]
pub struct Gradient<'g, S, T> {
    /// The multiply; with [`Gemm::accumulate`] it adds to what is there.
    pub form: Gemm,
    /// The other factor.
    pub of: &'g S,
    /// Where the gradient goes.
    pub into: &'g mut T,
}

/// The gradients of `y = x w`, for any strides: `dw = x^T dy` and where it is wanted `dx = dy w^T`. Below f32 what both need is
/// rounded once.
///
/// # Errors
/// As for [`gemm_into`].
#[track_caller]
pub fn gradients_into<'s>(
    step: &Step<'s>,
    dy: &impl Source<'s, f32>,
    dw: Gradient<'_, impl Source<'s, f32>, impl Target<'s, f32>>,
    dx: Option<Gradient<'_, impl Source<'s, f32>, impl Target<'s, f32>>>,
) -> Result<()> {
    let none = None::<&Tensor<'s>>;
    let Some(dx) = dx else {
        return gemm_into(step, &dw.form, dw.of, dy, none, dw.into);
    };
    let precision = dw.form.precision_in(step);
    if precision != Precision::Ieee {
        return matmul_tensor::queue_gradients(step, precision, dy, dw, dx);
    }
    gemm_into(step, &dw.form, dw.of, dy, none, dw.into)?;
    gemm_into(step, &dx.form, dy, dx.of, none, dx.into)
}

/// The shape of `x w` and its form.
fn forward<'s>(op: &'static str, x: &impl Source<'s, f32>, w: &impl Source<'s, f32>) -> Result<(crate::Shape, Gemm)> {
    let ([rows, inner], w_shape) = (x.shape().as_rows(), w.shape());
    let &[k, n] = w_shape.extents() else {
        return Err(Error::misuse(op, "weights of shape [in, out]", w_shape.to_string()));
    };
    if inner != k {
        return Err(Error::misuse(
            op,
            format!("an input of shape [.., {k}] for weights {w_shape}"),
            x.shape().to_string(),
        ));
    }
    Ok((x.shape().with_last(n), Gemm::new(rows, n, k)))
}

#[track_caller]
fn queue<'s>(
    step: &Step<'s>,
    form: &Gemm,
    a: &impl Source<'s, f32>,
    b: &impl Source<'s, f32>,
    bias: Option<&impl Source<'s, f32>>,
    residual: Option<&impl Source<'s, f32>>,
    out: &mut impl Target<'s, f32>,
    epilogue: Epilogue<'_, 's>,
) -> Result<()> {
    let precision = form.precision_in(step);
    if precision != Precision::Ieee {
        return matmul_tensor::queue(step, precision, form, a, b, bias, residual, out, epilogue);
    }
    let words = Words::new(form)?;
    let outputs = Outputs::new(form, &words, bias, residual, out, epilogue);
    in_chunks(step, form, &words, outputs, |outputs| multiply(step, form, &words, a.slice(), b.slice(), outputs))
}

/// Queues the products: of all of k, or of each chunk.
#[track_caller]
fn multiply(
    step: &Step<'_>,
    form: &Gemm,
    words: &Words,
    a: Slice<'_, f32>,
    b: Slice<'_, f32>,
    outputs: Outputs<'_>,
) -> Result<()> {
    let Words { m, n, k, lda, ldb, chunk, batches, .. } = *words;
    let Gemm { stride_a, stride_b, stride_bias, .. } = *form;
    let Outputs { bias, c, out, pre, ldc, stride_c, beta, mut flags } = outputs;
    for (flag, set) in [(TRANSPOSE_A, form.transpose_a), (TRANSPOSE_B, form.transpose_b)] {
        flags |= if set { flag } else { 0 };
    }
    macro_rules! launch {
        ($kernel:ident) => {
            step.launch($kernel {
                a,
                b,
                bias,
                c,
                out,
                pre,
                m,
                n,
                k,
                lda,
                ldb,
                ldc,
                chunk,
                batches,
                stride_a,
                stride_b,
                stride_c,
                stride_bias,
                beta,
                flags,
            })
        };
    }
    macro_rules! launch_tile {
        ($tile:ident in $($kernel:ident: $known:ident,)*) => {
            match $tile {
                $($known => launch!($kernel),)*
                tile => Err(Error::misuse("matmul", "one of `ops::TILES`", format!("{tile:?}"))),
            }
        };
    }
    let device = step.device().description();
    if form.tile.is_none() && device.kind == DeviceKind::Emulated {
        return launch!(matmul_on_cpu);
    }
    let processors = device.processors as usize;
    let tile = form.tile.unwrap_or_else(|| fastest(words.extents(), words.matrices(), processors));
    kernels::matmul_tiles!(launch_tile! tile in)
}

/// The tile whose last block should end first, of so many matrices of `m` x `n`, sums of k products.
fn fastest(extents: [usize; 3], matrices: usize, processors: usize) -> Tile {
    let costs = |tile: Tile| ([tile.rows(), tile.cols()], tile.cost);
    split::fastest(TILES, extents, matrices, processors, costs)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The shapes of CrossAsset and of large squares, on an H200 and a GB10.
    #[test]
    fn the_fastest_tile_suits_the_shape() {
        for (m, n, k, on_h200, on_gb10) in [
            (12, 256, 1024_usize, [16, 16], [16, 16]),
            (256, 1024, 3072, [64, 128], [64, 128]),
            (3072, 256, 1024, [32, 64], [64, 128]),
            (3072, 1024, 256, [64, 128], [128, 256]),
            (1024, 1024, 1024, [64, 128], [64, 128]),
            (8192, 8192, 8192, [128, 256], [128, 256]),
        ] {
            for (processors, want) in [(132, on_h200), (48, on_gb10)] {
                let chunk = chunk(m, n, k);
                let tile = fastest([m, n, chunk], k.div_ceil(chunk), processors);
                assert_eq!([tile.rows(), tile.cols()], want, "{m} x {n}, k {k}, {processors} multiprocessors");
            }
        }
    }

    /// Few outputs and long k, as in the gradients of weights; and the number of chunks stays within a grid.
    #[test]
    fn k_is_split_where_outputs_are_few() {
        for ([m, n, k], want) in [
            ([1024, 256, 3072], 384),
            ([256, 256, 3072], 256),
            ([193, 256, 256], 256),
            ([12, 256, 1024], 256),
            ([256, 1024, 12], 12),
            ([12, 256, 511], 511),
            ([12, 256, 513], 320),
            ([1024, 256, 49152], 6144),
            ([256, 3, 1 << 20], 1 << 14),
            ([1024, 1024, 1024], 1024),
            ([0, 3, 4096], 256),
            ([3, 4, 0], 1),
        ] {
            assert_eq!(chunk(m, n, k), want, "[{m}, {k}] [{k}, {n}]");
        }
    }
}
