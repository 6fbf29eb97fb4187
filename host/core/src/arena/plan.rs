//! The memory plan of a captured step: a tensor has memory only for the launches that use it.
//!
//! The first run of the recorded function gives each tensor an address of its own, so the list of
//! launches shows which tensors a launch uses. A tensor lives from the first launch that uses it to
//! the last, by the extents that the launches' contracts accepted. Inputs live throughout, and what
//! is read after the step lives to its end. [`MemoryPlan::new`] packs these lifetimes: the largest
//! tensor first, each at the lowest offset that is free during its lifetime ("greedy by size",
//! Pisarchyk and Lee 2020, arXiv:2001.03288). The second run takes its tensors from the plan, and
//! [`MemoryPlan::check`] compares its launches with the first run's.
//!
//! Invariant: two tensors that live during the same launch do not overlap. The launches of a
//! checked recording use the memory that the first run's launches used, at its planned offsets.

#![forbid(unsafe_code)]

use super::layout::padded;
use crate::error::{Error, Result};
use std::cell::{Cell, RefCell};
use std::cmp::Reverse;
use std::ops::Range;
use std::sync::Arc;

/// The way in which the tensors of a step get their memory.
#[derive(Debug, Default)]
pub(crate) enum Placement {
    /// From the ends of the arena, by scope.
    #[default]
    Scoped,
    /// As by scope, but each has an offset of its own in the list, so that the step can be planned.
    Listed(Listing),
    /// From a plan, of which this many tensors have been taken.
    Planned(Arc<MemoryPlan>, Cell<usize>),
}

impl Placement {
    /// Takes tensors from this plan.
    pub(crate) fn by(plan: Arc<MemoryPlan>) -> Self {
        Self::Planned(plan, Cell::new(0))
    }
}

/// The memory that each launch of a step uses, by the offset from the step's first byte.
pub(crate) type Uses = Vec<Vec<Range<usize>>>;

/// The tensors of the first run, each at an offset of its own.
#[derive(Debug, Default)]
pub(crate) struct Listing {
    tensors: RefCell<Vec<Listed>>,
    /// The number of the first tensors that live throughout.
    inputs: Cell<usize>,
    /// Memory that is read after the step.
    kept: RefCell<Vec<Range<usize>>>,
}

#[derive(Clone, Debug)]
struct Listed {
    memory: Range<usize>,
    /// The offset that it would have without a plan.
    scoped: usize,
}

impl Listing {
    /// Lists a tensor that would lie at the offset `scoped` without a plan, and returns its own
    /// offset. `None` if there is none.
    pub(super) fn add(&self, bytes: usize, scoped: usize) -> Option<usize> {
        let mut tensors = self.tensors.borrow_mut();
        let start = tensors.last().map_or(0, |last| last.memory.end);
        tensors.push(Listed { memory: start..start.checked_add(padded(bytes)?)?, scoped });
        Some(start)
    }

    /// Returns the offset that the tensor at `offset` would have without a plan.
    pub(super) fn scoped(&self, offset: usize) -> Option<usize> {
        let tensors = self.tensors.borrow();
        let found = tensors.binary_search_by_key(&offset, |tensor| tensor.memory.start).ok()?;
        Some(tensors[found].scoped)
    }

    /// Lets the tensors so far live throughout the step.
    pub(crate) fn keep_inputs(&self) {
        self.inputs.set(self.tensors.borrow().len());
    }

    /// Lets the tensors in this memory live until the step ends.
    pub(crate) fn keep(&self, memory: Range<usize>) {
        self.kept.borrow_mut().push(memory);
    }
}

/// The offsets of a captured step's tensors.
#[derive(Debug)]
pub(crate) struct MemoryPlan {
    tensors: Vec<Planned>,
    /// The memory that each launch of the first run used.
    uses: Uses,
    bytes: usize,
    saved_bytes: usize,
}

/// A tensor's memory in the first run, and its offset in the plan.
#[derive(Debug)]
struct Planned {
    listed: Range<usize>,
    offset: usize,
}

