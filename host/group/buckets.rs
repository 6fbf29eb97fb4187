//! Which gradients travel together.
//!
//! ```text
//! parameters in the layout's order        | embedding |  block 0  |  block 1  | head |
//! buckets in the order of their travel    |     2     |     1     |        0         |
//! ```
//! Invariant: the buckets lie side by side from the region's end to its start and are all of it; each starts where a slice may. They follow from
//! the layout alone, so all ranks have the same, and all exchange them in this one order. Pure arithmetic.

#![forbid(unsafe_code)]

use kernels::block::CHUNK;
use std::ops::Range;

/// Slices start at multiples of so many chunks: a kernel writes the norms of a slice's chunks on a boundary of 16 bytes.
pub(super) const TOGETHER: usize = 4;
/// What travels together, if the region has many times as much: PyTorch's DDP has 25 MB, too.
const MOST: usize = (25 << 20) / size_of::<f32>();
/// Of a smaller region, so large a part of it ..
const SHARE: usize = 8;
/// .. but no less: a smaller exchange costs the host more time than it hides.
const LEAST: usize = (4 << 20) / size_of::<f32>();

/// The buckets of a region of so many elements, in which parameters start at `starts`: ascending, the first at zero. A backward pass comes to
/// the last parameters first. The first elements of a bucket's first parameter may be left to the next bucket, which travels later.
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

    /// The lengths of the buckets.
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
    fn buckets_are_side_by_side_from_the_end_and_all() {
        assert_eq!(sizes(&[1]), [1]);
        assert_eq!(sizes(&[LEAST, LEAST - 1]), [2 * LEAST - 1], "a small one waits for its neighbour");
        let aligned = TOGETHER * CHUNK;
        assert_eq!(sizes(&[aligned, LEAST, aligned, LEAST]), [LEAST, aligned + LEAST, aligned]);
        assert_eq!(
            sizes(&[64, LEAST, LEAST]),
            [LEAST + 64 - aligned, LEAST, aligned],
            "buckets start where slices may"
        );
        // A large region is cut by `MOST`, whatever its size, and one parameter not at all.
        let first = 20 * MOST;
        assert_eq!(sizes(&[first, MOST - aligned, MOST / 2]).iter().sum::<usize>(), first + MOST - aligned + MOST / 2);
        assert_eq!(sizes(&[first, MOST - aligned, MOST / 2]).len(), 2);
        // One between is cut by its share.
        assert_eq!(sizes(&[LEAST; 32]), [4 * LEAST; 8]);
    }
}
