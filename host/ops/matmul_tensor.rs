//! Matrix multiply by matrix instructions: what [`gemm_into`](super::gemm_into) does in a precision below f32.

use super::matmul::{Epilogue, Gemm};
use super::precision::{Precision, Stored};
use super::split::{Outputs, Words, blocks, in_chunks, time};
use crate::error::{Error, Result};
use crate::launch::{Source, Target};
use crate::step::Step;
use cuda_std::launch::Slice;
use kernels::matmul::{TRANSPOSE_A, TRANSPOSE_B};
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
    let Gemm { m, n, k, batches, .. } = *form;
    let stored = |transposed: bool, [rows, cols]: [usize; 2], ld, stride| {
        let [rows, cols] = if transposed { [cols, rows] } else { [rows, cols] };
        Stored { rows, cols, ld, batches, stride }
    };
    let stored_a = stored(form.transpose_a, [m, k], form.lda, form.stride_a);
    let stored_b = stored(form.transpose_b, [k, n], form.ldb, form.stride_b);
    let words = Words::new(form)?;
    let (own, out) = out.in_place();
    let (pre, flags) = epilogue.out();
    let outputs = Outputs {
        bias: bias.map_or_else(Slice::empty, Source::slice),
        c: residual.map_or(own, Source::pointer),
        out,
        pre,
        ldc: words.ldc,
        stride_c: form.stride_c,
        beta: form.beta,
        flags,
    };
    macro_rules! launch {
        ($a:ident in $stored_a:ident, $b:ident in $stored_b:ident, $outputs:ident: $($kernel:ident: $tile:ident,)*) => {{
            let Words { m, n, k, chunk, batches, .. } = words;
            let Outputs { bias, c, out, pre, ldc, stride_c, beta, mut flags } = $outputs;
            for (flag, set) in [(TRANSPOSE_A, form.transpose_a), (TRANSPOSE_B, form.transpose_b)] {
                flags |= if set { flag } else { 0 };
            }
            let matrices = batches as usize * k.div_ceil(chunk).max(1) as usize;
            let processors = step.description().processors as usize;
            match form.tensor_tile.unwrap_or_else(|| fastest([form.m, form.n], matrices, processors)) {
                $($tile => step.launch($kernel {
                    a: $a.slice(),
                    b: $b.slice(),
                    bias,
                    c,
                    out,
                    pre,
                    m,
                    n,
                    k,
                    lda: $stored_a.ld as u32,
                    ldb: $stored_b.ld as u32,
                    ldc,
                    chunk,
                    batches,
                    stride_a: $stored_a.stride,
                    stride_b: $stored_b.stride,
                    stride_c,
                    stride_bias: form.stride_bias,
                    beta,
                    flags,
                }),)*
                tile => Err(Error::misuse("matmul", "one of `ops::TENSOR_TILES`", format!("{tile:?}"))),
            }
        }};
    }
    if precision == Precision::Tf32 {
        return in_chunks(step, form, &words, outputs, |outputs| {
            kernels::matmul_tensor_tiles!(launch!(tf32 a in stored_a, b in stored_b, outputs:))
        });
    }
    let (a, b) = (stored_a.round(step, a)?, stored_b.round(step, b)?);
    let (stored_a, stored_b) = (stored_a.rounded(), stored_b.rounded());
    in_chunks(step, form, &words, outputs, |outputs| {
        kernels::matmul_tensor_tiles!(launch!(bf16 a in stored_a, b in stored_b, outputs:))
    })
}

/// The tile whose last block should end first, of so many matrices of `m` x `n`.
fn fastest(outputs: [usize; 2], matrices: usize, processors: usize) -> Tile {
    let time = |tile: &&Tile| {
        let blocks = blocks(outputs, [tile.rows(), tile.cols()]).saturating_mul(matrices);
        time(blocks, processors, [tile.latency, tile.cycles])
    };
    *TILES.iter().min_by_key(time).expect("there are tiles")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The shapes of CrossAsset and of large squares, on an H200.
    #[test]
    fn the_fastest_tile_suits_the_shape() {
        for (m, n, want) in [
            (256, 1024, T64X64),
            (3072, 256, T64X64),
            (3072, 1024, T64X128),
            (1024, 1024, T64X64),
            (2048, 2048, T128X256),
            (8192, 8192, T128X256),
        ] {
            assert_eq!(fastest([m, n], 1, 132), want, "{m} x {n}");
        }
    }
}
