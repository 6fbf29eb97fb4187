//! Page-locked host memory of callers: what a block is, and which are held or spare.
//!
//! `page_copies` says when one is written, copied from and handed out again. Invariant: a block is held or spare, and its memory and its fence
//! live and end together.

#![forbid(unsafe_code)]

use super::retired::Retired;
use super::ring::Slot;
use std::collections::BTreeMap;

/// Bytes that are kept for those who ask next; beyond, what was given back first is freed.
pub(super) const MOST_SPARE_BYTES: usize = 512 << 20;

/// Copies from a block that the device may still have to make.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Copies {
    None,
    /// All before the block's fence.
    BeforeFence,
    /// The call that would have told failed.
    Unknown,
}

/// A block.
#[derive(Clone, Copy, Debug)]
pub(super) struct Block {
    pub(super) slot: Slot,
    pub(super) bytes: usize,
    pub(super) copies: Copies,
}

/// The blocks of a device.
#[derive(Debug, Default)]
pub(super) struct Pages {
    /// By address.
    pub(super) held: BTreeMap<u64, Block>,
    /// In the order in which they were given back.
    pub(super) spare: Vec<Block>,
}

impl Pages {
    /// The block in which these bytes lie. No bytes lie in none: where they end, another block may
    /// begin.
    pub(super) fn around(&mut self, bytes: &[u8]) -> Option<&mut Block> {
        let start = bytes.first().map(std::ptr::from_ref)? as u64;
        let (&address, block) = self.held.range_mut(..=start).next_back()?;
        let end = (start - address).checked_add(bytes.len() as u64)?;
        (end <= block.bytes as u64).then_some(block)
    }

    /// All of it, to be given back: nobody holds any.
    pub(super) fn into_retired(self) -> impl Iterator<Item = Retired> {
        self.spare.into_iter().map(Block::retired)
    }
}

impl Block {
    pub(super) fn retired(self) -> Retired {
        Retired::Slot { slot: self.slot, bytes: self.bytes }
    }
}
