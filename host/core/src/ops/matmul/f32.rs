//! Multiplies in f32: one chain of fused multiply-adds for each output, whatever the tile.

use super::gemm::{Gemm, Product};
use super::split::{GemmExtents, Outputs, split_or_whole};
use super::tile::{fastest, tile_of};
use crate::device::DeviceKind;
use crate::error::Result;
use crate::step::Step;
use crate::tensor::{Source, Target};
use cuda_std::launch::Slice;
use kernels::matmul::{ON_CPU, TILES, TRANSPOSE_A, TRANSPOSE_B, matmul};
use kernels::transpose::transpose;

/// The size in floats up to which B is transposed first: 64 MiB of workspace.
const TURNED_AT_MOST: usize = 1 << 24;
/// The rows of A, and the total number of products, from which a transpose of B pays off. It saves
/// some 8 % of the products' time. It costs one launch, which takes 4 us on the host and moves B
/// twice. On a GB10, whose memory is slower, cost and saving are equal at some 4,500 rows.
const PRETRANSPOSE_MIN_ROWS: [usize; 2] = [1 << 12, 1 << 33];

#[track_caller]
pub(super) fn queue(step: &Step<'_>, product: Product<'_, f32, f32>) -> Result<()> {
    let (form, b) = (product.form, product.b);
    if !should_pretranspose_b(&form, b.len()) {
        return products(step, product);
    }
    let Gemm { n, k, .. } = form;
    step.workspace(|step| {
        let mut turned = step.empty([k, n])?;
        step.launch(transpose { x: b, rows: n, cols: k, y: turned.out() })?;
        let form = Gemm { transpose_b: false, ldb: n, ..form };
        products(step, Product { form, b: turned.slice(), ..product })
    })
}

/// True if B, of this many floats, should be transposed before the products. A block copies a B
/// stored along k float by float, and a B stored across k by vectors of four. The transpose changes
/// no bit.
fn should_pretranspose_b(form: &Gemm, floats: usize) -> bool {
    let Gemm { m, n, k, .. } = *form;
    let products = m.saturating_mul(n).saturating_mul(k);
    let whole = form.batches == 1 && form.ldb == k && n.checked_mul(k) == Some(floats) && floats <= TURNED_AT_MOST;
    // A caller that names a tile wants to measure that tile.
    form.transpose_b
        && form.tile.is_none()
        && whole
        && m >= PRETRANSPOSE_MIN_ROWS[0]
        && products >= PRETRANSPOSE_MIN_ROWS[1]
}

/// Queues the products of operands as they are stored.
#[track_caller]
fn products(step: &Step<'_>, product: Product<'_, f32, f32>) -> Result<()> {
    let Product { form, a, b, .. } = product;
    let extents = GemmExtents::new(step, &form, kernels::matmul::k_per_split)?;
    let multiply = |outputs: Outputs<'_, f32>| multiply(step, &form, &extents, a, b, outputs);
    split_or_whole(step, &form, &extents, Outputs::of(product, &extents), multiply, multiply)
}

/// Queues the product over all of k, or over each split-K part.
#[track_caller]
fn multiply(
    step: &Step<'_>,
    form: &Gemm,
    extents: &GemmExtents,
    a: Slice<'_, f32>,
    b: Slice<'_, f32>,
    outputs: Outputs<'_, f32>,
) -> Result<()> {
    let GemmExtents { product, lda, ldb, .. } = *extents;
    let Gemm { stride_a, stride_b, .. } = *form;
    let Outputs { bias, c, out, pre, mut epilogue } = outputs;
    for (flag, set) in [(TRANSPOSE_A, form.transpose_a), (TRANSPOSE_B, form.transpose_b)] {
        epilogue.flags |= if set { flag } else { 0 };
    }
    let device = step.device().description();
    let tile = tile_of(form.tile, &TILES, "ops::TILES", || match device.kind {
        DeviceKind::Emulated => ON_CPU,
        _ => fastest(&TILES, extents.of_a_split(), extents.matrices(), device.processors as usize),
    })?;
    step.launch(matmul { tile, a, b, bias, c, out, pre, extents: product, lda, ldb, stride_a, stride_b, epilogue })
}

#[cfg(test)]
mod tests {
    use super::*;
    use kernels::matmul::k_per_split;

    /// Tries the shapes of CrossAsset and of large squares, on an H200 and a GB10.
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
                let k_per_split = k_per_split(m, n, k);
                let tile = fastest(&TILES, [m, n, k_per_split], k.div_ceil(k_per_split), processors);
                assert_eq!([tile.rows(), tile.cols()], want, "{m} x {n}, k {k}, {processors} multiprocessors");
            }
        }
    }

    /// Tries few outputs with a long k, as in weight gradients, and many outputs in few waves of
    /// tiles. The number of split-K parts stays within a grid.
    #[test]
    fn split_k_is_used_if_faster() {
        for ([m, n, k], want) in [
            ([1024, 256, 3072], 384),
            ([256, 256, 3072], 384),
            ([768, 768, 16384], 1856),
            ([768, 3072, 16384], 3328),
            ([2368, 384, 23296], 3328),
            ([3072, 256, 1024], 1024),
            ([193, 256, 256], 256),
            ([12, 256, 1024], 256),
            ([256, 1024, 12], 12),
            ([12, 256, 511], 511),
            ([12, 256, 513], 320),
            ([1024, 256, 49152], 6144),
            ([256, 3, 1 << 20], 31_808),
            ([1024, 1024, 1024], 1024),
            ([4096, 4096, 4096], 4096),
            ([0, 3, 4096], 256),
            ([3, 4, 0], 1),
        ] {
            assert_eq!(k_per_split(m, n, k), want, "[{m}, {k}] [{k}, {n}]");
        }
    }
}
