//! Divides the gradients into buckets that travel together.
//!
//! ```text
//! parameters in layout order              | embedding |  block 0  |  block 1  | head |
//! buckets in travel order                 |     2     |     1     |        0         |
//! ```
//! Invariant: the buckets are adjacent, from the region's end to its start, and cover all of it.
//! Each starts where a slice may start. They depend only on the parameters' layout, so all ranks
//! have the same buckets and exchange them in the same order. Pure arithmetic.

#![forbid(unsafe_code)]

use kernels::block::CHUNK;
use std::ops::Range;

/// The alignment of slices, in chunks. A kernel writes the norms of a slice's chunks at a boundary
/// of 16 bytes.
pub(super) const TOGETHER: usize = 4;
/// The bucket size for regions many times as large. PyTorch's DDP also uses 25 MB.
const MOST: usize = (25 << 20) / size_of::<f32>();
/// The divisor that gives the bucket size from the size of a smaller region.
const SHARE: usize = 8;
/// The smallest bucket size. A smaller exchange costs the host more time than it hides.
const LEAST: usize = (4 << 20) / size_of::<f32>();

/// Divides a region of `elements` elements into buckets. Parameters start at `starts`, ascending,
/// the first at zero. A backward pass reaches the last parameters first. The first elements of a
/// bucket's first parameter may be left to the next bucket, which travels later.
pub(super) fn buckets(starts: impl DoubleEndedIterator<Item = usize>, elements: usize) -> Vec<Range<usize>> {
    let enough = (elements / SHARE).clamp(LEAST, MOST);
    let (mut buckets, mut end) = (Vec::new(), elements);
    for parameter in starts.rev() {
        if parameter == 0 || parameter + enough <= end {
            let start = parameter.next_multiple_of(TOGETHER * CHUNK);
            buckets.push(start..end);
            end = start;
        }
    }
    buckets
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the lengths of the buckets.
    fn sizes(parameters: &[usize]) -> Vec<usize> {
        let starts: Vec<usize> = (0..parameters.len()).map(|number| parameters[..number].iter().sum()).collect();
        let elements = parameters.iter().sum();
        let buckets = buckets(starts.into_iter(), elements);
        assert_eq!((buckets[0].end, buckets[buckets.len() - 1].start), (elements, 0));
        assert!(buckets.windows(2).all(|pair| pair[0].start == pair[1].end), "{buckets:?}");
        assert!(buckets.iter().all(|bucket| !bucket.is_empty() && bucket.start.is_multiple_of(TOGETHER * CHUNK)));
        buckets.into_iter().map(|bucket| bucket.len()).collect()
    }

    #[test]
    fn buckets_cover_everything_from_the_end() {
        assert_eq!(sizes(&[1]), [1]);
        assert_eq!(sizes(&[LEAST, LEAST - 1]), [2 * LEAST - 1], "a small bucket is merged with its neighbour");
        let aligned = TOGETHER * CHUNK;
        assert_eq!(sizes(&[aligned, LEAST, aligned, LEAST]), [LEAST, aligned + LEAST, aligned]);
        assert_eq!(
            sizes(&[64, LEAST, LEAST]),
            [LEAST + 64 - aligned, LEAST, aligned],
            "buckets start at multiples of a slice's alignment"
        );
        // A large region is divided by `MOST`, whatever its size, and a single parameter is not
        // divided.
        let first = 20 * MOST;
        assert_eq!(sizes(&[first, MOST - aligned, MOST / 2]).iter().sum::<usize>(), first + MOST - aligned + MOST / 2);
        assert_eq!(sizes(&[first, MOST - aligned, MOST / 2]).len(), 2);
        // A region between the two is divided by its share.
        assert_eq!(sizes(&[LEAST; 32]), [4 * LEAST; 8]);
    }
}
