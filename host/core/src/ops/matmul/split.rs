//! The common part of multiplies in every precision: extents for their kernels, and split-K.
//!
//! Invariant: k is split depending only on m, n, k, the kind of operands and
//! [`Step::batch_invariant`] ([`kernels::matmul::k_per_split`],
//! [`kernels::matmul_mma::k_per_split`], [`kernels::matmul_bf16::k_per_split`]).

use super::gemm::{Gemm, Product};
use crate::error::{Error, Result};
use crate::step::Step;
use crate::tensor::{Source, Stored, Target};
use cuda_std::launch::{Pointer, PointerMut, Slice};
use kernels::matmul::{EpilogueForm, ProductExtents, sum_splits};

/// The extents of a multiply as its kernels take them.
#[derive(Clone, Copy)]
pub(super) struct GemmExtents {
    pub(super) product: ProductExtents,
    pub(super) lda: u32,
    pub(super) ldb: u32,
    pub(super) ldc: u32,
}

impl GemmExtents {
    pub(super) fn new(
        step: &Step<'_>,
        form: &Gemm,
        k_per_split: impl Fn(usize, usize, usize) -> usize,
    ) -> Result<Self> {
        let word = |what, extent: usize| {
            let refused = |_| Error::misuse("matmul", format!("`{what}` below 2^32"), extent.to_string());
            u32::try_from(extent).map_err(refused)
        };
        let product = ProductExtents {
            m: word("m", form.m)?,
            n: word("n", form.n)?,
            k: word("k", form.k)?,
            k_per_split: word("k", k_per_split(form.rows_of_split(step), form.n, form.k))?,
            batches: word("batches", form.batches)?,
        };
        let [lda, ldb, ldc] =
            [("lda", form.lda), ("ldb", form.ldb), ("ldc", form.ldc)].map(|(what, ld)| word(what, ld));
        Ok(Self { product, lda: lda?, ldb: ldb?, ldc: ldc? })
    }

    /// The rows, the columns, and the products of a sum within a split.
    pub(super) fn of_a_split(&self) -> [usize; 3] {
        let ProductExtents { m, n, k, k_per_split, .. } = self.product;
        [m, n, k_per_split.min(k)].map(|extent| extent as usize)
    }

    /// The number of partial sums of an output.
    pub(super) fn splits(&self) -> u32 {
        self.product.k.div_ceil(self.product.k_per_split)
    }

    /// The number of matrices of sums: one for each batch and each split.
    pub(super) fn matrices(&self) -> usize {
        self.product.batches as usize * self.splits().max(1) as usize
    }
}

/// The epilogue and the outputs.
pub(super) struct Outputs<'o, S> {
    pub(super) bias: Slice<'o, f32>,
    pub(super) c: Pointer<'o, S>,
    pub(super) out: PointerMut<'o, S>,
    pub(super) pre: PointerMut<'o, S>,
    pub(super) epilogue: EpilogueForm,
}

impl<'o, S: Stored> Outputs<'o, S> {
    pub(super) fn of<F>(product: Product<'o, F, S>, extents: &GemmExtents) -> Self {
        let Product { form: Gemm { stride_c, stride_bias, alpha, beta, .. }, bias, c, out, pre, flags, .. } = product;
        let epilogue = EpilogueForm { stride_c, stride_bias, ldc: extents.ldc, alpha, beta, flags };
        Self { bias, c, out, pre, epilogue }
    }
}

/// Queues `whole` for all of k, or `part` for split-K followed by the sum of the parts.
#[track_caller]
pub(super) fn split_or_whole<S: Stored>(
    step: &Step<'_>,
    form: &Gemm,
    extents: &GemmExtents,
    outputs: Outputs<'_, S>,
    whole: impl FnOnce(Outputs<'_, S>) -> Result<()>,
    part: impl FnOnce(Outputs<'_, f32>) -> Result<()>,
) -> Result<()> {
    let split_k = extents.splits();
    if split_k < 2 {
        return whole(outputs);
    }
    let Gemm { m, n, batches, .. } = *form;
    step.workspace(|step| {
        let mut partials = step.empty([batches * split_k as usize, m, n])?;
        let ldc = extents.product.n;
        part(Outputs {
            bias: Slice::empty(),
            c: Pointer::empty(),
            out: partials.out(),
            pre: PointerMut::empty(),
            epilogue: EpilogueForm { stride_c: m * n, stride_bias: 0, ldc, alpha: 1.0, beta: 0.0, flags: 0 },
        })?;
        let Outputs { bias, c, out, pre, epilogue } = outputs;
        let partials = partials.slice();
        step.launch(sum_splits { partials, bias, c, out, pre, extents: extents.product, epilogue })
    })
}
