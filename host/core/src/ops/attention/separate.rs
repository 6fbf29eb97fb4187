//! Attention of queries, keys and values that are separate variables, composed of products and a
//! softmax.
//!
//! The matrices are computed in pieces whose scores are few next to the activations, and the
//! backward pass computes the scores again.
//!
//! Invariant: the bits are those of the same products and softmax over all matrices at once.

use super::super::Activation;
use super::super::matmul::{Gemm, gemm_into};
use super::super::pieces::pieces;
use super::super::softmax::{softmax, softmax_backward};
use crate::elementary::fill_into;
use crate::error::{Error, Result};
use crate::step::Step;
use crate::tape::Var;
use crate::tensor::{LentMut, Saved, Shape, Source, Tensor};
use std::ops::Range;

/// The extents of attention.
#[derive(Clone, Copy)]
struct Sizes {
    matrices: usize,
    queries: usize,
    keys: usize,
    /// The columns of queries and keys, and those of values.
    columns: [usize; 2],
}

impl Sizes {
    fn new([q, k, v]: [Shape; 3]) -> Result<Self> {
        let (q_extents, k_extents, v_extents) = (q.extents(), k.extents(), v.extents());
        if let ([before @ .., queries, head], [k_before @ .., keys, k_head], [v_before @ .., values, width]) =
            (q_extents, k_extents, v_extents)
            && [before, before] == [k_before, v_before]
            && [head, keys] == [k_head, values]
        {
            let matrices = before.iter().product();
            return Ok(Self { matrices, queries: *queries, keys: *keys, columns: [*head, *width] });
        }
        let expected = "queries [.., n, head], keys [.., m, head] and values [.., m, width]";
        Err(Error::misuse("attend", expected, format!("{q}, {k} and {v}")))
    }

    /// Returns ranges of matrices whose scores exist at a time.
    fn pieces<S>(self) -> impl Iterator<Item = Range<usize>> + use<S> {
        let Self { matrices, queries, keys, columns: [head, width] } = self;
        let bytes = queries.saturating_mul(keys).saturating_mul(size_of::<S>());
        pieces(matrices, bytes, &[queries * head, keys * head, queries * width, keys * width])
    }

    /// Returns the weights of the values for some matrices, `[matrices, queries, keys]`.
    fn weights<'s, S: Activation>(
        self,
        step: &Step<'s>,
        [q, k]: [&Saved<'s, S>; 2],
        piece: &Range<usize>,
    ) -> Result<Tensor<'s, S>> {
        let mut scores = step.empty([piece.len(), self.queries, self.keys])?;
        let form = Gemm::new(self.queries, self.keys, self.columns[0]).transpose_b();
        multiply(step, form, (&part(q, piece), &part(k, piece)), &mut scores, &(0..piece.len()))?;
        let weights = softmax(step, &scores)?;
        step.free(scores);
        Ok(weights)
    }
}

/// Returns some matrices of a tensor.
fn part<'s, S: Activation>(x: &impl Source<'s, S>, piece: &Range<usize>) -> Saved<'s, S> {
    let [rows, columns] = *x.shape().extents().last_chunk().expect("`Sizes::new` has found two extents");
    let matrix = rows * columns;
    let memory = x.memory().part(piece.start * matrix, piece.len() * matrix);
    Saved::new(memory, [piece.len(), rows, columns].into())
}

/// Writes products of packed matrices, one for each of `piece`, to those of `out`.
fn multiply<'s, S: Activation>(
    step: &Step<'s>,
    form: Gemm,
    (a, b): (&impl Source<'s, S>, &impl Source<'s, S>),
    out: &mut Tensor<'s, S>,
    piece: &Range<usize>,
) -> Result<()> {
    let Gemm { m, n, k, .. } = form;
    let memory = out.memory().part(piece.start * m * n, piece.len() * m * n);
    let mut out = LentMut::new(memory, [piece.len(), m, n].into());
    if piece.is_empty() || m == 0 || n == 0 {
        return Ok(());
    }
    if k == 0 {
        return fill_into(step, &mut out, 0.0);
    }
    let form = Gemm { batches: piece.len(), stride_a: m * k, stride_b: k * n, stride_c: m * n, ..form };
    gemm_into(step, &form, a, b, None::<&Tensor<'s>>, &mut out)
}

impl<'s, S: Activation> Var<'s, S> {
    /// `softmax(q k^T) v` for each matrix, over the last two extents; this variable, q:
    /// `[.., queries, head]`, `keys`: `[.., keys, head]`, `values`: `[.., keys, width]`, result:
    /// `[.., queries, width]`. The extents before are equal. Scale q beforehand, by
    /// `1 / sqrt(head)` in a transformer. The scores never exist as a whole.
    ///
    /// # Errors
    /// [`Error::Misuse`] for other shapes; [`Error::ArenaFull`].
    ///
    /// Source: Vaswani et al., 2017.
    #[track_caller]
    pub fn attend(&self, keys: &Self, values: &Self) -> Result<Self> {
        let sizes = Sizes::new([self.shape(), keys.shape(), values.shape()])?;
        let Sizes { queries, keys: count, columns: [head, width], .. } = sizes;
        let op = self.op("attend", &[self, keys, values])?;
        let step = op.step();
        let mut y = step.empty(self.shape().with_last(width))?;
        for piece in sizes.pieces::<S>() {
            let weights = sizes.weights(step, [self.value(), keys.value()], &piece)?;
            let form = Gemm::new(queries, width, count);
            multiply(step, form, (&weights, &part(values.value(), &piece)), &mut y, &piece)?;
            step.free(weights);
        }
        let kept = [self.keep(), keys.keep(), values.keep()];
        Ok(op.record(y.save(), move |back, dy| {
            let step = back.step();
            let [q, k, v] = [kept[0].var(back)?, kept[1].var(back)?, kept[2].var(back)?];
            let room = |var: &Var<'_, S>| var.wants_gradient().then(|| step.empty(var.shape())).transpose();
            let [mut dq, mut dk, mut dv] = [room(&q)?, room(&k)?, room(&v)?];
            for piece in sizes.pieces::<S>() {
                let weights = sizes.weights(step, [q.value(), k.value()], &piece)?;
                let dy = part(&dy, &piece);
                if let Some(dv) = &mut dv {
                    let form = Gemm::new(count, width, queries).transpose_a();
                    multiply(step, form, (&weights, &dy), dv, &piece)?;
                }
                if dq.is_some() || dk.is_some() {
                    let mut dweights = step.empty(weights.shape())?;
                    let form = Gemm::new(queries, count, width).transpose_b();
                    multiply(step, form, (&dy, &part(v.value(), &piece)), &mut dweights, &(0..piece.len()))?;
                    let dscores = softmax_backward(step, &weights, &dweights)?;
                    step.free(dweights);
                    if let Some(dq) = &mut dq {
                        let form = Gemm::new(queries, head, count);
                        multiply(step, form, (&dscores, &part(k.value(), &piece)), dq, &piece)?;
                    }
                    if let Some(dk) = &mut dk {
                        let form = Gemm::new(count, head, queries).transpose_a();
                        multiply(step, form, (&dscores, &part(q.value(), &piece)), dk, &piece)?;
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
