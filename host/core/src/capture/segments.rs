//! A captured step in segments: graphs that are queued one after another, with progress reported in
//! between.
//!
//! The cuts follow from the list of launches. Memory is complete after the last launch that may
//! write or read it, by the extents that the launch's contract accepted. Reads count, because
//! others may change complete memory: for example, other shards' gradients are added to it. No op
//! declares what it uses, so none can declare it wrongly. A step that announces nothing is one
//! segment.
//!
//! Invariant: the segments are all launches in their order. After the segment that completes a
//! piece of memory, no later segment writes or reads it.

#![forbid(unsafe_code)]

use crate::device::{Device, Launch, Pins, SealedGraph};
use crate::error::Result;
use std::ops::Range;

/// All launches of a recording.
pub(super) struct Segments(Vec<Segment>);

struct Segment {
    graph: SealedGraph,
    /// The number of announcements that are complete after it.
    complete: usize,
}

impl Segments {
    /// Captures launches whose memory `pins` holds.
    pub(super) fn capture(
        device: &Device,
        launches: Vec<Launch>,
        announced: &[Range<u64>],
        pins: &Pins,
    ) -> Result<Self> {
        let cuts = cuts(&launches.iter().map(|launch| used(launch).collect()).collect::<Vec<_>>(), announced);
        let (mut launches, mut start) = (launches.into_iter(), 0);
        let segment = |(end, complete)| {
            let launches = launches.by_ref().take(end - std::mem::replace(&mut start, end)).collect();
            Ok(Segment { graph: SealedGraph::capture(device, launches, pins.clone())?, complete })
        };
        cuts.into_iter().map(segment).collect::<Result<_>>().map(Self)
    }

    /// The number of launches in all segments.
    pub(super) fn kernels(&self) -> usize {
        self.0.iter().map(|segment| segment.graph.kernels()).sum()
    }

    /// Queues all launches. After each segment it calls `between` with the number of announcements
    /// that are complete.
    pub(super) fn replay(&self, between: &mut dyn FnMut(usize) -> Result<()>) -> Result<()> {
        self.0.iter().try_for_each(|Segment { graph, complete }| {
            graph.replay()?;
            between(*complete)
        })
    }
}

/// Returns the memory that a launch may access, by the extents that its contract accepted.
pub(super) fn used(launch: &Launch) -> impl Iterator<Item = Range<u64>> {
    // An extent without elements uses no memory.
    let used = launch.words.extents().iter().filter(|extent| extent.bytes() > 0);
    used.map(|extent| extent.address..extent.address + extent.bytes() as u64)
}

/// Returns the end of each segment of these launches, and the number of announcements that are
/// complete after it. Announcements complete in their order.
fn cuts(used: &[Vec<Range<u64>>], announced: &[Range<u64>]) -> Vec<(usize, usize)> {
    let launches = used.len();
    let uses = |used: &[Range<u64>], memory: &Range<u64>| {
        used.iter().any(|used| used.start < memory.end && memory.start < used.end)
    };
    let mut cuts: Vec<(usize, usize)> = Vec::new();
    // Memory that no launch uses is complete after the first launch, so no segment is empty.
    let mut end = launches.min(1);
    for (number, memory) in announced.iter().enumerate() {
        let last = used.iter().rposition(|used| uses(used, memory));
        end = end.max(last.map_or(0, |last| last + 1));
        match cuts.last_mut() {
            Some((known, complete)) if *known == end => *complete = number + 1,
            _ => cuts.push((end, number + 1)),
        }
    }
    if cuts.last().is_none_or(|(end, _)| *end < launches) {
        cuts.push((launches, announced.len()));
    }
    cuts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_split_after_last_use() {
        // Launches that use one byte each, and one that uses nothing.
        let byte = |at: u64| std::iter::once(at..at + 1).collect();
        let used: [Vec<Range<u64>>; 6] = [byte(9), byte(5), byte(4), byte(5), Vec::new(), byte(0)];
        let ends = |announced: &[Range<u64>]| cuts(&used, announced);
        assert_eq!(ends(&[]), [(6, 0)]);
        assert_eq!(ends(&[8..10, 4..6, 0..1]), [(1, 1), (4, 2), (6, 3)]);
        assert_eq!(ends(&[4..6, 8..10]), [(4, 2), (6, 2)], "the ends must be in the order of the announcements");
        assert_eq!(ends(&[4..5, 5..6]), [(3, 1), (4, 2), (6, 2)]);
        assert_eq!(ends(&[20..30, 9..10]), [(1, 2), (6, 2)], "an unused range must be complete at once");
        assert_eq!(ends(&[0..10, 9..10]), [(6, 2)]);
        assert_eq!((cuts(&[], &[]), cuts(&[], &[0..1, 1..2])), (vec![(0, 0)], vec![(0, 2)]));
    }
}
