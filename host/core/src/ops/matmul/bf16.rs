//! Multiplies of BF16 tensors with tensor-core instructions: by `wgmma` if the device has it, else
//! by `mma.sync`. So are small products with an operand that `wgmma` would need copied first.

use super::super::{same_shape, sum_rows_into};
use super::aligned::{Operand, align, replaced};
use super::gemm::{BiasGradient, Gemm, Gradient, Product};
use super::split::{GemmExtents, Outputs, split_or_whole};
use super::tile::{fastest, tile_of};
use crate::error::{Error, Result};
use crate::step::Step;
use crate::tensor::{Source, Stored, Target, Tensor};
use cuda_std::launch::{Pointer, PointerMut, Slice};
use half::bf16;
use kernels::matmul::{EpilogueForm, ProductExtents, TRANSPOSE_B, sum_splits};
use kernels::matmul_bf16::{ADD_TO_SUMS, BIAS_GRAD, OperandLayout, TILES, k_per_split, matmul_bf16};
use kernels::matmul_wgmma::{self as wgmma, matmul_wgmma};
use kernels::wgmma::box_rows;

/// The least k, or the least parts of 128 x 128 outputs, of a multiply by `wgmma` if an operand
/// must be copied first. On an H100, `mma.sync` took 0.7 to 0.8 of the time with a k of 31 or 65
/// and up to 9 parts, and as long with 97 and 9 parts. It took longer with a k of 129, or with 289
/// parts.
const LEAST_K: usize = 96;
const LEAST_PARTS: usize = 132;

#[track_caller]
pub(super) fn queue<S: Stored>(step: &Step<'_>, product: Product<'_, bf16, S>) -> Result<()> {
    let Product { form, a, b, .. } = product;
    let extents = GemmExtents::new(step, &form, k_per_split)?;
    let whole = |outputs: Outputs<'_, S>| multiply(step, &form, &extents, a, b, outputs, None);
    let part = |outputs: Outputs<'_, f32>| multiply(step, &form, &extents, a, b, outputs, None);
    split_or_whole(step, &form, &extents, Outputs::of(product, &extents), whole, part)
}

/// `dpre = gelu'(pre) (dy w^T)`, for `y = gelu(pre) w`; `pre`, `dpre`: `[.., k]`, `w`: `[k, n]`,
/// `dy`: `[.., n]`.
///
/// Queued, one launch, like [`linear`](crate::ops::linear): GELU's derivative is the product's
/// epilogue, so the gradient of `gelu(pre)` is never stored. The result is rounded once, where the
/// product and [`gelu_backward`](crate::ops::launch::gelu_backward) round twice. This op is only
/// for BF16: in f32, use [`gelu_bias_backward`](crate::ops::launch::gelu_bias_backward), which also
/// sums the bias's gradient.
///
/// # Errors
/// [`Error::Misuse`] when extents differ; [`Error::ArenaFull`].
#[track_caller]
pub fn gelu_linear_backward<'s>(
    step: &Step<'s>,
    pre: &impl Source<'s, bf16>,
    w: &impl Source<'s, bf16>,
    dy: &impl Source<'s, bf16>,
) -> Result<Tensor<'s, bf16>> {
    const OP: &str = "gelu_linear_backward";
    let (shape, w_shape) = (pre.shape(), w.shape());
    let ([rows, inner], &[k, n]) = (shape.as_rows(), w_shape.extents()) else {
        return Err(Error::misuse(OP, "weights of shape [in, out]", w_shape.to_string()));
    };
    if inner != k {
        return Err(Error::misuse(OP, format!("`pre` of shape [.., {k}] for weights {w_shape}"), shape.to_string()));
    }
    same_shape(OP, shape.with_last(n), dy.shape())?;
    let (form, mut dpre) = (Gemm::new(rows, k, n).transpose_b(), step.empty(shape)?);
    queue(step, Product::new(form, dy, w, &mut dpre).c(Some(pre)).by_gelu_derivative())?;
    Ok(dpre)
}

