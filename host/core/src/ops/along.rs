//! Ops that select, add and count along an extent.
//!
//! Invariant: the order of a sum follows from the ids, so no bit depends on the device. It is
//! ascending order of the places, except for whole rows, which are added like embeddings'.

use super::cast::narrowed;
use super::embedding::add_rows;
use super::reductions::extent_number;
use crate::error::{Error, Result};
use crate::indices::{IndexSource, Indices};
use crate::preconditions::IndexBound;
use crate::step::Step;
use crate::tape::{Kept, Var};
use crate::tensor::{Shape, Source, Stored, Target, Tensor};
use kernels::{along, embedding, fold};

/// The extents before an extent, itself, and after it.
fn around(shape: Shape, extent: usize) -> [usize; 3] {
    let extents = shape.extents();
    let product = |extents: &[usize]| extents.iter().product::<usize>();
    [product(&extents[..extent]), extents[extent], product(&extents[extent + 1..])]
}

/// The places of ids along an extent of a shape.
#[derive(Clone, Copy, Debug)]
struct Along {
    shape: Shape,
    extent: usize,
    /// The number of ids along the extent.
    count: usize,
    /// The strides of ids: before the extent, along it, and after it.
    strides: [usize; 3],
}

impl Along {
    /// Returns the places of ids that have one extent, or all of x's and any number along the
    /// extent.
    fn new(op: &'static str, shape: Shape, extent: usize, ids: Shape) -> Result<Self> {
        if let [count] = *ids.extents()
            && shape.extents().len() > 1
        {
            return Ok(Self { shape, extent, count, strides: [0, 1, 0] });
        }
        let count = ids.extents().get(extent).copied().unwrap_or(0);
        if ids != shape.with(extent, count) {
            let expected = format!("ids of one extent, or of shape {shape} but for extent {extent}");
            return Err(Error::misuse(op, expected, ids.to_string()));
        }
        let [_, _, inner] = around(shape, extent);
        Ok(Self { shape, extent, count, strides: [count * inner, inner, 1] })
    }

    fn bound(&self) -> IndexBound {
        IndexBound::below(self.shape.extents()[self.extent])
    }

    fn selected(&self) -> Shape {
        self.shape.with(self.extent, self.count)
    }

    /// True if an id selects a row.
    fn is_of_rows(&self) -> bool {
        let [outer, _, inner] = around(self.shape, self.extent);
        outer == 1 && self.strides[1] == 1 && (self.strides[2] == 0 || inner == 1)
    }

    /// Returns the selected elements of x.
    fn take<'s, S: Stored>(
        &self,
        step: &Step<'s>,
        x: &impl Source<'s, S>,
        ids: &impl Source<'s, u32>,
    ) -> Result<Tensor<'s, S>> {
        let (mut out, [_, n, inner]) = (step.empty(self.selected())?, around(self.shape, self.extent));
        if self.selected().elements() == 0 {
            return Ok(out);
        }
        let (x, ids) = (x.slice(), ids.slice());
        if self.is_of_rows() {
            step.launch(embedding::gather { x, ids, cols: inner, y: out.out() })?;
            return Ok(out);
        }
        step.launch(along::take_along { x, ids, n, count: self.count, inner, strides: self.strides, out: out.out() })?;
        Ok(out)
    }

    /// Returns the sums of the elements of x, of the selected shape, at their places; those of rows
    /// as [`add_rows`] adds them.
    fn add<'s, S: Stored>(
        &self,
        step: &Step<'s>,
        x: &impl Source<'s, S>,
        ids: &impl Source<'s, u32>,
    ) -> Result<Tensor<'s, S>> {
        let (mut out, [_, n, inner]) = (step.empty::<f32>(self.shape)?, around(self.shape, self.extent));
        let is_empty = self.selected().elements() == 0 || self.shape.elements() == 0;
        if is_empty || self.is_of_rows() {
            crate::elementary::fill_into(step, &mut out, 0.0)?;
            if !is_empty {
                add_rows(step, x, ids, inner, &mut out, false)?;
            }
        } else {
            let (x, ids) = (x.slice(), ids.slice());
            step.launch(along::add_along {
                x,
                ids,
                n,
                count: self.count,
                inner,
                strides: self.strides,
                out: out.out(),
            })?;
        }
        narrowed(step, out)
    }
}

