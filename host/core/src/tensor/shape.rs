//! Shapes: the extents of a tensor.
//!
//! Invariant: no product of extents overflows silently.

#![forbid(unsafe_code)]

use crate::error::{Error, Result};
use std::fmt;

/// The extents of a tensor, row-major, outermost first. There are at most six.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    extents: [usize; Self::MAX_RANK],
    rank: usize,
}

impl Shape {
    /// The largest number of extents.
    pub const MAX_RANK: usize = 6;

    /// The extents, outermost first.
    pub fn extents(&self) -> &[usize] {
        &self.extents[..self.rank]
    }

    /// The number of elements, or `usize::MAX` if it overflows. No tensor has that many.
    pub fn elements(&self) -> usize {
        self.checked_elements().unwrap_or(usize::MAX)
    }

    /// The number of elements, or `None` if the product of the nonzero extents overflows. In a
    /// tensor's shape, every product of some extents therefore fits, even if another extent is
    /// zero.
    pub(crate) fn checked_elements(&self) -> Option<usize> {
        let others = self.extents().iter().try_fold(1usize, |product, &extent| product.checked_mul(extent.max(1)))?;
        Some(if self.extents().contains(&0) { 0 } else { others })
    }

    /// Returns the shape with the last extent replaced.
    #[must_use]
    pub fn with_last(self, extent: usize) -> Self {
        self.with(self.rank.wrapping_sub(1), extent)
    }

    /// Returns the shape with the extent of this number replaced, if there is one.
    #[must_use]
    pub fn with(mut self, number: usize, extent: usize) -> Self {
        if number < self.rank {
            self.extents[number] = extent;
        }
        self
    }

    /// Returns the shape of extents whose number is not known to the compiler.
    ///
    /// # Errors
    /// [`Error::Misuse`] of `op` for more than six extents.
    pub fn of(op: &'static str, extents: &[usize]) -> Result<Self> {
        if extents.len() > Self::MAX_RANK {
            return Err(Error::misuse(op, "at most six extents", format!("{extents:?}")));
        }
        let mut shape = Self { extents: [0; Self::MAX_RANK], rank: extents.len() };
        shape.extents[..extents.len()].copy_from_slice(extents);
        Ok(shape)
    }

    /// The extents as `[rows, cols]`: `cols` is the last extent, and `rows` is the product of the
    /// others, as [`Shape::elements`] computes it.
    pub fn as_rows(&self) -> [usize; 2] {
        match self.rank {
            0 => [1, 1],
            rank => [Self { extents: self.extents, rank: rank - 1 }.elements(), self.extents[rank - 1]],
        }
    }
}

impl<const RANK: usize> From<[usize; RANK]> for Shape {
    fn from(extents: [usize; RANK]) -> Self {
        const { assert!(RANK <= Self::MAX_RANK, "a shape has at most six extents") };
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_product_of_extents_wraps() {
        const LARGE: usize = 1 << 40;
        let elements = |extents: [usize; 4]| Shape::from(extents).checked_elements();
        assert_eq!(elements([2, 3, 4, 5]), Some(120));
        assert_eq!(elements([2, 0, LARGE, 5]), Some(0));
        // Products that overflow in one order or another.
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
