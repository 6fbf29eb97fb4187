//! Reductions of a variable over any of its extents.
//!
//! Invariant: the tree of a sum depends only on the extents that it reduces; see `fold.rs`.

use super::cast::narrowed;
use super::fold::{Fold, fold};
use super::pointwise;
use super::views::repeated;
use crate::error::{Error, Result};
use crate::ops;
use crate::tape::{Kept, Var};
use crate::tensor::{Shape, Stored, Tensor};
use std::ops::RangeFull;

/// The numbers of extents: one, an array of them, or `..` for all. A negative number counts from
/// the end.
#[derive(Clone, Debug)]
pub struct Extents(Option<Vec<i32>>);

impl From<RangeFull> for Extents {
    fn from(_: RangeFull) -> Self {
        Self(None)
    }
}

impl From<i32> for Extents {
    fn from(number: i32) -> Self {
        Self(Some(vec![number]))
    }
}

impl From<Vec<i32>> for Extents {
    fn from(numbers: Vec<i32>) -> Self {
        Self(Some(numbers))
    }
}

impl From<&[i32]> for Extents {
    fn from(numbers: &[i32]) -> Self {
        Self(Some(numbers.to_vec()))
    }
}

impl<const N: usize> From<[i32; N]> for Extents {
    fn from(numbers: [i32; N]) -> Self {
        Self(Some(numbers.to_vec()))
    }
}

impl Extents {
    /// Returns the numbers, each of an extent of the shape.
    ///
    /// # Errors
    /// [`Error::Misuse`] of `op` when there is no such extent, or a number occurs twice.
    pub(super) fn numbers(&self, op: &'static str, shape: Shape) -> Result<Vec<usize>> {
        let Some(given) = &self.0 else { return Ok((0..shape.extents().len()).collect()) };
        let numbers = given.iter().map(|&number| extent_number(op, shape, number)).collect::<Result<Vec<_>>>()?;
        match (1..numbers.len()).find(|&at| numbers[..at].contains(&numbers[at])) {
            Some(_) => Err(Error::misuse(op, format!("each extent of {shape} at most once"), format!("{given:?}"))),
            None => Ok(numbers),
        }
    }

    /// Returns true for each extent of the shape that is among the numbers.
    fn flags(&self, op: &'static str, shape: Shape) -> Result<Vec<bool>> {
        let numbers = self.numbers(op, shape)?;
        Ok((0..shape.extents().len()).map(|at| numbers.contains(&at)).collect())
    }
}

/// Returns the number of an extent, from the first.
pub(super) fn extent_number(op: &'static str, shape: Shape, number: i32) -> Result<usize> {
    let rank = shape.extents().len() as i32;
    let from_first = if number < 0 { number + rank } else { number };
    if (0..rank).contains(&from_first) {
        return Ok(from_first as usize);
    }
    Err(Error::misuse(op, format!("an extent of {shape}"), format!("extent number {number}")))
}

/// A reduction over some extents of a shape.
struct Reduced {
    /// True for each extent that is reduced.
    flags: Vec<bool>,
    /// The shape without them.
    without: Shape,
    /// The number of elements that become one.
    count: usize,
}

impl Reduced {
    fn new(op: &'static str, shape: Shape, extents: &Extents) -> Result<Self> {
        let flags = extents.flags(op, shape)?;
        let pairs = || shape.extents().iter().copied().zip(flags.iter().copied());
        let without: Vec<usize> = pairs().filter(|(_, reduced)| !reduced).map(|(extent, _)| extent).collect();
        let count = pairs().filter(|(_, reduced)| *reduced).map(|(extent, _)| extent).product();
        Ok(Self { without: Shape::of(op, &without)?, flags, count })
    }
}

impl<'s, S: Stored> Var<'s, S> {
    /// The sum over extents; result: the shape without them. `..` gives the sum of all elements, of
    /// shape `[]`. Sums are f32, in an order that depends only on the extents, and BF16 is rounded
    /// once.
    ///
    /// # Errors
    /// [`Error::Misuse`] when there is no such extent; [`Error::ArenaFull`].
    #[track_caller]
    pub fn sum(&self, extents: impl Into<Extents>) -> Result<Self> {
        let (sum, reduced) = self.scaled_sum("sum", &extents.into(), |_| 1.0)?;
        sum.reshape(reduced.without)
    }

    /// The sum over extents, which remain as 1; see [`Var::sum`].
    #[track_caller]
    pub fn sum_keep(&self, extents: impl Into<Extents>) -> Result<Self> {
        self.scaled_sum("sum", &extents.into(), |_| 1.0).map(|(sum, _)| sum)
    }

    /// The mean over extents: the sum times the reciprocal of the number of elements. Without
    /// elements it is NaN. See [`Var::sum`].
    #[track_caller]
    pub fn mean(&self, extents: impl Into<Extents>) -> Result<Self> {
        let (mean, reduced) = self.scaled_sum("mean", &extents.into(), |count| 1.0 / count as f32)?;
        mean.reshape(reduced.without)
    }

    /// The mean over extents, which remain as 1; see [`Var::mean`].
    #[track_caller]
    pub fn mean_keep(&self, extents: impl Into<Extents>) -> Result<Self> {
        self.scaled_sum("mean", &extents.into(), |count| 1.0 / count as f32).map(|(mean, _)| mean)
    }

