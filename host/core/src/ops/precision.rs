//! The rounding to TF32 before f32 matrices are multiplied on tensor cores.

use crate::error::Result;
use crate::step::Step;
use crate::tensor::{Target, Tensor};
use cuda_std::launch::Slice;
use kernels::mma::{Side, fragments};
use kernels::precision::{Rounding, round_to_tf32};

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
    /// The number of matrices stored: one for all batches if the stride is 0.
    fn distinct(self) -> usize {
        if self.stride == 0 { self.batches.min(1) } else { self.batches }
    }
}

/// An operand to be rounded, and its sides in the multiplies: with k along its rows, and with k
/// across them.
#[derive(Clone, Copy, Default)]
pub(super) struct Unrounded<'a> {
    pub(super) values: Option<Slice<'a, f32>>,
    pub(super) matrices: Matrices,
    pub(super) along: Option<Side>,
    pub(super) across: Option<Side>,
}

impl Unrounded<'_> {
    /// Allocates the requested fragments, one row for each matrix.
    fn room<'s>(&self, step: &Step<'s>) -> Result<Fragments<'s>> {
        let Matrices { rows, cols, .. } = self.matrices;
        let room = |side: Option<Side>, extents| {
            step.empty([side.map_or(0, |_| self.matrices.distinct()), fragments(extents)])
        };
        Ok(Fragments { along: room(self.along, [rows, cols])?, across: room(self.across, [cols, rows])? })
    }
}

/// An operand's fragments ([`kernels::precision`]), as stored and transposed. Those that were not
/// requested are empty.
pub(super) struct Fragments<'s> {
    pub(super) along: Tensor<'s, u32>,
    pub(super) across: Tensor<'s, u32>,
}

/// Rounds the operands of multiplies, in one launch.
#[track_caller]
pub(super) fn round<'s>(step: &Step<'s>, operands: [Unrounded<'_>; 3]) -> Result<[Fragments<'s>; 3]> {
    let [a, b, c] = &operands;
    let mut rounded = [a.room(step)?, b.room(step)?, c.room(step)?];
    let mut outputs = rounded.iter_mut();
    let roundings = operands.map(|Unrounded { values, matrices, along, across }| {
        let out = outputs.next().expect("there is an output for each operand");
        let Matrices { rows, cols, ld, stride, .. } = matrices;
        let along = along.map(|side| (side, out.along.out()));
        let across = across.map(|side| (side, out.across.out()));
        Rounding { values, rows, cols, ld, batches: matrices.distinct(), stride, along, across }
    });
    step.launch(round_to_tf32::of(roundings))?;
    Ok(rounded)
}
