//! The layout of an arena: a bump allocator with two ends for steps, and the parts at the end that
//! captured steps own. It is pure arithmetic.
//!
//! Invariant: two allocations between resets never overlap, whichever ends they come from. Every
//! offset is a multiple of [`ALIGN_BYTES`]. The tests try every sequence of requests and scopes in
//! small arenas. Invariant: live parts of captured steps overlap neither one another nor the memory
//! of steps, which may fill memory up to the first of them.

#![forbid(unsafe_code)]

use std::cell::RefCell;
use std::sync::{Arc, Weak};

/// The alignment of every tensor: enough for the widest device access, and a multiple of a cache
/// line.
pub const ALIGN_BYTES: usize = 256;

/// The unit of a grown arena's capacity, which is the size of large pages.
const GROWTH_BYTES: usize = 2 << 20;

/// An end of an arena, from which tensors are taken toward the other end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum End {
    /// The start of the arena, where a step takes its own tensors.
    Front,
    /// The end of the arena.
    Back,
}

impl End {
    /// Returns the opposite end.
    pub(crate) fn other(self) -> Self {
        match self {
            Self::Front => Self::Back,
            Self::Back => Self::Front,
        }
    }
}

/// The state of a bump allocator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Bump {
    /// A multiple of the alignment.
    capacity: usize,
    /// The bytes taken from each end.
    taken: [usize; 2],
}

impl Bump {
    pub(crate) fn new(capacity: usize) -> Self {
        Self { capacity: capacity / ALIGN_BYTES * ALIGN_BYTES, taken: [0; 2] }
    }

    /// Returns the number of bytes taken.
    pub(crate) fn taken(self) -> usize {
        self.taken[0] + self.taken[1]
    }

    /// Returns the offset of the next `bytes` from `end`, and the state after. `None` if they do
    /// not fit.
    pub(crate) fn take(mut self, end: End, bytes: usize) -> Option<(usize, Self)> {
        let bytes = padded(bytes)?;
        if self.taken().checked_add(bytes)? > self.capacity {
            return None;
        }
        let taken = &mut self.taken[end as usize];
        let before = *taken;
        *taken += bytes;
        Some((if end == End::Front { before } else { self.capacity - *taken }, self))
    }

    /// Returns the offset and bytes that were taken since `mark`, from each end.
    pub(crate) fn since(self, mark: Self) -> [(usize, usize); 2] {
        let offsets = [mark.taken[0], self.capacity - self.taken[1]];
        [0, 1].map(|end| (offsets[end], self.taken[end] - mark.taken[end]))
    }

    /// Returns the state without the bytes taken between two earlier marks. At each end these bytes
    /// must be empty or the latest ones taken.
    pub(crate) fn without(mut self, mark: Self, until: Self) -> Self {
        for ((taken, mark), until) in self.taken.iter_mut().zip(mark.taken).zip(until.taken) {
            debug_assert!(
                mark <= until && until <= *taken && (mark == until || until == *taken),
                "a rewind must leave no hole"
            );
            *taken = *taken - until + mark;
        }
        self
    }
}

/// Rounds `bytes` up to the alignment.
pub(crate) fn padded(bytes: usize) -> Option<usize> {
    bytes.checked_next_multiple_of(ALIGN_BYTES)
}

/// Returns the bytes of a tensor with its guard. On overflow it returns more than any arena has.
pub(super) fn guarded(bytes: usize, guard_bytes: usize) -> usize {
    padded(bytes).and_then(|bytes| bytes.checked_add(guard_bytes)).unwrap_or(usize::MAX)
}

/// Returns the capacity that an arena grows to when steps need `needed` bytes.
pub(super) fn grown(needed: usize, max_bytes: usize) -> usize {
    needed.checked_next_multiple_of(GROWTH_BYTES).unwrap_or(usize::MAX).min(max_bytes)
}

/// The bytes of an arena that a captured step owns until this value is dropped.
#[derive(Debug)]
pub(crate) struct GraphReservation {
    /// The offset from the arena's first byte.
    start: usize,
    bytes: usize,
    /// The bytes by which its plan has made it smaller.
    saved: usize,
}

