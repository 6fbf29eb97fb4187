//! Divides a flat region into the slices that ranks own, and the buckets that travel together.
//!
//! ```text
//! region              | 0 1 2 3 4 5 6 7 8 9 | 10 .. 17 |    chunks of 4096 elements, 2 ranks
//! bucket              |          1          |     0    |    0 travels first
//! slice of rank       |       0       |  1  |  0  |  1  |
//! ```
//! Invariant: a bucket's slices, one per rank, are adjacent and cover all of it, as the buckets
//! cover the region. All ranks therefore take part in each exchange, and no link waits while
//! another works. Each slice except the region's last consists of whole chunks of a squared norm.
//! The norm of all gradients therefore has the same bits for any number of ranks. Pure arithmetic.

#![forbid(unsafe_code)]

use super::buckets::{TOGETHER, buckets};
use kernels::block::CHUNK;
use std::ops::Range;

/// The slices of a region, one per rank in each of its buckets.
#[derive(Clone, Debug)]
pub struct Slices {
    elements: usize,
    ranks: usize,
    buckets: Vec<Range<usize>>,
}

impl Slices {
    /// Creates the slices of `elements` elements, in which parameters start at `starts`, for at
    /// least one rank.
    pub fn new(starts: impl DoubleEndedIterator<Item = usize>, elements: usize, ranks: usize) -> Self {
        Self { elements, ranks, buckets: buckets(starts, elements) }
    }

    /// Returns the number of elements of the region.
    pub fn elements(&self) -> usize {
        self.elements
    }

    /// Returns the number of chunks of the region.
    pub fn chunks(&self) -> usize {
        self.elements.div_ceil(CHUNK)
    }

    /// Returns the buckets in the order in which they travel: from the region's end to its start.
    pub fn buckets(&self) -> &[Range<usize>] {
        &self.buckets
    }

    /// Returns the most elements of a slice of a bucket, which are whole chunks.
    pub fn pitch(&self, bucket: usize) -> usize {
        self.buckets[bucket].len().div_ceil(CHUNK).div_ceil(self.ranks).next_multiple_of(TOGETHER) * CHUNK
    }

    /// Returns the elements of a rank in a bucket. Empty if there are more ranks than chunks.
    pub fn of_bucket(&self, bucket: usize, rank: usize) -> Range<usize> {
        let (Range { start, end }, pitch) = (&self.buckets[bucket], self.pitch(bucket));
        let place = |rank: usize| (start + rank * pitch).min(*end);
        place(rank)..place(rank + 1)
    }

    /// Returns the nonempty ranges of a rank's elements, ascending.
    pub fn of(&self, rank: usize) -> Vec<Range<usize>> {
        self.within(&(0..self.elements), rank)
    }

    /// Returns the nonempty ranges of a rank's elements within `range`, ascending.
    pub fn within(&self, range: &Range<usize>, rank: usize) -> Vec<Range<usize>> {
        let of_bucket = (0..self.buckets.len()).rev().map(|bucket| self.of_bucket(bucket, rank));
        let within = of_bucket.map(|own| own.start.max(range.start)..own.end.min(range.end));
        within.filter(|within| !within.is_empty()).collect()
    }

    /// Divides the region so that each parameter is whole on one rank. `starts` are the parameters'
    /// first elements, ascending, the first of them zero. A rank has the parameters that start in
    /// its equal share of the elements, which may be none.
    pub fn of_whole(starts: &[usize], elements: usize, ranks: usize) -> Vec<Range<usize>> {
        let place = |rank: usize| {
            let share = (elements as u128 * rank as u128 / ranks as u128) as usize;
            starts.iter().copied().find(|&start| start >= share).filter(|_| rank < ranks).unwrap_or(elements)
        };
        (0..ranks).map(|rank| place(rank)..place(rank + 1)).collect()
    }

    /// Returns the chunks of a slice.
    pub fn chunks_in(slice: &Range<usize>) -> Range<usize> {
        slice.start / CHUNK..slice.end.div_ceil(CHUNK)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whole_parameters_have_one_rank() {
        let starts = [0, 64, 640, 704, 4800, 4864];
        let of = |ranks| Slices::of_whole(&starts, 5120, ranks);
        assert_eq!(of(1).as_slice(), std::slice::from_ref(&(0..5120)));
        assert_eq!(of(2), [0..4800, 4800..5120], "the largest parameter begins in the first half");
        assert_eq!(of(8), [0..640, 640..4800, 4800..4800, 4800..4800, 4800..4800, 4800..4800, 4800..4800, 4800..5120]);
        for ranks in 1..=64 {
            let all = of(ranks);
            assert_eq!((all.len(), all[0].start, all[ranks - 1].end), (ranks, 0, 5120));
            assert!(all.windows(2).all(|pair| pair[0].end == pair[1].start), "{all:?}");
            assert!(all.iter().all(|own| starts.contains(&own.start) || own.is_empty()), "{all:?}");
        }
    }

    #[test]
    fn slices_cover_everything() {
        let starts = |elements: usize| (0..elements).step_by(elements.div_ceil(9).next_multiple_of(64));
        for elements in [1, 64, CHUNK - 1, CHUNK, CHUNK + 1, 5 * CHUNK, 37 * CHUNK + 64, 2_170_000, 40_000_001] {
            for ranks in [1, 2, 4, 8, 64] {
                let slices = Slices::new(starts(elements).collect::<Vec<_>>().into_iter(), elements, ranks);
                let mut all: Vec<Range<usize>> = (0..ranks).flat_map(|rank| slices.of(rank)).collect();
                all.sort_by_key(|slice| slice.start);
                assert_eq!((all[0].start, all[all.len() - 1].end), (0, elements), "{elements} by {ranks}");
                assert!(all.windows(2).all(|pair| pair[0].end == pair[1].start), "{elements} by {ranks}");
                assert!(all.iter().all(|slice| !slice.is_empty() && slice.start.is_multiple_of(TOGETHER * CHUNK)));
                let chunks: Vec<Range<usize>> = all.iter().map(Slices::chunks_in).collect();
                assert_eq!((chunks[0].start, chunks[chunks.len() - 1].end), (0, slices.chunks()));
                assert!(chunks.windows(2).all(|pair| pair[0].end == pair[1].start), "{elements} by {ranks}");
                for bucket in 0..slices.buckets().len() {
                    let of_bucket = (0..ranks).map(|rank| slices.of_bucket(bucket, rank).len());
                    assert!(of_bucket.clone().all(|len| len <= slices.pitch(bucket)));
                    assert_eq!(of_bucket.sum::<usize>(), slices.buckets()[bucket].len());
                }
                let range = elements / 3..elements - elements / 5;
                let within = (0..ranks).flat_map(|rank| slices.within(&range, rank));
                assert_eq!(within.map(|within| within.len()).sum::<usize>(), range.len());
            }
        }
    }
}
