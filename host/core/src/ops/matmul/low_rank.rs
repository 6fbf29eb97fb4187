//! A linear layer with a low-rank addition to its outputs (Hu et al., "LoRA", 2021).
//!
//! ```text
//! y = (residual +) x w (+ b)                       one launch, as without the addition
//! h = x A                                          all parts together, [rows, ranks]
//! y[:, columns of a part] += scale h[:, its rank] B    one launch for each part, in place
//! ```
//! A layer whose outputs belong to several matrices of a checkpoint, such as q, k and v, has a part
//! for each. The parts share the products with x, because their A are columns of one parameter.
//! Each part begins at a multiple of [`LOW_RANK_UNIT`] columns, as products require. Columns in
//! between have no gradient and no effect. With dropout, each part has an input of its own, which
//! is computed again in the backward pass, so that it takes no memory until then.
//!
//! Invariant: the order of every sum depends only on shapes.

use super::tape::linear_backward;
use crate::error::{Error, Result};
use crate::ops::{self, Activation, Draw, Gemm};
use crate::params::Parameter;
use crate::tape::{Backward, Op, Tape, Var};
use crate::tensor::{Element, Lent, LentMut, Saved, Shape, Source, Target, Tensor};

/// The most parts of a [`LowRank`].
pub const LOW_RANK_PARTS: usize = 3;

/// The unit of a part's first column and first output: 16 bytes of BF16.
pub const LOW_RANK_UNIT: usize = 8;

/// A low-rank addition to the outputs of a linear layer; see [`Tape::linear_low_rank`].
#[derive(Clone, Copy, Debug)]
pub struct LowRank {
    /// A: `[in, columns]`. [`LowRankPart::columns`] places the columns of each part.
    pub a: Parameter,
    /// The parts, in the order of their columns of A.
    pub parts: [Option<LowRankPart>; LOW_RANK_PARTS],
}

/// The addition to neighboring outputs of a linear layer.
#[derive(Clone, Copy, Debug)]
pub struct LowRankPart {
    /// B: `[rank, outputs of the part]`.
    pub b: Parameter,
    /// The first output, a multiple of [`LOW_RANK_UNIT`].
    pub first: usize,
    /// The factor of the addition.
    pub scale: f32,
}

/// Dropout of the input of a [`LowRank`]; see [`ops::dropout`].
#[derive(Clone, Copy, Debug)]
pub struct LowRankDropout<'s> {
    /// The probability that an element is dropped, in `[0, 1)`.
    pub p: f32,
    /// The random numbers of each part.
    pub draws: [Draw<'s>; LOW_RANK_PARTS],
}

impl LowRankPart {
    /// Returns the first column of each part in A, given their ranks, and the number of columns of
    /// A.
    pub fn columns(ranks: impl IntoIterator<Item = usize>) -> (Vec<usize>, usize) {
        let (mut starts, mut end) = (Vec::new(), 0usize);
        for rank in ranks {
            // Sums that overflow become extents that no memory can hold.
            let start = end.checked_next_multiple_of(LOW_RANK_UNIT).unwrap_or(usize::MAX);
            starts.push(start);
            end = start.saturating_add(rank);
        }
        (starts, end)
    }
}

/// A part with its location: the first column in h, its rank, and its outputs.
#[derive(Clone, Copy)]
struct LocatedPart {
    part: LowRankPart,
    column: usize,
    rank: usize,
    outputs: usize,
}

impl LowRank {
    /// Returns the parts with their locations, and the columns of A.
    fn located_parts(&self, op: &Op<'_, '_, '_>, inputs: usize, outputs: usize) -> Result<(Vec<LocatedPart>, usize)> {
        const OP: &str = "linear_low_rank";
        let (mut parts, mut column) = (Vec::new(), 0usize);
        for part in self.parts.into_iter().flatten() {
            let shape = op.shape(part.b)?;
            let &[rank, of_part] = shape.extents() else {
                return Err(Error::misuse(OP, "a matrix B [rank, outputs]", shape.to_string()));
            };
            let is_inside = part.first.checked_add(of_part).is_some_and(|end| end <= outputs);
            if !is_inside || !part.first.is_multiple_of(LOW_RANK_UNIT) {
                let expected =
                    format!("a part inside the {outputs} outputs, from a multiple of {LOW_RANK_UNIT} outputs on");
                return Err(Error::misuse(OP, expected, format!("{of_part} outputs from {} on", part.first)));
            }
            column = column.next_multiple_of(LOW_RANK_UNIT);
            parts.push(LocatedPart { part, column, rank, outputs: of_part });
            column += rank;
        }
        let a = op.shape(self.a)?;
        if a.extents() != [inputs, column] || column == 0 {
            return Err(Error::misuse(OP, format!("a matrix A [{inputs}, {column}]"), a.to_string()));
        }
        Ok((parts, column))
    }
}