impl MemoryPlan {
    /// Plans the listed tensors, which take `scoped_bytes` without a plan, for these launches.
    pub(crate) fn new(listing: Listing, uses: Uses, scoped_bytes: usize) -> Self {
        let tensors = listing.tensors.into_inner();
        let mut lifetimes = vec![uses.len()..0; tensors.len()];
        lifetimes[..listing.inputs.get()].fill(0..uses.len() + 1);
        let mut extend = |memory: &Range<usize>, launches: Range<usize>| {
            let first = tensors.partition_point(|tensor| tensor.memory.end <= memory.start);
            let users = tensors[first..].iter().take_while(|tensor| tensor.memory.start < memory.end).count();
            for lifetime in &mut lifetimes[first..first + users] {
                *lifetime = lifetime.start.min(launches.start)..lifetime.end.max(launches.end);
            }
        };
        for (launch, used) in uses.iter().enumerate() {
            used.iter().for_each(|memory| extend(memory, launch..launch + 1));
        }
        // The end of the step counts as a launch.
        listing.kept.borrow().iter().for_each(|memory| extend(memory, uses.len()..uses.len() + 1));
        let sizes: Vec<usize> = tensors.iter().map(|tensor| tensor.memory.len()).collect();
        let offsets = pack(&sizes, &lifetimes);
        let bytes = sizes.iter().zip(&offsets).map(|(size, offset)| offset + size).max().unwrap_or(0);
        let planned = tensors.into_iter().zip(offsets);
        let tensors = planned.map(|(tensor, offset)| Planned { listed: tensor.memory, offset }).collect();
        Self { tensors, uses, bytes, saved_bytes: scoped_bytes.saturating_sub(bytes) }
    }

    /// Returns the bytes that the step needs.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Returns the bytes that the step would need in addition without a plan.
    pub(crate) fn saved_bytes(&self) -> usize {
        self.saved_bytes
    }

    /// Returns the offset of tensor `number`.
    ///
    /// # Errors
    /// [`Error::Misuse`] if the first run took a tensor of another size, or none.
    pub(super) fn offset(&self, number: usize, bytes: usize) -> Result<usize> {
        match self.tensors.get(number) {
            Some(tensor) if padded(bytes) == Some(tensor.listed.len()) => Ok(tensor.offset),
            _ => Err(differs(format!("another tensor {number}, of {bytes} bytes"))),
        }
    }

    /// Checks that the second run's launches use the tensors that the first run's used.
    ///
    /// # Errors
    /// [`Error::Misuse`] otherwise.
    pub(crate) fn check(&self, uses: &Uses) -> Result<()> {
        if uses.len() != self.uses.len() {
            return Err(differs(format!("{} launches after {}", uses.len(), self.uses.len())));
        }
        let moved = |memory: &Range<usize>| {
            let tensor = self.tensors.partition_point(|tensor| tensor.listed.end <= memory.start);
            let start = memory.start - self.tensors[tensor].listed.start + self.tensors[tensor].offset;
            start..start + memory.len()
        };
        let same = |(first, second): (&Vec<Range<usize>>, &Vec<_>)| first.iter().map(moved).eq(second.iter().cloned());
        match self.uses.iter().zip(uses).position(|launch| !same(launch)) {
            Some(launch) => Err(differs(format!("launch {launch} with other tensors"))),
            None => Ok(()),
        }
    }
}

fn differs(got: String) -> Error {
    Error::misuse("capture", "a function that takes the same tensors and makes the same launches each time", got)
}

