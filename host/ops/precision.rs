//! The rounding that a [`Precision`] asks for, before matrices are multiplied.

use crate::error::{Error, Result};
use crate::precision::Precision;
use crate::step::Step;
use crate::tensor::{Target, Tensor};
use cuda_std::launch::Slice;
use kernels::format::{Bf16, Tf32};
use kernels::mma::{Side, fragments};
use kernels::precision::{Rounding, round_to_bf16, round_to_tf32};

/// Matrices as they are stored, row by row: `batches` of them, `stride` elements apart.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Matrices {
    pub(super) rows: usize,
    pub(super) cols: usize,
    pub(super) ld: usize,
    pub(super) batches: usize,
    pub(super) stride: usize,
}

impl Matrices {
    /// How many are stored: one for all batches where none lies beside another.
    fn distinct(self) -> usize {
        if self.stride == 0 { self.batches.min(1) } else { self.batches }
    }
}

/// What is to be rounded, and the sides of the multiplies in which it stands: with k along its rows, and across them.
#[derive(Clone, Copy, Default)]
pub(super) struct Operand<'a> {
    pub(super) values: Option<Slice<'a, f32>>,
    pub(super) matrices: Matrices,
    pub(super) along: Option<Side>,
    pub(super) across: Option<Side>,
}

impl Operand<'_> {
    /// Room for the fragments that are wanted; one row for each matrix.
    fn room<'s>(&self, step: &Step<'s>, precision: Precision) -> Result<Fragments<'s>> {
        let Matrices { rows, cols, .. } = self.matrices;
        let room = |side: Option<Side>, extents| {
            let words =
                if precision == Precision::Bf16 { fragments::<Bf16>(extents) } else { fragments::<Tf32>(extents) };
            step.empty([side.map_or(0, |_| self.matrices.distinct()), words])
        };
        Ok(Fragments { along: room(self.along, [rows, cols])?, across: room(self.across, [cols, rows])? })
    }
}

/// An operand's fragments ([`kernels::precision`]), as it lies and transposed; empty where they are not wanted.
pub(super) struct Fragments<'s> {
    pub(super) along: Tensor<'s, u32>,
    pub(super) across: Tensor<'s, u32>,
}

/// Rounds operands of multiplies, in one launch.
#[track_caller]
pub(super) fn round<'s>(
    step: &Step<'s>,
    precision: Precision,
    operands: [Operand<'_>; 3],
) -> Result<[Fragments<'s>; 3]> {
    let [a, b, c] = &operands;
    let mut rounded = [a.room(step, precision)?, b.room(step, precision)?, c.room(step, precision)?];
    let mut outputs = rounded.iter_mut();
    let roundings = operands.map(|Operand { values, matrices, along, across }| {
        let out = outputs.next().expect("as many as operands");
        let Matrices { rows, cols, ld, stride, .. } = matrices;
        let along = along.map(|side| (side, out.along.out()));
        let across = across.map(|side| (side, out.across.out()));
        Rounding { values, rows, cols, ld, batches: matrices.distinct(), stride, along, across }
    });
    match precision {
        Precision::Tf32 => step.launch(round_to_tf32::of(roundings))?,
        Precision::Bf16 => step.launch(round_to_bf16::of(roundings))?,
        Precision::Ieee => return Err(Error::misuse("matmul", "tf32 or bf16", "ieee")),
    }
    Ok(rounded)
}
