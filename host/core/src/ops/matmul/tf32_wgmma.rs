//! Multiplies of f32 tensors in TF32 by `wgmma`.
//!
//! The instruction reads two operands: B along k, and A stored either way. The rows of both begin
//! on 16 bytes. An operand with other rows, or a B across k, is copied to scratch first. A or B of
//! the product may be the instruction's B, so only products of two operands across k, or with other
//! rows, need a copy. If such a product has few outputs, it uses [`mma`](super::mma).
//!
//! Invariant: the choice depends only on the product and the device's matrix instruction.

use super::aligned::Operand;
use super::gemm::{Gemm, Product};
use super::split::{GemmExtents, Outputs, split_or_whole};
use super::tile::fastest;
use crate::error::Result;
use crate::step::Step;
use crate::tensor::{Source, Target, Tensor};
use cuda_std::launch::Slice;
use kernels::matmul::EpilogueForm;
use kernels::matmul_bf16::OperandLayout;
use kernels::matmul_mma::k_per_split;
use kernels::matmul_wgmma_tf32::{Alignment, SWAP, TILES, align_along_k, aligned_stride, matmul_wgmma_tf32};
use kernels::wgmma::box_rows;

/// The least parts of 128 x 128 outputs and a split of k in a product by `wgmma` that needs a copy.
/// On an H100, `mma.sync` took 0.85 of the time with 32 parts, and 0.98 to 1.05 with 48 and 64.
const LEAST: usize = 40;

/// True if this product is computed by `wgmma`, not by `mma.sync`.
pub(super) fn uses_wgmma(step: &Step<'_>, form: &Gemm) -> bool {
    let needs_no_copy = || {
        let (factors, _) = Factor::arrange(form, Slice::empty(), Slice::empty());
        factors.iter().all(|factor| !factor.is_copied)
    };
    step.description().has_wgmma && form.mma_tile.is_none() && (parts(form) >= LEAST || needs_no_copy())
}

/// The parts of 128 x 128 outputs and a split of k in a product.
fn parts(&Gemm { m, n, k, batches, .. }: &Gemm) -> usize {
    let splits = k.div_ceil(k_per_split(m, n, k));
    m.div_ceil(128).saturating_mul(n.div_ceil(128)).saturating_mul(splits).saturating_mul(batches)
}

/// An operand of the instruction.
#[derive(Clone, Copy)]
struct Factor<'a> {
    stored: Operand<'a, f32>,
    /// True if the rows of the matrices are k.
    is_across: bool,
    /// True if a copy along k, with aligned rows, takes its place.
    is_copied: bool,
}

impl<'a> Factor<'a> {
    /// Returns the instruction's A and B for a product, of which as few elements as possible are
    /// copied, and [`SWAP`] if A is the product's B.
    fn arrange(form: &Gemm, a: Slice<'a, f32>, b: Slice<'a, f32>) -> ([Self; 2], u32) {
        let across = [form.transpose_a, !form.transpose_b];
        let operands = Operand::of(form, a, b);
        let factor = |at: usize, is_left: bool| {
            let (stored, is_across) = (operands[at], across[at]);
            Self { stored, is_across, is_copied: !stored.is_aligned() || (is_across && !is_left) }
        };
        let orders = [([factor(0, true), factor(1, false)], 0), ([factor(1, true), factor(0, false)], SWAP)];
        let copied = |(factors, _): &([Self; 2], u32)| -> usize {
            let elements = |factor: &Self| {
                let Operand { extents: [rows, cols], matrices, .. } = factor.stored;
                matrices.saturating_mul(rows).saturating_mul(cols)
            };
            factors.iter().filter(|factor| factor.is_copied).map(elements).fold(0, usize::saturating_add)
        };
        orders.into_iter().min_by_key(copied).expect("there are two orders")
    }

    /// Returns the rows of k elements, and k.
    fn along(&self) -> [usize; 2] {
        let [rows, cols] = self.stored.extents;
        if self.is_across { [cols, rows] } else { [rows, cols] }
    }

    /// Returns the copy in place of the operand.
    fn replaced(self, copy: Slice<'a, f32>) -> Self {
        let [rows, k] = self.along();
        let ld = aligned_stride::<f32>(k);
        let stride = if self.stored.stride == 0 { 0 } else { rows * ld };
        let stored = Operand { values: copy, extents: [rows, k], ld, stride, ..self.stored };
        Self { stored, is_across: false, is_copied: false }
    }
}

/// Makes the copies, in one launch. Those that are not needed have no elements.
#[track_caller]
fn copy<'s>(step: &Step<'s>, factors: &[Factor<'_>; 2]) -> Result<[Tensor<'s, f32>; 2]> {
    let room = |factor: &Factor<'_>| {
        let [rows, k] = factor.along();
        step.empty(if factor.is_copied { [factor.stored.matrices * rows, aligned_stride::<f32>(k)] } else { [0, 0] })
    };
    let mut copies = [room(&factors[0])?, room(&factors[1])?];
    let mut outputs = copies.iter_mut();
    let alignments = factors.map(|factor| {
        let out = outputs.next().expect("there is an output for each operand").out();
        if !factor.is_copied {
            return Alignment::default();
        }
        let ([rows, k], Operand { values, ld, stride, matrices, .. }) = (factor.along(), factor.stored);
        let is_across = factor.is_across;
        Alignment { values: Some(values), out: Some(out), rows, k, ld, batches: matrices, stride, is_across }
    });
    step.launch(align_along_k::of(alignments))?;
    Ok(copies)
}

