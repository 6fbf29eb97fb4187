//! Attention of queries, keys and values that are separate variables, composed of products and a
//! softmax.
//!
//! The matrices are computed in pieces whose scores are few next to the activations, and the
//! backward pass computes the scores again.
//!
//! Invariant: the bits are those of the same products and softmax over all matrices at once.

use super::super::Activation;
use super::super::pieces::{part, part_mut, pieces};
use super::super::product::{product, product_into};
use super::super::softmax::{softmax, softmax_backward};
use crate::error::{Error, Result};
use crate::step::Step;
use crate::tape::Var;
use crate::tensor::{Saved, Shape, Tensor};
use std::ops::Range;

/// The matrices of queries, keys and values.
#[derive(Clone, Copy)]
struct Matrices {
    count: usize,
    queries: usize,
    keys: usize,
    /// The columns of queries and keys, and those of values.
    columns: [usize; 2],
}

impl Matrices {
    fn new([q, k, v]: [Shape; 3]) -> Result<Self> {
        let (q_extents, k_extents, v_extents) = (q.extents(), k.extents(), v.extents());
        if let ([before @ .., queries, head], [k_before @ .., keys, k_head], [v_before @ .., values, width]) =
            (q_extents, k_extents, v_extents)
            && [before, before] == [k_before, v_before]
            && [head, keys] == [k_head, values]
        {
            let count = before.iter().product();
            return Ok(Self { count, queries: *queries, keys: *keys, columns: [*head, *width] });
        }
        let expected = "queries [.., n, head], keys [.., m, head] and values [.., m, width]";
        Err(Error::misuse("attend", expected, format!("{q}, {k} and {v}")))
    }

    /// Returns queries, keys and values as `[matrices, rows, columns]`.
    fn of<'s, S: Activation>(self, vars: [&Var<'s, S>; 3]) -> Result<[Saved<'s, S>; 3]> {
        let Self { count, queries, keys, columns: [head, width] } = self;
        let [q, k, v] = vars.map(|var| *var.value());
        Ok([q.reshape([count, queries, head])?, k.reshape([count, keys, head])?, v.reshape([count, keys, width])?])
    }

    /// Returns ranges of matrices whose scores exist at a time.
    fn pieces<S>(self) -> impl Iterator<Item = Range<usize>> + use<S> {
        let Self { count, queries, keys, columns: [head, width] } = self;
        let bytes = queries.saturating_mul(keys).saturating_mul(size_of::<S>());
        pieces(count, bytes, &[queries * head, keys * head, queries * width, keys * width])
    }

    /// Returns the weights of the values for some matrices, `[matrices, queries, keys]`.
    fn weights<'s, S: Activation>(
        self,
        step: &Step<'s>,
        [q, k]: [&Saved<'s, S>; 2],
        piece: &Range<usize>,
    ) -> Result<Tensor<'s, S>> {
        let scores = product(step, (&part(q, piece), false), (&part(k, piece), true))?;
        let weights = softmax(step, &scores)?;
        step.free(scores);
        Ok(weights)
    }
}

impl<'s, S: Activation> Var<'s, S> {
    /// `softmax(q k^T) v` for each matrix, over the last two extents; this variable, q:
    /// `[.., queries, head]`, `keys`: `[.., keys, head]`, `values`: `[.., keys, width]`, result:
    /// `[.., queries, width]`. The extents before are equal. Scale q beforehand, by
    /// `1 / sqrt(head)` in a transformer. Scores exist for a piece of the matrices at a time.
    ///
    /// # Errors
    /// [`Error::Misuse`] for other shapes; [`Error::ArenaFull`].
    ///
    /// Source: Vaswani et al., 2017.
    #[track_caller]
    pub fn attend(&self, keys: &Self, values: &Self) -> Result<Self> {
        let matrices = Matrices::new([self.shape(), keys.shape(), values.shape()])?;
        let op = self.op("attend", &[self, keys, values])?;
        let step = op.step();
        let [q, k, v] = matrices.of([self, keys, values])?;
        let mut y = step.empty([matrices.count, matrices.queries, matrices.columns[1]])?;
        for piece in matrices.pieces::<S>() {
            let weights = matrices.weights(step, [&q, &k], &piece)?;
            product_into(step, (&weights, false), (&part(&v, &piece), false), &mut part_mut(&mut y, &piece))?;
            step.free(weights);
        }
        let y = y.reshape(self.shape().with_last(matrices.columns[1]))?;
        let kept = [self.keep(), keys.keep(), values.keep()];
        Ok(op.record(y.save(), move |back, dy| {
            let step = back.step();
            let vars = [kept[0].var(back)?, kept[1].var(back)?, kept[2].var(back)?];
            let [q, k, v] = matrices.of(vars.each_ref())?;
            let dy = dy.reshape([matrices.count, matrices.queries, matrices.columns[1]])?;
            let room =
                |at: usize, x: &Saved<'_, S>| vars[at].wants_gradient().then(|| step.empty(x.shape())).transpose();
            let [mut dq, mut dk, mut dv] = [room(0, &q)?, room(1, &k)?, room(2, &v)?];
            for piece in matrices.pieces::<S>() {
                let weights = matrices.weights(step, [&q, &k], &piece)?;
                let dy = part(&dy, &piece);
                if let Some(dv) = &mut dv {
                    product_into(step, (&weights, true), (&dy, false), &mut part_mut(dv, &piece))?;
                }
                if dq.is_some() || dk.is_some() {
                    let dweights = product(step, (&dy, false), (&part(&v, &piece), true))?;
                    let dscores = softmax_backward(step, &weights, &dweights)?;
                    step.free(dweights);
                    if let Some(dq) = &mut dq {
                        product_into(step, (&dscores, false), (&part(&k, &piece), false), &mut part_mut(dq, &piece))?;
                    }
                    if let Some(dk) = &mut dk {
                        product_into(step, (&dscores, true), (&part(&q, &piece), false), &mut part_mut(dk, &piece))?;
                    }
                    step.free(dscores);
                }
                step.free(weights);
            }
            step.free(dy);
            for (var, gradient) in vars.iter().zip([dq, dk, dv]) {
                if let Some(gradient) = gradient {
                    back.add(var, gradient.reshape(var.shape())?)?;
                }
            }
            Ok(())
        }))
    }
}
