//! Guards behind tensors in checked mode: halves of words, of a pattern. They are written when a tensor is made, and compared when its
//! step ends.
//!
//! Invariant: a guard begins where its tensor ends, on any multiple of 2 bytes, which is what the smallest element has: BF16, as which the
//! halves are declared. They are written and read one by one, as bits, so what lies before the first is not touched.

use crate::contract;
use crate::vector::{load, store};
use cuda_std::prelude::*;
use half::bf16;

/// The half that guards hold.
pub const PATTERN: bf16 = bf16::from_bits(0xa5a5);

/// `guard` = [`PATTERN`]; `guard`: `[length]`. A half a thread.
#[kernel]
pub unsafe fn guard_write(guard: *mut bf16, length: usize) {
    let index = thread::index_1d() as usize;
    if index < length {
        // SAFETY: the half lies inside the guard, as just compared: `length` is the guard's, which the contract checks.
        unsafe { store(guard, index, PATTERN) };
    }
}

// SAFETY: a thread writes one half, and none beyond `length`, which is the length of `guard`. There are fewer than 2^32 halves, so no
// index comes twice.
contract! { unsafe guard_write { block: 64, align: 2 } |k| {
    Violation::unless_length("guard", k.length, k.guard.len())?;
    Violation::unless(k.length <= u32::MAX as usize, "length", "fewer than 2^32 halves", k.length)?;
    Grid::cover(k.length, 64)
}}

/// `found[place]` = the first half of `guard` that does not hold [`PATTERN`], or `guard.len()`; `guard`: `[length]`, `found`: `[places]`.
/// One thread.
#[kernel]
pub unsafe fn guard_check(guard: &[bf16], place: usize, found: *mut u32) {
    if thread::thread_idx_x() != 0 {
        return;
    }
    let mut index = 0;
    // SAFETY: the halves lie inside the guard, and `place` inside `found`, which the contract checks.
    unsafe {
        while index < guard.len() && load(guard, index).to_bits() == PATTERN.to_bits() {
            index += 1;
        }
        store(found, place, index as u32);
    }
}

// SAFETY: one thread reads halves of `guard`, none beyond its end. It writes one place, which `found` has.
contract! { unsafe guard_check { block: 32, align: 2 } |k| {
    Violation::unless(k.guard.len() <= u32::MAX as usize, "guard", "fewer than 2^32 halves", k.guard.len())?;
    Violation::unless(k.place < k.found.len(), "place", "a place inside `found`", k.place)?;
    Grid::new(1, 1, 1)
}}
