//! Memory lent to a step, which outlives the step's tensors.
//!
//! Invariant: the loan ends no later than the step. Until then the lender can neither free nor
//! change the memory.

#![forbid(unsafe_code)]

use super::access::sealed::Sealed;
use super::access::{Source, Target};
use super::brand::Brand;
use super::element::Element;
use super::memory::Memory;
use super::shape::Shape;
use std::fmt;
use std::marker::PhantomData;
use std::ops::Range;

impl<T: Element> Sealed for Lent<'_, '_, T> {}
impl<T: Element> Sealed for LentMut<'_, '_, T> {}

/// Memory lent to the step `'s` for reading: a persistent buffer, or an outer step's tensor.
pub struct Lent<'b, 's, T: Element = f32> {
    memory: Memory<T>,
    shape: Shape,
    borrow: PhantomData<&'b T>,
    brand: Brand<'s>,
}

impl<T: Element> Lent<'_, '_, T> {
    pub(crate) fn new(memory: Memory<T>, shape: Shape) -> Self {
        debug_assert_eq!(memory.len(), shape.elements());
        Self { memory, shape, borrow: PhantomData, brand: PhantomData }
    }

    /// Returns the part with these elements, flat.
    ///
    /// # Panics
    /// Panics if the range exceeds the memory.
    pub fn part(self, range: Range<usize>) -> Self {
        Self::new(self.memory.part(range.start, range.len()), [range.len()].into())
    }
}

impl<T: Element> Clone for Lent<'_, '_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T: Element> Copy for Lent<'_, '_, T> {}

impl<T: Element> fmt::Debug for Lent<'_, '_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Lent<{}>{}", T::NAME, self.shape)
    }
}

impl<'s, T: Element> Source<'s, T> for Lent<'_, 's, T> {
    fn shape(&self) -> Shape {
        self.shape
    }

    fn memory(&self) -> Memory<T> {
        self.memory
    }
}

/// Memory lent to the step `'s` for writing.
pub struct LentMut<'b, 's, T: Element = f32> {
    memory: Memory<T>,
    shape: Shape,
    borrow: PhantomData<&'b mut T>,
    brand: Brand<'s>,
}

impl<'s, T: Element> LentMut<'_, 's, T> {
    pub(crate) fn new(memory: Memory<T>, shape: Shape) -> Self {
        debug_assert_eq!(memory.len(), shape.elements());
        Self { memory, shape, borrow: PhantomData, brand: PhantomData }
    }

    /// Returns the part with these elements, flat.
    ///
    /// # Panics
    /// Panics if the range exceeds the memory.
    pub fn part(self, range: Range<usize>) -> Self {
        Self::new(self.memory.part(range.start, range.len()), [range.len()].into())
    }

    /// Returns the elements before `at` and those from `at` on, each flat.
    ///
    /// # Panics
    /// Panics if `at` exceeds the memory.
    pub fn split(self, at: usize) -> [Self; 2] {
        let all = self.memory.len();
        [0..at, at..all].map(|range| Self::new(self.memory.part(range.start, range.len()), [range.len()].into()))
    }

    /// Lends the part with these elements, flat, while this loan stays.
    ///
    /// # Panics
    /// Panics if the range exceeds the memory.
    pub fn part_mut(&mut self, range: Range<usize>) -> LentMut<'_, 's, T> {
        LentMut::new(self.memory.part(range.start, range.len()), [range.len()].into())
    }
}

impl<T: Element> fmt::Debug for LentMut<'_, '_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "LentMut<{}>{}", T::NAME, self.shape)
    }
}

impl<'s, T: Element> Source<'s, T> for LentMut<'_, 's, T> {
    fn shape(&self) -> Shape {
        self.shape
    }

    fn memory(&self) -> Memory<T> {
        self.memory
    }
}

impl<'s, T: Element> Target<'s, T> for LentMut<'_, 's, T> {}
