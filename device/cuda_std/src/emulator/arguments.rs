//! The tensors that a launch was given: which of them an access means, where it ends, and what its elements remember.
//!
//! Invariant: an access belongs to the argument from whose pointer the kernel computed its address, never to a neighbour
//! that happens to lie there. Only what the launch may write has cells; what is read alone cannot race.

use super::clock::Now;
use super::detector::Wrong;
use super::fault::{Kind, Place};
use super::shadow::{Cell, Conflict};
use crate::launch::{Entry, Extent, Words};
use std::ops::Range;
use std::sync::{Mutex, PoisonError};

/// Elements whose cells share a lock.
const STRIPE: usize = 1024;

/// The arguments of one launch, shared by its blocks.
pub(super) struct Arguments {
    /// The longest first, so that an empty one never stands for another at the same address.
    arguments: Vec<Argument>,
}

struct Argument {
    name: &'static str,
    extent: Extent,
    /// By stripe; empty stripes have not been touched. None at all for what the launch only reads.
    cells: Vec<Mutex<Vec<Cell>>>,
}

/// The bytes that a thread is about to touch.
#[derive(Clone, Copy)]
pub(super) struct Span {
    /// The pointer that the kernel computes with.
    pub(super) base: usize,
    /// Bytes from there; wraps where an index is negative.
    pub(super) offset: usize,
    pub(super) bytes: usize,
}

impl Arguments {
    pub(super) fn new(entry: &Entry, words: &Words) -> Self {
        let mut arguments: Vec<Argument> = (entry.pointers.iter().zip(words.extents()))
            .map(|(name, &extent)| {
                let stripes = if extent.written { extent.length.div_ceil(STRIPE) } else { 0 };
                Argument { name, extent, cells: (0..stripes).map(|_| Mutex::default()).collect() }
            })
            .collect();
        arguments.sort_by_key(|argument| core::cmp::Reverse(argument.extent.bytes()));
        Self { arguments }
    }

    /// Notes an access, or says what is wrong with it.
    pub(super) fn touch(&self, span: Span, kind: Kind, now: &Now<'_>) -> Result<(), Wrong> {
        let Span { base, offset, bytes } = span;
        let address = base.wrapping_add(offset);
        let Some(argument) = self.of(base, kind) else {
            return Err(Wrong::Outside { place: Place::Address(address as u64), bounds: 0..0 });
        };
        let extent = &argument.extent;
        let start = address.wrapping_sub(extent.address as usize);
        if start.checked_add(bytes).is_none_or(|end| end > extent.bytes()) {
            let element = (start as i64).div_euclid(extent.element_bytes as i64);
            let place = Place::Argument { name: argument.name, element };
            return Err(Wrong::Outside { place, bounds: 0..extent.length as i64 });
        }
        // Several arguments may name the same memory; its cells are those of the one that may be written.
        let Some(written) = self.arguments.iter().find(|argument| argument.is_written_at(address)) else {
            return Ok(());
        };
        let first = (address - written.extent.address as usize) / written.extent.element_bytes;
        let last = (address + bytes - 1 - written.extent.address as usize) / written.extent.element_bytes;
        written.touch(first..last + 1, kind, now).map_err(|(element, conflict)| {
            let place = Place::Argument { name: argument.name, element: element as i64 };
            Wrong::Conflict { place, conflict }
        })
    }

    /// The argument whose pointer `base` is, or into which it points.
    fn of(&self, base: usize, kind: Kind) -> Option<&Argument> {
        let mut able = self.arguments.iter().filter(|argument| kind == Kind::Read || argument.extent.written);
        let inside = able.clone().find(|argument| argument.contains(base));
        able.find(|argument| argument.extent.address as usize == base).or(inside)
    }
}

impl Argument {
    fn contains(&self, address: usize) -> bool {
        address.wrapping_sub(self.extent.address as usize) < self.extent.bytes()
    }

    fn is_written_at(&self, address: usize) -> bool {
        self.extent.written && self.contains(address)
    }

    fn touch(&self, elements: Range<usize>, kind: Kind, now: &Now<'_>) -> Result<(), (usize, Conflict)> {
        let mut element = elements.start;
        while element < elements.end {
            let (stripe, first) = (element / STRIPE, element % STRIPE);
            let count = (elements.end - element).min(STRIPE - first);
            let mut cells = self.cells[stripe].lock().unwrap_or_else(PoisonError::into_inner);
            if cells.is_empty() {
                cells.resize(STRIPE, Cell::default());
            }
            for (at, cell) in cells[first..first + count].iter_mut().enumerate() {
                cell.touch(kind, now).map_err(|conflict| (element + at, conflict))?;
            }
            element += count;
        }
        Ok(())
    }
}
