//! The elements of a flat region that are stored here: all of them, or the slices of a rank.
//!
//! Invariant: the ranges ascend, and consist of whole runs of 64 elements.

#![forbid(unsafe_code)]

use kernels::update::RUN;
use std::ops::Range;
use std::sync::Arc;

/// The elements of a flat region that are stored, one range after another.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Kept(Arc<[Range<usize>]>);

impl Kept {
    /// Makes the set of all elements of a region.
    pub fn all(elements: usize) -> Self {
        Self(std::iter::once(0..elements).collect())
    }

    /// Makes the set of the elements of these ranges.
    pub fn of(ranges: Vec<Range<usize>>) -> Self {
        debug_assert!(ranges.windows(2).all(|pair| pair[0].end <= pair[1].start), "{ranges:?}");
        Self(ranges.into())
    }

    /// Returns the ranges, ascending.
    pub fn ranges(&self) -> &[Range<usize>] {
        &self.0
    }

    /// Returns the number of elements of a buffer that stores them, which is never empty.
    pub fn stored_elements(&self) -> usize {
        self.0.iter().map(Range::len).sum::<usize>().max(RUN)
    }

    /// Returns the parts of a range that are stored, each with the place of its first element.
    pub fn within(&self, range: &Range<usize>) -> impl Iterator<Item = (Range<usize>, usize)> + use<> {
        let (ranges, range, mut place) = (Arc::clone(&self.0), range.clone(), 0);
        (0..ranges.len()).filter_map(move |at| {
            let kept = ranges[at].clone();
            let both = kept.start.max(range.start)..kept.end.min(range.end);
            let first = place + both.start.saturating_sub(kept.start);
            place += kept.len();
            (!both.is_empty()).then_some((both, first))
        })
    }

    /// Returns the places of the stored elements of a range, which are adjacent.
    pub fn places(&self, range: &Range<usize>) -> Range<usize> {
        let mut within = self.within(range);
        let Some((first, start)) = within.next() else { return 0..0 };
        start..within.fold(start + first.len(), |end, (part, _)| end + part.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_follow_each_other() {
        let kept = Kept::of(vec![64..128, 256..512, 640..704]);
        assert_eq!(kept.stored_elements(), 384);
        let within: Vec<_> = kept.within(&(100..650)).collect();
        assert_eq!(within, [(100..128, 36), (256..512, 64), (640..650, 320)]);
        assert_eq!(kept.places(&(100..650)), 36..330);
        assert_eq!(kept.places(&(128..256)), 0..0);
        assert_eq!(Kept::all(640).places(&(10..20)), 10..20);
        assert_eq!((Kept::of(Vec::new()).stored_elements(), Kept::of(Vec::new()).places(&(0..9))), (64, 0..0));
    }
}