/// Queues `dw = x^T dy`, and the sums of dy's columns if requested. The product reads all of dy, so
/// it sums them too.
#[track_caller]
pub(super) fn queue_weight_gradients<'s>(
    step: &Step<'s>,
    dy: &impl Source<'s, bf16>,
    dw: Gradient<'_, impl Source<'s, bf16>, impl Target<'s, f32>>,
    db: Option<BiasGradient<'_, impl Target<'s, f32>>>,
) -> Result<()> {
    weight_gradients(step, dy, dw, db, k_per_split)
}

/// Queues only the sums of dy's columns, with the bits that they have next to `dw = x^T dy`: the
/// product is computed for one column of x.
#[track_caller]
pub(super) fn queue_bias_gradient<'s>(
    step: &Step<'s>,
    dy: &impl Source<'s, bf16>,
    x: &impl Source<'s, bf16>,
    db: BiasGradient<'_, impl Target<'s, f32>>,
) -> Result<()> {
    let ([rows, inputs], [_, n]) = (x.shape().as_rows(), dy.shape().as_rows());
    if inputs == 0 {
        return sum_rows_into(step, dy, db.into, db.accumulate);
    }
    let form = Gemm { lda: inputs, ..Gemm::new(1, n, rows).transpose_a() };
    let mut row = step.empty::<f32>([1, n])?;
    let dw = Gradient { form, of: x, into: &mut row };
    weight_gradients(step, dy, dw, Some(db), |_, n, rows| k_per_split(inputs, n, rows))?;
    step.free(row);
    Ok(())
}

/// Queues [`queue_weight_gradients`], with splits of the k that `k_per_split` returns.
#[track_caller]
fn weight_gradients<'s>(
    step: &Step<'s>,
    dy: &impl Source<'s, bf16>,
    Gradient { form, of: x, into: dw }: Gradient<'_, impl Source<'s, bf16>, impl Target<'s, f32>>,
    db: Option<BiasGradient<'_, impl Target<'s, f32>>>,
    k_per_split: impl Fn(usize, usize, usize) -> usize,
) -> Result<()> {
    let Some(BiasGradient { into: db, accumulate }) = db else {
        return queue(step, Product::new(form, x, dy, dw));
    };
    let Gemm { m, n, batches, transpose_a, transpose_b, .. } = form;
    if db.shape().elements() != batches * n || !transpose_a || transpose_b {
        let expected = format!("a product x^T dy, and {} elements for the bias's gradient", batches * n);
        return Err(Error::misuse("matmul", expected, format!("{form:?}, and {}", db.shape())));
    }
    if m == 0 {
        // There is no product to compute the sums.
        return sum_rows_into(step, dy, db, accumulate);
    }
    let extents = GemmExtents::new(step, &form, k_per_split)?;
    let outputs = Outputs::of(Product::new(form, x, dy, dw), &extents);
    let (old, db) = db.in_place();
    let split_k = extents.splits();
    if split_k < 2 {
        let how = if accumulate { BIAS_GRAD | ADD_TO_SUMS } else { BIAS_GRAD };
        return multiply(step, &form, &extents, x.slice(), dy.slice(), outputs, Some((db, how)));
    }
    step.workspace(|step| {
        let mut partials = step.empty([batches * split_k as usize, n])?;
        let sums = partials.out();
        let part = |outputs: Outputs<'_, f32>| {
            multiply(step, &form, &extents, x.slice(), dy.slice(), outputs, Some((sums, BIAS_GRAD)))
        };
        split_or_whole(step, &form, &extents, outputs, |_| Ok(()), part)?;
        step.launch(sum_splits {
            partials: partials.slice(),
            bias: Slice::empty(),
            c: if accumulate { old } else { Pointer::empty() },
            out: db,
            pre: PointerMut::empty(),
            extents: ProductExtents { m: 1, ..extents.product },
            epilogue: EpilogueForm {
                stride_c: n,
                stride_bias: 0,
                ldc: extents.product.n,
                alpha: 1.0,
                beta: if accumulate { 1.0 } else { 0.0 },
                flags: 0,
            },
        })
    })
}

