//! A case: an op on shapes and values set by a seed, and its record in the trace.
//!
//! Invariant: an operand is traced with the values that the op read, which for BF16 are rounded.

use crate::support::{Random, tolerance};
use crate::tensor_file::TensorFile;
use kernels::update::RUN;
use std::cell::RefCell;
use stepscope::ops::{self, Activation};
use stepscope::tensor::{Element, Indices, Shape, Source};
use stepscope::{EagerStep, Result, Tensor, bf16};

/// An element type of the traced cases.
pub(crate) trait Traced: Activation {
    /// True if ops round their results to this type.
    const IS_ROUNDED: bool;
}

impl Traced for f32 {
    const IS_ROUNDED: bool = false;
}

impl Traced for bf16 {
    const IS_ROUNDED: bool = true;
}

/// Defines a case only for f32.
macro_rules! one {
    ($name:literal, |$c:ident| $body:expr) => {{
        fn run($c: &Case<'_, '_>) -> Result<()> {
            $body
        }
        [($name, run as Run)]
    }};
}
pub(crate) use one;

/// Defines a case for two element types: `NAME` for f32, and `NAME_bf16`.
macro_rules! both {
    ($name:literal, <$S:ident>, |$c:ident| $body:expr) => {{
        fn run<$S: crate::case::Traced>($c: &Case<'_, '_>) -> Result<()> {
            $body
        }
        [($name, run::<f32> as Run), (concat!($name, "_bf16"), run::<stepscope::bf16> as Run)]
    }};
}
pub(crate) use both;

/// A running case.
pub(crate) struct Case<'c, 's> {
    pub(crate) step: &'c EagerStep<'s>,
    pub(crate) name: String,
    pub(crate) seed: u64,
    pub(crate) random: RefCell<Random>,
    pub(crate) file: RefCell<&'c mut TensorFile>,
}

pub(crate) type Run = for<'c, 's> fn(&Case<'c, 's>) -> Result<()>;

/// Packed q, k and v.
pub(crate) struct Heads<'s> {
    pub(crate) batch: usize,
    pub(crate) tokens: usize,
    pub(crate) width: usize,
    pub(crate) shape: Shape,
    pub(crate) form: ops::AttentionConfig<'s>,
}

impl Heads<'_> {
    /// Returns the shape of attention's output.
    pub(crate) fn output(&self) -> Shape {
        [self.batch, self.tokens, self.form.heads * self.width].into()
    }
}

