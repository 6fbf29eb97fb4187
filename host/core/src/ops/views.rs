//! Other orders and parts of a variable's elements: permutations, broadcasts, parts, flips,
//! concatenations and padding.
//!
//! All but reshapes are one launch of a strided copy. The gradient of each is another such copy, or
//! a sum.
//!
//! Invariant: an element is moved bit by bit, except that a BF16 NaN may change its payload.

use super::broadcast::{Merged, broadcast, broadcast_strides, strides_of};
use super::fold::sum_to;
use super::reductions::{Extents, extent_number};
use super::slice::{concat_of, part_of, slice};
use super::transpose::permuted;
use crate::elementary;
use crate::error::{Error, Result};
use crate::step::Step;
use crate::tape::{AnyVar, Var};
use crate::tensor::{Shape, Source, Stored, Target, Tensor};
use kernels::broadcast::{OPERAND, RANK};
use kernels::strided;
use std::ops::Range;

/// The places of a shape's elements in a tensor: the index of the first, and the strides.
#[derive(Clone, Debug)]
pub(super) struct Places {
    pub(super) start: usize,
    pub(super) strides: Vec<isize>,
}

impl Places {
    /// The places of a row-major tensor.
    pub(super) fn of(shape: Shape) -> Self {
        Self { start: 0, strides: strides_of(shape) }
    }

    /// The places from `first` on along an extent.
    pub(super) fn from(mut self, extent: usize, first: usize) -> Self {
        self.start = self.start.wrapping_add((first as isize * self.strides[extent]) as usize);
        self
    }
}

/// Copies the elements of a shape from their places in `x` to those in `out`.
pub(super) fn copy<'s, S: Stored>(
    step: &Step<'s>,
    shape: Shape,
    (x, from): (&impl Source<'s, S>, &Places),
    (out, to): (&mut impl Target<'s, S>, &Places),
) -> Result<()> {
    let length = shape.elements();
    if length == 0 {
        return Ok(());
    }
    let merged = Merged::new(shape.extents(), [&from.strides, &to.strides]);
    let mut layout = [0; 20];
    let (extents, rest) = layout.split_at_mut(RANK);
    merged.write_extents(extents);
    for ((at, places), words) in [from, to].into_iter().enumerate().zip(rest.chunks_exact_mut(OPERAND)) {
        merged.write_strides(at, &mut words[..RANK]);
        words[RANK] = places.start;
    }
    step.launch(strided::copy_strided { x: x.slice(), layout, length, out: out.out() })
}

/// Returns the elements of a shape from their places in `x`.
pub(super) fn taken<'s, S: Stored>(
    step: &Step<'s>,
    shape: Shape,
    x: &impl Source<'s, S>,
    from: &Places,
) -> Result<Tensor<'s, S>> {
    let mut out = step.empty(shape)?;
    copy(step, shape, (x, from), (&mut out, &Places::of(shape)))?;
    Ok(out)
}

/// Returns x repeated to a shape to which it broadcasts.
pub(super) fn repeated<'s, S: Stored>(step: &Step<'s>, x: &impl Source<'s, S>, to: Shape) -> Result<Tensor<'s, S>> {
    taken(step, to, x, &Places { start: 0, strides: broadcast_strides(x.shape(), to) })
}

/// Returns zeros of a shape, with x at its places.
pub(super) fn among_zeros<'s, S: Stored>(
    step: &Step<'s>,
    x: &impl Source<'s, S>,
    to: Shape,
    places: &Places,
) -> Result<Tensor<'s, S>> {
    let mut out = step.empty(to)?;
    elementary::fill_into(step, &mut out, 0.0)?;
    copy(step, x.shape(), (x, &Places::of(x.shape())), (&mut out, places))?;
    Ok(out)
}