impl<'s> Tape<'_, 's> {
    /// `y = (residual +) x w (+ b)`, and then `y[.., columns] += scale (x A) B` for each part;
    /// `x`: `[.., in]`, `w`: `[in, out]`, `b`: `[out]`, `residual`, `y`: `[.., out]`. With
    /// `dropout`, the x of each part's addition is x after dropout. Scratch then includes a tensor
    /// of x's size.
    ///
    /// The first sum has the bits of [`Tape::linear`] and [`Tape::linear_residual`]. In BF16, it is
    /// rounded before a part is added.
    ///
    /// # Errors
    /// [`Error::Misuse`] when extents differ; [`Error::ArenaFull`].
    #[track_caller]
    pub fn linear_low_rank<S: Activation>(
        &self,
        x: &Var<'s, S>,
        (w, b): (Parameter, Option<Parameter>),
        low_rank: &LowRank,
        dropout: Option<LowRankDropout<'s>>,
        residual: Option<&Var<'s, S>>,
    ) -> Result<Var<'s, S>> {
        let op = self.op("linear_low_rank", [x, residual.unwrap_or(x)])?;
        let (step, none, bias) = (self.step(), None::<&Tensor<'s>>, b.map(|b| op.weights(b)).transpose()?);
        let weights = op.matrix::<S>(w)?;
        let mut y = match residual {
            Some(residual) => ops::linear_residual(step, x.value(), &weights, bias.as_ref(), residual.value())?,
            None => ops::linear(step, x.value(), &weights, bias.as_ref())?,
        };
        weights.free(step);
        let ([rows, inputs], [_, outputs]) = (x.shape().as_rows(), y.shape().as_rows());
        let (parts, ranks) = low_rank.located_parts(&op, inputs, outputs)?;
        let mut h = step.empty::<S>([rows, ranks])?;
        let a = op.weights_as::<S>(low_rank.a)?;
        match dropout {
            None => ops::gemm_into(step, &Gemm::new(rows, ranks, inputs), x.value(), &a, none, &mut h)?,
            Some(LowRankDropout { p, draws }) => {
                for (LocatedPart { column, rank, .. }, draw) in parts.iter().zip(&draws) {
                    let dropped = ops::dropout(step, x.value(), p, draw)?;
                    let product = Gemm { ldb: ranks, ldc: ranks, ..Gemm::new(rows, *rank, inputs) };
                    let into = &mut columns_mut(&mut h, *column);
                    ops::gemm_into(step, &product, &dropped, &columns(&a, *column), none, into)?;
                    step.free(dropped);
                }
            }
        }
        for LocatedPart { part, column, rank, outputs: of_part } in &parts {
            let product = Gemm { lda: ranks, ldc: outputs, ..Gemm::new(rows, *of_part, *rank) };
            let b = op.weights_as::<S>(part.b)?;
            let into = &mut columns_mut(&mut y, part.first);
            ops::gemm_into(step, &product.scaled(part.scale).accumulate(), &columns(&h, *column), &b, none, into)?;
        }
        let (x, residual, a, h) = (*x, residual.copied(), low_rank.a, h.save());
        Ok(op.record(y.save(), move |back, dy| {
            linear_backward(back, &x, w, b, &dy)?;
            backward(back, &x, a, &parts, dropout, &h, &dy)?;
            match residual {
                Some(residual) => back.add(&residual, dy),
                None => {
                    back.step().free(dy);
                    Ok(())
                }
            }
        }))
    }
}