/// Returns an offset for each size, so that no two overlap whose lifetimes do.
fn pack(sizes: &[usize], lifetimes: &[Range<usize>]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..sizes.len()).collect();
    order.sort_by_key(|&tensor| (Reverse(sizes[tensor]), lifetimes[tensor].start));
    let mut offsets = vec![0; sizes.len()];
    // The tensors so far, by their offsets.
    let mut placed: Vec<usize> = Vec::new();
    // A tensor that no launch uses lies at the start.
    for tensor in order.into_iter().filter(|&tensor| !lifetimes[tensor].is_empty()) {
        let (lifetime, mut offset) = (&lifetimes[tensor], 0);
        for &other in &placed {
            if lifetimes[other].start < lifetime.end && lifetime.start < lifetimes[other].end {
                if offset + sizes[tensor] <= offsets[other] {
                    break;
                }
                offset = offset.max(offsets[other] + sizes[other]);
            }
        }
        offsets[tensor] = offset;
        placed.insert(placed.partition_point(|&other| offsets[other] <= offset), tensor);
    }
    offsets
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arena::ALIGN_BYTES;
    use proptest::prelude::*;

    /// The bytes that live during the launch at which most live.
    fn most_alive(sizes: &[usize], lifetimes: &[Range<usize>]) -> usize {
        let alive = |launch| sizes.iter().zip(lifetimes).filter(move |(_, life)| life.contains(&launch));
        let ends = lifetimes.iter().map(|life| life.end).max().unwrap_or(0);
        (0..ends).map(|launch| alive(launch).map(|(size, _)| size).sum()).max().unwrap_or(0)
    }

    proptest! {
        #[test]
        fn living_tensors_are_disjoint(tensors in prop::collection::vec((1usize..40, 0usize..20, 0usize..10), 0..30)) {
            let sizes: Vec<usize> = tensors.iter().map(|(size, ..)| size * ALIGN_BYTES).collect();
            let lifetimes: Vec<Range<usize>> = tensors.iter().map(|&(_, start, length)| start..start + length).collect();
            let offsets = pack(&sizes, &lifetimes);
            let mut end = 0;
            for a in 0..sizes.len() {
                prop_assert!(offsets[a].is_multiple_of(ALIGN_BYTES));
                if lifetimes[a].is_empty() {
                    continue;
                }
                end = end.max(offsets[a] + sizes[a]);
                for b in 0..a {
                    let together = lifetimes[a].start.max(lifetimes[b].start) < lifetimes[a].end.min(lifetimes[b].end);
                    let apart = offsets[a] + sizes[a] <= offsets[b] || offsets[b] + sizes[b] <= offsets[a];
                    prop_assert!(!together || apart, "{a} and {b}");
                }
            }
            prop_assert!(end >= most_alive(&sizes, &lifetimes));
        }
    }

    /// Activations that backward reads in reverse order, and values that only the next launch
    /// reads.
    #[test]
    fn steps_take_what_lives_at_once() {
        let launches = 200;
        let activations = (0..launches / 2).map(|layer| (4096, layer..launches - layer));
        let values = (0..launches - 1).map(|launch| (8192, launch..launch + 2));
        let (sizes, lifetimes): (Vec<_>, Vec<_>) = activations.chain(values).unzip();
        let offsets = pack(&sizes, &lifetimes);
        let end = sizes.iter().zip(offsets).map(|(size, offset)| size + offset).max().unwrap();
        assert_eq!(end, most_alive(&sizes, &lifetimes));
    }

    /// A tensor that the first launch writes and the second reads, one of the second and third
    /// launch, and an input that nothing uses.
    fn plan(kept: bool) -> MemoryPlan {
        let listing = Listing::default();
        assert_eq!(listing.add(100, 0), Some(0));
        listing.keep_inputs();
        assert_eq!(
            [listing.add(256, 256), listing.add(200, 512), listing.add(1, 768)],
            [Some(256), Some(512), Some(768)]
        );
        assert_eq!([listing.scoped(512), listing.scoped(513)], [Some(512), None]);
        if kept {
            listing.keep(256..260);
        }
        let uses = vec![vec![256..512], vec![256..512, 512..712], vec![512..712, 768..769]];
        MemoryPlan::new(listing, uses, 1024)
    }

    #[test]
    fn dead_tensors_memory_is_reused() {
        let offsets = |plan: &MemoryPlan| {
            [(0, 100), (1, 256), (2, 200), (3, 1)].map(|(number, bytes)| plan.offset(number, bytes).unwrap())
        };
        let (plan, keeping) = (plan(false), plan(true));
        assert_eq!((offsets(&plan), plan.bytes()), ([0, 256, 512, 256], 768));
        assert_eq!((offsets(&keeping), keeping.bytes()), ([0, 256, 512, 768], 1024));
        assert_eq!([plan.saved_bytes(), keeping.saved_bytes()], [256, 0]);
        assert!(plan.offset(4, 1).is_err() && plan.offset(2, 300).is_err() && plan.offset(2, usize::MAX).is_err());
    }

    #[test]
    fn other_launches_are_refused() {
        let plan = plan(false);
        let same = vec![vec![256..512], vec![256..512, 512..712], vec![512..712, 256..257]];
        assert!(plan.check(&same).is_ok());
        let mut late = same.clone();
        late[2][1] = 256..258;
        let refused = plan.check(&late).unwrap_err().to_string();
        assert!(refused.contains("launch 2 with other tensors"), "{refused}");
        let refused = plan.check(&same[..2].to_vec()).unwrap_err().to_string();
        assert!(refused.contains("2 launches after 3"), "{refused}");
    }
}