impl GraphReservation {
    /// Returns the offset in bytes from the arena's start.
    pub(crate) fn start(&self) -> usize {
        self.start
    }

    /// Returns the number of bytes.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Returns the number of bytes that a plan has saved.
    pub(crate) fn saved_bytes(&self) -> usize {
        self.saved
    }
}

/// All sections of an arena.
#[derive(Debug, Default)]
pub(super) struct Sections {
    made: RefCell<Vec<Weak<GraphReservation>>>,
}

impl Sections {
    /// Returns the start of the first live section in an arena of `capacity` bytes. Steps may fill
    /// memory up to it.
    pub(super) fn limit(&self, capacity: usize) -> usize {
        let mut made = self.made.borrow_mut();
        made.retain(|section| section.strong_count() > 0);
        made.iter().filter_map(Weak::upgrade).map(|section| section.start).fold(capacity, usize::min)
    }

    /// Reserves the last `bytes` (a multiple of the alignment) that no section owns, if there are
    /// enough. A plan has saved `saved` more.
    pub(super) fn reserve(&self, capacity: usize, bytes: usize, saved: usize) -> Option<Arc<GraphReservation>> {
        let start = self.limit(capacity).checked_sub(bytes)? / ALIGN_BYTES * ALIGN_BYTES;
        let section = Arc::new(GraphReservation { start, bytes, saved });
        self.made.borrow_mut().push(Arc::downgrade(&section));
        Some(section)
    }

    /// Returns the bytes of all live sections, and the bytes that their plans have saved.
    pub(super) fn bytes(&self) -> (usize, usize) {
        let sections = self.made.borrow();
        let live = sections.iter().filter_map(Weak::upgrade);
        live.fold((0, 0), |(bytes, saved), section| (bytes + section.bytes, saved + section.saved))
    }

