//! Multiplies of f32 tensors in TF32 by `wgmma`.
//!
//! One operand is rounded into images of shared memory first. The other is read as it is stored, so
//! its rows must begin on 16 bytes. Rounding costs a read and a write of the operand, so the
//! smaller one is packed. Products with neither operand so aligned use [`mma`](super::mma), and so
//! do products of few outputs, for which its smaller tiles are faster.
//!
//! Invariant: the choice depends only on the product and the device's matrix instruction.

use super::gemm::{Epilogue, Gemm, Gradient};
use super::split::{GemmExtents, Outputs, split_or_whole};
use super::tile::fastest;
use crate::error::Result;
use crate::step::Step;
use crate::tensor::{Source, Target, Tensor};
use cuda_std::launch::Slice;
use kernels::matmul_bf16::OperandLayout;
use kernels::matmul_mma::k_per_split;
use kernels::matmul_wgmma_tf32::{Packing, SWAP, TILES, matmul_wgmma_tf32, pack_tf32_stages, stage_words};

/// The least parts of 128 x 128 outputs and a split of k in a product by `wgmma`. On an H100,
/// `mma.sync` was 20 to 40 % faster with up to 28, and 19 % faster to 16 % slower with 48 to
/// 64.
const LEAST: usize = 40;

/// The operand that is packed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Packed {
    Left,
    Right,
}

/// An operand, seen as rows of k elements.
#[derive(Clone, Copy)]
struct Operand {
    rows: usize,
    ld: usize,
    stride: usize,
    /// True if consecutive k, not rows, are `ld` elements apart.
    is_across: bool,
}

impl Packed {
    /// Returns the operand that `wgmma` needs packed in this product. None if the device or the
    /// product uses `mma.sync`.
    pub(super) fn of(step: &Step<'_>, form: &Gemm) -> Option<Self> {
        let is_possible = step.description().has_wgmma && form.mma_tile.is_none();
        if is_possible && parts(form) >= LEAST { Self::cheapest(form) } else { None }
    }

    /// Returns the operand with the fewest elements that leaves one whose rows begin on 16 bytes.
    fn cheapest(form: &Gemm) -> Option<Self> {
        let is_aligned = |operand: Operand| {
            let batches = if form.batches > 1 { operand.stride } else { 0 };
            (operand.ld | batches).is_multiple_of(4)
        };
        let [left, right] = [Self::Left, Self::Right].map(|packed| {
            let can_leave = is_aligned(packed.streamed(form));
            can_leave.then(|| packed.operand(form).rows.saturating_mul(packed.operand(form).distinct(form)))
        });
        match (left, right) {
            (Some(left), Some(right)) if left < right => Some(Self::Left),
            (_, Some(_)) => Some(Self::Right),
            (Some(_), None) => Some(Self::Left),
            (None, None) => None,
        }
    }

    /// Returns the packed operand.
    fn operand(self, form: &Gemm) -> Operand {
        match self {
            Self::Left => Operand { rows: form.m, ld: form.lda, stride: form.stride_a, is_across: form.transpose_a },
            Self::Right => Operand { rows: form.n, ld: form.ldb, stride: form.stride_b, is_across: !form.transpose_b },
        }
    }

    /// Returns the other operand.
    fn streamed(self, form: &Gemm) -> Operand {
        if self == Self::Left { Self::Right.operand(form) } else { Self::Left.operand(form) }
    }

    /// Returns the packed one of two.
    fn pick<T>(self, [left, right]: [T; 2]) -> T {
        if self == Self::Left { left } else { right }
    }
}

/// The parts of 128 x 128 outputs and a split of k in a product.
fn parts(&Gemm { m, n, k, batches, .. }: &Gemm) -> usize {
    let splits = k.div_ceil(k_per_split(m, n, k));
    m.div_ceil(128).saturating_mul(n.div_ceil(128)).saturating_mul(splits).saturating_mul(batches)
}

impl Operand {
    /// The number of matrices stored: one for all batches if the stride is 0.
    fn distinct(self, form: &Gemm) -> usize {
        if self.stride == 0 { form.batches.min(1) } else { form.batches }
    }
}