/// 1 where an id is the class, and 0 elsewhere; `ids`: any shape, result: one extent more, of
/// `classes`. Queued; no scratch.
///
/// # Errors
/// [`Error::Label`] for an id that is no class; [`Error::Misuse`] for no classes;
/// [`Error::ArenaFull`].
#[track_caller]
pub fn one_hot<'s, S: Stored>(step: &Step<'s>, ids: &impl IndexSource<'s>, classes: usize) -> Result<Tensor<'s, S>> {
    let mut extents = ids.shape().extents().to_vec();
    extents.push(classes);
    let mut out = step.empty(Shape::of("one_hot", &extents)?)?;
    let ids = ids.within(step, IndexBound::below(classes))?;
    step.launch(along::one_hot { ids: ids.slice(), classes, out: out.out() })?;
    Ok(out)
}

impl<'s, S: Stored> Var<'s, S> {
    /// The elements that ids select along an extent; `ids`: one extent, for whole slices (PyTorch's
    /// `index_select`), or the shape of x but for the extent (PyTorch's `gather`). The gradients of
    /// an element that is selected several times are added in ascending order; those of rows in the
    /// order of [`embedding_backward`](super::launch::embedding_backward).
    ///
    /// # Errors
    /// [`Error::Label`] for an id beyond the extent; [`Error::Misuse`] for other shapes;
    /// [`Error::ArenaFull`]. An id that only the device knows gives NaN if it is beyond the extent.
    #[track_caller]
    pub fn gather(&self, extent: i32, ids: &Indices<'s>) -> Result<Self> {
        const OP: &str = "gather";
        let along = Along::new(OP, self.shape(), extent_number(OP, self.shape(), extent)?, ids.shape())?;
        let op = self.op(OP, &[self])?;
        let ids = ids.within(op.step(), along.bound())?;
        let y = along.take(op.step(), self.value(), ids)?;
        let (x, ids) = (self.keep(), Kept::of(ids));
        Ok(op.record(y.save(), move |back, dy| {
            let (x, ids) = (x.var(back)?, ids.value(back));
            let dx = along.add(back.step(), &dy, &ids)?;
            back.step().free(dy);
            back.add(&x, dx)
        }))
    }

    /// This variable, with the elements of `values` added at the places along an extent that ids
    /// select; `values`: the shape of the [gathered](Var::gather) elements. See
    /// [`Var::segment_sum`].
    ///
    /// # Errors
    /// The errors of [`Var::gather`].
    #[track_caller]
    pub fn scatter_add(&self, extent: i32, ids: &Indices<'s>, values: &Self) -> Result<Self> {
        const OP: &str = "scatter_add";
        let extent = extent_number(OP, self.shape(), extent)?;
        self.add(values.summed(OP, self.shape(), extent, ids)?)
    }

    /// The sums of the elements with the same id, along an extent, which has `size` places in the
    /// result. This is the transpose of [`Var::gather`]: the elements are added in the order of its
    /// gradients, and a place without an id is 0.
    ///
    /// # Errors
    /// The errors of [`Var::gather`].
    #[track_caller]
    pub fn segment_sum(&self, extent: i32, ids: &Indices<'s>, size: usize) -> Result<Self> {
        const OP: &str = "segment_sum";
        let extent = extent_number(OP, self.shape(), extent)?;
        self.summed(OP, self.shape().with(extent, size), extent, ids)
    }

    /// The sums of the elements with the same id along an extent of the result's shape.
    #[track_caller]
    fn summed(&self, name: &'static str, to: Shape, extent: usize, ids: &Indices<'s>) -> Result<Self> {
        let along = Along::new(name, to, extent, ids.shape())?;
        if self.shape() != along.selected() {
            return Err(Error::misuse(name, format!("values of shape {}", along.selected()), self.shape().to_string()));
        }
        let op = self.op(name, &[self])?;
        let ids = ids.within(op.step(), along.bound())?;
        let sums = along.add(op.step(), self.value(), ids)?;
        let (x, ids) = (self.keep(), Kept::of(ids));
        Ok(op.record(sums.save(), move |back, dy| {
            let (x, dx) = (x.var(back)?, along.take(back.step(), &dy, &ids.value(back))?);
            back.step().free(dy);
            back.add(&x, dx)
        }))
    }

