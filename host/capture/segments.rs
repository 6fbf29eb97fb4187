//! A captured step in segments: graphs that are queued one after the other, between which others hear what is complete.
//!
//! Where to cut is read off the list of launches: memory is complete after the last of them that
//! may write or read it, by the extents that its contract accepted. Reads count, as memory that is
//! complete may be changed by others, such as gradients to which those of other shards are added.
//! No op has to say what it uses, so none can be wrong about it. Invariants: the segments are all
//! launches in their order; after the segment with which memory is told, none writes or reads it.
//! A step that announces nothing is one segment.

#![forbid(unsafe_code)]

use crate::driver::{Device, Launch, Pins, SealedGraph};
use crate::error::Result;
use std::ops::Range;

/// All launches of a recording.
pub(super) struct Segments(Vec<Segment>);

struct Segment {
    graph: SealedGraph,
    /// How many of the announced are complete behind it.
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
        let used = |launch: &Launch| {
            // No element has no place.
            let used = launch.words.extents().iter().filter(|extent| extent.bytes() > 0);
            used.map(|extent| extent.address..extent.address + extent.bytes() as u64).collect()
        };
        let cuts = cuts(&launches.iter().map(used).collect::<Vec<_>>(), announced);
        let (mut launches, mut start) = (launches.into_iter(), 0);
        let segment = |(end, complete)| {
            let launches = launches.by_ref().take(end - std::mem::replace(&mut start, end)).collect();
            Ok(Segment { graph: SealedGraph::capture(device, launches, pins.clone())?, complete })
        };
        cuts.into_iter().map(segment).collect::<Result<_>>().map(Self)
    }

    /// The launches of all.
    pub(super) fn kernels(&self) -> usize {
        self.0.iter().map(|segment| segment.graph.kernels()).sum()
    }

    /// Queues all launches; `between` hears behind each segment how many of the announced are complete.
    pub(super) fn replay(&self, between: &mut dyn FnMut(usize) -> Result<()>) -> Result<()> {
        self.0.iter().try_for_each(|Segment { graph, complete }| {
            graph.replay()?;
            between(*complete)
        })
    }
}

/// The end of each segment of launches that use this memory, and how many of the announced are
/// complete after it. Each is told after those that were announced before it.
fn cuts(used: &[Vec<Range<u64>>], announced: &[Range<u64>]) -> Vec<(usize, usize)> {
    let launches = used.len();
    let uses = |used: &[Range<u64>], memory: &Range<u64>| {
        used.iter().any(|used| used.start < memory.end && memory.start < used.end)
    };
    let mut cuts: Vec<(usize, usize)> = Vec::new();
    // What no launch uses is told after the first: no segment is empty.
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
    fn a_step_is_cut_behind_the_last_use_of_what_was_announced() {
        // Launches that use one byte each, and one that uses nothing.
        let byte = |at: u64| std::iter::once(at..at + 1).collect();
        let used: [Vec<Range<u64>>; 6] = [byte(9), byte(5), byte(4), byte(5), Vec::new(), byte(0)];
        let ends = |announced: &[Range<u64>]| cuts(&used, announced);
        assert_eq!(ends(&[]), [(6, 0)]);
        assert_eq!(ends(&[8..10, 4..6, 0..1]), [(1, 1), (4, 2), (6, 3)]);
        assert_eq!(ends(&[4..6, 8..10]), [(4, 2), (6, 2)], "told in the order of the announcements");
        assert_eq!(ends(&[4..5, 5..6]), [(3, 1), (4, 2), (6, 2)]);
        assert_eq!(ends(&[20..30, 9..10]), [(1, 2), (6, 2)], "what nobody uses");
        assert_eq!(ends(&[0..10, 9..10]), [(6, 2)]);
        assert_eq!((cuts(&[], &[]), cuts(&[], &[0..1, 1..2])), (vec![(0, 0)], vec![(0, 2)]));
    }
}
