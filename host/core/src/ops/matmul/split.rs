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
use kernels::matmul::sum_splits;

/// The extents of a multiply as its kernels take them.
#[derive(Clone, Copy)]
pub(super) struct GemmExtents {
    pub(super) m: u32,
    pub(super) n: u32,
    pub(super) k: u32,
    pub(super) lda: u32,
    pub(super) ldb: u32,
    pub(super) ldc: u32,
    pub(super) k_per_split: u32,
    pub(super) batches: u32,
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
        Ok(Self {
            m: word("m", form.m)?,
            n: word("n", form.n)?,
            k: word("k", form.k)?,
            lda: word("lda", form.lda)?,
            ldb: word("ldb", form.ldb)?,
            ldc: word("ldc", form.ldc)?,
            k_per_split: word("k", k_per_split(form.rows_of_split(step), form.n, form.k))?,
            batches: word("batches", form.batches)?,
        })
    }

    /// The rows, the columns, and the products of a sum within a split.
    pub(super) fn of_a_split(&self) -> [usize; 3] {
        [self.m, self.n, self.k_per_split.min(self.k)].map(|extent| extent as usize)
    }

    /// The number of matrices of sums: one for each batch and each split.
    pub(super) fn matrices(&self) -> usize {
        self.batches as usize * self.k.div_ceil(self.k_per_split).max(1) as usize
    }
}

/// The epilogue and the outputs.
pub(super) struct Outputs<'o, S> {
    pub(super) bias: Slice<'o, f32>,
    pub(super) c: Pointer<'o, S>,
    pub(super) out: PointerMut<'o, S>,
    pub(super) pre: PointerMut<'o, S>,
    pub(super) ldc: u32,
    pub(super) stride_c: usize,
    pub(super) alpha: f32,
    pub(super) beta: f32,
    pub(super) flags: u32,
}

impl<'o, S: Stored> Outputs<'o, S> {
    pub(super) fn of<F>(product: Product<'o, F, S>, extents: &GemmExtents) -> Self {
        let Product { form: Gemm { stride_c, alpha, beta, .. }, bias, c, out, pre, flags, .. } = product;
        Self { bias, c, out, pre, ldc: extents.ldc, stride_c, alpha, beta, flags }
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
    let split_k = extents.k.div_ceil(extents.k_per_split);
    if split_k < 2 {
        return whole(outputs);
    }
    let Gemm { m, n, batches, stride_bias, .. } = *form;
    step.workspace(|step| {
        let mut partials = step.empty([batches * split_k as usize, m, n])?;
        part(Outputs {
            bias: Slice::empty(),
            c: Pointer::empty(),
            out: partials.out(),
            pre: PointerMut::empty(),
            ldc: extents.n,
            stride_c: m * n,
            alpha: 1.0,
            beta: 0.0,
            flags: 0,
        })?;
        let Outputs { bias, c, out, pre, ldc, stride_c, alpha, beta, flags } = outputs;
        let GemmExtents { m, n, batches, .. } = *extents;
        let partials = partials.slice();
        step.launch(sum_splits {
            partials,
            split_k,
            bias,
            c,
            out,
            pre,
            m,
            n,
            ldc,
            batches,
            stride_c,
            stride_bias,
            alpha,
            beta,
            flags,
        })
    })
}
