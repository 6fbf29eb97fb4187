//! The parts of an arena that captured steps own, at its end.
//!
//! Invariant: a section that is alive overlaps no other one, and no step's memory: what steps may fill ends where the first
//! live section starts.

#![forbid(unsafe_code)]

use super::layout::ALIGN_BYTES;
use std::cell::RefCell;
use std::sync::{Arc, Weak};

/// Bytes of an arena that are a captured step's until this value is dropped.
#[derive(Debug)]
pub(crate) struct Section {
    /// From the arena's first byte.
    start: usize,
    bytes: usize,
}

impl Section {
    /// Bytes from the arena's start.
    pub(crate) fn start(&self) -> usize {
        self.start
    }

    /// How many.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }
}

/// All sections of an arena.
#[derive(Debug, Default)]
pub(super) struct Sections {
    made: RefCell<Vec<Weak<Section>>>,
}

impl Sections {
    /// Where the first live section starts, in an arena of `capacity` bytes: what steps may fill.
    pub(super) fn limit(&self, capacity: usize) -> usize {
        let mut made = self.made.borrow_mut();
        made.retain(|section| section.strong_count() > 0);
        made.iter().filter_map(Weak::upgrade).map(|section| section.start).fold(capacity, usize::min)
    }

    /// The last `bytes` (a multiple of the alignment) that no section has, if there are so many.
    pub(super) fn reserve(&self, capacity: usize, bytes: usize) -> Option<Arc<Section>> {
        let start = self.limit(capacity).checked_sub(bytes)? / ALIGN_BYTES * ALIGN_BYTES;
        let section = Arc::new(Section { start, bytes });
        self.made.borrow_mut().push(Arc::downgrade(&section));
        Some(section)
    }

    /// Bytes of all live sections.
    pub(super) fn bytes(&self) -> usize {
        self.made.borrow().iter().filter_map(Weak::upgrade).map(|section| section.bytes).sum()
    }

    /// Forgets all: their arena has other memory now, and they keep the old.
    pub(super) fn forget(&mut self) {
        self.made.get_mut().clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sections_are_taken_from_the_end_and_come_back() {
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
    fn what_is_not_there_is_not_given() {
        let sections = Sections::default();
        assert!(sections.reserve(1024, 1280).is_none());
        let whole = sections.reserve(1024, 1024).unwrap();
        assert!(sections.reserve(1024, 256).is_none());
        drop(whole);
        assert!(sections.reserve(1024, 1024).is_some());
    }

    #[test]
    fn a_section_starts_at_a_multiple_of_the_alignment() {
        let sections = Sections::default();
        assert_eq!(sections.reserve(1000, 256).unwrap().start(), 512);
    }
}
