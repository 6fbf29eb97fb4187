//! Matrix multiply by matrix instructions: what [`gemm_into`](super::gemm_into) does in a precision below f32.

use super::matmul::{Epilogue, Gemm};
use super::precision::{Precision, Stored};
use crate::error::{Error, Result};
use crate::launch::{Source, Target};
use crate::step::Step;
use cuda_std::launch::{PointerMut, Slice};
use kernels::matmul::{GELU, KEEP, TRANSPOSE_A, TRANSPOSE_B};
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
    let word = |what, extent: usize| {
        u32::try_from(extent).map_err(|_| Error::misuse("matmul", format!("`{what}` below 2^32"), extent.to_string()))
    };
    let Gemm { m, n, k, batches, .. } = *form;
    let stored = |transposed: bool, [rows, cols]: [usize; 2], ld, stride| {
        let [rows, cols] = if transposed { [cols, rows] } else { [rows, cols] };
        Stored { rows, cols, ld, batches, stride }
    };
    let stored_a = stored(form.transpose_a, [m, k], form.lda, form.stride_a);
    let stored_b = stored(form.transpose_b, [k, n], form.ldb, form.stride_b);
    let mut flags = 0;
    for (flag, set) in [(TRANSPOSE_A, form.transpose_a), (TRANSPOSE_B, form.transpose_b)] {
        flags |= if set { flag } else { 0 };
    }
    let (own, out) = out.in_place();
    let pre = match epilogue {
        Epilogue::Store => PointerMut::empty(),
        Epilogue::Gelu { pre } => {
            flags |= GELU | KEEP;
            pre.out()
        }
    };
    let tile = form.tensor_tile.unwrap_or_else(|| fastest(form, step.description().processors as usize));
    macro_rules! launch {
        ($a:ident in $stored_a:ident, $b:ident in $stored_b:ident: $($kernel:ident: $tile:ident,)*) => {
            match tile {
                $($tile => step.launch($kernel {
                    a: $a.slice(),
                    b: $b.slice(),
                    bias: bias.map_or_else(Slice::empty, Source::slice),
                    c: residual.map_or(own, Source::pointer),
                    out,
                    pre,
                    m: word("m", m)?,
                    n: word("n", n)?,
                    k: word("k", k)?,
                    lda: word("lda", $stored_a.ld)?,
                    ldb: word("ldb", $stored_b.ld)?,
                    ldc: word("ldc", form.ldc)?,
                    batches: word("batches", batches)?,
                    stride_a: $stored_a.stride,
                    stride_b: $stored_b.stride,
                    stride_c: form.stride_c,
                    stride_bias: form.stride_bias,
                    beta: form.beta,
                    flags,
                }),)*
                tile => Err(Error::misuse("matmul", "one of `ops::TENSOR_TILES`", format!("{tile:?}"))),
            }
        };
    }
    match precision {
        Precision::Bf16 => {
            let (a, b) = (stored_a.round(step, a)?, stored_b.round(step, b)?);
            let (stored_a, stored_b) = (stored_a.rounded(), stored_b.rounded());
            kernels::matmul_tensor_tiles!(launch!(bf16 a in stored_a, b in stored_b:))
        }
        _ => kernels::matmul_tensor_tiles!(launch!(tf32 a in stored_a, b in stored_b:)),
    }
}

/// The tile that should be done first: fewest rounds of blocks, each as long as its stages.
fn fastest(form: &Gemm, processors: usize) -> Tile {
    let cost = |tile: &&Tile| {
        let along = |extent: usize, tile: u32| extent.div_ceil(tile as usize);
        let blocks = along(form.m, tile.rows()).saturating_mul(along(form.n, tile.cols())).saturating_mul(form.batches);
        blocks.div_ceil(processors).saturating_mul(tile.cycles as usize)
    };
    *TILES.iter().min_by_key(cost).expect("there are tiles")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The shapes of CrossAsset and of large squares, on an H200.
    #[test]
    fn the_fastest_tile_suits_the_shape() {
        for (m, n, want) in [
            (256, 1024, T64X64),
            (3072, 256, T64X128),
            (1024, 1024, T64X128),
            (2048, 2048, T128X256),
            (8192, 8192, T128X256),
        ] {
            assert_eq!(fastest(&Gemm::new(m, n, 256), 132), want, "{m} x {n}");
        }
    }
}
