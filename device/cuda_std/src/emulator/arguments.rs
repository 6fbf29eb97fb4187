//! The tensors of a launch: the argument that an access belongs to, its bounds, and the shadow
//! cells of its elements.
//!
//! Invariant: an access belongs to the argument from whose pointer the kernel computed its address,
//! never to a neighbor that happens to lie there. Only arguments that a watched launch may write
//! have cells, because a read-only argument cannot race.

use super::bounds::Bounds;
use super::clock::Now;
use super::detector::Wrong;
use super::fault::{Kind, MemoryLocation};
use super::shadow::{Cell, Conflict};
use super::tally::{self, Bytes, Touched};
use crate::launch::{Entry, Extent, Words};
use std::ops::Range;
use std::sync::{Mutex, PoisonError};

/// The elements whose cells share a lock.
const STRIPE: usize = 1024;

/// The arguments of one launch, shared by its blocks.
pub(super) struct Arguments {
    /// The kernel's name, if accesses are counted.
    counted: Option<&'static str>,
    /// The reach of each argument, for fast lookup.
    pub(super) bounds: Bounds,
    /// The arguments, longest first, so that an empty argument never hides another one at the same
    /// address.
    arguments: Vec<Argument>,
}

struct Argument {
    name: &'static str,
    extent: Extent,
    /// The cells by stripe. An empty stripe has not been accessed. There are none if the launch is
    /// not watched, or only reads the argument.
    cells: Vec<Mutex<Vec<Cell>>>,
    /// The accessed bytes. None if nothing is counted.
    touched: Bytes,
}

/// The bytes that a thread is about to access.
#[derive(Clone, Copy)]
pub(super) struct Span {
    /// The pointer from which the kernel computes the address.
    pub(super) base: usize,
    /// The offset in bytes from there. It wraps for a negative index.
    pub(super) offset: usize,
    pub(super) bytes: usize,
}

impl Span {
    /// Returns the span of `count` elements from `index` on, for a kernel that computes from
    /// `base`.
    pub(super) fn new<T>(base: *const T, index: usize, count: usize) -> Self {
        let bytes = count.saturating_mul(size_of::<T>());
        Self { base: base as usize, offset: index.wrapping_mul(size_of::<T>()), bytes }
    }
}

impl Arguments {
    pub(super) fn new(entry: &Entry, words: &Words, watched: bool) -> Self {
        let counted = (watched && tally::is_on()).then_some(entry.name);
        let mut arguments: Vec<Argument> = (entry.pointers.iter().zip(words.extents()))
            .map(|(name, &extent)| {
                let stripes = if watched && extent.written { extent.length.div_ceil(STRIPE) } else { 0 };
                let touched = Bytes::of(counted.map_or(0, |_| extent.bytes()));
                Argument { name, extent, cells: (0..stripes).map(|_| Mutex::default()).collect(), touched }
            })
            .collect();
        arguments.sort_by_key(|argument| core::cmp::Reverse(argument.extent.bytes()));
        Self { counted, bounds: Bounds::new(words.extents()), arguments }
    }

    /// Returns Ok if an access stays inside its argument, otherwise the place that it accesses and
    /// the range that it may access.
    pub(super) fn inside(&self, span: Span, kind: Kind) -> Result<(), (MemoryLocation, Range<i64>)> {
        self.argument_of(span, kind).map(drop)
    }

    fn argument_of(&self, span: Span, kind: Kind) -> Result<&Argument, (MemoryLocation, Range<i64>)> {
        let address = span.base.wrapping_add(span.offset);
        let Some(argument) = self.of(span.base, kind) else {
            return Err((MemoryLocation::Address(address as u64), 0..0));
        };
        let start = address.wrapping_sub(argument.extent.address as usize);
        if start.checked_add(span.bytes).is_none_or(|end| end > argument.extent.bytes()) {
            // The first element outside.
            let end = argument.extent.address as usize + argument.extent.bytes();
            let outside = if argument.contains(address) { end } else { address };
            return Err((argument.place(outside), 0..argument.extent.length as i64));
        }
        Ok(argument)
    }

    /// True if `base` is a pointer of the launch, or points into an argument.
    pub(super) fn know(&self, base: usize) -> bool {
        self.of(base, Kind::Read).is_some()
    }

    /// Returns `address` as an element of the nearest argument, if there is any.
    pub(super) fn nearest(&self, address: usize) -> Option<MemoryLocation> {
        let distance = |argument: &&Argument| {
            let start = argument.extent.address as usize;
            start.saturating_sub(address).max(address.saturating_sub(start + argument.extent.bytes()))
        };
        let full = self.arguments.iter().filter(|argument| argument.extent.bytes() > 0);
        full.min_by_key(distance).map(|argument| argument.place(address))
    }

    /// Records an access, or returns its fault.
    pub(super) fn touch(&self, span: Span, kind: Kind, now: &Now<'_>) -> Result<(), Wrong> {
        let argument = self.argument_of(span, kind).map_err(|(place, bounds)| Wrong::Outside { place, bounds })?;
        let address = span.base.wrapping_add(span.offset);
        argument.touched.touch(address - argument.extent.address as usize, span.bytes);
        // Several arguments may refer to the same memory. Its cells belong to the argument that may
        // be written.
        let Some(written) = self.arguments.iter().find(|argument| argument.is_written_at(address)) else {
            return Ok(());
        };
        let first = (address - written.extent.address as usize) / written.extent.element_bytes;
        let last = (address + span.bytes - 1 - written.extent.address as usize) / written.extent.element_bytes;
        written.touch(first..last + 1, kind, now).map_err(|(element, conflict)| {
            let place = MemoryLocation::Argument { name: argument.name, element: element as i64 };
            Wrong::Conflict { place, conflict }
        })
    }

    /// Returns the argument whose pointer is `base`, otherwise the one into which `base` points.
    fn of(&self, base: usize, kind: Kind) -> Option<&Argument> {
        let mut able = self.arguments.iter().filter(|argument| kind == Kind::Read || argument.extent.written);
        let inside = able.clone().find(|argument| argument.contains(base));
        able.find(|argument| argument.extent.address as usize == base).or(inside)
    }
}

impl Drop for Arguments {
    fn drop(&mut self) {
        if let Some(kernel) = self.counted {
            let full = self.arguments.iter().filter(|argument| argument.extent.length > 0);
            let arguments = full.map(|argument| (argument.name, argument.touched.count())).collect();
            tally::note(Touched { kernel, arguments });
        }
    }
}

impl Argument {
    /// Returns the element at an address, inside the argument or not.
    fn place(&self, address: usize) -> MemoryLocation {
        let bytes = address.wrapping_sub(self.extent.address as usize) as i64;
        MemoryLocation::Argument { name: self.name, element: bytes.div_euclid(self.extent.element_bytes.max(1) as i64) }
    }

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
