//! The parameters of a flat region, and their places in it.
//!
//! Invariant: each parameter begins at a multiple of 256 bytes, after the one before it. A trained
//! one also begins at a multiple of its state's [`StateType::unit`].

#![forbid(unsafe_code)]

use super::spec::{FrozenType, ParameterEntry, StateType};
use crate::arena::ALIGN_BYTES;
use std::ops::Range;

/// The region of a parameter, and its index there.
#[derive(Clone, Copy, Debug)]
pub(super) enum Position {
    Trained(usize),
    Frozen(FrozenType, usize),
}

/// The parameters of a flat region.
#[derive(Clone, Debug, Default)]
pub(super) struct Region {
    pub(super) entries: Vec<ParameterEntry>,
    /// The elements, including padding between parameters.
    pub(super) elements: usize,
}

impl Region {
    pub(super) const fn new() -> Self {
        Self { entries: Vec::new(), elements: 0 }
    }

    /// Returns the region of trained parameters for a state of this type.
    pub(super) fn placed(self, state: StateType) -> Self {
        let mut placed = Self::new();
        self.entries.into_iter().for_each(|entry| placed.push_at(entry, state.unit()));
        // A region has at least one element.
        placed.elements = placed.elements.max(state.unit());
        placed
    }

    /// Adds a parameter after the others.
    pub(super) fn push(&mut self, entry: ParameterEntry) {
        let unit = ALIGN_BYTES / entry.element_bytes();
        self.push_at(entry, unit);
    }

    fn push_at(&mut self, mut entry: ParameterEntry, unit: usize) {
        let start = self.elements;
        // The builder has checked that all parameters together fit in memory.
        self.elements = (start + entry.stored_elements()).next_multiple_of(unit);
        entry.start = start;
        self.entries.push(entry);
    }

    /// Fills `place` with the bytes of the region from byte `offset` on. `write` writes each
    /// parameter's bytes. It receives the parameter's index, its entry and the first byte within
    /// it. Padding is zero.
    pub(super) fn fill(
        &self,
        offset: usize,
        place: &mut [u8],
        write: impl Fn(usize, &ParameterEntry, usize, &mut [u8]),
    ) {
        self.fill_as(ParameterEntry::bytes, offset, place, write);
    }

    /// Fills `place` like [`Region::fill`], of a region in which parameters have other bytes.
    pub(super) fn fill_as(
        &self,
        bytes_of: impl Fn(&ParameterEntry) -> Range<usize>,
        offset: usize,
        mut place: &mut [u8],
        write: impl Fn(usize, &ParameterEntry, usize, &mut [u8]),
    ) {
        let mut at = offset;
        let mut take = |bytes: usize| {
            let bytes = bytes.min(place.len());
            let (part, rest) = std::mem::take(&mut place).split_at_mut(bytes);
            place = rest;
            part
        };
        let first = self.entries.partition_point(|entry| bytes_of(entry).end <= offset);
        for (number, entry) in self.entries.iter().enumerate().skip(first) {
            let bytes = bytes_of(entry);
            let gap = take(bytes.start.saturating_sub(at));
            gap.fill(0);
            at += gap.len();
            let part = take(bytes.end - at);
            if part.is_empty() {
                return;
            }
            write(number, entry, at - bytes.start, part);
            at += part.len();
        }
        take(usize::MAX).fill(0);
    }

    /// Returns the name of the parameter that holds byte `offset` of the region, or precedes it,
    /// and the byte's offset within it.
    pub(super) fn name_at(&self, offset: usize) -> (String, usize) {
        self.name_as(ParameterEntry::bytes, offset)
    }

    /// Returns the name like [`Region::name_at`], of a region in which parameters have other bytes.
    pub(super) fn name_as(&self, bytes_of: impl Fn(&ParameterEntry) -> Range<usize>, offset: usize) -> (String, usize) {
        match self.entries.partition_point(|entry| bytes_of(entry).start <= offset) {
            0 => ("padding".into(), offset),
            end => (self.entries[end - 1].name.clone(), offset - bytes_of(&self.entries[end - 1]).start),
        }
    }
}