impl<'s> Case<'_, 's> {
    /// Adds heads with at most this many samples, tokens, key heads, query heads per key head, and
    /// groups of eight columns.
    pub(crate) fn heads(&self, most: [usize; 5]) -> Heads<'s> {
        let [batch, tokens, kv_heads, group, eighths] = self.extents(most);
        let (heads, width) = (kv_heads * group, 8 * eighths);
        let sizes = [heads, kv_heads].map(|size| size as u32);
        self.add("in", "heads", [2].into(), &sizes);
        let form = ops::AttentionConfig::new(heads).kv_heads(kv_heads);
        Heads { batch, tokens, width, shape: [batch, tokens, (heads + 2 * kv_heads) * width].into(), form }
    }

    /// Returns the largest shape for seed 0, all ones for seed 1, else a random shape between.
    pub(crate) fn extents<const N: usize>(&self, most: [usize; N]) -> [usize; N] {
        most.map(|most| match self.seed {
            0 => most,
            1 => 1,
            _ => self.random.borrow_mut().extent(1, most),
        })
    }

    /// Records the tolerance for a longest sum of this many terms.
    pub(crate) fn longest(&self, length: usize) {
        self.within(tolerance(length));
    }

    /// Records the tolerance.
    pub(crate) fn within(&self, limit: f64) {
        self.file.borrow_mut().note(&*self.name, limit);
    }

    /// Records the tolerance of matrix products. For BF16, tensor cores add with truncation at
    /// 2^-23 of the largest addend.
    pub(crate) fn longest_product<S: Traced>(&self, length: usize) {
        let cut = if S::IS_ROUNDED { length as f64 * 2f64.powi(-23) } else { 0.0 };
        self.file.borrow_mut().note(&*self.name, tolerance(length).max(cut));
    }

    /// Adds an operand with these elements.
    pub(crate) fn given<T: Element>(&self, name: &str, shape: impl Into<Shape>, values: &[T]) -> Result<Tensor<'s, T>> {
        let shape = shape.into();
        self.add("in", name, shape, values);
        self.step.upload(values, shape)
    }

    /// Adds labels or ids.
    pub(crate) fn indices(&self, name: &str, shape: impl Into<Shape>, values: &[u32]) -> Result<Indices<'s>> {
        let shape = shape.into();
        self.add("in", name, shape, values);
        self.step.upload_indices(values, shape)
    }

    /// Adds an operand of normally distributed numbers, rounded to `S`.
    pub(crate) fn operand<S: Traced>(&self, name: &str, shape: impl Into<Shape>) -> Result<Tensor<'s, S>> {
        let shape = shape.into();
        let values: Vec<S> = self.random.borrow_mut().normals(shape.elements()).into_iter().map(S::narrow).collect();
        self.stored(name, shape, &values)
    }

    /// Adds an operand of these numbers.
    pub(crate) fn stored<S: Traced>(&self, name: &str, shape: Shape, values: &[S]) -> Result<Tensor<'s, S>> {
        self.add("in", name, shape, &values.iter().map(|value| value.widen()).collect::<Vec<_>>());
        self.step.upload(values, shape)
    }

    /// Adds the gradient of a loss: any value for f32, but 1 for BF16, where a product with it
    /// would round again.
    pub(crate) fn upstream<S: Traced>(&self) -> Result<Tensor<'s>> {
        if S::IS_ROUNDED { self.given("dy", [1], &[1.0]) } else { self.operand("dy", [1]) }
    }

    /// Returns random numbers below `limit`.
    pub(crate) fn belows(&self, count: usize, limit: usize) -> Vec<u32> {
        self.random.borrow_mut().belows(count, limit as u32)
    }

    /// Adds a host operand between 1/8 and 1.
    pub(crate) fn scalar(&self, name: &str) -> f32 {
        let value = self.random.borrow_mut().uniform(0.125, 1.0);
        self.add("in", name, [1].into(), &[value]);
        value
    }

    /// Adds a host operand between 1/8 and 1/2.
    pub(crate) fn share(&self, name: &str) -> f32 {
        let value = self.random.borrow_mut().uniform(0.125, 0.5);
        self.add("in", name, [1].into(), &[value]);
        value
    }

    /// Adds a group number below `count` for each run of a flat region.
    pub(crate) fn groups(&self, length: usize, count: u32) -> Result<Tensor<'s, u32>> {
        let runs = length.div_ceil(RUN);
        let groups = self.random.borrow_mut().belows(runs, count);
        self.given("groups", [runs], &groups)
    }

    /// Adds a result. If it was rounded when stored, its kind is `half`.
    pub(crate) fn result<T: Element>(&self, name: &str, tensor: &impl Source<'s, T>) -> Result<()> {
        let (values, shape) = (self.step.read(tensor)?, tensor.shape());
        if T::NAME == <bf16 as Element>::NAME {
            let halves: &[bf16] = bytemuck::cast_slice(&values);
            self.add("half", name, shape, &halves.iter().copied().map(f32::from).collect::<Vec<_>>());
        } else {
            self.add("out", name, shape, &values);
        }
        Ok(())
    }

    /// Adds a result that backward reads. If it was rounded, it is also an operand.
    pub(crate) fn kept<S: Traced>(&self, name: &str, tensor: &Tensor<'s, S>) -> Result<()> {
        if S::IS_ROUNDED {
            let values = self.step.read(tensor)?.into_iter().map(S::widen).collect::<Vec<_>>();
            self.add("in", name, tensor.shape(), &values);
        }
        self.result(name, tensor)
    }

    fn add<T: Element>(&self, way: &str, name: &str, shape: Shape, values: &[T]) {
        self.file.borrow_mut().add(format!("{}.{way}.{name}", self.name), shape, values);
    }

    /// Traces a function of two tensors of the same shape.
    pub(crate) fn pair<S: Traced>(
        &self,
        op: impl Fn(&Self, &Tensor<'s, S>, &Tensor<'s, S>) -> Result<Tensor<'s, S>>,
    ) -> Result<()> {
        let shape = self.extents([70, 300]);
        self.longest(1);
        self.result("y", &op(self, &self.operand("a", shape)?, &self.operand("b", shape)?)?)
    }

    /// Traces a function of rows, with the length of its longest sum.
    pub(crate) fn reduced<S: Traced, T: Element>(
        &self,
        length: impl Fn(&Shape) -> usize,
        op: impl Fn(&Self, &Tensor<'s, S>) -> Result<Tensor<'s, T>>,
    ) -> Result<()> {
        let x = self.operand("x", self.extents([270, 300]))?;
        self.longest(length(&x.shape()));
        self.result("y", &op(self, &x)?)
    }
}
