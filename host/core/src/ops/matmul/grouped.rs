//! Products of linear layers of groups of rows, each with weights of its own, in f32 and BF16.
//!
//! The weights of all groups are one matrix: `[in, groups * out]`, the outputs of one group after
//! another. Products of f32 are computed in f32 also where the step's precision is TF32.
//!
//! Invariant: an output has the bits of the same product of its group, if that does not split k.

use super::element::Products;
use super::tile::fastest;
use crate::device::DeviceKind;
use crate::error::{Error, Result};
use crate::ops::Groups;
use crate::step::Step;
use crate::tensor::{Shape, Source, Stored};
use cuda_std::launch::{PointerMut, Slice};
use half::bf16;
use kernels::matmul::{EpilogueForm, ON_CPU, ProductExtents, TRANSPOSE_A, TRANSPOSE_B};
use kernels::matmul_bf16::OperandLayout;
use kernels::matmul_grouped::{TILES, matmul_grouped, matmul_grouped_of_bf16};

const OP: &str = "grouped_linear";

/// The extents of a layer, and the factor of its products.
#[derive(Clone, Copy, Debug)]
pub(super) struct Form {
    pub(super) rows: usize,
    inputs: usize,
    pub(super) outputs: usize,
    groups: usize,
    scale: f32,
}

impl Form {
    pub(super) fn new(x: Shape, w: Shape, groups: &Groups<'_>) -> Result<Self> {
        let (rows, count) = (groups.rows(), groups.count());
        match (x.extents(), w.extents()) {
            (&[got, inputs], &[k, all]) if got == rows && inputs == k && count > 0 && all % count == 0 => {
                Ok(Self { rows, inputs, outputs: all / count, groups: count, scale: 1.0 })
            }
            _ => {
                let expected = format!("{rows} rows [rows, in], and the weights [in, {count} * out] of {count} groups");
                Err(Error::misuse(OP, expected, format!("{x} and {w}")))
            }
        }
    }

    /// Multiplies each product by this factor.
    pub(super) fn scaled(self, scale: f32) -> Self {
        Self { scale, ..self }
    }
}

/// The product of a layer, and its operands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Direction {
    /// `y = x w`, of x and w.
    Forward,
    /// `dx = dy w^T`, of dy and w.
    ToInputs,
    /// `dw = x^T dy`, of x and dy.
    ToWeights,
}

/// The arguments of a launch that follow from the extents and the direction.
#[derive(Clone, Copy, Debug)]
pub struct Arguments {
    extents: ProductExtents,
    lda: u32,
    ldb: u32,
    stride_b: usize,
    epilogue: EpilogueForm,
}

impl Arguments {
    fn new(form: Form, direction: Direction, accumulate: bool) -> Result<Self> {
        let Form { rows, inputs, outputs, groups, scale } = form;
        let word = |extent: usize| {
            let refused = |_| Error::misuse(OP, "extents below 2^32", extent.to_string());
            u32::try_from(extent).map_err(refused)
        };
        let all = groups * outputs;
        let ([m, n, k], [lda, ldb, ldc], flags) = match direction {
            Direction::Forward => ([rows, outputs, inputs], [inputs, all, outputs], 0),
            Direction::ToInputs => ([rows, inputs, outputs], [outputs, all, inputs], TRANSPOSE_B),
            Direction::ToWeights => ([inputs, outputs, rows], [inputs, outputs, all], TRANSPOSE_A),
        };
        let extents = ProductExtents {
            m: word(m)?,
            n: word(n)?,
            k: word(k)?,
            k_per_split: word(k.max(1))?,
            batches: word(groups)?,
        };
        let beta = if accumulate { 1.0 } else { 0.0 };
        let epilogue = EpilogueForm { stride_c: outputs, stride_bias: 0, ldc: word(ldc)?, alpha: scale, beta, flags };
        Ok(Self { extents, lda: word(lda)?, ldb: word(ldb)?, stride_b: outputs, epilogue })
    }

    /// Returns the rows, the columns and the k of a group's product, if all groups have as many
    /// rows.
    fn of_a_group(&self) -> [usize; 3] {
        let ProductExtents { m, n, k, batches, .. } = self.extents;
        let share = |extent: u32| extent.div_ceil(batches.max(1));
        let [m, k] = if self.epilogue.flags & TRANSPOSE_A == 0 { [share(m), k] } else { [m, share(k)] };
        [m, n, k].map(|extent| extent as usize)
    }
}

/// Queues a product of groups of rows. It is added to the old content of the output if the flag
/// next to it is true.
#[track_caller]
pub(super) fn queue<F: Products<S>, S: Stored>(
    step: &Step<'_>,
    form: Form,
    direction: Direction,
    operands: [Slice<'_, F>; 2],
    groups: &Groups<'_>,
    (out, accumulate): (PointerMut<'_, S>, bool),
) -> Result<()> {
    let arguments = Arguments::new(form, direction, accumulate)?;
    F::queue_grouped(step, arguments, operands, groups.offsets().slice(), out)
}

/// Queues a product of f32.
#[track_caller]
pub(super) fn queue_f32(
    step: &Step<'_>,
    arguments: Arguments,
    [a, b]: [Slice<'_, f32>; 2],
    offsets: Slice<'_, u32>,
    out: PointerMut<'_, f32>,
) -> Result<()> {
    let device = step.device().description();
    let tile = match device.kind {
        DeviceKind::Emulated => ON_CPU,
        _ => {
            let groups = arguments.extents.batches as usize;
            fastest(&TILES.0, arguments.of_a_group(), groups, device.processors as usize)
        }
    };
    let Arguments { extents, lda, ldb, stride_b, epilogue } = arguments;
    step.launch(matmul_grouped { tile, a, b, offsets, out, extents, lda, ldb, stride_b, epilogue })
}

/// Queues a product of BF16.
#[track_caller]
pub(super) fn queue_bf16<S: Stored>(
    step: &Step<'_>,
    arguments: Arguments,
    [a, b]: [Slice<'_, bf16>; 2],
    offsets: Slice<'_, u32>,
    out: PointerMut<'_, S>,
) -> Result<()> {
    let groups = arguments.extents.batches as usize;
    let tile = fastest(&TILES.1, arguments.of_a_group(), groups, step.description().processors as usize);
    let Arguments { extents, lda, ldb, stride_b, epilogue } = arguments;
    let layout = match epilogue.flags & TRANSPOSE_A {
        0 => OperandLayout::Plain,
        _ => OperandLayout::Transposed,
    };
    let variant = (layout, tile);
    step.launch(matmul_grouped_of_bf16 { variant, a, b, offsets, out, extents, lda, ldb, stride_b, epilogue })
}
