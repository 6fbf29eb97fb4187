//! The operands of products by `wgmma`, whose rows must begin on 16 bytes.
//!
//! An operand with other rows is copied to scratch first, with rows that do: those of BF16 by
//! [`align`], those of f32 by [`tf32_wgmma`](super::tf32_wgmma). The copy costs a read and a write
//! of the operand, and a launch. A thread that multiplies by `mma.sync` would copy each element of
//! such an operand separately, once for every tile.
//!
//! Invariant: whether a product uses `wgmma` depends only on the product and the device's matrix
//! instruction.

use super::gemm::Gemm;
use crate::error::Result;
use crate::step::Step;
use crate::tensor::{Source, Target, Tensor};
use cuda_std::launch::{Slice, TensorMap};
use half::bf16;
use kernels::matmul_wgmma::{Aligning, align_rows, aligned_stride};

/// An operand as it is stored.
#[derive(Clone, Copy)]
pub(super) struct Operand<'a, T> {
    pub(super) values: Slice<'a, T>,
    /// The rows and columns of a matrix.
    pub(super) extents: [usize; 2],
    pub(super) ld: usize,
    pub(super) stride: usize,
    /// The number of matrices stored: one for all batches if the stride is 0.
    pub(super) matrices: usize,
}

impl<'a, T: Copy> Operand<'a, T> {
    /// Returns the operands of a product: A, then B.
    pub(super) fn of(form: &Gemm, a: Slice<'a, T>, b: Slice<'a, T>) -> [Self; 2] {
        let Gemm { m, n, k, batches, .. } = *form;
        let operand = |values, is_transposed, [rows, cols]: [usize; 2], ld, stride| Self {
            values,
            extents: if is_transposed { [cols, rows] } else { [rows, cols] },
            ld,
            stride,
            matrices: if stride == 0 { batches.min(1) } else { batches },
        };
        [
            operand(a, form.transpose_a, [m, k], form.lda, form.stride_a),
            operand(b, form.transpose_b, [k, n], form.ldb, form.stride_b),
        ]
    }

    /// True if every row begins on 16 bytes.
    pub(super) fn is_aligned(&self) -> bool {
        let rows = if self.extents[0] > 1 { self.ld } else { 0 };
        let matrices = if self.matrices > 1 { self.stride } else { 0 };
        aligned_stride::<T>(rows) == rows && aligned_stride::<T>(matrices) == matrices
    }

    /// The matrices from a batch to the next.
    pub(super) fn steps(&self) -> u32 {
        u32::from(self.stride > 0)
    }

    /// Returns the map of the operand as it is stored, for a kernel with boxes of so many rows.
    pub(super) fn map(&self, box_rows: u32) -> TensorMap<'a, T> {
        let [rows, cols] = self.extents;
        // The extents of a product are below 2^32: `GemmExtents` has checked it.
        let extents = [cols, rows, self.matrices].map(|extent| extent as u32);
        TensorMap { memory: self.values, extents, strides: [self.ld, self.stride], box_rows }
    }

    /// Returns the elements of a copy with aligned rows.
    fn copied(&self) -> [usize; 2] {
        let [rows, cols] = self.extents;
        [self.matrices * rows, aligned_stride::<T>(cols)]
    }
}

/// Copies the operands whose rows are not aligned, in one launch. A copy of no elements takes the
/// place of an operand that is.
#[track_caller]
pub(super) fn align<'s>(step: &Step<'s>, operands: &[Operand<'_, bf16>; 2]) -> Result<[Tensor<'s, bf16>; 2]> {
    let room = |operand: &Operand<'_, bf16>| step.empty(if operand.is_aligned() { [0, 0] } else { operand.copied() });
    let mut copies = [room(&operands[0])?, room(&operands[1])?];
    let mut outputs = copies.iter_mut();
    let aligning = operands.map(|operand| {
        let out = outputs.next().expect("there is an output for each operand").out();
        if operand.is_aligned() {
            return Aligning::default();
        }
        let Operand { values, extents: [rows, cols], ld, stride, matrices } = operand;
        Aligning { values: Some(values), out: Some(out), rows, cols, ld, batches: matrices, stride }
    });
    step.launch(align_rows::of(aligning))?;
    Ok(copies)
}

/// Returns the operands, with copies in place of those whose rows are not aligned.
pub(super) fn replaced<'c>(
    operands: &[Operand<'c, bf16>; 2],
    copies: &'c [Tensor<'_, bf16>; 2],
) -> [Operand<'c, bf16>; 2] {
    [0, 1].map(|at| {
        let operand = operands[at];
        let ([rows, _], [_, ld]) = (operand.extents, operand.copied());
        if operand.is_aligned() {
            return operand;
        }
        let stride = if operand.stride == 0 { 0 } else { rows * ld };
        Operand { values: copies[at].slice(), ld, stride, ..operand }
    })
}