impl<'s, S: Stored> Var<'s, S> {
    /// A view of the elements, in their order, with other extents; `shape`: as many elements.
    /// Nothing is copied.
    ///
    /// # Errors
    /// [`Error::Misuse`] when the number of elements differs.
    #[track_caller]
    pub fn reshape(&self, shape: impl Into<Shape>) -> Result<Self> {
        let op = self.op("reshape", &[self])?;
        let (y, x) = (self.value().reshape(shape)?, self.keep());
        Ok(op.record(y, move |back, dy| {
            let x = x.var(back)?;
            let dx = dy.reshape(x.shape())?;
            back.add(&x, dx)
        }))
    }

    /// A view of the elements with an extent of 1 before the extent `at`. A negative number counts
    /// from the end: -1 adds it after the last. Nothing is copied.
    ///
    /// # Errors
    /// [`Error::Misuse`] when there is no such place, or more than six extents.
    #[track_caller]
    pub fn unsqueeze(&self, at: i32) -> Result<Self> {
        const OP: &str = "unsqueeze";
        let mut extents = self.shape().extents().to_vec();
        let last = extents.len() as i32;
        let place = if at < 0 { at + last + 1 } else { at };
        if !(0..=last).contains(&place) {
            return Err(Error::misuse(OP, format!("a place among {last} extents"), at.to_string()));
        }
        extents.insert(place as usize, 1);
        self.reshape(Shape::of(OP, &extents)?)
    }

    /// A view of the elements without the extent `at`, which is 1. A negative number counts from
    /// the end. Nothing is copied.
    ///
    /// # Errors
    /// [`Error::Misuse`] unless there is such an extent of 1.
    #[track_caller]
    pub fn squeeze(&self, at: i32) -> Result<Self> {
        const OP: &str = "squeeze";
        let at = extent_number(OP, self.shape(), at)?;
        let mut extents = self.shape().extents().to_vec();
        if extents.remove(at) != 1 {
            return Err(Error::misuse(OP, "an extent of 1", format!("extent {at} of {}", self.shape())));
        }
        self.reshape(Shape::of(OP, &extents)?)
    }

    /// The extents in another order: extent i of the result is extent `order[i]`.
    ///
    /// # Errors
    /// [`Error::Misuse`] unless `order` has each extent's number once; [`Error::ArenaFull`].
    #[track_caller]
    pub fn permute(&self, order: impl Into<Extents>) -> Result<Self> {
        const OP: &str = "permute";
        let shape = self.shape();
        let order = order.into().numbers(OP, shape)?;
        if order.len() != shape.extents().len() {
            return Err(Error::misuse(OP, format!("each extent of {shape} once"), format!("{order:?}")));
        }
        let mut inverse = order.clone();
        order.iter().enumerate().for_each(|(at, &from)| inverse[from] = at);
        let op = self.op(OP, &[self])?;
        let (y, x) = (permuted(op.step(), self.value(), &order)?, self.keep());
        Ok(op.record(y.save(), move |back, dy| {
            let (x, dx) = (x.var(back)?, permuted(back.step(), &dy, &inverse)?);
            back.step().free(dy);
            back.add(&x, dx)
        }))
    }

    /// Swaps two extents. A negative number counts from the end.
    ///
    /// # Errors
    /// [`Error::Misuse`] when there is no such extent; [`Error::ArenaFull`].
    #[track_caller]
    pub fn transpose(&self, a: i32, b: i32) -> Result<Self> {
        let shape = self.shape();
        let mut order: Vec<i32> = (0..shape.extents().len() as i32).collect();
        order.swap(extent_number("transpose", shape, a)?, extent_number("transpose", shape, b)?);
        self.permute(order)
    }

    /// The variable repeated along extents of 1 and new extents before the first, as NumPy
    /// broadcasts. Pointwise ops broadcast by themselves.
    ///
    /// # Errors
    /// [`Error::Misuse`] unless it broadcasts to the shape; [`Error::ArenaFull`].
    #[track_caller]
    pub fn broadcast_to(&self, shape: impl Into<Shape>) -> Result<Self> {
        const OP: &str = "broadcast_to";
        let to = shape.into();
        if broadcast(OP, &[Some(self.shape()), Some(to)])? != to {
            return Err(Error::misuse(OP, format!("a shape that broadcasts to {to}"), self.shape().to_string()));
        }
        let op = self.op(OP, &[self])?;
        let (y, x) = (repeated(op.step(), self.value(), to)?, self.keep());
        Ok(op.record(y.save(), move |back, dy| {
            let x = x.var(back)?;
            let dx = sum_to(back.step(), &dy, x.shape())?;
            back.step().free(dy);
            back.add(&x, dx)
        }))
    }

