//! Which gradients travel together.
//!
//! ```text
//! parameters in the layout's order        | embedding |  block 0  |  block 1  | head |
//! buckets in the order of their travel    |     2     |     1     |        0         |
//! ```
//! Invariant: the buckets lie side by side from the region's end to its start and are all of it, and none cuts a parameter. They follow from
//! the layout alone, so all ranks have the same, and all exchange them in this one order. Pure arithmetic.

#![forbid(unsafe_code)]

use std::ops::Range;

/// What travels together, if the region has many times as much: PyTorch's DDP has 25 MB, too.
const MOST: usize = (25 << 20) / size_of::<f32>();
/// Of a smaller region, so large a part of it ..
const SHARE: usize = 8;
/// .. but no less: a smaller exchange costs more than it hides.
const LEAST: usize = (1 << 20) / size_of::<f32>();

/// The buckets of a region of so many elements, in which parameters start at `starts`: ascending, the first at zero. A backward pass comes to
/// the last parameters first.
pub(crate) fn buckets(starts: impl DoubleEndedIterator<Item = usize>, elements: usize) -> Vec<Range<usize>> {
    let enough = (elements / SHARE).clamp(LEAST, MOST);
    let (mut buckets, mut end) = (Vec::new(), elements);
    for start in starts.rev() {
        if start == 0 || end - start >= enough {
            buckets.push(start..end);
            end = start;
        }
    }
    buckets
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sizes(parameters: &[usize]) -> Vec<usize> {
        let starts: Vec<usize> = (0..parameters.len()).map(|number| parameters[..number].iter().sum()).collect();
        let elements = parameters.iter().sum();
        let buckets = buckets(starts.iter().copied(), elements);
        assert_eq!((buckets[0].end, buckets[buckets.len() - 1].start), (elements, 0));
        assert!(buckets.windows(2).all(|pair| pair[0].start == pair[1].end), "{buckets:?}");
        assert!(buckets.iter().all(|bucket| !bucket.is_empty() && starts.contains(&bucket.start)), "{buckets:?}");
        buckets.into_iter().map(|bucket| bucket.len()).collect()
    }

    #[test]
    fn buckets_are_side_by_side_from_the_end_and_all() {
        assert_eq!(sizes(&[1]), [1]);
        assert_eq!(sizes(&[LEAST, LEAST - 1]), [2 * LEAST - 1], "a small one waits for its neighbour");
        assert_eq!(sizes(&[64, LEAST, 64, LEAST]), [LEAST, 64 + LEAST, 64]);
        // A large region is cut by `MOST`, whatever its size, and one parameter not at all.
        assert_eq!(sizes(&[20 * MOST, 64, MOST - 64, MOST / 2]), [MOST + MOST / 2 - 64, 64 + 20 * MOST]);
        // One between is cut by its share.
        assert_eq!(sizes(&[LEAST; 32]), [4 * LEAST; 8]);
    }
}
