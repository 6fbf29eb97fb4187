//! Parts of tensors along an extent: slicing and concatenation.

use super::fill_into;
use crate::error::{Error, Result};
use crate::ops;
use crate::step::Step;
use crate::tape::{AnyVar, Tape, Var};
use crate::tensor::{Shape, Source, Stored, Target, Tensor};
use cuda_std::launch::{PointerMut, Slice};
use kernels::slice as kernel;
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
    let shape = part_of("slice", x.shape(), extent, &range)?;
    let mut y = step.empty(shape)?;
    slice_into(step, x, extent, range.start, &mut y)?;
    Ok(y)
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
    launch(step, x.slice(), [(x.shape(), start), (shape, 0)], extent, shape, y.out())
}

/// The gradient of [`slice()`]: dy at its range of `shape`, and zeros elsewhere. Queued, two
/// launches; no scratch.
///
/// # Errors
/// [`Error::Misuse`] when dy has another shape.
#[track_caller]
pub fn slice_backward<'s, S: Stored>(
    step: &Step<'s>,
    dy: &impl Source<'s, S>,
    shape: impl Into<Shape>,
    extent: usize,
    range: Range<usize>,
) -> Result<Tensor<'s, S>> {
    const OP: &str = "slice_backward";
    let shape = shape.into();
    super::same_shape(OP, part_of(OP, shape, extent, &range)?, dy.shape())?;
    let mut dx = step.empty(shape)?;
    fill_into(step, &mut dx, 0.0)?;
    put(step, dy, &mut dx, extent, range.start)?;
    Ok(dx)
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
    const OP: &str = "concat";
    let Some(first) = parts.first().map(|part| part.shape()) else {
        return Err(Error::misuse(OP, "at least one part", "none"));
    };
    let mut all = 0usize;
    for shape in parts.iter().map(|part| part.shape()) {
        let own = extent_of(OP, shape, extent)?;
        super::same_shape(OP, first, shape.with(extent, extent_of(OP, first, extent)?))?;
        all = all.saturating_add(own);
    }
    let mut y = step.empty(first.with(extent, all))?;
    let mut start = 0;
    for part in parts {
        put(step, *part, &mut y, extent, start)?;
        start += part.shape().extents()[extent];
    }
    Ok(y)
}

/// Copies `part` into `out`, from `start` on along an extent.
fn put<'s, S: Stored>(
    step: &Step<'s>,
    part: &impl Source<'s, S>,
    out: &mut impl Target<'s, S>,
    extent: usize,
    start: usize,
) -> Result<()> {
    let shape = part.shape();
    launch(step, part.slice(), [(shape, 0), (out.shape(), start)], extent, shape, out.out())
}

/// Copies `part` along an extent. `from` and `to` are the shapes of x and `out`, each with the
/// index where the part starts.
fn launch<S: Stored>(
    step: &Step<'_>,
    x: Slice<'_, S>,
    [from, to]: [(Shape, usize); 2],
    extent: usize,
    part: Shape,
    out: PointerMut<'_, S>,
) -> Result<()> {
    if part.elements() == 0 {
        return Ok(());
    }
    let inner: usize = part.extents()[extent + 1..].iter().product();
    let cols = part.extents()[extent] * inner;
    let stride = |shape: Shape| shape.extents()[extent] * inner;
    step.launch(kernel::copy_rows {
        x,
        rows: part.elements() / cols,
        cols,
        stride: stride(from.0),
        start: from.1 * inner,
        out_stride: stride(to.0),
        out_start: to.1 * inner,
        out,
    })
}

/// Returns the extent of that number.
fn extent_of(op: &'static str, shape: Shape, extent: usize) -> Result<usize> {
    let found = shape.extents().get(extent).copied();
    found.ok_or_else(|| Error::misuse(op, format!("a tensor with an extent number {extent}"), shape.to_string()))
}

/// Returns the shape of a range of it.
fn part_of(op: &'static str, shape: Shape, extent: usize, range: &Range<usize>) -> Result<Shape> {
    let all = extent_of(op, shape, extent)?;
    if range.start <= range.end && range.end <= all {
        return Ok(shape.with(extent, range.len()));
    }
    Err(Error::misuse(op, format!("a range inside 0..{all}"), format!("{range:?}")))
}

impl<'s> Tape<'_, 's> {
    /// Records [`ops::slice`] of `x`. Backward is [`ops::launch::slice_backward`].
    #[track_caller]
    pub fn slice<S: Stored>(&self, x: &Var<'s, S>, extent: usize, range: Range<usize>) -> Result<Var<'s, S>> {
        let op = self.op("slice", [x])?;
        let (y, x) = (ops::slice(self.step(), x.value(), extent, range.clone())?, *x);
        Ok(op.record(y.save(), move |back, dy| {
            let dx = ops::launch::slice_backward(back.step(), &dy, x.shape(), extent, range)?;
            back.step().free(dy);
            back.add(&x, dx)
        }))
    }

    /// Records [`ops::concat`] of `parts`. The gradient of each part is its slice of the result's
    /// gradient.
    #[track_caller]
    pub fn concat<S: Stored>(&self, parts: &[Var<'s, S>], extent: usize) -> Result<Var<'s, S>> {
        let of: Vec<&dyn AnyVar> = parts.iter().map(|part| part as &dyn AnyVar).collect();
        let op = self.op_of("concat", &of)?;
        let values: Vec<_> = parts.iter().map(Var::value).collect();
        let y = ops::concat(self.step(), &values, extent)?;
        let parts = parts.to_vec();
        Ok(op.record(y.save(), move |back, dy| {
            let mut start = 0;
            for part in &parts {
                let end = start + part.shape().extents()[extent];
                if part.wants_gradient() {
                    let dx = ops::slice(back.step(), &dy, extent, start..end)?;
                    back.add(part, dx)?;
                }
                start = end;
            }
            back.step().free(dy);
            Ok(())
        }))
    }
}
