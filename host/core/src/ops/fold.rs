//! Reductions over any extents.
//!
//! Neighboring extents are reduced by one launch, and those further apart by one after another, the
//! last first. An extent of more than 1024 is reduced in chunks of 1024, and the results in turn.
//! Between launches the results are f32, and a result in BF16 is rounded once.
//!
//! Invariant: the tree of a reduction depends only on the extents that it reduces.

use super::cast::narrowed;
use crate::elementary;
use crate::error::{Error, Result};
use crate::step::Step;
use crate::tensor::{Shape, Source, Stored, Target, Tensor};
use cuda_std::launch::{PointerMut, Slice};
use kernels::fold as kernel;

/// A reduction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fold {
    Sum,
    Max,
    Min,
}

impl Fold {
    fn launch<S: Stored>(
        self,
        step: &Step<'_>,
        x: Slice<'_, S>,
        [reduced, inner]: [usize; 2],
        scale: f32,
        out: PointerMut<'_, f32>,
    ) -> Result<()> {
        match self {
            Self::Sum => step.launch(kernel::fold_sum { x, reduced, inner, scale, out }),
            Self::Max => step.launch(kernel::fold_max { x, reduced, inner, scale, out }),
            Self::Min => step.launch(kernel::fold_min { x, reduced, inner, scale, out }),
        }
    }

    /// Reduces the middle of `[outer, reduced, inner]`, none of which is 0.
    fn middle<'s, S: Stored>(
        self,
        step: &Step<'s>,
        x: &impl Source<'s, S>,
        [outer, reduced, inner]: [usize; 3],
        scale: f32,
    ) -> Result<Tensor<'s>> {
        let chunks = reduced.div_ceil(kernel::CHUNK);
        let mut out = step.empty([outer, chunks, inner])?;
        let own_scale = if chunks == 1 { scale } else { 1.0 };
        self.launch(step, x.slice(), [reduced, inner], own_scale, out.out())?;
        if chunks == 1 {
            return Ok(out);
        }
        let all = self.middle(step, &out, [outer, chunks, inner], scale)?;
        step.free(out);
        Ok(all)
    }
}

/// Reduces the extents for which `reduced` is true, and multiplies by `scale`. They remain as 1.
pub(super) fn fold<'s, S: Stored>(
    step: &Step<'s>,
    op: &'static str,
    fold: Fold,
    x: &impl Source<'s, S>,
    reduced: &[bool],
    scale: f32,
) -> Result<Tensor<'s>> {
    let extents = x.shape().extents().to_vec();
    let to: Vec<usize> = extents.iter().zip(reduced).map(|(&extent, &is)| if is { 1 } else { extent }).collect();
    let to = Shape::of(op, &to)?;
    if to.elements() == 0 {
        return step.empty(to);
    }
    if x.shape().elements() == 0 {
        if fold == Fold::Sum {
            return elementary::fill(step, to, 0.0 * scale);
        }
        return Err(Error::misuse(op, "at least one element to reduce", x.shape().to_string()));
    }
    // Each group of neighbors: from the first to past the last. Extents of 1 belong to any group.
    let is_one = |at: usize| extents[at] == 1;
    let mut groups: Vec<[usize; 2]> = Vec::new();
    for at in (0..extents.len()).filter(|&at| reduced[at] && !is_one(at)) {
        match groups.last_mut().filter(|group| (group[1]..at).all(is_one)) {
            Some(group) => group[1] = at + 1,
            None => groups.push([at, at + 1]),
        }
    }
    let product = |extents: &[usize]| extents.iter().product::<usize>();
    let mut left = extents.clone();
    let mut sum: Option<Tensor<'s>> = None;
    let last = groups.len().saturating_sub(1);
    if groups.is_empty() {
        groups.push([0, 0]);
    }
    for (number, [first, end]) in groups.into_iter().rev().enumerate() {
        let parts = [product(&left[..first]), product(&left[first..end]), product(&left[end..])];
        let scale = if number == last { scale } else { 1.0 };
        let next = match &sum {
            Some(sum) => fold.middle(step, sum, parts, scale)?,
            None => fold.middle(step, x, parts, scale)?,
        };
        left[first..end].fill(1);
        if let Some(before) = sum.replace(next) {
            step.free(before);
        }
    }
    sum.expect("there is a group").reshape(to)
}

/// Returns the sum of x over the extents along which a tensor of `shape` repeats to x's.
pub(super) fn sum_to<'s, S: Stored>(step: &Step<'s>, x: &impl Source<'s, S>, shape: Shape) -> Result<Tensor<'s, S>> {
    let extents = x.shape().extents().to_vec();
    let absent = extents.len() - shape.extents().len();
    let reduced: Vec<bool> =
        (0..extents.len()).map(|at| at < absent || (shape.extents()[at - absent] == 1 && extents[at] != 1)).collect();
    let sum = fold(step, "sum", Fold::Sum, x, &reduced, 1.0)?;
    narrowed(step, sum)?.reshape(shape)
}
