//! Tensors: typed, shaped, branded with the step that made them.
//!
//! Invariant: a tensor's memory is its own until its step is over, and its brand `'s` keeps it from being seen after.

use crate::error::{Error, Result};
use crate::launch::{Memory, Source, Target};
use std::fmt;
use std::marker::PhantomData;

/// What a tensor may hold.
pub trait Element: bytemuck::Pod + fmt::Debug + PartialEq + sealed::Sealed {
    /// The name of the type in messages and files.
    const NAME: &'static str;
    /// The word that checked mode leaves where nothing has been written.
    const POISON: u32;
}

impl Element for f32 {
    const NAME: &'static str = "f32";
    // A quiet NaN that no operation makes by itself.
    const POISON: u32 = 0x7fc0_dead;
}

impl Element for u32 {
    const NAME: &'static str = "u32";
    const POISON: u32 = 0xdead_beef;
}

mod sealed {
    pub trait Sealed {}
    impl Sealed for f32 {}
    impl Sealed for u32 {}
}

/// The extents of a tensor, outermost first; row-major. At most four.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    extents: [usize; Self::MAX_RANK],
    rank: usize,
}

impl Shape {
    /// The most extents that a shape has.
    pub const MAX_RANK: usize = 4;

    /// The extents, outermost first.
    pub fn extents(&self) -> &[usize] {
        &self.extents[..self.rank]
    }

    /// All elements; `usize::MAX`, of which no tensor has as many, where their number does not fit.
    pub fn elements(&self) -> usize {
        self.checked_elements().unwrap_or(usize::MAX)
    }

    /// All elements, or none if the extents other than zero make a number that does not fit. So in the shape of a tensor every
    /// product of some of its extents fits, also where another is zero.
    pub(crate) fn checked_elements(&self) -> Option<usize> {
        let others = self.extents().iter().try_fold(1usize, |product, &extent| product.checked_mul(extent.max(1)))?;
        Some(if self.extents().contains(&0) { 0 } else { others })
    }

    /// The same extents but the last.
    #[must_use]
    pub fn with_last(mut self, extent: usize) -> Self {
        if self.rank > 0 {
            self.extents[self.rank - 1] = extent;
        }
        self
    }

    /// The extents as `[rows, cols]`: the last one, and the product of the others, as [`Shape::elements`] tells it.
    pub fn as_rows(&self) -> [usize; 2] {
        match self.rank {
            0 => [1, 1],
            rank => [Self { extents: self.extents, rank: rank - 1 }.elements(), self.extents[rank - 1]],
        }
    }
}

impl<const RANK: usize> From<[usize; RANK]> for Shape {
    fn from(extents: [usize; RANK]) -> Self {
        const { assert!(RANK <= Self::MAX_RANK, "a shape has at most four extents") };
        let mut shape = Self { extents: [0; Self::MAX_RANK], rank: RANK };
        shape.extents[..RANK].copy_from_slice(&extents);
        shape
    }
}

impl fmt::Debug for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self.extents(), f)
    }
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

/// A fresh, invariant lifetime for each step; and, as a raw pointer, neither `Send` nor `Sync`.
pub(crate) type Brand<'s> = PhantomData<(fn(&'s ()) -> &'s (), *mut ())>;

/// A tensor of the step `'s`. Unique: writing it needs `&mut`. It has no destructor, the step takes its memory back.
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

    /// The same elements with other extents.
    ///
    /// # Errors
    /// [`Error::Misuse`] when the number of elements differs.
    pub fn reshape(mut self, shape: impl Into<Shape>) -> Result<Self> {
        self.shape = reshaped(self.shape, shape.into())?;
        Ok(self)
    }

    /// Gives up writing for sharing: nothing can change a saved tensor for the rest of the step.
    pub fn save(self) -> Saved<'s, T> {
        Saved { memory: self.memory, shape: self.shape, brand: PhantomData }
    }
}

/// A tensor that is shared and read-only until its step is over: what backward needs.
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

    /// The same elements with other extents.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_product_of_extents_wraps() {
        const LARGE: usize = 1 << 40;
        let elements = |extents: [usize; 4]| Shape::from(extents).checked_elements();
        assert_eq!(elements([2, 3, 4, 5]), Some(120));
        assert_eq!(elements([2, 0, LARGE, 5]), Some(0));
        // Some of them would, in one order or another.
        for extents in [[LARGE, LARGE, 0, 1], [0, LARGE, LARGE, 1], [LARGE, 0, 1, LARGE], [usize::MAX, 2, 1, 0]] {
            assert_eq!(elements(extents), None, "{extents:?}");
            assert_eq!(Shape::from(extents).elements(), usize::MAX, "{extents:?}");
        }
        assert_eq!(Shape::from([LARGE, LARGE, 3]).as_rows(), [usize::MAX, 3]);
        assert_eq!(Shape::from([2, 3, 4]).as_rows(), [6, 4]);
        assert_eq!(Shape::from([4]).as_rows(), [1, 4]);
        assert_eq!(Shape::from([]).as_rows(), [1, 1]);
        assert_eq!(Shape::from([]).elements(), 1);
    }
}
