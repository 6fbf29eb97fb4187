//! Blocks of pinned host memory for callers, both held and spare.
//!
//! `page_copies` decides when a block is written, copied from and reused. Invariant: a block is
//! held or spare, and its memory and its fence have the same lifetime.

#![forbid(unsafe_code)]

use super::deferred_free::DeferredFree;
use super::ring::Slot;
use std::collections::BTreeMap;

/// The most bytes that are kept for later requests. Beyond this, the block that was returned first
/// is freed.
pub(super) const MOST_SPARE_BYTES: usize = 512 << 20;

/// The copies from a block that the device may still have to make.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Copies {
    None,
    /// All copies come before the block's fence.
    BeforeFence,
    /// The call that would have reported the state failed.
    Unknown,
}

/// A block of pinned memory.
#[derive(Clone, Copy, Debug)]
pub(super) struct Block {
    pub(super) slot: Slot,
    pub(super) bytes: usize,
    pub(super) copies: Copies,
}

/// The blocks of a device.
#[derive(Debug, Default)]
pub(super) struct Pages {
    /// The held blocks, by address.
    pub(super) held: BTreeMap<u64, Block>,
    /// The spare blocks, in the order in which they were returned.
    pub(super) spare: Vec<Block>,
}

impl Pages {
    /// Returns the block that contains these bytes. Zero bytes are in no block, because another
    /// block may begin at their end.
    pub(super) fn around(&mut self, bytes: &[u8]) -> Option<&mut Block> {
        let start = bytes.first().map(std::ptr::from_ref)? as u64;
        let (&address, block) = self.held.range_mut(..=start).next_back()?;
        let end = (start - address).checked_add(bytes.len() as u64)?;
        (end <= block.bytes as u64).then_some(block)
    }

    /// Returns all blocks for freeing. None of them is held.
    pub(super) fn into_retired(self) -> impl Iterator<Item = DeferredFree> {
        self.spare.into_iter().map(Block::retired)
    }
}

impl Block {
    pub(super) fn retired(self) -> DeferredFree {
        DeferredFree::Slot { slot: self.slot, bytes: self.bytes }
    }
}