    /// Drops all sections from the list. Their arena has new memory now, and they keep the old.
    pub(super) fn forget(&mut self) {
        self.made.get_mut().clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::ops::Range;

    proptest! {
        #[test]
        fn takes_are_disjoint_aligned_and_inside(capacity in 0usize..100_000, takes in prop::collection::vec((any::<bool>(), 0usize..5000), 0..64)) {
            let mut bump = Bump::new(capacity);
            // The free range.
            let (mut low, mut high) = (0, capacity / ALIGN_BYTES * ALIGN_BYTES);
            for (front, bytes) in takes {
                let end = if front { End::Front } else { End::Back };
                match bump.take(end, bytes) {
                    Some((offset, next)) => {
                        let padded = padded(bytes).unwrap();
                        prop_assert!(offset % ALIGN_BYTES == 0 && offset >= low && offset + padded <= high);
                        prop_assert_eq!(next.since(bump)[end as usize], (offset, padded));
                        prop_assert_eq!(next.since(bump)[end.other() as usize].1, 0);
                        if front { low = offset + padded } else { high = offset }
                        bump = next;
                    }
                    None => prop_assert!(bump.taken() + padded(bytes).unwrap() > capacity),
                }
                prop_assert_eq!(bump.taken(), low + (capacity / ALIGN_BYTES * ALIGN_BYTES - high));
            }
        }
    }

    #[test]
    fn ending_scope_keeps_later_memory() {
        let start = Bump::new(4096).take(End::Front, 256).unwrap().1;
        let (offset, inside) = start.take(End::Back, 1000).unwrap();
        assert_eq!((offset, inside.since(start)), (3072, [(256, 0), (3072, 1024)]));
        let (offset, after) = inside.take(End::Front, 512).unwrap();
        assert_eq!((offset, after.taken()), (256, 1792));
        let left = after.without(start, inside);
        assert_eq!(left, start.take(End::Front, 512).unwrap().1, "only the scope's bytes must be free");
        assert_eq!(left.without(start, left), start);
    }

    /// Every request of a small arena: five sizes around the alignment, from either end.
    const REQUESTS: [(End, usize); 10] = {
        let sizes = [0, 1, ALIGN_BYTES, ALIGN_BYTES + 1, 2 * ALIGN_BYTES];
        let mut requests = [(End::Front, 0); 10];
        let mut at = 0;
        while at < 10 {
            requests[at] = (if at % 2 == 0 { End::Front } else { End::Back }, sizes[at / 2]);
            at += 1;
        }
        requests
    };

    /// Makes each request after those before, up to `depth`, and checks that the block that it
    /// returns overlaps no live one and lies inside. Also ends every scope that could have begun
    /// before it: that frees exactly what the scope took.
    fn try_all(bump: Bump, live: &mut Vec<Range<usize>>, depth: usize) -> usize {
        let mut tried = 0;
        for (end, bytes) in REQUESTS {
            let needed = padded(bytes).unwrap();
            let Some((offset, next)) = bump.take(end, bytes) else {
                assert!(bump.taken() + needed > bump.capacity, "only a request that does not fit may fail");
                continue;
            };
            let block = offset..offset + needed;
            assert!(offset % ALIGN_BYTES == 0 && block.end <= bump.capacity);
            assert!(live.iter().all(|other| block.end <= other.start || other.end <= block.start));
            assert_eq!(next.taken(), bump.taken() + needed);
            assert_eq!(next.without(bump, next), bump, "ending a scope must restore the state before it");
            tried += 1;
            if depth > 1 {
                if !block.is_empty() {
                    live.push(block.clone());
                }
                tried += try_all(next, live, depth - 1);
                if !block.is_empty() {
                    live.pop();
                }
            }
        }
        tried
    }

    #[test]
    fn every_short_sequence_is_disjoint() {
        for capacity in (0..=6 * ALIGN_BYTES).step_by(ALIGN_BYTES / 2) {
            let tried = try_all(Bump::new(capacity), &mut Vec::new(), 5);
            assert!(tried > 0 && (capacity < 6 * ALIGN_BYTES || tried > 10_000), "{tried} of {capacity}");
        }
    }

    #[test]
    fn huge_sizes_do_not_wrap() {
        for end in [End::Front, End::Back] {
            assert_eq!(Bump::new(usize::MAX).take(end, usize::MAX), None);
            let (_, bump) = Bump::new(1024).take(end, 256).unwrap();
            assert_eq!(bump.take(end, usize::MAX - 256), None);
        }
    }

    #[test]
    fn sections_come_from_the_end() {
        let sections = Sections::default();
        let first = sections.reserve(4096, 1024, 0).unwrap();
        let second = sections.reserve(4096, 512, 100).unwrap();
        assert_eq!((first.start(), second.start(), sections.limit(4096)), (3072, 2560, 2560));
        assert_eq!(sections.bytes(), (1536, 100));
        drop(first);
        assert_eq!(sections.limit(4096), 2560, "steps never reach beyond a live section");
        drop(second);
        assert_eq!((sections.limit(4096), sections.bytes()), (4096, (0, 0)));
    }

    #[test]
    fn oversized_sections_are_refused() {
        let sections = Sections::default();
        assert!(sections.reserve(1024, 1280, 0).is_none());
        let whole = sections.reserve(1024, 1024, 0).unwrap();
        assert!(sections.reserve(1024, 256, 0).is_none());
        drop(whole);
        assert!(sections.reserve(1024, 1024, 0).is_some());
    }

    #[test]
    fn sections_are_aligned() {
        let sections = Sections::default();
        assert_eq!(sections.reserve(1000, 256, 0).unwrap().start(), 512);
    }

    /// Whatever the order of drops, steps end where the first live section starts.
    #[test]
    fn live_sections_bound_the_next() {
        let sections = Sections::default();
        let mut alive: Vec<_> = [300, 256, 1, 700].into_iter().map(|bytes| sections.reserve(5000, bytes, 0)).collect();
        for removed in [1, 2, 1, 0] {
            alive.remove(removed);
            let limit = alive.iter().flatten().map(|section| section.start()).min().unwrap_or(5000);
            assert_eq!(sections.limit(5000), limit);
            let next = (limit - 10) / ALIGN_BYTES * ALIGN_BYTES;
            assert_eq!(sections.reserve(5000, 10, 0).map(|section| section.start()), Some(next));
        }
    }
}
