//! The parts at the end of an arena that captured steps own.
//!
//! Invariant: live sections overlap neither one another nor the memory of steps. Steps may fill
//! memory up to the start of the first live section.

#![forbid(unsafe_code)]

use super::layout::ALIGN_BYTES;
use std::cell::RefCell;
use std::sync::{Arc, Weak};

/// The bytes of an arena that a captured step owns until this value is dropped.
#[derive(Debug)]
pub(crate) struct GraphReservation {
    /// The offset from the arena's first byte.
    start: usize,
    bytes: usize,
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
    /// enough.
    pub(super) fn reserve(&self, capacity: usize, bytes: usize) -> Option<Arc<GraphReservation>> {
        let start = self.limit(capacity).checked_sub(bytes)? / ALIGN_BYTES * ALIGN_BYTES;
        let section = Arc::new(GraphReservation { start, bytes });
        self.made.borrow_mut().push(Arc::downgrade(&section));
        Some(section)
    }

    /// Returns the bytes of all live sections.
    pub(super) fn bytes(&self) -> usize {
        self.made.borrow().iter().filter_map(Weak::upgrade).map(|section| section.bytes).sum()
    }

    /// Drops all sections from the list. Their arena has new memory now, and they keep the old.
    pub(super) fn forget(&mut self) {
        self.made.get_mut().clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sections_come_from_the_end() {
        let sections = Sections::default();
        let first = sections.reserve(4096, 1024).unwrap();
        let second = sections.reserve(4096, 512).unwrap();
        assert_eq!((first.start(), second.start(), sections.limit(4096)), (3072, 2560, 2560));
        assert_eq!(sections.bytes(), 1536);
        drop(first);
        assert_eq!(sections.limit(4096), 2560, "steps never reach beyond a live section");
        drop(second);
        assert_eq!((sections.limit(4096), sections.bytes()), (4096, 0));
    }

    #[test]
    fn oversized_sections_are_refused() {
        let sections = Sections::default();
        assert!(sections.reserve(1024, 1280).is_none());
        let whole = sections.reserve(1024, 1024).unwrap();
        assert!(sections.reserve(1024, 256).is_none());
        drop(whole);
        assert!(sections.reserve(1024, 1024).is_some());
    }

    #[test]
    fn sections_are_aligned() {
        let sections = Sections::default();
        assert_eq!(sections.reserve(1000, 256).unwrap().start(), 512);
    }

    /// Whatever the order of drops, steps end where the first live section starts.
    #[test]
    fn live_sections_bound_the_next() {
        let sections = Sections::default();
        let mut alive: Vec<_> = [300, 256, 1, 700].into_iter().map(|bytes| sections.reserve(5000, bytes)).collect();
        for gone in [1, 2, 1, 0] {
            alive.remove(gone);
            let limit = alive.iter().flatten().map(|section| section.start()).min().unwrap_or(5000);
            assert_eq!(sections.limit(5000), limit);
            let next = (limit - 10) / ALIGN_BYTES * ALIGN_BYTES;
            assert_eq!(sections.reserve(5000, 10).map(|section| section.start()), Some(next));
        }
    }
}