/// Packs the right or left operands of two products in one launch. Returns the images, one row for
/// each matrix.
#[track_caller]
fn pack<'s>(step: &Step<'s>, operands: [Option<(&Gemm, Packed, Slice<'_, f32>)>; 2]) -> Result<[Tensor<'s, u32>; 2]> {
    let room = |operand: &Option<(&Gemm, Packed, Slice<'_, f32>)>| match operand {
        None => step.empty([0, 0]),
        Some((form, packed, _)) => {
            let operand = packed.operand(form);
            step.empty([operand.distinct(form), stage_words([operand.rows, form.k])])
        }
    };
    let mut images = [room(&operands[0])?, room(&operands[1])?];
    let mut outputs = images.iter_mut();
    let packings = operands.map(|operand| {
        let out = outputs.next().expect("as many as operands").out();
        let Some((form, packed, values)) = operand else { return Packing::default() };
        let of = packed.operand(form);
        let Operand { rows, ld, stride, is_across } = of;
        let (values, out, batches) = (Some(values), Some(out), of.distinct(form));
        Packing { values, out, rows, k: form.k, ld, batches, stride, is_across }
    });
    step.launch(pack_tf32_stages::of(packings))?;
    Ok(images)
}

/// Queues one multiply.
#[track_caller]
pub(super) fn queue<'s>(
    step: &Step<'s>,
    packed: Packed,
    form: &Gemm,
    a: &impl Source<'s, f32>,
    b: &impl Source<'s, f32>,
    bias: Option<&impl Source<'s, f32>>,
    c: Option<&impl Source<'s, f32>>,
    out: &mut impl Target<'s, f32>,
    epilogue: Epilogue<'_, 's, f32>,
) -> Result<()> {
    let extents = GemmExtents::new(form, k_per_split)?;
    let outputs = Outputs::new(form, &extents, bias, c, out, epilogue);
    step.workspace(|step| {
        let [images, _] = pack(step, [Some((form, packed, packed.pick([a.slice(), b.slice()]))), None])?;
        multiply(step, form, &extents, packed, [a.slice(), b.slice()], &images, outputs)
    })
}

/// Queues the multiplies of a backward pass, `dw = x^T dy` and `dx = dy w^T`, and packs an operand
/// of each in one launch.
#[track_caller]
pub(super) fn queue_gradients<'s>(
    step: &Step<'s>,
    packed: [Packed; 2],
    dy: &impl Source<'s, f32>,
    Gradient { form: for_dw, of: x, into: dw }: Gradient<'_, impl Source<'s, f32>, impl Target<'s, f32>>,
    Gradient { form: for_dx, of: w, into: dx }: Gradient<'_, impl Source<'s, f32>, impl Target<'s, f32>>,
) -> Result<()> {
    let none = None::<&Tensor<'s>>;
    let extents = [GemmExtents::new(&for_dw, k_per_split)?, GemmExtents::new(&for_dx, k_per_split)?];
    let to_dw = Outputs::new(&for_dw, &extents[0], none, none, dw, Epilogue::Store);
    let to_dx = Outputs::new(&for_dx, &extents[1], none, none, dx, Epilogue::Store);
    step.workspace(|step| {
        let of_dw = packed[0].pick([x.slice(), dy.slice()]);
        let of_dx = packed[1].pick([dy.slice(), w.slice()]);
        let images = pack(step, [Some((&for_dw, packed[0], of_dw)), Some((&for_dx, packed[1], of_dx))])?;
        multiply(step, &for_dw, &extents[0], packed[0], [x.slice(), dy.slice()], &images[0], to_dw)?;
        multiply(step, &for_dx, &extents[1], packed[1], [dy.slice(), w.slice()], &images[1], to_dx)
    })
}

