//! Attention of queries, keys and values that are separate variables, composed of products and a
//! softmax.
//!
//! The matrices are computed in pieces whose scores are few next to the activations, and the
//! backward pass computes the scores again.
//!
//! Invariant: the bits are those of the same products and softmax over all matrices at once.

use super::super::Activation;
use super::super::pieces::pieces;
use super::super::product::{product, product_into};
use super::super::softmax::{softmax, softmax_backward};
use crate::error::{Error, Result};
use crate::step::Step;
use crate::tape::Var;
use crate::tensor::{LentMut, Saved, Shape, Source, Tensor};
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

/// Returns some matrices of a tensor.
fn part<'s, S: Activation>(x: &impl Source<'s, S>, piece: &Range<usize>) -> Saved<'s, S> {
    let [rows, columns] = *x.shape().extents().last_chunk().expect("`Matrices::new` has found two extents");
    let matrix = rows * columns;
    let memory = x.memory().part(piece.start * matrix, piece.len() * matrix);
    Saved::new(memory, [piece.len(), rows, columns].into())
}

/// Returns the same matrices of a tensor that is being written.
fn part_mut<'o, 's, S: Activation>(x: &'o mut Tensor<'s, S>, piece: &Range<usize>) -> LentMut<'o, 's, S> {
    let part = part(x, piece);
    LentMut::new(part.memory(), part.shape())
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
        let [_, width] = matrices.columns;
        let op = self.op("attend", &[self, keys, values])?;
        let step = op.step();
        let mut y = step.empty(self.shape().with_last(width))?;
        for piece in matrices.pieces::<S>() {
            let weights = matrices.weights(step, [self.value(), keys.value()], &piece)?;
            let values = part(values.value(), &piece);
            product_into(step, (&weights, false), (&values, false), &mut part_mut(&mut y, &piece))?;
            step.free(weights);
        }
        let kept = [self.keep(), keys.keep(), values.keep()];
        Ok(op.record(y.save(), move |back, dy| {
            let step = back.step();
            let [q, k, v] = [kept[0].var(back)?, kept[1].var(back)?, kept[2].var(back)?];
            let room = |var: &Var<'_, S>| var.wants_gradient().then(|| step.empty(var.shape())).transpose();
            let [mut dq, mut dk, mut dv] = [room(&q)?, room(&k)?, room(&v)?];
            for piece in matrices.pieces::<S>() {
                let weights = matrices.weights(step, [q.value(), k.value()], &piece)?;
                let dy = part(&dy, &piece);
                if let Some(dv) = &mut dv {
                    product_into(step, (&weights, true), (&dy, false), &mut part_mut(dv, &piece))?;
                }
                if dq.is_some() || dk.is_some() {
                    let dweights = product(step, (&dy, false), (&part(v.value(), &piece), true))?;
                    let dscores = softmax_backward(step, &weights, &dweights)?;
                    step.free(dweights);
                    if let Some(dq) = &mut dq {
                        let k = part(k.value(), &piece);
                        product_into(step, (&dscores, false), (&k, false), &mut part_mut(dq, &piece))?;
                    }
                    if let Some(dk) = &mut dk {
                        let q = part(q.value(), &piece);
                        product_into(step, (&dscores, true), (&q, false), &mut part_mut(dk, &piece))?;
                    }
                    step.free(dscores);
                }
                step.free(weights);
            }
            step.free(dy);
            for (var, gradient) in [(&q, dq), (&k, dk), (&v, dv)] {
                if let Some(gradient) = gradient {
                    back.add(var, gradient)?;
                }
            }
            Ok(())
        }))
    }
}
