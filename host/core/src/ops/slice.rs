//! Parts of tensors along an extent: slicing and concatenation.

use super::views::{Places, copy, taken};
use crate::error::{Error, Result};
use crate::step::Step;
use crate::tensor::{Shape, Source, Stored, Target, Tensor};
use std::ops::Range;

/// `y[.., i, ..] = x[.., range.start + i, ..]` along the extent number `extent`; `x`: any shape,
/// `y`: the same with the range's length there. Queued, one launch; no scratch.
///
/// # Errors
/// [`Error::Misuse`] when there is no such extent, or the range exceeds it; [`Error::ArenaFull`].
#[track_caller]
pub fn slice<'s, S: Stored>(
    step: &Step<'s>,
    x: &impl Source<'s, S>,
    extent: usize,
    range: Range<usize>,
) -> Result<Tensor<'s, S>> {
    let (part, places) = part_of("slice", x.shape(), extent, &range)?;
    taken(step, part, x, &places)
}

/// Writes a [`slice()`] of x, from `start` on, to `y`, whose shape lies within that of x.
pub(super) fn slice_into<'s, S: Stored>(
    step: &Step<'s>,
    x: &impl Source<'s, S>,
    extent: usize,
    start: usize,
    y: &mut impl Target<'s, S>,
) -> Result<()> {
    let shape = y.shape();
    copy(step, shape, (x, &Places::of(x.shape()).from(extent, start)), (y, &Places::of(shape)))
}

/// The parts one after another along the extent number `extent`; `parts`: at least one, of shapes
/// that differ at most in that extent. Queued, one launch per part; no scratch. The gradient of
/// each part is a [`slice()`].
///
/// # Errors
/// [`Error::Misuse`] for no parts, for other shapes, or when there is no such extent;
/// [`Error::ArenaFull`].
#[track_caller]
pub fn concat<'s, S: Stored>(step: &Step<'s>, parts: &[&impl Source<'s, S>], extent: usize) -> Result<Tensor<'s, S>> {
    concat_of("concat", step, parts, extent)
}

/// Computes [`concat`] for the op of this name.
pub(super) fn concat_of<'s, S: Stored>(
    op: &'static str,
    step: &Step<'s>,
    parts: &[&impl Source<'s, S>],
    extent: usize,
) -> Result<Tensor<'s, S>> {
    let Some(first) = parts.first().map(|part| part.shape()) else {
        return Err(Error::misuse(op, "at least one part", "none"));
    };
    let mut all = 0usize;
    for shape in parts.iter().map(|part| part.shape()) {
        let own = extent_of(op, shape, extent)?;
        super::same_shape(op, first, shape.with(extent, extent_of(op, first, extent)?))?;
        all = all.saturating_add(own);
    }
    let to = first.with(extent, all);
    let (mut y, mut start) = (step.empty(to)?, 0);
    for part in parts {
        let shape = part.shape();
        copy(step, shape, (*part, &Places::of(shape)), (&mut y, &Places::of(to).from(extent, start)))?;
        start += shape.extents()[extent];
    }
    Ok(y)
}

/// Returns the shape of a range of an extent, and the places of its elements.
pub(super) fn part_of(op: &'static str, shape: Shape, extent: usize, range: &Range<usize>) -> Result<(Shape, Places)> {
    let all = extent_of(op, shape, extent)?;
    if range.start <= range.end && range.end <= all {
        return Ok((shape.with(extent, range.len()), Places::of(shape).from(extent, range.start)));
    }
    Err(Error::misuse(op, format!("a range inside 0..{all}"), format!("{range:?}")))
}

/// Returns the extent of that number.
fn extent_of(op: &'static str, shape: Shape, extent: usize) -> Result<usize> {
    let found = shape.extents().get(extent).copied();
    found.ok_or_else(|| Error::misuse(op, format!("a tensor with an extent number {extent}"), shape.to_string()))
}