    #[track_caller]
    fn scaled_sum(&self, name: &'static str, extents: &Extents, scale: fn(usize) -> f32) -> Result<(Self, Reduced)> {
        let (op, reduced) = (self.op(name, &[self])?, Reduced::new(name, self.shape(), extents)?);
        let scale = scale(reduced.count);
        let y = fold(op.step(), name, Fold::Sum, self.value(), &reduced.flags, scale)?;
        let (y, x) = (narrowed(op.step(), y)?.save(), self.keep());
        let y = op.record(y, move |back, dy| {
            let (step, x) = (back.step(), x.var(back)?);
            let scaled = if scale == 1.0 { None } else { Some(ops::scale(step, &dy, scale)?) };
            let dx = repeated(step, scaled.as_ref().unwrap_or(&dy), x.shape())?;
            scaled.into_iter().for_each(|scaled| step.free(scaled));
            step.free(dy);
            back.add(&x, dx)
        });
        Ok((y, reduced))
    }

    /// The variance over extents: the mean squared distance from the mean, with `n - correction`
    /// instead of the number n of elements. A correction of 1, PyTorch's default, makes it
    /// unbiased. See [`Var::sum`].
    #[track_caller]
    pub fn variance(&self, extents: impl Into<Extents>, correction: usize) -> Result<Self> {
        let extents = extents.into();
        let count = Reduced::new("variance", self.shape(), &extents)?.count;
        let centered = self.sub(self.mean_keep(extents.clone())?)?;
        let scale = 1.0 / (count as f32 - correction as f32).max(0.0);
        centered.square()?.sum(extents)?.mul(scale)
    }

    /// The largest element over extents, or NaN if there is one. Equal elements share the gradient
    /// evenly, as those of PyTorch's `amax`. See [`Var::sum`].
    ///
    /// # Errors
    /// [`Error::Misuse`] when there is no such extent, or nothing to reduce; [`Error::ArenaFull`].
    #[track_caller]
    pub fn max(&self, extents: impl Into<Extents>) -> Result<Self> {
        let (y, reduced) = self.extreme("max", &extents.into(), Fold::Max)?;
        y.reshape(reduced.without)
    }

    /// The largest element over extents, which remain as 1; see [`Var::max`].
    #[track_caller]
    pub fn max_keep(&self, extents: impl Into<Extents>) -> Result<Self> {
        self.extreme("max", &extents.into(), Fold::Max).map(|(y, _)| y)
    }

    /// The smallest element over extents, or NaN if there is one; see [`Var::max`].
    #[track_caller]
    pub fn min(&self, extents: impl Into<Extents>) -> Result<Self> {
        let (y, reduced) = self.extreme("min", &extents.into(), Fold::Min)?;
        y.reshape(reduced.without)
    }

    /// The smallest element over extents, which remain as 1; see [`Var::max`].
    #[track_caller]
    pub fn min_keep(&self, extents: impl Into<Extents>) -> Result<Self> {
        self.extreme("min", &extents.into(), Fold::Min).map(|(y, _)| y)
    }

    #[track_caller]
    fn extreme(&self, name: &'static str, extents: &Extents, kind: Fold) -> Result<(Self, Reduced)> {
        let (op, reduced) = (self.op(name, &[self])?, Reduced::new(name, self.shape(), extents)?);
        let y = fold(op.step(), name, kind, self.value(), &reduced.flags, 1.0)?;
        let y = narrowed(op.step(), y)?.save();
        let (x, of_y, flags) = (self.keep(), Kept::of(&y), reduced.flags.clone());
        let y = op.record(y, move |back, dy: Tensor<'_, S>| {
            let (step, x, y) = (back.step(), x.var(back)?, of_y.value(back));
            let mask = pointwise::equal(step, x.value(), &y)?;
            let count = fold(step, name, Fold::Sum, &mask, &flags, 1.0)?;
            let count: Tensor<'_, S> = narrowed(step, count)?;
            let share = pointwise::div(step, &dy, &count)?;
            let dx = pointwise::mul(step, &mask, &share)?;
            for tensor in [mask, count, share, dy] {
                step.free(tensor);
            }
            back.add(&x, dx)
        });
        Ok((y, reduced))
    }

    /// The logarithm of the sum of the exponentials over extents, without overflow: the largest
    /// element is subtracted first. See [`Var::sum`].
    ///
    /// # Errors
    /// [`Error::Misuse`] when there is no such extent, or nothing to reduce; [`Error::ArenaFull`].
    #[track_caller]
    pub fn logsumexp(&self, extents: impl Into<Extents>) -> Result<Self> {
        let extents = extents.into();
        let reduced = Reduced::new("logsumexp", self.shape(), &extents)?;
        let op = self.op("logsumexp", &[self])?;
        let largest = fold(op.step(), "logsumexp", Fold::Max, self.value(), &reduced.flags, 1.0)?;
        let largest: Tensor<'_, S> = narrowed(op.step(), largest)?;
        // An infinite one is not subtracted: the difference would not be a number.
        let is_finite = pointwise::less(op.step(), &pointwise::abs(op.step(), &largest)?, f32::INFINITY)?;
        let shift = op.unrecorded(pointwise::choose(op.step(), &is_finite, &largest, 0.0)?.save());
        let sum = self.sub(shift)?.exp()?.sum_keep(extents)?;
        sum.log()?.add(shift)?.reshape(reduced.without)
    }
}