/// Queues the product over all of k, or over each split-K part. `sums`, if given, receives the sums
/// of B's columns, as its flags say.
#[track_caller]
fn multiply<S: Stored>(
    step: &Step<'_>,
    form: &Gemm,
    extents: &GemmExtents,
    a: Slice<'_, bf16>,
    b: Slice<'_, bf16>,
    outputs: Outputs<'_, S>,
    sums: Option<(PointerMut<'_, f32>, u32)>,
) -> Result<()> {
    let GemmExtents { product, lda, ldb, .. } = *extents;
    let Gemm { stride_a, stride_b, .. } = *form;
    let Outputs { bias, c, out, pre, mut epilogue } = outputs;
    epilogue.flags |= if form.transpose_b { TRANSPOSE_B } else { 0 };
    let (sums, how) = sums.unwrap_or((PointerMut::empty(), 0));
    epilogue.flags |= how;
    let layout = |is_transposed| if is_transposed { OperandLayout::Transposed } else { OperandLayout::Plain };
    let layouts = [layout(form.transpose_a), layout(form.transpose_b)];
    let processors = step.description().processors;
    macro_rules! launch {
        ($kernel:ident { $($own:ident: $value:expr),* }) => {
            step.launch($kernel {
                $($own: $value,)*
                bias,
                c,
                out,
                pre,
                sums,
                extents: product,
                epilogue,
            })
        };
    }
    if step.description().has_wgmma && form.bf16_tile.is_none() && uses_wgmma(form) {
        let tile = fastest(&wgmma::TILES, extents.of_a_split(), extents.matrices(), processors as usize);
        let operands = Operand::of(form, a, b);
        let launch = |[a, b]: [Operand<'_, bf16>; 2]| {
            launch!(matmul_wgmma {
                variant: (layouts, tile),
                a: a.map(box_rows::<bf16>(true)),
                b: b.map(box_rows::<bf16>(true)),
                steps_a: a.steps(),
                steps_b: b.steps(),
                blocks: processors
            })
        };
        if operands.iter().all(Operand::is_aligned) {
            return launch(operands);
        }
        return step.workspace(|step| {
            let copies = align(step, &operands)?;
            launch(replaced(&operands, &copies))
        });
    }
    let tile = tile_of(form.bf16_tile, &TILES, "ops::BF16_TILES", || {
        fastest(&TILES, extents.of_a_split(), extents.matrices(), processors as usize)
    })?;
    launch!(matmul_bf16 {
        variant: (layouts[0], tile),
        a: a,
        b: b,
        lda: lda,
        ldb: ldb,
        stride_a: stride_a,
        stride_b: stride_b
    })
}

/// True if a device with `wgmma` multiplies by it: if the rows of the operands are aligned, or
/// copies with aligned rows are worth their time.
fn uses_wgmma(form: &Gemm) -> bool {
    let Gemm { m, n, k, batches, .. } = *form;
    let parts = m.div_ceil(128).saturating_mul(n.div_ceil(128)).saturating_mul(batches);
    let is_large = k >= LEAST_K || (k > 0 && parts >= LEAST_PARTS);
    is_large || Operand::<bf16>::of(form, Slice::empty(), Slice::empty()).iter().all(Operand::is_aligned)
}

#[cfg(test)]
mod tests {
    use super::*;
    use kernels::matmul_bf16::{T64X64, T128X128, T128X256};

    /// Tries the shapes of GPT-2, of Llama 8B, of squares, and of layers whose tiles of 256 columns
    /// leave multiprocessors idle, on an H100.
    #[test]
    fn fastest_wgmma_tile_suits_the_shape() {
        for (m, n, k, want) in [
            (16384, 768, 768, wgmma::T128X256),
            (16384, 2304, 768, wgmma::T128X256),
            (4096, 6144, 4096, wgmma::T128X256),
            (2048, 2048, 2048, wgmma::T128X256),
            (768, 3072, 16384, wgmma::T128X192),
            (4288, 960, 2304, wgmma::T128X192),
            (2304, 960, 4288, wgmma::T128X192),
            (2560, 1856, 192, wgmma::T128X192),
            (2560, 192, 1856, wgmma::T128X128),
            (1024, 1024, 1024, wgmma::T128X64),
            (512, 1920, 832, wgmma::T128X64),
            (640, 128, 1920, wgmma::T128X64),
        ] {
            let k_per_split = k_per_split(m, n, k);
            let tile = fastest(&wgmma::TILES, [m, n, k_per_split], k.div_ceil(k_per_split), 132);
            assert_eq!(tile, want, "{m} x {n}, k {k}");
        }
    }

    /// Operands are copied unless the product is small.
    #[test]
    fn small_unaligned_products_use_mma_sync() {
        let with_rows = |lda| Gemm { lda, ..Gemm::new(64, 128, 64) };
        let batched = Gemm { batches: 3, stride_a: 64 * 64, ..with_rows(64) };
        for (form, want) in [
            (with_rows(64), true),
            (with_rows(65), false),
            (Gemm { m: 1, ..with_rows(65) }, true),
            (batched, true),
            (Gemm { stride_a: 64 * 64 + 1, ..batched }, false),
            (Gemm { stride_a: 64 * 64 + 1, batches: 132, ..batched }, true),
            (Gemm::new(31, 31, 95), false),
            (Gemm::new(31, 31, 97), true),
            (Gemm::new(2049, 2049, 33), true),
            (Gemm::new(4095, 4095, 0), true),
        ] {
            assert_eq!(uses_wgmma(&form), want, "{form:?}");
        }
    }

    /// Tries the shapes of CrossAsset, of GPT-2, of Llama-3.2-1B and of large squares, on an H100.
    /// `docs/lab/products.md` has their rates in both tiles.
    #[test]
    fn the_fastest_tile_suits_the_shape() {
        for (m, n, k, want) in [
            (256, 1024, 3072, T64X64),
            (12, 256, 1024, T64X64),
            (16384, 768, 768, T128X128),
            (16384, 2304, 768, T128X128),
            (16384, 3072, 768, T128X128),
            (16384, 768, 2304, T128X256),
            (16384, 768, 3072, T128X256),
            (2560, 50304, 768, T128X128),
            (2560, 768, 50304, T128X256),
            (768, 768, 16384, T128X256),
            (768, 3072, 16384, T128X128),
            (4096, 2048, 2048, T128X256),
            (4096, 8192, 2048, T128X256),
            (4096, 2048, 8192, T128X256),
            (8192, 8192, 8192, T128X256),
        ] {
            let k_per_split = k_per_split(m, n, k);
            let tile = fastest(&TILES, [m, n, k_per_split], k.div_ceil(k_per_split), 132);
            assert_eq!(tile, want, "{m} x {n}, k {k}");
        }
    }

    /// Two blocks of the tile for short k fit a GB10's multiprocessor: 65,536 registers, of which a
    /// thread has at most 255, and 100 KiB of shared memory, of which a block takes 1 KiB more.
    #[test]
    fn two_blocks_fit_a_gb10() {
        assert!(2 * (T128X128.shared_bytes() + 1024) <= 100 << 10);
        assert!(2 * T128X128.threads() * 256 <= 65_536);
    }

    #[test]
    fn split_k_needs_few_tiles() {
        for ([m, n, k], want) in [
            ([768, 3072, 16384], 4096),
            ([768, 768, 16384], 2368),
            ([768, 2304, 16384], 8192),
            ([1024, 256, 49152], 3072),
            ([256, 256, 3072], 512),
            ([16384, 768, 3072], 3072),
            ([2048, 2048, 2048], 2048),
            ([12, 256, 1024], 512),
            ([12, 256, 511], 511),
            ([0, 3, 4096], 512),
            ([3, 4, 0], 1),
            ([usize::MAX, usize::MAX, 1024], 1024),
        ] {
            assert_eq!(k_per_split(m, n, k), want, "[{m}, {k}] [{k}, {n}]");
        }
    }
}
