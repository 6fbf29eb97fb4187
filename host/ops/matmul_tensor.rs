//! Matrix multiply by matrix instructions: what [`gemm_into`](super::gemm_into) does in a precision below f32.

use super::matmul::{Epilogue, Gemm};
use super::precision::{Matrices, Precision, round_both};
use super::split::{self, Outputs, Words, in_chunks};
use crate::error::{Error, Result};
use crate::launch::{Source, Target};
use crate::step::Step;
use kernels::matmul_tensor::*;

/// Rows and columns of an output below which a matrix instruction would mostly work on padding.
const LEAST: usize = 16;

impl Gemm {
    /// The precision in which the multiply is done: its own, or the step's, where it is large enough.
    pub(super) fn precision_in(&self, step: &Step<'_>) -> Precision {
        if self.m.min(self.n) < LEAST { Precision::Ieee } else { self.precision.unwrap_or_else(|| step.precision()) }
    }
}

#[track_caller]
pub(super) fn queue<'s>(
    step: &Step<'s>,
    precision: Precision,
    form: &Gemm,
    a: &impl Source<'s, f32>,
    b: &impl Source<'s, f32>,
    bias: Option<&impl Source<'s, f32>>,
    residual: Option<&impl Source<'s, f32>>,
    out: &mut impl Target<'s, f32>,
    epilogue: Epilogue<'_, 's>,
) -> Result<()> {
    let Gemm { m, n, k, batches, transpose_a, transpose_b, .. } = *form;
    // Both operands are wanted with k along their rows.
    let left = Matrices { rows: m, cols: k, ld: form.lda, batches, stride: form.stride_a, transposed: transpose_a };
    let right = Matrices { rows: n, cols: k, ld: form.ldb, batches, stride: form.stride_b, transposed: !transpose_b };
    let words = Words::new(form)?;
    let outputs = Outputs::new(form, &words, bias, residual, out, epilogue);
    step.workspace(|step| {
        let [a, b] = round_both(step, precision, [a.slice(), b.slice()], [left, right])?;
        in_chunks(step, form, &words, outputs, |outputs| {
            let Words { m, n, k, chunk, batches, .. } = words;
            let Outputs { bias, c, out, pre, ldc, stride_c, beta, flags } = outputs;
            let processors = step.description().processors as usize;
            let tile = form.tensor_tile.unwrap_or_else(|| fastest(words.extents(), words.matrices(), processors));
            macro_rules! launch {
                ($($kernel:ident: $tile:ident,)*) => {
                    match tile {
                        $($tile => step.launch($kernel {
                            a: a.slice(),
                            b: b.slice(),
                            bias,
                            c,
                            out,
                            pre,
                            m,
                            n,
                            k,
                            ldc,
                            chunk,
                            batches,
                            stride_a: left.stride(precision),
                            stride_b: right.stride(precision),
                            stride_c,
                            stride_bias: form.stride_bias,
                            beta,
                            flags,
                        }),)*
                        tile => Err(Error::misuse("matmul", "one of `ops::TENSOR_TILES`", format!("{tile:?}"))),
                    }
                };
            }
            if precision == Precision::Tf32 {
                kernels::matmul_tensor_tiles!(launch!(tf32))
            } else {
                kernels::matmul_tensor_tiles!(launch!(bf16))
            }
        })
    })
}

/// The tile whose last block should end first, of so many matrices of `m` x `n`, sums of k products.
fn fastest(extents: [usize; 3], matrices: usize, processors: usize) -> Tile {
    let costs = |tile: Tile| ([tile.rows(), tile.cols()], tile.cost);
    split::fastest(TILES, extents, matrices, processors, costs)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The shapes of CrossAsset and of large squares, on an H200.
    #[test]
    fn the_fastest_tile_suits_the_shape() {
        for (m, n, k, matrices, want) in [
            (256, 1024, 384, 8, T64X128),
            (3072, 256, 1024, 1, T64X128),
            (3072, 1024, 256, 1, T64X128),
            (1024, 1024, 1024, 1, T64X128),
            (2048, 2048, 2048, 1, T128X128),
            (49152, 1024, 256, 1, T64X128),
            (49152, 256, 1024, 1, T128X128),
            (256, 1024, 6144, 8, T128X128),
            (8192, 8192, 8192, 1, T128X256),
        ] {
            assert_eq!(fastest([m, n, k], matrices, 132), want, "{m} x {n}, {matrices} times k {k}");
        }
    }
}
