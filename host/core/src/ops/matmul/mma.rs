//! Matrix multiply on tensor cores: [`gemm_into`](super::gemm_into) in TF32, by `mma.sync` unless
//! [`tf32_wgmma`] multiplies.

use super::super::precision::{Fragments, Matrices, Unrounded, round};
use super::gemm::{Gemm, Gradient, Product};
use super::split::{GemmExtents, Outputs, split_or_whole};
use super::tf32_wgmma::{self, uses_wgmma};
use super::tile::{fastest, tile_of};
use crate::error::Result;
use crate::precision::Precision;
use crate::step::Step;
use crate::tensor::{Source, Target, Tensor};
use cuda_std::launch::Slice;
use kernels::matmul_mma::{TILES, k_per_split, matmul_mma};
use kernels::mma::Side;

impl Gemm {
    /// The precision of the multiply: its own or the step's, if it is large enough or names a tile,
    /// otherwise f32. A product and its gradients have the same precision, because they have the
    /// same extents in another order. In a batch-invariant step few rows do not count, so the
    /// gradient of weights for few rows, which are its k, may be f32.
    pub(super) fn precision_in(&self, step: &Step<'_>) -> Precision {
        let is_small = self.rows_of_split(step).min(self.n).min(self.k) < Precision::LEAST && self.mma_tile.is_none();
        if is_small { Precision::F32 } else { self.precision.unwrap_or_else(|| step.precision()) }
    }

    /// Describes A for rounding. k lies along its rows or, when transposed, across them.
    fn round_left<'a>(&self, values: Slice<'a, f32>) -> Unrounded<'a> {
        let ([rows, cols], along, across) = match self.transpose_a {
            false => ([self.m, self.k], Some(Side::Left), None),
            true => ([self.k, self.m], None, Some(Side::Left)),
        };
        let matrices = Matrices { rows, cols, ld: self.lda, batches: self.batches, stride: self.stride_a };
        Unrounded { values: Some(values), matrices, along, across }
    }

    /// Describes B for rounding. B is transposed independently of A.
    fn round_right<'a>(&self, values: Slice<'a, f32>) -> Unrounded<'a> {
        let ([rows, cols], along, across) = match self.transpose_b {
            false => ([self.k, self.n], None, Some(Side::Right)),
            true => ([self.n, self.k], Some(Side::Right), None),
        };
        let matrices = Matrices { rows, cols, ld: self.ldb, batches: self.batches, stride: self.stride_b };
        Unrounded { values: Some(values), matrices, along, across }
    }
}

/// Queues one multiply.
#[track_caller]
pub(super) fn queue(step: &Step<'_>, product: Product<'_, f32, f32>) -> Result<()> {
    let Product { form, a, b, .. } = product;
    if uses_wgmma(step, &form) {
        return tf32_wgmma::queue(step, product);
    }
    let extents = GemmExtents::new(step, &form, k_per_split)?;
    let outputs = Outputs::of(product, &extents);
    step.workspace(|step| {
        let operands = [form.round_left(a), form.round_right(b), Unrounded::default()];
        let [left, right, _] = round(step, operands)?;
        multiply(step, &form, &extents, [&left, &right], outputs)
    })
}

/// Queues the multiplies of a backward pass, `dw = x^T dy` and `dx = dy w^T`. If both use
/// `mma.sync`, it rounds dy only once.
#[track_caller]
pub(super) fn queue_gradients<'s>(
    step: &Step<'s>,
    dy: &impl Source<'s, f32>,
    dw: Gradient<'_, impl Source<'s, f32>, impl Target<'s, f32>>,
    dx: Gradient<'_, impl Source<'s, f32>, impl Target<'s, f32>>,
) -> Result<()> {
    let Gradient { form: for_dw, of: x, into: dw } = dw;
    let Gradient { form: for_dx, of: w, into: dx } = dx;
    if uses_wgmma(step, &for_dw) || uses_wgmma(step, &for_dx) {
        queue(step, Product::new(for_dw, x, dy, dw))?;
        return queue(step, Product::new(for_dx, dy, w, dx));
    }
    let extents = [GemmExtents::new(step, &for_dw, k_per_split)?, GemmExtents::new(step, &for_dx, k_per_split)?];
    let to_dw = Outputs::of(Product::new(for_dw, x, dy, dw), &extents[0]);
    let to_dx = Outputs::of(Product::new(for_dx, dy, w, dx), &extents[1]);
    let of_dy = Unrounded { along: for_dx.round_left(dy.slice()).along, ..for_dw.round_right(dy.slice()) };
    step.workspace(|step| {
        let operands = [for_dw.round_left(x.slice()), of_dy, for_dx.round_right(w.slice())];
        let [x, dy, w] = round(step, operands)?;
        multiply(step, &for_dw, &extents[0], [&x, &dy], to_dw)?;
        multiply(step, &for_dx, &extents[1], [&dy, &w], to_dx)
    })
}

/// Queues the products of rounded operands over all of k, or over each split-K part.
#[track_caller]
fn multiply(
    step: &Step<'_>,
    form: &Gemm,
    extents: &GemmExtents,
    [left, right]: [&Fragments<'_>; 2],
    outputs: Outputs<'_, f32>,
) -> Result<()> {
    let a = if form.transpose_a { &left.across } else { &left.along };
    let b = if form.transpose_b { &right.along } else { &right.across };
    // The stride from one matrix's fragments to the next, or 0 if all batches share one matrix.
    let stride =
        |stride: usize, fragments: &Tensor<'_, u32>| if stride == 0 { 0 } else { fragments.shape().as_rows()[1] };
    let (stride_a, stride_b) = (stride(form.stride_a, a), stride(form.stride_b, b));
    let launch = |outputs: Outputs<'_, f32>| {
        let Outputs { bias, c, out, pre, epilogue } = outputs;
        let processors = step.description().processors as usize;
        let tile = tile_of(form.mma_tile, &TILES, "ops::MMA_TILES", || {
            fastest(&TILES, extents.of_a_split(), extents.matrices(), processors)
        })?;
        step.launch(matmul_mma {
            tile,
            a: a.slice(),
            b: b.slice(),
            bias,
            c,
            out,
            pre,
            extents: extents.product,
            stride_a,
            stride_b,
            epilogue,
        })
    };
    split_or_whole(step, form, extents, outputs, launch, launch)
}

#[cfg(test)]
mod tests {
    use super::*;
    use kernels::matmul_mma::{T64X128, T128X128, T128X256};

    /// Tries the shapes of CrossAsset and of large squares, on an H200.
    #[test]
    fn the_fastest_tile_suits_the_shape() {
        for (m, n, k, matrices, want) in [
            (256, 1024, 384, 8, T128X128),
            (3072, 256, 1024, 1, T64X128),
            (3072, 1024, 256, 1, T64X128),
            (1024, 1024, 1024, 1, T64X128),
            (2048, 2048, 2048, 1, T128X256),
            (49152, 1024, 256, 1, T128X128),
            (49152, 256, 1024, 1, T128X128),
            (256, 1024, 6144, 8, T128X128),
            (8192, 8192, 8192, 1, T128X256),
        ] {
            assert_eq!(fastest(&TILES, [m, n, k], matrices, 132), want, "{m} x {n}, {matrices} times k {k}");
        }
    }
}