/// Queues the products over all of k, or over each split-K part.
#[track_caller]
fn multiply(
    step: &Step<'_>,
    form: &Gemm,
    extents: &GemmExtents,
    packed: Packed,
    [left, right]: [Slice<'_, f32>; 2],
    images: &Tensor<'_, u32>,
    outputs: Outputs<'_, f32>,
) -> Result<()> {
    let GemmExtents { m, n, k, lda, ldb, k_per_split, batches, .. } = *extents;
    let [rows, cols, of_a_split] = extents.of_a_split();
    // A tile's rows are those of the operand that is not packed.
    let (stored, lda, rows, cols, swap) = match packed {
        Packed::Left => (right, ldb, cols, rows, SWAP),
        Packed::Right => (left, lda, rows, cols, 0),
    };
    let streamed = packed.streamed(form);
    let layout = if streamed.is_across { OperandLayout::Transposed } else { OperandLayout::Plain };
    let stride_b = if packed.operand(form).stride == 0 { 0 } else { images.shape().as_rows()[1] };
    let blocks = step.description().processors;
    let tile = fastest(&TILES, [rows, cols, of_a_split], extents.matrices(), blocks as usize);
    let launch = |outputs: Outputs<'_, f32>| {
        let Outputs { bias, c, out, pre, ldc, stride_c, alpha, beta, flags } = outputs;
        step.launch(matmul_wgmma_tf32 {
            variant: (layout, tile),
            a: stored,
            b: images.slice(),
            bias,
            c,
            out,
            pre,
            m,
            n,
            k,
            lda,
            ldc,
            k_per_split,
            batches,
            blocks,
            stride_a: streamed.stride,
            stride_b,
            stride_c,
            stride_bias: form.stride_bias,
            alpha,
            beta,
            flags: flags | swap,
        })
    };
    split_or_whole(step, form, extents, outputs, launch, launch)
}

#[cfg(test)]
mod tests {
    use super::*;
    use kernels::matmul_wgmma_tf32::{T128X128, T128X256};

    /// Tries the shapes of GPT-2, of CrossAsset and of large squares, on an H100.
    #[test]
    fn the_fastest_tile_suits_the_shape() {
        for (rows, cols, k, matrices, want) in [
            (16384, 768, 768, 1, T128X256),
            (16384, 3072, 768, 1, T128X256),
            (3072, 768, 3328, 5, T128X256),
            (3072, 1024, 256, 1, T128X256),
            (3072, 256, 1024, 1, T128X128),
            (1024, 1024, 1024, 1, T128X128),
            (2048, 2048, 2048, 1, T128X256),
        ] {
            assert_eq!(
                fastest(&TILES, [rows, cols, k], matrices, 132),
                want,
                "{rows} x {cols}, {matrices} times k {k}"
            );
        }
    }

    /// The smaller operand is packed, unless the other's rows do not begin on 16 bytes.
    #[test]
    fn smaller_operand_is_packed() {
        let forward = Gemm::new(16384, 3072, 768);
        let batched = Gemm { batches: 8, stride_a: 16 * 64, ..Gemm::new(16, 512, 64) };
        for (form, want) in [
            (forward, Some(Packed::Right)),
            (Gemm::new(768, 3072, 16384).transpose_a(), Some(Packed::Left)),
            (Gemm::new(3072, 768, 16384).transpose_a(), Some(Packed::Right)),
            (Gemm { ldb: 3073, ..Gemm::new(768, 3072, 16384).transpose_a() }, Some(Packed::Right)),
            (Gemm { lda: 769, ..forward }, Some(Packed::Left)),
            (Gemm { lda: 769, ldb: 3073, ..forward }, None),
            (Gemm { stride_b: 64 * 512, ..batched }, Some(Packed::Left)),
            (Gemm { stride_b: 64 * 512 + 1, ..batched }, Some(Packed::Right)),
            (Gemm { stride_b: 0, n: 96, ldb: 96, ..batched }, Some(Packed::Right)),
        ] {
            assert_eq!(Packed::cheapest(&form), want, "{form:?}");
        }
    }

    #[test]
    fn few_outputs_have_few_parts() {
        for (form, want) in [
            (Gemm::new(512, 512, 512), 32),
            (Gemm::new(3072, 256, 1024), 48),
            (Gemm::new(256, 1024, 3072), 64),
            (Gemm { batches: 12, ..Gemm::new(256, 130, 64) }, 48),
        ] {
            assert_eq!(parts(&form), want, "{form:?}");
        }
    }
}