/// Queues one multiply.
#[track_caller]
pub(super) fn queue(step: &Step<'_>, product: Product<'_, f32, f32>) -> Result<()> {
    let form = product.form;
    let extents = GemmExtents::new(step, &form, k_per_split)?;
    let (factors, swap) = Factor::arrange(&form, product.a, product.b);
    let outputs = Outputs::of(product, &extents);
    if factors.iter().all(|factor| !factor.is_copied) {
        return multiply(step, &form, &extents, factors, swap, outputs);
    }
    step.workspace(|step| {
        let copies = copy(step, &factors)?;
        let factor =
            |at: usize| if factors[at].is_copied { factors[at].replaced(copies[at].slice()) } else { factors[at] };
        multiply(step, &form, &extents, [factor(0), factor(1)], swap, outputs)
    })
}

/// Queues the products over all of k, or over each split-K part.
#[track_caller]
fn multiply(
    step: &Step<'_>,
    form: &Gemm,
    extents: &GemmExtents,
    [a, b]: [Factor<'_>; 2],
    swap: u32,
    outputs: Outputs<'_, f32>,
) -> Result<()> {
    let [rows, cols, of_a_split] = extents.of_a_split();
    let [rows, cols] = if swap == 0 { [rows, cols] } else { [cols, rows] };
    let layout = if a.is_across { OperandLayout::Transposed } else { OperandLayout::Plain };
    let blocks = step.description().processors;
    let tile = fastest(&TILES, [rows, cols, of_a_split], extents.matrices(), blocks as usize);
    let launch = |outputs: Outputs<'_, f32>| {
        let Outputs { bias, c, out, pre, epilogue } = outputs;
        step.launch(matmul_wgmma_tf32 {
            variant: (layout, tile),
            a: a.stored.map(box_rows::<f32>(!a.is_across)),
            b: b.stored.map(box_rows::<f32>(true)),
            bias,
            c,
            out,
            pre,
            extents: extents.product,
            blocks,
            steps_a: a.stored.steps(),
            steps_b: b.stored.steps(),
            epilogue: EpilogueForm { flags: epilogue.flags | swap, ..epilogue },
        })
    };
    split_or_whole(step, form, extents, outputs, launch, launch)
}

#[cfg(test)]
mod tests {
    use super::*;
    use kernels::matmul_wgmma_tf32::{T128X64, T128X128, T128X256};

    /// Tries the shapes of GPT-2, of CrossAsset and of large squares, on an H100.
    #[test]
    fn the_fastest_tile_suits_the_shape() {
        for (rows, cols, k, matrices, want) in [
            (16384, 768, 768, 1, T128X256),
            (16384, 3072, 768, 1, T128X256),
            (3072, 768, 3328, 5, T128X256),
            (3072, 1024, 256, 1, T128X256),
            (3072, 256, 1024, 1, T128X64),
            (1024, 1024, 1024, 1, T128X64),
            (1536, 1408, 384, 1, T128X128),
            (2048, 2048, 2048, 1, T128X256),
        ] {
            assert_eq!(
                fastest(&TILES, [rows, cols, k], matrices, 132),
                want,
                "{rows} x {cols}, {matrices} times k {k}"
            );
        }
    }

    /// Only products of two operands across k, or with rows that do not begin on 16 bytes, need a
    /// copy.
    #[test]
    fn fewest_elements_are_copied() {
        let forward = Gemm::new(16384, 3072, 768);
        let weights = Gemm::new(768, 3072, 16384).transpose_a();
        let batched = Gemm { batches: 8, stride_a: 16 * 64, stride_b: 64 * 512, ..Gemm::new(16, 512, 64) };
        for (form, swap, copied) in [
            (forward, SWAP, [false, false]),
            (forward.transpose_b(), 0, [false, false]),
            (forward.transpose_a().transpose_b(), 0, [false, false]),
            (weights, SWAP, [false, true]),
            (Gemm::new(3072, 768, 16384).transpose_a(), 0, [false, true]),
            (Gemm { ldb: 3073, ..weights }, 0, [false, true]),
            (Gemm { lda: 769, ..forward }, SWAP, [false, true]),
            (Gemm { lda: 769, ..forward.transpose_b() }, 0, [true, false]),
            (Gemm { lda: 769, ldb: 3073, ..forward }, 0, [true, true]),
            (batched, SWAP, [false, false]),
            (Gemm { stride_b: 64 * 512 + 1, ..batched }, 0, [false, true]),
        ] {
            let (factors, got) = Factor::arrange(&form, Slice::empty(), Slice::empty());
            assert_eq!((got, factors.map(|factor| factor.is_copied)), (swap, copied), "{form:?}");
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
