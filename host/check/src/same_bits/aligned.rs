//! The case of the kernel that copies operands of BF16 products to rows that begin on 16 bytes.
//!
//! Invariant: results depend only on the case and its size, as [`cases`](super::cases) requires.

#![forbid(unsafe_code)]

use super::inputs::Inputs;
use half::bf16;
use kernels::matmul_wgmma::{Aligning, align_rows, aligned_stride};
use stepscope_core::{Result, Source, Target};

/// Runs the case: rows with and without tails, at even and odd places, with special numbers among
/// them. The second operand is the first without its last column.
pub(super) fn copies(i: &Inputs<'_, '_>) -> Result<()> {
    i.squares::<bf16>(|i, x| {
        let [rows, cols] = x.shape().as_rows();
        let narrow = cols.saturating_sub(1);
        let mut wide = i.step.empty::<bf16>([rows, aligned_stride::<bf16>(cols)])?;
        let mut tail = i.step.empty::<bf16>([rows, aligned_stride::<bf16>(narrow)])?;
        let of = |out, cols| Aligning {
            values: Some(x.slice()),
            out: Some(out),
            rows,
            cols,
            ld: x.shape().as_rows()[1],
            batches: 1,
            stride: 0,
        };
        i.step.launch(align_rows::of([of(wide.out(), cols), of(tail.out(), narrow)]))?;
        i.keep(&wide)?;
        i.keep(&tail)
    })
}
