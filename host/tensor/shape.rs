//! Shapes: the extents of a tensor.
//!
//! Invariant: no product of extents wraps.

#![forbid(unsafe_code)]

use std::fmt;

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
    pub fn with_last(self, extent: usize) -> Self {
        self.with(self.rank.wrapping_sub(1), extent)
    }

    /// The same extents but the one of this number, if there is one.
    #[must_use]
    pub fn with(mut self, number: usize, extent: usize) -> Self {
        if number < self.rank {
            self.extents[number] = extent;
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