    /// The part of an extent in a range. A negative number counts from the end.
    ///
    /// # Errors
    /// [`Error::Misuse`] when there is no such extent, or the range exceeds it;
    /// [`Error::ArenaFull`].
    #[track_caller]
    pub fn narrow(&self, extent: i32, range: Range<usize>) -> Result<Self> {
        const OP: &str = "narrow";
        let shape = self.shape();
        let (to, places) = part_of(OP, shape, extent_number(OP, shape, extent)?, &range)?;
        let op = self.op(OP, &[self])?;
        let (y, x) = (taken(op.step(), to, self.value(), &places)?, self.keep());
        Ok(op.record(y.save(), move |back, dy| {
            let (x, dx) = (x.var(back)?, among_zeros(back.step(), &dy, shape, &places)?);
            back.step().free(dy);
            back.add(&x, dx)
        }))
    }

    /// The parts of an extent, each of `size`. The last is shorter if `size` does not divide it.
    ///
    /// # Errors
    /// [`Error::Misuse`] when there is no such extent, or for a size of 0; [`Error::ArenaFull`].
    #[track_caller]
    pub fn split(&self, extent: i32, size: usize) -> Result<Vec<Self>> {
        let number = extent_number("split", self.shape(), extent)?;
        if size == 0 {
            return Err(Error::misuse("split", "parts of at least 1", "0"));
        }
        let all = self.shape().extents()[number];
        self.parts("split", number, (0..all).step_by(size).map(|start| size.min(all - start)))
    }

    /// The elements of an extent, each without it.
    ///
    /// # Errors
    /// [`Error::Misuse`] when there is no such extent; [`Error::ArenaFull`].
    #[track_caller]
    pub fn unbind(&self, extent: i32) -> Result<Vec<Self>> {
        let number = extent_number("unbind", self.shape(), extent)?;
        let parts = self.parts("unbind", number, (0..self.shape().extents()[number]).map(|_| 1))?;
        parts.iter().map(|part| part.squeeze(number as i32)).collect()
    }

    /// Parts of these sizes along an extent, one after another. Their gradients are joined at once.
    #[track_caller]
    fn parts(&self, name: &'static str, extent: usize, sizes: impl Iterator<Item = usize>) -> Result<Vec<Self>> {
        let (op, shape, x) = (self.op(name, &[self])?, self.shape(), self.keep());
        let (mut values, mut all, mut start) = (Vec::new(), Vec::new(), 0);
        for size in sizes {
            let places = Places::of(shape).from(extent, start);
            values.push(taken(op.step(), shape.with(extent, size), self.value(), &places)?.save());
            all.push(places);
            start += size;
        }
        Ok(op.record_all(values, move |back, gradients| {
            let (step, x) = (back.step(), x.var(back)?);
            let mut dx = step.empty(shape)?;
            if gradients.iter().any(Option::is_none) {
                elementary::fill_into(step, &mut dx, 0.0)?;
            }
            for (gradient, places) in gradients.into_iter().zip(&all) {
                if let Some(gradient) = gradient {
                    copy(step, gradient.shape(), (&gradient, &Places::of(gradient.shape())), (&mut dx, places))?;
                    step.free(gradient);
                }
            }
            back.add(&x, dx)
        }))
    }

    /// `N` equal parts of an extent.
    ///
    /// # Errors
    /// [`Error::Misuse`] when there is no such extent, or N does not divide it;
    /// [`Error::ArenaFull`].
    #[track_caller]
    pub fn chunks<const N: usize>(&self, extent: i32) -> Result<[Self; N]> {
        let number = extent_number("chunks", self.shape(), extent)?;
        let all = self.shape().extents()[number];
        if N == 0 || !all.is_multiple_of(N) {
            return Err(Error::misuse("chunks", format!("an extent that {N} divides"), self.shape().to_string()));
        }
        let parts = self.parts("chunks", number, [all / N; N].into_iter())?;
        Ok(parts.try_into().expect("N parts"))
    }

