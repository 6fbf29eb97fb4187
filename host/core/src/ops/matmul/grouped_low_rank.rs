//! Layers of groups of rows with a low-rank addition to their outputs, such as adapters of experts.
//!
//! ```text
//! y[r] = x[r] w_g                 for the group g of row r
//! h[r] = x[r] A_g                 [rows, rank]
//! y[r] += scale h[r] B_g          in place
//! ```
//! The A of all groups are one matrix, and so are the B, as the weights are. With dropout, the
//! input of A is computed again in the backward pass.
//!
//! Invariant: the order of every sum depends only on shapes and groups.

use super::grouped::{self, Direction, Form};
use super::tape::grouped_backward;
use crate::error::Result;
use crate::ops::{self, Activation, Draw, Groups};
use crate::params::Parameter;
use crate::tape::{Backward, Tape, Var};
use crate::tensor::{Saved, Source, Target, Tensor};

/// A low-rank addition to the outputs of a layer of groups; see [`Tape::grouped_low_rank`].
#[derive(Clone, Copy, Debug)]
pub struct GroupedLowRank {
    /// A of all groups: `[in, groups * rank]`.
    pub a: Parameter,
    /// B of all groups: `[rank, groups * out]`.
    pub b: Parameter,
    /// The factor of the addition.
    pub scale: f32,
}

/// An addition in a step.
#[derive(Clone, Copy)]
struct Addition<'s> {
    a: Parameter,
    b: Parameter,
    /// The products with A.
    to_rank: Form,
    /// The products with B.
    of_rank: Form,
    dropout: Option<(f32, Draw<'s>)>,
    groups: Groups<'s>,
}

impl<'s> Tape<'_, 's> {
    /// Records [`ops::grouped_linear`] with a low-rank addition: `y[r] = x[r] w_g + scale (x[r]
    /// A_g) B_g` for the group g of row r; `x`: `[rows, in]`, `w`: `[in, groups * out]`, `y`:
    /// `[rows, out]`. `dropout` is the probability and the random numbers of dropout of the x that
    /// A multiplies; see [`ops::dropout`]. Scratch then includes a tensor of x's size.
    ///
    /// The first sum has the bits of [`Tape::grouped_linear`]. In BF16, it is rounded before the
    /// addition.
    ///
    /// # Errors
    /// [`Error::Misuse`](crate::Error::Misuse) when extents differ;
    /// [`Error::ArenaFull`](crate::Error::ArenaFull).
    #[track_caller]
    pub fn grouped_low_rank<S: Activation>(
        &self,
        x: &Var<'s, S>,
        w: Parameter,
        low_rank: &GroupedLowRank,
        dropout: Option<(f32, Draw<'s>)>,
        groups: &Groups<'s>,
    ) -> Result<Var<'s, S>> {
        let op = self.op("grouped_low_rank", [x])?;
        let step = self.step();
        let weights = op.matrix::<S>(w)?;
        let form = Form::new(x.shape(), weights.shape(), groups)?;
        let mut y = ops::grouped_linear(step, x.value(), &weights, groups)?;
        weights.free(step);
        let (a, b) = (op.weights_as::<S>(low_rank.a)?, op.weights_as::<S>(low_rank.b)?);
        let h = match dropout {
            None => ops::grouped_linear(step, x.value(), &a, groups)?,
            Some((p, draw)) => {
                let dropped = ops::dropout(step, x.value(), p, &draw)?;
                let h = ops::grouped_linear(step, &dropped, &a, groups)?;
                step.free(dropped);
                h
            }
        };
        let to_rank = Form::new(x.shape(), a.shape(), groups)?;
        let of_rank = Form::new(h.shape(), b.shape(), groups)?.scaled(low_rank.scale);
        ops::same_shape("grouped_low_rank", y.shape(), [of_rank.rows, of_rank.outputs].into())?;
        let (operands, into) = ([h.slice(), b.slice()], (y.out(), true));
        grouped::queue(step, of_rank, Direction::Forward, operands, groups, into)?;
        let &GroupedLowRank { a, b, .. } = low_rank;
        let addition = Addition { a, b, to_rank, of_rank, dropout, groups: *groups };
        let (x, h) = (*x, h.save());
        Ok(op.record(y.save(), move |back, dy| {
            grouped_backward(back, &x, w, form, &addition.groups, &dy)?;
            addition.backward(back, &x, &h, dy)
        }))
    }
}

impl<'s> Addition<'s> {
    /// Computes the gradients of A and B, and adds that of the input of A.
    fn backward<S: Activation>(
        &self,
        back: &mut Backward<'_, '_, 's>,
        x: &Var<'s, S>,
        h: &Saved<'s, S>,
        dy: Tensor<'s, S>,
    ) -> Result<()> {
        let Self { a, b, to_rank, of_rank, dropout, ref groups } = *self;
        let step = back.step();
        if let Some((mut db, accumulate)) = back.gradient_if_trained(b)? {
            let (operands, into) = ([h.slice(), dy.slice()], (db.out(), accumulate));
            grouped::queue(step, of_rank, Direction::ToWeights, operands, groups, into)?;
        }
        let mut dh = step.empty::<S>(h.shape())?;
        let b = back.weights_as::<S>(b)?;
        let (operands, into) = ([dy.slice(), b.slice()], (dh.out(), false));
        grouped::queue(step, of_rank, Direction::ToInputs, operands, groups, into)?;
        step.free(dy);
        if let Some((mut da, accumulate)) = back.gradient_if_trained(a)? {
            let dropped = dropout.map(|(p, draw)| ops::dropout(step, x.value(), p, &draw)).transpose()?;
            let input = dropped.as_ref().map_or_else(|| x.value().slice(), |dropped| dropped.slice());
            let (operands, into) = ([input, dh.slice()], (da.out(), accumulate));
            grouped::queue(step, to_rank, Direction::ToWeights, operands, groups, into)?;
            dropped.into_iter().for_each(|dropped| step.free(dropped));
        }
        if x.wants_gradient() {
            let sum = if dropout.is_none() { back.take(x)? } else { None };
            let (mut dx, accumulate) = match sum {
                Some(sum) => (sum, true),
                None => (step.empty(x.shape())?, false),
            };
            let a = back.weights_as::<S>(a)?;
            let (operands, into) = ([dh.slice(), a.slice()], (dx.out(), accumulate));
            grouped::queue(step, to_rank, Direction::ToInputs, operands, groups, into)?;
            if let Some((p, draw)) = dropout {
                let of_dropped = dx;
                dx = ops::dropout(step, &of_dropped, p, &draw)?;
                step.free(of_dropped);
            }
            back.add(x, dx)?;
        }
        step.free(dh);
        Ok(())
    }
}
