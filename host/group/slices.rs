//! Which elements of a flat region are whose.
//!
//! ```text
//! 10 chunks of 4096 elements, 4 ranks      | 0 1 2 3 | 4 5 6 7 | 8 9 |  |
//! slice of rank                            |    0    |    1    |  2  | 3 |
//! ```
//! Invariant: the slices lie side by side and are all of the region. Each but the last is whole chunks of a squared norm, so the norm of
//! all gradients has the same bits for any number of ranks. Pure arithmetic.

#![forbid(unsafe_code)]

use kernels::block::CHUNK;
use std::ops::Range;

/// Slices start at multiples of so many chunks: a kernel writes the norms of a slice's chunks on a boundary of 16 bytes.
const TOGETHER: usize = 4;

/// The slices of a region of so many elements, one a rank.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Slices {
    elements: usize,
    ranks: usize,
}

impl Slices {
    /// Those of `elements` elements, for at least one rank.
    pub(crate) fn new(elements: usize, ranks: usize) -> Self {
        Self { elements, ranks }
    }

    /// Elements of the region.
    pub(crate) fn elements(self) -> usize {
        self.elements
    }

    /// Chunks in a slice, but for the last ones.
    fn chunks_each(self) -> usize {
        self.chunks().div_ceil(self.ranks).next_multiple_of(TOGETHER)
    }

    /// Chunks of the region.
    pub(crate) fn chunks(self) -> usize {
        self.elements.div_ceil(CHUNK)
    }

    /// The most elements of a slice: whole chunks.
    pub(crate) fn pitch(self) -> usize {
        self.chunks_each() * CHUNK
    }

    /// The chunks of a rank.
    pub(crate) fn chunks_of(self, rank: usize) -> Range<usize> {
        let start = |rank: usize| (rank * self.chunks_each()).min(self.chunks());
        start(rank)..start(rank + 1)
    }

    /// The elements of a rank: none, where there are more ranks than chunks.
    pub(crate) fn of(self, rank: usize) -> Range<usize> {
        let Range { start, end } = self.chunks_of(rank);
        (start * CHUNK).min(self.elements)..(end * CHUNK).min(self.elements)
    }

    /// The elements of a rank that lie in `range`.
    pub(crate) fn within(self, range: &Range<usize>, rank: usize) -> Range<usize> {
        let own = self.of(rank);
        let start = own.start.max(range.start);
        start..own.end.min(range.end).max(start)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slices_are_side_by_side_and_all() {
        for elements in [1, 64, CHUNK - 1, CHUNK, CHUNK + 1, 5 * CHUNK, 37 * CHUNK + 64, 2_170_000] {
            for ranks in [1, 2, 4, 8, 64] {
                let slices = Slices::new(elements, ranks);
                let all: Vec<Range<usize>> = (0..ranks).map(|rank| slices.of(rank)).collect();
                assert_eq!((all[0].start, all[ranks - 1].end), (0, elements), "{elements} by {ranks}");
                assert!(all.windows(2).all(|pair| pair[0].end == pair[1].start), "{elements} by {ranks}");
                assert!(all.iter().all(|slice| slice.len() <= slices.pitch()));
                assert!(all.iter().all(|slice| slice.is_empty() || slice.start.is_multiple_of(CHUNK)));
                for (rank, slice) in all.iter().enumerate() {
                    let chunks = slices.chunks_of(rank);
                    assert_eq!(chunks.len(), slice.len().div_ceil(CHUNK));
                    assert!(slice.is_empty() || chunks.start * CHUNK == slice.start);
                }
                let range = elements / 3..elements - elements / 5;
                let within: usize = (0..ranks).map(|rank| slices.within(&range, rank).len()).sum();
                assert_eq!(within, range.len());
            }
        }
    }
}