    /// The elements in reverse order along extents.
    ///
    /// # Errors
    /// [`Error::Misuse`] when there is no such extent; [`Error::ArenaFull`].
    #[track_caller]
    pub fn flip(&self, extents: impl Into<Extents>) -> Result<Self> {
        const OP: &str = "flip";
        let shape = self.shape();
        let mut places = Places::of(shape);
        for extent in extents.into().numbers(OP, shape)? {
            places = places.from(extent, shape.extents()[extent].saturating_sub(1));
            places.strides[extent] = -places.strides[extent];
        }
        let op = self.op(OP, &[self])?;
        let (y, x) = (taken(op.step(), shape, self.value(), &places)?, self.keep());
        Ok(op.record(y.save(), move |back, dy| {
            let (x, dx) = (x.var(back)?, taken(back.step(), shape, &dy, &places)?);
            back.step().free(dy);
            back.add(&x, dx)
        }))
    }

    /// The variable between `before` and `after` more elements of `value` along an extent.
    ///
    /// # Errors
    /// [`Error::Misuse`] when there is no such extent; [`Error::ArenaFull`].
    #[track_caller]
    pub fn pad(&self, extent: i32, [before, after]: [usize; 2], value: f32) -> Result<Self> {
        const OP: &str = "pad";
        let shape = self.shape();
        let extent = extent_number(OP, shape, extent)?;
        let to = shape.with(extent, before.saturating_add(shape.extents()[extent]).saturating_add(after));
        let op = self.op(OP, &[self])?;
        let places = Places::of(to).from(extent, before);
        let mut y = op.step().empty(to)?;
        elementary::fill_into(op.step(), &mut y, value)?;
        copy(op.step(), shape, (self.value(), &Places::of(shape)), (&mut y, &places))?;
        let x = self.keep();
        Ok(op.record(y.save(), move |back, dy| {
            let (x, dx) = (x.var(back)?, taken(back.step(), shape, &dy, &places)?);
            back.step().free(dy);
            back.add(&x, dx)
        }))
    }

    /// The parts one after another along an extent; `parts`: at least one, of shapes that differ at
    /// most in that extent.
    ///
    /// # Errors
    /// [`Error::Misuse`] for no parts, for other shapes, or when there is no such extent;
    /// [`Error::ArenaFull`].
    #[track_caller]
    pub fn cat(parts: &[Self], extent: i32) -> Result<Self> {
        const OP: &str = "cat";
        let Some(first) = parts.first() else { return Err(Error::misuse(OP, "at least one part", "none")) };
        let extent = extent_number(OP, first.shape(), extent)?;
        let of: Vec<&dyn AnyVar> = parts.iter().map(|part| part as &dyn AnyVar).collect();
        let op = first.op(OP, &of)?;
        let values: Vec<_> = parts.iter().map(Var::value).collect();
        let y = concat_of(OP, op.step(), &values, extent)?;
        let kept: Vec<_> = parts.iter().map(Var::keep).collect();
        Ok(op.record(y.save(), move |back, dy| {
            let mut start = 0;
            for part in kept {
                let part = part.var(back)?;
                let end = start + part.shape().extents()[extent];
                if part.wants_gradient() {
                    let dx = slice(back.step(), &dy, extent, start..end)?;
                    back.add(&part, dx)?;
                }
                start = end;
            }
            back.step().free(dy);
            Ok(())
        }))
    }

    /// The parts one after another along a new extent before the extent `at`; `parts`: at least
    /// one, of one shape.
    ///
    /// # Errors
    /// The errors of [`Var::unsqueeze`] and [`Var::cat`].
    #[track_caller]
    pub fn stack(parts: &[Self], at: i32) -> Result<Self> {
        let parts = parts.iter().map(|part| part.unsqueeze(at)).collect::<Result<Vec<_>>>()?;
        Self::cat(&parts, at)
    }
}