    /// The sums of the elements up to each place along an extent, in ascending order. Sums are f32.
    ///
    /// # Errors
    /// [`Error::Misuse`] when there is no such extent; [`Error::ArenaFull`].
    #[track_caller]
    pub fn cumulative_sum(&self, extent: i32) -> Result<Self> {
        const OP: &str = "cumulative_sum";
        fn sums<'s, S: Stored>(
            step: &Step<'s>,
            x: &impl Source<'s, S>,
            extent: usize,
            reverse: u32,
        ) -> Result<Tensor<'s, S>> {
            let (mut out, [_, n, inner]) = (step.empty(x.shape())?, around(x.shape(), extent));
            if x.shape().elements() > 0 {
                step.launch(along::cumulative_sum { x: x.slice(), n, inner, reverse, out: out.out() })?;
            }
            Ok(out)
        }
        let extent = extent_number(OP, self.shape(), extent)?;
        let op = self.op(OP, &[self])?;
        let (y, x) = (sums(op.step(), self.value(), extent, 0)?, self.keep());
        Ok(op.record(y.save(), move |back, dy| {
            let (x, dx) = (x.var(back)?, sums(back.step(), &dy, extent, 1)?);
            back.step().free(dy);
            back.add(&x, dx)
        }))
    }

    /// The index of the largest element along an extent: the first of equal ones, or the first NaN;
    /// result: the shape without the extent.
    ///
    /// # Errors
    /// [`Error::Misuse`] when there is no such extent, or it is empty; [`Error::ArenaFull`].
    #[track_caller]
    pub fn argmax(&self, extent: i32) -> Result<Indices<'s>> {
        self.found("argmax", extent, true)
    }

    /// The index of the smallest element along an extent: the first of equal ones, or the first
    /// NaN; see [`Var::argmax`].
    #[track_caller]
    pub fn argmin(&self, extent: i32) -> Result<Indices<'s>> {
        self.found("argmin", extent, false)
    }

    #[track_caller]
    fn found(&self, name: &'static str, extent: i32, largest: bool) -> Result<Indices<'s>> {
        let extent = extent_number(name, self.shape(), extent)?;
        let [outer, reduced, inner] = around(self.shape(), extent);
        if reduced == 0 {
            return Err(Error::misuse(name, "an extent with elements", self.shape().to_string()));
        }
        let mut extents = self.shape().extents().to_vec();
        extents.remove(extent);
        let op = self.op(name, &[self])?;
        let mut out = op.step().empty(Shape::of(name, &extents)?)?;
        if outer * inner > 0 {
            let (x, out) = (self.value().slice(), out.out());
            match largest {
                true => op.step().launch(fold::find_max { x, reduced, inner, out })?,
                false => op.step().launch(fold::find_min { x, reduced, inner, out })?,
            }
        }
        Ok(Indices::on_device(out.save()))
    }

    /// The `count` largest elements along the last extent, descending, and their indices. Among
    /// equal ones the first comes first, and a NaN counts as the largest. The elements have a
    /// gradient.
    ///
    /// # Errors
    /// [`Error::Misuse`] for more than there are; [`Error::ArenaFull`].
    #[track_caller]
    pub fn top_k(&self, count: usize) -> Result<(Self, Indices<'s>)> {
        const OP: &str = "top_k";
        let last = extent_number(OP, self.shape(), -1)?;
        let cols = self.shape().extents()[last];
        if count > cols {
            return Err(Error::misuse(OP, format!("at most {cols} elements of {}", self.shape()), count.to_string()));
        }
        let op = self.op(OP, &[self])?;
        let mut out = op.step().empty(self.shape().with_last(count))?;
        if self.shape().elements() > 0 {
            op.step().launch(along::top_k { x: self.value().slice(), cols, count, out: out.out() })?;
        }
        let ids = Indices::on_device(out.save());
        Ok((self.gather(-1, &ids)?, ids))
    }
}