/// Computes the gradients of A and of each B, and adds that of the input of A.
fn backward<'s, S: Activation>(
    back: &mut Backward<'_, '_, 's>,
    x: &Var<'s, S>,
    a: Parameter,
    parts: &[LocatedPart],
    dropout: Option<LowRankDropout<'s>>,
    h: &Saved<'s, S>,
    dy: &Tensor<'s, S>,
) -> Result<()> {
    let (step, none) = (back.step(), None::<&Tensor<'s>>);
    let ([rows, ranks], [_, outputs]) = (h.shape().as_rows(), dy.shape().as_rows());
    let inputs = x.shape().as_rows()[1];
    let wants_dh = x.wants_gradient() || back.trains(a)?;
    let mut dh = step.empty::<S>([rows, ranks])?;
    let has_gaps = parts.iter().map(|part| part.rank).sum::<usize>() < ranks;
    if has_gaps {
        // Columns between parts.
        ops::fill_into(step, &mut dh, 0.0)?;
    }
    for LocatedPart { part, column, rank, outputs: of_part } in parts {
        let dy = columns(dy, part.first);
        if let Some((mut db, accumulate)) = back.gradient_if_trained(part.b)? {
            let product = Gemm { lda: ranks, ldb: outputs, ..Gemm::new(*rank, *of_part, rows).transpose_a() };
            let product = adding(product.scaled(part.scale), accumulate);
            ops::gemm_into(step, &product, &columns(h, *column), &dy, none, &mut db)?;
        }
        if wants_dh {
            let product = Gemm { lda: outputs, ldc: ranks, ..Gemm::new(rows, *rank, *of_part).transpose_b() };
            let b = back.weights_as::<S>(part.b)?;
            let into = &mut columns_mut(&mut dh, *column);
            ops::gemm_into(step, &product.scaled(part.scale), &dy, &b, none, into)?;
        }
    }
    if let Some(dropout) = dropout {
        dropped_backward(back, x, a, parts, dropout, &dh, has_gaps)?;
        step.free(dh);
        return Ok(());
    }
    if let Some((mut da, accumulate)) = back.gradient_if_trained(a)? {
        let product = adding(Gemm::new(inputs, ranks, rows).transpose_a(), accumulate);
        ops::gemm_into(step, &product, x.value(), &dh, none, &mut da)?;
    }
    if x.wants_gradient() {
        let (mut dx, accumulate) = match back.take(x)? {
            Some(sum) => (sum, true),
            None => (step.empty(x.shape())?, false),
        };
        let product = adding(Gemm::new(rows, inputs, ranks).transpose_b(), accumulate);
        ops::gemm_into(step, &product, &dh, &back.weights_as::<S>(a)?, none, &mut dx)?;
        back.add(x, dx)?;
    }
    step.free(dh);
    Ok(())
}

/// Computes the gradient of A, and adds that of x, with each part's dropout of x.
fn dropped_backward<'s, S: Activation>(
    back: &mut Backward<'_, '_, 's>,
    x: &Var<'s, S>,
    a: Parameter,
    parts: &[LocatedPart],
    LowRankDropout { p, draws }: LowRankDropout<'s>,
    dh: &Tensor<'s, S>,
    has_gaps: bool,
) -> Result<()> {
    let (step, none) = (back.step(), None::<&Tensor<'s>>);
    let ([rows, ranks], inputs) = (dh.shape().as_rows(), x.shape().as_rows()[1]);
    if let Some((mut da, accumulate)) = back.gradient_if_trained(a)? {
        if has_gaps && !accumulate {
            ops::fill_into(step, &mut da, 0.0)?;
        }
        for (LocatedPart { column, rank, .. }, draw) in parts.iter().zip(&draws) {
            let dropped = ops::dropout(step, x.value(), p, draw)?;
            let product = Gemm { ldb: ranks, ldc: ranks, ..Gemm::new(inputs, *rank, rows).transpose_a() };
            let into = &mut columns_mut(&mut da, *column);
            ops::gemm_into(step, &adding(product, accumulate), &dropped, &columns(dh, *column), none, into)?;
            step.free(dropped);
        }
    }
    if x.wants_gradient() {
        for (LocatedPart { column, rank, .. }, draw) in parts.iter().zip(&draws) {
            let product = Gemm { lda: ranks, ldb: ranks, ..Gemm::new(rows, inputs, *rank).transpose_b() };
            let mut of_part = step.empty::<S>(x.shape())?;
            let a = back.weights_as::<S>(a)?;
            ops::gemm_into(step, &product, &columns(dh, *column), &columns(&a, *column), none, &mut of_part)?;
            let dx = ops::dropout(step, &of_part, p, draw)?;
            step.free(of_part);
            back.add(x, dx)?;
        }
    }
    Ok(())
}

fn adding(product: Gemm, adds: bool) -> Gemm {
    if adds { product.accumulate() } else { product }
}

/// Lends a matrix from a column on.
fn columns<'b, 's, T: Element>(matrix: &'b impl Source<'s, T>, first: usize) -> Lent<'b, 's, T> {
    let (memory, shape) = from(matrix.memory().len(), first, matrix.shape());
    Lent::new(matrix.memory().part(memory, matrix.memory().len() - memory), shape)
}

/// Lends a matrix like [`columns`], for writing.
fn columns_mut<'b, 's, T: Element>(matrix: &'b mut impl Target<'s, T>, first: usize) -> LentMut<'b, 's, T> {
    let (memory, shape) = from(matrix.memory().len(), first, matrix.shape());
    LentMut::new(matrix.memory().part(memory, matrix.memory().len() - memory), shape)
}

/// Returns the first element of the part of a matrix that begins at a column, and the part's shape.
fn from(elements: usize, first: usize, shape: Shape) -> (usize, Shape) {
    let start = if shape.elements() == 0 { 0 } else { first };
    (start, [elements - start].into())
}
