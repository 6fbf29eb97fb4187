//! Guards behind tensors in checked mode: words of a pattern. They are written when a tensor is made, and compared when its step ends.
//!
//! Invariant: a guard is written and read word by word, so it may start behind a tensor of any length.

use crate::contract;
use crate::vector::{load, store};
use cuda_std::prelude::*;

/// The word that guards hold.
pub const PATTERN: u32 = 0xa5a5_a5a5;

/// `block[start..]` = [`PATTERN`]; `block`: `[length]`. A word a thread.
#[kernel]
pub unsafe fn guard_write(block: *mut u32, length: usize, start: usize) {
    let index = start + thread::index_1d() as usize;
    if index < length {
        // SAFETY: the word lies inside the block, as just compared: `length` is the block's, which the contract checks.
        unsafe { store(block, index, PATTERN) };
    }
}

// SAFETY: a thread writes one word from `start` on, and none beyond `length`, which is the length of `block`. There are fewer than 2^32
// words, so no index comes twice.
contract! { unsafe guard_write { block: 64, align: 4 } |k| {
    Violation::unless_length("block", k.length, k.block.len())?;
    Violation::unless(k.start <= k.length, "start", "a place inside the block", k.start)?;
    let behind = Size::of(k.length).less(k.start);
    Violation::unless(behind.at_most(u32::MAX as usize), "start", "fewer than 2^32 words behind it", k.start)?;
    Grid::cover(behind, 64)
}}

/// `found[place]` = the first word of `block[start..]` that does not hold [`PATTERN`], or `block.len()`; `block`: `[length]`,
/// `found`: `[places]`. One thread.
#[kernel]
pub unsafe fn guard_check(block: &[u32], start: usize, place: usize, found: *mut u32) {
    if thread::thread_idx_x() != 0 {
        return;
    }
    let mut index = start;
    // SAFETY: the words lie inside the block, and `place` inside `found`, which the contract checks.
    unsafe {
        while index < block.len() && load(block, index) == PATTERN {
            index += 1;
        }
        store(found, place, index as u32);
    }
}

// SAFETY: one thread reads words of `block` from `start` on, none beyond its end. It writes one place, which `found` has.
contract! { unsafe guard_check { block: 32, align: 4 } |k| {
    Violation::unless(k.start <= k.block.len(), "start", "a place inside the block", k.start)?;
    Violation::unless(k.block.len() <= u32::MAX as usize, "block", "fewer than 2^32 words", k.block.len())?;
    Violation::unless(k.place < k.found.len(), "place", "a place inside `found`", k.place)?;
    Grid::new(1, 1, 1)
}}
