//! Tensors: typed, shaped, and branded with the step that made them.
//!
//! Invariant: until its step ends, a tensor is the only owner of its memory. Its brand `'s`
//! prevents access after that.

#![forbid(unsafe_code)]

use super::access::sealed::Sealed;
use super::access::{Source, Target};
use super::brand::Brand;
use super::element::Element;
use super::memory::Memory;
use super::shape::Shape;
use crate::error::{Error, Result};
use std::fmt;
use std::marker::PhantomData;

impl<T: Element> Sealed for Tensor<'_, T> {}
impl<T: Element> Sealed for Saved<'_, T> {}

/// A tensor of the step `'s`. It is unique: writing it needs `&mut`. It has no destructor; the step
/// reclaims its memory.
pub struct Tensor<'s, T: Element = f32> {
    memory: Memory<T>,
    shape: Shape,
    brand: Brand<'s>,
}

impl<'s, T: Element> Tensor<'s, T> {
    pub(crate) fn new(memory: Memory<T>, shape: Shape) -> Self {
        debug_assert_eq!(memory.len(), shape.elements());
        Self { memory, shape, brand: PhantomData }
    }

    /// The extents.
    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// Returns the same elements with other extents.
    ///
    /// # Errors
    /// [`Error::Misuse`] when the number of elements differs.
    pub fn reshape(mut self, shape: impl Into<Shape>) -> Result<Self> {
        self.shape = reshaped(self.shape, shape.into())?;
        Ok(self)
    }

    /// Makes the tensor shared and read-only: nothing can change a saved tensor for the rest of the
    /// step.
    pub fn save(self) -> Saved<'s, T> {
        Saved { memory: self.memory, shape: self.shape, brand: PhantomData }
    }
}

/// A tensor that is shared and read-only until its step ends, as the backward pass needs.
pub struct Saved<'s, T: Element = f32> {
    memory: Memory<T>,
    shape: Shape,
    brand: Brand<'s>,
}

impl<T: Element> Saved<'_, T> {
    pub(crate) fn new(memory: Memory<T>, shape: Shape) -> Self {
        debug_assert_eq!(memory.len(), shape.elements());
        Self { memory, shape, brand: PhantomData }
    }

    /// The extents.
    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// Returns the same elements with other extents.
    ///
    /// # Errors
    /// [`Error::Misuse`] when the number of elements differs.
    pub fn reshape(mut self, shape: impl Into<Shape>) -> Result<Self> {
        self.shape = reshaped(self.shape, shape.into())?;
        Ok(self)
    }
}

impl<'s, T: Element> From<Tensor<'s, T>> for Saved<'s, T> {
    fn from(tensor: Tensor<'s, T>) -> Self {
        tensor.save()
    }
}

impl<T: Element> Clone for Saved<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T: Element> Copy for Saved<'_, T> {}

fn reshaped(from: Shape, to: Shape) -> Result<Shape> {
    if to.checked_elements() == Some(from.elements()) {
        return Ok(to);
    }
    Err(Error::misuse("reshape", format!("{} elements, as {from} has", from.elements()), format!("{to}")))
}

impl<'s, T: Element> Source<'s, T> for Tensor<'s, T> {
    fn shape(&self) -> Shape {
        self.shape
    }

    fn memory(&self) -> Memory<T> {
        self.memory
    }
}

impl<'s, T: Element> Target<'s, T> for Tensor<'s, T> {}

impl<'s, T: Element> Source<'s, T> for Saved<'s, T> {
    fn shape(&self) -> Shape {
        self.shape
    }

    fn memory(&self) -> Memory<T> {
        self.memory
    }
}

impl<T: Element> fmt::Debug for Tensor<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Tensor<{}>{}", T::NAME, self.shape)
    }
}

impl<T: Element> fmt::Debug for Saved<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Saved<{}>{}", T::NAME, self.shape)
    }
}
